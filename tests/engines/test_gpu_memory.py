"""A data set that takes too much of a GPU's memory stays in main memory, and a task's rows are copied to the GPU."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from elsewhere import DEVICE, elsewhere
from polyfed.data import Column, Columns
from polyfed.engines.machine.gpu import free_bytes, placed, with_rows

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


def full(device: torch.device) -> float:
    """Free memory in which the data set does not fit, and eight of its rows do."""
    return 2.0 * SIZE - 1


def ignore(name: str, **facts: Any) -> None:
    """Take an event."""


@pytest.mark.parametrize(("free", "resident"), [(2 * SIZE, True), (2 * SIZE - 1, False), (0, False)])
def test_features_move_to_the_device_if_they_take_at_most_half_of_its_free_memory(free: int, resident: bool) -> None:
    told: list[dict[str, Any]] = []
    columns, rows = table(), torch.tensor([[3, 1], [4, 1]])
    with elsewhere(), patch("polyfed.engines.machine.gpu.free_bytes", lambda device: float(free)):
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


def test_the_features_of_a_tasks_rows_move_to_the_device() -> None:
    columns, rows = table(), torch.tensor([[3, 1, 4], [7, 0, 0]])
    with elsewhere(), patch("polyfed.engines.machine.gpu.free_bytes", full):
        there = with_rows(placed(columns, DEVICE, ignore), [rows, torch.tensor([9])], ["a"], DEVICE)
        column = there.modalities["a"]
        assert column.values.device == DEVICE
        assert column.values.shape == (8, FEATURES)  # the six rows 0, 1, 3, 4, 7, 9, and room for two
        read = torch.tensor([[9, 4], [7, 3], [1, 0]])
        assert torch.equal(column.take(read.to(DEVICE)).cpu(), columns.modalities["a"].take(read))
        assert torch.equal(there.label.cpu(), columns.label)
        with pytest.raises(IndexError):
            column.take(torch.tensor([2]).to(DEVICE))


def test_the_features_of_a_tasks_rows_stay_if_they_take_more_than_half_of_the_free_memory() -> None:
    rows, size = torch.arange(8), 4 * 8 * FEATURES + 8 * ROWS  # and the index
    for free, moves in ((2 * size, True), (2 * size - 1, False)):
        with elsewhere(), patch("polyfed.engines.machine.gpu.free_bytes", lambda device, free=free: float(free)):
            columns = placed(table(), DEVICE, ignore)
            assert (with_rows(columns, [rows], ["a"], DEVICE) is not columns) is moves


def test_rows_that_share_an_entry_move_it_once() -> None:
    values = torch.arange(6.0).reshape(3, 2)
    columns = Columns(
        "shared",
        {"a": Column(values, index=torch.tensor([2, 1, 1, 2, 0])), "b": Column(values[[0, 1, 2, 0, 1]])},
        torch.zeros(5, dtype=torch.long),
        2,
        torch.zeros(5, dtype=torch.int8),
        torch.arange(5),
    )
    with elsewhere():
        far = columns.to(DEVICE, features=False)
        there = with_rows(far, [torch.tensor([1, 2, 3])], ["a"], DEVICE)
        assert there.modalities["a"].values.cpu().tolist() == [[2, 3], [4, 5]]
        assert there.modalities["b"] is far.modalities["b"]  # the task does not own this modality
        assert there.modalities["a"].take(torch.arange(4).to(DEVICE)).cpu().tolist() == [[4, 5], [2, 3], [2, 3], [4, 5]]


def test_large_samples_move_in_pieces() -> None:
    values = torch.randn(5, 3, 2**20)  # 12 MiB each, so that every piece has one row
    none = torch.zeros(5, dtype=torch.long)
    columns = Columns("large", {"a": Column(values)}, none, 2, none.to(torch.int8), torch.arange(5))
    with elsewhere(), patch("torch.index_select", wraps=torch.index_select) as gather:
        there = with_rows(columns.to(DEVICE, features=False), [torch.tensor([4, 2])], ["a"], DEVICE)
        assert gather.call_count == 3
        assert torch.equal(there.modalities["a"].take(torch.tensor([2, 4]).to(DEVICE)).cpu(), values[[2, 4]])


def test_on_a_cpu_a_task_reads_the_table_itself() -> None:
    columns = table()
    assert with_rows(columns, [torch.arange(3)], ["a"], torch.device("cpu")) is columns
