"""Tables that would take far more memory than their files, and numbers that no array holds."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyfed.core.errors import DataError
from polyfed.data.sources.own.table_files import Table
from refusals import refuses


def loaded(path: Path) -> Any:
    return Table(path=str(path), modalities={"m": ["a"]}).load()


def test_short_rows_of_a_csv_file_are_not_filled_up_without_bound(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(",".join(f"a{number}" for number in range(50_000)) + "\n" + "1\n" * 5_000)
    with refuses(DataError, "zip bomb"):
        loaded(path)


def test_lines_of_json_with_other_names_each_are_not_filled_up_without_bound(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"k{number}":1}}\n' for number in range(7_000)))
    with refuses(DataError, "zip bomb"):
        loaded(path)


def test_a_parquet_file_does_not_expand_without_bound(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path, rows = tmp_path / "x.parquet", 40_000_000
    parquet.write_table(pyarrow.table({"a": pyarrow.repeat(1.0, rows)}), path, compression="zstd")
    with refuses(DataError, "zip bomb"):
        loaded(path)


@pytest.mark.parametrize("digits", ["1" * 20, "9" * 30, "-" + "9" * 400, "1" * 5000])
@pytest.mark.parametrize("column", ["label", "client", "split", "id", "a"])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_whole_number_too_large_for_an_array_is_named_with_row_and_column(
    digits: str, column: str, suffix: str, tmp_path: Path
) -> None:
    rows = [{"a": 0.5 + k, "label": k % 2, "client": k % 3, "split": 0, "id": k} for k in range(12)]
    path = tmp_path / f"x{suffix}"
    if suffix == ".csv":
        lines = [
            ",".join(str(digits if k == 5 and name == column else v) for name, v in row.items())
            for k, row in enumerate(rows)
        ]
        path.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    else:
        lines = [
            json.dumps(row | ({column: "?"} if k == 5 else {})).replace('"?"', digits) for k, row in enumerate(rows)
        ]
        path.write_text("\n".join(lines) + "\n")
    if (column == "a" and (suffix == ".csv" or len(digits) < 300)) or (suffix == ".csv" and len(digits) > 4000):
        pytest.skip("this is a float or a word, and no whole number")
    if suffix == ".csv" and column == "client":
        assert len(loaded(path).client.unique()) == 4  # in a text file, clients are words
        return
    with pytest.raises(DataError) as told:
        loaded(path)
    named = f"column '{column}' holds" in str(told.value) or f"the {column} column holds" in str(told.value)
    assert "line 6" in str(told.value) or named
    assert len(str(told.value)) < 400
