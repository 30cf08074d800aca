"""The vectorised engine: it runs the whole task of many clients at once, training loop included, under one `vmap`.

Clients share a stack if they have the same modalities, and if their messages and local states have the same names,
shapes and types. The engine sorts these clients by number of rows, which keeps padding small, and divides them into
stacks that fit a memory budget. Evaluation clients, and clients without another client to share a stack with, run one
by one. If a task declares `loop_because` or raises an exception in a stack, its clients also run one by one, and the
engine emits the event `looped`.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import OutOfMemoryError, Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message, cut, map_fields, map_tensors, tensors
from polyfed.core.request import Request, Send, client_key, noise_key
from polyfed.core.tree import SHARED, Tree, same_tensors, size_bytes
from polyfed.engines.base import Exchange, held_out_of
from polyfed.engines.in_process import InProcess
from polyfed.engines.machine.gpu import with_rows
from polyfed.engines.masking import masked_stack, secrets_apart
from polyfed.engines.stack_division import num_stacks, stack_bytes
from polyfed.engines.task_results import Inputs, only_the_gate_refuses, reason_of, reply_and_local
from polyfed.engines.work_count import given_work
from polyfed.engines.workers.process import Unit
from polyfed.federation.wire.compression import residuals_apart
from polyfed.model import Model
from polyfed.privacy.egress.limits import NO_LIMITS
from polyfed.training import StackedClientData
from polyfed.training.programs.replay import pays
from polyfed.training.step_plan import Rows

CONVOLVES = (
    "large 2-d convolutions fill a CPU as they are, stacked they take up to twice the time; [engine] stack insists"
)
"""The reason in the event `looped` for image models on a CPU (measured in docs/performance.md)."""

STEP_FLOPS = 7e7
"""Floating-point operations of the forward pass of one step, for models with 2-d convolutions. Up to this number, a
stack of clients is faster than a loop on a CPU: 1.2 to 2 times. From 1.2e8 on, it is not (docs/performance.md)."""

RECOMPUTES = "gradient checkpointing computes layers again in the backward pass, which vmap cannot"
"""The reason in the event `looped` for models with gradient checkpointing."""


LIMITED = "[limits] are checked in every step of a client's training"
"""The reason in the event `looped` for recipes with [limits]."""


class Vectorised(InProcess):
    """Runs stacks of similar clients. It also takes the arguments of `Engine`.

    Args:
        stack: largest number of clients in a stack. If it is 0, the rules of `engines/stack_division.py` decide, and
            models with large 2-d convolutions run one client at a time on a CPU.
        replay: whether training steps on a CPU are traced, rewritten and replayed.
    """

    name = "vectorised"
    imports = ("torch._dynamo",)  # `torch.func.grad` imports it at its first call, which takes seconds

    def __init__(self, *args: Any, stack: int = 0, replay: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # on a GPU, a program is no faster than direct steps, and making it takes up to six times the memory of a step
        # (docs/results/gpu.md)
        self.stack, self.replay = stack, replay and self.trains_on.type == "cpu"
        self._noted: set[str] = set()

    @override
    def units(self, request: Request, clients: Sequence[int], send: Send) -> Iterator[Unit]:
        loop_because = request.loop_because or (RECOMPUTES if self.model.recomputes else "")
        if not loop_because and not self.stack and self.convolutions_fill_a_core():
            loop_because = CONVOLVES
        if not loop_because and self.limits != NO_LIMITS:
            loop_because = LIMITED
        if loop_because:
            self.looped(request, loop_because)
            yield from ([client] for client in clients)
            return
        alike: dict[Any, list[int]] = {}
        for client in clients:
            form = None if isinstance(send, Message) else _form(send[client])
            own, _ = residuals_apart(self.local(request, client))
            kept = tuple((name, value.shape, value.dtype) for name, value in own.items())
            alike.setdefault((self.context(client).modalities, client < 0, form, kept), []).append(client)
        for (_, evaluation_client, _, _), group in alike.items():
            if evaluation_client:  # evaluation clients have many rows, so stacking does not save time
                yield from ([client] for client in group)
                continue
            by_length = sorted((rows, client) for client, rows in self.registry.rows_of(group).items())
            group = [client for _, client in by_length]
            if self.stack:
                parts = [group[start : start + self.stack] for start in range(0, len(group), self.stack)]
            else:
                stacks = max(math.ceil(len(group) / self._fitting(group)), self._fastest(request, group))
                parts = [part.tolist() for part in np.array_split(group, stacks)]
            yield from map(sorted, parts)

    def convolutions_fill_a_core(self) -> bool:
        """Return whether each client has so much work in 2-d convolutions that a stack is slower than a loop."""
        if self.trains_on.type != "cpu" or not self.model.convolves:
            return False
        rows = self.algorithm.train.batch_size or int(self.registry.num_rows.max())
        return rows * sum(self.model.flops(block) for block in (*self.model.modalities, SHARED)) > STEP_FLOPS

    def _fitting(self, group: list[int]) -> int:
        """Return how many of these clients fit the memory budget.

        A client needs memory for its parameters, gradients, two moments, and the samples and activations of a step.
        """
        context, rows = self.context(group[0]), self.algorithm.train.batch_size
        sample = sum(4 * math.prod(self.columns.modalities[m].shape) for m in context.modalities)
        # on a CPU a rough bound is enough: there the cache and the cores limit a stack long before the memory does
        on_cpu = self.trains_on.type == "cpu"
        step = 12 * sample if on_cpu else sample + self.model.activation_bytes(context.modalities)
        batch = (rows or int(self.registry.num_rows[group[-1]])) * step
        return max(1, stack_bytes(self.trains_on) // (4 * size_bytes(context.initial) + batch + 1))

    def _fastest(self, request: Request, group: list[int]) -> int:
        """Return into how many stacks these clients are divided so that a round takes the least time.

        On GPUs, each worker process gets one stack, because every further stack would dispatch the same operations.
        """
        if self.trains_on.type != "cpu":
            return 1 if self.pool is None else min(self.pool.num, len(group))
        train, num_steps, work = self.algorithm.train, self.steps(group[-1]), self.work(group)
        replayed = self.replay and self.per_sample(request, group[0]) is None and pays(train, num_steps, request.round)
        return num_stacks(
            len(group),
            work=sum(work.values()),
            step=work[group[-1]] / num_steps,
            weights=size_bytes(self.context(group[0]).initial),
            cached=replayed,
        )

    @override
    def stack_exchange(self, request: Request, group: Unit, send: Send) -> "StackExchange":
        return StackExchange(self, request, group, send)

    def stacked_view(self, request: Request, group: Unit) -> "partial[StackedClientData]":
        """Return a constructor of the clients' datasets under `vmap`. It lacks only the argument `lane`."""
        train, tests = self.population.train, held_out_of(self.population, request.held_out)
        rows, own = Rows.of(train, group), None if tests is None else Rows.of(tests, group)
        read = [part.index for part in (rows, own) if part is not None]
        modalities = self.context(group[0]).modalities
        return partial(
            StackedClientData,
            columns=with_rows(self.columns, read, modalities, self.device),
            stack=rows.to(self.device),
            keys=tuple(client_key(request, client) for client in group),
            modalities=modalities,
            model=self.model,
            round=request.round,
            rounds=request.rounds,
            test_stack=None if own is None else own.to(self.device),
            replays=self.replay,
            privacy=self.per_sample(request, group[0]),
        )

    def looped(self, request: Request, reason: str) -> None:
        """Emit the event `looped`, once for each task and reason."""
        if (text := f"{request.name}: {reason}") not in self._noted:
            self._noted.add(text)
            self.emit("looped", task=request.name, reason=reason)


class StackExchange(Exchange):
    """The exchange with a stack of clients, whose task runs once under `vmap`."""

    stacked = True

    def __init__(self, engine: Vectorised, request: Request, group: Unit, send: Send) -> None:
        messages = [send] if isinstance(send, Message) else [send[client] for client in group]
        blocks = engine.context(group[0]).blocks
        self.received = [engine.to_device(cut(msg, blocks)) for msg in messages]
        super().__init__(engine, request, group, self.received[0])
        self.stack, self.group = engine, group
        apart = [residuals_apart(engine.local(request, client)) for client in group]
        owned = [secrets_apart(request, own) for own, _ in apart]
        self.residuals = [residuals for _, residuals in apart]
        self.secrets = [secrets for _, secrets in owned]
        self.before, self.local_dims = _stack_trees([own for own, _ in owned])
        self.fields, self.field_dims = _stack_messages(self.received)
        self.view = engine.stacked_view(request, group)
        self.left: list[Tree] | None = None

    @override
    def run(self) -> Message | None:
        engine, request, kind = self.stack, self.request, type(self.got)
        reply_type: list[type[Message]] = []
        inputs = Inputs(request, self.context, self.fields, self.before)

        def one(lane: Tensor, local: Tree, got: dict[str, Any]) -> tuple[dict[str, Any], Tree, Tensor]:
            data = engine.metered(request, self.group, self.view(lane=lane))
            returned = request.task(self.context, data, local, kind(**got))
            reply, after = reply_and_local(request, returned)
            reply_type.append(type(reply))
            return {name: getattr(reply, name) for name in reply.kinds}, after, given_work(data)

        try:
            with only_the_gate_refuses(request), inputs.unchanged():
                lanes = torch.arange(len(self.group), device=engine.device)
                dims = 0, self.local_dims, self.field_dims
                with separate_attention():
                    values, after, work = vmap(one, in_dims=dims)(lanes, self.before, self.fields)
            engine.count_given(request, self.group, work)
            leaving = inputs.apart(self.protected(_without_padding(reply_type[0](**values)), after))
        except Exception as error:
            if self.ends_the_run(error):
                raise
            engine.looped(request, too_large(self.group) if isinstance(error, OutOfMemoryError) else reason_of(error))
            if engine.clock is not None:
                engine.clock.forget(request.number, self.group)
            return None
        self.arrived()
        return self.released(leaving)

    def protected(self, made: Message, after: Tree) -> Message:
        """Return the stacked replies with clipping, noise and mask, and set the local states that the clients keep."""
        engine, request, leaving = self.stack, self.request, made
        if engine.privacy is not None:
            noise = [noise_key(request, client) for client in self.group]
            leaving = made = engine.privacy.of_stack(request.name, self.fields, made, noise)
        if request.reply.masks is not None or not same_tensors(after, self.before):
            leaving, self.left = masked_stack(request, made, after, self.secrets)
        leaving = self._compressed_stack(leaving)
        counts = tuple(engine.registry.rows_of(self.group).values())
        _refuse_padding(request, made, counts)
        _refuse_kept_padding(request, after, self.before, counts, engine.model)
        return leaving

    def _compressed_stack(self, leaving: Message) -> Message:
        """Return the stacked replies as the server will read them, and put what compression lost into `left`."""
        if self.engine.compression is None or self.clients[0] < 0:
            return leaving
        found = []
        for place, client in enumerate(self.group):
            got = self.received[place if len(self.received) > 1 else 0]
            reply = map_tensors(leaving, lambda t, place=place: t[place])
            found.append(self.compressed(client, got, reply, self.residuals[place]))
        after = [residuals for _, residuals in found]
        left = self.left
        if left is None and any(residuals for residuals in after):  # the stacked tree has no entry of its own
            left = [{name: value[place] for name, value in self.before.items()} for place in range(len(self.group))]
        self.left = None if left is None else [{**own, **more} for own, more in zip(left, after, strict=True)]
        first, *others = [reply for reply, _ in found]
        places = self.packings

        def together(field: str, value: Any, *values: Any) -> Any:
            if isinstance(value, Tensor):
                return getattr(leaving, field)
            whole = getattr(leaving, field)
            return {
                name: torch.stack([tree[name] for tree in (value, *values)]) if (field, name) in places else whole[name]
                for name in value
            }

        return map_fields(first, together, *others)  # type: ignore[no-any-return]

    def arrived(self) -> None:
        """Book what the clients received."""
        # Only now: if the stack fails, its clients run one by one, each of them books what it received, and the ledger
        # would list the message twice.
        if type(self.got).counts and len(self.received) > 1:
            for client, msg in zip(self.group, self.received, strict=True):
                self.engine.node((client,), self.context).receive(self.request, msg)
        else:  # all messages have the same names and shapes, so one ledger entry is enough for all clients
            self.gate.receive(self.request, self.got)

    @override
    def keep(self) -> None:
        if self.left is not None:
            self.engine.keep(dict(zip(self.group, self.left, strict=True)))


@contextmanager
def separate_attention() -> Iterator[None]:
    """Compute attention as separate matrix products in this block.

    `vmap` has no rule for the gradients of PyTorch's fused attention and computes them client by client, which takes
    four times as long on a GPU (docs/results/gpu.md).
    """
    cuda = torch.backends.cuda
    allowed = cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    # otherwise PyTorch mixes bfloat16 with float32 here under autocast, on a CPU too, and refuses the product
    cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def too_large(group: Unit) -> str:
    """The reason in the event `looped` for a stack that does not fit the memory of the GPU."""
    half = max(1, len(group) // 2)
    return (
        f"{len(group)} clients in one stack need more memory than the GPU has; [engine] stack = {half} limits a stack"
    )


def _form(msg: Message) -> Any:
    """Return the names, shapes and types of a message's tensors. Messages can be stacked if these are equal."""
    form: list[Any] = []
    for name in msg.kinds:
        value = getattr(msg, name)
        trees = {"": value} if isinstance(value, Tensor) else value
        first = 1 if name in msg.counts else 0  # the numbers of rows may differ
        form.append((name, tuple((key, tuple(tensor.shape[first:]), tensor.dtype) for key, tensor in trees.items())))
    return tuple(form)


def _stack_trees(trees: list[Tree]) -> tuple[Tree, dict[str, int | None]]:
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}, dict.fromkeys(trees[0], 0)


def _stack_messages(messages: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stack fields along a new client axis. A tensor that all clients share gets no axis (dimension None)."""
    fields: dict[str, Any] = {}
    dims: dict[str, Any] = {}
    for name in messages[0].kinds:
        values = [getattr(msg, name) for msg in messages]
        stack = _pad_and_stack if name in messages[0].counts else _stack_or_share
        if isinstance(values[0], Tensor):
            fields[name], dims[name] = stack(values)
        else:
            pairs = {key: stack([value[key] for value in values]) for key in values[0]}
            fields[name] = {key: pair[0] for key, pair in pairs.items()}
            dims[name] = {key: pair[1] for key, pair in pairs.items()}
    return fields, dims


def _stack_or_share(values: list[Tensor]) -> tuple[Tensor, int | None]:
    if all(value is values[0] for value in values):
        return values[0], None
    return torch.stack(values), 0


def _pad_and_stack(values: list[Tensor]) -> tuple[Tensor, int | None]:
    if all(value is values[0] for value in values):
        return values[0], None
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True), 0


def _without_padding(reply: Any) -> Any:
    """Set the entries of padding rows to zero, because the task's results for padding are meaningless."""
    changed: dict[str, Any] = {}
    for name, count in reply.counts.items():
        value, rows_K = getattr(reply, name), getattr(reply, count)

        def clean(t: Tensor, rows_K: Tensor = rows_K) -> Tensor:
            real = torch.arange(t.shape[1], device=t.device) < rows_K.unsqueeze(1)
            return torch.where(real.view(*real.shape, *(1,) * (t.dim() - 2)), t, torch.zeros_like(t))

        changed[name] = clean(value) if isinstance(value, Tensor) else {key: clean(t) for key, t in value.items()}
    return replace(reply, **changed) if changed else reply


def _refuse_padding(request: Request, reply: Message, counts: Sequence[int]) -> None:
    """Refuse a field that has an entry for each row but does not declare `rows`, because it may contain padding.

    Raises:
        RecipeError: the field declares no `rows`, its first size is open, and its length equals the padded number of
            rows.
    """
    for name, key, value in tensors(reply):
        said = reply.declared[name]
        told = said.rows is not None or said.kind == "statistic" or (said.shape or ("",))[0] is not None
        if not told and _may_be_padded(value, counts):
            raise RecipeError(
                f"task {request.name} sends {name if key is None else f'{name}.{key}'} with an entry for each of its "
                f"rows, and {type(reply).__name__} does not say so: in a stack of unequal clients it has been padded. "
                f"Declare carries('{said.kind}', rows='num_rows') with a field num_rows, or its shape="
            )


def _refuse_kept_padding(request: Request, after: Tree, before: Tree, counts: Sequence[int], model: Model) -> None:
    """Refuse a new tensor of the local state whose length follows the number of rows, because it may contain padding.

    A tensor of the model, under any prefix, is none: a client may happen to have as many rows as a layer has units.

    Raises:
        RecipeError: the length of a new tensor equals the padded number of rows.
    """
    for name, value in after.items():
        is_new = name not in before or before[name].shape != value.shape
        if is_new and _may_be_padded(value, counts) and not _is_of_the_model(name, value, model):
            raise RecipeError(
                f"task {request.name} keeps '{name}' with an entry for each of a client's rows. Clients of unequal "
                "length cannot be stacked then: make it in Algorithm.local with the length each client needs, or mark "
                "the task with loop_because"
            )


def _is_of_the_model(name: str, value: Tensor, model: Model) -> bool:
    """Return whether `value` (K, ...) has the shape of the model's tensor of this name, which may have prefixes."""
    template = model.template
    while name and name not in template:
        name = name.partition(".")[2]
    return bool(name) and template[name].shape == value.shape[1:]


def _may_be_padded(value: Tensor, counts: Sequence[int]) -> bool:
    """Return whether axis 1 of `value` may contain padded rows.

    This is the case if the clients have different numbers of rows, and axis 1 is as long as the largest number.
    """
    return len(set(counts)) > 1 and value.dim() > 1 and value.shape[1] == max(counts)
