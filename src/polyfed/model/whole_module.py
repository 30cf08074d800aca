"""The user's own whole `torch.nn.Module` as the model of a run.

The module receives all modalities at once with `forward(x, present)`, and returns the logits:

- `x`: modality -> samples (B, ...). Every modality has an entry; a row that lacks a modality has zeros.
- `present`: modality -> bool (B,), whether each row has it.

For each modality, `[model.blocks]` lists prefixes of parameter names. Parameters with these prefixes belong to the
block of this modality. All other parameters belong to the block `shared`. A client has only the blocks of its own
modalities. The logits of a row must therefore not depend on the block of a modality that the row lacks. polyfed checks
this before the run.

A module can also have embeddings. It then has two methods, and an attribute `embedding`, which is the width E of the
embeddings. `encode(modality, x)` returns an embedding (B, E). `fuse(z, present)` returns the logits for a dict of
embeddings. polyfed calls these two methods instead of `forward`, and algorithms that work with embeddings can train the
module.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.model.encoders.spec import Shape
from polyfed.model.fusion import Features, Fusion, Parts, masked
from polyfed.model.model import Block, Model
from polyfed.model.modules.layer_replacement import adopt
from polyfed.model.modules.layers import Rows
from polyfed.model.modules.seeded_modules import made
from polyfed.model.spec import ModelSpec
from polyfed.model.trial_calls import check_trial_calls
from polyfed.model.user_classes import called, described, found
from polyfed.model.whole_module_checks import (
    WHERE,
    check_blocks,
    check_logits,
    check_methods,
    check_modalities,
    name_of,
)

_FORM = "def __init__(self, shapes, num_outputs), with the keys of module_options as more arguments"


class WholeFusion(Fusion):
    """Uses the user's module as the fusion of a model.

    A fusion normally receives the embeddings of all modalities. If the module has no embeddings, this fusion receives
    the samples themselves.

    Args:
        shapes: sample shape of each modality, in the model's order.

    Attributes:
        encodes: whether the module has embeddings.
    """

    def __init__(self, module: nn.Module, shapes: Mapping[str, Shape]) -> None:
        nn.Module.__init__(self)
        self.module, self.shapes = module, dict(shapes)
        self.encodes = all(hasattr(module, name) for name in ("encode", "fuse", "embedding"))
        self.embedding = int(module.embedding) if self.encodes else 0  # type: ignore[arg-type]
        self.sizes, self.joint_size, self.head = (), 0, nn.Sequential()

    @override
    def joint(self, parts: Parts, z: Features, present: Features) -> Tensor:
        """Return the logits (B, C); see `Fusion.joint`."""
        first = next(iter(z.values()))
        rows = first.shape[0]
        full, mask = masked(z, present), dict(present)
        for m, shape in self.shapes.items():
            if m not in z:
                full[m] = first.new_zeros(rows, *((self.embedding,) if self.encodes else shape))
                mask[m] = torch.zeros(rows, dtype=torch.bool, device=first.device)
            elif m not in present:
                mask[m] = torch.ones(rows, dtype=torch.bool, device=first.device)
        call = self.module.fuse if self.encodes else self.module
        return call({m: full[m] for m in self.shapes}, {m: mask[m] for m in self.shapes})  # type: ignore[operator, no-any-return]


class WholeModel(Model):
    """The model of a whole module; see `Model`. `build_whole` makes it."""

    def __init__(
        self,
        shared: Callable[[], WholeFusion],
        rows: Rows,
        shapes: Mapping[str, Shape],
        read: Sequence[str],
        num_outputs: int,
        key: int,
        naming: Callable[[str], str],
    ) -> None:
        blocks = {name: lambda: Block(nn.Identity(), None) for name in read}
        super().__init__(blocks, shared, rows, shapes, num_outputs, key, naming)
        assert isinstance(self._fusion, WholeFusion)
        for name in self._slots.parameters:  # `forward` also uses parameters of a block that a client lacks
            self._slots.own(name).requires_grad_(False)
        several = len(self.modalities) > 1  # otherwise every Tree has all blocks
        self._initial = {n: self._slots.own(n).clone() for n in self._slots.names if several and block_of(n) != SHARED}
        self.has_embeddings = self._fusion.encodes
        if self.has_embeddings:
            encode: Any = self._fusion.module.encode
            self._encoders = {name: partial(encode, name) for name in read}

    @override
    def init(self, key: int) -> Tree:
        return super().init_block(SHARED, key)

    @override
    def init_block(self, block: str, key: int) -> Tree:
        return {name: value for name, value in self.init(key).items() if block_of(name) == block}

    @contextmanager
    @override
    def live(self, w: Mapping[str, Tensor]) -> Iterator[Tree]:
        """Lend the model's own tensors for training; see `Model.live`. Blocks that `w` lacks get no gradients.

        If a Tree lacks blocks, the module computes with its own tensors of these blocks. These tensors have their
        initial values whenever they are not lent, so that no client's values reach another client.
        """
        own = () if self._live is not None else self._slots.names
        lent = [self._slots.own(name) for name in own if name in w and not self.is_buffer(name)]
        for parameter in lent:
            parameter.requires_grad_(True)
        try:
            with super().live(w) as tree:
                yield tree
        finally:
            for parameter in lent:
                parameter.requires_grad_(False)
            if changed := [name for name in own if name in w and name in self._initial]:
                first = self._first_values(changed)
                torch._foreach_copy_([self._slots.own(name) for name in first], list(first.values()))

    def _first_values(self, names: Iterable[str]) -> Tree:
        """Return the initial values of these tensors, on the device of the module."""
        for name in names:
            self._initial[name] = self._initial[name].to(self._slots.device)
        return {name: self._initial[name] for name in names}

    def _using(self, w: Mapping[str, Tensor], batch: Batch) -> AbstractContextManager[None]:
        lent = self._live if self._live is not None and w is not self._live else {}
        if hidden := [name for name in lent if name in self._initial and name not in w]:
            w = {**w, **self._first_values(hidden)}
        return super()._using(w, batch)


def build_whole(
    spec: ModelSpec, inputs: Mapping[str, Shape], num_outputs: int, only: Collection[str] | None, key: int
) -> Model:
    """Build the model of a whole module; see `build_model`.

    Raises:
        ModelError: the module cannot be made, one of its methods takes other arguments, `[model.blocks]` does not match
            the module, or its logits have the wrong shape. The error also occurs if no row of a batch has a certain
            modality, and the logits of the batch still depend on this modality's block, or if a trial call finds an
            error (`check_trial_calls`).
    """
    rows = Rows()
    shapes = {name: tuple(shape) for name, shape in inputs.items()}
    read = [name for name in inputs if only is None or name in only]
    check_modalities(spec, inputs)
    make = _maker(spec, {name: shapes[name] for name in read}, num_outputs, rows)
    blocks = {name: tuple(spec.blocks[name]) for name in read}
    fusion = made(make, key, SHARED)
    check_methods(fusion.module, fusion.encodes, described(spec.module))
    check_blocks(fusion.module, blocks)
    model = WholeModel(make, rows, shapes, read, num_outputs, key, partial(name_of, blocks))
    check_logits(model, described(spec.module))
    check_trial_calls(model, model.init(0), f"{WHERE} {described(spec.module)}", read, model.logits)
    return model


def require_embeddings(model: Model, method: str) -> None:
    """Refuse a model without embeddings for a method that needs them.

    Raises:
        ModelError: the model has no embeddings. The text explains how to add embeddings to a whole module, and which
            algorithms need no embeddings.
    """
    if not model.has_embeddings:
        raise ModelError(
            f"{method} works with the embedding of each modality, and the module of [model] gives none. Give it the "
            "methods encode(modality, x) and fuse(z, present) and an attribute `embedding`, or choose a method that "
            "needs none, such as fedavg, fedprox or scaffold"
        )


def _maker(spec: ModelSpec, shapes: Mapping[str, Shape], outputs: int, rows: Rows) -> Callable[[], WholeFusion]:
    what = found(WHERE, spec.module, nn.Module)

    def make() -> WholeFusion:
        if isinstance(what, nn.Module):
            module = copy.deepcopy(what)
        else:
            module = called(f"{WHERE} {described(what)}", what, (dict(shapes), outputs), spec.module_options, _FORM)
        fusion = WholeFusion(module, shapes)
        adopt(fusion, rows, SHARED)
        return fusion

    return make
