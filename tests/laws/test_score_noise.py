"""A device that demands noise in scores tells nothing exact of its own test and validation rows, in any message."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from laws.test_announced import CASES, with_tests
from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.evaluate import Evaluate
from polyfed.core.errors import EgressError
from polyfed.core.messages import Message, carries, message
from polyfed.core.tree import Tree
from polyfed.engines.base import ClientExchange
from polyfed.evaluation.conformal import Kind
from polyfed.evaluation.subsets import Which
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.privacy.egress.limit_guard import LimitGuard
from polyfed.privacy.egress.requirements import Requirements
from refusals import refuses
from world import algorithm, on_device, recipe, through


def asking(subsets: Which = "none", conformal: Kind = "none") -> Recipe:
    """Clients that score subsets of the modalities, or count scores for conformal sets."""
    made = with_tests(CASES["fedavg"]())
    spec = replace(made.algorithm.evaluation, subsets=subsets, conformal=conformal, own_validation=True)
    clients = replace(made.clients, validation=0.3)
    return replace(made, clients=clients, algorithm=replace(made.algorithm, evaluation=spec))


def job() -> Recipe:
    """An evaluation job."""
    made = with_tests(CASES["fedavg"]())
    return replace(made, algorithm=Evaluate(train=algorithm("fedavg").train), rounds=1)


ASKED: dict[str, Callable[[], Recipe]] = {
    **{name: lambda name=name: with_tests(CASES[name]()) for name in CASES},  # type: ignore[misc]
    "subsets": lambda: asking(subsets="all"),
    "conformal": lambda: asking(conformal="split"),
    "conformal by class": lambda: asking(conformal="class"),
    "an evaluation job": job,
}
EXACT = {"conformal by class": "hides a row in the counts of all", "an evaluation job": "in this form get no noise"}
"""What reports of test rows in a form that gets no noise, and words of the refusal."""


def told(made: Recipe, required: Requirements, monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], set[str], str]:
    """Play a recipe on devices: the tasks that read test rows, what left of these rows, and the last refusal."""
    read, left, refused = set[str](), set[str](), ""
    run, check = ClientExchange.run, LimitGuard.check_reply

    def checked(guard: LimitGuard, *parts: Any) -> None:
        if guard._evaluated:
            read.add(guard.task)
        check(guard, *parts)

    def watched(exchange: ClientExchange) -> Message | None:
        reply = run(exchange)
        for field, said in {} if reply is None or exchange.request.name not in read else reply.declared.items():
            if said.kind == "statistic" and field not in reply.counts.values() and not said.counted:
                left.add(f"{exchange.request.name}.{field}")
        return reply

    monkeypatch.setattr(LimitGuard, "check_reply", checked)
    monkeypatch.setattr(ClientExchange, "run", watched)
    parts = on_device(replace(made, engine=EngineSpec(name="sequential")), required=required, on_device=True)
    state = parts.algorithm.init(parts.fed, parts.initial)

    def rounds() -> None:
        nonlocal state
        state = through(parts, made.rounds)

    for step in (
        rounds,
        lambda: parts.algorithm.evaluate(state, parts.fed),
        lambda: parts.algorithm.calibrate(state, parts.fed),
    ):
        try:
            step()
        except EgressError as error:
            refused = str(error)
    return read, left, refused


@pytest.mark.parametrize("unprotected", [(), ("statistic",)], ids=["no exception", "statistics are excepted"])
@pytest.mark.parametrize("case", ASKED)
def test_no_message_of_any_method_tells_of_test_rows_without_noise(
    case: str, unprotected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    required = Requirements(score_noise=8.0, unprotected=unprotected)
    read, left, refused = told(ASKED[case](), required, monkeypatch)
    assert read, "no task has read test rows"
    assert not left
    assert case not in EXACT or EXACT[case] in refused
    assert case in EXACT or "score_noise" not in refused


@message
class Careless(Message):
    """A report of test rows that does not say so."""

    params: Tree = carries("parameters")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", dtype="int64")


@dataclass(frozen=True, kw_only=True)
class Peeking(Averaging):
    """Tells the loss on the test rows as if it were that of training."""

    replies = Careless

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Any, Tree]:
        loss = data.test.fold(lambda total, batch: total + batch.y.sum(), torch.zeros(()))
        return Careless(fit.params, loss, data.num_rows), local


def test_a_task_of_ones_own_that_peeks_is_refused() -> None:
    made = with_tests(recipe(Peeking(train=algorithm("fedavg").train), rounds=1))
    through(assemble(made), 1)
    with refuses(EgressError, "reads test"):
        through(on_device(made, required=Requirements(score_noise=8.0)), 1)
