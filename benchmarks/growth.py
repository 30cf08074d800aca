"""The cost of a large population: 100,000 clients against 500 of the same size, with 50 in each round.

Each population runs in a process of its own and reports the time of start-up (splitting the rows,
building engine and federation), the median round, and the peak memory of the process without the table's tensors.
Clients share a small table: the benchmark measures the cost of a client that is not selected, not of its rows.

    python benchmarks/growth.py [--engine vectorised] [--clients 500 100000] [--rounds 20] [--repeats 5]
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

from polyfed.core import keys
from polyfed.data import ClientsSpec, populate
from polyfed.data.columns import Column, Columns
from run_polyfed import Ours
from settings import SETTINGS, Setting

ROWS_EACH = 16


def shared(setting: Setting, clients: int) -> Columns:
    """A table of `clients` x `ROWS_EACH` rows that all share one small set of samples of the setting's shape."""
    draw = torch.Generator().manual_seed(1)
    rows, distinct = clients * ROWS_EACH, 2_000
    pick = torch.randint(distinct, (rows,), generator=draw)
    values = {m: torch.randn(distinct, w, generator=draw) for m, w in zip("ab", setting.features, strict=True)}
    return Columns(
        name="growth",
        modalities={m: Column(v, index=pick) for m, v in values.items()},
        label=torch.randint(setting.classes, (distinct,), generator=draw)[pick],
        num_classes=setting.classes,
        split=torch.zeros(rows, dtype=torch.int8),
        ids=torch.arange(rows),
    )


def parts_of(column: Column) -> list[torch.Tensor]:
    """The tensors of a column."""
    return [t for t in (column.values, column.index) if t is not None]


def child(clients: int, engine: str, rounds: int) -> None:
    """Measure one population and print the result."""
    torch.set_num_threads(1)
    setting = SETTINGS["small"]
    columns = shared(setting, clients)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    started = time.perf_counter()
    people = populate(columns, ClientsSpec(partition="iid", num=clients), keys.key(1, "population"))
    ours = Ours(setting, people, engine)
    startup = time.perf_counter() - started
    seconds, cpu = [], []
    for _ in range(rounds + 2):
        started, used = time.perf_counter(), time.process_time()
        ours.round()
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - used)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    kept = [columns.label, columns.split, columns.ids, *(t for c in columns.modalities.values() for t in parts_of(c))]
    data = sum({t.data_ptr(): t.nbytes for t in kept}.values()) / 2**20  # both columns share one index
    print(
        json.dumps(
            {
                "startup_s": startup,
                "round_ms": 1e3 * statistics.median(seconds[2:]),
                "round_cpu_ms": 1e3 * statistics.median(cpu[2:]),
                "peak_mib": peak,
                "without_data_mib": peak - data,
                "grown_mib": peak - before,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[500, 100_000])
    parser.add_argument("--engine", default="vectorised", choices=("sequential", "vectorised"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5, help="processes of each size; medians are shown")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.clients[0], options.engine, options.rounds)
        return
    print("| clients | start-up s | ms per round | processor ms | peak MiB | without data | without interpreter too |")
    print("|---|---|---|---|---|---|---|")
    found: dict[int, list[dict[str, float]]] = {clients: [] for clients in options.clients}
    for _ in range(options.repeats):  # in turns: the machine's speed drifts over longer times than one process
        for clients, runs in found.items():
            command = [sys.executable, __file__, "--child", "--clients", str(clients), "--engine", options.engine]
            done = subprocess.run(
                [*command, "--rounds", str(options.rounds)], capture_output=True, text=True, check=True
            )
            runs.append(json.loads(done.stdout))
    for clients, runs in found.items():
        mid = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        print(
            f"| {clients:,} | {mid['startup_s']:.2f} | {mid['round_ms']:.1f} | {mid['round_cpu_ms']:.1f} | "
            f"{mid['peak_mib']:.0f} | {mid['without_data_mib']:.0f} | {mid['grown_mib']:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
