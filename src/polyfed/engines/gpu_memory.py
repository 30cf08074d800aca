"""The memory of a GPU, and where a run keeps its data set: on the GPU, or in main memory if it takes too much of it.

If the features of the data set stay in main memory, those of a task's rows are copied to the GPU before the task runs.
"""

import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from polyfed.data import Column, Columns
from polyfed.data.columns import chunks

LARGEST_SHARE = 0.5
"""Largest share of the GPU's free memory that features take: those of the whole data set, or those of a task's rows.
The rest is for models and batches."""


def placed(columns: Columns, device: torch.device, emit: Callable[..., Any]) -> Columns:
    """Return the table on the device where clients train.

    If the features take more than `LARGEST_SHARE` of the free memory, they stay in main memory, and `with_rows` copies
    those of a task's rows. This takes longer, but changes no number. The event `note` reports it.

    Args:
        columns: the table, on the CPU.
        device: the device.
        emit: receives the name and the fields of an event.
    """
    size, free = sum(column.size_bytes for column in columns.modalities.values()), free_bytes(device)
    fits = size <= LARGEST_SHARE * free
    if not fits:
        text = (
            f"the features of '{columns.name}' take {size / 2**30:.1f} GiB, and the GPU has {free / 2**30:.1f} GiB of "
            "free memory. So they stay in main memory, and the rows of clients are copied to the GPU before each task"
        )
        emit("note", text=text)
    return columns.to(device, features=fits)


def with_rows(columns: Columns, rows: Sequence[Tensor], names: Collection[str], device: torch.device) -> Columns:
    """Return the table for a task, with the features of the task's rows on the device.

    If the features of the data set are on the device, this is the given table. It is also the given table if the
    features of the rows take more than `LARGEST_SHARE` of the free memory; each step then copies its own batch.

    Args:
        columns: the table.
        rows: all rows that the task may read, int64 tensors on the CPU. If the task reads another row, PyTorch raises
            an error. Row 0 is always included, because it stands for padding in `Rows`.
        names: the modalities that the task may read.
        device: the device.
    """
    far = {name: columns.modalities[name] for name in names}
    far = {name: column for name, column in far.items() if column.values.device.type != device.type}
    if not far:
        return columns
    read = torch.unique(torch.cat([torch.zeros(1, dtype=torch.int64), *(part.flatten() for part in rows)]))
    picked = {name: read if column.index is None else column.index[read] for name, column in far.items()}
    size = sum(_room(len(picked[name])) * column.values[0].nbytes for name, column in far.items())
    if size > LARGEST_SHARE * free_bytes(device):
        return columns
    near = {name: _with_entries(column, read, picked[name], device) for name, column in far.items()}
    return columns.with_modalities({**columns.modalities, **near})


def _with_entries(column: Column, rows: Tensor, entries: Tensor, device: torch.device) -> Column:
    """Return a column with the values of some rows on the device.

    On a GPU, the values pass through pinned memory, in pieces. CUDA then copies one piece while this process gathers
    the next one. PyTorch does not use the memory of a piece again before its copy has ended.
    """
    distinct, places = torch.unique(entries, return_inverse=True)
    values = torch.empty((_room(len(distinct)), *column.shape), dtype=column.values.dtype, device=device)
    pinned, start = device.type == "cuda", 0
    for part in chunks(distinct, column.shape):
        piece = torch.empty((len(part), *column.shape), dtype=values.dtype, pin_memory=pinned)
        torch.index_select(column.values, 0, part, out=piece)
        values[start : start + len(part)].copy_(piece, non_blocking=pinned)
        start += len(part)
    index = torch.full((len(column),), -1, device=device)  # -1, so that PyTorch refuses to read other rows
    index[rows.to(device)] = places.to(device)
    return replace(column, values=values, index=index)


def _room(num: int) -> int:
    """Return for how many entries memory is allocated: the next power of two.

    A step's program reads a table of fixed size. With exact sizes, most stacks of clients would need their own program.
    """
    return 1 << (num - 1).bit_length()


def free_bytes(device: torch.device) -> float:
    """Return the memory of a GPU that PyTorch can allocate, in bytes; infinity for a CPU, where the data set is."""
    if device.type != "cuda":
        return float("inf")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)


@cache
def total_bytes(device: torch.device) -> int:
    """Return the size of a GPU's memory in bytes.

    If this process does not use CUDA, it stays without CUDA, because it cannot fork workers that use CUDA otherwise.
    Another process then asks for the size.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.get_device_properties(device).total_memory)
    code = f"import torch; print(torch.cuda.get_device_properties('{device}').total_memory)"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
