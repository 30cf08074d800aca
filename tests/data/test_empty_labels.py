"""Rows without a class are refused with every fault of the labels, or left out, counted and said."""

import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from polyfed.cli import main
from polyfed.core.errors import DataError
from polyfed.data.columns import LEFT_OUT
from polyfed.data.reading.given import Given
from polyfed.data.reading.objects import table_of
from polyfed.data.sources.own.table_files import Table
from polyfed.experiment.recipes.first_recipe import starter
from refusals import refuses

ROWS = 60
GONE = [3, 7]


def words() -> list[str]:
    return ["" if row in GONE else ("walk", "Walk ", "sit")[row % 3] for row in range(ROWS)]


def write(folder: Path, label: list[str]) -> Path:
    frame = pd.DataFrame({"acc_x": np.sin(np.arange(ROWS)), "acc_y": np.cos(np.arange(ROWS)), "activity": label})
    frame.to_csv(folder / "rows.csv", index=False)
    return folder / "rows.csv"


def test_init_tells_every_fault_of_the_labels_at_once_and_the_words_that_it_prints_mend_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, words())
    with refuses(DataError, "column 'activity'") as refused:
        starter(file, {})
    text = str(refused.value)
    assert "2 of 60 rows" in text
    assert "blanks" in text
    said = [part.split(")")[0] for part in text.split("(polyfed init: ")[1:]]
    assert len(said) == 2
    with refuses(SystemExit, "0"):
        main(["init", str(file), *(word for one in said for word in shlex.split(one))])
    assert "empty_rows" in (tmp_path / "recipe.toml").read_text()


@pytest.mark.parametrize("kind", ["file", "frame", "arrays", "whole numbers"])
def test_rows_without_a_class_are_left_out_and_counted(kind: str, tmp_path: Path) -> None:
    label = [word.strip().lower() for word in words()]
    x = np.sin(np.arange(ROWS))[:, None]
    given = Given(empty_rows="leave-out", modalities={"acc": ["acc_x"]})
    if kind == "file":
        path = str(write(tmp_path, label))
        columns = Table(path=path, modalities={"acc": "acc_*"}, label="activity", empty_rows="leave-out").load()
    elif kind == "frame":
        columns = table_of(pd.DataFrame({"acc_x": x[:, 0], "label": label}), given)
    elif kind == "arrays":
        columns = table_of({"acc": x}, Given(empty_rows="leave-out", labels=np.array(label)))
    else:
        numbers = [np.nan if word == "" else float(word == "walk") for word in label]
        columns = table_of(pd.DataFrame({"acc_x": x[:, 0], "label": numbers}), given)
    assert (columns.split == LEFT_OUT).nonzero()[:, 0].tolist() == GONE
    assert columns.num_classes == 2
    walks = [row for row, word in enumerate(label) if word == "walk"]
    assert sorted({*(columns.label == 1).nonzero()[:, 0].tolist()} - {*GONE}) == walks
    assert any("2 rows have no label, first row 3" in note for note in columns.notes)


def test_labels_that_are_all_empty_are_refused_in_any_case() -> None:
    with refuses(DataError, "60 of 60"):
        table_of({"acc": np.ones((ROWS, 1))}, Given(empty_rows="leave-out", labels=[""] * ROWS))
