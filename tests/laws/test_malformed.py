"""One reply that is not what it should be never ends a run: it is dropped with a reason, or it does no harm."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from laws.corruptions import CASES, FURTHER, Change, corruptions, entries, everybody, unlike
from laws.test_laws import world
from polyfed.core.errors import PolyfedError
from polyfed.core.messages import LABELS, Declared, Message, map_tensors
from polyfed.core.tree import SHARED, Tree
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.replies import Answer, Replies, stacked
from world import through

BAD = 2
"""The client whose replies are bent; in most worlds it holds both modalities."""

BENT: dict[str, Change] = {
    "without its first tensor": lambda v: v if isinstance(v, Tensor) else {n: v[n] for n in list(v)[1:]},
    "without its last tensor": lambda v: v if isinstance(v, Tensor) else {n: v[n] for n in list(v)[:-1]},
    "empty": lambda v: v if isinstance(v, Tensor) else {},
    "narrower": entries(lambda t: t[..., :-1] if t.dim() else t),
    "longer": entries(lambda t: torch.cat([t, t[:1]]) if t.dim() else t),
    "flat": entries(lambda t: t.reshape(-1)),
    "one number": entries(lambda t: t.reshape(-1)[0] if t.numel() else t),
    "zero": entries(torch.zeros_like),
    "negative": entries(lambda t: -t.abs() - 1 if t.dtype != torch.bool else ~t),
    "huge": entries(lambda t: t + 1e30 if t.is_floating_point() else t),
    "with a name of no modality": lambda v: v if isinstance(v, Tensor) else v | {SHARED: next(iter(v.values()))},
    "with labels' name": lambda v: v if isinstance(v, Tensor) else v | {LABELS: next(iter(v.values()))},
}
"""Changes that do not always make a reply unusable, or not in every field."""


@dataclass
class Outcome:
    """Who was left out: the bad client's reasons by task, and others with a reason."""

    reasons: dict[str, str] = field(default_factory=dict)
    others: dict[int, str] = field(default_factory=dict)


def run(made: Recipe, bend: Callable[[str, Message], Message]) -> Outcome:
    """Two rounds and an evaluation, in which one client's replies go through `bend`."""
    parts, found = assemble(made), Outcome()
    fed = parts.fed
    answer, emit = fed.engine.answer, fed.emit

    def bent(request: Any, asked: Any, send: Any) -> Answer:
        got, singly = answer(request, asked, send), dict[int, Message]()
        for part in got.parts:
            for at, client in enumerate(part.clients):
                one = map_tensors(part.message, lambda t, at=at: t[at])
                singly[client] = bend(request.name, one) if client == BAD else one
        return replace(got, parts=list(stacked(singly)))  # what is not told apart by its form shares a stack

    def listen(kind: str, **facts: Any) -> None:
        if kind == "client-missing" and facts["client"] != BAD:
            found.others[facts["client"]] = f"{facts['task']}: {facts['reason']}"
        elif kind == "client-missing":
            found.reasons.setdefault(facts["task"], facts["reason"])
        emit(kind, **facts)

    fed.engine.answer, fed.emit = bent, listen  # type: ignore[method-assign]
    parts.algorithm.evaluate(through(parts, 2), fed)
    return found


def sent(made: Recipe) -> dict[tuple[str, str], tuple[Tensor | Tree, Declared]]:
    """What the client sends, by task and field, and how the field is declared."""
    seen: dict[tuple[str, str], tuple[Tensor | Tree, Declared]] = {}

    def note(task: str, msg: Message) -> Message:
        for name, said in msg.declared.items():
            value: Tensor | Tree = getattr(msg, name)
            if isinstance(value, Tensor) or value:
                seen.setdefault((task, name), (value, said))
        return msg

    run(made, note)
    return seen


def briefly(made: Recipe) -> Recipe:
    """With the fewest local steps, because only what the server does with replies is tested here."""
    made = replace(made, clients=replace(made.clients, personal_test=0.2))
    train = getattr(made.algorithm, "train", None)
    if train is None:
        return made
    return replace(made, algorithm=replace(made.algorithm, train=replace(train, batch_size=64, epochs=1)))


def place_of(error: Exception) -> str:
    """Where in the package it came up."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/polyfed/" in frame.filename][-1]
    return f"{ours.filename.rpartition('polyfed/')[-1]}:{ours.lineno}"


def fault(made: Recipe, task: str, name: str, change: Change, refused: bool) -> str:
    """What is wrong with the server if a client's field is changed so; `refused` if the reply must be dropped."""

    def bend(asked: str, msg: Message) -> Message:
        value = getattr(msg, name, None)
        bends = asked == task and (isinstance(value, Tensor) or value)
        return replace(msg, **{name: change(value)}) if bends else msg  # type: ignore[type-var]

    try:
        found = run(made, bend)
    except PolyfedError as error:
        return f"the run ends: {error!s:.150}" if refused else ""
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.90} at {place_of(error)}"
    if found.others:
        return f"others are lost: {found.others}"
    if refused and name not in found.reasons.get(task, ""):
        return f"it is not refused by the name of the field, but: {found.reasons}"
    return ""


@pytest.mark.parametrize("case", [*CASES, *FURTHER])
def test_the_server_drops_each_corrupt_reply_with_a_reason_and_the_run_goes_on(case: str) -> None:
    made, crashed = briefly((CASES | FURTHER)[case]()), []
    found = sent(made)
    assert found, "the client was never asked"
    for (task, name), (value, said) in found.items():
        wrong = corruptions(said, received=False)
        for how, change in (BENT | wrong).items():
            if unlike(value, change(value)) and (words := fault(made, task, name, change, how in wrong)):
                if how == "huge" and words.startswith("others"):
                    continue  # a form says nothing of how large numbers are, and silos compute on them
                crashed.append(f"{task}.{name} {how}: {words}")
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
