"""`Named`: the meaning of the names in a model's Tree."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.model.modules.parameter_slots import Slots


class Named:
    """The names of a model's parameters and buffers, and their groups. `Model` extends this class.

    Attributes:
        modalities: the modalities that the model reads, in order.
    """

    modalities: tuple[str, ...]
    _slots: Slots

    @property
    def template(self) -> Tree:
        """A Tree of all names, with shapes and types but without values (device `meta`)."""
        return {name: torch.empty_like(self._slots.own(name), device="meta") for name in self._slots.names}

    def names(self, modalities: Iterable[str]) -> tuple[str, ...]:
        """Names in the blocks of these modalities and in the shared block, in model order."""
        wanted = {*modalities, SHARED}
        return tuple(name for name in self._slots.names if block_of(name) in wanted)

    def head_slice(self, modality: str) -> tuple[str, ...]:
        """Names of the modality's part of the first fusion layer. Empty if the fusion is `sum` or `attention`."""
        return tuple(name for name in self._slots.names if name.startswith(f"{modality}.fusion."))

    def head(self, modalities: Iterable[str] | None = None) -> tuple[str, ...]:
        """Names of tensors after the encoders: the shared ones, and those of these modalities (default: all)."""
        parts = {n for m in (self.modalities if modalities is None else modalities) for n in self.head_slice(m)}
        return tuple(name for name in self._slots.names if name in parts or block_of(name) == SHARED)

    def is_buffer(self, name: str) -> bool:
        """Whether a name is a buffer, such as a BatchNorm statistic, and not a parameter."""
        return name in self._slots.buffers

    def trainable(self, w: Mapping[str, Tensor]) -> Tree:
        """Return the entries of a Tree that are parameters. Entries that are buffers are left out."""
        return {name: value for name, value in w.items() if name not in self._slots.buffers}

    def num_parameters(self, modalities: Iterable[str] | None = None) -> int:
        """Number of trainable parameters of a client with these modalities (default: all)."""
        names = self.names(self.modalities if modalities is None else modalities)
        return sum(self._slots.own(name).numel() for name in names if not self.is_buffer(name))

    @property
    def frozen(self) -> Tree:
        """The frozen parameters (`requires_grad=False`). They are constants, and no other Tree contains them."""
        return self._slots.frozen

    @property
    def constants(self) -> Tree:
        """The buffers that no Tree contains: see `Slots`."""
        return self._slots.constants

    @property
    def unsent(self) -> Tree:
        """The frozen parameters and the constant buffers, which every device must make for itself."""
        return {**self.frozen, **self.constants}

    def held(self) -> list[Tensor]:
        """Return all parameters and buffers that the modules themselves hold, including the frozen parameters."""
        return self._slots.held()

    def layers(self) -> dict[str, nn.Module]:
        """Return all modules at any depth, by the path of the module, which begins with the name of its block."""
        return self._slots.layers()
