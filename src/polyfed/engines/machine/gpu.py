"""What a run does on a GPU: deterministic algorithms, and where its data set lies.

The data set is on the GPU or, if its features need too much of the memory, in main memory; `with_rows` then copies the
features of a task's rows to the GPU before the task.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.utils.deterministic
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
        emit: receives the name and the fields of an event.
    """
    size, free = sum(column.size_bytes for column in columns.modalities.values()), free_bytes(device)
    fits = size <= LARGEST_SHARE * free
    if not fits:
        text = (
            f"the features of '{columns.name}' take {size / 2**30:.1f} GiB, and the GPU has {free / 2**30:.1f} GiB of "
            "free memory. They therefore stay in main memory. polyfed copies the features of the clients' rows to the "
            "GPU before each task, or those of each batch if the rows do not fit"
        )
        emit("note", text=text)
    return columns.to(device, features=fits)


def with_rows(columns: Columns, rows: Sequence[Tensor], names: Collection[str], device: torch.device) -> Columns:
    """Return the table for a task, with the features of the task's rows on the device.

    The function returns the given table in two cases: the features of the data set are on the device, or those of the
    rows take more than `LARGEST_SHARE` of the free memory. In the second case, each step copies its own batch.

    Args:
        rows: all rows that the task may read, int64 tensors on the CPU. If the task reads another row, PyTorch raises
            an error. Row 0 is always included, because it stands for padding in `Rows`.
        names: the modalities that the task may read.
    """
    own = ((name, columns.modalities[name]) for name in names)
    far = {name: column for name, column in own if column.values.device.type != device.type}
    if not far:
        return columns
    read = torch.unique(torch.cat([torch.zeros(1, dtype=torch.int64), *(part.flatten() for part in rows)]))
    picked = {name: read if column.index is None else column.index[read] for name, column in far.items()}
    size = sum(_room(len(picked[name])) * column.values[0].nbytes + 8 * len(column) for name, column in far.items())
    if size > LARGEST_SHARE * free_bytes(device):
        return columns
    near = {name: _with_entries(column, read, picked[name], device) for name, column in far.items()}
    return columns.with_modalities({**columns.modalities, **near})


def _with_entries(column: Column, rows: Tensor, entries: Tensor, device: torch.device) -> Column:
    """Return a column with the values of some rows on the device.

    On a GPU, the values pass through pinned memory, in pieces. CUDA then copies one piece while this process gathers
    the next one. PyTorch does not reuse the memory of a piece before its copy has ended.

    Args:
        rows: the rows, (n,).
        entries: the position of each of these rows in `column.values`, (n,).
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
    blank = None if column.blank is None else column.blank.to(device)
    return replace(column, values=values, index=index, blank=blank)


def _room(num: int) -> int:
    """Return the number of entries to allocate: the smallest power of two that is at least `num`.

    A step's program reads a table of fixed size. With exact sizes, most stacks of clients would need their own program.
    """
    return 1 << (num - 1).bit_length()


def free_bytes(device: torch.device) -> float:
    """Return how many bytes PyTorch can still allocate on a GPU; infinity for a CPU."""
    if device.type != "cuda":
        return float("inf")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)


@cache
def total_bytes(device: torch.device) -> int:
    """Return the size of a GPU's memory in bytes.

    If this process has not started CUDA, the function asks in another process. Otherwise, workers that this process
    forks later could not use CUDA.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.get_device_properties(device).total_memory)
    code = f"import torch; print(torch.cuda.get_device_properties('{device}').total_memory)"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


WORKSPACE = ":4096:8"
"""One of the two values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS computes the same bits each time. The other value
makes cuBLAS slower (NVIDIA's documentation of cuBLAS, "Results Reproducibility")."""


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Let PyTorch use deterministic algorithms in this block, if the device is a GPU.

    By default, some operations on a GPU add numbers in an order that changes from call to call, such as the gradients
    of convolutions. A resumed run would then differ from the uninterrupted run. If PyTorch has no deterministic
    algorithm for an operation, it gives a warning with the name of the operation, and computes as usual.

    The settings apply to all Python threads of the process. PyTorch needs the variable CUBLAS_WORKSPACE_CONFIG before
    the first matrix product on the GPU. If the variable is not set, this function sets it, and it stays set after the
    block.

    Args:
        device: the device that trains.
    """
    if device.type != "cuda":
        yield
        return
    settings: Any = torch.utils.deterministic  # PyTorch sets the attribute in a way that type checkers cannot see
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    # 1 gives a warning for an operation without a deterministic algorithm. If the user has chosen 2, an error, it stays
    torch.set_deterministic_debug_mode(max(mode, 1))
    settings.fill_uninitialized_memory = False  # it takes time, and polyfed reads no such memory
    torch.backends.cudnn.benchmark = False  # otherwise measured times choose the algorithms
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
