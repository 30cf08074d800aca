"""Memory that training frees and takes again at every step stays with the process."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`, from its `malloc.h`."""
LARGEST = 32 * 2**20
"""Blocks above this size are mapped one by one: the most that glibc itself would come to, in bytes."""
KEPT = 2**29
"""Free memory that is kept, in bytes: what a stack of clients may take."""


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next step; whether it understood.

    By default glibc hands the gradients of a step back to the system, and the next step faults them in page by page: a
    sixth of a vectorised round of large models (docs/performance.md). Other C libraries are left as they are.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    mallopt, trim = (getattr(libc, name, None) for name in ("mallopt", "malloc_trim"))
    if trim is not None:
        trim(0)  # what loading and dealing out the data has freed is not what training takes: back with it first
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, LARGEST)) and bool(mallopt(TRIM_THRESHOLD, KEPT))
