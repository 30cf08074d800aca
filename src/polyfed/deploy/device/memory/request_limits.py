"""Limits on how often a server asks: `max_rounds`, `max_requests` and the budgets per day of the device's [limits].

Also what stays the same in all requests of a run: its purpose.
"""

import json
import time

from polyfed.core.errors import EgressError
from polyfed.core.request import Request
from polyfed.deploy.device.memory.store import STORE, Memory
from polyfed.privacy.egress.limits import Limits

DAY = 24 * 3600.0
"""Length in seconds of the window of the limits per day. A calendar day would allow twice as many around midnight."""


def admit(memory: Memory, limits: Limits, request: Request) -> None:
    """Count a request and its run before it runs, and refuse the request if it exceeds a limit.

    Raises:
        EgressError: the request exceeds a limit.
    """
    limits.refuse("max_rounds", request.round, memory.client, request.name)
    if limits.max_requests is not None:
        of = (memory.run, memory.client, request.round)
        found = memory.rows.execute("SELECT times FROM requests WHERE run = ? AND client = ? AND round = ?", of)
        number = 1 + (found.fetchone() or (0,))[0]
        memory.rows.execute("INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?)", (*of, number))
        limits.refuse("max_requests", number, memory.client, request.name)
    admit_today(memory, limits, "max_runs_per_day", request.name)
    admit_today(memory, limits, "max_requests_per_day", request.name)


def admit_purpose(memory: Memory, purpose: str) -> None:
    """Note the purpose of a run in its first request, and refuse a request that names another one.

    Else a server could continue a run for one purpose, with the local states that it left here, for another one.

    Raises:
        EgressError: the run began for another purpose.
    """
    of = (memory.run, memory.client)
    memory.rows.execute("INSERT OR IGNORE INTO purposes VALUES (?, ?, ?)", (*of, purpose))
    (begun,) = memory.rows.execute("SELECT purpose FROM purposes WHERE run = ? AND client = ?", of).fetchone()
    if begun != purpose:
        raise EgressError(
            f"client {memory.client} refused the recipe: this run began with [deployment] purpose = {json.dumps(begun)}"
            f", and now the recipe says {json.dumps(purpose)}. A run keeps its purpose: begin another run"
        )


def admit_today(memory: Memory, limits: Limits, budget: str, task: str) -> None:
    """Count a use of a budget, and refuse the request if more than allowed lie within the last 24 hours.

    Args:
        memory: what the device remembers. The budget holds over all runs.
        limits: the limits of the device.
        budget: a limit, such as `max_requests_per_day`. `max_runs_per_day` counts each run once.
        task: the task, for the message.

    Raises:
        EgressError: the budget is spent.
    """
    if limits.value(budget) is None:
        return
    rows = memory.rows
    last, clock = rows.execute("SELECT max(at) FROM uses").fetchone()[0] or 0.0, time.time()
    now = max(clock, last)  # a clock that is set back frees nothing
    rows.execute("DELETE FROM uses WHERE at <= ?", (now - DAY,))
    if budget == "max_runs_per_day":
        begun = rows.execute("UPDATE uses SET at = ? WHERE budget = ? AND name = ?", (now, budget, memory.run))
        if begun.rowcount:
            return
    count = rows.execute("SELECT count(*) FROM uses WHERE budget = ?", (budget,)).fetchone()[0]
    if error := limits.refusal(budget, count + 1, memory.client, task):
        if last > clock + DAY:
            error.add_note(f"{STORE} holds a use {last - clock:.0f} s in the future. Check the clock")
        raise error
    rows.execute("INSERT INTO uses VALUES (?, ?, ?)", (budget, now, memory.run))
