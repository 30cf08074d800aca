"""`Model`: encoders and a fusion as a pure function of a Tree and a batch.

Shape letters: `B` rows, `E` width of the embedding, `T` time steps, `C` classes, `J` width of the joint representation.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.model.fusion import Fusion, Parts, masked
from polyfed.model.modules.layers import BatchNorm, Dropout, Rows
from polyfed.model.modules.parameter_slots import Naming, Slots, as_it_is
from polyfed.model.modules.recompute import Recompute
from polyfed.model.modules.seeded_modules import flops_of, leaves, made, result_bytes_of
from polyfed.model.stand_ins import (
    ZERO_INPUT,
    ClassPrototypes,
    Given,
    names_of,
    placed,
    stand_ins,
    zero_input_name,
)

_NORMS = (
    BatchNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.instancenorm._InstanceNorm,
)

_NOTHING: AbstractContextManager[None] = nullcontext()

V = TypeVar("V", Tensor, dict[str, Tensor])


def _dtype_of(x: Mapping[str, Tensor]) -> torch.dtype:
    """Return the type of a batch's samples: float64 in `in_float64`, else float32."""
    return next(iter(x.values())).dtype if x else torch.float32


def _as_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _in_float32(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let a norm compute in float32 under autocast. `vmap` has no gradients of a norm whose input has another type."""
    return tuple(arg.float() if isinstance(arg, Tensor) and arg.dtype is torch.bfloat16 else arg for arg in args)


class Block(nn.Module):
    """The block of one modality: its encoder, its part of the first fusion layer, and its prototypes, each or None."""

    def __init__(self, encoder: nn.Module, fusion: nn.Module | None, prototypes: ClassPrototypes | None = None) -> None:
        super().__init__()
        self.encoder, self.fusion, self.prototypes = encoder, fusion, prototypes


class Model:
    """Encoders and a fusion as a function of a Tree and a batch; made by `build_model`.

    Names in the Tree are `<modality>.encoder...`, `<modality>.fusion...` and `shared...`. The batch decides whether the
    modules are in training or evaluation mode. A client's Tree may hold only the blocks of its own modalities; its
    batches then hold only these modalities. All methods except `init` and `live` run under `torch.func.vmap` and
    `grad`. A batch in training mode updates the BatchNorm statistics in place, in the tensors of the given Tree.

    Args:
        factories: for each modality, a function that makes its `Block` with PyTorch's global generator.
        shared: a function that makes the fusion.
        rows: the `Rows` object of the layers that `factories` and `shared` make.
        shapes: sample shape of each modality; may include modalities that the model does not read.
        num_classes: C.
        key: random key of the initial values of frozen parameters; give the same key to `init`.
        naming: a function that renames tensors in the Tree. The name of a tensor decides to which block it belongs.

    Attributes:
        modalities: the modalities that the model reads, in order.
        num_classes, num_outputs: C, the width of the output; use the second name for objectives without classes.
        shapes, key: the arguments of these names.
        has_batchnorm: whether a layer uses batch statistics, so that a training batch needs at least two rows.
        has_modes: whether training and evaluation mode may differ: BatchNorm, dropout, or a layer of the user's own.
        convolves: whether a layer is a convolution over two or more dimensions.
        recomputes: whether a layer computes its activations again in the backward pass, which `vmap` does not support.
        sequential: whether embeddings are sequences (B, T, E) rather than vectors (B, E).
        has_embeddings: whether modalities have embeddings; if not, `features` returns the samples.
        zero_inputs: modality -> the name of its buffer for `absent = "input"` (`stand_ins.py`); empty otherwise.
    """

    def __init__(
        self,
        factories: Mapping[str, Callable[[], Block]],
        shared: Callable[[], Fusion],
        rows: Rows,
        shapes: Mapping[str, tuple[int, ...]],
        num_classes: int,
        key: int,
        naming: Naming = as_it_is,
    ) -> None:
        self.modalities = tuple(factories)
        self.num_classes, self.num_outputs, self.shapes, self.key = num_classes, num_classes, dict(shapes), key
        self._factories: dict[str, Callable[[], nn.Module]] = {**factories, SHARED: shared}
        blocks = {name: made(make, key, name) for name, make in factories.items()}
        self._fusion = made(shared, key, SHARED)
        self._modules: dict[str, nn.Module] = {**blocks, SHARED: self._fusion}
        # looked up once, because reading attributes of an nn.Module is slow in the inner loop
        self._encoders: dict[str, Callable[[Tensor], Tensor]] = {name: b.encoder for name, b in blocks.items()}
        self._parts = {name: block.fusion for name, block in blocks.items()}
        self._near = {name: names_of(name) for name, block in blocks.items() if block.prototypes is not None}
        own = self.modalities if ZERO_INPUT in self._fusion._modules else ()
        self.zero_inputs = {name: zero_input_name(name) for name in own}
        self._rows, self._naming, self._slots = rows, naming, Slots(self._modules, naming)
        names = list(reversed(self._slots.names))
        self._first = {kind: {block_of(n): n for n in names if f".{kind}." in n} for kind in ("encoder", "fusion")}
        self._live: Tree | None = None
        self._lower = False
        self._flops: dict[str, int] = {}
        self._activations: dict[tuple[str, ...], int] = {}
        self._encoded: dict[str, tuple[int, ...]] = {}
        layers = self.layers().values()
        rows.follow(layers)
        for layer in layers:
            if isinstance(layer, _NORMS):
                layer.register_forward_pre_hook(_in_float32)
        self.has_batchnorm = any(isinstance(layer, BatchNorm) and layer.training for layer in layers)
        self.has_modes = any(
            isinstance(layer, BatchNorm | Dropout) or not type(layer).__module__.startswith(("torch.nn.", "polyfed."))
            for layer in layers
        )
        self.convolves = any(isinstance(layer, nn.Conv2d | nn.Conv3d) for layer in layers)
        self.recomputes = any(isinstance(layer.__dict__.get("forward"), Recompute) for layer in layers)
        self.sequential = self._fusion.sequential
        self.has_embeddings = True

    # sizes

    def flops(self, block: str) -> int:
        """Count the floating-point operations of a block in the forward pass of one sample, two per multiply-add.

        The method runs the block on a sample of zeros. It counts matrix products and convolutions, but not elementwise
        operations and pooling. For `shared`, it counts the fusion, without each modality's own part of the
        first fusion layer.
        """
        if block not in self._flops:
            with torch.no_grad():
                self._flops[block] = self._count(block)
        return self._flops[block]

    def _count(self, block: str) -> int:
        batch = self.zero_batch(1, self.modalities if block == SHARED else (block,))
        if block != SHARED:
            return flops_of(lambda: self._features(batch)) + self.part_flops(block)
        z = self._features(batch)
        return flops_of(lambda: self._fuse(z, batch, self._parts)) - sum(map(self.part_flops, self.modalities))

    def activation_bytes(self, modalities: Iterable[str]) -> int:
        """Bytes of the results of all operations in the forward pass of one sample with these modalities.

        The backward pass needs most of them, so this is about the memory of a training step beside the parameters.
        """
        names = tuple(modalities)
        if names not in self._activations:
            batch = self.zero_batch(1, names)
            self._activations[names] = result_bytes_of(lambda: self._fuse(self._features(batch), batch, self._parts))
        return self._activations[names]

    def part_flops(self, modality: str) -> int:
        """Count the operations of a modality's own part of the first fusion layer, for one sample."""
        weights = [name for name in self.head_slice(modality) if name.endswith("weight")]
        return sum(2 * self._slots.own(name).numel() for name in weights)

    @property
    def linear_head(self) -> bool:
        """Whether the logits are a sum of one linear term per modality (`concat` or `sum` without a head)."""
        return self._fusion.linear

    def feature_size(self, modality: str) -> int:
        """Width E of a modality's embedding as `vector` returns it; the same for all modalities."""
        return self._fusion.embedding

    def encoded_shape(self, modality: str) -> tuple[int, ...]:
        """Shape of one row of `features` of a modality: (E,), or (T, E) under attention fusion."""
        if modality not in self._encoded:
            with torch.no_grad():
                self._encoded[modality] = tuple(self._features(self.zero_batch(1, (modality,)))[modality].shape[1:])
        return self._encoded[modality]

    @property
    def joint_size(self) -> int:
        """Width J of the joint representation; 0 for `concat` without a head, which has no joint representation."""
        return self._fusion.joint_size

    @property
    def num_controls(self) -> int:
        """Number P of embedding controls of the fusion `controlled`; 0 for other fusions."""
        return self._fusion.num_controls

    # numbers

    def init(self, key: int) -> Tree:
        """Return the initial Tree. Each block has its own random stream, so a new modality changes no other block."""
        return {name: value for block in self._modules for name, value in self.init_block(block, key).items()}

    def init_block(self, block: str, key: int) -> Tree:
        """Return the initial values of one block. They depend only on the key and the block."""
        slots = Slots({block: made(self._factories[block], key, block)}, self._naming)
        return {name: slots.own(name).detach() for name in slots.names}

    def put_away(self, copied: Callable[[Tree], Tree]) -> None:
        """Put copies, such as those in a mapped file, in the place of the modules' own tensors. Trees do not change."""
        held = self._slots.held()
        copies = copied({str(place): tensor.data for place, tensor in enumerate(held)})
        for tensor, copy in zip(held, copies.values(), strict=True):
            tensor.data = copy

    @contextmanager
    def live(self, w: Mapping[str, Tensor]) -> Iterator[Tree]:
        """Copy `w` into the model's own tensors, and yield these tensors, so that training can change them in place.

        Inside the `with` block, calls with the yielded Tree run as fast as a plain PyTorch training loop. Calls with
        any other Tree also work. The yielded parameters require gradients. The next `live` overwrites the yielded
        tensors, so clone what you want to keep. In two cases, the method yields a copy of `w` instead: a tensor of `w`
        has another shape than the model's own tensor, for example because of a smaller LoRA rank, or the block of an
        earlier `live` has not ended, because a `direction` calls `minimise`.
        """
        self._slots.place(next(iter(w.values())).device)
        if self._live is not None or not self._slots.fit(w):
            yield leaves(w, self.trainable(w))
            return
        others = leaves({name: w[name] for name in w if not self._slots.has(name)}, self.trainable(w))
        tree = {name: others[name] if name in others else self._slots.own(name) for name in w}
        with torch.no_grad():
            torch._foreach_copy_(list(tree.values()), list(w.values()))
        self._live = tree
        try:
            yield tree
            self._slots.refuse_new(tree)
        finally:
            self._live = None
            for value in tree.values():
                value.grad = None

    @contextmanager
    def computing(self, precision: str) -> Iterator[None]:
        """Let encoders and fusion compute in this precision inside the `with` block; their results are float32.

        Args:
            precision: `float32`, or `bf16` for bfloat16 with autocast.
        """
        before, self._lower = self._lower, precision != "float32"
        try:
            yield
        finally:
            self._lower = before

    @contextmanager
    def in_float64(self, w: Mapping[str, Tensor]) -> Iterator[Tree]:
        """Let the model compute in float64 inside the `with` block, and yield `w` in float64 for it.

        Batches must hold float64 samples too. A user's module that makes float32 tensors itself may raise an error.
        """
        self._slots.place(next(iter(w.values())).device if w else self._slots.device)
        with self._slots.constants_in_float64():
            yield {name: value.double() if value.is_floating_point() else value for name, value in w.items()}

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._slots.device.type, torch.bfloat16) if self._lower else _NOTHING

    # calls

    def features(self, w: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Embeddings (B, E) of each modality in the batch; (B, T, E) under attention fusion, see `vector`.

        Embeddings of rows that lack the modality (`batch.present`) are meaningless; `fuse` replaces them.
        """
        self._check_owned(w, batch.x, "encoder")
        with self._using(w, batch):
            return self._features(batch)

    def fuse(self, w: Mapping[str, Tensor], features: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Logits (B, C) of embeddings. A modality that is absent from the batch or from a row counts as zero.

        Its prototypes or the embedding of a zero sample may stand in for it (`stand_ins.py`).
        """
        self._check_owned(w, features, "fusion")
        with self._using(w, batch):
            return self._fuse(*self._completed(w, features, batch))

    def joint(self, w: Mapping[str, Tensor], features: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The joint representation (B, J) of all modalities, which the head receives; see `Fusion.joint`."""
        self._check_owned(w, features, "fusion")
        with self._using(w, batch):
            features, batch, parts = self._completed(w, features, batch)
            return self._over(lambda z: self._fusion.joint(parts, z, batch.present), features, batch)

    def views(self, w: Mapping[str, Tensor], features: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """The `logits` (B, C), and what the fusion computes on the way to them, by name; see `Fusion.views`."""
        self._check_owned(w, features, "fusion")
        with self._using(w, batch):
            features, batch, parts = self._completed(w, features, batch)

            def call(z: dict[str, Tensor]) -> dict[str, Tensor]:
                result = self._fusion.views(parts, z, batch.present)
                logits: Tensor = self._fusion.head(result["joint"])
                return result | {"logits": logits}

            return self._over(call, features, batch)

    def classify(self, w: Mapping[str, Tensor], joint: Tensor, batch: Batch) -> Tensor:
        """Logits (B, C) of a joint representation (B, J); `fuse` is `joint` followed by `classify`."""
        with self._using(w, batch):
            logits: Tensor = self._over(lambda _: self._fusion.head(joint), {self.modalities[0]: joint}, batch)
            return logits

    def logits(self, w: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Logits (B, C) of a batch: `features` followed by `fuse`."""
        self._check_owned(w, batch.x, "encoder")
        with self._using(w, batch):
            return self._fuse(*self._completed(w, self._features(batch), batch))

    def unimodal_logits(
        self,
        w: Mapping[str, Tensor],
        features: Mapping[str, Tensor],
        modality: str,
        batch: Batch,
        mode: Literal["head", "zero"] = "head",
    ) -> Tensor:
        """Logits (B, C) of a single modality (docs/evaluation.md).

        Args:
            w: the Tree.
            features: the result of `features`; only the embeddings of `modality` are used.
            mode: `head` returns W_m z + b / M, where M is the number of modalities of the model. The sum of these terms
                over all modalities gives the full logits. `zero` sets the embeddings of all other modalities to zero,
                also where they have prototypes.

        Raises:
            ModelError: the mode is `head`, but the logits are not linear in the embeddings.
        """
        own = {modality: features[modality]}
        with self._using(w, batch):
            if mode == "zero":
                return self._fuse(own, batch, self._parts)
            if not self._fusion.linear:
                raise ModelError(
                    "Uni-modal evaluation 'head' splits the logits into one term per modality, which only "
                    "linear fusion allows (concat or sum without a head). Use 'zero' or 'prototype'."
                )
            z = masked(own, batch.present)[modality]
            return self._fusion.term(self._parts[modality], z, 1.0 / len(self.modalities))

    def vector(self, features: Tensor) -> Tensor:
        """Embeddings as one vector per row, (B, E); sequences (B, T, E) are averaged over time."""
        return features.mean(1) if self.sequential else features

    def vectors(self, w: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """The embeddings of a batch as vectors (B, E), by modality: `features` followed by `vector`."""
        return {modality: self.vector(z) for modality, z in self.features(w, batch).items()}

    # inside

    def _completed(
        self, w: Mapping[str, Tensor], features: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Mapping[str, Tensor], Batch, Parts]:
        """Return the embeddings with stand-ins for what is absent, the batch that has them, and the fusion's parts."""
        if self.zero_inputs:
            return self._with_zero_samples(w, features, batch)
        near = {m: (w[mean], w[known] > 0) for m, (mean, known) in self._near.items() if mean in w}
        wanted = [m for m in near if m not in features or m in batch.present]
        if not wanted:
            return features, batch, self._parts
        vectors = {m: self.vector(z) for m, z in features.items()}
        z, present = dict(features), dict(batch.present)
        for m, (stand_in, has) in stand_ins(near, vectors, batch.present, wanted).items():
            there = present.get(m, torch.zeros_like(has))
            z[m] = placed(features.get(m), there, stand_in, self.encoded_shape(m)[:-1])
            present[m] = there | has
        return z, replace(batch, present=present), self._parts

    def _with_zero_samples(
        self, w: Mapping[str, Tensor], features: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Mapping[str, Tensor], Batch, Parts]:
        """Return the result of `_completed` under `absent = "input"`: every modality is there.

        `features` has the embeddings of zero samples for rows that lack the modality. A modality that no row has comes
        from its encoder if the Tree has it, and otherwise from its buffer.
        """
        z, parts, rows = dict(features), dict(self._parts), len(batch.y)
        for m, name in self.zero_inputs.items():
            if m in z:
                continue
            if self._has_block(w, m):
                none = torch.zeros(rows, dtype=torch.bool, device=batch.y.device)
                x = torch.zeros(rows, *self.shapes[m], device=batch.y.device, dtype=_dtype_of(batch.x))
                z |= self._features(replace(batch, x={m: x}, present={m: none}))
            elif parts[m] is None:
                z[m] = w[name].expand(rows, *w[name].shape)
            else:
                z[m], parts[m] = w[name].new_zeros(rows, self._fusion.embedding), Given(w[name])
        return z, replace(batch, present={}), parts

    def _has_block(self, w: Mapping[str, Tensor], modality: str) -> bool:
        """Return whether the Tree holds the whole block of a modality."""
        return all(name in w for name in self._slots.names if block_of(name) == modality)

    def with_zero_inputs(self, w: Tree) -> Tree:
        """Return the Tree with what each block that it has makes of a sample of zeros; see `ZeroInputs`."""
        own = [m for m in self.zero_inputs if self._has_block(w, m)]
        if not own or not w:
            return w
        self._slots.place(next(iter(w.values())).device)
        batch = self.zero_batch(1, own)
        result = {}
        with torch.no_grad(), self._using(w, batch):
            for m, z in self._features(batch).items():
                part = self._parts[m]
                result[self.zero_inputs[m]] = (z if part is None else part(z))[0].clone()
        return w | result

    def _using(self, w: Mapping[str, Tensor], batch: Batch) -> AbstractContextManager[None]:
        self._rows.bound = w is not self._live
        if w is self._live:
            return _NOTHING
        # the Tree is empty if the whole encoder is frozen; the labels then determine the device
        self._slots.place(next(iter(w.values()), batch.y).device)
        return self._slots.bound(w, evaluation=batch.key is None)

    def _check_owned(self, w: Mapping[str, Tensor], modalities: Iterable[str], kind: str) -> None:
        """Check that the Tree holds these blocks. Otherwise the model would use its own, meaningless values."""
        for modality in modalities:
            name = self._first[kind].get(modality)
            assert name is None or name in w, f"the Tree lacks the block of {modality!r}, which the batch has"

    def _features(self, batch: Batch) -> dict[str, Tensor]:
        z, x = {}, masked(batch.x, batch.present) if self.zero_inputs else batch.x
        try:
            with self._autocast():
                for name, encoder in self._encoders.items():
                    if name in x:
                        self._rows.see(batch, batch.present.get(name))
                        z[name] = encoder(x[name])
        finally:
            self._rows.clear()
        return {name: value.float() for name, value in z.items()} if self._lower else z

    def _fuse(self, features: Mapping[str, Tensor], batch: Batch, parts: Parts) -> Tensor:
        logits: Tensor = self._over(lambda z: self._fusion(parts, z, batch.present), features, batch)
        return logits

    def _over(self, call: Callable[[dict[str, Tensor]], V], features: Mapping[str, Tensor], batch: Batch) -> V:
        """Call a part of the fusion on the embeddings, in the order of `modalities`. Its layers can read `batch`."""
        z = {name: features[name] for name in self.modalities if name in features}
        assert z, "nothing to fuse: the batch has none of the model's modalities"
        self._rows.see(batch)
        try:
            with self._autocast():
                value = call(z)
            lowered: V = tree_map(_as_float32, value) if self._lower else value
            return lowered
        finally:
            self._rows.clear()

    def zero_batch(self, size: int, modalities: Iterable[str]) -> Batch:
        """For counting operations and checking shapes: a batch of zeros in evaluation mode, on the modules' device."""
        with self._slots.device:
            x = {name: torch.zeros(size, *self.shapes[name]) for name in modalities}
            return Batch(x=x, y=torch.zeros(size, dtype=torch.int64), rows=torch.arange(size))

    # the names in a Tree

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

    def classifier(self) -> tuple[str, ...]:
        """Names of the last layer, which gives the logits: all of `head` if they are linear in the embeddings.

        Empty for a whole module, which does not say which layer this is.
        """
        last, given = f"{SHARED}.head.{len(self._fusion.head) - 1}.", {*self.zero_inputs.values()}
        own = (name for name in self.head() if name not in given)
        return tuple(name for name in own if self._fusion.linear or name.startswith(last))

    @property
    def norm_names(self) -> frozenset[str]:
        """Names of the tensors in normalisation layers: PyTorch's batch, layer, group, instance and RMS norms."""
        norms = {path: layer for path, layer in self.layers().items() if isinstance(layer, _NORMS)}
        own = {self._naming(f"{path}.{key}") for path, layer in norms.items() for key in layer.state_dict()}
        return frozenset(own & set(self._slots.names))

    def is_buffer(self, name: str) -> bool:
        """Whether a name is a buffer, such as a BatchNorm statistic, and not a parameter.

        A Tree that holds another model of the same form beside the first, under a prefix that starts with @, has the
        buffers of both.
        """
        return (name.partition(".")[2] if name.startswith("@") else name) in self._slots.buffers

    def trainable(self, w: Mapping[str, Tensor]) -> Tree:
        """Return the entries of a Tree that are parameters. Entries that are buffers are left out."""
        return {name: value for name, value in w.items() if not self.is_buffer(name)}

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
