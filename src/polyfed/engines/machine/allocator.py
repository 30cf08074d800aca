"""Settings of the C allocator that keep freed memory in the process, because every training step allocates it again."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""The parameters M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's `mallopt`, from `malloc.h`."""
LARGEST = 32 * 2**20
"""Size in bytes above which glibc maps each allocation separately. It is the maximum of glibc's dynamic threshold."""
KEPT = 2**29
"""Most free memory in bytes that the process keeps. It equals the memory budget of a stack of clients."""


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next training step.

    By default, glibc returns the memory of a step's gradients to the system, and the next step allocates the memory
    again. Each new page of memory causes a page fault. In a round with the engine `vectorised` and large models, about
    a sixth of the time is spent on these page faults (docs/performance.md).

    Returns:
        Whether the C library accepted the settings. The result is False if the system is not Linux, or if the C
        library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    mallopt, trim = (getattr(libc, name, None) for name in ("mallopt", "malloc_trim"))
    if trim is not None:
        trim(0)  # first return the memory that loading and partitioning have freed, because training does not reuse it
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, LARGEST)) and bool(mallopt(TRIM_THRESHOLD, KEPT))
