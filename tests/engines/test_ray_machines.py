"""Ray on machines of their own: runs and studies of the command line, whatever is killed. Slow.

A machine is a network namespace with one node of a Ray cluster that has one core. The first one is the head, on which
the commands run.
"""

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from engines.federations import rows, until
from engines.machines import Machines

pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HEAD, SECOND, THIRD = "head", "second", "third"
ADDRESSES = {HEAD: "10.118.0.1", SECOND: "10.118.0.2", THIRD: "10.118.0.3"}
ADDRESS = f"{ADDRESSES[HEAD]}:6379"
ON_RAY = f"--set engine.cluster=ray --set engine.address={ADDRESS}"
ROUNDS = 40
MFEAT = Path(__file__).resolve().parents[3] / "shared" / "data" / "mfeat" / "mfeat.npz"

RECIPE = """seed = 1
rounds = {rounds}
data = {{ name = "toy", rows = {rows}, shapes = {{ a = [48], b = [32] }} }}
clients = {clients}
train = {{ lr = 0.05, batch_size = 16 }}
evaluate.every = 20
engine = {{ name = "{engine}", stack = 2 }}

[model]
embedding = 32
encoders.a = {{ kind = "mlp", hidden = [640] }}
encoders.b = {{ kind = "mlp", hidden = [640] }}

[algorithm]
name = "{method}"
{more}
"""

MIXED = '{ partition = "dirichlet", num = 8, holdings = [["a", "b"], ["a"], ["a", "b"], ["b"]] }'
SILOS = '{ partition = "silos", silos = 4 }'
METHODS = {
    "fedavg": ("vectorised", MIXED, ""),
    "cmsfed": (
        "vectorised",
        MIXED,
        'ratio_rule = "threshold"\n[egress."*"]\nserver = ["parameters", "gradients", "prototypes", "statistic"]',
    ),
    "hfm": (
        "vectorised",
        SILOS,
        'local_rounds = 2\nbatch_fraction = 0.4\nmu = 0.1\n[egress.a]\nsilo = ["parameters", "embeddings"]\n'
        '[egress.b]\nsilo = ["parameters", "embeddings"]\n[egress.shared]\nsilo = ["parameters", "statistic", "ids"]',
    ),
    "pfmml": ("vectorised", MIXED, "uploads = 3\ncoefficient_lr = 0.05"),
    "scaffold": ("sequential", MIXED, ""),
}


class Cluster(Machines):
    """A Ray cluster with one node of one core on each machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ADDRESSES)
        # the sockets of Ray need a short path; with a folder of its own, no other program finds this cluster
        self.short = tempfile.mkdtemp(prefix="pf")
        self.environment |= {"RAY_TMPDIR": self.short, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": ""}
        self.environment["RAY_worker_niceness"] = "0"

    def __exit__(self, *given: object) -> None:
        super().__exit__(*given)
        shutil.rmtree(self.short, ignore_errors=True)

    def node(self, name: str, cores: int = 1, first: str = "true") -> None:
        """Start Ray on a machine after a shell command, and wait for it."""
        before = self.told().count("Ray runtime started") if self.log.exists() else 0
        how = "--head --port=6379 --include-dashboard=false" if name == HEAD else f"--address={ADDRESS}"
        limits = f"--num-cpus={cores} --object-store-memory=100000000"
        self.start(name, f"{first}; exec ray start {how} --node-ip-address={ADDRESSES[name]} {limits} --block")
        until(lambda: self.told().count("Ray runtime started") > before, f"Ray on {name}", 240)

    def only(self, num: int) -> None:
        """Let the cluster have this number of nodes."""
        for place, name in enumerate(ADDRESSES):
            if place >= num:
                self.cut_power(name)
            elif not self.inside(name):
                self.node(name)

    def command(self, text: str, first: str = "true") -> "subprocess.Popen[bytes]":
        return self.start(HEAD, f"{first}; exec polyfed {text}")

    def run(self, text: str) -> None:
        code = self.command(text).wait(300)
        assert code == 0, self.told()[-3000:]

    def refuse(self, text: str, *words: str, first: str = "true") -> None:
        """A command ends within seconds with a sentence that has these words, and leaves nothing running."""
        before, processes, began = len(self.told()), set(self.inside(HEAD)), time.monotonic()
        code = self.command(text, first).wait(240)
        seconds = time.monotonic() - began
        told = self.told()[before:]
        print(f"{seconds:.1f} s: {told.strip()}")
        assert code == 2, told
        assert "Traceback" not in told
        for word in words:
            assert word in " ".join(told.split()), told
        assert seconds < 120  # of which most is the start of Python, ten times as long on a busy machine
        until(lambda: set(self.inside(HEAD)) <= processes, "the end of what the command has started", 30)

    def has_actor(self, name: str) -> bool:
        """Whether a worker of a run is on this machine."""
        return any(title_of(number).startswith("ray::Actor") for number in self.inside(name))


def title_of(process: int) -> str:
    with suppress(psutil.Error):
        return " ".join(psutil.Process(process).cmdline())
    return ""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("machines")) as made:
        yield made


@pytest.fixture
def draw() -> random.Random:
    seed = int(os.environ.get("POLYFED_KILLS", time.time_ns() % 10**6))
    print(f"POLYFED_KILLS={seed}")
    return random.Random(seed)


def recipe(folder: Path, method: str, rounds: int = ROUNDS) -> Path:
    engine, clients, more = METHODS[method]
    path = folder / f"{method}.toml"
    rows = 4000 if method == "cmsfed" else 1500  # its three requests of a round have a part of the clients each
    path.write_text(RECIPE.format(method=method, engine=engine, clients=clients, more=more, rounds=rounds, rows=rows))
    return path


def lines(run: Path) -> int:
    path = run / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def sleep_to(run: Path, draw: random.Random) -> None:
    """Wait for a random moment of a run."""
    first = draw.randint(1, ROUNDS // 4)
    until(lambda: lines(run) >= first, f"round {first} of {run}", 300)
    time.sleep(draw.uniform(0.0, 0.3))


def expect_equal(run: Path, whole: Path) -> None:
    """The state, all local states and the ledger of two runs are equal bit for bit."""
    results = [json.loads((folder / "result.json").read_text()) for folder in (run, whole)]
    assert results[0]["state_sha256"] == results[1]["state_sha256"]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert rows(run / "egress.jsonl") == rows(whole / "egress.jsonl")
    name = f"checkpoint/round-{ROUNDS:06d}/state.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_machines_equals_one_process(
    cluster: Cluster, method: str, tmp_path: Path, draw: random.Random
) -> None:
    """On two and three machines, after the loss of one at a random moment, and after the end of the command."""
    made = recipe(tmp_path, method)
    whole, two, three, lost, stopped = (tmp_path / name for name in ("whole", "two", "three", "lost", "stopped"))
    cluster.run(f"run {made} --out {whole} --set engine.workers=1")

    cluster.only(2)
    cluster.run(f"run {made} --out {two} {ON_RAY}")
    expect_equal(two, whole)

    cluster.only(3)
    running, seen = cluster.command(f"run {made} --out {three} {ON_RAY}"), set[str]()
    while running.poll() is None:
        seen |= {name for name in ADDRESSES if name not in seen and cluster.has_actor(name)}
        time.sleep(0.05)
    assert running.wait() == 0
    assert len(seen) > 1, "a request of few units has fewer workers than there are machines"
    expect_equal(three, whole)

    running = cluster.command(f"run {made} --out {lost} {ON_RAY}")
    sleep_to(lost, draw)
    cluster.cut_power(THIRD)
    print(f"{method}: node killed after round {lines(lost)}")
    assert running.wait(300) == 0, cluster.told()[-3000:]
    expect_equal(lost, whole)

    running = cluster.command(f"run {made} --out {stopped} {ON_RAY}")
    sleep_to(stopped, draw)
    running.send_signal(signal.SIGKILL)
    running.wait()
    print(f"{method}: driver killed after round {lines(stopped)}")
    assert not (stopped / "result.json").exists()
    until(lambda: not any(map(cluster.has_actor, (HEAD, SECOND))), "the end of the workers", 30)
    cluster.run(f"run {made} --out {stopped} --resume {ON_RAY}")
    expect_equal(stopped, whole)


def test_a_machine_that_is_lost_within_a_round_of_sums_changes_no_bit(
    cluster: Cluster, tmp_path: Path, draw: random.Random
) -> None:
    made, whole, lost = recipe(tmp_path, "scaffold"), tmp_path / "whole", tmp_path / "lost"
    cluster.run(f"run {made} --out {whole} --set engine.workers=1 --set engine.combine=nodes")
    cluster.only(3)
    running = cluster.command(f"run {made} --out {lost} {ON_RAY} --set engine.combine=nodes")
    sleep_to(lost, draw)
    assert cluster.has_actor(THIRD)
    cluster.cut_power(THIRD)
    print(f"node killed after round {lines(lost)}")
    assert running.wait(300) == 0, cluster.told()[-3000:]
    expect_equal(lost, whole)


STUDY = """seeds = { low = 1, high = 20 }
recipe = "recipe.toml"

[methods.fedavg]
[methods.fedprox]
[methods.scaffold]
"""

SMALL = """rounds = 6
data.name = "toy"
clients.num = 4
model = { embedding = 4, encoders.a = { kind = "mlp", hidden = [4] }, encoders.b = { kind = "mlp", hidden = [4] } }
train = { lr = 0.05, batch_size = 16 }
algorithm.name = "fedavg"
"""


def table_of(out: Path) -> list[dict[str, str]]:
    """The table of a study, without times and places."""
    with (out / "results.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if "seconds" not in k and k not in ("folder", "why")} for row in found]


def finished(out: Path) -> int:
    return sum(1 for _ in out.glob("runs/*/result.json"))


def test_a_study_of_60_runs_has_the_table_of_one_machine_whatever_is_killed(
    cluster: Cluster, tmp_path: Path, draw: random.Random
) -> None:
    """A worker, then the head with the command, then the command, each at a random moment."""
    (tmp_path / "recipe.toml").write_text(SMALL)
    (tmp_path / "study.toml").write_text(STUDY)
    cluster.only(2)
    here, there = tmp_path / "here", tmp_path / "there"
    cluster.run(f"sweep {tmp_path}/study.toml --out {here} --jobs 2")
    words = f"sweep {tmp_path}/study.toml --out {there} --ray {ADDRESS}"
    moments = sorted(draw.sample(range(1, 56), 3))

    running = cluster.command(words)
    until(lambda: finished(there) >= moments[0], "the first moment", 300)
    until(lambda: kill(cluster, SECOND, "ray::messages_of"), "a worker on the second machine", 60)
    print(f"worker killed after {finished(there)} runs")
    until(lambda: finished(there) >= moments[1], "the second moment", 300)
    for number in cluster.inside(HEAD):
        if number != running.pid and "polyfed sweep" not in title_of(number):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
    killed = time.monotonic()
    print(f"head killed after {finished(there)} runs")
    assert running.wait(120) == 2, cluster.told()[-3000:]
    print(f"the command ended {time.monotonic() - killed:.1f} s later")
    assert f"the head of the cluster at {ADDRESS}, or Ray on this machine, has ended" in " ".join(
        cluster.told().split()
    )
    cluster.cut_power(SECOND)

    cluster.only(2)
    running = cluster.command(words)
    until(lambda: finished(there) >= moments[2], "the third moment", 300)
    running.send_signal(signal.SIGKILL)
    running.wait()
    print(f"command killed after {finished(there)} runs")
    assert finished(there) < 60
    cluster.run(words)
    assert len(table_of(there)) == 60
    assert table_of(there) == table_of(here)


def kill(cluster: Cluster, machine: str, title: str) -> bool:
    """Kill a process of a machine, if it has one with this title."""
    for number in cluster.inside(machine):
        if title_of(number).startswith(title):
            os.kill(number, signal.SIGKILL)
            return True
    return False


def test_a_cluster_that_does_not_fit_is_refused_with_the_node_and_the_cause(cluster: Cluster, tmp_path: Path) -> None:
    made, study = recipe(tmp_path, "fedavg"), tmp_path / "study.toml"
    cluster.only(1)
    out, on = iter(range(9)), ON_RAY

    def run(*words: str, more: str = "", first: str = "true") -> None:
        cluster.refuse(f"run {made} --out {tmp_path}/{next(out)} {on} {more}", *words, first=first)

    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.40.0'\n")
    old = f"export PYTHONPATH={tmp_path}/old:$PYTHONPATH"
    run(f"at {ADDRESS} does not take", "2.40.0", first=old)
    run("node 10.118.0.1 has an object store of 95 MiB", more="--set data.rows=300000")
    run("no node has a GPU", more="--set engine.device=cuda")

    (tmp_path / "other" / "torch-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "other" / "torch-1.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.0\n")
    (tmp_path / "data").mkdir()
    shutil.copy(MFEAT, tmp_path / "data" / "mfeat.npz")
    hidden = f"mount -t tmpfs none {tmp_path}/data; export PYTHONPATH={tmp_path}/other:$PYTHONPATH"
    cluster.node(SECOND, first=hidden)
    run("node 10.118.0.2 has torch 1.0, and this machine")
    cluster.cut_power(SECOND)

    cluster.node(SECOND, first=f"mount -t tmpfs none {tmp_path}/data")
    more = f"--set engine.shared_folder={tmp_path}/data"
    run(f"node 10.118.0.2 cannot read [engine] shared_folder = '{tmp_path}/data'", "mount", more=more)
    (tmp_path / "recipe.toml").write_text(
        SMALL.replace(
            'data.name = "toy"', 'data = { name = "npz", path = "data/mfeat.npz", modalities = ["fou", "zer"] }'
        )
        .replace("encoders.a", "encoders.fou")
        .replace("encoders.b", "encoders.zer")
    )
    study.write_text('seeds = [1]\nrecipe = "recipe.toml"\n[methods.fedavg]\n')
    words = f"sweep {study} --out {tmp_path}/study --ray {ADDRESS}"
    cluster.refuse(words, f"[data] path: node 10.118.0.2 cannot read {tmp_path}/data/mfeat.npz", first=f"cd {tmp_path}")
    cluster.cut_power(SECOND)
    cluster.node(SECOND)
    assert cluster.command(words, f"cd {tmp_path}").wait(120) == 0, cluster.told()[-3000:]  # a path relative to here


def test_a_cluster_that_shrinks_to_nothing_ends_the_run_and_a_new_node_continues_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    made, whole, out = recipe(tmp_path, "scaffold"), tmp_path / "whole", tmp_path / "out"
    cluster.run(f"run {made} --out {whole} --set engine.workers=1")
    cluster.only(0)
    cluster.node(HEAD, cores=0)
    cluster.node(SECOND)
    running, before = cluster.command(f"run {made} --out {out} {ON_RAY}"), len(cluster.told())
    until(lambda: lines(out) >= 3, "the third round", 300)
    cluster.cut_power(SECOND)
    began = time.monotonic()
    assert running.wait(240) == 2
    told = " ".join(cluster.told()[before:].split())
    print(f"{time.monotonic() - began:.1f} s: {told[-1000:]}")
    assert "no node of the cluster has 1 CPU" in told
    assert "Traceback" not in told
    cluster.node(SECOND)
    cluster.run(f"run {made} --out {out} --resume {ON_RAY}")
    expect_equal(out, whole)
    cluster.only(0)
