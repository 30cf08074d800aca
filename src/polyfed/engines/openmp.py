"""The threads of OpenMP, with which PyTorch computes large operations on a CPU."""

import ctypes
from functools import cache
from typing import Any

SOFT_PAUSE = 1
"""The value `omp_pause_soft` of OpenMP 5.0, from `omp.h`."""


def end_idle_threads() -> None:
    """End the OpenMP threads of this process that wait for the next operation. The next operation starts new ones.

    With GNU OpenMP, which PyTorch's packages for Linux contain, a thread computes in a loop while it waits. After an
    operation, it takes a whole core for 6 ms. Worker processes that begin within this time would be slower. To start
    a thread again takes 0.1 ms (docs/performance.md).

    If the OpenMP library lacks the function `omp_pause_resource_all`, nothing happens.
    """
    pause = _pause()
    if pause is not None:
        pause(SOFT_PAUSE)


@cache
def _pause() -> Any:
    """Return `omp_pause_resource_all`, or None. PyTorch loads OpenMP with global symbols, so `CDLL(None)` finds it."""
    return getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
