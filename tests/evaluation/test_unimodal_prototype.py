"""`[evaluate] unimodal = "prototype"` against class means and nearest neighbours taken with NumPy over plain arrays."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from laws.rows import ROWS
from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.averaging import Averaging
from polyfed.core.batch import Batch
from polyfed.core.errors import EgressError, RecipeError
from polyfed.data import ClientsSpec, Column, Columns
from polyfed.data.sources import Toy
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.running.assembly import Assembly
from polyfed.start import run
from refusals import refuses
from world import AWKWARD, algorithm, played, recipe

AVERAGING = sorted(
    name for name, cls in ALGORITHMS.items() if issubclass(cls, Averaging) and not cls.private and cls.sends_class_means
)
PRIVATE = sorted(name for name, cls in ALGORITHMS.items() if issubclass(cls, Averaging) and cls.private)
MODE = Evaluation(every=0, unimodal="prototype")
ALLOWED = {m: {"server": ["parameters", "gradients", "prototypes", "statistic"]} for m in ("a", "b")}
# partialfl tells private modalities by what the policy lets go
WITH_EMBEDDINGS = ALLOWED | {
    "b": {"server": ["parameters", "embeddings", "prototypes", "statistic"]},
    "shared": {"server": ["parameters", "gradients", "statistic"]},
}


def world(name: str, engine: str = "sequential", **changes: Any) -> Recipe:
    """The laws' world of an averaging method, whose policy also lets prototypes go."""
    row = ROWS[name]
    made = recipe(algorithm(name, **(row.options | {"evaluation": MODE})), engine, row.encoders)
    if row.clients:
        made = replace(made, clients=ClientsSpec(**row.clients))
    if row.stack:
        encoders = {modality: made.model.encoders[modality] for modality in row.stack}
        made = replace(made, stack=row.stack, model=replace(made.model, encoders=encoders))
    egress = WITH_EMBEDDINGS if name == "partialfl" else {m: ALLOWED[m] for m in (row.stack or ALLOWED)} | row.egress
    return replace(made, **({"egress": egress} | changes))


def features(parts: Assembly, params: Any, rows: torch.Tensor, modality: str) -> np.ndarray:
    """Feature vectors of some rows of the table, in double precision."""
    column = parts.population.columns.modalities[modality].values[rows].float()
    batch = Batch(x={modality: column}, y=torch.zeros(len(rows), dtype=torch.int64), rows=torch.arange(len(rows)))
    with torch.no_grad():
        z = parts.model.features({n: v.clone() for n, v in params.items()}, batch)[modality]
    return z.double().numpy()


def by_hand(parts: Assembly, params: Any, modality: str) -> float:
    """Accuracy of the nearest class mean: means over the training rows of everybody who holds the modality."""
    columns, held = parts.population.columns, parts.population.holds[:, list(columns_of(parts)).index(modality)]
    owners = [k for k in range(parts.population.num_clients) if held[k]]
    # a client counts as often as it trains on a row: rows are disjoint over clients, silos share theirs
    train = torch.cat([parts.population.train[k] for k in owners])
    there = columns.present.get(modality, torch.ones(len(columns.label), dtype=torch.bool))
    train = train[there[train]]
    z, y = features(parts, params, train, modality), columns.label[train].numpy()
    known = np.unique(y)
    means = np.stack([z[y == c].mean(0) for c in known])
    test = parts.population.test_rows
    test = test[there[test]]
    seen = features(parts, params, test, modality)
    gaps = np.linalg.norm(seen[:, None] - means[None], axis=-1)
    return float((known[gaps.argmin(1)] == columns.label[test].numpy()).mean())


def columns_of(parts: Assembly) -> tuple[str, ...]:
    return tuple(parts.population.columns.modalities)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", AVERAGING)
def test_every_averaging_method_judges_by_the_nearest_class_mean(name: str, engine: str) -> None:
    made = world(name, engine, rounds=1)
    parts, state, _ = played(made)
    alone = made.algorithm.evaluate(state, parts.fed).metrics["unimodal"]
    params = made.algorithm.global_params(state)
    assert set(alone) == set(parts.model.modalities)
    for modality, found in alone.items():
        # a tie in single precision may fall the other way on one row
        assert found == pytest.approx(by_hand(parts, params, modality), abs=1.01 / len(parts.population.test_rows))


@pytest.mark.parametrize("name", PRIVATE)
def test_a_method_without_a_global_model_refuses_the_mode(name: str) -> None:
    with refuses(RecipeError, "evaluate.unimodal: private"):
        world(name)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_batchnorm_and_dropout_are_in_evaluation_mode(engine: str) -> None:
    made = replace(world("fedavg", engine), model=replace(world("fedavg").model, encoders=AWKWARD))
    parts, state, _ = played(made)
    before = {n: v.clone() for n, v in state.params.items()}
    alone = made.algorithm.evaluate(state, parts.fed).metrics["unimodal"]
    for modality, found in alone.items():
        assert found == pytest.approx(
            by_hand(parts, state.params, modality), abs=1.01 / len(parts.population.test_rows)
        )
    assert all(torch.equal(before[n], v) for n, v in state.params.items()), "the statistics must not move"


def test_engines_send_the_same_and_only_encoders_go_down() -> None:
    ledgers = []
    for engine in ("sequential", "vectorised"):
        made = world("fedavg", engine, rounds=1)
        parts, state, _ = played(made)
        before = len(list(parts.ledger.rows()))
        made.algorithm.evaluate(state, parts.fed)
        ledgers.append(list(parts.ledger.rows())[before:])
    one, many = ledgers
    assert one == many
    down = [row for row in one if row["destination"] == "client"]
    up = {(row["message"], row["field"], row["kind"], row["block"]) for row in one if row["destination"] == "server"}
    assert {row["block"] for row in down} == {"a", "b"}, "no head goes down"
    assert up == {
        ("ClassMeans", "prototypes", "prototypes", "a"),
        ("ClassMeans", "prototypes", "prototypes", "b"),
        ("ClassMeans", "rows_per_class", "statistic", "shared"),
    }


@dataclass(frozen=True)
class Gappy:
    """Toy data of which two rows in five lack modality `b`; what stands there is far off and must not matter."""

    base: Toy

    def load(self) -> Columns:
        columns = self.base.load()
        there = torch.arange(len(columns.label)) % 5 > 1
        values = columns.modalities["b"].values.clone()
        values[~there] = 50.0
        return replace(columns, modalities=dict(columns.modalities) | {"b": Column(values)}, present={"b": there})


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_rows_that_lack_a_modality_count_in_no_mean_and_in_no_score(engine: str) -> None:
    made = world("fedavg", engine)
    made = replace(made, data=Gappy(made.data))
    parts, state, _ = played(made)
    assert made.algorithm.evaluate(state, parts.fed).metrics["unimodal"]["b"] == pytest.approx(
        by_hand(parts, state.params, "b"), abs=1.01 / len(parts.population.test_rows)
    )


@pytest.mark.filterwarnings("ignore:no client has training rows")
def test_a_modality_that_nobody_holds_is_left_out() -> None:
    made = world("fedavg", clients=ClientsSpec(partition="iid", num=4, only={"a": [0, 1, 2, 3]}))
    parts, state, _ = played(made)
    assert set(made.algorithm.evaluate(state, parts.fed).metrics["unimodal"]) == {"a"}


def test_nothing_is_asked_in_the_other_modes() -> None:
    made = world("fedavg")
    made = replace(made, algorithm=replace(made.algorithm, evaluation=Evaluation(every=0)), egress={})
    assert not any(row.task == "class_means" for row in check(made).planned)
    parts, state, ledger = played(made)
    made.algorithm.evaluate(state, parts.fed)
    assert list(parts.ledger.rows()) == ledger


def test_check_announces_it_and_refuses_it_by_name() -> None:
    checked = check(world("fedavg", egress={}))
    assert {(row.field, row.kind, row.block) for row in checked.refused} == {
        ("prototypes", "prototypes", "a"),
        ("prototypes", "prototypes", "b"),
    }
    assert 'server = ["parameters", "gradients", "prototypes", "statistic"]' in checked.refused[0].fix
    assert all(row.in_dry_run for row in checked.planned if row.field == "prototypes"), checked.remarks
    with refuses(EgressError, "class_means"):
        run(world("fedavg", egress={}))
    assert not check(world("fedavg")).refused


def test_only_methods_that_average_know_it() -> None:
    with refuses(RecipeError, "evaluate.unimodal: class means"):
        recipe(algorithm("centralized", evaluation=MODE))


def test_a_recipe_may_say_so() -> None:
    table: dict[str, Any] = {
        "data": {"name": "toy"},
        "model": {"encoders": {"a": {"kind": "mlp"}, "b": {"kind": "mlp"}}},
        "algorithm": {"name": "fedavg"},
        "evaluate": {"unimodal": "prototype"},
    }
    assert parse_recipe(table).algorithm.evaluation.unimodal == "prototype"
