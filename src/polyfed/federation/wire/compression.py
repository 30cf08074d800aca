"""The section [wire]: messages with compressed parameters and gradients, and error feedback.

A client sends parameters as the compressed difference from what it received, and gradients as they are. With error
feedback, it adds what the compression of its last reply to the same task lost (Seide, Fu, Droppo, Li, Yu, "1-bit
stochastic gradient descent", Interspeech 2014; Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD",
ICML 2019). Both sides compute what the other one holds, so server, simulation and device have the same numbers.

Only tensors with a counterpart of the same name and shape in what the client received are compressed, because the
receiver then knows the shape and cannot be made to unpack a larger one. Buffers, such as the variances of BatchNorm,
travel whole: they have ranges, and rounding could leave them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import BadReply, RecipeError, did_you_mean
from polyfed.core.messages import OF_THE_MODEL, Message, map_fields, tensors
from polyfed.core.option_checks import FRACTION, check_ranges
from polyfed.core.packing import Form, Packing, Packings, Pieces, Place
from polyfed.core.request import Request, Send, noise_key
from polyfed.core.tree import Tree, block_of
from polyfed.model import Model

RESIDUAL = "residual."
"""The names in a client's local state that hold what compression has lost begin with this. No task sees them."""

NONE = "none"
FORMS: tuple[str, ...] = (NONE, *get_args(Form))


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The section [wire].

    Attributes:
        compress: how clients compress the parameters and gradients that they send: `none`, `bf16` (half the bytes),
            `int8` (a quarter) or `top-k` (the largest entries, 8 bytes each); or a table with a form for each modality
            and for `shared`. Blocks that the table lacks travel whole.
        fraction: share of the entries that `top-k` sends.
        scale: whether `int8` has one scale for each row of a tensor, or one for the tensor.
        error_feedback: whether clients keep what compression loses, and add it to their next reply.
        down: how the server rounds the parameters that it sends. `bf16` rounds up or down at random, so that small
            updates survive on average.
    """

    compress: Any = NONE
    fraction: Annotated[float, FRACTION] = 0.01
    scale: Literal["row", "tensor"] = "row"
    error_feedback: bool = True
    down: Literal["none", "bf16"] = "none"

    def __post_init__(self) -> None:
        """Check that every value is allowed."""
        check_ranges("[wire]", self)
        given = self.compress.values() if isinstance(self.compress, Mapping) else [self.compress]
        for form in given:
            if form not in FORMS:
                raise RecipeError(f"[wire] compress = {form!r}; {did_you_mean(str(form), FORMS)}", ("wire", "compress"))

    @property
    def forms(self) -> frozenset[str]:
        """The forms that occur."""
        given = self.compress.values() if isinstance(self.compress, Mapping) else [self.compress]
        return frozenset(given) - {NONE}

    @property
    def idle(self) -> dict[str, str]:
        """The options that have no effect, each with the setting that causes this."""
        result = {} if self.forms else {"error_feedback": "compress = 'none'"}
        if "top-k" not in self.forms:
            result["fraction"] = "a compress without 'top-k'"
        if "int8" not in self.forms:
            result["scale"] = "a compress without 'int8'"
        return result

    def of(self, block: str) -> Packing | None:
        """Return how clients compress a block."""
        form = self.compress.get(block, NONE) if isinstance(self.compress, Mapping) else self.compress
        return None if form == NONE else Packing(form, self.fraction, self.scale == "row")


ROUNDED = Packing("bf16")


@dataclass(frozen=True)
class Slot:
    """How one tensor of a message is compressed.

    Attributes:
        packing: its form.
        base: the tensor to which the sent difference is added, or, for a gradient, one of its shape and type.
        differs: whether the difference from `base` is sent.
    """

    packing: Packing
    base: Tensor
    differs: bool = True

    def unpacked(self, pieces: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the tensor that pieces stand for, and what they say themselves."""
        said = self.packing.unpacked(pieces, tuple(self.base.shape), self.base.dtype)
        return self.base + said if self.differs else said, said


@dataclass(frozen=True)
class Expected:
    """The compressed tensors of the reply of one client, for `wire_format.decode`."""

    slots: Mapping[Place, Slot]

    def packing(self, place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> Packing | None:
        """Return how a tensor is compressed that a header announces, before any memory is taken for it.

        Raises:
            BadReply: it has not the shape and the type that this client was sent.
        """
        if (slot := self.slots.get(place)) is None:
            return None
        if tuple(slot.base.shape) != shape or slot.base.dtype != dtype:
            field, name = place
            raise BadReply(f"{field}.{name} has the shape {shape}, {dtype}, and {tuple(slot.base.shape)} was sent")
        return slot.packing

    def value(self, place: Place, pieces: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that pieces stand for."""
        return self.slots[place].unpacked(pieces)[0]


@dataclass(frozen=True)
class Rounded:
    """The compressed tensors of a message to a client, for `wire_format.decode`."""

    compression: "Compression"
    got: type[Message]

    def packing(self, place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> Packing | None:
        """Return how a tensor is compressed that a header announces. It takes at most four times its bytes."""
        return self.compression.packing_down(self.got, place, dtype)

    def value(self, place: Place, pieces: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that pieces stand for."""
        return ROUNDED.unpacked(pieces, shape, dtype)


@dataclass(frozen=True)
class Compression:
    """The section [wire] of a run.

    Attributes:
        wire: the section.
        model: the model, which knows its buffers.
    """

    wire: Wire
    model: Model

    # what clients send

    def slots(self, request: Request, got: Message) -> dict[Place, Slot]:
        """Return how the reply of a client is compressed.

        Args:
            got: the message that the client received.
        """
        result: dict[Place, Slot] = {}
        for field, said in request.reply.declared.items():
            if not compressible(request.reply, field, type(got)):
                continue
            source = field if said.kind == "parameters" else _parameters(type(got))
            for name, base in getattr(got, source).items():
                packing = self.wire.of(block_of(name))
                raw = base.numel() * base.element_size()
                if packing is None or not base.numel() or not self._is_wide(name, base.dtype):
                    continue
                if packing.size(tuple(base.shape), base.dtype) < raw:
                    result[field, name] = Slot(packing, base, said.kind == "parameters")
        return result

    def sent(
        self, request: Request, client: int, got: Message, reply: Any, residuals: Tree
    ) -> tuple[Any, Tree, Pieces, dict[Place, Packing]]:
        """Compress the reply of one client.

        Args:
            got: the message that the client received.
            residuals: what compression has lost so far, as in the client's local state.

        Returns:
            The reply as the server will read it, the residuals after it, what is sent in place of compressed tensors,
            and how they are compressed.
        """
        slots, after = self.slots(request, got), dict(residuals)
        pieces: Pieces = {}
        values: dict[Place, Tensor] = {}
        for field, name, value in tensors(reply):
            slot = slots.get((field, name))
            if slot is None or value.shape != slot.base.shape or value.dtype != slot.base.dtype:
                continue
            kept = f"{RESIDUAL}{request.name}.{field}.{name}"
            change = value.detach() - slot.base if slot.differs else value.detach()
            if self.wire.error_feedback and kept in after:
                change = change + after[kept]
            key = keys.key(noise_key(request, client), "wire", field, name or "")
            one = pieces[field, name] = slot.packing.packed(change, key)
            values[field, name], said = slot.unpacked(one)
            if self.wire.error_feedback:
                lost = change - said
                if bool(torch.isfinite(lost).all()):  # the server drops a reply that is not finite
                    after[kept] = lost
        return _with(reply, values), after, pieces, {place: slots[place].packing for place in pieces}

    def packings(self, request: Request, got: Message, reply: Message) -> Packings:
        """Return how a reply that the server has read was compressed."""
        slots = self.slots(request, got)
        return {
            (field, name): slots[field, name].packing for field, name, _ in tensors(reply) if (field, name) in slots
        }

    # what the server sends

    def packing_down(self, got: type[Message], place: Place, dtype: torch.dtype) -> Packing | None:
        """Return how a tensor of a message to clients is rounded, or None if it travels whole."""
        field, name = place
        said = got.declared.get(field)
        rounds = self.wire.down == "bf16" and said is not None and said.kind in OF_THE_MODEL and name is not None
        return ROUNDED if rounds and self._is_wide(str(name), dtype) else None

    def packings_down(self, msg: Message) -> Packings:
        """Return how the tensors of a message to clients are rounded."""
        result = {(f, n): self.packing_down(type(msg), (f, n), value.dtype) for f, n, value in tensors(msg)}
        return {place: packing for place, packing in result.items() if packing is not None}

    def pieces_down(self, msg: Message) -> Pieces:
        """Return what is sent in place of the rounded tensors of a message, which `rounded` has made."""
        places = self.packings_down(msg)
        return {(f, n): (value.to(torch.bfloat16),) for f, n, value in tensors(msg) if (f, n) in places}

    def rounded(self, request: Request, send: Send) -> Send:
        """Return the messages of a request as clients will read them. Messages that share a tensor still share it."""
        if self.wire.down == NONE:
            return send
        made: dict[int, Tensor] = {}

        def of_one(msg: Message) -> Any:
            values = {}
            for field, name, value in tensors(msg):
                if self.packing_down(type(msg), (field, name), value.dtype) is None:
                    continue
                if id(value) not in made:
                    key = keys.key(request.seed, "wire", request.round, request.number, field, name or "")
                    made[id(value)] = rounded_at_random(value, key)
                values[field, name] = made[id(value)]
            return _with(msg, values)

        return of_one(send) if isinstance(send, Message) else {client: of_one(msg) for client, msg in send.items()}

    def _is_wide(self, name: str, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float64) and not self.model.is_buffer(name)


def compressible(reply: type[Message], field: str, got: type[Message]) -> bool:
    """Return whether tensors of a field of a reply may be compressed: those that the client received, or gradients."""
    said = reply.declared[field]
    if said.kind not in OF_THE_MODEL or said.stacked or said.masked or said.within is not None:
        return False
    if said.kind == "gradients":
        return bool(_parameters(got))
    return field in got.declared and got.declared[field].kind == "parameters" and not got.declared[field].stacked


def residuals_apart(local: Tree) -> tuple[Tree, Tree]:
    """Return the local state that a task sees, and what compression has lost."""
    residuals = {name: value for name, value in local.items() if name.startswith(RESIDUAL)}
    return {name: value for name, value in local.items() if name not in residuals}, residuals


def rounded_at_random(value: Tensor, key: int) -> Tensor:
    """Round each entry to one of its two neighbours in bfloat16, so that its mean is exact. The type stays."""
    bits = value.to(torch.float32).contiguous().view(torch.int32)
    noise = keys.bits(key, tuple(value.shape), value.device) & 0xFFFF
    finite = torch.isfinite(value)
    up = ((bits + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(finite & torch.isfinite(up), up, value.to(torch.float32).to(torch.bfloat16)).to(value.dtype)


def _parameters(got: type[Message]) -> str:
    """Return the field of a message that holds parameters, one model of them; "" if it has none."""
    return next((n for n, said in got.declared.items() if said.kind == "parameters" and not said.stacked), "")


def _with(msg: Any, values: Mapping[Place, Tensor]) -> Any:
    """Return the message with other tensors at some places."""
    if not values:
        return msg

    def change(field: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return values.get((field, None), value)
        return {name: values.get((field, name), tensor) for name, tensor in value.items()}

    return map_fields(msg, change)
