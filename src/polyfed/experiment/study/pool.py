"""Processes that run at the same time: as many as cores and memory allow, each with one thread."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from polyfed.engines.workers.cluster import LOOK_SECONDS, Cluster, in_short, node_of
from polyfed.experiment.running import machine
from polyfed.experiment.study.board import DIVERGED
from polyfed.experiment.study.worker import carry_out

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Each process uses one thread, because the threads of one run wait for each other. Several runs use the cores
better."""


@dataclass(eq=False)
class Worker:
    """A process that executes one run at a time.

    Attributes:
        process: The process.
        job: The name of the run that the process executes. Empty if the process is idle.
        memory: The largest memory, in bytes, that the process has reported.
        log: The file that receives the standard error of the process.
        listener: The thread that reads the messages of the process.
    """

    process: "subprocess.Popen[str]"
    log: Path
    job: str = ""
    memory: int = 0
    listener: threading.Thread | None = None


@dataclass
class Message:
    """A worker's message about a run: the event `round`, `done` or `killed`, with its facts."""

    job: str
    event: str
    facts: dict[str, Any]


@dataclass
class Pool:
    """The processes of a sweep. At the end of a `with` block, the pool kills all of them.

    Attributes:
        folder: The folder of the study. The logs of the processes are in its subfolder `logs`.
        jobs: The largest number of runs at the same time.
        need: The memory, in bytes, that a run is expected to need. It is the largest memory that any process has
            reported so far. Before the first run, it is the memory of this process, which has loaded the same libraries
            and data.
    """

    folder: Path
    jobs: int
    need: int = field(default_factory=lambda: machine.memory_of(os.getpid()))
    workers: list[Worker] = field(default_factory=list)
    _messages: "queue.Queue[tuple[Worker, dict[str, Any] | None]]" = field(default_factory=queue.Queue)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self.workers)

    def drop(self) -> None:
        """End the current runs, with their processes. Their checkpoints stay, and no message of theirs follows."""
        self._end([worker for worker in self.workers if worker.job])

    def _end(self, ended: Sequence[Worker]) -> None:
        for worker in ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)  # also its child processes
        for worker in ended:
            _close(worker)
        self.workers = [worker for worker in self.workers if worker not in ended]

    @property
    def running(self) -> int:
        """The number of current runs."""
        return sum(bool(worker.job) for worker in self.workers)

    def refusal(self) -> str:
        """Return why no further run can start now, or "" if a run can start."""
        if self.running >= self.jobs:
            return f"{self.jobs} runs at once are carried out"
        idle = [worker for worker in self.workers if not worker.job]
        free = machine.free_memory() + sum(machine.memory_of(worker.process.pid) for worker in idle[:1])
        if self.running and free < self.need:
            return f"a run needs about {self.need / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        return ""

    def start(self, job: str, recipe: Mapping[str, Any], folder: Path, until: int = 0) -> None:
        """Start or continue a run in an idle process, or in a new one. It pauses after the round `until`, if not 0."""
        worker = next((w for w in self.workers if not w.job), None) or self._new()
        worker.job = job
        assert worker.process.stdin is not None
        with contextlib.suppress(OSError):  # the idle process was killed
            content = {"recipe": recipe, "folder": str(folder), "until": until}
            worker.process.stdin.write(json.dumps(content, default=str) + "\n")
            worker.process.stdin.flush()

    def message(self, seconds: float) -> Message | None:
        """Return the next message of a worker, or None if no message arrives within this number of seconds.

        If a process ends in the middle of a run, the message is the event `killed`, with the reason as `why`.
        """
        try:
            worker, facts = self._messages.get(timeout=seconds)
        except queue.Empty:
            return None
        if worker not in self.workers:  # it was dropped
            return None
        job = worker.job
        if facts is None:
            self.workers.remove(worker)
            _close(worker)
            return Message(job, "killed", {"why": _end_of(worker)}) if job else None
        worker.memory = max(worker.memory, facts.pop("memory", 0))
        self.need = max(self.need, worker.memory)
        event = facts.pop("event")
        if event == "done":
            worker.job = ""
        return Message(job, event, facts) if job else None

    def _new(self) -> Worker:
        number = next(n for n in range(1, self.jobs + 2) if all(w.log.stem != f"worker-{n}" for w in self.workers))
        log = self.folder / "logs" / f"worker-{number}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "polyfed.experiment.study.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                encoding="utf-8",
                env=os.environ | ONE_THREAD | {machine.CORES: str(max(1, machine.cores() // self.jobs))},
                start_new_session=True,  # Ctrl-C then reaches only this process, which ends the others
            )
        worker = Worker(process, log)
        self.workers.append(worker)
        assert process.stdout is not None
        worker.listener = threading.Thread(target=self._listen, args=(worker, process.stdout), daemon=True)
        worker.listener.start()
        return worker

    def _listen(self, worker: Worker, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                if line.endswith("\n"):
                    self._messages.put((worker, json.loads(line)))
        self._messages.put((worker, None))


class RayPool:
    """The runs of a sweep as tasks on the nodes of a Ray cluster, with the methods of `Pool`.

    Ray chooses a node with enough free cores, memory and GPUs for each run. All nodes share the folder of the study, so
    a run whose node ends continues from its checkpoint on another one.

    Args:
        folder: The folder of the study.
        jobs: The largest number of runs at the same time, or None for what fits the cluster.
        address: The address of the cluster; see `Cluster`.
    """

    def __init__(self, folder: Path, jobs: int | None, address: str) -> None:
        self.folder, self.jobs, self.cluster = folder, jobs, Cluster(address)
        self.need = machine.memory_of(os.getpid())
        self._running: dict[Any, str] = {}  # the messages of a task -> the name of its run
        self._cores, self._counted = 0, 0.0  # the cores of the cluster, and when they were counted
        self._seen = {Path().absolute()}  # data that all nodes can read, or none

    def __enter__(self) -> Self:
        self._ray = self.cluster.connect()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.cluster.refuse_folder(self.folder)
        except BaseException:
            self.cluster.close()
            raise
        self._task = self._ray.remote(messages_of)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
        self.cluster.close()

    def drop(self) -> None:
        """End the current runs; see `Pool.drop`."""
        for messages in [] if self.cluster.lost else self._running:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._ray.cancel(messages, force=True)
        self._running = {}

    @property
    def running(self) -> int:
        """The number of current runs, those that wait for a node included."""
        return len(self._running)

    def refusal(self) -> str:
        """Return why no further run can start now, or "" if a run can start.

        Raises:
            RecipeError: the head of the cluster has ended.
        """
        if time.monotonic() > self._counted + LOOK_SECONDS:
            self._cores, self._counted = int(self.cluster.head.cluster_resources().get("CPU", 0)), time.monotonic()
        most = min(self.jobs or self._cores, max(1, self._cores))
        return f"{most} runs at once are carried out" if self.running >= most else ""

    def start(self, job: str, recipe: Mapping[str, Any], folder: Path, until: int = 0) -> None:
        """Start or continue a run on a node. It pauses after the round `until`, if not 0.

        Raises:
            RecipeError: a node cannot read the data of the run, or no node has what it needs.
        """
        path = Path(recipe["data"].get("path", "")).absolute()
        if path not in self._seen:
            self.cluster.refuse_unread(path)
            self._seen.add(path)
        engine = recipe.get("engine", {})
        needs = {"num_cpus": max(1, int(engine.get("threads", 1))), "memory": self.need}
        needs |= {"num_gpus": 1} if engine.get("device", "cpu") == "cuda" else {}
        words = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        self.cluster.refuse_unfit({words[name]: amount for name, amount in needs.items()})  # Ray would wait for ever
        facts = {"recipe": recipe, "folder": str(folder), "until": until, "at": os.getcwd()}
        content = json.loads(json.dumps(facts, default=str))
        options = needs | {"max_retries": 0, "num_returns": "streaming", "scheduling_strategy": "SPREAD"}
        with self.cluster.explained():
            self._running[self._task.options(**options).remote(content)] = job

    def message(self, seconds: float) -> Message | None:
        """Return the next message of a run; see `Pool.message`.

        Raises:
            RecipeError: the head of the cluster has ended.
        """
        self.cluster.refuse_lost_head(LOOK_SECONDS)
        with self.cluster.explained():
            waited = self._ray.wait(list(self._running), num_returns=1, timeout=seconds) if self._running else ([], [])
        ready, _ = waited
        for messages in ready:
            job = self._running[messages]
            try:
                facts = dict(self._ray.get(next(messages)))
            except (StopIteration, self._ray.exceptions.RayError) as error:
                del self._running[messages]
                return Message(job, "killed", {"why": f"its node or process was lost ({in_short(error)})"})
            self.need = max(self.need, facts.pop("memory", 0))
            event = facts.pop("event")
            if event == "done":
                del self._running[messages]
            return Message(job, event, facts)
        return None


def messages_of(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Execute a run in this process of a node, and yield its messages."""
    told: queue.Queue[dict[str, Any]] = queue.Queue()
    torch.set_num_threads(1)
    if os.path.isdir(job["at"]):  # where the command was given, for paths that are relative to it
        os.chdir(job["at"])
    threading.Thread(target=carry_out, args=(job, lambda **message: told.put(message)), daemon=True).start()
    while True:
        message = told.get()
        if message.get("code", 0) not in (0, DIVERGED):  # no node is to blame for training that diverges
            message["why"] = f"on node {node_of()}: {message['why']}"
        yield message
        if message["event"] == "done":
            return


def _close(worker: Worker) -> None:
    """Wait for the end of a process and of its listener, and close its standard input."""
    worker.process.wait()
    if worker.listener is not None:
        worker.listener.join()
    if worker.process.stdin is not None:
        with contextlib.suppress(OSError):  # input that the process did not read
            worker.process.stdin.close()


def _end_of(worker: Worker) -> str:
    """Return why a process ended in the middle of a run."""
    code = worker.process.wait()
    if code == -9:
        return "its process was killed by signal 9; the system does so when memory is short"
    last = worker.log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    return f"its process ended with code {code}: {last or 'no message'} ({worker.log})"
