"""Generated tables with dates, ids, holes and counts: read right, or refused with column, row and way out."""

import ast
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import polyfed
from polyfed.core.errors import DataError, PolyfedError
from polyfed.data.columns import Columns
from polyfed.data.reading.objects import Given, table_of
from refusals import refuses, warned

ROWS = 48
DRAW = np.random.default_rng(11)
X = DRAW.normal(size=(ROWS, 4))
LABEL = np.arange(ROWS) % 3
SUFFIXES = ["frame", "csv", "tsv", "parquet", "jsonl"]


def plain(**more: Any) -> pd.DataFrame:
    held = pd.DataFrame({"a_0": X[:, 0], "a_1": X[:, 1], "b_0": X[:, 2], "b_1": X[:, 3]})
    return held.assign(**more, label=LABEL)


def read(frame: pd.DataFrame, suffix: str, folder: Path, **options: Any) -> Columns:
    """Read a frame in memory, or after it was written to a file."""
    if suffix == "frame":
        return table_of(frame, Given(**options))
    path = folder / f"mine.{suffix}"
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="the extra polyfed[parquet] is not installed")
        frame.to_parquet(path)
    elif suffix == "jsonl":
        frame.to_json(path, orient="records", lines=True, date_format="iso", double_precision=15)
    else:
        frame.to_csv(path, index=False, sep="\t" if suffix == "tsv" else ",")
    found: Columns = polyfed.make_recipe(path, **options).data.load()
    return found


DAYS = pd.date_range("2024-01-30", periods=ROWS, freq="36h")
DATES: dict[str, Callable[[], Any]] = {
    "days": lambda: DAYS.strftime("%Y-%m-%d"),
    "times": lambda: DAYS.strftime("%Y-%m-%d %H:%M:%S"),
    "iso": lambda: DAYS.strftime("%Y-%m-%dT%H:%M"),
    "with dots": lambda: DAYS.strftime("%d.%m.%Y"),
    "with slashes": lambda: DAYS.strftime("%m/%d/%y"),
    "stamps": lambda: DAYS,
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", DATES)
def test_dates_are_left_out_with_the_way_to_a_number(tmp_path: Path, suffix: str, name: str) -> None:
    frame = plain(when=DATES[name]())
    with warned("hold dates"):
        found = read(frame, suffix, tmp_path)
    assert list(found.modalities) == ["a", "b"]
    with refuses(DataError, "'when' holds dates") as refused:
        read(frame, suffix, tmp_path, modalities={"a": ["a_0", "when"]})
    rules = pasted(str(refused.value))
    kept = read(frame, suffix, tmp_path, modalities={"a": ["a_0", "when"]}, columns=rules)
    days = (pd.Series(DAYS) - pd.Timestamp("2000-01-01")).dt.total_seconds() / 86400
    whole = name in ("days", "with dots", "with slashes")
    np.testing.assert_allclose(kept.modalities["a"].values[:, 1], np.floor(days) if whole else days)


def pasted(text: str) -> Any:
    """The rules that an error text suggests, both as TOML and as Python."""
    toml, python = re.search(r"\[data\] (columns = .*) \(in Python: columns=(\{.*?\})\)", text).groups()  # type: ignore[union-attr]
    rules = tomllib.loads(toml)["columns"]
    assert ast.literal_eval(python) == rules
    return rules


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_words_and_holes_are_refused_with_rules_that_can_be_pasted(tmp_path: Path, suffix: str) -> None:
    frame = plain(b_0=np.where(np.arange(ROWS) % 3 == 0, "low", "high"))
    frame.loc[5, "b_1"] = np.nan
    with refuses(DataError, "'b_0' holds") as refused:
        read(frame, suffix, tmp_path, modalities={"b": "b_*"}, partial="refuse")
    rules = pasted(str(refused.value))
    assert rules == {"b_0": "one-hot"}
    with refuses(DataError, "an empty cell") as refused:
        read(frame, suffix, tmp_path, modalities={"b": "b_*"}, partial="refuse", columns=rules)
    rules |= pasted(str(refused.value))
    found = read(frame, suffix, tmp_path, modalities={"b": "b_*"}, partial="refuse", columns=rules)
    assert not found.present
    assert [feature.width for feature in found.modalities["b"].coded or ()] == [2, 2]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_ids_are_read_or_refused_with_their_row(tmp_path: Path, suffix: str) -> None:
    ids = DRAW.permutation(ROWS) + 1000
    assert read(plain(id=ids), suffix, tmp_path).ids.tolist() == ids.tolist()
    assert read(plain(row=ids), suffix, tmp_path, modalities={"a": "a_*"}).ids.tolist() == list(range(ROWS))
    again = np.where(np.arange(ROWS) == 9, ids[3], ids)
    with refuses(DataError, f"as {ids[3]}"):
        read(plain(id=again), suffix, tmp_path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_holes_are_missing_modalities_or_refused_with_row_and_column(tmp_path: Path, suffix: str) -> None:
    whole = plain()
    whole.loc[[4, 7], ["b_0", "b_1"]] = np.nan
    found = read(whole, suffix, tmp_path)
    assert (~found.present["b"]).nonzero().flatten().tolist() == [4, 7]
    np.testing.assert_allclose(found.modalities["a"].values, X[:, :2])
    part = plain()
    part.loc[5, "b_1"] = np.nan
    with refuses(DataError, "5 without 'b_1'"):
        read(part, suffix, tmp_path, partial="refuse")
    assert (~read(part, suffix, tmp_path, partial="absent").present["b"]).nonzero().flatten().tolist() == [5]
    label = plain()
    label["label"] = label["label"].astype(float).where(label.index != 6)
    with refuses(DataError, "is empty in"):
        read(label, suffix, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["counts", "shares", "large", "small", "negative", "flags"])
def test_numbers_of_every_size_are_read_as_they_are(tmp_path: Path, suffix: str, kind: str) -> None:
    values: Any = {
        "counts": DRAW.poisson([3, 900], (ROWS, 2)),
        "shares": DRAW.random((ROWS, 2)),
        "large": DRAW.normal(size=(ROWS, 2)) * 1e12,
        "small": DRAW.normal(size=(ROWS, 2)) * 1e-12,
        "negative": -DRAW.integers(0, 9, (ROWS, 2)),
        "flags": DRAW.random((ROWS, 2)) > 0.5,
    }[kind]
    frame = pd.DataFrame({"a_0": values[:, 0], "a_1": values[:, 1], "label": LABEL})
    found = read(frame, suffix, tmp_path).modalities["a"].values.double()
    np.testing.assert_allclose(found, values.astype(float), rtol=1e-6, atol=1e-15 if kind == "small" else 0)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_of_texts_names_what_reads_texts(tmp_path: Path, suffix: str) -> None:
    frame = pd.DataFrame({"text": ["a, b", "c d"] * (ROWS // 2), "label": LABEL})
    with refuses(PolyfedError, "source `hf` reads") as caught:
        read(frame, suffix, tmp_path)
    assert suffix == "frame" or "--column text=words" in str(caught.value)


def test_dates_in_arrays_are_told_how_to_become_numbers() -> None:
    stamps = DAYS.to_numpy()[:, None]
    for values in (stamps, stamps - stamps[0]):
        with refuses(DataError, "number for each"):
            table_of({"a": values}, Given(labels=LABEL))
