"""A round of a run on Ray clusters of one, two and four nodes with one core each, and on two cores with Flower.

    sudo env PYTHONPATH=src python benchmarks/nodes.py [--nodes 1 2 4] [--clients 500] [--rounds 4] [--flower 2]
    sudo env PYTHONPATH=src python benchmarks/nodes.py --all   # and a million clients with 10,000 a round: 8 minutes

Each node is a network namespace with one core of this machine, so what nodes exchange travels over a network device.
The recipe is `food` of benchmarks/settings.py, and all clients train in each round. The programs are whole runs. Those
on the first two clusters take turns of one round, the others follow; with `--combine` or `--all` there is a table more,
of one node and of one and two nodes with `[engine] combine = "nodes"`, in turns. That of Flower is the same recipe with
`--engine flower`. "Server's own" is the processor time of the command's own process. Nodes beyond the number of cores
share them, so that four nodes on two cores show only what more nodes cost.

With `--all`, the second table has the memory of each node (the proportional set size of its processes, Ray's included
and the command's not) and of the command, for 20,000 and for a million clients of two rows.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import growth_of_runs
from settings import SETTINGS
from speed import Program, start
from worker import cpu_seconds, say, wait

FOOD = SETTINGS["food"]
DISTINCT = 100
"""Clients with rows of their own; further clients have the same rows again, which saves the time to draw them."""

COHORT = 10_000

RECIPE = """
seed = 1
rounds = {rounds}
data = {{ name = "npz", path = "{folder}", modalities = ["a", "b"] }}
clients.partition = "by-client"
model.embedding = {embedding}
model.encoders.a = {{ kind = "mlp", hidden = [{hidden}] }}
model.encoders.b = {{ kind = "mlp", hidden = [{hidden}] }}
train = {{ lr = {lr}, batch_size = {batch} }}
algorithm.name = "fedavg"
evaluate = {{ every = 0 }}
checkpoint.every = 1000
engine.threads = 1
deployment.client_cpus = 1
"""


def write_table(folder: Path, clients: int) -> int:
    """Write the rows of all clients, and return their size in bytes."""
    draw = np.random.Generator(np.random.Philox(7))
    distinct = min(clients, DISTINCT) * FOOD.rows
    arrays = {m: draw.standard_normal((distinct, w), np.float32) for m, w in zip("ab", FOOD.features, strict=True)}
    arrays["label"] = draw.integers(0, FOOD.classes, distinct)
    rows = np.arange(clients * FOOD.rows)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array[rows % distinct])
    np.save(folder / "client.npy", rows // FOOD.rows)
    np.save(folder / "split.npy", np.zeros(len(rows), np.int8))
    return sum(path.stat().st_size for path in folder.iterdir())


def child(recipe: Path, engine: str) -> None:
    """Run a recipe. Each round waits for the word of the benchmark."""
    import polyfed

    parts = {"one process": ["engine.workers=1"], "flower": ["engine.name=flower"]}
    address, _, combine = engine.partition(" ")
    on_ray = ["engine.cluster=ray", f"engine.address={address}"] + ([f"engine.combine={combine}"] if combine else [])
    options = parts.get(engine, on_ray)
    at: dict[str, float] = {}

    def listen(event: str, **facts: Any) -> None:
        if event == "round-started":
            say(parameters=0) if facts["round"] == 1 else say(**at)
            if not wait():
                raise KeyboardInterrupt
            at.update(began=time.perf_counter(), spent=cpu_seconds())
        elif event == "round-finished":
            at.update(seconds=time.perf_counter() - at.pop("began"), cpu=cpu_seconds() - at.pop("spent"))

    out = recipe.parent / f"out-{os.getpid()}"
    run = polyfed.run(polyfed.load_recipe(recipe, options), out, listeners=[listen])
    say(**at)
    say(digest=run.result["state_sha256"])


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def spaces(count: int) -> Iterator[list[str]]:
    """Network namespaces 10.121.0.1, ... on one bridge. At the end, all processes in them are killed."""
    names = [f"pfn{os.getpid() % 10_000}-{place}" for place in range(count)]
    try:
        for place, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            device = "bridge" if place == 1 else "eth0"
            if place == 1:
                ip("-n", name, "link", "add", "bridge", "type", "bridge")
            else:
                ip("-n", names[0], "link", "add", f"p{place}", "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("-n", names[0], "link", "set", f"p{place}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.121.0.{place}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
        for name in names:
            ip("-n", name, "route", "add", "default", "via", "10.121.0.99")
        yield names
    finally:
        for name in names:
            for number in processes(name):
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def processes(space: str) -> list[int]:
    """Return the processes in a namespace."""
    found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]


def memory(numbers: Sequence[int]) -> float:
    """Return the proportional set size of processes, in MiB."""
    total = 0
    for number in numbers:
        with suppress(OSError):
            lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def ray_node(space: str, place: int, head: int, core: int, store: int, log: Path) -> None:
    """Start a node of a Ray cluster on one core, and wait for it."""
    how = ["--head", "--port=6379", "--include-dashboard=false"]
    how = how if place == head else [f"--address=10.121.0.{head}:6379"]
    ray = str(Path(sys.executable).with_name("ray"))
    words = ["ip", "netns", "exec", space, "taskset", "-c", str(core), ray, "start", *how]
    words += [f"--node-ip-address=10.121.0.{place}", "--num-cpus=1", f"--object-store-memory={store}", "--block"]
    # without the niceness of 15 that Ray gives its workers, other work slows them as it slows the command
    own = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    with log.open("w") as file:
        subprocess.Popen(words, stdout=file, stderr=file, env=os.environ | own, start_new_session=True)
    end = time.monotonic() + 120
    while "Ray runtime started" not in log.read_text():
        if time.monotonic() > end:
            sys.exit(log.read_text())
        time.sleep(0.2)


def program(name: str, recipe: Path, engine: str, where: Sequence[str], logs: Path) -> Program:
    """Start a run, and wait until its first round could begin."""
    command = [*where, sys.executable, __file__, "--child", str(recipe), "--engine", engine]
    made = start(name, command, 1, logs / f"{name}.log")
    made.ask()
    if made.failure:
        sys.exit((logs / f"{name}.log").read_text()[-3000:])
    return made


def counted(nodes: int) -> str:
    return "one node" if nodes == 1 else f"{nodes} nodes"


@dataclass
class OnNodes:
    """A run on a cluster, and what it left.

    Attributes:
        spaces: the namespaces of the nodes.
        node: MiB of the largest node, without the command.
        command: MiB of the command.
        digest: that of the run's result.
    """

    program: Program
    spaces: list[str]
    node: float = 0.0
    command: float = 0.0
    digest: str = ""

    def end(self) -> None:
        """Measure the memory, and let the run end."""
        assert self.program.process is not None
        own = self.program.process.pid
        self.node = max(memory([other for other in processes(space) if other != own]) for space in self.spaces)
        self.command = memory([own])
        self.digest = (self.program.ask() or {}).get("digest", "")
        assert self.digest, self.program.failure


def measured(
    sizes: Sequence[int], recipe: Path, store: int, rounds: int, warm_up: int, combine: Sequence[str] = ()
) -> list[OnNodes]:
    """Run rounds on clusters of these sizes, in turns.

    Args:
        combine: `[engine] combine` of each cluster; the default where it is empty.
    """
    folder, cores, runs = recipe.parent, os.cpu_count() or 1, list[OnNodes]()
    with spaces(sum(sizes)) as names:
        left = list(enumerate(names, 1))
        for number, size in enumerate(sizes):
            how = combine[number] if number < len(combine) else ""
            own, left = left[:size], left[size:]
            head = own[0][0]
            for turn, (place, space) in enumerate(own):
                ray_node(space, place, head, turn % cores, store, folder / f"ray-{place}")
            where = ["ip", "netns", "exec", own[0][1], "taskset", "-c", "0"]
            name = f"{counted(size)}, combine = '{how}'" if how else counted(size)
            made = program(name, recipe, f"10.121.0.{head}:6379 {how}".strip(), where, folder)
            runs.append(OnNodes(made, [space for _, space in own]))
        for turn in range(warm_up + rounds):
            for run in runs:
                run.program.round(count=turn >= warm_up)
        for run in runs:
            run.end()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=4, help="counted rounds of polyfed's programs")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument(
        "--flower", type=int, default=2, help="rounds of `--engine flower`, the first uncounted; 0: none"
    )
    parser.add_argument("--all", action="store_true", help="also a million clients")
    parser.add_argument("--combine", action="store_true", help="also the first two clusters with combine = 'nodes'")
    parser.add_argument("--million", type=int, nargs="+", default=[20_000, 1_000_000], help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.engine)
        return
    options.combine = options.combine or options.all
    print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="pfn"))
    os.environ["RAY_TMPDIR"] = str(folder)  # no other program finds these clusters
    try:
        if options.nodes:
            report(rounds_of_food(folder, options))
        if options.all:
            shutil.rmtree(folder / "table", ignore_errors=True)
            many(folder, options.million)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rounds_of_food(folder: Path, options: argparse.Namespace) -> list[Program]:
    """Run `food` on clusters of all sizes, and on Flower."""
    (folder / "table").mkdir()
    size = write_table(folder / "table", options.clients)
    facts = {"embedding": FOOD.embedding, "hidden": FOOD.hidden, "lr": FOOD.lr, "batch": FOOD.batch_size}
    recipe, store = folder / "recipe.toml", int(1.5 * size) + 2 * 10**8
    recipe.write_text(RECIPE.format(rounds=options.warm_up + options.rounds, folder=folder / "table", **facts))
    found = list[OnNodes]()
    for sizes in (options.nodes[:2], *([more] for more in options.nodes[2:])):
        found += measured(sizes, recipe, store, options.rounds, options.warm_up)
    equal([run.digest for run in found])
    programs = [run.program for run in found]
    if options.combine:
        sizes, how = [options.nodes[0], *options.nodes[:2]], ["", "nodes", "nodes"]
        summed = measured(sizes, recipe, store, options.rounds, options.warm_up, how)
        equal([run.digest for run in summed[1:]])
        report([run.program for run in summed])
    if options.flower:
        os.environ["RAY_TMPDIR"] = str(folder / "flower")  # Flower starts a cluster of its own
        recipe.write_text(RECIPE.format(rounds=options.flower, folder=folder / "table", **facts))
        flower = program("--engine flower, two cores", recipe, "flower", [], folder)
        for number in range(options.flower):
            flower.round(count=number > 0)
        flower.stop()
        os.environ["RAY_TMPDIR"] = str(folder)
        programs.append(flower)
    return programs


def equal(digests: Sequence[str]) -> None:
    """Say whether runs gave the same result."""
    print("equal bit for bit" if len(set(digests)) == 1 else f"NOT EQUAL: {digests}", flush=True)


def report(found: Sequence[Program]) -> None:
    """Print a line for each program."""
    one = found[0]
    print("| program | seconds a round | server's own | of one node |\n|---|---:|---:|---:|")
    for each in found:
        if not each.seconds:
            print(f"| {each.name} | no figure: {each.failure} | | |")
            continue
        pairs = zip(each.seconds, one.seconds, strict=False)
        ratio = statistics.median(a / b for a, b in pairs)
        seconds, own = statistics.median(each.seconds), statistics.median(each.cpu)
        ends = f"{min(each.seconds):.2f} to {max(each.seconds):.2f}"
        print(f"| {each.name} | {seconds:.2f} ({ends}) | {own:.2f} | {ratio:.2f} |")
    sys.stdout.flush()


def many(folder: Path, sizes: Sequence[int]) -> None:
    """Print the memory of nodes for populations of these sizes."""
    print(f"\n| clients, {COHORT:,} a round | nodes | seconds a round | MiB of a node | MiB of the command |")
    print("|---:|---:|---:|---:|---:|")
    for clients in sizes:
        table = folder / f"clients-{clients}"
        table.mkdir()
        store = int(1.5 * growth_of_runs.write_table(table, clients)) + 4 * 10**8
        facts = {"folder": table, "partition": "by-client", "num": "", "cohort": COHORT, "engine": "vectorised"}
        recipe = folder / "many.toml"
        text = growth_of_runs.RECIPE.format(rounds=3, **facts).replace("workers = 1", "workers = 0")
        recipe.write_text(f"{text}\n[evaluate]\nevery = 0\n[checkpoint]\nevery = 1000\n")
        for nodes in (1, 2):
            (run,) = measured([nodes], recipe, store, 2, 1)
            seconds = statistics.median(run.program.seconds)
            print(f"| {clients:,} | {nodes} | {seconds:.2f} | {run.node:,.0f} | {run.command:,.0f} |", flush=True)
        shutil.rmtree(table)


if __name__ == "__main__":
    main()
