"""`polyfed predict` and `predict_frame`: new rows are read as the run's were, and answered by name."""

import csv
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed
from polyfed.cli import main
from polyfed.core.errors import DataError, PolyfedWarning, RecipeError
from polyfed.experiment.results.run_result import Run
from polyfed.objective import OBJECTIVES
from refusals import refuses, warned

RECIPE = """rounds = 2
[data]
name = "table"
path = "{folder}/train.csv"
separator = ";"
decimal = ","
encoding = "cp1252"
label = "Out"
client = "Clinic"
modalities = {{ lab = ["Alter", "CRP mg/l", "Sex"], img = "img_*" }}
columns = {{ Sex = "one-hot", "CRP mg/l" = "mean" }}
[clients]
validation = 0.2
[evaluate]
conformal = "split"
[algorithm]
name = "fedavg"
"""

HOW = {"sep": ";", "decimal": ",", "encoding": "cp1252", "index": False}


def rows(n: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    return pd.DataFrame(
        {
            "Patient": [f"{row:04d}" for row in range(n)],
            "Alter": (50 + 10 * y + rng.normal(0, 5, n)).round(1),
            "CRP mg/l": (5 + 3 * y + rng.normal(0, 2, n)).round(2),
            "Sex": rng.choice(["m", "w"], n),
            "img_0": rng.normal(y, 1).round(3),
            "img_1": rng.normal(0, 1, n).round(3),
            "Clinic": rng.choice(["Nord", "Süd", "01"], n),
            "Out": np.where(y == 1, "Yes", "No"),
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("predict")
    rows(200, 0).to_csv(folder / "train.csv", **HOW)  # type: ignore[arg-type]
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return polyfed.run(folder / "recipe.toml", folder / "run")


@pytest.fixture
def new() -> pd.DataFrame:
    """New rows, whose labels nobody knows, with their columns in another order."""
    return rows(12, 1).drop(columns=["Out", "Clinic"])[["img_1", "Sex", "Patient", "CRP mg/l", "img_0", "Alter"]]


def by_hand(run: Run, new: pd.DataFrame) -> np.ndarray:
    x = {"lab": run.models.numbers("lab", new), "img": torch.tensor(new[["img_0", "img_1"]].to_numpy())}
    return run.predict(x).double().softmax(1).numpy()


def npz(new: pd.DataFrame, path: Path) -> None:
    np.savez(path, **{name: np.array(new[name].tolist()) for name in new.columns})


WRITERS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    "csv": lambda new, path: new.to_csv(path, **HOW),  # type: ignore[call-overload]
    "parquet": lambda new, path: new.to_parquet(path),
    "jsonl": lambda new, path: path.write_text(new.to_json(orient="records", lines=True)) and None,
    "npz": npz,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_new_rows_in_any_file_get_the_same_answers(
    kind: str, run: Run, new: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    WRITERS[kind](new, tmp_path / f"new.{kind}")
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(run.folder), str(tmp_path / f"new.{kind}"), "--id", "Patient", "--coverage", "0.9"])
    assert stop.value.code == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    chances = by_hand(run, new)
    assert [line["Patient"] for line in lines] == new["Patient"].tolist()
    assert [line["prediction"] for line in lines] == [("No", "Yes")[place] for place in chances.argmax(1)]
    for place, name in enumerate(("No", "Yes")):
        assert [float(line[f"probability.{name}"]) for line in lines] == pytest.approx(chances[:, place], abs=1e-6)
    assert {line["used"] for line in lines} == {"lab+img"}
    sets = run.predict_set(new, 0.9).classes
    assert [line["set"] for line in lines] == ["|".join(map(str, held)) or "{}" for held in sets]


@pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")
def test_a_set_without_classes_is_no_missing_prediction(run: Run, new: pd.DataFrame, tmp_path: Path) -> None:
    new.loc[0, [name for name in new if name != "Patient"]] = np.nan
    WRITERS["csv"](new, tmp_path / "new.csv")
    for kind in ("csv", "json"):
        words = ["--coverage", "0.1", "--partial", "absent", "--out", str(tmp_path / f"out.{kind}")]
        with pytest.raises(SystemExit) as stop:
            main(["predict", str(run.folder), str(tmp_path / "new.csv"), *words])
        assert stop.value.code == 0
    told = json.loads((tmp_path / "out.json").read_text())
    lines = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert (told[0]["set"], lines[0]["set"], lines[0]["prediction"]) == (None, "", "")
    empty = [place for place, line in enumerate(told) if line["set"] == []]
    assert empty, "at so low a coverage, few rows are as sure as the promise needs"
    assert {lines[place]["set"] for place in empty} == {"{}"}
    assert all(lines[place]["prediction"] for place in empty)


def test_a_frame_in_memory_needs_no_names_of_modalities(run: Run, new: pd.DataFrame) -> None:
    new = new.set_index(np.arange(len(new)) + 100)
    chances = by_hand(run, new)
    whole, parts = run.predict(new), run.predict({"lab": new, "img": new})
    assert torch.equal(whole, parts)
    assert whole.double().softmax(1).numpy() == pytest.approx(chances, abs=1e-6)
    frame = run.predict_frame(new, ids=["Patient"])
    assert frame.index.tolist() == new.index.tolist()
    assert frame["Patient"].tolist() == new["Patient"].tolist()
    assert frame["probability.Yes"].to_numpy() == pytest.approx(chances[:, 1], abs=1e-6)
    assert run.predict_frame(new, client=1)["prediction"].isin(["No", "Yes"]).all()


def test_an_exported_model_knows_the_columns_too(run: Run, new: pd.DataFrame, tmp_path: Path) -> None:
    run.export(tmp_path / "model")
    WRITERS["csv"](new, tmp_path / "new.csv")
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(tmp_path / "model"), str(tmp_path / "new.csv"), "--out", str(tmp_path / "out.json")])
    assert stop.value.code == 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert [line["row"] for line in told] == list(range(len(new)))
    assert [line["probability.Yes"] for line in told] == pytest.approx(by_hand(run, new)[:, 1], abs=1e-6)


def test_what_rows_lack_is_said_by_name(run: Run, new: pd.DataFrame) -> None:
    strange = new.assign(Sex=["M", *new["Sex"][1:]])
    strange.loc[2, "CRP mg/l"] = np.nan
    strange.loc[3, ["img_0", "img_1"]] = np.nan
    with pytest.warns(PolyfedWarning) as caught:
        frame = run.predict_frame(strange)
    texts = " ".join(str(one.message) for one in caught)
    assert "'Sex' has 1 word that the model has not learnt, such as 'M'" in texts
    assert "'CRP mg/l': 1 empty cell gets" in texts
    assert frame["used"].tolist()[2:4] == ["lab+img", "lab"]
    with warned("column of 'img'"):
        assert set(run.predict_frame(new.drop(columns=["img_0", "img_1"]))["used"]) == {"lab"}
    with refuses(DataError, "lacks 1"):
        run.predict_frame(new.drop(columns="img_1"))
    with refuses(DataError, "none of the"):
        run.predict_frame(new[["Patient"]])
    with refuses(DataError, "column 'patient'"):
        run.predict_frame(new, ids=["patient"])
    with warned("1 word"):
        run.predict({"lab": [[50.0, 3.0, "x"]]})


def test_an_empty_column_is_enough_where_an_empty_cell_has_a_meaning(run: Run, new: pd.DataFrame) -> None:
    with refuses(DataError, "CRP mg/l") as told:
        run.predict_frame(new.drop(columns=["CRP mg/l", "Sex"]))
    assert "Add them (empty ones are enough" in str(told.value)
    with pytest.warns(PolyfedWarning) as caught:
        run.predict_frame(new.drop(columns=["CRP mg/l", "Sex"]).assign(**{"CRP mg/l": None, "Sex": None}))
    assert any("'CRP mg/l': 12 empty cells get" in str(one.message) for one in caught)
    with refuses(DataError, "Alter") as told:
        run.predict_frame(new.drop(columns=["Alter", "Sex"]))
    assert "Add them ('Sex' may be empty" in str(told.value)
    with refuses(DataError, "Alter") as told:
        run.predict_frame(new.drop(columns=["Alter"]))
    assert "Add them, or leave" in str(told.value)


def test_ids_that_several_rows_have_are_noted(run: Run, new: pd.DataFrame) -> None:
    alike = new.assign(Patient=["0007", *new["Patient"][1:]])
    alike.loc[1, "Patient"] = "0007"
    with warned("share their 'Patient'"):
        run.predict_frame(alike, ids=["Patient"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.predict_frame(new, ids=["Patient"])
        run.predict_frame(alike, ids=["Patient", "Alter"])
    assert not [one for one in seen if "share their" in str(one.message)]


def test_cells_that_are_missing_are_handled_as_in_training(run: Run, new: pd.DataFrame) -> None:
    new.loc[4, "Alter"] = np.nan
    with refuses(DataError, "an empty cell"):
        run.predict_frame(new)
    with warned("row 4"):
        assert run.predict_frame(new, partial="absent")["used"].tolist()[4] == "img"


def test_a_row_that_has_nothing_gets_no_answer(run: Run, new: pd.DataFrame) -> None:
    new.loc[5, ["img_0", "img_1"]] = np.nan
    with pytest.warns(PolyfedWarning) as caught:
        frame = run.predict_frame(new[["img_0", "img_1", "Patient"]], coverage=0.9)
    assert "1 row has no modality that the model reads, first row 5" in str(caught[-1].message)
    assert frame.loc[5, "prediction"] is None
    assert frame.loc[5, "set"] is None
    assert frame.loc[5, "used"] == ""
    assert frame["prediction"].notna().sum() == len(new) - 1


def test_images_in_lists_are_turned_as_in_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures, y = rng.random((40, 6, 5, 3)), rng.integers(0, 2, 40)
    lines = [{"image": picture.tolist(), "label": int(label)} for picture, label in zip(pictures, y, strict=True)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "new.jsonl").write_text("\n".join(json.dumps({"image": line["image"]}) for line in lines[:7]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = polyfed.run(data=tmp_path / "train.jsonl", clients=2, algorithm="fedavg", rounds=1)
    frame = run.predict_frame(tmp_path / "new.jsonl")
    turned = torch.from_numpy(pictures[:7]).permute(0, 3, 1, 2)
    assert frame["probability.1"].to_numpy() == pytest.approx(run.predict({"image": turned}).double().softmax(1)[:, 1])


def test_arrays_without_columns_are_asked_for_by_name(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = polyfed.run(data={"a": x}, labels=y, clients=2, algorithm="fedavg", rounds=1)
    with refuses(RecipeError, "columns hold"):
        run.predict_frame(pd.DataFrame(x))
    assert len(run.predict_frame({"a": x})) == 30


@pytest.mark.parametrize(
    ("task", "outputs", "wanted"),
    [
        ("regression", [[2.5]], {"prediction": [2.5]}),
        ("regression", [[2.5, 1.0]], {"prediction.u": [2.5], "prediction.v": [1.0]}),
        ("multi-label", [[9.0, -9.0]], {"prediction.u": [1], "prediction.v": [0]}),
        ("ordinal", [[0.0, -1e9]], {"prediction": ["u"], "probability.u": [0.5], "probability.v": [0.5]}),
        ("classification", [[0.0, 0.0]], {"prediction": ["u"], "probability.u": [0.5], "probability.v": [0.5]}),
    ],
)
def test_each_task_answers_by_name(task: str, outputs: list[list[float]], wanted: dict[str, list[object]]) -> None:
    found = OBJECTIVES[task]().answers(torch.tensor(outputs), ("u", "v", "w")[: 3 if task == "ordinal" else 2])
    assert {name: found[name] for name in wanted} == wanted


def test_retrieval_has_no_answer_for_a_row() -> None:
    with refuses(RecipeError, "task.name: answer"):
        OBJECTIVES["retrieval"]().answers(torch.zeros(1, 2, 3), None)
