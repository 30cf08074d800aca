"""FedGKT: its loss by hand, server training compared with a plain loop, Local as its limit, and what crosses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from laws.rows import GKT
from oracles import distillation as oracle
from polyfed.algorithms.knowledge.fedgkt import FedGKT, ServerLogits
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import EgressError, RecipeError
from polyfed.data import ClientsSpec
from polyfed.experiment.running.assembly import assemble
from polyfed.selection import Uniform
from polyfed.start import run
from polyfed.training.client_data import ORDER
from polyfed.training.losses import distillation
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, furthest, played, recipe, same

ENGINES = ["sequential", "vectorised"]
SMALL: dict[str, Any] = {"server_hidden": (12,), "server_embedding": 6}


def gkt(engine: str = "sequential", **options: Any) -> Any:
    return recipe(algorithm("fedgkt", **(SMALL | options)), engine, egress=GKT)


@pytest.mark.parametrize("temperature", [1.0, 3.0, 100.0])
def test_distillation_equals_the_formula(temperature: float) -> None:
    student, teacher = np.random.default_rng(0).normal(size=(2, 7, 5)) * 3
    batch = Batch(x={}, y=torch.zeros(7, dtype=torch.int64), rows=torch.arange(7))
    ours = distillation(torch.tensor(student), torch.tensor(teacher), batch, temperature)
    assert float(ours) == pytest.approx(oracle.distillation(student, teacher, temperature), rel=1e-9)


def test_distillation_from_an_equal_teacher_is_next_to_nothing() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = Batch(x={}, y=torch.zeros(4, dtype=torch.int64), rows=torch.arange(4))
    assert abs(float(distillation(logits, logits, batch, 3.0))) < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_without_distillation_clients_train_alone(engine: str) -> None:
    ours = played(gkt(engine, alpha=0.0))[0]
    theirs = played(recipe(algorithm("local"), engine))[0]
    assert ours.engine.locals.keys() - {-1} == theirs.engine.locals.keys() - {-1}
    for client, tree in theirs.engine.locals.items():
        assert furthest(tree, ours.engine.locals[client]) < 1e-5


def test_the_first_round_has_no_distillation_and_the_second_has() -> None:
    one = replace(gkt(selector=Uniform(participation=1.0)), rounds=1)
    alone = replace(recipe(algorithm("local", selector=Uniform(participation=1.0))), rounds=1)
    assert same(played(one)[0].engine.locals[0], played(alone)[0].engine.locals[0])
    two = played(replace(one, rounds=2))[0].engine.locals[0]
    assert not same(two, played(replace(alone, rounds=2))[0].engine.locals[0])


def test_the_server_learns_as_a_plain_loop_does() -> None:
    clients = ClientsSpec(partition="dirichlet", num=3, alpha=1.0)
    train = Train(lr=0.1, batch_size=16, epochs=1)
    made = replace(gkt(train=train, selector=Uniform(participation=1.0), temperature=2.0), clients=clients, rounds=1)
    parts = assemble(made)
    parts.fed.begin(0)
    first = made.algorithm.init(parts.fed, parts.initial)
    parts.fed.begin(1)
    sends = {k: ServerLogits({}, torch.tensor(0)) for k in range(3)}
    replies = parts.fed.ask(made.algorithm.extract, [0, 1, 2], sends)
    state = made.algorithm.learn(first, replies, parts.fed)

    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
            self.b = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6))
            self.top = nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(torch.cat([self.a(x[:, :6]), self.b(x[:, 6:])], 1))  # type: ignore[no-any-return]

    model = Top()
    with torch.no_grad():
        for m in "ab":
            for i in (0, 2):
                for part in ("weight", "bias"):
                    getattr(getattr(model, m)[i], part).copy_(first.params[f"{m}.encoder.{i}.{part}"])
        model.top.weight.copy_(torch.cat([first.params["a.fusion.weight"], first.params["b.fusion.weight"]], 1))
        model.top.bias.copy_(first.params["shared.bias"])
    x = torch.cat([torch.cat([replies[k].features[m] for m in "ab"], 1) for k in range(3)])
    y, teacher = (torch.cat([getattr(replies[k], name) for k in range(3)]) for name in ("labels", "logits"))
    key = keys.fold_in(keys.fold_in(keys.key(made.seed, "server", 0, 1), ORDER), 0)
    steps = [p for e in (0, 1) for p in keys.permutation(keys.fold_in(key, e), len(y)).split(16)]
    oracle.train_server(model, x, y, teacher, steps, 2.0, 0.1)
    torch.testing.assert_close(state.params["a.encoder.0.weight"], model.a[0].weight.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.logits[1], model(x).detach().split([len(replies[k].labels) for k in range(3)])[1])


def test_labels_are_refused_unless_the_policy_names_them() -> None:
    with refuses(EgressError, "egress.labels"):
        run(replace(gkt(), egress={row: kinds for row, kinds in GKT.items() if row != "labels"}))


def test_no_weights_cross() -> None:
    _, _, rows = played(gkt())
    assert "parameters" not in {row["kind"] for row in rows}
    sent = {(r["field"], r["kind"]) for r in rows if r["destination"] == "server" and r["kind"] != "statistic"}
    assert sent == {("features", "embeddings"), ("logits", "predictions"), ("labels", "labels")}


def test_pairs_of_client_and_server_are_evaluated_on_own_test_rows() -> None:
    made = replace(gkt(), clients=ClientsSpec(partition="iid", num=4, personal_test=0.25))
    parts, state, _ = played(made)
    measured = made.algorithm.evaluate(state, parts.fed)
    assert set(measured.metrics) == {"personal"}
    assert set(measured.personal) == {0, 1, 2, 3}


def test_options_without_meaning_are_refused() -> None:
    with pytest.raises(RecipeError):
        FedGKT(temperature=0.0)
