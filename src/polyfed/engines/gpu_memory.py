"""The memory of a GPU, and where a run keeps its data set: on the GPU, or in main memory if it takes too much of it."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from polyfed.data import Columns

LARGEST_SHARE = 0.5
"""Largest share of the GPU's free memory that the features of a data set take. The rest is for models and batches."""


def placed(columns: Columns, device: torch.device, emit: Callable[..., Any]) -> Columns:
    """Return the table on the device where clients train.

    If the features take more than `LARGEST_SHARE` of the free memory, they stay in main memory. Each batch is then
    copied to the device when a step reads it. This takes longer, but changes no number. The event `note` reports it.

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
            "free memory. So they stay in main memory, and every batch is copied to the GPU"
        )
        emit("note", text=text)
    return columns.to(device, features=fits)


def free_bytes(device: torch.device) -> float:
    """Return the free memory of a GPU in bytes, or infinity for a CPU, where the data set already is."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float("inf")


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
