"""Settings of PyTorch under which a run on a GPU gives the same bits each time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

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
