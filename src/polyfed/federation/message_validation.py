"""The checks that a message must pass before the server uses a reply, or a device obeys a request.

Neither side trusts the other. Both compare names, shapes, types and values with the declarations of the message class
and with the model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import BadReply
from polyfed.core.masked import fits
from polyfed.core.messages import COMMON, LABELS, OF_THE_MODEL, Declared, Message, map_tensors, tensors
from polyfed.core.option_checks import NOT_NEGATIVE, Within, between
from polyfed.core.system.openmp import threads_worth
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.outliers import Sizes, row_norms, sizes
from polyfed.federation.replies import ReplyStack
from polyfed.model import Model
from polyfed.objective import CLASSES, Objective
from polyfed.privacy.egress.announcement import Holder

NOT_FINITE = "is not finite"
"""The last words of the reason for dropping a reply that holds NaN or infinity."""

REAL = ("embeddings", "prototypes", "predictions")
"""Kinds that must have the floating-point type of the model, because computing with another type would fail."""

Shape = tuple[int, ...]
_NO_SHAPES: Mapping[str, Shape] = {}

NUMBERS = {"int64": torch.int64, "uint8": torch.uint8, "bool": torch.bool}
"""The types of statistics that are not floating-point, by the word in the declaration."""

OF_A_MODALITY = frozenset({"features", "encoded", "sample"})
"""Words in a declared shape. Each stands for a size that depends on the modality."""


@dataclass(frozen=True)
class Receiver:
    """What a client that receives a message knows about itself.

    Attributes:
        modalities: the modalities of the client.
        num_rows: the number of its rows. No position of a row may be this or more.
        shapes: parameter name -> shape, for parameters that are smaller than in the model.
        may_lack: whether the task may receive parameters without blocks that the client has.
    """

    modalities: tuple[str, ...]
    num_rows: int
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    may_lack: bool = False


@dataclass(frozen=True)
class MessageValidator:
    """Checks replies against their message class and the model.

    Attributes:
        template: the server's parameters and buffers, by name.
        model: the model with all modalities.
        modalities: the modalities of the federation.
        objective: what the model learns to predict.
        size: number of classes or targets. If `size` is 0, the number of outputs of the model is used instead.
    """

    template: Tree
    model: Model
    modalities: tuple[str, ...]
    objective: Objective = CLASSES
    size: int = 0
    _named: dict[tuple[str, Declared, tuple[str, ...]], str] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        """The number of classes or targets."""
        return self.size or self.model.num_outputs

    @cached_property
    def floats(self) -> frozenset[torch.dtype]:
        """The floating-point types of the model's tensors, or float32 if the model has no such tensors."""
        return frozenset(t.dtype for t in self.template.values() if t.is_floating_point()) or frozenset({torch.float32})

    def check(self, msg: Message, expected: type[Message], shapes: Mapping[str, Shape] = _NO_SHAPES) -> None:
        """Check the class of a stacked message, and the names, shapes and types of its tensors.

        Args:
            msg: the message.
            expected: the class that it must have.
            shapes: parameter name -> shape on the clients. It lists only parameters that have a different shape in the
                model.

        Raises:
            BadReply: the message differs from its declaration. The text names the field and the fault.
        """
        if type(msg) is not expected:
            raise BadReply(f"sent {type(msg).__name__}, expected {expected.__name__}")
        for name, said in expected.declared.items():
            value = getattr(msg, name)
            if isinstance(value, Tensor):
                self._check_tensor(name, None, value, said, shapes)
                continue
            if flaw := self._flaw(name, said, tuple(value)):
                raise BadReply(flaw)
            for key, tensor in value.items():
                self._check_tensor(name, key, tensor, said, shapes)
        for count in msg.counts.values():
            if (kind := getattr(msg, count).dtype) != torch.int64:
                raise BadReply(f"{count} is {kind}, expected torch.int64")
        self._check_alike(msg)

    def check_received(self, msg: Message, expected: type[Message], receiver: Receiver) -> None:
        """Check a message of the server on a device, before the task runs and before anything is spent or counted.

        The message has no client axis. A bias with one row per sample would be broadcast, and its gradient would hold
        every row apart from the others; a message therefore has exactly the shapes of the model.

        Raises:
            BadReply: the message differs from its declaration or from the model. The text names message, field and
                block.
        """
        part = ReplyStack((0,), map_tensors(msg, lambda tensor: tensor.unsqueeze(0)))
        try:
            self.check(part.message, expected, receiver.shapes)
            self._check_owned(msg, receiver)
            self._check_complete(msg, receiver)
            self._check_lengths(msg)
            reason = self.unusable(part)[0].get(0, "")
        except BadReply as error:
            reason = str(error)
        if reason.endswith(NOT_FINITE):
            where = reason.removesuffix(f" {NOT_FINITE}")
            raise BadReply(
                f"from the server holds NaN or infinity in {where} of {expected.__name__}; the model was broken before "
                "it came"
            )
        if reason:
            raise BadReply(f"from the server is refused: {expected.__name__}.{reason}")

    def _check_owned(self, msg: Message, receiver: Receiver) -> None:
        """Refuse blocks that the client does not have, and rows that it does not have.

        Raises:
            BadReply: the message holds one of them.
        """
        for name, key, value in tensors(msg):
            said, where = msg.declared[name], _at(name, key)
            if key is not None and not said.whole and block_of(key) not in {*receiver.modalities, SHARED, LABELS}:
                raise BadReply(f"{where} is of a modality that this client does not have")
            if said.kind == "ids" and value.numel():
                if not 0 <= int(value.min()) <= int(value.max()) < receiver.num_rows:
                    raise BadReply(f"{where} must be from 0 to {receiver.num_rows - 1}, the rows of this client")
                # many copies of one row would be a batch of one row
                if len(set(value.flatten().tolist())) < value.numel():
                    raise BadReply(f"{where} names a row twice")

    def _check_complete(self, msg: Message, receiver: Receiver) -> None:
        """Refuse a message that lacks a block which the client has and the field must hold.

        Training would go on from the client's old values, or the missing blocks would be frozen.

        Raises:
            BadReply: a block is missing.
        """
        has, everyone = {*receiver.modalities, SHARED}, Holder(receiver.modalities, self.modalities, self.modalities)
        for name, said in msg.declared.items():
            if said.bare or said.optional:
                continue
            if said.kind not in OF_THE_MODEL:
                expected = self._blocks(said, everyone.names(said)) & {*self.modalities}
            elif receiver.may_lack:
                continue
            else:
                expected = {n for n in self._part(said) if said.whole or block_of(n) in has}
                if said.kind == "gradients":
                    expected = {n for n in expected if not self.model.is_buffer(n)}
            if missing := sorted(expected - {*getattr(msg, name)}):
                raise BadReply(f"{_at(name, missing[0])} is missing")

    def _check_lengths(self, msg: Message) -> None:
        """Refuse a message in which two fields disagree about a number of rows.

        Raises:
            BadReply: they disagree.
        """
        for name, count in msg.counts.items():
            rows, counted = getattr(msg, name), int(getattr(msg, count))
            sent = [len(t) for t in ([rows] if isinstance(rows, Tensor) else rows.values())]
            if any(n != counted for n in sent):
                raise BadReply(f"{name} holds {sent} rows, and {count} is {counted}")

    def _check_alike(self, msg: Message) -> None:
        """Refuse a stacked message whose tensors disagree about a size that they have in common.

        A common size is a word of `COMMON`, or the number of models in one block of a `stacked` field.

        Raises:
            BadReply: they disagree.
        """
        found: dict[tuple[str, ...], dict[str, int]] = {}
        for name, key, value in tensors(msg):
            said = msg.declared[name]
            if said.stacked and key is not None:
                found.setdefault((name, block_of(key)), {})[f"{name}.{key}"] = value.shape[1]
            elif said.shape and said.shape[0] in COMMON:
                found.setdefault((str(said.shape[0]),), {})[_at(name, key)] = value.shape[1]
        for what, lengths in found.items():
            if len(set(lengths.values())) > 1:
                one, other = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
                words = {"batch": "rows", "cohort": "clients", "subsets": "subsets"}.get(what[0], "models")
                raise BadReply(
                    f"{one} and {other} have different numbers of {words}: {lengths[one]} and {lengths[other]}"
                )

    def unusable(self, part: ReplyStack) -> tuple[dict[int, str], Sizes]:
        """Return the clients whose reply holds NaN, infinity or numbers outside their range, each with the reason.

        The second result are the sizes of the replies' blocks. One pass over the numbers gives both: a norm is finite
        only if every number is.
        """
        found = [(name, key, value) for name, key, value in tensors(part.message) if value.numel()]
        bad: dict[int, str] = {}
        for name, count in part.message.counts.items():
            rows, counted = getattr(part.message, name), getattr(part.message, count)
            if held := [t.shape[1] for t in ([rows] if isinstance(rows, Tensor) else rows.values())]:
                fine = (counted >= 0) & (counted <= min(held))
                self._note(bad, part, fine, f"{count} must be from 0 to {min(held)}, the rows that {name} holds")
        for name, key, value in found:
            said = part.message.declared[name]
            within = self._range(said, key)
            if within is None:
                continue
            fine, words = within.holds(value), within.words
            if not bool(fine.all()):  # NaN fails every range check; the check below reports it
                self._note(bad, part, fine | (value != value), f"{_at(name, key)} must be {words}")
        floats = [
            (name, key, self._known(part, name, value)) for name, key, value in found if value.is_floating_point()
        ]
        if not floats:
            return bad, {}
        norms = _together([row_norms(part, name, value) for name, _, value in floats])
        if not np.isfinite(norms).all():  # NaN or infinity, or a norm that overflows
            for name, key, value in floats:
                self._note(bad, part, torch.isfinite(value), f"{_at(name, key)} {NOT_FINITE}")
        return bad, sizes(part, [(name, key) for name, key, _ in floats], norms)

    def _range(self, said: Declared, key: str | None) -> Within | None:
        """Return the range of a field's numbers, or None if every finite number is allowed."""
        if said.kind == "labels" and self._of_classes(said):
            return between(0, self.classes - 1)
        if said.kind == "parameters" and key is not None and not said.masked and self._is_variance(key):
            return NOT_NEGATIVE
        return said.within

    def _is_variance(self, name: str) -> bool:
        """Return whether a tensor is a buffer that cannot be negative: a counter, or the variance of a BatchNorm."""
        whole = not self.template[name].is_floating_point() and self.template[name].dtype != torch.bool
        return self.model.is_buffer(name) and (whole or name.endswith("running_var"))

    def _of_classes(self, said: Declared) -> bool:
        """Return whether a field of labels holds class numbers."""
        return said.shape == () or (said.shape == ("label",) and self.objective.OF_CLASSES)

    def _exact_type(self, said: Declared) -> torch.dtype | None:
        """Return the type that a field must have, or None if several types are allowed."""
        if said.kind == "ids" or (said.kind == "labels" and self._of_classes(said)):
            return torch.int64
        targets = said.shape == ("label",) and self.objective.label_shape(1) != ()
        return torch.float32 if targets else None

    def _numbers(self, said: Declared) -> frozenset[torch.dtype]:
        """Return the types that a statistic or a raw sample may have; empty for other kinds."""
        reals = self.floats | {torch.float32}
        if said.kind == "raw":  # samples may be whole numbers, and a table of what is there holds truth values
            return reals | {torch.int64 if said.shape else torch.bool}
        if said.kind != "statistic":
            return frozenset()
        if said.dtype == "sums":  # sums of squares and of levels need the precision
            return reals | {torch.float64}
        if said.dtype:
            return reals if said.dtype == "float32" else frozenset({NUMBERS[said.dtype]})
        return reals.union(NUMBERS.values())

    def _known(self, part: ReplyStack, field: str, value: Tensor) -> Tensor:
        """Return the tensor. If it holds targets, the unknown targets, which are NaN, become 0."""
        targets = part.message.declared[field].shape == ("label",)
        return torch.where(value.isnan(), torch.zeros_like(value), value) if targets else value

    def _note(self, bad: dict[int, str], part: ReplyStack, fine: Tensor, reason: str) -> None:
        for client, whole in zip(part.clients, fine.reshape(len(part.clients), -1).all(1).tolist(), strict=True):
            if not whole:
                bad.setdefault(client, reason)

    def _check_tensor(
        self, field: str, key: str | None, value: Tensor, said: Declared, shapes: Mapping[str, Shape]
    ) -> None:
        if said.masked and not fits(said, value.dtype):
            raise BadReply(f"{field} is {value.dtype}, expected masked integers")
        if said.kind in OF_THE_MODEL:
            assert key is not None, f"{field}: parameters and gradients come in trees"
            wanted = self.template[key]
            shape = shapes.get(key, tuple(wanted.shape))
            found_shape = tuple(value.shape[2 if said.stacked else 1 :])
            if (
                found_shape != shape
                or (said.stacked and value.dim() < 2)
                or (value.dtype != wanted.dtype and not said.masked)
            ):
                found, ours = (f"{t.dtype} {tuple(s)}" for t, s in ((value, found_shape), (wanted, shape)))
                raise BadReply(f"{field}.{key} is {found}, expected {ours}")
            return
        where = field if key is None else f"{field}.{key}"
        if said.kind in REAL and value.dtype not in self.floats and not said.masked:
            raise BadReply(f"{where} is {value.dtype}, expected {' or '.join(sorted(map(str, self.floats)))}")
        allowed = self._numbers(said)
        if allowed and value.dtype not in allowed and not said.masked:
            raise BadReply(f"{where} is {value.dtype}, expected {' or '.join(sorted(map(str, allowed)))}")
        wanted_type = self._exact_type(said)
        if wanted_type is not None and value.dtype != wanted_type:
            raise BadReply(f"{where} is {value.dtype}, expected {wanted_type}")
        if said.rows is not None and value.dim() < 2:
            raise BadReply(f"{where} has no axis of rows")
        assert said.shape is not None, f"{field} has kind {said.kind} and no shape"
        found_shape, sizes = value.shape[1 if said.rows is None else 2 :], tuple(self._sizes(said, key))
        if len(found_shape) != len(sizes) or any(n not in (None, m) for n, m in zip(sizes, found_shape, strict=True)):
            words = " x ".join("any" if n is None else str(n) for n in sizes) or "one number"
            raise BadReply(f"{where} has the shape {tuple(found_shape)}, expected {words}")

    def _sizes(self, said: Declared, key: str | None) -> Iterator[int | None]:
        model, objective, modality = self.model, self.objective, str(said.of if key is None else key)
        sizes: Mapping[str, Callable[[], tuple[int, ...]]] = {
            "classes": lambda: (model.num_classes,),
            "own": lambda: objective.own_shape(self.classes),
            "label": lambda: objective.label_shape(self.classes),
            "features": lambda: (model.feature_size(modality),),
            "joint": lambda: (
                model.feature_size(model.modalities[0]) if len(model.modalities) == 1 else model.joint_size,
            ),
            "controls": lambda: (model.num_controls,),
            "encoded": lambda: model.encoded_shape(modality),
            "sample": lambda: model.shapes[modality],
        }
        for word in said.shape or ():
            if word is None or word in COMMON:
                yield None
            elif isinstance(word, int):
                yield word
            else:
                assert word in sizes, f"a size is a number, None, {', '.join((*COMMON, *sizes))}, not {word!r}"
                yield from sizes[word]()

    def _flaw(self, field: str, said: Declared, names: tuple[str, ...]) -> str:
        """Return the fault in the names of a tree, or "". Results are cached: most clients send the same names."""
        place = field, said, names
        if place not in self._named:
            find = self._unlike_model if said.kind in OF_THE_MODEL else self._unlike_federation
            self._named[place] = find(field, said, names)
        return self._named[place]

    def _unlike_federation(self, field: str, said: Declared, names: tuple[str, ...]) -> str:
        blocks = self._blocks(said, Holder(self.modalities, self.modalities, self.model.modalities).names(said))
        strange = [name for name in names if name not in blocks]
        return f"{field} holds '{strange[0]}', expected are {', '.join(sorted(blocks))}" if strange else ""

    def _blocks(self, said: Declared, names: tuple[str, ...]) -> set[str]:
        """Return those names that have the size of a modality which the shape of the field needs."""
        sizes = {*(said.shape or ())}
        if not OF_A_MODALITY & sizes:
            return {*names}
        return {*names} & {*(self.model.modalities if "encoded" in sizes else self.model.shapes)}

    def _unlike_model(self, field: str, said: Declared, names: tuple[str, ...]) -> str:
        ours = self._part(said)
        if strange := [name for name in names if name not in ours]:
            lacks = "the model does not have" if strange[0] not in self.template else f"is not one of the {said.part}"
            return f"{field} holds '{strange[0]}', which {lacks}"
        if said.partial:
            return ""
        for (block, _), of_group in groupby(sorted(ours, key=self._group), self._group):
            group = set(of_group)
            if group & set(names) and (missing := group - set(names)):
                return f"{field} lacks '{min(missing)}' and has other parts of block '{block}'"
        return ""

    def _part(self, said: Declared) -> tuple[str, ...]:
        """Return the names of the parameters that a field may hold."""
        if not said.part:
            return tuple(self.template)
        head = self.model.head()  # a method's own parameters, which `received_template` adds, are in neither part
        ours = head if said.part == "head" else (n for n in self.model.names(self.model.modalities) if n not in head)
        return tuple(name for name in ours if name in self.template)

    def _group(self, name: str) -> tuple[str, bool]:
        """Return the group of a name: its block, and whether the tensor is a buffer.

        A client sends either all names of a group or none of them.
        """
        return block_of(name), self.model.is_buffer(name)


def foreign(part: ReplyStack, registry: ClientRegistry) -> dict[int, str]:
    """Return the clients that sent blocks of modalities they lack, each with the reason to drop the reply."""
    whole, named = part.message.whole, tensors(part.message)
    sent = {block_of(key) for name, key, _ in named if key is not None and name not in whole}
    known = {client: {*registry.owned(client), SHARED, LABELS} for client in part.clients if client >= 0}
    more = {client: min(sent - own) for client, own in known.items() if not sent <= own}
    return {client: f"sent something of {block}, which it does not have" for client, block in more.items()}


def largest_magnitude(msg: Message) -> float:
    """Return the largest magnitude of a message's numbers: NaN if there is a NaN, and 0 if there are no numbers."""
    held = [value for _, _, value in tensors(msg) if value.is_floating_point() and value.numel()]
    with threads_worth(sum(value.nbytes for value in held)):
        peaks: dict[torch.device, list[Tensor]] = {}  # a message may hold tensors on the CPU and on a GPU
        for value in held:
            peaks.setdefault(value.device, []).extend(bound.abs().float() for bound in value.aminmax())
        return torch.tensor([0.0, *(float(torch.stack(group).amax()) for group in peaks.values())]).amax().item()


def _together(norms: list[Tensor]) -> NDArray[np.float64]:
    """Return tensors (K,), which may be on different devices and of different types, as one array (tensors, K)."""
    kinds = {(norm.device, norm.dtype) for norm in norms}
    if len(kinds) > 1:
        norms = [norm.to("cpu", torch.float64) for norm in norms]
    together: NDArray[np.float64] = torch.stack(norms).cpu().numpy().astype(np.float64)
    return together


def _at(field: str, key: str | None) -> str:
    return field if key is None else f"{field}.{key} (block {block_of(key)})"
