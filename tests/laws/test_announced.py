"""What leaves a client is what `polyfed check` announced for it: field, kind, block, destination and bytes."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from laws.corruptions import CASES as VARIANTS
from laws.rows import PROTOTYPES, ROWS
from laws.test_laws import world
from polyfed.algorithms import ALGORITHMS
from polyfed.core.tasks import tasks_of, types_of
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check
from polyfed.experiment.checks.check_result import CheckResult, Planned
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.privacy.egress.ledger import TO_CLIENT
from polyfed.selection import DivFl
from world import through


def judged_by_prototypes(name: str, **options: Any) -> Recipe:
    made = world(name, evaluation=Evaluation(every=0, unimodal="prototype"), **options)
    return replace(made, egress=PROTOTYPES | made.egress)


CASES: dict[str, Callable[[], Recipe]] = VARIANTS | {
    "fedavg, judged by prototypes": lambda: judged_by_prototypes("fedavg"),
    "cmsfed, judged by prototypes that clients keep": lambda: judged_by_prototypes("cmsfed", prototypes="local"),
    "cmsfed without modality selection, under divfl": lambda: world(
        "cmsfed",
        modality_selection=False,
        ratio_rule="quantile",
        dominance_threshold=2.0,
        selector=DivFl(participation=3),
    ),
    "fedproto, original": lambda: world("fedproto", mode="original"),
    "local, judged always": lambda: world("local", global_test="always"),
}


def with_tests(made: Recipe) -> Recipe:
    """Two rounds, by clients with test rows of their own."""
    return replace(made, rounds=2, clients=replace(made.clients, personal_test=0.3))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    """The name of a case. All tests of a case follow each other, so that they can share its runs."""
    return request.param


@lru_cache(maxsize=2)
def crossed(case: str, engine: Any = "sequential") -> tuple[Assembly, list[dict[str, Any]]]:
    """The parts of a run, and all that crosses in its rounds and in an evaluation after the last."""
    made = with_tests(CASES[case]())
    parts = assemble(replace(made, engine=replace(made.engine, name=engine)))
    state = through(parts, parts.recipe.rounds)
    parts.algorithm.evaluate(state, parts.fed)
    return parts, list(parts.ledger.rows())


@lru_cache(maxsize=2)
def checked(case: str) -> CheckResult:
    return check(with_tests(CASES[case]()))


def place(row: Any) -> tuple[str, ...]:
    found = row if isinstance(row, dict) else vars(row)
    return tuple(found[key] for key in ("message", "field", "kind", "block", "destination"))


def test_every_algorithm_is_tried() -> None:
    assert set(ROWS) <= set(CASES)
    assert set(ROWS) == set(ALGORITHMS)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_every_row_of_the_ledger_was_announced_for_its_client(case: str, engine: Any) -> None:
    parts, rows = crossed(case, engine)
    clients = parts.fed.clients
    announced = {
        client: {place(row) for row in parts.engine.announcement(clients.owned(client)).rows.values() if row.allowed}
        for client in clients
    }
    told = {place(row) for row in checked(case).planned if row.allowed}
    assert set().union(*announced.values()) <= told
    sent = [row for row in rows if row["destination"] != TO_CLIENT]
    assert sent
    for row in sent:
        assert row["verdict"] == "allowed"
        assert place(row) in announced[row["client"]], row


def test_no_reply_is_larger_than_announced(case: str) -> None:
    said: dict[tuple[str, ...], list[Planned]] = {}
    for planned in checked(case).planned:
        said.setdefault(place(planned), []).append(planned)
    parts, rows = crossed(case)
    for row in (row for row in rows if row["destination"] != TO_CLIENT):
        num_rows = max(int(parts.fed.clients.num_rows[row["client"]]), *(row["shape"] or [0]))
        sizes = [(p.bytes or 0) + p.bytes_per_row * num_rows for p in said[place(row)]]
        # a share of the rows is a whole number of them, so a size by rows may be short of one
        one = max(p.bytes_per_row for p in said[place(row)])
        assert row["bytes"] <= max(sizes) + one, row


def test_what_a_client_receives_is_as_its_message_declares(case: str) -> None:
    """`polyfed algorithms` lists it by the same words."""
    parts, rows = crossed(case)
    clients = parts.fed.clients
    got = {kind.__name__: kind for kind, _ in map(types_of, tasks_of(parts.algorithm).values())}
    for row in (row for row in rows if row["destination"] == TO_CLIENT):
        holder = parts.engine.announcement(clients.owned(row["client"])).holder
        assert row["block"] in holder.blocks(got[row["message"]].declared[row["field"]]), row
