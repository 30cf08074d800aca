"""What sites report: outputs that depend on no other row, hidden targets, intervals, two models on the same rows."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import polyfed
from own_models import Whole
from polyfed.core.batch import Batch
from polyfed.evaluation.site_scores import exact_outputs, site_scores
from polyfed.evaluation.two_models import paired_means
from polyfed.experiment.evaluate import job_of
from polyfed.model import Model, ModelSpec, build_model
from polyfed.objective import Classification, MultiLabel, Objective, Regression, Retrieval
from polyfed.objective.report import moments
from polyfed.report.pages.evaluation import notes, tables

N = 37


class Rows:
    """Some rows of a client, in batches of at most this size."""

    min_group = 0

    def __init__(self, x: Mapping[str, Tensor], y: Tensor, size: int = 256, groups: Mapping[str, Tensor] = {}) -> None:
        self.x, self.y, self.size, self.groups = x, y, size, groups
        self.num_rows = torch.tensor(len(y))

    def collect(self, function: Callable[[Batch], Mapping[str, Tensor]], *, batch_size: int = 256) -> dict[str, Tensor]:
        parts = []
        for rows in torch.arange(len(self.y)).split(min(batch_size, self.size)):
            parts.append(function(Batch({m: value[rows] for m, value in self.x.items()}, self.y[rows], rows)))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


class Stubborn(nn.Module):
    """It makes float32 tensors itself."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], embedding)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ torch.eye(self.layer.out_features)


class Frozen(nn.Module):
    """A frozen layer, BatchNorm in evaluation mode, and a buffer that is not saved."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.first = nn.Linear(shape[0], 16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("table", torch.randn(16), persistent=False)
        self.last = nn.Linear(16, embedding)

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.norm(self.first(x)) + self.table))
        return found


VECTOR, SERIES, IMAGE, TOKENS = (6,), (40, 3), (3, 16, 16), (9,)
MODELS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "mlp": ({"encoders": {"a": {"kind": "mlp"}}}, {"a": VECTOR}),
    "attention": (
        {"fusion": "attention", "encoders": {"a": {"kind": "conv-gru"}, "b": {"kind": "conv-gru"}}},
        {"a": SERIES, "b": SERIES},
    ),
    "gated": (
        {"fusion": "gated", "encoders": {"a": {"kind": "cnn4"}, "b": {"kind": "mlp"}}}, {"a": IMAGE, "b": VECTOR},
    ),
    "resnet": ({"head": (8,), "encoders": {"a": {"kind": "resnet18", "widths": (4, 4, 8, 8)}}}, {"a": IMAGE}),
    "cross-modal": (
        {"fusion": "cross-modal", "encoders": {"a": {"kind": "mlp"}, "b": {"kind": "mlp"}}}, {"a": VECTOR, "b": VECTOR},
    ),
    "controlled": (
        {"fusion": "controlled", "encoders": {"a": {"kind": "mlp"}, "b": {"kind": "mlp"}}}, {"a": VECTOR, "b": VECTOR},
    ),
    "tokens": ({"encoders": {"a": {"kind": "token-transformer", "vocabulary": 20}}}, {"a": TOKENS}),
    "frozen": ({"encoders": {"a": {"kind": "evaluation.test_site_scores:Frozen"}}}, {"a": VECTOR}),
    "transformer": ({"fusion": "sum", "encoders": {"a": {"kind": "transformer"}}}, {"a": SERIES}),
    "whole": (
        {"module": Whole, "blocks": {"a": ["net_a"], "b": ["net_b", "bias_b"]}}, {"a": VECTOR, "b": VECTOR},
    ),
}  # fmt: skip


def made(name: str) -> tuple[Model, dict[str, Tensor], Tensor]:
    spec, shapes = MODELS[name]
    draw = torch.Generator().manual_seed(0)
    x = {m: torch.randn(N, *shape, generator=draw) for m, shape in shapes.items()}
    if name == "tokens":
        x = {"a": torch.randint(1, 20, (N, *TOKENS), generator=draw).float()}
    width = {} if "module" in spec else {"embedding": 8}
    return build_model(ModelSpec(**width, **spec), shapes, 3), x, torch.arange(N) % 3


@pytest.mark.parametrize("name", MODELS)
def test_the_outputs_of_a_row_depend_on_no_other_row(name: str) -> None:
    """Float32 outputs differ in their last digits with the rows of the batch, and so would the loss of a site."""
    model, x, y = made(name)
    w, before = model.init(1), [tensor.clone() for tensor in model.held()]
    found = [exact_outputs(model, Classification(), w, Rows(x, y, size)) for size in (256, 16, 1)]  # type: ignore[arg-type]
    whole = found[0]
    assert whole is not None
    assert whole[0].dtype is torch.float64
    for one in found:
        assert one is not None
        torch.testing.assert_close(one[0], whole[0], rtol=1e-12, atol=1e-12)
    single = model.logits(w, Batch(x, y, torch.arange(N)))
    torch.testing.assert_close(single.double(), whole[0], rtol=1e-4, atol=1e-4)
    assert single.dtype is torch.float32, "the model computes in float32 again"
    assert all(torch.equal(*pair) and pair[0].dtype is pair[1].dtype for pair in zip(model.held(), before, strict=True))


def test_a_model_that_cannot_compute_in_float64_says_so(tmp_path: Path) -> None:
    table = toy(tmp_path, {"model": {"encoders": {"a": {"kind": "evaluation.test_site_scores:Stubborn"}}}})
    polyfed.run(table, tmp_path / "run", engine="sequential")
    found = polyfed.evaluate(tmp_path / "run").content
    assert found["pooled"]["float32"]
    assert found["pooled"]["metrics"]["accuracy"]["value"] > 0
    assert any("float64" in note for note in notes(found))
    plain = toy(tmp_path, {})
    polyfed.run(plain, tmp_path / "plain", engine="sequential")
    told = polyfed.evaluate(tmp_path / "plain").content
    assert not told["pooled"]["float32"]
    assert not any("float64" in note for note in notes(told))


def toy(folder: Path, more: Mapping[str, Any], y: Any = None, clients: int = 3) -> Any:
    draw, rows = np.random.default_rng(0), 120
    label = np.arange(rows) % 3 if y is None else y
    means = np.nan_to_num(label if label.ndim == 1 else label[:, 0])[:, None]
    a, b = (draw.normal(size=(rows, 4)) + means for _ in range(2))
    b[:, :2] = a[:, :2] + 0.5 * draw.normal(size=(rows, 2))
    sex = np.where(np.arange(rows) % 2, "m", "f")
    path = folder / f"data{len(list(folder.iterdir()))}.npz"
    np.savez(path, a=a, b=b, label=label, sex=sex, client=np.arange(rows) % clients)
    recipe: dict[str, Any] = {
        "data": {"name": "npz", "path": str(path), "modalities": ["a", "b"], "test_share": 0.0},
        "clients": {"partition": "by-client", "personal_test": 0.5},
        "algorithm": {"name": "fedavg"},
        "model": {"encoders": {m: {"kind": "mlp", "hidden": [4]} for m in "ab"}},
        "rounds": 1,
        "train": {"lr": 0.05},
    }
    for key, value in more.items():
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    if "model" in more:
        recipe["model"]["encoders"] = {"b": {"kind": "mlp"}} | recipe["model"]["encoders"]
    return polyfed.parse_recipe(recipe)


# what is hidden


def report(objective: Objective, y: Tensor, codes: Tensor, least: int, outputs: Tensor) -> Any:
    class Context:
        num_classes = y.shape[1]
        model = build_model(ModelSpec(embedding=2, encoders={"a": {"kind": "mlp"}}), {"a": (3,)}, y.shape[1])

    context: Any = Context()
    context.objective = objective
    rows: Any = Rows({"a": torch.randn(len(y), 3)}, y, groups={"sex": codes})
    return site_scores(context, context.model.init(0), rows, {"sex": ["f", "m"]}, least)


@pytest.mark.parametrize("objective", [Regression(), MultiLabel()])
def test_targets_that_few_rows_know_are_hidden_from_the_sums_and_in_each_group(objective: Objective) -> None:
    draw = torch.Generator().manual_seed(0)
    y = (torch.rand(40, 3, generator=draw) > 0.5).float()
    y[1:, 0] = torch.nan  # a single row knows the first target
    codes = torch.arange(40) % 2
    y[(codes == 1).nonzero()[1:, 0], 1] = torch.nan  # and a single row of the second group knows the second
    y[(codes == 0).nonzero()[:8, 0], 1] = torch.nan
    told, open_ = (report(objective, y, codes, least, y) for least in (5, 0))
    assert (int(told.hidden), int(open_.hidden)) == (1, 0)
    known = [
        [int(n) for n in (line[1:4].tolist() if isinstance(objective, Regression) else [line[2]])]
        for line in (*told.groups, *open_.groups)
    ]
    if isinstance(objective, Regression):
        assert known == [[0, 0, 20], [0, 0, 20], [1, 12, 20], [0, 1, 20]]
        assert [told.sums[:3].tolist(), open_.sums[:3].tolist()] == [[0, 13, 40], [1, 13, 40]]
    else:
        assert known == [[20], [20], [33], [21]]


def test_hidden_targets_of_groups_do_not_follow_from_the_total() -> None:
    """What the groups show would leave two rows of the total."""
    y = torch.rand(60, 1) + 1.0
    codes = (torch.arange(60) >= 30).long()
    y[32:, 0] = torch.nan  # two rows of the second group: with the first, they are the total
    y[:10, 0] = torch.nan
    told = report(Regression(), y, codes, 5, y)
    assert told.groups.view(2, -1)[:, 1].tolist() == [0, 0]
    assert float(told.sums[0]) == 22


# intervals over sites


def test_groups_have_intervals_over_clients(tmp_path: Path) -> None:
    polyfed.run(toy(tmp_path, {}), tmp_path / "run", engine="sequential")
    found = polyfed.evaluate(tmp_path / "run", groups={"sex": ["f", "m"]}).content
    each = [site["groups"]["sex"]["f"] for site in found["sites"].values()]
    told = found["pooled"]["groups"]["sex"]["f"]
    right = np.array([one["accuracy"]["value"] * one["rows"] for one in each])
    rows = np.array([one["rows"] for one in each])
    without = (right.sum() - right) / (rows.sum() - rows)
    spread = 2 / 3 * np.square(without - without.mean()).sum()
    one = told["accuracy"]
    assert one["clients"] == 3
    assert one["low_by_rows"] < one["value"] < one["high_by_rows"]
    value = one["value"]
    independent, t = value * (1 - value) / spread, stats.t.ppf(0.975, 2)
    middle = (value + t**2 / independent / 2) / (1 + t**2 / independent)
    assert (one["low"] + one["high"]) / 2 == pytest.approx(middle)
    assert any("over up to 3 clients" in title for title, _, _ in tables(found))


# two models


@pytest.mark.parametrize("root", [False, True])
def test_the_paired_interval_is_that_of_the_differences_of_rows_and_of_sites(root: bool) -> None:
    draw = np.random.default_rng(0)
    site = np.repeat([0, 1, 2, 3], 50)
    errors = np.abs(draw.normal(size=(2, 200)) + 0.5 * draw.normal(size=200) + site)
    parts = errors**2 if root else errors
    values = torch.from_numpy(np.stack([np.ones(200), np.ones(200), *parts], 1))

    def told(rows: Any) -> list[float]:
        numbers: list[float] = moments(values[torch.from_numpy(rows)]).tolist()
        return numbers

    def gap(rows: Any) -> float:
        first, second = parts[:, rows].mean(1) ** (0.5 if root else 1.0)
        return float(first - second)

    alone = paired_means({"0": told(np.arange(200))}, root=root)
    slopes = 0.5 / np.sqrt(parts.mean(1)) if root else np.ones(2)
    linear = slopes[0] * parts[0] - slopes[1] * parts[1]
    assert alone["first"] - alone["second"] == pytest.approx(gap(np.arange(200)))
    assert (alone["high"] - alone["low"]) / 2 == pytest.approx(1.959963984540054 * linear.std(ddof=1) / 200**0.5)
    found = paired_means({str(k): told(np.flatnonzero(site == k)) for k in range(4)}, root=root)
    without = np.array([gap(np.flatnonzero(site != k)) for k in range(4)])
    deviation = (3 / 4 * np.square(without - without.mean()).sum()) ** 0.5
    assert (found["high"] - found["low"]) / 2 == pytest.approx(stats.t.ppf(0.975, 3) * deviation)
    assert found["p"] == pytest.approx(2 * stats.t.sf(abs(gap(np.arange(200))) / deviation, 3))
    assert (found["low_by_rows"], found["high_by_rows"]) == pytest.approx((alone["low"], alone["high"]))
    assert found["by_site"]["2"]["first"] == pytest.approx(parts[0, site == 2].mean() ** (0.5 if root else 1.0))
    assert paired_means({"0": [0.0] * 13}, root=root) == {}


def two_runs(folder: Path, more: Mapping[str, Any], y: Any = None) -> Any:
    recipe = toy(folder, more, y)
    for name, rounds in (("one", 2), ("two", 1)):
        polyfed.run(replace(recipe, rounds=rounds), folder / name, engine="sequential")
    job = polyfed.run(job_of(folder / "one", None, against=folder / "two"), folder / "job", engine="sequential")
    here = polyfed.evaluate(folder / "one", folder / "two").content
    return job.result["evaluation"]["comparison"], here


def test_jobs_compare_two_regressions_by_sums(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    y = draw.normal(size=(120, 2))
    y[::7, 1] = np.nan
    told, here = two_runs(tmp_path, {"task": {"name": "regression"}}, y)
    assert set(told["paired"]) == {f"{name} of {target}" for name in ("mae", "rmse") for target in range(2)}
    for name in ("mae", "rmse"):
        one = here["comparison"]["bootstrap"][name]
        each = [told["paired"][f"{name} of {target}"] for target in range(2)]
        for side in ("first", "second"):
            assert np.mean([target[side] for target in each]) == pytest.approx(one[side], abs=1e-12)
        assert here["pooled"]["metrics"][name]["value"] == pytest.approx(one["first"], abs=1e-12)
        assert all(target["low"] < target["first"] - target["second"] < target["high"] for target in each)
    text = str(tables(here | {"comparison": told | {"models": ["one", "two"]}}))
    assert "MAE of 1, paired" in text
    assert "RMSE of 0 at 2" in text


def test_retrieval_is_pooled_and_compared_within_sites(tmp_path: Path) -> None:
    told, here = two_runs(tmp_path, {"task": {"name": "retrieval", "dimension": 4}})
    pooled = here["pooled"]["metrics"]
    sites = [(one["rows"], one["metrics"]) for one in here["sites"].values()]
    assert len(sites) == 3
    for name in ("recall1", "recall5", "recall10", "mrr"):
        mean = sum(rows * metrics[name]["value"] for rows, metrics in sites) / sum(rows for rows, _ in sites)
        assert pooled[name]["value"] == pytest.approx(mean, abs=1e-12), "each row has two queries"
        assert pooled[name]["low"] <= mean <= pooled[name]["high"]
        assert pooled[name]["low_by_rows"] <= mean <= pooled[name]["high_by_rows"]
        for one in (told["paired"][name], here["comparison"]["bootstrap"][name]):
            assert one["first"] == pytest.approx(mean, abs=1e-12)
            assert one["low"] <= one["first"] - one["second"] <= one["high"]


def test_retrieval_within_a_site_is_what_its_definition_says() -> None:
    draw, task = torch.Generator().manual_seed(0), Retrieval()
    outputs = nn.functional.normalize(torch.randn(30, 2, 5, generator=draw).double(), dim=-1)
    outputs[:, 1] = nn.functional.normalize(outputs[:, 0] + 0.5 * outputs[:, 1], dim=-1)
    outputs[4, 1] = 0.0  # this row lacks the second modality
    batch = Batch({}, torch.zeros(30, dtype=torch.int64), torch.arange(30))
    ranks, farther = [], []
    known = [k for k in range(30) if k != 4]
    for one, two in ((0, 1), (1, 0)):
        for k in known:
            scores = np.array([float(outputs[k, one] @ outputs[j, two]) for j in known])
            own = scores[known.index(k)]
            ranks.append(int((scores >= own).sum()))
            farther.append(float((scores < own).sum() + 0.5 * ((scores == own).sum() - 1)))
    sums = task.site_sums(outputs, batch)
    found = task.estimates(sums)
    assert found["recall1"].value == pytest.approx(np.mean([rank == 1 for rank in ranks]))
    assert found["recall5"].value == pytest.approx(np.mean([rank <= 5 for rank in ranks]))
    assert found["mrr"].value == pytest.approx(np.mean(1 / np.array(ranks)))
    assert found["auroc_within_sites"].value == pytest.approx(sum(farther) / (28 * 58))
    assert task.site_flaw(sums, 30) == ""
    twice = task.estimates(2 * sums)
    assert twice["recall1"].value == pytest.approx(found["recall1"].value)
    assert (twice["recall1"].high or 0) - (twice["recall1"].low or 0) < (found["recall1"].high or 0) - (
        found["recall1"].low or 0
    )
    for place, value in ((0, 90.0), (1, 90.0), (8, -1.0), (7, 31.0)):
        forged = sums.clone()
        forged[place] = value
        assert task.site_flaw(forged, 30)


def test_equal_embeddings_retrieve_nothing() -> None:
    task, batch = Retrieval(), Batch({}, torch.zeros(9, dtype=torch.int64), torch.arange(9))
    found = task.estimates(task.site_sums(torch.ones(9, 2, 4).double(), batch))
    assert found["recall1"].value == 0.0
    assert found["auroc_within_sites"].value == 0.5
