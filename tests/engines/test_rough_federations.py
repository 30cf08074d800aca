"""Federations over lines that lose 30 % of the packets each way, are slow, and are cut for a minute. Slow.

Devices and edges join with tokens, then the server runs jobs: synchronous, buffered and compressed ones side by side,
one that waits for its turn, and HFM with an edge for each silo. Meanwhile processes are killed at random moments.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.rough_link import Line
from engines.test_edges import EDGES, rows, same_run
from engines.test_own_modes import told
from engines.test_own_processes import RECIPE, OwnFederation
from polyfed.core.system.files import PUBLIC_KEY
from polyfed.deploy.app_folder import write_app, write_nodes
from polyfed.deploy.server.jobs import FINISHED, LOG, RUNNING, Job, Jobs
from polyfed.deploy.server.queued_run import enqueue
from polyfed.experiment.certificate import certify, verify_certificate
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.lock import LOCK
from polyfed.privacy.egress.audit_log.verification import verify
from polyfed.report import reconcile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROUGH: dict[str, Any] = {"loss": 0.3, "delay": 0.02, "rate": 250_000.0}
CUT_SECONDS = float(os.environ.get("POLYFED_CUT_SECONDS", "60"))
RESTART_SECONDS = 2.0
"""After so many seconds the service manager starts a process again. The units of deploy/systemd wait for 10."""

SEED = int(os.environ.get("POLYFED_ROUGH", "1"))
TRIES = 20
"""How often somebody types the command that joins, at most."""


def patient(text: str) -> str:
    """The recipe with the patience that such lines need: nobody is given up."""
    return re.sub(r"^(enrol|reply|away)_seconds = .*$", r"\1_seconds = 900.0", text, flags=re.MULTILINE)


class Operated(OwnFederation):
    """A server with jobs, and what joins it with tokens. A service manager keeps all of them.

    Args:
        line: the namespace of the server, perhaps that of the edges, and that of the devices.
        recipes: the recipes of jobs, by name. All of them have the clients of the first one.
    """

    address = "10.118.0.1"
    options = ("--jobs", "3")
    patience, pause = 900.0, 0.05

    def __init__(self, folder: Path, line: Line, recipes: Mapping[str, str]) -> None:
        self.folder, self.line, self.port = folder, line, 9092
        self.credentials, self.processes = folder / "credentials", dict[str, subprocess.Popen[bytes]]()
        self.recipes = {name: folder / f"{name}.toml" for name in recipes}
        for name, text in recipes.items():
            self.recipes[name].write_text(patient(text))
        self.apps = {name: write_app(path, folder / f"app-{name}") for name, path in self.recipes.items()}
        self.places = write_nodes(load_recipe(next(iter(self.recipes.values()))), folder)
        self.files = dict[str, str]()
        self.jobs: Jobs

    def side(self, name: str) -> str:
        return next((side for side in self.line.sides if name.startswith(side)), "server")

    def inside(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self.line.space(self.side(name))]

    def words(self, name: str) -> list[str]:
        return [self.side(name), self.files[name]] if name in self.files else super().words(name)

    def kill(self, name: str) -> None:
        """Kill a process; the service manager ends what it has started, and starts it again."""
        rest = psutil.Process(self.processes[name].pid).children(recursive=True)
        super().kill(name)
        for one in rest:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        time.sleep(RESTART_SECONDS)
        self.start(name)

    def typed(self, side: str, *words: object, dies_after: float = 0.0) -> str:
        """The output of a command, which is typed again while the line is the reason, and after a kill."""
        for _ in range(TRIES):
            process = subprocess.Popen(
                [*self.inside(side), sys.executable, "-P", "-m", "polyfed", *map(str, words)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(self.packages(side)[0]), "OMP_NUM_THREADS": "1", "COLUMNS": "1000"},
            )
            try:
                said = process.communicate(timeout=dies_after or None)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                dies_after = 0.0
                continue
            if not process.returncode:
                return said
            assert (process.returncode, "again" in said, "Traceback" in said) == (6, True, False), said
        raise AssertionError(f"{words[:2]} does not succeed")

    def server_begins(self, tokens: int) -> list[str]:
        """Make the server, and return the commands that its operator sends to others."""
        recipe = next(iter(self.recipes.values()))
        words = ("init", "credentials", "--host", self.address, "--devices", tokens, "--recipe", recipe)
        said = self.typed("server", "server", *words)
        self.start("server")
        self.jobs = Jobs.of_server(self.credentials)
        return re.findall(r"^polyfed (.* join .*)$", said, re.MULTILINE)

    def device_joins(self, number: int, command: str, dies_after: float = 0.0) -> None:
        place, name = self.places[number], f"device-{number}"
        filled = command.replace("FILE", str(place / "data.npz")).split()
        more = ("--policy", place / "policy.toml", "--folder", place / "joined", "--yes")
        self.typed("device", *filled, *more, dies_after=dies_after)
        self.files[name] = str(place / "joined" / "device.toml")
        self.start(name)

    def submit(self, name: str) -> Job:
        out = str(self.folder / f"job-{name}")
        return enqueue(self.apps[name], self.credentials, {"out": out}, 0.0, 3600.0)

    def rounds(self, job: Job) -> int:
        done: int = self.jobs.facts(job)["round"]
        return done

    def running(self) -> list[Job]:
        return [job for job in self.jobs.all() if job.state == RUNNING and self.jobs.runs(job.id)]

    def halfway(self) -> bool:
        """Whether the server has a part of a reply."""
        with suppress(FileNotFoundError):  # it is whole now
            return any(path.stat().st_size for path in (self.credentials / "queue").glob("*.part"))
        return False

    def hit(self, victim: str, chance: random.Random) -> None:
        """Cut the line for a minute, kill a service, a job, or a process of a device's tasks."""
        if victim == "line in a reply":
            self.until(self.halfway, "the middle of a reply")
        if victim.startswith("line"):
            self.line.down = True
            time.sleep(CUT_SECONDS)
            self.line.down = False
        elif victim == "job":
            self.until(lambda: bool(self.running()), "a job that runs")
            with suppress(OSError, ValueError):  # it has ended meanwhile
                os.kill(int((self.jobs.place(chance.choice(self.running()).id) / LOCK).read_text()), signal.SIGKILL)
        elif victim.startswith("tasks of "):
            found = psutil.Process(self.processes[victim.removeprefix("tasks of ")].pid).children(recursive=True)
            for one in chance.sample(found, min(1, len(found))):
                one.kill()
        else:
            self.kill(victim)

    def disturbed(self, victims: Sequence[str], chance: random.Random, spread: float) -> None:
        """Let all of this happen in a random order, at random moments, while jobs run."""
        for victim in chance.sample(victims, len(victims)):
            time.sleep(chance.uniform(0.0, spread))
            unfinished = [job.name for job in self.jobs.all() if not job.ended]
            print(f"{time.monotonic():.0f}: {victim}, of {unfinished}")
            assert unfinished, f"all jobs had ended before {victim} was hit"
            self.hit(victim, chance)

    def ended(self) -> None:
        """Wait until all jobs have ended, and expect that none has failed, and that nothing is left in the queue."""
        self.until(lambda: all(job.ended for job in self.jobs.all()), "all jobs")
        assert [(job.state, job.reason) for job in self.jobs.all()] == [(FINISHED, "")] * len(self.jobs.all())
        assert not list((self.credentials / "queue").glob("*.reply"))
        logs = {name: self.log(name) for name in self.processes}
        logs |= {job.name: (self.jobs.place(job.id) / LOG).read_text() for job in self.jobs.all()}
        assert not [name for name, text in logs.items() if "Traceback" in text]

    def nothing_runs(self) -> None:
        """End all services, and expect that no process of theirs is left."""
        self.stop()
        self.until(lambda: not any(map(self.line.inside, self.line.sides)), "the end of all processes")

    def simulated(self, name: str) -> Path:
        polyfed.run(self.recipes[name], self.folder / f"one-{name}", engine="sequential")
        return self.folder / f"one-{name}"


@contextmanager
def operated(folder: Path, recipes: Mapping[str, str], sides: Sequence[str]) -> Iterator[Operated]:
    line = Line(**ROUGH, sides=sides)
    try:
        line.up()
    except (OSError, subprocess.CalledProcessError) as error:
        line.close()
        pytest.skip(f"no network namespaces can be made here: {getattr(error, 'stderr', error)}")
    federation = Operated(folder, line, recipes)
    try:
        yield federation
    finally:
        federation.stop()
        line.close()


def booked(ledger: Path) -> Counter[str]:
    """How often each row of a ledger is there, apart from the name of the run."""
    found = [json.loads(text) for text in ledger.read_text().splitlines()]
    return Counter(json.dumps({key: value for key, value in row.items() if key != "run"}) for row in found)


def check_records(out: Path, states: Sequence[Path]) -> None:
    """The logs of all hold and agree with the server's, receipts and certificate hold, and nothing is booked twice."""
    for state in states:
        assert verify(state, state / PUBLIC_KEY).rows
    assert not reconcile(out, states).findings
    assert (out / "receipts.json").exists(), "they were asked, but may have been away"
    path, _ = certify(out)
    assert not verify_certificate(path, run=out, logs=states).faults
    assert max(booked(out / "egress.jsonl").values()) == 1


def timed(since: float, what: str) -> float:
    print(f"{what}: {time.monotonic() - since:.0f} s")
    return time.monotonic()


TOY = RECIPE.format(rounds=4)
JOBS = {
    "scaffold": TOY,
    "fedbuff": TOY.replace('"scaffold"', '"fedbuff"\nbuffer = 2').replace("rounds = 4", "rounds = 8"),
    "compressed": TOY.replace("rounds = 4", "rounds = 3").replace('"scaffold"', '"fedavg"').replace("[8]", "[96, 96]")
    + '[wire]\ncompress = "int8"\ndown = "bf16"\n',
    "fedprox": TOY.replace('"scaffold"', '"fedprox"\nmu = 0.1').replace("rounds = 4", "rounds = 1"),
}
"""Three jobs run side by side, and the fourth one waits for its turn."""


def test_devices_join_and_serve_jobs_over_a_rough_line(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    with operated(tmp_path, JOBS, ("server", "device")) as federation:
        began = time.monotonic()
        commands = federation.server_begins(3)
        federation.until(lambda: "waiting for devices" in federation.log("server"), "the server")
        with ThreadPoolExecutor(3) as others:
            joins = [
                others.submit(federation.device_joins, number, command, chance.uniform(2.0, 20.0) * (number == 0))
                for number, command in enumerate(commands)
            ]
            time.sleep(chance.uniform(2.0, 5.0))
            federation.hit("line", chance)
            federation.hit("server", chance)
            for join in joins:
                join.result()
        began = timed(began, "joined")
        jobs = [federation.submit(name) for name in JOBS]
        federation.until(lambda: all(federation.rounds(job) for job in jobs[:3]), "round 1 of three jobs")
        began = timed(began, "round 1")
        assert federation.jobs.get(jobs[3].id).starts == 0, "it waits for its turn"
        victims = ["line in a reply", "server", "job", "job", "device-0", "device-1", "tasks of device-2"]
        federation.disturbed(victims, chance, 4.0)
        began = timed(began, "disturbed")
        federation.ended()
        timed(began, "ended")
        print(f"{federation.line.lost} packets lost, {federation.line.carried} carried")
        federation.nothing_runs()
    states = [place / "polyfed-state" for place in federation.places]
    for job in jobs:
        check_records(Path(job.out), states)
        assert not federation.jobs.facts(job)["missing"]
    for name in ("scaffold", "compressed", "fedprox"):
        out, one = tmp_path / f"job-{name}", federation.simulated(name)
        assert told(out) == told(one), "model, scores and bytes"
        assert booked(out / "egress.jsonl") == booked(one / "egress.jsonl")
    assert '"came":' in (tmp_path / "job-fedbuff" / "egress.jsonl").read_text(), "replies entered later buffers"


def test_silos_with_edges_join_and_train_over_rough_lines(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    recipes = {"hfm": EDGES.replace("rounds = 1", "rounds = 2")}
    with operated(tmp_path, recipes, ("server", "edge", "device")) as federation:
        began = time.monotonic()
        commands = federation.server_begins(2)
        federation.until(lambda: "waiting for devices" in federation.log("server"), "the server")

        def joins(silo: int) -> list[str]:
            folder, port = tmp_path / f"edge-{silo}", 9093 + silo
            command = ("edge", "join", commands[silo].split()[2], folder, "--host", "10.118.1.1", "--port", port)
            said = federation.typed("edge", *command, "--devices", 2, dies_after=chance.uniform(2.0, 20.0) * silo)
            federation.files[f"edge-{silo}"] = str(folder / "edge.toml")
            federation.start(f"edge-{silo}")
            return re.findall(r"^polyfed (device join .*)$", said, re.MULTILINE)

        with ThreadPoolExecutor(4) as others:
            devices = [command for found in others.map(joins, (0, 1)) for command in found]
            began = timed(began, "edges")
            [*others.map(federation.device_joins, range(4), devices)]
        began = timed(began, "joined")
        job = federation.submit("hfm")
        federation.until(lambda: federation.jobs.facts(federation.jobs.get(job.id))["enrolled"] == 2, "both edges")
        began = timed(began, "enrolled")
        victims = ["line", "server", "edge-0", "edge-1", "job", "device-1", "tasks of device-2"]
        federation.disturbed(victims, chance, 8.0)
        began = timed(began, "disturbed")
        federation.ended()
        timed(began, "ended")
        print(f"{federation.line.lost} packets lost, {federation.line.carried} carried")
        federation.nothing_runs()
    out, one = Path(job.out), federation.simulated("hfm")
    same_run(out, one)
    states = [tmp_path / f"edge-{silo}" / "polyfed-edge" for silo in (0, 1)]
    check_records(out, states)
    own = [path for state in states for path in state.glob("*/*/egress.jsonl")]
    passed = {row for row in rows(*own) if '"ToEdge"' not in row}  # a request that was repeated is there twice
    assert passed == {*rows(one / "egress.jsonl")}, "the edges have passed what one process books"
    for place in federation.places:
        assert verify(place / "polyfed-state", place / "polyfed-state" / PUBLIC_KEY).rows
