"""The same numbers are learnt from every form of data, and features are standardised over the rows that train."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset

import polyfed
from polyfed.core.errors import PolyfedWarning
from polyfed.data.column_scaling import fitted, moments
from polyfed.data.columns import Column, Columns
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.assembly import population_of
from refusals import warned

ROWS = 180
DRAW = np.random.default_rng(0)
LABEL = np.arange(ROWS) % 3
A = DRAW.normal(size=(ROWS, 4)) * [100, 1, 1e-3, 5] + LABEL[:, None] * [60, 0.5, 5e-4, 2] + [500, 0, 0, 0]
B = DRAW.integers(0, 400, (ROWS, 3)) + 40 * LABEL[:, None]
WHO = np.array(["ann", "bob", "cyd"])[np.arange(ROWS) // 7 % 3]
SPLIT = np.where(np.arange(ROWS) % 5 == 0, "test", "train")
OPTIONS: dict[str, Any] = {"rounds": 2, "seed": 4, "clients": "client", "split": "split"}


class Samples(Dataset[dict[str, Any]]):
    """The rows as the samples of a PyTorch dataset."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"a": A[row], "b": B[row], "label": int(LABEL[row]), "client": WHO[row], "split": SPLIT[row]}


def frame() -> pd.DataFrame:
    held = pd.DataFrame({f"a_{n}": A[:, n] for n in range(4)} | {f"b_{n}": B[:, n] for n in range(3)})
    return held.assign(label=LABEL, client=WHO, split=SPLIT)


def forms(folder: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    yield "arrays", {"a": A, "b": B}, {"labels": LABEL, "clients": WHO, "split": SPLIT}
    yield (
        "tensors",
        {"a": torch.from_numpy(A), "b": torch.from_numpy(B)},
        {"labels": LABEL, "clients": WHO, "split": SPLIT},
    )
    yield "frame", frame(), {}
    yield "dataset", Samples(), {}
    np.savez(folder / "mine.npz", a=A, b=B, label=LABEL, client=WHO, split=SPLIT)
    frame().to_csv(folder / "mine.csv", index=False)
    frame().to_parquet(folder / "mine.parquet")
    frame().to_json(folder / "mine.jsonl", orient="records", lines=True, double_precision=15)
    for suffix in ("npz", "csv", "parquet", "jsonl"):
        yield suffix, folder / f"mine.{suffix}", {}


@pytest.mark.filterwarnings("ignore:data. a, b. features differ in size")
def test_the_same_rows_give_the_same_model_in_every_form(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra polyfed[parquet] is not installed")
    found = {}
    for name, data, more in forms(tmp_path):
        run = polyfed.run(data=data, **(OPTIONS | more))
        found[name] = run.result["state_sha256"]
        assert run.scaling is not None
        assert list(run.scaling) == ["a", "b"], name
    assert len(set(found.values())) == 1, found


@pytest.mark.filterwarnings("ignore:data. a. features differ in size")
def test_numbers_of_float32_give_the_same_model_as_their_text(tmp_path: Path) -> None:
    small = A.astype(np.float32)
    held = pd.DataFrame({f"a_{n}": small[:, n] for n in range(4)}).assign(label=LABEL, client=WHO, split=SPLIT)
    held.to_csv(tmp_path / "mine.csv", index=False)
    one = polyfed.run(data={"a": small}, labels=LABEL, **(OPTIONS | {"clients": WHO, "split": SPLIT}))
    two = polyfed.run(data=tmp_path / "mine.csv", **OPTIONS)
    assert one.result["state_sha256"] == two.result["state_sha256"]


RECIPE = """
seed = 4
rounds = 2
[data]
name = "npz"
path = "{}"
modalities = ["a", "b"]
[clients]
num = 1
partition = "iid"
[model.encoders]
a = {{ kind = "mlp", hidden = [64] }}
b = {{ kind = "mlp", hidden = [64] }}
[algorithm]
name = "fedavg"
[engine]
min_replies = 1
[deployment]
enrol_seconds = 2.0
"""


@pytest.mark.filterwarnings("ignore:data. a, b. features differ in size")
def test_a_device_scales_its_file_as_a_simulation_does(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from engines.direct import over
    from polyfed.deploy import write_app, write_nodes
    from polyfed.deploy.handlers import Deployed
    from polyfed.deploy.server.server import serve
    from polyfed.experiment.running.loop import execute

    np.savez(tmp_path / "mine.npz", a=A, b=B, label=LABEL, split=SPLIT)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(tmp_path / "mine.npz"))
    one = polyfed.run(tmp_path / "recipe.toml", engine="sequential")
    recipe = load_recipe(tmp_path / "recipe.toml")
    rows = population_of(recipe).train[0].numpy()  # the order in which batches are drawn
    np.savez(tmp_path / "device.npz", a=A[rows], b=B[rows], label=LABEL[rows])
    arrays = polyfed.run(
        data={"a": A, "b": B}, labels=LABEL, split=SPLIT, clients=1, rounds=2, seed=4, engine={"name": "sequential"}
    )
    app = write_app(tmp_path / "recipe.toml", tmp_path / "app")
    place = write_nodes(recipe, tmp_path)[0]
    config = {
        "data": str(tmp_path / "device.npz"),
        "client": 0,
        "modalities": "a,b",
        "policy": str(place / "policy.toml"),
        "state": str(tmp_path / "state"),
    }
    handler = Deployed(app / "recipe.toml")
    transport = over(lambda packet, _: handler(packet, config), 1)
    serve(app / "recipe.toml", transport, {"out": str(tmp_path / "run")}, execute)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["state_sha256"] == one.result["state_sha256"] == arrays.result["state_sha256"]


def test_uneven_features_are_standardised_in_one_line_and_switched_off_everywhere(tmp_path: Path) -> None:
    for name, data, more in forms(tmp_path):
        with pytest.warns(PolyfedWarning) as told:
            population = population_of(polyfed.make_recipe(data, **(OPTIONS | more)))
        said = [str(w.message) for w in told if "differ in size" in str(w.message)]
        assert len(said) == 1, name
        assert said[0].startswith("data: a, b: features differ in size")
        assert "standardise = false turns this off" in said[0]
        assert any("features differ in size" in note for note in population.columns.notes)
        raw = population_of(polyfed.make_recipe(data, **(OPTIONS | more | {"standardise": False}))).columns
        assert raw.modalities["a"].shift is None
        assert raw.modalities["b"].scale is None


def test_even_features_stay_as_they_are() -> None:
    recipe = polyfed.make_recipe({"a": DRAW.normal(size=(ROWS, 3))}, labels=LABEL)
    assert population_of(recipe).columns.modalities["a"].shift is None  # a warning would be an error


@pytest.mark.filterwarnings("ignore:data. a. features differ in size")
@pytest.mark.parametrize(
    "clients", [{"validation": 0.3}, {"personal_test": 0.3}, {"partition": "by-client", "personal_test": 0.3}]
)
def test_validation_and_own_test_rows_change_no_statistic(clients: dict[str, Any]) -> None:
    section = clients | ({"ids": WHO} if "partition" in clients else {"num": 3})
    options = {"labels": LABEL, "clients": section, "seed": 2}
    before = population_of(polyfed.make_recipe({"a": A}, **options))
    changed = A.copy()
    trained = np.zeros(ROWS, bool)
    trained[before.train.rows.numpy()] = True
    changed[~trained] += 1e4
    after = population_of(polyfed.make_recipe({"a": changed}, **options))
    assert torch.equal(before.train.rows, after.train.rows)
    one, two = (p.columns.modalities["a"] for p in (before, after))
    assert torch.equal(one.shift, two.shift)
    assert torch.equal(one.scale, two.scale)


@pytest.mark.filterwarnings("ignore:data. a. features differ in size")
@pytest.mark.parametrize("offset", [0.0, 1.7e9, 1.7e12, 1e15])
def test_times_keep_their_resolution_whatever_their_origin(offset: float) -> None:
    width = 3.6e6 if offset == 1.7e12 else 3600.0
    steps = np.random.default_rng(3).permutation(ROWS) / ROWS * width
    x = np.stack([offset + np.floor(steps), DRAW.normal(size=ROWS)], 1)
    for values in (x, x.astype(np.int64)):
        columns = population_of(polyfed.make_recipe({"a": values}, labels=LABEL)).columns
        rows = columns.rows(0)
        time = columns.modalities["a"].take(rows)[:, 0].double().numpy()
        wanted = values[rows, 0] - offset
        np.testing.assert_allclose(time, (wanted - wanted.mean()) / wanted.std(), atol=1e-4)


@pytest.mark.filterwarnings("ignore:data. a. features differ in size")
def test_predictions_keep_the_resolution_too(tmp_path: Path) -> None:
    x = np.stack([1.7e12 + np.arange(ROWS) * 1000.0, DRAW.normal(size=ROWS)], 1)
    y = (np.arange(ROWS) > ROWS // 2).astype(int)
    options: dict[str, Any] = {"labels": y, "clients": 2, "rounds": 15, "train": {"optimiser": "adam", "lr": 0.01}}
    run = polyfed.run(data={"a": x}, out=tmp_path / "run", **options)
    found = run.predict({"a": x})
    assert (found.argmax(1).numpy() == y).mean() > 0.9
    assert torch.equal(polyfed.load_run(tmp_path / "run").predict({"a": x}), found)
    run.export(tmp_path / "model")
    model = polyfed.load_model(tmp_path / "model")
    assert torch.equal(model.predict({"a": x}), found)
    assert torch.equal(model.module()({"a": torch.from_numpy(x)}), found)
    assert run.scaling is not None
    assert run.scaling["a"].shift.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:data. a. features differ in size")
def test_a_feature_that_float32_cannot_tell_apart_is_named() -> None:
    x = np.stack([1.7e12 + np.arange(ROWS) * 1000.0, DRAW.normal(size=ROWS)], 1)
    with warned("float32"):
        population_of(polyfed.make_recipe({"a": x.astype(np.float32)}, labels=LABEL))
    with warned("float32"):
        population_of(polyfed.make_recipe({"a": x}, labels=LABEL, standardise=False))


def test_a_feature_is_constant_only_if_it_is_constant() -> None:
    values = torch.tensor([[0.1, 1e9 + row, 5e8 + 1e-6 * row] for row in range(64)], dtype=torch.float64)
    found = moments(Column(values), torch.arange(64))
    assert found.varies.tolist() == [False, True, True]
    table = Columns(
        "t",
        {"a": Column(values)},
        torch.arange(64) % 2,
        2,
        torch.zeros(64, dtype=torch.int8),
        torch.arange(64),
        standardise=True,
    )
    x = fitted(table, torch.arange(64)).modalities["a"].take(torch.arange(64))
    assert bool((x[:, 0] == 0).all())
    np.testing.assert_allclose(x[:, 1].std(unbiased=False), 1.0, rtol=1e-5)
    np.testing.assert_allclose(x[:, 2].std(unbiased=False), 1.0, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:data. a. features differ in size")
def test_padding_of_sequences_stays_zero_and_out_of_the_statistics() -> None:
    series = [list(map(list, 500 + 20 * DRAW.normal(size=(3 + row % 4, 2)))) for row in range(ROWS)]
    held = pd.DataFrame({"a": series, "label": LABEL})
    columns = population_of(polyfed.make_recipe(held)).columns
    taken = columns.modalities["a"].take(torch.arange(ROWS))
    for row in range(0, ROWS, 17):
        length = 3 + row % 4
        assert bool((taken[row, length:] == 0).all())
        assert bool((taken[row, :length] != 0).all())
    real = taken[columns.rows(0)]
    real = real[real.ne(0).any(-1)]
    assert float(real.mean(0).abs().max()) < 1e-4
    run = polyfed.run(data=held, rounds=1)
    x = {"a": columns.modalities["a"].raw(torch.arange(9))}
    assert torch.equal(run.models.module()(x), run.predict(x))
