"""Predict how much faster rounds become with more worker processes than this machine has cores.

    python benchmarks/simulated_cores.py [--setting food] [--workers 2 4 8 16] [--stack 2] [--rounds 10]

Rounds with one process and rounds with two worker processes take turns. The rounds with two workers give the processor
time of each stack of clients (or of each client that trains alone), and the processor time of the server. The
simulation then gives the stacks to any number of workers, in the order of `polyfed.engines.workers.pool`. It lets the
server receive one reply after another.

The simulation assumes that every worker computes as fast as each of the two measured workers. So it does not know that
more cores may share one cache and one memory, or that a processor may lower its clock if all cores compute.
"""

import argparse
import heapq
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyfed.engines.workers import process as worker_process
from polyfed.engines.workers.pool import BUNDLES, bundled
from run_polyfed import Ours, population
from settings import SETTINGS
from speed import CACHE

DEFAULTS = ("small", "small-500-clients", "food", "cg-mnist", "ucihar")

ENGINES = ("sequential", "vectorised")


@dataclass
class Round:
    """The processor times of a round with worker processes, in seconds.

    Attributes:
        units: time of each unit on its worker, in the order of the engine. A unit is a stack of clients or one client.
        work: the engine's estimate of the work of each unit.
        clients: number of clients in each unit.
        handling: time in which the server sends a unit to a worker and receives the reply, averaged over the units.
        serial: time of the server before the first unit is sent and after the last reply has come.
    """

    units: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    handling: float = 0.0
    serial: float = 0.0


def seconds_of(bundles: Sequence[float], workers: int, handling: float) -> float:
    """The time from the first job to the last reply, in seconds.

    Args:
        bundles: the time of each job on a worker, in the order in which the server sends the jobs.
        workers: number of workers.
        handling: time of the server for each job. The server handles one job at a time.
    """
    now, waiting, running = 0.0, list(bundles), []
    while waiting or running:
        while waiting and len(running) < workers:
            heapq.heappush(running, now + waiting.pop(0))
        now = max(now, heapq.heappop(running)) + handling
    return now


def simulated(found: Round, workers: int) -> float:
    """The time of the round with this number of workers, in seconds."""
    members, first = [], 0
    for size in found.clients:
        members.append([*range(first, first + size)])
        first += size
    work = {client: found.work[place] / len(unit) for place, unit in enumerate(members) for client in unit}
    place_of = {unit[0]: place for place, unit in enumerate(members)}
    jobs = bundled(members, work, BUNDLES * workers)
    seconds = [sum(found.units[place_of[unit[0]]] for unit in job) for job in jobs]
    units_a_job = len(members) / len(jobs)
    return found.serial + seconds_of(seconds, workers, found.handling * units_a_job)


class Measured:
    """A federation with worker processes that notes the processor times of its rounds."""

    def __init__(self, ours: Ours) -> None:
        self.ours, self.engine = ours, ours.fed.engine
        self.found = Round()
        self.engine.emit = self._note
        collect = self.engine.pool._collect

        def timed(request: Any, todo: dict[int, list[list[int]]], *rest: Any) -> Any:
            started = time.process_time()
            answer = collect(request, todo, *rest)
            units = [unit for bundle in todo.values() for unit in bundle]
            self.found.handling = (time.process_time() - started) / len(units)
            return answer

        self.engine.pool._collect = timed

    def _note(self, name: str, **facts: Any) -> None:
        """Note the time of a job. The units of one job count as equally fast."""
        if name == "job":
            for unit in facts["units"]:
                self.found.units.append(facts["seconds"] / len(facts["units"]))
                self.found.work.append(sum(self.engine.work(unit).values()))
                self.found.clients.append(len(unit))

    def round(self) -> Round:
        """Execute a round and return its times."""
        self.found = Round()
        started = time.process_time()
        self.ours.round()
        handled = self.found.handling * len(self.found.units)
        self.found.serial = time.process_time() - started - handled
        return self.found


def timed_jobs() -> None:
    """Let worker processes that start from now on report the processor time of each job."""
    run = worker_process.run

    def timed(engine: Any, job: worker_process.Job, *memory: Any) -> worker_process.Done:
        started = time.process_time()
        done = run(engine, job, *memory)
        done.events.append(("job", {"units": job.units, "seconds": time.process_time() - started}))
        return done

    worker_process.run = timed


def clocked(ours: Ours) -> tuple[float, float]:
    """Execute a round and return its wall time and its processor time in seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    ours.round()
    return time.perf_counter() - wall, time.process_time() - cpu


def row(name: str, engine: str, options: argparse.Namespace) -> str:
    """Measure one setting with one engine and return its row of the table."""
    setting, workers, rounds = SETTINGS[name], options.workers, options.rounds
    people = population(setting, CACHE)
    stack = options.stack if engine == "vectorised" else 0
    single, several = (Ours(setting, people, engine, number, stack) for number in (1, 2))
    watched = Measured(several)
    alone, both, found = [], [], []
    for turn in range(setting.warm_up + rounds):
        one = clocked(single)
        started = time.perf_counter()
        got = watched.round()
        if turn >= setting.warm_up:
            alone.append(one)
            both.append(time.perf_counter() - started)
            found.append(got)
    wall, cpu = (statistics.median(values) for values in zip(*alone, strict=True))
    for ours in (single, several):
        ours.fed.engine.close()
    units = len(found[-1].units)
    cells = [name, f"{engine}, stack = {stack}" if stack else engine, str(max(units, 1)), f"{1e3 * wall:.1f}"]
    if not units:  # the engine does not share these rounds, whatever the number of workers
        return " | ".join(cells + ["–"] + ["1.00"] * (1 + len(workers)))
    serial = statistics.median(one.serial + one.handling * units for one in found)
    predicted = [cpu / statistics.median(simulated(one, number) for one in found) for number in workers]
    cells += [f"{1e3 * serial:.1f}", f"{wall / statistics.median(both):.2f}"]
    return " | ".join(cells + [f"{value:.2f}" for value in predicted])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=[*SETTINGS], help=f"default: {', '.join(DEFAULTS)}")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="default: both")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers to simulate")
    parser.add_argument("--stack", type=int, default=0, help="clients in a stack; default: the engine decides")
    parser.add_argument("--rounds", type=int, default=10, help="counted rounds; medians are shown")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("this program needs two cores, because it measures rounds with two worker processes")
    torch.set_num_threads(1)
    timed_jobs()
    head = ["setting", "engine", "units", "1 worker, ms", "server, ms", "2 measured"]
    head += [f"{number} simulated" for number in options.workers]
    print(f"| {' | '.join(head)} |\n|---|---|{'---:|' * (len(head) - 2)}")
    for name in options.setting or DEFAULTS:
        for engine in options.engine or ENGINES:
            print(f"| {row(name, engine, options)} |", flush=True)


if __name__ == "__main__":
    main()
