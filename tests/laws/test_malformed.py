"""One reply that is not what it should be never ends a run in a traceback: it is dropped, or it does no harm."""

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from laws.rows import ROWS
from laws.test_laws import world
from polyfed.assembly import assemble
from polyfed.errors import PolyfedError
from polyfed.messages import Message
from polyfed.recipe import Recipe
from polyfed.replies import Answer, Part
from polyfed.selection import DivFl, PowD, Selector, Uniform
from polyfed.tree import Tree
from world import through

BAD = 2
"""The client whose replies are bent; in most worlds it holds both modalities."""


def entries(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """A change of every tensor of a field."""
    return lambda v: change(v) if isinstance(v, Tensor) else {name: change(t) for name, t in v.items()}


def lacking(place: int) -> Callable[[Any], Any]:
    """A tree without one of its tensors."""
    return lambda v: v if isinstance(v, Tensor) else {n: t for i, (n, t) in enumerate(v.items()) if i != place % len(v)}


BENT: dict[str, Callable[[Any], Any]] = {
    "without its first tensor": lacking(0),
    "without its last tensor": lacking(-1),
    "empty": lambda v: v if isinstance(v, Tensor) else {},
    "with a name too many": lambda v: v if isinstance(v, Tensor) else v | {"stranger": next(iter(v.values()))},
    "narrower": entries(lambda t: t[..., :-1] if t.dim() > 1 else t),
    "longer": entries(lambda t: torch.cat([t, t[:, :1]], 1) if t.dim() > 1 else t),
    "flat": entries(lambda t: t.reshape(len(t), -1)),
    "one number": entries(lambda t: t.reshape(len(t), -1)[:, 0]),
    "zero": entries(torch.zeros_like),
    "negative": entries(lambda t: -t.abs() - 1 if t.dtype != torch.bool else ~t),
    "huge": entries(lambda t: t + 1e30 if t.is_floating_point() else t),
    "of whole numbers": entries(lambda t: t.to(torch.int64)),
}


def only(part: Part, clients: set[int]) -> Part | None:
    """The part of a part."""
    return part.without(set(part.clients) - clients)


def run(made: Recipe, bend: Callable[[str, Message], Message]) -> None:
    """Two rounds in which one client's replies go through `bend`."""
    parts = assemble(made)
    fed = parts.fed
    answer = fed.engine.answer

    def bent(ask: Any, asked: Any, send: Any) -> Answer:
        got = answer(ask, asked, send)
        bad = [Part((BAD,), bend(ask.name, part.message)) for p in got.parts if (part := only(p, {BAD}))]
        return replace(got, parts=[*bad, *(part for p in got.parts if (part := p.without({BAD})))])

    fed.engine.answer = bent  # type: ignore[method-assign]
    parts.algorithm.evaluate(through(parts, 2), fed)


def sent(made: Recipe) -> dict[tuple[str, str], Tensor | Tree]:
    """What the client sends, by task and field."""
    seen: dict[tuple[str, str], Tensor | Tree] = {}

    def note(task: str, msg: Message) -> Message:
        for name in msg.kinds:
            value: Tensor | Tree = getattr(msg, name)
            if isinstance(value, Tensor) or value:
                seen.setdefault((task, name), value)
        return msg

    run(made, note)
    return seen


def same(one: Any, other: Any) -> bool:
    """Whether a change changes nothing."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return list(one) == list(other) and all(same(one[name], other[name]) for name in one)


def everybody(made: Recipe) -> Recipe:
    """With all clients in every cohort."""
    if not hasattr(made.algorithm, "selector"):
        return made
    return replace(made, algorithm=replace(made.algorithm, selector=Uniform(participation=1.0)))


def place_of(error: Exception) -> str:
    """Where in the package it came up."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/polyfed/" in frame.filename][-1]
    return f"{ours.filename.rpartition('polyfed/')[-1]}:{ours.lineno}"


def under(selector: Selector) -> Recipe:
    """FedAvg, its cohort chosen by a selector that asks the clients itself."""
    made = world("fedavg")
    return replace(made, algorithm=replace(made.algorithm, selector=selector))  # type: ignore[call-arg]


def u_shaped() -> Recipe:
    """SplitFed whose clients keep labels and head."""
    made = world("splitfed", u_shaped=True)
    egress = {block: {"server": ["parameters", "embeddings", "statistic"]} for block in ("a", "b", "shared")}
    return replace(made, model=replace(made.model, head=(8,)), egress=egress)


CASES: dict[str, Callable[[], Recipe]] = {
    **{name: lambda name=name: everybody(world(name)) for name in sorted(ROWS)},  # type: ignore[misc]
    "cmsfed, deltas": lambda: everybody(world("cmsfed", gradient_split="delta")),
    "splitfed, u-shaped": u_shaped,
    "hfm, head at the edge": lambda: world("hfm", head_update="server"),
    "fedavg under divfl": lambda: under(DivFl(participation=3)),
    "fedavg under pow-d": lambda: under(PowD(participation=3, d=6, allow_incongruent=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_reply_ends_no_run(case: str) -> None:
    made, crashed = CASES[case](), []
    found = sent(made)
    assert found, "the client was never asked"
    for (task, field), value in found.items():
        for how, change in BENT.items():
            if same(value, change(value)):
                continue

            def bend(asked: str, msg: Message, task: str = task, field: str = field, change: Any = change) -> Message:
                value = getattr(msg, field, None)
                bends = asked == task and (isinstance(value, Tensor) or value)
                return replace(msg, **{field: change(value)}) if bends else msg  # type: ignore[type-var]

            try:
                run(made, bend)
            except PolyfedError:
                continue
            except Exception as error:
                crashed.append(f"{task}.{field} {how}: {type(error).__name__}: {error!s:.90} at {place_of(error)}")
    assert not crashed, "\n".join(crashed)
