"""Laws that every algorithm keeps, on every engine."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from laws.rows import ROWS, Row
from polyfed.algorithms import ALGORITHMS
from polyfed.core.tree import Tree
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.experiment.checks.check import check, plan
from polyfed.experiment.checks.check_result import Planned
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.training.optimisers import Train
from world import AWKWARD, PLAIN, algorithm, furthest, played, recipe, same

NAMES = sorted(ROWS)


def world(name: str, engine: str = "sequential", encoders: Any = None, **options: Any) -> Recipe:
    row = ROWS[name]
    encoders = row.encoders if row.encoders and encoders in (None, PLAIN) else encoders
    made = recipe(algorithm(name, **(row.options | options)), engine, encoders, egress=row.egress)
    if row.clients:
        made = replace(made, clients=ClientsSpec(**row.clients))
    if row.stack:
        own = {modality: made.model.encoders[modality] for modality in row.stack}
        made = replace(made, stack=row.stack, model=replace(made.model, encoders=own))
    return replace(made, data=replace(made.data, **row.data)) if row.data else made


def params(state: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = state.params
    return found


PERSONAL = ("local", "fedamp", "fedfomo", "pfmml")
"""Methods that train no model but the clients' own; `state.params` stays as it was drawn."""


def models(name: str, parts: Assembly, state: Any) -> list[Tree]:
    """What a method trains: the state's model, or the clients' own."""
    return list(parts.engine.locals.values()) if name in PERSONAL else [params(state)]


def test_every_algorithm_has_a_row() -> None:
    assert set(ROWS) == set(ALGORITHMS), "add the algorithm to tests/laws/rows.py"


@pytest.mark.parametrize("encoders", [PLAIN, AWKWARD], ids=["plain", "batchnorm+dropout"])
@pytest.mark.parametrize("name", NAMES)
def test_engines_agree_in_parameters_and_ledgers(name: str, encoders: Any) -> None:
    one, state_one, ledger_one = played(world(name, "sequential", encoders))
    many, state_many, ledger_many = played(world(name, "vectorised", encoders))
    row: Row = ROWS[name]
    assert furthest(params(state_one), params(state_many)) < row.tolerance
    for client, tree in one.engine.locals.items():
        # ten times wider: a control variate is a difference of models divided by the length of the way
        assert furthest(tree, many.engine.locals[client]) < 10 * row.tolerance, f"local state of client {client}"
    assert ledger_one == ledger_many


@pytest.mark.parametrize("name", NAMES)
def test_nothing_crosses_that_check_did_not_announce(name: str) -> None:
    made = world(name)
    planned = {(r.message, r.field, r.kind, r.block, r.destination) for r in plan(assemble(made))}
    rows = played(made)[2]
    crossed = {(r["message"], r["field"], r["kind"], r["block"], r["destination"]) for r in rows}
    assert {row for row in crossed if row[-1] != "client"} <= planned


@pytest.mark.filterwarnings("ignore:.*measures nothing")  # the laws' clients have no test rows of their own
@pytest.mark.parametrize("name", NAMES)
def test_no_reply_is_larger_than_check_said(name: str) -> None:
    made = world(name)
    said: dict[tuple[str, str, str], list[Planned]] = {}
    for planned in check(made).planned:
        said.setdefault((planned.message, planned.field, planned.block), []).append(planned)
    parts, _, rows = played(made)
    for row in (r for r in rows if r["destination"] != "client"):
        num_rows = max(int(parts.fed.clients.num_rows[row["client"]]), *(row["shape"] or [0]))
        replies = said[row["message"], row["field"], row["block"]]
        assert row["bytes"] <= max((p.bytes or 0) + p.bytes_per_row * num_rows for p in replies), row


@pytest.mark.filterwarnings("ignore:.*measures nothing")  # the laws' clients have no test rows of their own
@pytest.mark.parametrize("name", NAMES)
def test_check_rehearses_without_a_fault(name: str) -> None:
    checked = check(world(name))
    assert checked.remarks == ()
    assert sum(row.in_dry_run for row in checked.planned) >= len(checked.planned) / 2


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_twice_gives_the_same_state(name: str) -> None:
    first, second = (played(world(name, "vectorised"))[1] for _ in range(2))
    assert checkpoint.digest(first) == checkpoint.digest(second)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumed_after_round_two_equals_the_uninterrupted_one(name: str, engine: str, tmp_path: Any) -> None:
    made = world(name, engine)
    _, whole, _ = played(made)
    parts, state, _ = played(replace(made, rounds=2))
    # the schedule and the stream of a run depend on its number of rounds, so the second half plays the long recipe
    checkpoint.save(tmp_path, 2, {"state": state, "locals": parts.engine.locals}, checkpoint.modules_of(made.algorithm))
    found = checkpoint.load(tmp_path, checkpoint.modules_of(made.algorithm))
    assert found is not None
    again = assemble(made)
    state = found[1]["state"]
    again.resume(state, found[1]["locals"], 2)
    again.fed.begin(3)
    assert checkpoint.digest(made.algorithm.round(state, again.fed)) == checkpoint.digest(whole)


@pytest.mark.parametrize("name", NAMES)
def test_a_round_changes_neither_its_state_nor_the_data(name: str) -> None:
    made = world(name, "vectorised")
    parts, state, _ = played(replace(made, rounds=1))
    before = checkpoint.digest(state)
    rows = copy.deepcopy(parts.population.columns.modalities["a"].values)
    parts.fed.begin(2)
    made.algorithm.round(state, parts.fed)
    assert checkpoint.digest(state) == before
    assert torch.equal(parts.population.columns.modalities["a"].values, rows)


@pytest.mark.parametrize("name", NAMES)
def test_tasks_draw_from_no_global_generator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = assemble(world(name, "vectorised", AWKWARD))
    before = torch.default_generator.get_state()
    method, fed = parts.algorithm, parts.fed
    state = parts.start()
    fed.begin(1)
    method.round(state, fed)
    assert torch.equal(torch.default_generator.get_state(), before)


@pytest.mark.parametrize("name", [n for n in NAMES if ROWS[n].idle])
def test_zero_local_steps_leave_the_global_model_alone(name: str) -> None:
    parts, state, _ = played(world(name, "sequential", train=Train(lr=0.1, batch_size=16, epochs=0)))
    for held in models(name, parts, state):
        start = {n: v for n, v in held.items() if n in parts.initial}
        assert not start or furthest(start, {n: parts.initial[n] for n in start}) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_runs_when_a_modality_is_missing_everywhere_but_at_one_client(name: str) -> None:
    if ROWS[name].clients:
        pytest.skip("the method fixes who holds what")
    only = ClientsSpec(partition="iid", num=4, only={"a": [0, 1, 2]})
    method = algorithm(name, **ROWS[name].options)
    encoders, egress = ROWS[name].encoders, ROWS[name].egress
    parts, state, _ = played(recipe(method, "vectorised", encoders, clients=only, egress=egress))
    for held in models(name, parts, state):
        assert all(bool(torch.isfinite(v).all()) for v in held.values() if v.is_floating_point())


@pytest.mark.parametrize("name", NAMES)
def test_learns_a_separable_toy(name: str) -> None:
    easy = Toy(rows=600, classes=3, snr={"a": 6.0, "b": 6.0}, seed=1)
    made = replace(world(name, "vectorised"), data=replace(easy, **ROWS[name].data), rounds=8)
    if not ROWS[name].clients:
        made = replace(made, clients=ClientsSpec(partition="iid", num=5, personal_test=0.2))
    parts, state, _ = played(made)
    measured = made.algorithm.evaluate(state, parts.fed).metrics
    score = measured.get("global", {}).get("accuracy") or measured["personal"]["mean"]
    assert score > 0.6, f"{name} reaches {score:.2f} on three classes that a linear model separates"


def test_zero_rounds_leave_the_initial_model() -> None:
    parts, state, ledger = played(world("fedavg", "vectorised").__class__(**{**vars(world("fedavg")), "rounds": 0}))
    assert same(state.params, parts.initial)
    assert ledger == []


@pytest.mark.parametrize("name", NAMES)
def test_every_logged_number_has_a_caption(name: str) -> None:
    made = replace(world(name), rounds=2)
    _, state, _ = played(made)
    families = {one.replace("/", ".").partition(".")[0] for one in made.algorithm.observe(state)}
    assert families <= made.algorithm.captions.keys()
