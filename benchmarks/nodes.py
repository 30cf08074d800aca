"""A round of a run on one node with one core, on two such nodes of a Ray cluster, and on both cores with Flower.

    sudo env PYTHONPATH=src python benchmarks/nodes.py [--clients 500] [--rounds 4] [--flower 2]

Each node is a network namespace with one core of this machine, so what nodes exchange travels over a network device.
The recipe is `food` of benchmarks/settings.py, and all clients train in each round. The programs are whole runs that
take turns of one round; that of Flower is the same recipe with `--engine flower`, afterwards. "Server's own" is the
processor time of the command's own process.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from settings import SETTINGS
from speed import Program, start
from worker import cpu_seconds, say, wait

FOOD = SETTINGS["food"]
DISTINCT = 100
"""Clients with rows of their own; further clients have the same rows again, which saves the time to draw them."""

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
    options = parts.get(engine, ["engine.cluster=ray", f"engine.address={engine}"])
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
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for number in map(int, found.stdout.split()):
                os.kill(number, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ray_node(space: str, place: int, head: int, core: int, store: int, log: Path) -> None:
    """Start a node of a Ray cluster on one core, and wait for it."""
    how = ["--head", "--port=6379", "--include-dashboard=false"]
    how = how if place == head else [f"--address=10.121.0.{head}:6379"]
    words = [
        "ip",
        "netns",
        "exec",
        space,
        "taskset",
        "-c",
        str(core),
        str(Path(sys.executable).with_name("ray")),
        "start",
    ]
    words += [*how, f"--node-ip-address=10.121.0.{place}", "--num-cpus=1", f"--object-store-memory={store}", "--block"]
    own = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=4, help="counted rounds of polyfed's programs")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument(
        "--flower", type=int, default=2, help="rounds of `--engine flower`, the first uncounted; 0: none"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.engine)
        return
    print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="pfn"))
    os.environ["RAY_TMPDIR"] = str(folder)  # no other program finds these clusters
    try:
        (folder / "table").mkdir()
        size = write_table(folder / "table", options.clients)
        facts = {"embedding": FOOD.embedding, "hidden": FOOD.hidden, "lr": FOOD.lr, "batch": FOOD.batch_size}
        total = options.warm_up + options.rounds
        recipe = folder / "recipe.toml"
        recipe.write_text(RECIPE.format(rounds=total, folder=folder / "table", **facts))
        with spaces(3) as names:
            store = int(1.5 * size) + 2 * 10**8
            ray_node(names[0], 1, 1, 0, store, folder / "ray-1")
            ray_node(names[1], 2, 2, 0, store, folder / "ray-2")
            ray_node(names[2], 3, 2, 1, store, folder / "ray-3")
            on = [["ip", "netns", "exec", name, "taskset", "-c", "0"] for name in names[:2]]
            one = program("one node", recipe, "10.121.0.1:6379", on[0], folder)
            two = program("two nodes", recipe, "10.121.0.2:6379", on[1], folder)
            for number in range(total):
                for each in (one, two):
                    each.round(count=number >= options.warm_up)
            digests = {(each.ask() or {}).get("digest") for each in (one, two)}
            print("equal bit for bit" if len(digests) == 1 and None not in digests else f"NOT EQUAL: {digests}")
        measured = [one, two]
        if options.flower:
            os.environ["RAY_TMPDIR"] = str(folder / "flower")  # Flower starts a cluster of its own
            recipe.write_text(RECIPE.format(rounds=options.flower, folder=folder / "table", **facts))
            flower = program("--engine flower, two cores", recipe, "flower", [], folder)
            for number in range(options.flower):
                flower.round(count=number > 0)
            flower.stop()
            measured.append(flower)
        report(measured)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(measured: Sequence[Program]) -> None:
    """Print a line for each program."""
    one = measured[0]
    print("| program | seconds a round | server's own | of one node |\n|---|---:|---:|---:|")
    for each in measured:
        if not each.seconds:
            print(f"| {each.name} | no figure: {each.failure} | | |")
            continue
        pairs = zip(each.seconds, one.seconds, strict=False)
        ratio = statistics.median(a / b for a, b in pairs)
        seconds, own = statistics.median(each.seconds), statistics.median(each.cpu)
        ends = f"{min(each.seconds):.2f} to {max(each.seconds):.2f}"
        print(f"| {each.name} | {seconds:.2f} ({ends}) | {own:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
