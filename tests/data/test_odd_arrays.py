"""Arrays as other programs leave them: masks, views, other byte orders and types, numbers that no float holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset

import polyfed
from polyfed.core.errors import DataError, PolyfedError, PolyfedWarning
from polyfed.data.columns import Columns
from polyfed.data.reading.objects import Given, table_of
from polyfed.data.sources.own.npz import Npz
from refusals import refuses, warned

ROWS = 40
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(ROWS, 3))
LABEL = np.arange(ROWS) % 3
WHO = np.array([f"s{row % 4}" for row in range(ROWS)])


def of(x: Any, **given: Any) -> Columns:
    return table_of({"a": x, "b": X}, Given(**({"labels": LABEL} | given)))


VIEWS: dict[str, Any] = {
    "flipped rows": X[::-1],
    "flipped features": X[:, ::-1],
    "every second row": np.repeat(X, 2, 0)[::2],
    "transposed": np.ascontiguousarray(X.T).T,
    "column order": np.asfortranarray(X),
    "broadcast": np.broadcast_to(X[:, :1], (ROWS, 3)),
    "read only": np.frombuffer(X.tobytes()).reshape(ROWS, 3),
    "big endian": X.astype(">f8"),
    "big endian, short": X.astype(">f4"),
    "half": X.astype(np.float16),
    "long": X.astype(np.longdouble),
    "nested lists": X.tolist(),
    "a list of arrays": list(X),
    "a frame": pd.DataFrame(X),
    "flipped tensor": torch.from_numpy(X).flip(0),
    "flipped integers": (100 * X).astype(np.int64)[::-1],
    "big-endian integers": (100 * X).astype(">i4"),
    "unsigned": (100 * np.abs(X)).astype(np.uint32),
    "words of bits": (100 * np.abs(X)).astype(np.uint64)[::-1],
    "flags": X > 0,
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", VIEWS)
def test_every_view_of_an_array_is_read_as_its_numbers(name: str) -> None:
    x = VIEWS[name]
    plain = x.numpy() if isinstance(x, torch.Tensor) else x
    wanted = torch.from_numpy(np.array(plain, dtype=np.float64).astype(np.float32))
    assert torch.equal(of(x).modalities["a"].take(torch.arange(ROWS)), wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VIEWS)
def test_predictions_read_the_same_views(name: str) -> None:
    run = polyfed.run(data={"a": X}, labels=LABEL, rounds=1, clients=2)
    plain = VIEWS[name].numpy() if isinstance(VIEWS[name], torch.Tensor) else VIEWS[name]
    wanted = run.predict({"a": np.array(plain, dtype=np.float64)})
    torch.testing.assert_close(run.predict({"a": VIEWS[name]}), wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("turn", [lambda v: v[::-1], lambda v: v.astype(">i8"), np.asfortranarray])
def test_facts_of_rows_are_read_from_every_view(turn: Any) -> None:
    numbers = turn(LABEL.astype(np.int64))
    found = of(X, labels=numbers, clients=turn(np.arange(ROWS) % 4), ids=turn(np.arange(ROWS)))
    assert found.label.tolist() == list(numbers)
    assert found.client is not None
    assert found.client.tolist() == list(turn(np.arange(ROWS) % 4))
    assert found.ids.tolist() == list(turn(np.arange(ROWS)))


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64])
def test_a_masked_row_lacks_the_modality(kind: Any) -> None:
    values = np.ma.masked_array((10 * X).astype(kind), mask=np.repeat(np.arange(ROWS)[:, None] % 5 == 0, 3, 1))
    found = of(values)
    assert found.present["a"].tolist() == [row % 5 != 0 for row in range(ROWS)]
    assert torch.equal(
        of((10 * X).astype(kind)).modalities["a"].values[1].double(), found.modalities["a"].values[1].double()
    )
    values.mask[:] = False
    assert "a" not in of(values).present


def test_a_row_that_is_masked_in_part_is_refused() -> None:
    with refuses(DataError, "some values"):
        of(np.ma.masked_greater(X, 1.0))


class Samples(Dataset[tuple[Any, int]]):
    """Samples with a mask."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return np.ma.masked_array(X[row], mask=[row == 7, False, False]), int(LABEL[row])


def test_masks_of_samples_are_seen() -> None:
    with refuses(DataError, "some values"):
        table_of(Samples(), Given())


@pytest.mark.parametrize("role", ["labels", "clients", "split", "ids"])
def test_masked_facts_are_missing(role: str) -> None:
    values = {"labels": LABEL, "clients": LABEL, "split": np.zeros(ROWS, int), "ids": np.arange(ROWS)}[role]
    masked = np.ma.masked_array(values, mask=np.arange(ROWS) == 3)
    with refuses(DataError, "is empty in"):
        of(X, **{role: masked})
    targets = of(X, labels=np.ma.masked_array(2 * X[:, 0], mask=np.arange(ROWS) == 3))
    assert targets.label.isnan().nonzero().flatten().tolist() == [3]


def test_masked_samples_are_not_predicted_as_numbers() -> None:
    run = polyfed.run(data={"a": X}, labels=LABEL, rounds=1, clients=2)
    whole = np.ma.masked_array(X, mask=np.repeat(np.arange(ROWS)[:, None] == 2, 3, 1))
    assert torch.equal(run.predict({"a": whole}), run.predict({"a": X}, present={"a": np.arange(ROWS) != 2}))
    with refuses(PolyfedError, "row"):
        run.predict({"a": np.ma.masked_greater(X, 1.0)})


def test_numbers_that_no_float32_holds_are_named_with_their_cell(tmp_path: Any) -> None:
    large = X.copy()
    large[5, 2] = 1e300
    with refuses(DataError, "1e+300"):
        polyfed.check(polyfed.make_recipe({"a": large}, labels=LABEL))
    held = pd.DataFrame(large, columns=["a_0", "a_1", "a_2"]).assign(label=LABEL)
    with refuses(DataError, "holds 1e+300"):
        table_of(held, Given())
    held.to_csv(tmp_path / "mine.csv", index=False)
    with refuses(DataError, "holds 1e+300"):
        polyfed.make_recipe(tmp_path / "mine.csv")
    (tmp_path / "mine.csv").write_text((tmp_path / "mine.csv").read_text().replace("1e+300", "9" * 400))
    with refuses(DataError, "holds inf"):
        polyfed.make_recipe(tmp_path / "mine.csv")


def test_whole_numbers_that_no_array_holds_are_named_with_their_row() -> None:
    huge = 10**400
    rows = X.tolist()
    rows[7][1] = huge
    for data in ({"a": rows}, {"a": [*X[:7, 0].tolist(), huge, *X[8:, 0].tolist()]}):
        with refuses(DataError, "about 401 digits"):
            table_of(data, Given(labels=LABEL))
    for role in ("labels", "clients", "ids"):
        values = [huge if row == 7 else row % 3 for row in range(ROWS)]
        with refuses(DataError, "about 401 digits"):
            of(X, **{role: values})
    cells = pd.DataFrame({"a": [[huge, 1] if row == 7 else [row, 1] for row in range(ROWS)], "label": LABEL})
    with refuses(DataError, "about 401 digits"):
        table_of(cells, Given())


def test_labels_from_1_are_told_how_to_begin_at_0() -> None:
    with warned("MATLAB"):
        of(X, labels=LABEL + 1)
    with pytest.warns(PolyfedWarning) as told:
        of(X, labels=LABEL * 2)
    assert "MATLAB" not in str(told[0].message)


def test_words_of_pandas_are_told_how_to_be_saved(tmp_path: Path) -> None:
    words = np.array(["a", "b"] * 10, dtype=object)
    np.savez(tmp_path / "mine.npz", x=np.ones((20, 2)), label=words)
    with refuses(DataError, "dtype=str"):
        Npz(path=str(tmp_path / "mine.npz"), modalities=("x",)).load()
    np.savez(tmp_path / "mine.npz", x=np.ones((20, 2)), label=np.array(list(words), dtype=str))
    assert Npz(path=str(tmp_path / "mine.npz"), modalities=("x",)).load().class_names == ("a", "b")
