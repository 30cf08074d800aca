"""The jobs of a server: runs of apps that wait in its queue, and that its supervisor starts one after another.

Each job has a folder in the credentials, `jobs/<number>`, which only the server's user can read: a copy of the app, its
log, and `job.json`, the record that says how the job stands. Whoever changes the record locks `jobs` meanwhile, and
whoever runs the job locks its folder, so everybody knows at once whether its process lives. An order (pause, resume,
cancel) is a change of the record, which the process of the job obeys by itself, also if no server runs.

The process of a job is `polyfed.deploy.server.job_process`, which continues its run from the last checkpoint. The
supervisor lives in the process of `polyfed server`, and so imports no PyTorch.
"""

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from threading import Event
from typing import Any

from polyfed.core.errors import CheckpointError, PolyfedError, RecipeError, command
from polyfed.core.system.files import ROUNDS, replace_text, sync
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.system.log_lines import logger_of
from polyfed.deploy.server.run_log import RUNS, read_status
from polyfed.experiment.running.lock import LOCK, alone_in, is_locked

JOBS, COPY, LOG, RECORD = "jobs", "app", "log", "job.json"
"""The folder of the jobs in the credentials, and what the folder of a job holds."""

WAITING, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED = (
    "waiting",
    "running",
    "paused",
    "finished",
    "failed",
    "cancelled",
)
"""The states of a job."""

STATES = (WAITING, RUNNING, PAUSED, FINISHED, FAILED, CANCELLED)

ORDERS = {
    "pause": (PAUSED, (WAITING, RUNNING)),
    "resume": (WAITING, (PAUSED, FAILED)),
    "cancel": (CANCELLED, (WAITING, RUNNING, PAUSED, FAILED)),
}
"""Order -> the state that follows, and those in which it is possible."""

PROCESS = "polyfed.deploy.server.job_process"

WAIT_HOURS = 1.0
"""For so long a job that too few devices answer is tried again, unless it says otherwise."""

KILLS = 3
"""A job whose process was killed so often without finishing a round in between has failed."""

LOOK_SECONDS = 0.5
"""Seconds between two looks of the supervisor at the jobs, and of a job at its record."""

ALL_SECONDS = 60.0
"""So often the supervisor reads all records, also if nobody has changed one through `Jobs`."""

END_SECONDS = 15.0
"""How long a process that is to end may take before it is killed."""

KEPT_JOBS = 200
"""Number of ended jobs of which the record and the log stay."""

LOGGER = logger_of("jobs", "stderr")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The record of a job. Moments are seconds since 1970.

    Attributes:
        id: its number.
        name: the name of its recipe.
        purpose: what the recipe says that the run is for, `[deployment] purpose`.
        rounds: rounds of the recipe.
        out: the folder of the run.
        data: the server's own rows, or "".
        by: who submitted it, as the operating system says.
        submitted: when.
        wait: for how many seconds it is tried again while too few devices answer.
        at: it does not start before this moment.
        state: one of the states above.
        changed: when the state changed.
        reason: why it waits, has failed, or was killed; "" if nothing went wrong.
        exit_code: the exit code of its last error.
        starts: how often its process has been started.
        run: the name of its latest start, as in the status and the metrics.
        failing: since when too few devices answer; 0 if they do.
        kills: how often its process was killed since the last finished round.
        begun_at: how many rounds were finished when its process was last started.
    """

    id: int
    name: str
    purpose: str
    rounds: int
    out: str
    data: str
    by: str
    submitted: float
    wait: float
    at: float = 0.0
    state: str = WAITING
    changed: float = 0.0
    reason: str = ""
    exit_code: int = 0
    starts: int = 0
    run: str = ""
    failing: float = 0.0
    kills: int = 0
    begun_at: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing will run any more, unless somebody resumes it."""
        return self.state in (FINISHED, FAILED, CANCELLED)


class Jobs:
    """The records of the jobs.

    Args:
        credentials: the folder of the server's credentials.

    Raises:
        RecipeError: this process belongs to another user than the server.
    """

    def __init__(self, credentials: Path) -> None:
        self.credentials, self.folder = credentials.absolute(), credentials.absolute() / JOBS
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self.folder.chmod(0o700)  # it may come from a copy
        except PermissionError:
            why = "only the user of the server sees and changes its jobs. Call polyfed as that user (sudo -u USER)"
            raise RecipeError(f"{self.folder}: {why}") from None

    @classmethod
    def of_server(cls, credentials: Path) -> "Jobs":
        """Return the jobs of a server. Another folder stays as it is.

        Raises:
            RecipeError: the folder holds no credentials of a server.
        """
        if not (credentials / "server.pem").exists():
            raise RecipeError(f"{credentials} holds no server.pem. Give the folder of a server's credentials")
        return cls(credentials)

    def place(self, number: int) -> Path:
        """Return the folder of a job."""
        return self.folder / str(number)

    def all(self) -> list[Job]:
        """Return the jobs in the order in which they were submitted. A record that cannot be read is left out."""
        result = []
        for number in self.numbers():
            with suppress(PolyfedError):
                result.append(self.get(number))
        return result

    def shown(self, most: int) -> dict[str, Any]:
        """Return what a status shows: facts about `jobs`, those that run and the latest others, at most `most` in all
        unless more run, and `job_states`, the number of jobs in each state.
        """
        found = self.all()
        run = [job for job in found if job.state == RUNNING]
        others = [job for job in found if job.state != RUNNING]
        several = sorted([*run, *others[max(len(others) - max(most - len(run), 0), 0) :]], key=lambda job: job.id)
        states = Counter(job.state for job in found)
        return {"jobs": [self.facts(job) for job in several], "job_states": {name: states[name] for name in STATES}}

    def damaged(self) -> list[int]:
        """Return the numbers of the jobs whose records cannot be read."""
        return sorted(set(self.numbers()) - {job.id for job in self.all()})

    def get(self, number: int) -> Job:
        """Return a job.

        Raises:
            RecipeError: there is no such job.
            CheckpointError: its record is damaged.
        """
        path = self.place(number) / RECORD
        try:
            result = parse_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            known = ", ".join(map(str, self.numbers())) or "none"
            raise RecipeError(f"there is no job {number} in {self.credentials}; its jobs: {known}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged: {error}. Restore it from a copy, or remove {path.parent}"
            ) from None
        if not _is_record(result, number):
            raise CheckpointError(
                f"{path} is no record of job {number}. Restore it from a copy, or remove {path.parent}"
            )
        return Job(**result)

    def add(self, files: Sequence[Path], **facts: Any) -> Job:
        """Put a job into the queue.

        Args:
            files: the files of its app, which are copied: what happens to the app later does not change the job.
            facts: the entries of its record that are known now.

        Raises:
            RecipeError: a job that has not ended has the same folder.
        """
        with self._alone():
            for other in self.all():
                if not other.ended and other.out == facts["out"]:
                    raise RecipeError(
                        f"job {other.id} ({other.state}) writes to {other.out}. Choose another folder (--out), or end "
                        f"that job: {command('jobs', self.credentials, 'cancel', other.id)}"
                    )
            number, now = max(self.numbers(), default=0) + 1, time.time()
            who = os.environ.get("SUDO_USER") or _user()
            job = Job(id=number, by=who, submitted=now, changed=now, **facts)
            draft = self.folder / f".{number}"
            shutil.rmtree(draft, ignore_errors=True)
            (draft / COPY).mkdir(parents=True, mode=0o700)
            for path in files:
                shutil.copyfile(path, draft / COPY / path.name)
                sync(draft / COPY / path.name)
            replace_text(draft / RECORD, json.dumps(asdict(job), indent=1))
            draft.rename(self.place(number))
            sync(self.folder)
            return job

    def change(self, number: int, *states: str, **changes: Any) -> Job | None:
        """Change the record of a job, if it is in one of these states. Return the new record, or None."""
        with self._alone():
            job = self.get(number)
            if job.state not in states:
                return None
            if changes.get("state", job.state) != job.state:
                changes["changed"] = time.time()
            changed = replace(job, **changes)
            replace_text(self.place(number) / RECORD, json.dumps(asdict(changed), indent=1))
            return changed

    def order(self, number: int, order: str) -> Job:
        """Pause, resume or cancel a job. A job that runs ends within seconds; its run can be continued exactly.

        Raises:
            RecipeError: there is no such job, or it is in a state in which this is not possible.
        """
        state, possible = ORDERS[order]
        more = {"reason": "", "failing": 0.0, "kills": 0} if order == "resume" else {}
        if (job := self.change(number, *possible, state=state, **more)) is None:
            now = self.get(number).state
            raise RecipeError(f"job {number} is {now}; '{order}' needs a job that is {' or '.join(possible)}")
        return job

    def runs(self, number: int) -> bool:
        """Return whether a process works on a job."""
        return is_locked(self.place(number))

    def tidy(self) -> None:
        """Remove apps that nobody needs any more, and all but the latest records of ended jobs."""
        ended = [job for job in self.all() if job.ended and not self.runs(job.id)]
        for job in ended:
            if job.state != FAILED:  # which may be resumed
                shutil.rmtree(self.place(job.id) / COPY, ignore_errors=True)
        for job in ended[:-KEPT_JOBS]:
            shutil.rmtree(self.place(job.id), ignore_errors=True)

    def facts(self, job: Job) -> dict[str, Any]:
        """Return what is known about a job: its record, and how far its run is.

        `round`, `bytes_up`, `bytes_down`, `missing` (requests without a usable reply) and `epsilon` are of the whole
        run, `enrolled`, `wanted` and `reasons` of its latest start.
        """
        status = read_status(self.credentials / RUNS / job.run) if job.run else None
        known = {"enrolled": 0, "wanted": 0, "reasons": {}}
        return {**asdict(job), **rounds_done(Path(job.out)), **{key: (status or known).get(key) for key in known}}

    def numbers(self) -> list[int]:
        """Return the numbers of all jobs, also of those whose records cannot be read."""
        result = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(name) for name in result if name.isascii() and name.isdecimal() and len(name) < 10)

    @property
    def mark(self) -> int:
        """A number that differs after every change of a record through this class, by any process."""
        return self.folder.stat().st_mtime_ns

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with alone_in(self.folder, "another process changes the jobs", "Try again", seconds=30.0):
            try:
                yield
            finally:  # the file system's own clock ticks too slowly
                os.utime(self.folder, ns=(time.time_ns(), time.time_ns()))


def _is_record(told: Any, number: int) -> bool:
    """Return whether this is the record of a job: somebody may have edited or damaged it."""
    kinds = {field.name: field.type for field in fields(Job)}
    needed = {field.name for field in fields(Job) if field.default is MISSING} | {"state"}
    if not isinstance(told, dict) or not needed <= set(told) <= set(kinds) or told["id"] != number:
        return False  # an older release may lack entries that have a default
    fits = (isinstance(value, (int, float) if kinds[name] is float else kinds[name]) for name, value in told.items())  # type: ignore[arg-type]
    return all(fits) and told["state"] in STATES


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return str(os.getuid())


def rounds_done(out: Path) -> dict[str, Any]:
    """Return how far a run is, from the rows of its rounds. A row that is being written does not count."""
    result: dict[str, Any] = {"round": 0, "bytes_up": 0, "bytes_down": 0, "missing": 0, "epsilon": None}
    try:
        lines = (out / ROUNDS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return result
    for line in lines:
        with suppress(ValueError, TypeError, AttributeError, KeyError):
            row = parse_json(line)
            up, down, round = int(row["bytes_up"]), int(row["bytes_down"]), int(row["round"])
            missing, epsilon = len(row.get("missing") or {}), (row.get("privacy") or {}).get("epsilon")
            epsilon = None if epsilon is None else float(epsilon)
            result["bytes_up"] += up
            result["bytes_down"] += down
            result["missing"] += missing
            result["round"], result["epsilon"] = round, epsilon
    return result


class Supervisor:
    """Starts the jobs of a server, at most so many at the same time, and looks after their processes.

    Args:
        jobs: the records.
        most: how many jobs run side by side.
        words: the command that becomes the process of a job; a number and the count of its starts follow.
    """

    def __init__(self, jobs: Jobs, most: int, words: Sequence[str] = ()) -> None:
        self.jobs, self.most, self.stop = jobs, most, Event()
        self.words = [*(words or [sys.executable, "-P", "-m", PROCESS, str(jobs.credentials)])]
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self._told: set[int] = set()
        self._open: set[int] = set()
        self._mark, self._next = 0, 0.0

    def run(self) -> None:
        """Look after the jobs until `stop` is set, and then end their processes, which the next server starts again."""
        told = ""
        while not self.stop.wait(LOOK_SECONDS):
            try:
                self.look()
                told = ""
            except (OSError, PolyfedError) as error:  # a full disk; the next look may succeed
                if str(error) != told:  # a line for each look would fill the disk of the log
                    told = str(error)
                    LOGGER.warning("the jobs cannot be looked after now: %s", error)
        for job in self.jobs.all():  # also those that an earlier server has started
            self._signal(job, signal.SIGTERM)
        end = time.monotonic() + END_SECONDS
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(end - time.monotonic(), 0.1))
            child.kill()

    def look(self) -> None:
        """Notice which processes have ended, end those that do not obey, and start jobs that wait."""
        lost = {number for number, child in self.children.items() if child.poll() is not None}
        for number in lost:
            del self.children[number]
        found = self._read()
        alive = {job.id for job in found if job.id in self.children or self.jobs.runs(job.id)}
        for job in found:
            if job.state == RUNNING and job.id not in alive:
                self._died(job, killed=job.id in lost)
            elif job.state != RUNNING and job.id in alive and time.time() - job.changed > END_SECONDS:
                self._signal(job, signal.SIGKILL)  # it has not obeyed, for example because it is stopped
        now = time.time()
        for job in self._read():
            if job.state == WAITING and job.at <= now and job.id not in alive and len(alive) < self.most:
                self._start(job)
                alive.add(job.id)
        self._open = {job.id for job in self._read() if not job.ended or job.id in alive}
        if lost:
            self.jobs.tidy()

    def _read(self) -> list[Job]:
        """Return the jobs that have not ended or whose processes live; all of them after a change of any record."""
        mark = self.jobs.mark  # first: a change while the records are read is seen in the next look
        if mark != self._mark or time.monotonic() >= self._next:
            self._mark, self._next = mark, time.monotonic() + ALL_SECONDS
            self._open = set(self.jobs.numbers())
        jobs = []
        for number in sorted(self._open):
            try:
                jobs.append(self.jobs.get(number))
            except CheckpointError:
                if number not in self._told:
                    self._told.add(number)
                    where = self.jobs.place(number)
                    LOGGER.error("job %d is left out: its record in %s is damaged", number, where)
            except RecipeError:  # somebody has removed it
                continue
        return jobs

    def _start(self, job: Job) -> None:
        begun = rounds_done(Path(job.out))["round"]
        told = self.jobs.change(job.id, WAITING, state=RUNNING, starts=job.starts + 1, begun_at=begun)
        if told is None:  # somebody has paused it meanwhile
            return
        LOGGER.info("job %d (%s) starts; its log: %s", job.id, job.name, self.jobs.place(job.id) / LOG)
        with open(self.jobs.place(job.id) / LOG, "ab", opener=_private) as log:
            words = [*self.words, str(job.id), str(told.starts)]
            self.children[job.id] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _died(self, job: Job, *, killed: bool) -> None:
        """Note that the process of a job has ended without a word: of an earlier server, unless it was `killed`."""
        round = rounds_done(Path(job.out))["round"]
        kills = (0 if round > job.begun_at else job.kills) + killed
        if kills < KILLS:
            self.jobs.change(job.id, RUNNING, state=WAITING, kills=kills)
            return
        why = f"its process was killed {kills} times without finishing a round, for example for lack of memory"
        self.jobs.change(job.id, RUNNING, state=FAILED, kills=kills, exit_code=1, reason=why)
        LOGGER.error("job %d has failed: %s", job.id, why)

    def _signal(self, job: Job, how: signal.Signals) -> None:
        if self.jobs.runs(job.id):
            with suppress(OSError, ValueError):
                os.kill(int((self.jobs.place(job.id) / LOCK).read_text()), how)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
