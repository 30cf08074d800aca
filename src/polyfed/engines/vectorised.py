"""Groups of alike clients at once: the whole task of a client, its training loop included, under one `vmap`.

Clients are alike when they own the same modalities, receive the same kind of message and keep the same kind of local
state. A group is sorted by number of rows, so that little is padded, and cut into stacks that fit a memory budget. What
cannot be stacked (a task that says so, an examiner, a single client, a stack in which something raised) runs one client
after another, and an event says so: never silently.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.core.messages import OF_THE_MODEL, Message, cut, tensors
from polyfed.core.request import Request, Send
from polyfed.core.tree import Tree, size_bytes
from polyfed.engines.base import client_key, describe_failure, only_the_gate_refuses, reply_and_local
from polyfed.engines.in_process import InProcess
from polyfed.federation.replies import Answer, ReplyStack, stacked
from polyfed.training import StackedClientData
from polyfed.training.step_plan import Rows

STACK_BYTES = 512 * 2**20
"""Default budget of a stack: parameters, gradients, moments and the batch of all its clients together. Half a GiB
keeps two cores busy without touching the memory of a laptop; measured in docs/performance.md."""

CONVOLVES = "2-d convolutions fill a CPU as they are, stacked they take up to twice the time; [engine] stack insists"
"""Why a stack is not made by default; measured in docs/performance.md."""


class Vectorised(InProcess):
    """Runs alike clients stacked.

    Args:
        stack: most clients in a stack; 0 lets `STACK_BYTES` decide, and has models that convolve over images run one
            client after another on a CPU.
        replay: whether training steps may be traced and replayed (`view.replay`).
    """

    name = "vectorised"

    def __init__(self, *args: Any, stack: int = 0, replay: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stack, self.replay = stack, replay
        self._noted: set[str] = set()

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        """Run the task on these clients; see `Engine.answer`."""
        parts: list[ReplyStack] = []
        singles: dict[int, Message] = {}
        missing: dict[int, str] = {}
        for group in self._groups(request, clients, send):
            part = self._stacked(request, group, send) if len(group) > 1 else None
            if part is not None:
                parts.append(part)
                continue
            for client in group:
                single = self.alone(request, client, send, missing)
                if single is not None:
                    singles[client] = single
        return Answer.of([*parts, *stacked(singles)], missing)

    def _groups(self, request: Request, clients: Sequence[int], send: Send) -> Iterator[list[int]]:
        loop_because = request.loop_because
        if not loop_because and not self.stack and self.device.type == "cpu" and self.model.convolves:
            loop_because = CONVOLVES
        if loop_because:
            self._note(request, loop_because)
            yield from ([client] for client in clients)
            return
        alike: dict[Any, list[int]] = {}
        for client in clients:
            form = None if isinstance(send, Message) else _form(send[client])
            kept = tuple((name, value.shape, value.dtype) for name, value in self.local(request, client).items())
            alike.setdefault((self.context(client).modalities, client < 0, form, kept), []).append(client)
        for (_, evaluation_client, _, _), group in alike.items():
            if evaluation_client:  # the server's test set: one large table, nothing to gain from a stack
                yield from ([client] for client in group)
                continue
            by_length = sorted((rows, client) for client, rows in self.registry.rows_of(group).items())
            group = [client for _, client in by_length]
            size = self.stack or self._fitting(group)
            yield from (group[start : start + size] for start in range(0, len(group), size))

    def _fitting(self, group: list[int]) -> int:
        """How many of these clients fit the budget: weights, gradient and two moments, and activations of a step."""
        context = self.context(group[0])
        sample = sum(4 * math.prod(self.columns.modalities[m].shape) for m in context.modalities)
        # activations: a dozen times the input is a rough upper value for the encoders of model/encoders.py
        batch = (self.algorithm.train.batch_size or int(self.registry.num_rows[group[-1]])) * sample * 12
        return max(1, STACK_BYTES // (4 * size_bytes(context.initial) + batch + 1))

    def _stacked(self, request: Request, group: list[int], send: Send) -> ReplyStack | None:
        context = self.context(group[0])
        node = self.node(tuple(group), context)
        messages = [send] if isinstance(send, Message) else [send[client] for client in group]
        rows = Rows.pad([self.rows(client) for client in group])
        own_tests = [self.test_rows(client) for client in group]
        tests = None if any(t is None for t in own_tests) else Rows.pad([t for t in own_tests if t is not None])
        locals_, local_dims = _stack_trees([self.local(request, client) for client in group])
        lane = torch.arange(len(group), device=self.device)
        received = [self._to_device(cut(msg, context.blocks)) for msg in messages]
        fields, field_dims = _stack_messages(received)
        kind = type(received[0])
        reply_type: list[type[Message]] = []

        def one(lane: Tensor, local: Tree, got: dict[str, Any]) -> tuple[dict[str, Any], Tree]:
            view = StackedClientData(
                columns=self.columns,
                stack=rows,
                keys=tuple(client_key(request, client) for client in group),
                lane=lane,
                modalities=context.modalities,
                model=self.model,
                round=request.round,
                rounds=request.rounds,
                test_stack=tests,
                replays=self.replay,
            )
            with only_the_gate_refuses(request):
                returned = request.task(context, self.metered(request, group, view), local, kind(**got))
            reply, after = reply_and_local(request, returned)
            reply_type.append(type(reply))
            return {name: getattr(reply, name) for name in reply.kinds}, after

        try:
            values, after = vmap(one, in_dims=(0, local_dims, field_dims))(lane, locals_, fields)
        except PolyfedError:
            raise
        except Exception as error:
            if self.debug:
                error.add_note(describe_failure(request, group, received[0]))
                raise
            self._note(request, f"{type(error).__name__}: {error}")
            if self.clock is not None:
                self.clock.forget(request.number, group)
            return None
        if kind.counts and len(received) > 1:
            for client, msg in zip(group, received, strict=True):
                self.node((client,), context).receive(request, msg)
        else:  # all have the same form, so one entry speaks for all
            node.receive(request, received[0])
        made = reply_type[0](**values)
        _refuse_padding(request, made, rows.counts)
        _refuse_kept_padding(request, after, locals_, rows.counts)
        reply = node.release(request, _without_padding(made), stacked=True)
        for i, client in enumerate(group):
            self.locals[client] = {name: value[i].clone() for name, value in after.items()}
        # ascending, so that sums over clients run in the same order whatever their lengths
        return ReplyStack(tuple(group), reply).ascending()

    def _note(self, request: Request, reason: str) -> None:
        """Say once per task and reason that its clients run one by one."""
        if (text := f"{request.name}: {reason}") not in self._noted:
            self._noted.add(text)
            self.emit("looped", task=request.name, reason=reason)


def _form(msg: Message) -> Any:
    """What must be equal for messages to stack: the names and shapes of their tensors."""
    form: list[Any] = []
    for name in msg.kinds:
        value = getattr(msg, name)
        trees = {"": value} if isinstance(value, Tensor) else value
        first = 1 if name in msg.counts else 0  # numbers of rows may differ
        form.append((name, tuple((key, tuple(tensor.shape[first:]), tensor.dtype) for key, tensor in trees.items())))
    return tuple(form)


def _stack_trees(trees: list[Tree]) -> tuple[Tree, dict[str, int | None]]:
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}, dict.fromkeys(trees[0], 0)


def _stack_messages(messages: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields with a client axis where clients differ, and without one (dimension None) where all share a tensor."""
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
    """The stacked reply with zeros beyond each client's rows: what a task computes on padding means nothing."""
    changed: dict[str, Any] = {}
    for name, count in reply.counts.items():
        value, rows_K = getattr(reply, name), getattr(reply, count)

        def clean(t: Tensor, rows_K: Tensor = rows_K) -> Tensor:
            real = torch.arange(t.shape[1], device=t.device) < rows_K.unsqueeze(1)
            return torch.where(real.view(*real.shape, *(1,) * (t.dim() - 2)), t, torch.zeros_like(t))

        changed[name] = clean(value) if isinstance(value, Tensor) else {key: clean(t) for key, t in value.items()}
    return replace(reply, **changed) if changed else reply


def _refuse_padding(request: Request, reply: Message, counts: Sequence[int]) -> None:
    """Refuse to send what looks like an entry per row and does not say so: padding is made of another client's row."""
    for name, key, value in tensors(reply):
        said = reply.declared[name]
        told = said.rows is not None or said.shape is not None or said.kind in OF_THE_MODEL
        if not told and _may_be_padded(value, counts):
            raise RecipeError(
                f"task {request.name} sends {name if key is None else f'{name}.{key}'} with an entry for each of its "
                f"rows, and {type(reply).__name__} does not say so: in a stack of unequal clients it has been padded. "
                f"Declare carries('{said.kind}', rows='num_rows') with a field num_rows, or its shape="
            )


def _refuse_kept_padding(request: Request, after: Tree, before: Tree, counts: Sequence[int]) -> None:
    """Refuse to keep something new with an entry per row: in a stack of unequal clients it has been padded."""
    for name, value in after.items():
        is_new = name not in before or before[name].shape != value.shape
        if is_new and _may_be_padded(value, counts):
            raise RecipeError(
                f"task {request.name} keeps '{name}' with an entry for each of a client's rows. Clients of unequal "
                "length cannot be stacked then: make it in Algorithm.local with the length each client needs, or mark "
                "the task with loop_because"
            )


def _may_be_padded(value: Tensor, counts: Sequence[int]) -> bool:
    """Whether a stack's tensor has as many entries a client as the longest of unequal clients has rows."""
    return len(set(counts)) > 1 and value.dim() > 1 and value.shape[1] == max(counts)
