"""The cores and the free memory of this machine that polyfed may use, within the limits of a container."""

import math
import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""The folder of the files in which Linux lists the limits of a container."""


CORES = "POLYFED_CORES"
"""Environment variable with the number of cores that a process may use. `polyfed sweep` sets it for its processes, so
that several runs at once share the cores of the machine."""


def cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        own = min(own, math.ceil(int(quota) / int(period)))
    share = os.environ.get(CORES, "")
    if share.isdigit() and int(share):
        own = min(own, int(share))
    return max(own, 1)


def free_memory() -> int:
    """Return the free memory, in bytes, of this machine or container."""
    free = int(psutil.virtual_memory().available)
    limit, used = _text(CGROUP / "memory.max"), _text(CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used) + _reclaimable())
    return max(free, 0)


def memory_of(process: int) -> int:
    """Return the memory, in bytes, that a process holds; 0 if the process has ended."""
    try:
        return int(psutil.Process(process).memory_info().rss)
    except psutil.Error:
        return 0


def _reclaimable() -> int:
    """Return how many bytes cached files take in memory. They count as used, but are freed when memory is short."""
    lines = (line.split() for line in _text(CGROUP / "memory.stat").splitlines())
    return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] == "inactive_file")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
