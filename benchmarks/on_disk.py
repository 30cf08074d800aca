"""Memory of a run whose data stays on disk: folders of .npy of growing size, with clients and cohorts of one size.

Every size runs in a process of its own through `polyfed.run`. Anonymous memory (Linux' RssAnon) is what the process
owns; pages of mapped files, which the system may drop at any time, are listed beside it.

    python benchmarks/on_disk.py [--rows 10000 100000 400000] [--engine vectorised]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

import polyfed
from polyfed.experiment.recipes.recipe import parse_recipe

WIDTHS, CLASSES, ROWS_EACH, TEST_ROWS = {"a": 256, "b": 512}, 7, 200, 2_000


def write(folder: Path, rows: int) -> int:
    """Write two modalities and labels, in pieces, and return the bytes of the features."""
    draw = np.random.Generator(np.random.Philox(7))
    label = draw.integers(0, CLASSES, rows)
    np.save(folder / "label.npy", label)
    np.save(folder / "split.npy", (np.arange(rows) < TEST_ROWS).astype(np.int8))
    for name, width in WIDTHS.items():
        array = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, (rows, width))
        for start in range(0, rows, 10_000):
            piece = draw.standard_normal((min(10_000, rows - start), width), dtype=np.float32)
            piece[:, :CLASSES] += np.eye(CLASSES, dtype=np.float32)[label[start : start + 10_000]]
            array[start : start + 10_000] = piece
        array.flush()
    return 4 * rows * sum(WIDTHS.values())


def held() -> tuple[int, int]:
    """Anonymous and file-backed resident memory of this process, KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return found["RssAnon"], found["RssFile"]


class Watch(threading.Thread):
    """Samples the process's memory every 5 ms; `peak` has the largest of each of the two values."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = held()

    def run(self) -> None:
        """Sample until the process ends."""
        while True:
            self.peak = tuple(map(max, zip(self.peak, held(), strict=True)))
            time.sleep(0.005)


def child(folder: Path, rows: int, engine: str) -> None:
    """Execute one run and print its memory beyond the interpreter's."""
    torch.set_num_threads(1)
    encoders = {name: {"kind": "mlp", "hidden": [32]} for name in WIDTHS}
    recipe = parse_recipe(
        {
            "rounds": 12,
            "data": {"name": "npz", "path": str(folder), "modalities": list(WIDTHS)},
            "clients": {"partition": "iid", "num": (rows - TEST_ROWS) // ROWS_EACH, "participation": 20},
            "model": {"embedding": 16, "encoders": encoders},
            "train": {"batch_size": 20, "lr": 0.05},
            "algorithm": {"name": "fedavg"},
            "evaluate": {"every": 4},
            "engine": {"name": engine, "threads": 1},
        }
    )
    before, watch = held(), Watch()
    watch.start()
    result = polyfed.run(recipe, out=folder / "run").result
    anonymous, mapped = ((peak - was) / 1024 for peak, was in zip(watch.peak, before, strict=True))
    accuracy = result["metrics"]["global"]["accuracy"]
    print(json.dumps({"anonymous_mib": anonymous, "mapped_mib": mapped, "accuracy": accuracy}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 400_000])
    parser.add_argument("--engine", default="vectorised", choices=("sequential", "vectorised"))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.rows[0], options.engine)
        return
    print("| rows | clients | features MiB | run's own memory MiB | mapped pages MiB | accuracy |")
    print("|---|---|---|---|---|---|")
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            size = write(Path(folder), rows) / 2**20
            command = [sys.executable, __file__, "--child", folder, "--rows", str(rows), "--engine", options.engine]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {rows:,} | {(rows - TEST_ROWS) // ROWS_EACH:,} | {size:.0f} | {found['anonymous_mib']:.0f} | "
            f"{found['mapped_mib']:.0f} | {found['accuracy']:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
