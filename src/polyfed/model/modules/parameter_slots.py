"""Runs modules on the tensors of a Tree.

`Slots` knows where the modules of a model hold the tensor of each name: in which dictionary (such as `_parameters`) of
which module, and under which key. During a call, `Slots` puts the Tree's tensors in these places.
`torch.func.functional_call` does the same for one module. `Slots` does it for several blocks at once, at the cost of
one dictionary write per tensor. `Slots` needs no root module around the blocks. The attributes of a root module could
clash with the names of modalities.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.errors import ModelError
from polyfed.core.tree import Tree, memory_of
from polyfed.model.modules.layers import BatchNorm

_Holder = dict[str, Any]  # a module's own dictionary of parameters or buffers
_Place = tuple[_Holder, str]


Naming = Callable[[str], str]
"""`naming(path)` returns a tensor's name in the Tree. `path` is the block's name, a dot and the path in its module."""


def as_it_is(path: str) -> str:
    """Return the path unchanged. A model with one module for each block names its tensors in this way."""
    return path


IN_PLACE = (
    "Change a floating-point buffer that register_buffer(...) saves with the module, and change it in place, as in "
    "self.ema.mul_(0.9).add_(0.1 * h)"
)
"""The cure for a module that keeps a state in another way."""


class Slots:
    """Knows the module and the key that hold each parameter and float buffer of the given blocks.

    The modules can run on the tensors of a Tree instead of their own tensors. Constants are an exception: no Tree holds
    them, and the modules always use their own. A parameter is a constant if it is frozen (`requires_grad=False`). A
    buffer is a constant if it is not saved with the module or is not floating point. A buffer is also a constant if the
    encoder keeps the buffer's module in evaluation mode.

    Args:
        blocks: the module of each block. The path of a tensor is the name of its block, followed by the path of the
            tensor in the block's module.
        naming: a function that gets the path of a tensor and returns the name of the tensor in a Tree.

    Attributes:
        parameters: names of the parameters.
        buffers: names of the buffers.
        device: device of the modules.

    Raises:
        ModelError: a frozen parameter shares its memory with a parameter that trains.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], naming: Naming = as_it_is) -> None:
        self._naming = naming
        self._modules = tuple(blocks.values())
        self._layers = {path: m for name, block in blocks.items() for path, m in block.named_modules(prefix=name)}
        self._places: dict[str, list[_Place]] = {}
        self._frozen: dict[str, _Place] = {}
        self._moving: set[str] = set()
        self._constants: dict[str, _Place] = {}
        self._names: dict[int, str] = {}
        self.parameters: set[str] = set()
        self.buffers: set[str] = set()
        for path, module in self._layers.items():
            self._enter(path, module)
        self._refuse_shared()
        self.device = torch.device("cpu")

    def _enter(self, path: str, module: nn.Module) -> None:
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, place = self._named(parameter, f"{path}.{key}"), (module._parameters, key)
            if parameter.requires_grad:
                self._places.setdefault(name, []).append(place)
                self.parameters.add(name)
            else:
                self._frozen[name] = place
        saved = module._buffers.keys() - module._non_persistent_buffers_set if module.training else ()
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            name = self._named(buffer, f"{path}.{key}")
            if key in saved and buffer.is_floating_point():
                self._places.setdefault(name, []).append((module._buffers, key))
                self.buffers.add(name)
                if not isinstance(module, BatchNorm):  # which changes its buffers in training mode only
                    self._moving.add(name)
            else:
                self._constants[name] = (module._buffers, key)

    def _named(self, tensor: Tensor, name: str) -> str:
        """Return the name of a tensor. If two modules share the tensor, both use the name from the first module."""
        return self._names.setdefault(id(tensor), self._naming(name))

    def _refuse_shared(self) -> None:
        """Refuse a frozen parameter that shares its memory with a parameter that trains.

        Training in place would change the frozen parameter, but training on a Tree would not.
        """
        trained = {memory_of(self.own(name)) for name in self.parameters}
        for name, value in self.frozen.items():
            if value.numel() and memory_of(value) in trained:
                raise ModelError(
                    f"{name} is frozen and shares its memory with a parameter that trains. To tie the two, assign the "
                    "same nn.Parameter to both places; to keep this one as it is, give it a copy: `.detach().clone()`."
                )

    @property
    def names(self) -> tuple[str, ...]:
        """All names, block by block, in the order of the modules."""
        return tuple(self._places)

    def has(self, name: str) -> bool:
        """Whether a module has a place for this name."""
        return name in self._places

    def fit(self, w: Mapping[str, Tensor]) -> bool:
        """Whether all tensors of a Tree have the shapes of the modules' own tensors."""
        return all(self.own(name).shape == value.shape for name, value in w.items() if name in self._places)

    def own(self, name: str) -> Tensor:
        """The module's own tensor of this name."""
        holder, key = self._places[name][0]
        tensor: Tensor = holder[key]
        return tensor

    @property
    def frozen(self) -> Tree:
        """Return the frozen parameters by name."""
        return {name: holder[key].detach() for name, (holder, key) in self._frozen.items()}

    @property
    def constants(self) -> Tree:
        """Return the constant buffers by name."""
        return {name: holder[key].detach() for name, (holder, key) in self._constants.items()}

    def refuse_new(self, w: Mapping[str, Tensor]) -> None:
        """Refuse a module whose `forward` has put another tensor in the place of a buffer of `w`.

        Raises:
            ModelError: a place holds another tensor than the one of `w`. The text names the buffer.
        """
        for name in self.buffers:
            if name in w and any(holder[key] is not w[name] for holder, key in self._places[name]):
                raise ModelError(
                    f"{name}: forward() assigns a new tensor to this buffer, and polyfed would lose its value. "
                    + IN_PLACE
                )

    def held(self) -> list[Tensor]:
        """Return all parameters and buffers of the modules."""
        return [tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers())]

    def layers(self) -> dict[str, nn.Module]:
        """Return all modules at any depth by path."""
        return self._layers

    def place(self, device: torch.device) -> None:
        """Move the modules and their constants to `device`, where the tensors of the next calls are."""
        if device != self.device:
            # a call inside `grad` would otherwise leave wrapped tensors in the modules
            with torch._C._DisableFuncTorch():
                for module in self._modules:
                    module.to(device)
            self.device = device

    @contextmanager
    def constants_in_float64(self) -> Iterator[None]:
        """Inside the `with` block, the modules' floating-point constants are float64."""
        saved: list[tuple[_Holder, str, Tensor]] = []
        made: dict[int, Tensor] = {}
        moving = {(id(holder), key) for places in self._places.values() for holder, key in places}
        try:
            for module in self._layers.values():
                for holder in (module._parameters, module._buffers):
                    for key, value in list(holder.items()):
                        if value is None or not value.is_floating_point() or (id(holder), key) in moving:
                            continue
                        saved.append((holder, key, value))
                        holder[key] = made.setdefault(id(value), value.detach().double())
            yield
        finally:
            for holder, key, value in saved:
                holder[key] = value

    @contextmanager
    def bound(self, w: Mapping[str, Tensor], *, evaluation: bool = False) -> Iterator[None]:
        """Inside the `with` block, the modules run on the tensors of `w` instead of their own.

        Args:
            w: the Tree.
            evaluation: whether `forward` works on copies of the buffers that it may change, so that `w` stays the same.

        Raises:
            ModelError: see `refuse_new`.
        """
        if evaluation and self._moving:
            w = {**w, **{name: w[name].clone() for name in self._moving if name in w}}
        saved: list[tuple[_Holder, str, Tensor]] = []
        try:
            for name, value in w.items():
                # names that no module has belong to the method, which reads them directly from the Tree
                for holder, key in self._places.get(name, ()):
                    saved.append((holder, key, holder[key]))
                    holder[key] = value
            yield
            self.refuse_new(w)
        finally:
            for holder, key, value in reversed(saved):
                holder[key] = value
