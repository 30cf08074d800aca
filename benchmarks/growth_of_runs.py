"""The cost of a large population in a whole run: `polyfed run` with a ledger, checkpoints, evaluation and a report.

Each population runs in a process of its own, on a table that the benchmark writes to a temporary folder: some rows for
each client, and 2,000 test rows. The table lists for each population the start-up time (from the start of the process
to the first round, so with the imports and the reading of the data), the median round and the rest of a round (ledger,
evaluation and checkpoint), the peak memory without the table's arrays, and the time and size of what the run writes.

    python benchmarks/growth_of_runs.py [--clients 2000 1000000] [--cohort 1000] [--rounds 10] [--repeats 3]
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS_EACH, TEST_ROWS = 2, 2_000
FEATURES = {"a": 8, "b": 16}
CLASSES = 7

RECIPE = """
seed = 1
rounds = {rounds}
[data]
name = "npz"
path = "{folder}"
modalities = ["a", "b"]
[clients]
partition = "{partition}"
participation = {cohort}
{num}
[model]
embedding = 16
[model.encoders]
a = {{ kind = "mlp", hidden = [32] }}
b = {{ kind = "mlp", hidden = [32] }}
[train]
batch_size = 2
lr = 0.1
[algorithm]
name = "fedavg"
[engine]
name = "{engine}"
workers = 1
threads = 1
"""


def write_table(folder: Path, clients: int) -> int:
    """Write the arrays of a population to a folder, and return their size in bytes."""
    draw = np.random.Generator(np.random.Philox(7))
    rows = clients * ROWS_EACH + TEST_ROWS
    arrays = {name: draw.standard_normal((rows, width), dtype=np.float32) for name, width in FEATURES.items()}
    arrays["label"] = draw.integers(0, CLASSES, rows)
    arrays["split"] = (np.arange(rows) >= clients * ROWS_EACH).astype(np.int8)
    arrays["client"] = np.minimum(np.arange(rows) // ROWS_EACH, clients - 1)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return sum(array.nbytes for array in arrays.values())


def child(recipe: Path, launched: float) -> None:
    """Run a recipe, and print the measurements as JSON."""
    import polyfed
    from polyfed.experiment.recipes.recipe import load_recipe
    from polyfed.report import write_report

    moments: list[tuple[str, float]] = []
    rows: list[dict[str, Any]] = []

    def note(event: str, **facts: Any) -> None:
        moments.append((event, time.time()))
        if event == "round-finished":
            rows.append(facts["row"])

    out = recipe.with_name("out")
    polyfed.run(recipe, out, listeners=[note])
    ended = time.time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    begun = next(moment for event, moment in moments if event == "run-started")
    starts, ends = ([m for event, m in moments if event == f"round-{what}"] for what in ("started", "finished"))
    train = [row["seconds"]["train"] for row in rows]
    rest = [end - start - trained for start, end, trained in zip(starts, ends, train, strict=True)]
    report = timed(lambda: write_report(out))
    columns = load_recipe(recipe).data.load()
    copies = [columns.label, columns.split, columns.ids, *([] if columns.client is None else [columns.client])]
    found = {
        "startup_s": begun - launched,
        "round_ms": 1e3 * statistics.median(train[1:]),
        "rest_ms": 1e3 * statistics.median(rest[1:-1]),
        "end_s": ended - ends[-1],
        "report_s": report,
        "report_mib": size_of(out / "report.html"),
        "facts_mib": size_of(out / "run.json") + size_of(out / "result.json"),
        "checkpoint_mib": sum(size_of(path) for path in (out / "checkpoint").rglob("*") if path.is_file()),
        "peak_mib": peak,
        "without_data_mib": peak - sum(copy.nbytes for copy in copies) / 2**20,
    }
    print(json.dumps(found))


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def size_of(path: Path) -> float:
    """Return the size of a file in MiB."""
    return path.stat().st_size / 2**20


def measure(clients: int, options: argparse.Namespace) -> dict[str, float]:
    """Run one population in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "table"
        folder.mkdir()
        data = write_table(folder, clients) / 2**20
        num = "" if options.partition == "by-client" else f"num = {clients}"
        facts = {"num": num, "cohort": min(options.cohort, clients), "folder": folder, **vars(options)}
        recipe = Path(place) / "recipe.toml"
        recipe.write_text(RECIPE.format(**facts))
        command = [sys.executable, __file__, "--child", str(recipe), "--launched", str(time.time())]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    found["without_data_mib"] -= data  # the files are mapped into memory, and their facts about rows copied
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[2_000, 1_000_000])
    parser.add_argument("--cohort", type=int, default=1_000)
    parser.add_argument("--engine", default="vectorised", choices=("sequential", "vectorised"))
    parser.add_argument("--partition", default="by-client", choices=("by-client", "iid", "dirichlet"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each size; medians are shown")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--launched", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.launched)
        return
    found: dict[int, list[dict[str, float]]] = {clients: [] for clients in options.clients}
    for _ in range(options.repeats):  # in turns: the machine's speed drifts over longer times than one process
        for clients, runs in found.items():
            runs.append(measure(clients, options))
    names = list(next(iter(found.values()))[0])
    print("| clients | " + " | ".join(name.replace("_", " ") for name in names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for clients, runs in found.items():
        shown = [f"{statistics.median(run[name] for run in runs):.3g}" for name in names]
        print(f"| {clients:,} | " + " | ".join(shown) + " |", flush=True)


if __name__ == "__main__":
    main()
