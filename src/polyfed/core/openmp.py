"""The threads of OpenMP, with which PyTorch computes large operations on a CPU."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

SOFT_PAUSE = 1
"""The value `omp_pause_soft` of OpenMP 5.0, from `omp.h`."""

THREAD_BYTES = 2**26
"""Bytes that justify one more thread for operations that read each byte about once. One thread reads them in about
6 ms. An operation with several threads takes longer than that on a busy machine, because it waits until the system
gives a core to each of its threads (docs/performance.md)."""


def end_idle_threads() -> None:
    """End the OpenMP threads of this process that wait for the next operation. The next operation starts new ones.

    With GNU OpenMP, which PyTorch's packages for Linux contain, a thread computes in a loop while it waits. After an
    operation, it takes a whole core for 6 ms. Worker processes that begin within this time would be slower. To start
    a thread again takes 0.1 ms (docs/performance.md).

    If the OpenMP library lacks the function `omp_pause_resource_all`, nothing happens.
    """
    pause = _function("omp_pause_resource_all")
    if pause is not None:
        pause(SOFT_PAUSE)


@contextmanager
def threads_worth(num_bytes: int) -> Iterator[None]:
    """Limit the OpenMP threads of the operations in this block: one thread, and one more for each `THREAD_BYTES`.

    The limit applies only to the Python thread that runs the block. `torch.set_num_threads` would also change threads
    that start meanwhile, and they would keep the changed number. The limit never raises the number of threads. It does
    not apply to the operations that PyTorch leaves to MKL, such as large matrix products. If the OpenMP library lacks
    the function `omp_set_num_threads`, there is no limit.

    Args:
        num_bytes: size of the tensors that the operations read.
    """
    limit = _function("omp_set_num_threads")
    before = torch.get_num_threads()
    allowed = 1 + num_bytes // THREAD_BYTES
    if limit is None or allowed >= before:
        yield
        return
    limit(allowed)
    try:
        yield
    finally:
        limit(before)


@cache
def _function(name: str) -> Any:
    """Return a function of the OpenMP library, or None.

    `CDLL(None)` finds the function, because PyTorch loads the library with global symbols.
    """
    return getattr(ctypes.CDLL(None), name, None)
