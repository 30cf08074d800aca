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
from polyfed.core.errors import PolyfedError
from polyfed.core.messages import LABELS, Message, map_tensors
from polyfed.core.tree import SHARED, Tree
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.replies import Answer, Replies, stacked
from polyfed.selection import DivFl, PowD, Selector, Uniform
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
    "of another precision": entries(lambda t: t.double() if t.is_floating_point() else t),
    "of half precision": entries(lambda t: t.half() if t.is_floating_point() else t),
    "of truth values": entries(lambda t: t.bool()),
    "no number": entries(lambda t: t * torch.nan),
    "infinite": entries(lambda t: t + torch.inf),
    "with a name of no modality": lambda v: v if isinstance(v, Tensor) else v | {SHARED: next(iter(v.values()))},
    "with labels' name": lambda v: v if isinstance(v, Tensor) else v | {LABELS: next(iter(v.values()))},
}


def run(made: Recipe, bend: Callable[[str, Message], Message]) -> dict[int, str]:
    """Two rounds in which one client's replies go through `bend`; who else was left out of an ask, and why."""
    parts = assemble(made)
    fed, lost = parts.fed, dict[int, str]()
    answer, emit = fed.engine.answer, fed.emit

    def bent(request: Any, asked: Any, send: Any) -> Answer:
        got, singly = answer(request, asked, send), dict[int, Message]()
        for part in got.parts:
            for at, client in enumerate(part.clients):
                one = map_tensors(part.message, lambda t, at=at: t[at : at + 1])
                singly[client] = map_tensors(bend(request.name, one) if client == BAD else one, lambda t: t[0])
        return replace(got, parts=list(stacked(singly)))  # what is not told apart by its form shares a stack

    def listen(kind: str, **facts: Any) -> None:
        if kind == "client-missing" and facts["client"] != BAD:
            lost[facts["client"]] = f"{facts['task']}: {facts['reason']}"
        emit(kind, **facts)

    fed.engine.answer, fed.emit = bent, listen  # type: ignore[method-assign]
    parts.algorithm.evaluate(through(parts, 2), fed)
    return lost


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


def briefly(made: Recipe) -> Recipe:
    """With the fewest local steps, because only what the server does with replies is tested here."""
    train = getattr(made.algorithm, "train", None)
    if train is None:
        return made
    return replace(made, algorithm=replace(made.algorithm, train=replace(train, batch_size=64, epochs=1)))


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
    made, crashed = briefly(CASES[case]()), []
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
                lost = run(made, bend)
                if lost and how != "huge":  # a form says nothing of how large numbers are, and silos compute on them
                    crashed.append(f"{task}.{field} {how}: others are lost: {lost}")
            except PolyfedError:
                continue
            except Exception as error:
                crashed.append(f"{task}.{field} {how}: {type(error).__name__}: {error!s:.90} at {place_of(error)}")
    assert not crashed, "\n".join(crashed)


def test_what_belongs_to_a_modality_that_a_client_lacks_is_left_out() -> None:
    parts = assemble(everybody(world("fedavg")))
    fed, lost = parts.fed, dict[int, str]()
    stranger = next(c for c in fed.clients if fed.clients.owned(c) == ("a",))
    answer, fed.emit = fed.engine.answer, lambda kind, **facts: lost.update({facts["client"]: facts["reason"]})

    def more(request: Any, asked: Any, send: Any) -> Answer:
        got = answer(request, asked, send)
        singly = Replies(got.parts)
        whole = {client: singly[client] for client in singly}
        whole[stranger] = replace(whole[stranger], params=fed.template)
        return replace(got, parts=list(stacked(whole)))

    fed.engine.answer = more  # type: ignore[method-assign]
    through(parts, 1)
    assert lost == {stranger: "sent something of b, which it does not have"}
