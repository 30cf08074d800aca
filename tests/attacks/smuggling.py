"""Federated averaging whose clients try to send what they did not declare, and checks that they fail."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyfed.algorithms.averaging import Averaging
from polyfed.core.errors import EgressError
from polyfed.core.messages import KINDS, OF_THE_MODEL, Message, carries, message
from polyfed.core.tree import Tree
from polyfed.experiment.checks.check import check, refuse_forbidden
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.privacy.egress.ledger import TO_CLIENT
from polyfed.training.optimisers import Train
from refusals import refuses
from world import through

ENGINES = ["sequential", "vectorised"]
TRAIN = Train(lr=0.1, batch_size=16, epochs=1)
OPEN = {block: {"server": list(KINDS)} for block in ("a", "b")}
"""Everything of the modalities may leave; of `shared` and labels, what may leave by default."""
EVERYTHING = OPEN | {block: {"server": list(KINDS)} for block in ("shared", "labels")}

Made = Callable[[Any, Any, Any], Any]
"""(context, data, fit) -> the reply"""


def smuggler(answer: Any, make: Made, **hooks: Any) -> Averaging:
    """FedAvg that says it answers with one message, and answers with what `make` gives."""

    @dataclass(frozen=True, kw_only=True)
    class Smuggler(Averaging):
        replies: ClassVar[type[Message]] = answer
        will_send = hooks.get("will_send", Averaging.will_send)

        def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Any, Tree]:
            return make(context, data, fit), local

    return Smuggler(train=TRAIN)


def update_with(kind: str, hint: Any = Tree, **said: Any) -> type[Any]:
    """An update with one more field, `extra`."""

    class More(Message):
        params: Tree = carries("parameters")
        loss: Tensor = carries("statistic")
        num_rows: Tensor = carries("statistic")

    More.__annotations__ |= {"extra": hint}
    shape = None if kind in OF_THE_MODEL else (None,)
    More.extra = carries(kind, **{"shape": shape} | said)  # type: ignore[attr-defined]
    return message(More)


def hiding(answer: type[Any], extra: Callable[[Any, Any], Any], **hooks: Any) -> Averaging:
    """FedAvg whose update holds something else in `extra`: `extra(context, data)`."""
    make = lambda context, data, fit: answer(fit.params, fit.loss, data.num_rows, extra(context, data))  # noqa: E731
    return smuggler(answer, make, **hooks)


def under(name: str) -> Callable[[Any, Any], Tree]:
    """A tree with three numbers under this name."""
    return lambda context, data: {name: data.num_rows + torch.zeros(3)}


def up(parts: Assembly) -> list[dict[str, Any]]:
    return [row for row in parts.ledger.rows() if row["destination"] != TO_CLIENT]


def places(rows: Any) -> set[tuple[str, ...]]:
    found = [row if isinstance(row, dict) else vars(row) for row in rows]
    return {tuple(row[key] for key in ("field", "kind", "block", "destination")) for row in found}


def refused(made: Recipe, words: str, error: type[Exception] = EgressError) -> str:
    """Refused by `check`, and by a run on every engine before anything leaves; the words of the gate."""
    with refuses(error, words):
        check(made)
    said = ""
    for engine in ENGINES:
        parts = assemble(replace(made, engine=replace(made.engine, name=engine)))
        refuse_forbidden(parts)
        with refuses(error, words) as caught:
            through(parts, 1)
        assert {row["verdict"] for row in up(parts)} <= {"refused"}
        assert parts.ledger.bytes_up == 0
        said = str(caught.value)
    return said


def announced(made: Recipe, *wanted: tuple[str, ...]) -> None:
    """Announced by `check`, and let out: what leaves is among what was announced as allowed."""
    planned = check(made).planned
    assert set(wanted) <= places(row for row in planned if row.allowed)
    for engine in ENGINES:
        parts = assemble(replace(made, engine=replace(made.engine, name=engine)))
        refuse_forbidden(parts)
        through(parts, 1)
        sent = places(up(parts))
        assert set(wanted) <= sent <= places(row for row in planned if row.allowed)
