"""Seconds per round of federated averaging: a bare PyTorch loop, polyfed's two engines, pfl and Flower.

Every program is a process of its own that waits between its rounds; rounds of different programs alternate, so that
all run under the same conditions. Figures are medians over the repetitions, with quartiles. A framework that cannot be
installed or fails is listed as such, without a figure.

    python benchmarks/speed.py [--setting food] [--threads 2] [--rounds 15] [--json FILE]
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from environments import PEERS, Unavailable, python_of
from settings import SETTINGS, Setting, arrays
from worker import ANSWER

HERE = Path(__file__).parent
BARE = "bare loop"

REST = 0.05
"""Seconds between two rounds: the OpenMP threads of a program keep spinning for some milliseconds after its last
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


def programs(setting: Setting, cache: Path, threads: int, only: Sequence[str], logs: Path) -> list[Program]:
    """Start all programs, one after the other; each is ready when this returns."""
    wanted: list[tuple[str, list[str]]] = [
        (BARE, [sys.executable, "run_bare.py"]),
        ("polyfed sequential", [sys.executable, "run_polyfed.py", "sequential"]),
        ("polyfed vectorised", [sys.executable, "run_polyfed.py", "vectorised"]),
    ]
    found: list[Program] = []
    for peer in PEERS:
        if only and peer.name.split()[0].lower() not in only:
            continue
        try:
            wanted.append((peer.name, [str(python_of(peer, cache)), peer.script]))
        except Unavailable as reason:
            found.append(Program(peer.name, failure=f"not available here: {reason}"))
    for name, (python, script, *rest) in wanted:
        arguments = [python, str(HERE / script), setting.name, str(cache / "data"), str(threads), *rest]
        program = start(name, arguments, threads, logs / f"{name}.log")
        ready = program.ask()
        if ready is not None:
            assert ready["parameters"] == setting.num_parameters, f"{name} has {ready['parameters']} parameters"
        found.append(program)
    return found


def measure(setting: Setting, options: argparse.Namespace, cache: Path) -> list[Program]:
    """Run rounds in turns; the first two of each program are a warm-up and are not counted."""
    arrays(setting, cache / "data")
    with tempfile.TemporaryDirectory() as logs:
        running = programs(setting, cache, options.threads, options.peers, Path(logs))
        try:
            for number in range(2 + options.rounds):
                for program in running:
                    program.round(count=number >= 2)
                    time.sleep(REST)
        finally:
            for program in running:
                program.stop()
    return running


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
        # the ratio of neighbours in time, then the median: a slow minute of the machine cancels out
        ratio = statistics.median(b / own for b, own in zip(bare.seconds, program.seconds, strict=False))
        own = 1e3 * statistics.median(program.cpu)
        fastest = 1e3 * min(program.seconds)
        lines.append(
            f"| {program.name} | {middle:.1f} ({low:.1f} to {high:.1f}) | {fastest:.1f} | {own:.1f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=list(SETTINGS), help="default: all")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every program; default: all cores")
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds of each program")
    parser.add_argument("--peers", nargs="*", default=["pfl", "flower"], help="pfl, flower; none: only our own")
    parser.add_argument("--json", type=Path, help="also write every single round here")
    options = parser.parse_args()
    if not options.peers:
        options.peers = ["none"]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "polyfed-benchmarks"
    load = os.getloadavg()[0]
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.machine()}, {os.cpu_count()} cores, {options.threads} "
        f"thread(s) a program, {options.rounds} rounds each, load of the machine before: {load:.1f}\n"
    )
    singles: dict[str, dict[str, dict[str, Any]]] = {}
    for name in options.setting or SETTINGS:
        running = measure(SETTINGS[name], options, cache)
        print(table(SETTINGS[name], running) + "\n", flush=True)
        singles[name] = {p.name: {"seconds": p.seconds, "cpu": p.cpu, "failure": p.failure} for p in running}
    if options.json:
        options.json.write_text(json.dumps(singles, indent=1))


if __name__ == "__main__":
    main()
