"""Running modules on the tensors of a Tree.

`Slots` knows, for every name of a model, which dictionary entries of which modules hold its tensor, and puts
others there for the duration of a call. `torch.func.functional_call` does the same for one module; doing it
here serves any set of blocks in one pass, costs a dictionary write per tensor, and needs no root module whose
attributes a modality name could collide with.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_Holder = dict[str, Any]  # a module's own dictionary of parameters or buffers


class Slots:
    """The places of the parameters and float buffers of some blocks.

    Buffers that are not saved with a module, or not floating point, are its constants: they are in no Tree.

    Args:
        blocks: block name -> module; the names of the Tree are `block.path`.

    Attributes:
        parameters: names of the parameters, block by block.
        buffers: names of the buffers.
        device: where the modules are.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self._modules = tuple(blocks.values())
        self._places: dict[str, list[tuple[_Holder, str]]] = {}
        self._names: dict[int, str] = {}
        self.parameters: set[str] = set()
        self.buffers: set[str] = set()
        for block, module in blocks.items():
            for path, sub in module.named_modules(prefix=block):
                self._enter(path, sub)
        self.device = torch.device("cpu")

    def _enter(self, path: str, module: nn.Module) -> None:
        keep = {n for n in module._buffers if n not in module._non_persistent_buffers_set}
        for holder, group in ((module._parameters, self.parameters), (module._buffers, self.buffers)):
            for key, tensor in holder.items():
                if tensor is None or (group is self.buffers and not (key in keep and tensor.is_floating_point())):
                    continue
                # a tensor that two modules share has one name and two places
                name = self._names.setdefault(id(tensor), f"{path}.{key}")
                self._places.setdefault(name, []).append((holder, key))
                group.add(name)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, block by block, in the order of the modules."""
        return tuple(self._places)

    def has(self, name: str) -> bool:
        """Whether a module has a place for this name."""
        return name in self._places

    def own(self, name: str) -> Tensor:
        """The tensor that the module itself holds."""
        holder, key = self._places[name][0]
        tensor: Tensor = holder[key]
        return tensor

    def place(self, device: torch.device) -> None:
        """Moves the modules, and with them their constants, to the device of the trees they run on."""
        if device != self.device:
            # the first call may come from inside `grad`, which would leave its own wrappers in the modules
            with torch._C._DisableFuncTorch():
                for module in self._modules:
                    module.to(device)
            self.device = device

    @contextmanager
    def bound(self, w: Mapping[str, Tensor]) -> Iterator[None]:
        """The modules run on the tensors of `w` while the block runs, and on their own again afterwards."""
        saved: list[tuple[_Holder, str, Tensor]] = []
        try:
            for name, value in w.items():
                # a name that no module knows is an algorithm's own: it reads it from the Tree itself
                for holder, key in self._places.get(name, ()):
                    saved.append((holder, key, holder[key]))
                    holder[key] = value
            yield
        finally:
            for holder, key, value in reversed(saved):
                holder[key] = value
