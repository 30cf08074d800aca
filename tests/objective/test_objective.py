"""The kinds of task: losses, masks, weights, what they refuse, and runs that agree on all engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from made import KINDS, Made, made_recipe
from torch import Tensor

import polyfed
from laws.rows import ROWS
from polyfed.algorithms import ALGORITHMS
from polyfed.core.batch import Batch
from polyfed.core.errors import DataError, PolyfedError, RecipeError
from polyfed.data.columns import Column, Columns
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.objective import Classification, MultiLabel, Objective, Ordinal, Regression, Retrieval, guessed
from polyfed.training import losses
from refusals import refuses
from world import furthest

NAN = float("nan")


def batch(y: Tensor, ok: Tensor | None = None) -> Batch:
    return Batch(x={}, y=y, rows=torch.arange(len(y)), ok=ok)


def columns(label: Tensor, size: int | None = None) -> Columns:
    n = len(label)
    wide = label.shape[1] if label.dim() == 2 else 1
    return Columns(
        name="mine",
        modalities={"a": Column(torch.randn(n, 3)), "b": Column(torch.randn(n, 2))},
        label=label,
        num_classes=size or (wide if label.is_floating_point() else int(label.max()) + 1),
        split=torch.zeros(n, dtype=torch.int8),
        ids=torch.arange(n),
    )


# losses


def test_classes_without_options_cost_what_they_did_before() -> None:
    logits, y = torch.randn(9, 4), torch.arange(9) % 4
    part = batch(y, torch.arange(9) < 6)
    for rows in (batch(y), part):
        assert torch.equal(Classification().loss(logits, rows), losses.cross_entropy(logits, rows))


def test_weights_of_classes_are_those_of_pytorch() -> None:
    logits, y, weights = torch.randn(9, 3), torch.arange(9) % 3, (0.5, 2.0, 0.0)
    found = Classification(class_weights=weights).loss(logits, batch(y))
    assert float(found) == pytest.approx(float(F.cross_entropy(logits, y, torch.tensor(weights))))


@pytest.mark.parametrize(
    ("objective", "plain"),
    [
        (Regression(), F.mse_loss),
        (Regression(error="absolute"), F.l1_loss),
        (Regression(error="huber", delta=0.5), lambda a, b: F.huber_loss(a, b, delta=0.5)),
        (Regression(shift=2.0, scale=4.0), lambda a, b: F.mse_loss(a, (b - 2) / 4)),
        (MultiLabel(), lambda a, b: F.binary_cross_entropy_with_logits(a, b)),
    ],
)
def test_unknown_targets_and_padding_count_nothing(objective: Objective, plain: Any) -> None:
    outputs = torch.randn(6, 2).requires_grad_()
    y = torch.tensor([[0.0, 1.0], [1.0, NAN], [NAN, NAN], [1.0, 0.0], [NAN, 1.0], [0.0, 0.0]])
    ok = torch.tensor([True, True, True, True, True, False])
    known = ~y.isnan() & ok.unsqueeze(1)
    found = objective.loss(outputs, batch(y, ok))
    assert float(found.detach()) == pytest.approx(float(plain(outputs.detach()[known], y[known])), rel=1e-6)
    found.backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    assert not outputs.grad[~known].any()
    nothing = objective.loss(outputs.detach(), batch(torch.full((6, 2), NAN)))
    assert float(nothing) == 0.0


def test_weights_of_targets_and_of_positive_rows() -> None:
    outputs, y = torch.randn(5, 2), torch.tensor([[0.0, 1.0]]).expand(5, 2)
    square = (outputs - y).square()
    found = Regression(target_weights=(1.0, 3.0)).loss(outputs, batch(y))
    assert float(found) == pytest.approx(float((square * torch.tensor([1.0, 3.0])).sum() / 20))
    weights = torch.tensor([2.0, 5.0])
    found = MultiLabel(positive_weights=(2.0, 5.0)).loss(outputs, batch(y))
    assert float(found) == pytest.approx(float(F.binary_cross_entropy_with_logits(outputs, y, pos_weight=weights)))


def test_ordinal_asks_whether_the_level_is_higher() -> None:
    outputs, y = torch.randn(4, 2), torch.tensor([0, 1, 2, 2])
    above = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    assert float(Ordinal().loss(outputs, batch(y))) == pytest.approx(
        float(F.binary_cross_entropy_with_logits(outputs, above))
    )
    assert Ordinal().decided(torch.tensor([[3.0, -1.0], [2.0, 2.0], [-1.0, -1.0]])).tolist() == [1, 2, 0]


def test_retrieval_is_the_symmetric_cross_entropy_of_clip() -> None:
    pairs = F.normalize(torch.randn(7, 2, 5), dim=-1)
    scores = pairs[:, 0] @ pairs[:, 1].T / 0.1
    clip = (F.cross_entropy(scores, torch.arange(7)) + F.cross_entropy(scores.T, torch.arange(7))) / 2
    y = torch.zeros(7, dtype=torch.int64)
    assert float(Retrieval(temperature=0.1).loss(pairs, batch(y))) == pytest.approx(float(clip), rel=1e-5)
    padded = torch.cat([pairs, torch.randn(2, 2, 5)])
    ok = torch.arange(9) < 7
    found = Retrieval(temperature=0.1).loss(padded, batch(torch.zeros(9, dtype=torch.int64), ok))
    assert float(found) == pytest.approx(float(clip), rel=1e-5)


# which task, and which labels it refuses


@pytest.mark.parametrize(
    ("label", "name"),
    [
        (torch.tensor([0, 1, 2]), "classification"),
        (torch.tensor([0.5, 1.0, 2.0]), "regression"),
        (torch.tensor([[0.5, 1.0], [2.0, NAN]]), "regression"),
        (torch.tensor([[0.0, 1.0], [1.0, NAN]]), "multi-label"),
        (torch.tensor([0.0, 1.0, NAN]), "multi-label"),
    ],
)
def test_labels_suggest_a_task(label: Tensor, name: str) -> None:
    assert name == guessed(columns(label)).NAME


@pytest.mark.parametrize(
    ("objective", "label", "words"),
    [
        (Classification(), torch.tensor([0.5, 1.0]), "0.5 among them. For such labels set [task] name = 'regression'"),
        (Classification(), torch.tensor([0.0, NAN]), "1 label is NaN. Mark rows without a label as left out"),
        (Classification(), torch.tensor([[0.0, 1.0]]), "2 targets a row"),
        (Ordinal(), torch.tensor([-1.0, 1.0]), "-1 among them"),
        (MultiLabel(), torch.tensor([0, 1, 2]), "one of 3 classes a row"),
        (MultiLabel(), torch.tensor([[0.0, 2.0]]), "2 is among them"),
        (Regression(), torch.tensor([[NAN], [NAN]]), "every label is NaN"),
        (Regression(report="sentiment"), torch.tensor([4.0, 1.0]), "for one target from -3 to 3"),
    ],
)
def test_labels_of_another_task_are_refused_with_a_cure(objective: Objective, label: Tensor, words: str) -> None:
    with pytest.raises(DataError) as error:
        objective.prepared(columns(label))
    assert words in str(error.value)


def test_labels_take_the_form_of_the_task() -> None:
    whole = Classification().prepared(columns(torch.tensor([0.0, 2.0, 1.0])))
    assert whole.label.dtype == torch.int64
    assert whole.num_classes == 3
    binary = MultiLabel().prepared(columns(torch.tensor([0, 1, 1])))
    assert binary.label.tolist() == [[0.0], [1.0], [1.0]]
    assert binary.num_classes == 1
    numbers = Regression().prepared(columns(torch.tensor([3, 0, 1])))
    assert numbers.label.tolist() == [[3.0], [0.0], [1.0]]
    assert Retrieval().prepared(columns(torch.tensor([0.5, 1.5]))).num_classes == 1


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (torch.tensor([0.0, float("inf")]), "row 1 is"),
        (torch.tensor([[0, 1]]), "int64 of shape"),
        (torch.tensor([0.0, 1.0], dtype=torch.float64), "torch.float64 (2,)"),
    ],
)
def test_labels_that_fit_no_task_are_refused(label: Tensor, words: str) -> None:
    with refuses(DataError, words):
        columns(label, 2 if label.dim() == 2 else 1)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"name": "regresion"}, "did you mean 'regression'"),
        ({"name": "regression", "threshold": 0.5}, "has no option 'threshold'"),
        ({"name": "regression", "scale": 0.0}, "must be above 0"),
        ({"name": "multi-label", "threshold": 1.0}, "above 0 and below 1"),
        ({"name": "classification", "class_weights": [-1.0, 1.0]}, "must be numbers of 0 or more"),
    ],
)
def test_a_wrong_section_is_refused(section: dict[str, Any], words: str) -> None:
    table = made_recipe("regression").table() | {"task": section}
    table["data"] = {"name": "toy"}
    with pytest.raises(RecipeError) as error:
        parse_recipe(table)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (
            made_recipe("regression", task=Regression(target_weights=(1.0,))),
            "has 1 entry, and the labels have 3 targets",
        ),
        (made_recipe("classification", task=Classification(class_weights=(1.0,) * 4)), "4 entries"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_training(recipe: Any, words: str) -> None:
    for refused in (check, polyfed.run):
        with pytest.raises(PolyfedError) as error:
            refused(recipe)
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("kind", "method", "words"),
    [
        ("regression", "fedproto", "because its prototypes"),
        ("multi-label", "cmsfed", "Methods that can train it: "),
        ("retrieval", "partialfl", "one output of its local model"),
    ],
)
def test_a_method_refuses_a_task_that_it_cannot_train(kind: str, method: str, words: str) -> None:
    with pytest.raises(RecipeError) as error:
        made_recipe(kind, method)
    assert words in str(error.value)


def test_lonely_modalities_cannot_learn_pairs() -> None:
    made = made_recipe("retrieval")
    with refuses(RecipeError, "task.name: modality"):
        check(replace(made, clients=replace(made.clients, holdings=[["a", "b"], ["a"]])))


def test_partitions_by_class_need_classes() -> None:
    made = made_recipe("regression")
    with refuses(RecipeError, "clients.partition: deals"):
        check(replace(made, clients=replace(made.clients, partition="dirichlet", num=4, alpha=1.0)))


def test_own_loss_functions_are_told_about_other_tasks() -> None:
    with refuses(RecipeError, "context.loss"):
        losses.cross_entropy(torch.randn(3, 2), batch(torch.randn(3, 2)))


# runs


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedfomo"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_engines_agree(kind: str, name: str) -> None:
    one, many = (polyfed.run(made_recipe(kind, name, engine)) for engine in ("sequential", "vectorised"))
    assert furthest(one.state.params, many.state.params) < 1e-5
    measured, again = one.result["metrics"], many.result["metrics"]
    for group, numbers in measured.items():
        assert numbers == pytest.approx(again[group], rel=1e-5, abs=1e-5), group
    own = one.rounds[-1].get("personal_accuracy") or one.rounds[-1]["personal_score"]
    assert len(own) == 5


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_task_is_learnt_and_predictions_give_the_metrics(kind: str, tmp_path: Path) -> None:
    recipe = replace(made_recipe(kind), rounds=15)
    first, done = polyfed.run(replace(recipe, rounds=1)), polyfed.run(recipe, out=tmp_path / "run")
    score, rising = KINDS[kind].SCORE, KINDS[kind].RISING
    before, after = (run.result["metrics"]["global"][score] for run in (first, done))
    assert after > before + 0.1 if rising else after < 0.75 * before
    table = KINDS[kind].prepared(recipe.data.load())
    rows = table.rows(1)
    x = {m: column.take(rows) for m, column in table.modalities.items()}
    for run in (done, polyfed.load_run(tmp_path / "run"), polyfed.load_model(done.export(tmp_path / "model"))):
        found = run.predict(x)
        task = done.models.task
        inner = (found - (getattr(task, "shift", 0.0) or 0.0)) / (getattr(task, "scale", 1.0) or 1.0)
        again = task.measured(task.sums(inner, batch(table.label[rows])))
        assert again[score] == pytest.approx(after, abs=1e-5)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Personal" in page


def test_targets_in_another_unit_give_the_same_model() -> None:
    plain = polyfed.run(made_recipe("regression"))

    class Wide(Made):
        def load(self) -> Columns:
            table = super().load()
            return replace(table, label=table.label * 50 + 1000)

    made = made_recipe("regression", task=Regression(shift=1000.0, scale=50.0))
    wide = polyfed.run(replace(made, data=Wide()))
    assert furthest(plain.state.params, wide.state.params) < 1e-3
    assert wide.result["metrics"]["global"]["mae"] == pytest.approx(
        50 * plain.result["metrics"]["global"]["mae"], rel=1e-3
    )


def test_the_best_round_has_the_smallest_validation_error() -> None:
    made = made_recipe("regression", evaluation=Evaluation(every=1))
    done = polyfed.run(replace(made, clients=replace(made.clients, validation=0.2)))
    errors = [row["metrics"]["validation"]["mae"] for row in done.rounds]
    assert done.result["best"]["round"] == 1 + int(np.argmin(errors))
    assert done.result["task"] == {"name": "regression", "score": "mae", "best": "mae", "rising": False}


def test_the_task_is_told_where_it_was_guessed() -> None:
    facts = check(made_recipe("regression", task=None)).facts["task"]
    assert not facts["guessed"]
    made = replace(made_recipe("multi-label"), task=None)
    facts = check(made).facts["task"]
    assert (facts["name"], facts["guessed"], facts["outputs"]) == ("multi-label", True, 3)


def test_the_pooled_metrics_are_those_of_all_rows() -> None:
    done = polyfed.run(made_recipe("regression"))
    personal, scores = done.result["metrics"]["personal"], done.rounds[-1]["personal_score"]
    assert personal["worst"] == max(scores.values())
    assert personal["worst"] >= personal["p10"] >= personal["mean"]
    assert {"pooled_mae", "pooled_pearson", "pooled_concordance"} <= personal.keys()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_impossible_sums_of_a_client_are_dropped(kind: str) -> None:
    objective = KINDS[kind]
    sums = torch.full(objective.own_shape(3), -1.0)
    assert objective.flaw(sums, 10.0)
    assert not objective.flaw(torch.zeros(objective.own_shape(3)), 10.0)
    if kind not in ("ordinal", "retrieval"):  # their sums have no bound in the rows
        assert objective.flaw(torch.full(objective.own_shape(3), 11.0), 10.0)


@pytest.mark.parametrize(
    "name", sorted(n for n, cls in ALGORITHMS.items() if cls.objectives == (Objective,) and n != "hfl")
)
def test_methods_for_every_task_run_a_regression(name: str) -> None:
    gentle: dict[str, dict[str, Any]] = {"fedamp": {"lam": 0.1}, "fedrep": {"private_epochs": 1}}
    made = made_recipe("regression", name, "vectorised", **gentle.get(name, {}))
    if (encoders := ROWS[name].encoders) is not None:
        made = replace(made, model=replace(made.model, encoders=encoders))
    if name == "centralized":
        rows: dict[str, dict[str, list[str]]] = {m: {"server": ["raw"]} for m in "ab"}
        made = replace(made, egress=rows | {"labels": {"server": ["labels"]}, "shared": {"server": ["statistic"]}})
    checked = check(made)
    assert not checked.remarks
    metrics = polyfed.run(made).result["metrics"]
    found = metrics.get("global", {}).get("mae", metrics["personal"]["mean"])
    assert 0 < found < 10
