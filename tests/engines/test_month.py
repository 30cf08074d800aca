"""A month in fast forward: a server and three devices, 60 jobs, kills, renewed certificates, and two upgrades. Slow.

It begins with an older release, which pip replaces on each machine by the next one (`engines/releases.py`).
`-s` prints what the month costs. The server looks at its certificate, which lasts two minutes, every two
seconds.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.releases import RELEASES, Releases
from engines.test_own_processes import RECIPE, OwnFederation
from polyfed.core.system.files import PUBLIC_KEY
from polyfed.deploy import credentials as certificates
from polyfed.deploy.device.memory.store import STORE
from polyfed.deploy.server.jobs import FINISHED, JOBS, LOG, RUNNING, WAITING, Job, Jobs
from polyfed.deploy.server.run_log import RUNS
from polyfed.experiment.certificate import certify, verify_certificate
from polyfed.experiment.running.lock import LOCK
from polyfed.privacy.egress.audit_log.verification import verify
from polyfed.report import reconcile

DAYS, RENEWED_DAYS = 120 / 86400, 60 / 86400
"""A certificate lasts two minutes, and is renewed a minute before its end."""

SERVER = f"""
from polyfed.deploy import credentials
from polyfed.transport import hub
hub.DAY, credentials.DAYS, credentials.RENEWED_DAYS, credentials.WARNED_DAYS = 2.0, {DAYS}, {RENEWED_DAYS}, 0.0
from polyfed.cli import main
main()
"""

PREPARED = """
import sys
from pathlib import Path
from polyfed.deploy.app_folder import write_nodes
from polyfed.deploy.credentials import write_credentials
from polyfed.experiment.recipes.recipe import load_recipe
places = write_nodes(load_recipe(Path("recipe.toml")), Path().absolute())
write_credentials(Path("credentials"), len(places), sys.argv[1:])
"""
"""The keys and data that the first release makes."""

SUBMITTED = """
import sys
from pathlib import Path
from polyfed.deploy.app_folder import write_app
from polyfed.deploy.server.queued_run import enqueue
release, first, last, *methods = sys.argv[1:]
apps = [write_app(Path(f"{name}.toml"), Path(f"{name}-{release}")) for name in methods]
for number in range(int(first), int(last) + 1):
    out = str(Path(f"job-{number}").absolute())
    enqueue(apps[number % len(apps)], Path("credentials"), {"out": out}, 0.0, 3600.0)
"""
"""What `polyfed app` and `polyfed submit --queue` of a release do, for many jobs in one process."""

METHODS = {
    "scaffold": "",  # local states
    "fedavg": '[wire]\ncompress = "int8"\n',  # error feedback
    "fedprox": "[secure_aggregation]\nmin_clients = 2\n",  # secrets
}
"""A third of the jobs is of each."""

JOBS_OF_A_MONTH = int(os.environ.get("POLYFED_MONTH_JOBS", "60"))
DISTURBED = JOBS_OF_A_MONTH * 11 // 15
"""Kills and upgrades happen in the first jobs."""

WARM = DISTURBED + max((JOBS_OF_A_MONTH - DISTURBED) // 4, 1)
"""From then on, the same processes must not need more: they have done each kind of job."""

KILLS = Counter(
    {
        name: max(count * JOBS_OF_A_MONTH // 60, 1)
        for name, count in {"server": 8, "device-0": 4, "device-1": 4, "device-2": 4, "job": 4}.items()
    }
)
DEVICES = ("device-0", "device-1", "device-2")

GROWTH = {"queue": 0, "runs": 1_000, "jobs": 1_000, "log": 60_000, "store": 8_000, "ledgers": 30_000, "rest": 0}
"""Most bytes by which a job may add to each part of the disk, about twice what was measured. The logs and ledgers of
devices, of two rounds of three devices here, stay by purpose. The folders of the results are the operator's."""

SLACK = 100_000
"""Bytes by which a part may differ between two looks, such as a file of SQLite that is being tidied."""

LOGGED_AHEAD = 5e6
"""Most bytes of a file in which SQLite collects what it will write (`-wal`), which it keeps and uses again."""

MEMORY, FILES = 3e6, 2
"""Most bytes of memory, and open files, that a process may need more after the last undisturbed jobs."""


class Month(OwnFederation):
    """The federation, each process with the release of polyfed in an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.releases, self.installed = Releases(folder / "releases"), dict[str, int]()
        self.old = set[int]()  # the jobs that the first release has begun
        for name in ("server", *DEVICES):
            self.install(name)
        base = RECIPE.format(rounds=2).replace("[train]", "[engine]\nmin_replies = 3\n[train]")  # as all must take part
        for method, more in METHODS.items():
            (folder / f"{method}.toml").write_text(base.replace('"scaffold"', f'"{method}"') + more)
        super().__init__(folder, 2)
        self.jobs = Jobs(self.credentials)

    general = "idle_seconds = 3600\n"  # the import of PyTorch takes long on a busy machine
    patience = 1200.0
    pause = 0.5

    @property
    def options(self) -> tuple[str, ...]:  # type: ignore[override]
        """The first release names a run by its second and seed, so jobs side by side could share the states."""
        return ("--jobs", "2" if self.installed["server"] else "1")

    def prepared(self) -> list[Path]:
        self.as_server(PREPARED, self.address)
        return sorted((self.folder / "nodes").iterdir())

    def python(self, name: str) -> str:
        return str(self.releases.python(name))

    def program(self, name: str) -> list[str]:
        return ["-c", SERVER] if name == "server" else super().program(name)

    def packages(self, name: str) -> list[Path]:
        return []

    def install(self, name: str) -> None:
        """Install the first release on a machine, or the one after that which it has."""
        self.installed[name] = self.installed.get(name, -1) + 1
        self.releases.install(name, [*RELEASES][self.installed[name]])

    def as_server(self, program: str, *words: str) -> None:
        """Run a program with the release of the server."""
        told = [self.python("server"), "-P", "-c", program, *words]
        done = subprocess.run(
            told, cwd=self.folder, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()

    def submit(self, first: int, last: int) -> None:
        """Submit jobs with the release of the server."""
        release = [*RELEASES][self.installed["server"]]
        self.as_server(SUBMITTED, release, str(first), str(last), *METHODS)

    def upgrade(self, name: str) -> None:
        """As in docs/operations.md: the old process ends by itself, pip replaces the release, the new one begins."""
        self.processes[name].terminate()
        self.processes[name].wait(300)
        self.install(name)
        self.start(name)

    def stop(self) -> None:
        super().stop()
        for job in self.jobs.all():
            if self.jobs.runs(job.id):
                with suppress(OSError, ValueError):
                    os.kill(int((self.jobs.place(job.id) / LOCK).read_text()), signal.SIGKILL)

    def state(self, number: int) -> Path:
        return self.folder / "nodes" / str(number) / "polyfed-state"

    def ended(self) -> int:
        found = [job for job in self.jobs.all() if job.ended]
        assert not [(job.id, job.reason) for job in found if job.state != FINISHED]
        return len(found)

    def disk(self) -> dict[str, int]:
        """Bytes of each part of the disk, those of the three devices together."""
        found = {"queue": size(self.credentials / "queue"), "runs": size(self.credentials / RUNS)}
        found["jobs"] = size(self.credentials / JOBS)
        found["rest"] = size(self.credentials) - sum(found.values())
        found |= {"log": 0, "store": 0, "ledgers": 0}
        for number in range(3):
            state = self.state(number)
            log, store = sum(map(size, state.glob("audit*"))), sum(map(size, state.glob(f"{STORE}*")))
            ledgers = sum(size(path) for path in state.rglob("egress.jsonl"))
            for name, bytes in (("log", log), ("store", store), ("ledgers", ledgers)):
                found[name] += bytes
            found["rest"] += size(state) - log - store - ledgers
        return found

    def processes_now(self) -> dict[str, psutil.Process]:
        """The server, the devices, and the processes that hold PyTorch for them."""
        found = {name: psutil.Process(self.processes[name].pid) for name in ("server", *DEVICES)}
        for name in DEVICES:
            for child in found[name].children():
                found[f"tasks of {name}"] = child
        return found


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder, without what SQLite collects."""
    total = 0
    for one in [path, *path.rglob("*")] if path.is_dir() else [path]:
        with suppress(OSError):  # it has just gone
            found = one.stat().st_size if one.is_file() else 0
            assert found < LOGGED_AHEAD or not one.name.endswith("-wal"), f"{one}: {found}"
            total += 0 if one.name.endswith(("-wal", "-shm")) else found
    return total


@pytest.fixture
def month(tmp_path: Path) -> Iterator[Month]:
    made = Month(tmp_path)
    yield made
    made.stop()


def short_certificate(month: Month) -> None:
    """Give the server a certificate of this month, as if the first days had passed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "DAYS", DAYS)
        patch.setattr(certificates, "RENEWED_DAYS", 1000)
        assert certificates.renewed(month.credentials) is not None


def kill(month: Month, victim: str) -> None:
    """Kill a process without a word, and start it again as a service manager does."""
    if victim != "job":
        month.kill(victim)
        month.start(victim)
        return

    def killed() -> bool:
        for job in month.jobs.all():
            if job.state == RUNNING and month.jobs.runs(job.id):
                with suppress(OSError, ValueError):
                    os.kill(int((month.jobs.place(job.id) / LOCK).read_text()), signal.SIGKILL)
                    return True
        return False

    month.until(killed, "a job that runs")


def out_of_step(month: Month, first: str, then: tuple[str, ...]) -> None:
    """Upgrade one side. Jobs wait and say why until the other side has followed."""
    month.upgrade(first)

    def waits(job: Job) -> bool:
        return job.state == WAITING and "install the same version" in job.reason

    month.until(lambda: any(map(waits, month.jobs.all())), "a job that names the versions")
    for name in then:
        month.upgrade(name)


def disturbed(month: Month, chance: random.Random, submitted: int) -> None:
    """The first jobs, with kills spread over them and two upgrades: of the server first, and of the devices first.

    After the first one, the next release submits the jobs after the first `submitted`.
    """
    victims = list(KILLS.elements())
    chance.shuffle(victims)
    upgrades = [("server", DEVICES), ("device-2", ("device-0", "server", "device-1"))]
    for number in range(1, DISTURBED + 1):
        month.until(lambda number=number: month.ended() >= number, f"job {number}")  # type: ignore[misc]
        done = month.ended()
        while victims and done >= DISTURBED * (KILLS.total() - len(victims)) / KILLS.total():
            time.sleep(chance.uniform(0.0, 1.5))
            kill(month, victims.pop())
        if upgrades and done >= DISTURBED * (3 - len(upgrades)) / 3:
            out_of_step(month, *upgrades.pop(0))
            if upgrades:
                month.old = {job.id for job in month.jobs.all() if job.starts}
                month.submit(submitted + 1, JOBS_OF_A_MONTH)
    assert not victims
    assert not upgrades
    assert {*month.installed.values()} == {len(RELEASES) - 1}


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_month_in_fast_forward(month: Month) -> None:
    seed = int(os.environ.get("POLYFED_MONTH", "1"))
    short_certificate(month)
    expected = {
        method: polyfed.run(month.folder / f"{method}.toml", month.folder / f"one-{method}").result["state_sha256"]
        for method in METHODS
    }
    began = time.monotonic()
    month.began()
    month.submit(1, submitted := 2 * JOBS_OF_A_MONTH // 3)
    month.until(lambda: month.ended() >= 3, "one job of each method")
    start, since = month.disk(), month.ended()
    disturbed(month, random.Random(seed), submitted)
    month.until(lambda: month.ended() >= WARM, "the jobs after which nothing may grow")
    memory = {name: (one, one.memory_info().rss, one.num_fds()) for name, one in month.processes_now().items()}
    month.until(lambda: month.ended() == JOBS_OF_A_MONTH, "the last job")
    end, jobs = month.disk(), month.jobs.all()
    print(f"{time.monotonic() - began:.0f} s, {sum(job.starts for job in jobs)} starts of {len(jobs)} jobs")
    assert [(job.state, job.reason) for job in jobs] == [(FINISHED, "")] * JOBS_OF_A_MONTH
    for job in jobs:
        result = json.loads((Path(job.out) / "result.json").read_text())
        assert result["state_sha256"] == expected[job.name], f"job {job.id}"
    told = {name: month.log(name) for name in ("server", *DEVICES)}
    told |= {f"job {job.id}": (month.jobs.place(job.id) / LOG).read_text() for job in jobs}
    assert not [name for name, text in told.items() if "Traceback" in text]
    assert told["server"].count("certificate is renewed") >= 3
    assert len({job.run for job in jobs}) == JOBS_OF_A_MONTH
    check_growth(start, end, JOBS_OF_A_MONTH - since)
    check_memory(memory)
    check_ledgers(month, jobs)


def check_ledgers(month: Month, jobs: list[Job]) -> None:
    """All logs hold, and agree with each other; the devices have signed nearly all, as one may be killed meanwhile.

    The first release did not book everything of a run that was killed, which later ones have mended.
    """
    states = [month.state(number) for number in range(3)]
    for state in states:
        assert verify(state, state / PUBLIC_KEY).rows
    signed = 0
    for job in jobs:
        assert job.id in month.old or not reconcile(job.out, states).findings, f"job {job.id}"
        signed += len(json.loads((Path(job.out) / "receipts.json").read_text()))
    assert signed >= 3 * (len(jobs) - KILLS.total())
    path, _ = certify(jobs[-1].out)
    assert not verify_certificate(path, run=Path(jobs[-1].out), logs=states).faults


def check_growth(start: dict[str, int], end: dict[str, int], jobs: int) -> None:
    """Each part of the disk has grown by at most so much a job."""
    grown = {name: end[name] - start[name] for name in GROWTH}
    print(f"bytes at the start {start}, a job { ({name: bytes // jobs for name, bytes in grown.items()}) }")
    assert not [(name, bytes) for name, bytes in grown.items() if bytes > GROWTH[name] * jobs + SLACK]


def check_memory(before: dict[str, tuple[psutil.Process, int, int]]) -> None:
    """The processes that nothing disturbed need no more than before."""
    grown = dict[str, tuple[float, int, float]]()
    for name, (one, memory, files) in before.items():
        with suppress(psutil.NoSuchProcess):  # a process of tasks that has rested
            grown[name] = one.memory_info().rss - memory, one.num_fds() - files, memory
    print(
        {
            name: f"{more / 1e6:+.2f} of {memory / 1e6:.0f} MB, {files:+d} files"
            for name, (more, files, memory) in grown.items()
        }
    )
    assert {"server", *DEVICES} <= grown.keys()
    assert not [name for name, (more, files, _) in grown.items() if more > MEMORY or files > FILES]
