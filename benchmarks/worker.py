"""How a measured program talks to the benchmark: a line on stdin requests a round, a line on stdout reports it.

Every program waits between its rounds, so that rounds of different programs alternate and a slow minute of the machine
affects all of them equally.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

ANSWER = "@round "
"""Marks reports among other output of a framework."""


def say(**facts: Any) -> None:
    """Print one report."""
    print(ANSWER + json.dumps(facts), file=sys.__stdout__, flush=True)


def wait() -> bool:
    """Wait until the benchmark requests a round; False: there are no more rounds."""
    return sys.stdin.readline().strip() == "go"


def cpu_seconds() -> float:
    """Processor time of this process over all threads, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(round_: Callable[[], None], **facts: Any) -> None:
    """Report `facts` when ready, then run and time a round on each request."""
    say(**facts)
    while wait():
        started, cpu = time.perf_counter(), cpu_seconds()
        round_()
        say(seconds=time.perf_counter() - started, cpu=cpu_seconds() - cpu)
