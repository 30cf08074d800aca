"""Local: server evaluation of every client's own model, compared with a calculation by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from polyfed.algorithms.local import over_clients
from polyfed.core.batch import Batch
from polyfed.data import ClientsSpec
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check
from polyfed.experiment.running.assembly import Assembly
from polyfed.model import ModelSpec
from polyfed.objective import CLASSES
from polyfed.start import run
from refusals import warned
from world import PLAIN, algorithm, played, recipe


def accuracies(parts: Assembly) -> list[float]:
    """Each client's model on the global test set, of which it sees the modalities that it holds."""
    columns, rows = parts.population.columns, parts.population.test_rows
    found = []
    for client in range(parts.population.num_clients):
        x = {m: columns.modalities[m].values[rows].float() for m in parts.population.modalities(client)}
        batch = Batch(x=x, y=columns.label[rows], rows=torch.arange(len(rows)))
        with torch.no_grad():
            logits = parts.model.logits(parts.engine.locals[client], batch)
        found.append(float(np.mean(logits.numpy().argmax(1) == columns.label[rows].numpy())))
    return found


@pytest.mark.parametrize("fusion", ["concat", "sum", "gated"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_models_of_all_clients_are_evaluated_on_the_global_test_set(engine: str, fusion: str) -> None:
    made = recipe(algorithm("local"), engine, model=ModelSpec(embedding=6, encoders=PLAIN, fusion=fusion))
    parts, state, _ = played(made)
    found = made.algorithm.evaluate(state, parts.fed).metrics
    own, rows = accuracies(parts), parts.fed.clients.num_rows.double().numpy()
    assert len(set(own)) > 1
    assert found["global"]["accuracy"] == pytest.approx(np.mean(own))
    assert found["global_by_client"] == pytest.approx(
        {"mean": np.mean(own), "weighted": np.average(own, weights=rows), "worst": min(own), "std": np.std(own)}
        | {"p10": np.quantile(own, 0.1)}
    )
    assert "personal" not in found


def test_the_mean_of_every_number_by_hand() -> None:
    scores = {3: {"accuracy": 0.5, "uar": 0.4}, 7: {"accuracy": 0.75, "uar": 0.2}}
    found = over_clients(scores, {3: 30.0, 7: 10.0}, CLASSES)
    assert found["global"] == pytest.approx({"accuracy": 0.625, "uar": 0.3})
    assert found["global_by_client"] == pytest.approx(
        {"mean": 0.625, "weighted": 0.5625, "worst": 0.5, "std": 0.125, "p10": 0.525}
    )
    assert over_clients({}, {}, CLASSES) == {}


@pytest.mark.parametrize(("when", "expected"), [("last", [3]), ("always", [1, 2, 3]), ("never", [])])
def test_when_the_server_evaluates_them(when: str, expected: list[int]) -> None:
    clients = ClientsSpec(partition="iid", num=4, personal_test=0.2)
    made = recipe(algorithm("local", global_test=when, evaluation=Evaluation(every=1)), clients=clients)
    rows = run(made).rounds
    assert [row["round"] for row in rows if "global" in row["metrics"]] == expected
    assert all("personal" in row["metrics"] for row in rows)
    assert all(row["trained"] == {} for row in rows), "no model leaves in training"
    assert ("upload" in {row.task for row in check(made).planned}) == (when != "never")


def test_models_stay_at_home_where_the_policy_says_so() -> None:
    clients = ClientsSpec(partition="iid", num=4, personal_test=0.2)
    made = recipe(algorithm("local"), clients=clients, egress={"shared": {"server": ["statistic"]}}, rounds=1)
    with warned("reach the server"):
        assert set(run(made).result["metrics"]) == {"personal"}
    quiet = replace(made, algorithm=algorithm("local", global_test="never"))
    assert set(run(quiet).result["metrics"]) == {"personal"}
