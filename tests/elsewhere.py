"""A device that is not there: finds tensors of the CPU among those of an accelerator, on a machine that has none.

`Elsewhere` is a tensor that says it lives on `DEVICE` and keeps its numbers in a tensor of the CPU. While `elsewhere()`
lasts, tensors get there and back as they do with CUDA (factories and `.to` with the device, `.cpu()`, `.tolist()`), all
arithmetic is the CPU's, and an operation in which tensors of both places meet is refused as CUDA refuses it:

- a tensor of the CPU without dimensions may join an elementwise operation, where it is only read;
- `copy_` takes from anywhere; a tensor elsewhere may be indexed by tensors of the CPU, not the other way round;
- everything else wants all its tensors in one place, and NumPy sees none of those elsewhere.

So a run there equals the run on the CPU bit for bit, or it stops at the line at which a GPU would. What it cannot show:

- numbers of another device's kernels, their order of summation, what is missing or not deterministic among them;
- memory, streams, speed, several devices of a kind, and what other processes do;
- choices by kind of device, in PyTorch or here: it says `lazy`, which autograd serves in the thread that calls. (The
  vectorised engine stacks convolutions there, so such a run differs from the CPU's in rounding.)
- how safetensors reads onto a device: `elsewhere` has it read onto the CPU and moves the tensors from there.

`Tensor.new_tensor` gives a tensor of the CPU here: that mismatch is this module's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyfed.algorithms.knowledge.second_model import cached_model

DEVICE = torch.device("lazy")
_CPU = torch.device("cpu")

_aten = torch.ops.aten
_COPIES = {_aten.copy_, _aten._to_copy, _aten._foreach_copy_}
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index, _aten._unsafe_index_put}
_FILLS = {_aten.fill, _aten.fill_, _aten.masked_fill, _aten.masked_fill_}
_NO_SCALARS = {_aten.clamp, _aten.clamp_}
"""Elementwise, and yet CUDA wants even what has no dimensions on the device."""


class Elsewhere(Tensor):
    """A tensor on `DEVICE`; `held` has its numbers."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # results keep their own type: `.cpu()` is a Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Elsewhere":
        """`held`, as if it were on `DEVICE`."""
        form = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        # kernels and autograd are looked up under the CPU's keys, only `.device` is asked of `__torch_dispatch__`
        made = Tensor._make_wrapper_subclass(cls, held.shape, **form, device="cpu", dispatch_device=True)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any operation on such a tensor."""
        return _run(op, args, kwargs or {})

    def tolist(self) -> Any:
        """PyTorch refuses it for every subclass; CUDA copies to the host first."""
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Refused in CUDA's words."""
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first")

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Also inside `torch.func`: a parameter that `Module.to` moves becomes a new one here, and that takes this."""
        with temporarily_clear_interpreter_stack():
            return super().requires_grad_(requires_grad)

    def __repr__(self) -> str:
        """For a failing test's text."""
        return f"Elsewhere({self.held})"


class _Mode(TorchDispatchMode):
    """Sees what names the device without a tensor that is there already: factories, and the way to it."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


@contextmanager
def elsewhere(*, in_workers: bool = False) -> Iterator[torch.device]:
    """`DEVICE` is there while the block runs. With `in_workers`, only worker processes train on it, as on two GPUs."""

    def load(path: Path, device: str) -> dict[str, Tensor]:
        return {name: value.to(device) for name, value in load_file(path).items()}

    # torch.tensor(..., device=...) then makes its tensor on the CPU and moves it, where `_Mode` sees the move
    torch._C._set_only_lift_cpu_tensors(True)
    # Module.to would put a tensor's memory under the parameter there is, and in a subclass there is none of its own
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _Mode(), ExitStack() as whatever_the_recipe_says:

            def put(place: str, value: Any) -> None:
                whatever_the_recipe_says.enter_context(patch(f"polyfed.experiment.{place}", value))

            own, gpus = (_CPU, (DEVICE, DEVICE)) if in_workers else (DEVICE, ())
            put("running.assembly.device_of", lambda recipe: own)
            put("recipes.engine_choice.device_of", lambda recipe: own)
            put("recipes.engine_choice.gpus_of", lambda recipe: gpus)
            put("running.checkpoint.load_file", load)
            yield DEVICE
    finally:
        cached_model.cache_clear()  # modules that were there would be of no use here
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch._C._set_only_lift_cpu_tensors(False)


def _run(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operation on the CPU; its results are where it took place, or where it was told to bring them."""
    if op is torch.ops.prim.device.default:
        return DEVICE
    given: dict[int, Elsewhere] = {}
    here: list[Tensor] = []

    def unwrapped(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Elsewhere):
            here.append(tensor)
            return tensor
        given[id(tensor.held)] = tensor
        return tensor.held

    inner = _mapped(unwrapped, args)
    named = {name: _mapped(unwrapped, value) for name, value in kwargs.items()}
    if given and here:
        _refuse_mixture(op, args, kwargs)
    there = bool(given)
    if named.get("device") is not None:
        there = torch.device(named["device"]).type == DEVICE.type
        named["device"] = "cpu" if there else named["device"]
    found = op(*inner, **named)
    # an operation in place gives back the tensor that it was given
    return (
        _mapped(lambda tensor: given[id(tensor)] if id(tensor) in given else Elsewhere(tensor), found)
        if there
        else found
    )


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`function` of every tensor in what operations take and give: single, or in lists."""
    if isinstance(value, Tensor):
        return function(value)
    return type(value)(_mapped(function, part) for part in value) if type(value) in (list, tuple) else value


def _refuse_mixture(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what CUDA refuses.

    Raises:
        RuntimeError: tensors of both places meet.
    """
    family = op.overloadpacket
    if family in _COPIES:
        return
    scalars = family in _FILLS or (torch.Tag.pointwise in op.tags and family not in _NO_SCALARS)
    indexed = family in _INDEXED
    for place, argument in enumerate(op._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)):
            index = indexed and argument.name == "indices" and isinstance(args[0], Elsewhere)
            scalar = tensor.dim() == 0 and not written and (scalars or (indexed and argument.name == "values"))
            if not (isinstance(tensor, Elsewhere) or index or scalar):
                tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
                validator = ", ".join(f"{tensor.device.type}{list(tensor.shape)}" for tensor in tensors)
                raise RuntimeError(f"Expected all tensors to be on the same device: {op} of {validator}")
