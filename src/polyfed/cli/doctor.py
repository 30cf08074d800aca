"""What `polyfed doctor` finds: versions, threads, GPU, optional parts, memory, disk, and what to install."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from polyfed.report.formatting import bytes_of
from polyfed.report.text_layout import plain_table, stacked, titled

REQUIRED = "required"
"""The name of the part with the packages that polyfed always needs. Every other part is an extra."""

NOT_A_PART = ("dev",)
"""Extras that are not for users."""

PATIENCE_S = 120
"""An import that takes longer than this number of seconds counts as failed. The slowest known import takes about ten
seconds."""

LOW_BYTES = 10**9
"""With less free memory or disk than this, runs on real data are likely to fail."""

_REQUIREMENT = re.compile(r"""([A-Za-z0-9._-]+)[^;]*(?:;.*extra\s*==\s*["']([\w-]+)["'])?""")


def examine() -> dict[str, Any]:
    """The content that `doctor --json` prints.

    Each package is imported in a separate process, because a broken shared library may end the process that loads it.
    """
    wanted = sorted(requirements(requires("polyfed") or []))
    modules = _modules()
    with ThreadPoolExecutor(max_workers=max(1, _usable_cores())) as pool:
        packages = list(pool.map(lambda entry: _package(entry[0], entry[1], modules), wanted))
    result: dict[str, Any] = {
        "polyfed": version("polyfed"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
    }
    result |= {"processor": _processor(), "gpu": _gpu(), "memory": _memory(), "disk": _disk(Path.cwd())}
    result["works"] = all(entry["works"] for entry in packages if entry["part"] == REQUIRED)
    result["advice"] = list(advice(result))
    return result


def requirements(lines: list[str]) -> set[tuple[str, str]]:
    """Return pairs (part, package) from the requirements in polyfed's metadata.

    The part is an extra of polyfed, such as `video`, or `required` for a package that every installation needs.

    >>> sorted(requirements(["torch>=2.6", "av>=12; extra == 'video'", "ruff; extra == 'dev'"]))
    [('required', 'torch'), ('video', 'av')]
    """
    found = (_REQUIREMENT.match(line) for line in lines)
    pairs = {(entry[2] or REQUIRED, entry[1]) for entry in found if entry}
    return {(part, name) for part, name in pairs if part not in NOT_A_PART}


def advice(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield advice for the user: packages to install or repair, memory or disk space to free."""
    broken = [entry for entry in found["packages"] if entry["problem"]]
    for entry in broken:
        yield f"{entry['name']} is installed and cannot be imported ({entry['problem']}): install it again"
    for part in dict.fromkeys(entry["part"] for entry in found["packages"] if entry["version"] is None):
        what = "polyfed" if part == REQUIRED else f"'polyfed[{part}]'"
        names = ", ".join(e["name"] for e in found["packages"] if e["part"] == part and e["version"] is None)
        yield f"pip install {what} brings {names}"
    if found["gpu"]["driver"] and not found["gpu"]["devices"]:
        yield (
            "this machine has an NVIDIA driver, but PyTorch finds no GPU: install a build of PyTorch for CUDA, see "
            "https://pytorch.org/get-started/locally"
        )
    for what, free in (("memory", found["memory"]["available_bytes"]), ("disk", found["disk"]["free_bytes"])):
        if free is not None and free < LOW_BYTES:
            yield f"only {bytes_of(free)} of {what} are free: runs on real data may fail"


def page(found: Mapping[str, Any]) -> RenderableType:
    """The findings as tables."""
    machine = plain_table("", "", left=2)
    processor, gpu, memory = found["processor"], found["gpu"], found["memory"]
    threads = f"{processor['usable_cores']} of {processor['cores']} cores usable, PyTorch uses {processor['threads']}"
    devices = [f"{one['name']}, {bytes_of(one['bytes'])}" for one in gpu["devices"]]
    free = "unknown" if memory["available_bytes"] is None else bytes_of(memory["available_bytes"])
    for what, words in (
        ("polyfed", f"{found['polyfed']}, Python {found['python']}, {found['platform']}"),
        ("threads", f"{threads} (OMP_NUM_THREADS: {processor['omp_num_threads'] or 'not set'})"),
        ("GPU", ", ".join(devices) or f"none that PyTorch can use (built for CUDA: {gpu['built_for'] or 'no'})"),
        ("memory", f"{free} free of {bytes_of(memory['total_bytes'])}"),
        ("disk", f"{bytes_of(found['disk']['free_bytes'])} free in {found['disk']['folder']}"),
    ):
        machine.add_row(what, Text(words))
    packages = plain_table("part", "package", "version", "", left=4)
    for entry in found["packages"]:
        works = Text("works") if entry["works"] else Text(entry["problem"] or "not installed", "yellow")
        packages.add_row(entry["part"], entry["name"], entry["version"] or "", works)
    lines = [Text(line, "yellow") for line in found["advice"]] or [Text("Nothing needs to be installed.")]
    return stacked(titled("This machine", machine), titled("Packages", packages), *lines)


def _package(part: str, name: str, modules: Mapping[str, str]) -> dict[str, Any]:
    """Whether a package is installed and can be imported."""
    entry: dict[str, Any] = {"part": part, "name": name, "version": None, "works": False, "problem": None}
    try:
        entry["version"] = version(name)
    except PackageNotFoundError:
        return entry
    entry["problem"] = problem_of(modules.get(_plain(name), name.replace("-", "_")))
    return entry | {"works": entry["problem"] is None}


def problem_of(module: str) -> str | None:
    """Return in one line why a module cannot be imported in a fresh process, or None if it can."""
    words = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, errors="replace", check=False)
    except subprocess.TimeoutExpired:
        return f"the import took longer than {PATIENCE_S} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"signal {-done.returncode} ended the process"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _modules() -> dict[str, str]:
    """Map each package to one of its public modules: the one with the package's name, or else the first by name."""
    result: dict[str, list[str]] = {}
    for module, distributions in packages_distributions().items():
        for name in distributions:
            if module.isidentifier() and not module.startswith("_"):
                result.setdefault(_plain(name), []).append(module)
    return {name: min(own, key=lambda m: (_plain(m) != name, m)) for name, own in result.items()}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _processor() -> dict[str, Any]:
    import torch

    return {
        "cores": os.cpu_count(),
        "usable_cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def _gpu() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = [torch.cuda.get_device_properties(number) for number in range(count)]
    return {
        "built_for": torch.version.cuda,
        "driver": shutil.which("nvidia-smi") is not None,
        "devices": [{"name": one.name, "bytes": one.total_memory} for one in facts],
    }


def _memory() -> dict[str, int | None]:
    """Return the memory of the machine. Only Linux reports how much of it is available."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    table = Path("/proc/meminfo")
    lines = table.read_text().splitlines() if table.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return {"total_bytes": total, "available_bytes": available[0] if available else None}


def _disk(folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), "free_bytes": shutil.disk_usage(folder).free}


def _usable_cores() -> int:
    """Return how many CPU cores this process may use. On macOS and Windows, these are all cores of the machine."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
