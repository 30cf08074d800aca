"""`Run.predict`, `Run.personal` and `Run.export` use the models that the run has evaluated."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from ended_runs import CASES, NO_GLOBAL, OWN_MODELS, Gappy, ended, present, samples
from laws.rows import ROWS
from polyfed.algorithms.averaging import Averaging, Update
from polyfed.algorithms.hfm import devices_of_silos
from polyfed.core.errors import RecipeError, UnknownClient
from polyfed.core.tree import Tree
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.evaluation import client_statistics
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.model import ModelSpec
from polyfed.objective import class_metrics as classes
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from refusals import refuses, warned
from world import AWKWARD, algorithm, recipe, same


def summary(logits: Tensor, y: Tensor) -> dict[str, float]:
    matrix = classes.confusion(logits, y, None, logits.shape[1])
    loss = torch.nn.functional.cross_entropy(logits, y, reduction="sum")
    return classes.summary(matrix, classes.top_k_hits(logits, y, None), loss)


def evaluated(run: polyfed.Run, parts: Assembly, client: int | None = None) -> dict[str, float]:
    """Metrics on the server's test rows, from `Run.predict`."""
    columns, rows = parts.population.columns, parts.population.test_rows
    logits = run.predict(samples(columns, rows), client=client, present=present(columns, rows))
    return summary(logits, columns.label[rows])


def check_personal(run: polyfed.Run, parts: Assembly) -> int:
    """Compare the accuracies of clients on their own test rows with predictions; returns their number."""
    columns, own = parts.population.columns, parts.population.test
    assert own is not None
    reported = run.rounds[-1]["personal_accuracy"]
    for client, accuracy in ((int(k), value) for k, value in reported.items()):
        x = samples(columns, own[client])
        logits = run.predict(x, client=client, present=present(columns, own[client]))
        right = (logits.argmax(1) == columns.label[own[client]]).double().mean()
        assert float(right) == pytest.approx(accuracy, abs=1e-6), f"client {client}"
        read = run.models.clients[client]
        less = run.predict({m: x[m] for m in read}, client=client, present=present(columns, own[client]))
        assert torch.equal(logits, less), "modalities that the client lacks do not matter"
    return len(reported)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("case", CASES)
def test_the_metrics_are_those_of_the_predictions(case: str, engine: str) -> None:
    run, parts = ended(case, engine)
    assert check_personal(run, parts) >= 3
    reported = run.result["metrics"].get("global")
    if not any(case.startswith(name) for name in NO_GLOBAL):
        assert evaluated(run, parts) == pytest.approx(reported, abs=1e-6)
        return
    with refuses(RecipeError, "no global model"):
        evaluated(run, parts)
    if reported is not None:  # the mean over clients, or over silos
        clients = list(run.personal)
        if CASES[case][0] == "vfl":
            clients = [members[0] for members in devices_of_silos(parts.fed.clients).values()]
        each = [{"global": evaluated(run, parts, client)} for client in clients]
        assert client_statistics.mean_groups(each)["global"] == pytest.approx(reported, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_what_predicts_has_been_trained(case: str) -> None:
    run, parts = ended(case)
    own = next((name for name in OWN_MODELS if case.startswith(name)), None)
    if case == "fedmsplit block_mean":
        own = None
    assert len(run.personal) == (len(parts.fed.clients) if own else 0)
    assert list(run.personal) == (list(parts.fed.clients) if own else [])
    model = parts.model
    for tree in run.personal.values():
        assert moved(model.trainable(tree), parts.initial) > 0
    if own not in NO_GLOBAL:
        assert moved(model.trainable(run.params), parts.initial) > 0
        return
    with refuses(RecipeError, "no global model"):
        run.params  # noqa: B018


def moved(tree: Tree, start: Tree) -> int:
    """How many tensors of the model differ from the start; all that are not only its head must."""
    encoders = [name for name in tree if name in start and ".encoder." in name and name.endswith("weight")]
    assert encoders
    changed = [name for name in encoders if not torch.equal(tree[name], start[name])]
    assert changed == encoders, "every encoder has been trained"
    return len(changed)


# predictions for one client


def test_a_client_of_a_method_with_a_global_model_predicts_with_its_part_of_it() -> None:
    run, parts = ended("fedavg")
    x = samples(parts.population.columns, parts.population.test_rows)
    both, lacking = 0, 1
    assert parts.fed.clients.owned(lacking) == ("a",)
    assert torch.equal(run.predict(x, client=both), run.predict(x))
    assert torch.equal(run.predict(x, client=lacking), run.predict({"a": x["a"]}))
    assert not torch.equal(run.predict(x, client=lacking), run.predict(x))
    assert "fedavg trains one global model" in repr(run.personal)
    assert both not in run.personal
    with refuses(UnknownClient, "trains one global"):
        run.personal[both]


def test_a_client_with_nothing_to_read_is_refused() -> None:
    run, parts = ended("fedavg")
    x = samples(parts.population.columns, parts.population.test_rows)
    with refuses(RecipeError, "reads a"):
        run.predict({"b": x["b"]}, client=1)


@pytest.mark.parametrize("client", [6, -1, True, 0.0, "6", "nobody", [0]])
@pytest.mark.parametrize("case", ["fedavg", "pfmml"])
def test_an_unknown_client_is_refused(case: str, client: Any) -> None:
    run, parts = ended(case)
    x = samples(parts.population.columns, parts.population.test_rows)
    with refuses(RecipeError, "Clients are numbers"):
        run.predict(x, client=client)


def test_personal_is_a_mapping() -> None:
    run, _ = ended("pfmml")
    assert dict(run.personal).keys() == set(range(6))
    assert 5 in run.personal
    assert 6 not in run.personal
    assert run.personal.get(6) is None
    with pytest.raises(KeyError):
        run.personal[6]
    tree = run.personal[0]
    next(iter(tree.values())).fill_(7.0)
    assert not same(run.personal[0], tree), "a copy"
    assert repr(run.personal) == "Personal(6 models)"


def test_a_client_that_was_never_asked_gives_a_warning() -> None:
    made = recipe(algorithm("local", selector=Uniform(participation=1), global_test="never"), rounds=1)
    run = polyfed.run(replace(made, clients=replace(made.clients, personal_test=0.3)))
    (asked,) = run.rounds[0]["cohort"]
    x = {"a": torch.zeros(2, 16), "b": torch.zeros(2, 24)}
    run.predict(x, client=asked)
    with warned("1 rounds"):
        run.predict(x, client=(asked + 1) % 6)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ({"a": torch.zeros(3, 16), "bb": torch.zeros(3, 24)}, "'bb', which"),
        ({"a": torch.zeros(3, 15)}, "be (n, 16)"),
        ({"a": torch.zeros(16)}, "be (n, 16)"),
        ({"a": torch.zeros(3, 16), "b": torch.zeros(2, 24)}, "as many rows"),
        ({}, "no modality"),
    ],
)
def test_samples_that_do_not_fit_are_refused(x: Any, words: str) -> None:
    run, _ = ended("fedavg")
    with refuses(RecipeError, words):
        run.predict(x)


def test_any_number_of_rows_and_arrays_of_numpy() -> None:
    run, _ = ended("fedavg")
    draws = torch.Generator().manual_seed(1)
    x = {"a": torch.randn(600, 16, generator=draws), "b": torch.randn(600, 24, generator=draws)}
    whole = run.predict(x)
    assert whole.shape == (600, 4)
    assert torch.equal(run.predict({m: value.numpy() for m, value in x.items()}), whole)
    parts = [run.predict({m: value[i : i + 7] for m, value in x.items()}) for i in range(0, 600, 7)]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert run.predict({m: value[:0] for m, value in x.items()}).shape == (0, 4)


# data and models that the rows of the laws do not have


@pytest.mark.parametrize("name", ["fedavg", "local", "pfmml"])
def test_rows_that_lack_a_modality_are_predicted_as_they_were_evaluated(name: str) -> None:
    made = recipe(algorithm(name, **({"selector": Uniform()} if name != "pfmml" else {})), "vectorised", AWKWARD)
    made = replace(
        made,
        data=Gappy(rows=330, classes=4, seed=3),
        rounds=2,
        clients=ClientsSpec(partition="iid", num=4, personal_test=0.3),
    )
    run, parts = polyfed.run(made), assemble(made)
    assert check_personal(run, parts) == 4
    if name == "fedavg":
        reported = run.result["metrics"]["global"]
        whole = {metric: value for metric, value in reported.items() if not metric.startswith("lacks.")}
        assert evaluated(run, parts) == pytest.approx(whole, abs=1e-6)
        assert reported.keys() - whole.keys() == {"lacks.nothing", "lacks.b"}
        rows = parts.population.test_rows
        x = samples(parts.population.columns, rows)
        assert not torch.equal(run.predict(x), run.predict(x, present=present(parts.population.columns, rows)))


@pytest.mark.filterwarnings("ignore:no client has training rows with a")
@pytest.mark.parametrize("fusion", ["concat", "sum", "gated", "attention"])
def test_silos_that_lack_a_modality_are_evaluated_and_predict_without_it(fusion: str) -> None:
    row = ROWS["vfl"]
    encoders = {m: {"kind": "conv-gru"} if fusion == "attention" else {"kind": "mlp"} for m in "abc"}
    made = recipe(
        algorithm("vfl", **row.options),
        data=Toy(rows=330, classes=4, seed=3, shapes=dict.fromkeys("abc", (12, 8))),
        model=ModelSpec(embedding=6, fusion=fusion, encoders=encoders),  # type: ignore[arg-type]
        egress=row.egress | {"c": row.egress["b"]},
        rounds=1,
        clients=ClientsSpec(partition="silos", silos=3, personal_test=0.3, holdings=[["b"], ["c"]]),
    )
    run, parts = polyfed.run(made), assemble(made)
    silos = devices_of_silos(parts.fed.clients)
    assert set(run.models.clients.values()) == {("b", "c")}, "no silo has the first modality, which is the gate"
    each = [{"global": evaluated(run, parts, members[0])} for members in silos.values()]
    assert client_statistics.mean_groups(each)["global"] == pytest.approx(run.result["metrics"]["global"], abs=1e-5)
    assert check_personal(run, parts) == 3


@dataclass(frozen=True, kw_only=True)
class Keeps(Averaging):
    """A user's method whose clients are evaluated with the models that they keep."""

    def local(self, context: Any, key: int) -> Tree:
        return dict(context.initial)

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> Any:
        return Update(fit.params, fit.loss, data.num_rows), fit.params

    def own_params(self, got: Any, local: Tree) -> Tree:
        return local

    def global_params(self, state: Any) -> Tree:
        params: Tree = state.params
        return params


def test_a_method_of_ones_own_with_models_at_its_clients() -> None:
    made = recipe(Keeps(train=Train(lr=0.1, batch_size=16)), rounds=2)
    made = replace(made, clients=replace(made.clients, personal_test=0.3))
    run, parts = polyfed.run(made), assemble(made)
    assert check_personal(run, parts) == 6
    assert evaluated(run, parts) == pytest.approx(run.result["metrics"]["global"], abs=1e-6)
    assert len(run.personal) == 6
    assert not torch.equal(run.personal[0]["shared.bias"], run.params["shared.bias"])
