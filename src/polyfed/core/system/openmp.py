"""The threads with which PyTorch computes large operations on a CPU. They belong to OpenMP."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOFT_PAUSE = 1
"""The value `omp_pause_soft` of OpenMP 5.0, from `omp.h`."""

THREAD_BYTES = 2**26
"""Bytes that justify one more thread for operations that read each byte about once. One thread reads them in about
6 ms. An operation with several threads takes longer than that on a busy machine, because it waits until the system
gives a core to each of its threads (docs/performance.md)."""


@contextmanager
def using_threads(num: int) -> Iterator[None]:
    """Let PyTorch use `num` threads for each operation in this block. 0 leaves the number unchanged.

    The number applies only to the Python thread that runs the block. With `torch.set_num_threads`, it would also apply
    to Python threads that start meanwhile, and the results of another run in such a thread would be rounded in another
    way. `torch.set_num_threads` is used only if PyTorch does not compute with OpenMP, or if its MKL lacks the function
    that sets the number for one Python thread.

    At the end of the block, the Python thread has its former number again, even if code in the block has changed it.
    """
    before = torch.get_num_threads()
    if num not in (0, before):
        _set_threads(num)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            _set_threads(before)


def can_end_idle_threads() -> bool:
    """Return whether the OpenMP library of this process has the function that `end_idle_threads` needs."""
    return _function("omp_pause_resource_all") is not None


def end_idle_threads() -> None:
    """End the OpenMP threads of this Python thread that wait for the next operation, which will start new ones.

    There are two reasons to call this function:

    - Before a process forks. The new process has a copy of the list of idle OpenMP threads, but not the threads. Its
      first operation with several threads would wait for them forever.
    - Before worker processes get work. With GNU OpenMP, which PyTorch's packages for Linux contain, a thread computes
      in a loop while it waits. After an operation, it takes a whole core for 6 ms. Worker processes that begin within
      this time would be slower. To start a thread again takes 0.1 ms (docs/performance.md).

    If the OpenMP library lacks the function `omp_pause_resource_all`, nothing happens.
    """
    pause = _function("omp_pause_resource_all")
    if pause is not None:
        pause(SOFT_PAUSE)


@contextmanager
def threads_worth(num_bytes: int) -> Iterator[None]:
    """Limit the threads of the operations in this block: one thread, and one more for each `THREAD_BYTES`.

    The limit applies only to the Python thread that runs the block, and it never raises the number of threads. It also
    applies to the matrix products that PyTorch leaves to MKL. If the number of threads cannot be set for one Python
    thread alone (`using_threads`), there is no limit.

    Args:
        num_bytes: size of the tensors that the operations read.
    """
    before = torch.get_num_threads()
    allowed = 1 + num_bytes // THREAD_BYTES
    if allowed >= before or _setters() == (torch.set_num_threads,):
        yield
        return
    _set_threads(allowed)
    try:
        yield
    finally:
        _set_threads(before)


def _set_threads(num: int) -> None:
    """Set the number of threads for the operations of this Python thread."""
    for set_threads in _setters():
        set_threads(num)


@cache
def _setters() -> tuple[Any, ...]:
    """Return the functions that set the number of threads of this Python thread, first that of OpenMP, then of MKL.

    If one of them is missing, return only `torch.set_num_threads`.
    """
    # this call changes no number, but from now on, MKL never decides by itself to use fewer threads
    torch.set_num_threads(torch.get_num_threads())
    of_openmp = _function("omp_set_num_threads")
    if not torch._C.has_mkl:
        return (of_openmp or torch.set_num_threads,)
    try:
        of_mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return (torch.set_num_threads,)
    return (of_openmp, of_mkl) if of_openmp else (torch.set_num_threads,)


@cache
def _function(name: str) -> Any:
    """Return a function of the OpenMP library, or None.

    `CDLL(None)` finds the function, because PyTorch loads the library with global symbols.
    """
    return getattr(ctypes.CDLL(None), name, None)
