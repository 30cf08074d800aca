"""A run keeps the shift and the scale of its data, and its models apply them to new samples."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed
from polyfed.core.errors import DataError, RecipeError
from polyfed.data import Columns, scaling_of
from polyfed.data.columns import LEFT_OUT, TEST
from polyfed.federation.attack import Attack
from refusals import refuses, warned

ROWS = 240
DRAW = np.random.default_rng(5)
LABEL = DRAW.integers(0, 3, ROWS)
AUDIO = (DRAW.normal(size=(ROWS, 4)) + LABEL[:, None]).astype(np.float32)
TEXT = (4e3 + 2e3 * (DRAW.normal(size=(ROWS, 3)) - LABEL[:, None])).astype(np.float32)
HALF = np.where(np.arange(ROWS)[:, None] % 2 == 0, TEXT, np.nan).astype(np.float32)
SPLIT = np.where(np.arange(ROWS) < 180, 0, 1)
TESTED = SPLIT == 1


def trained(out: Path | None = None, text: Any = TEXT, **options: Any) -> polyfed.Run:
    data = {"audio": AUDIO, "text": text}
    return polyfed.run(
        data=data,
        labels=LABEL,
        split=SPLIT,
        clients=3,
        out=out,
        **{"algorithm": "fedavg", "rounds": 3, "train": {"lr": 0.1}, "standardise": ["text"]} | options,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scaling")
    trained(path / "run").export(path / "model")
    return path


def test_the_scaling_is_the_mean_and_the_deviation_of_the_training_rows() -> None:
    scaling = trained(rounds=1).scaling
    assert scaling is not None
    assert list(scaling) == ["text"]
    np.testing.assert_allclose(scaling["text"].shift.flatten(), TEXT[~TESTED].mean(0), rtol=1e-5)
    np.testing.assert_allclose(scaling["text"].scale.flatten(), TEXT[~TESTED].std(0), rtol=1e-5)


def test_predictions_for_unscaled_rows_give_the_metrics_of_the_run(folder: Path) -> None:
    run = polyfed.load_run(folder / "run")
    x = {"audio": AUDIO[TESTED], "text": TEXT[TESTED]}
    accuracy = (run.predict(x).argmax(1).numpy() == LABEL[TESTED]).mean()
    assert accuracy == pytest.approx(run.result["metrics"]["global"]["accuracy"])
    assert accuracy > 0.6, "without the scaling, the large numbers of `text` decide"
    model = polyfed.load_model(folder / "model")
    assert torch.equal(model.predict(x), run.predict(x))
    assert torch.equal(model.predict(x, client=1), run.predict(x, client=1))
    tensors = {m: torch.from_numpy(value) for m, value in x.items()}
    assert torch.equal(model.module()(tensors), run.predict(x))
    with refuses(RecipeError, "torch.as_tensor"):
        model.module()(x)
    assert run.scaling is not None
    assert model.scaling is not None
    for one in (run.scaling["text"], model.scaling["text"]):
        assert torch.equal(one.applied(tensors["text"]), run.scaling["text"].applied(tensors["text"]))


def test_a_file_that_polyfed_standardises_gives_a_model_for_its_values(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    names = [f"audio_{i}" for i in range(4)] + [f"text_{i}" for i in range(3)]
    head, cells = ",".join([*names, "label", "client"]), np.hstack([AUDIO, TEXT])
    lines = [
        ",".join([*map(repr, row), f"k{y}", str(i % 3)])
        for i, (row, y) in enumerate(zip(cells.tolist(), LABEL, strict=True))
    ]
    path.write_text("\n".join([head, *lines]))
    with warned("new rows"):
        run = polyfed.run(data=str(path), algorithm="fedavg", rounds=3, train={"lr": 0.1}, out=tmp_path / "run")
    assert run.scaling is not None
    assert list(run.scaling) == ["text"]
    x = {"audio": AUDIO, "text": TEXT}
    assert torch.equal(polyfed.load_run(tmp_path / "run").predict(x), run.predict(x))
    assert (run.predict(x).argmax(1).numpy() == LABEL).mean() > 0.6


def test_the_success_of_an_attack_is_that_of_the_predictions() -> None:
    recipe = polyfed.load_recipe("recipes/fedavg-cg-digits.toml", ["rounds=2"])
    run = polyfed.run(replace(recipe, attack=Attack(name="backdoor", share=0.1)))
    columns = recipe.data.load()
    rows = columns.rows(TEST)
    rows = rows[columns.label[rows] != run.result["backdoor"]["target"]]
    found = run.predict({m: column.raw(rows) for m, column in columns.modalities.items()}).argmax(1)
    expected = (found == run.result["backdoor"]["target"]).double().mean()
    assert run.result["backdoor"]["without_trigger"] == pytest.approx(float(expected))
    assert 0 < expected < 0.5


def test_an_onnx_file_scales_its_input(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="the extra polyfed[onnx] is not installed")
    from onnx.reference import ReferenceEvaluator

    run = trained(rounds=1)
    path = run.export(tmp_path / "m", onnx=True) / "global.onnx"
    x = {"audio": AUDIO[TESTED], "text": TEXT[TESTED]}
    (found,) = ReferenceEvaluator(str(path)).run(None, x)
    torch.testing.assert_close(torch.from_numpy(found), run.predict(x), atol=1e-5, rtol=1e-4)


def test_a_row_of_nan_still_means_that_the_modality_is_missing() -> None:
    run = trained(text=HALF, rounds=1)
    x = {"audio": AUDIO[TESTED], "text": HALF[TESTED]}
    found = run.predict(x)
    lacks = np.isnan(x["text"]).all(1)
    assert torch.equal(found[lacks], run.predict({"audio": AUDIO[TESTED]})[lacks])
    accuracy = (found.argmax(1).numpy() == LABEL[TESTED]).mean()
    assert accuracy == pytest.approx(run.result["metrics"]["global"]["accuracy"])


def test_bytes_of_images_are_scaled_as_in_training() -> None:
    image = DRAW.integers(0, 256, (ROWS, 6, 6)).astype(np.uint8)
    run = polyfed.run(data={"image": image}, labels=LABEL, split=SPLIT, clients=2, algorithm="fedavg", rounds=1)
    assert run.scaling is not None
    assert float(run.scaling["image"].scale) == 255.0
    found = run.predict({"image": image[TESTED][:, None]})
    accuracy = (found.argmax(1).numpy() == LABEL[TESTED]).mean()
    assert accuracy == pytest.approx(run.result["metrics"]["global"]["accuracy"])


def test_a_model_file_without_the_scaling_is_damaged(folder: Path, tmp_path: Path) -> None:
    old = polyfed.load_run(folder / "run").export(tmp_path / "old")
    said = json.loads((old / "model.json").read_text())
    assert list(said.pop("scaling")) == ["text"]
    (old / "model.json").write_text(json.dumps(said))
    with refuses(DataError, "scaling"):
        polyfed.load_model(old)


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": {"shift": [0.0] * 3, "scale": [0.0] * 3}},
        {"text": {"shift": [float("inf")] * 3, "scale": [1.0] * 3}},
        {"text": {"shift": [0.0] * 4, "scale": [1.0] * 3}},
        {"text": {"shift": [[[0.0]]], "scale": [1.0]}},
        {"text": {"shift": ["a"], "scale": [1.0]}},
        {"text": {"shift": [0.0]}},
        {"words": {"shift": [0.0], "scale": [1.0]}},
        [1],
    ],
)
def test_a_damaged_scaling_is_refused(wrong: Any, folder: Path, tmp_path: Path) -> None:
    copy = polyfed.load_run(folder / "run").export(tmp_path / "m")
    said = json.loads((copy / "model.json").read_text())
    (copy / "model.json").write_text(json.dumps(said | {"scaling": wrong}))
    with refuses(DataError, "model.json is damaged"):
        polyfed.load_model(copy)


def test_a_table_without_rows_of_its_own_has_no_known_scaling() -> None:
    table = Columns(
        "elsewhere",
        {"a": polyfed.data.Column(torch.zeros(1, 2))},
        torch.zeros(1, dtype=torch.int64),
        2,
        torch.full((1,), LEFT_OUT, dtype=torch.int8),
        torch.zeros(1, dtype=torch.int64),
    )
    assert scaling_of(table) is None
