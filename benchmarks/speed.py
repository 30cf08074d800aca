"""Seconds per round of federated averaging: a bare PyTorch loop, polyfed's two engines, pfl and Flower.

Every program is a process of its own. The programs take turns, so that all run under the same conditions. In each turn,
a program runs some rounds in a row, as in a real run. Figures are medians over the rounds, with quartiles. A framework
that cannot be installed or fails is listed as such, without a figure.

    python benchmarks/speed.py [--setting food] [--threads 2] [--rounds 15] [--turn 5] [--busy] [--json FILE]

With --busy, one process for each core computes without end while the programs are measured, and a bare loop with one
thread is measured too.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from environments import PEERS, Peer, Unavailable, python_of
from settings import SETTINGS, Setting, arrays
from worker import ANSWER

HERE = Path(__file__).parent
BARE, SINGLE = "bare loop", "bare loop, one thread"

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "polyfed-benchmarks"
"""Keeps the environments of other frameworks and the data."""

TURN = 5
"""Rounds that a program runs in a row. After another program's turn, the caches of the processor are cold, which slows
down the first round. With 1, every round is such a round."""

REST = 0.05
"""Seconds between two turns: the OpenMP threads of a program keep spinning for some milliseconds after its last
operation, on cores that the next program needs."""


@dataclass
class Program:
    """A measured program and its reports."""

    name: str
    process: subprocess.Popen[str] | None = None
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    failure: str = ""

    def ask(self, word: str | None = None) -> dict[str, Any] | None:
        """Send a word, if there is one, and wait for the report; a program that has ended counts as failed."""
        if self.failure or self.process is None:
            return None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if word is not None:
                self.process.stdin.write(word + "\n")
                self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith(ANSWER):
                    answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                    return answer
        except BrokenPipeError:
            pass
        self.failure = f"ended with exit status {self.process.wait()}"
        return None

    def round(self, *, count: bool) -> None:
        """Let the program run one round."""
        answer = self.ask("go")
        if answer is not None and count:
            self.seconds.append(answer["seconds"])
            self.cpu.append(answer["cpu"])

    def stop(self) -> None:
        """Let the program end."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        if not self.failure:
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start(name: str, command: Sequence[str], threads: int, log: Path) -> Program:
    """Start a program; its standard error goes to a file."""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | settings
        )
    return Program(name, process)


@dataclass(frozen=True)
class Wanted:
    """A program to measure: its script with arguments, the number of threads, and the framework if it is not ours."""

    name: str
    script: str
    threads: int
    arguments: tuple[str, ...] = ()
    peer: Peer | None = None


def wanted(threads: int, peers: Sequence[str], *, busy: bool = False) -> list[Wanted]:
    """The bare loop, polyfed's engines, and these frameworks."""
    return [
        Wanted(BARE, "run_bare.py", threads),
        *([Wanted(SINGLE, "run_bare.py", 1)] if busy else []),
        *(Wanted(f"polyfed {engine}", "run_polyfed.py", threads, (engine,)) for engine in ("sequential", "vectorised")),
        *(Wanted(p.name, p.script, threads, peer=p) for p in PEERS if p.name.split()[0].lower() in peers),
    ]


def started(setting: Setting, cache: Path, what: Sequence[Wanted], logs: Path) -> list[Program]:
    """Start programs, one after the other; each is ready when this returns."""
    found: list[Program] = []
    for one in what:
        try:
            python = sys.executable if one.peer is None else str(python_of(one.peer, cache))
        except Unavailable as reason:
            found.append(Program(one.name, failure=f"not available here: {reason}"))
            continue
        facts = [setting.name, str(cache / "data"), str(one.threads), *one.arguments]
        program = start(one.name, [python, str(HERE / one.script), *facts], one.threads, logs / f"{one.name}.log")
        ready = program.ask()
        if ready is not None:
            assert ready["parameters"] == setting.num_parameters, f"{one.name} has {ready['parameters']} parameters"
        found.append(program)
    return found


@contextmanager
def busy_cores() -> Iterator[None]:
    """Let one process for each core compute without end in this block."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def measure(setting: Setting, what: Sequence[Wanted], rounds: int, cache: Path, turn: int = TURN) -> list[Program]:
    """Run rounds in turns of `turn` rounds. The warm-up rounds of each program are not counted."""
    arrays(setting, cache / "data")
    with tempfile.TemporaryDirectory() as logs:
        running = started(setting, cache, what, Path(logs))
        try:
            for begin in range(0, setting.warm_up + rounds, turn):
                for program in running:
                    for number in range(begin, min(begin + turn, setting.warm_up + rounds)):
                        program.round(count=number >= setting.warm_up)
                    time.sleep(REST)
        finally:
            for program in running:
                program.stop()
    return running


def times_faster(program: Program, than: Program) -> float:
    """How many times faster a program is than another one."""
    # the ratio of rounds from the same turn, then the median: a slow minute of the machine cancels out
    return statistics.median(other / own for other, own in zip(than.seconds, program.seconds, strict=False))


def table(setting: Setting, running: Sequence[Program]) -> str:
    """The results of a setting as a Markdown table."""
    (bare,) = (p for p in running if p.name == BARE)
    lines = [
        f"### {setting.name}: {setting.cohort} of {setting.clients} clients, {setting.num_parameters:,} parameters",
        "",
        "| program | ms a round, median (quartiles) | fastest | processor ms, own process | faster than bare |",
        "|---|---|---|---|---|",
    ]
    for program in running:
        if len(program.seconds) < 2:
            lines.append(f"| {program.name} | no figure: {program.failure} | | | |")
            continue
        low, middle, high = (1e3 * q for q in statistics.quantiles(program.seconds, n=4))
        ratio = times_faster(program, bare)
        own = 1e3 * statistics.median(program.cpu)
        fastest = 1e3 * min(program.seconds)
        lines.append(
            f"| {program.name} | {middle:.1f} ({low:.1f} to {high:.1f}) | {fastest:.1f} | {own:.1f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=list(SETTINGS), help="default: food and small")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every program; default: all cores")
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds of each program")
    parser.add_argument("--turn", type=int, default=TURN, help="rounds that a program runs in a row")
    parser.add_argument("--peers", nargs="*", default=["pfl", "flower"], help="pfl, flower; none: only our own")
    parser.add_argument("--busy", action="store_true", help="measure beside a busy process on every core")
    parser.add_argument("--json", type=Path, help="also write every single round here")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.machine()}, {os.cpu_count()} cores, {options.threads} "
        f"thread(s) a program, {options.rounds} rounds each, load of the machine before: {load:.1f}\n"
    )
    singles: dict[str, dict[str, dict[str, Any]]] = {}
    what = wanted(options.threads, options.peers, busy=options.busy)
    for name in options.setting or ("food", "small"):
        with busy_cores() if options.busy else nullcontext():
            running = measure(SETTINGS[name], what, options.rounds, CACHE, options.turn)
        print(table(SETTINGS[name], running) + "\n", flush=True)
        singles[name] = {p.name: {"seconds": p.seconds, "cpu": p.cpu, "failure": p.failure} for p in running}
    if options.json:
        options.json.write_text(json.dumps(singles, indent=1))


if __name__ == "__main__":
    main()
