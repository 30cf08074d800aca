"""A data set that takes too much of a GPU's memory stays in main memory."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from elsewhere import DEVICE, elsewhere
from polyfed.data import Column, Columns
from polyfed.engines.gpu_memory import free_bytes, placed

ROWS, FEATURES = 1000, 16
SIZE = 4 * ROWS * FEATURES + 8 * ROWS  # float32 values and an int64 index


def table() -> Columns:
    draw = torch.Generator().manual_seed(1)
    column = Column(
        torch.randn(ROWS, FEATURES, generator=draw),
        shift=torch.full((FEATURES,), 0.5),
        scale=torch.full((FEATURES,), 2.0),
        index=torch.randperm(ROWS, generator=draw),
    )
    none = torch.zeros(ROWS, dtype=torch.long)
    return Columns("big", {"a": column}, none, 2, none.to(torch.int8), torch.arange(ROWS))


@pytest.mark.parametrize(("free", "resident"), [(2 * SIZE, True), (2 * SIZE - 1, False), (0, False)])
def test_features_move_to_the_device_if_they_take_at_most_half_of_its_free_memory(free: int, resident: bool) -> None:
    told: list[dict[str, Any]] = []
    columns, rows = table(), torch.tensor([[3, 1], [4, 1]])
    with elsewhere(), patch("polyfed.engines.gpu_memory.free_bytes", lambda device: float(free)):
        there = placed(columns, DEVICE, lambda name, **facts: told.append({"name": name, **facts}))
        column = there.modalities["a"]
        assert (column.values.device == DEVICE) is resident
        assert there.label.device == DEVICE
        taken = column.take(rows.to(DEVICE))
        assert taken.device == DEVICE
        assert torch.equal(taken.cpu(), columns.modalities["a"].take(rows))
    assert [one["name"] for one in told] == ([] if resident else ["note"])
    assert all("the features of 'big' take 0.0 GiB" in one["text"] for one in told)


def test_on_a_cpu_nothing_is_copied() -> None:
    columns = table()
    assert free_bytes(torch.device("cpu")) == float("inf")
    assert placed(columns, torch.device("cpu"), lambda name, **facts: None).modalities["a"].values is (
        columns.modalities["a"].values
    )
