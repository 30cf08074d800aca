"""The output of `polyfed status` and `polyfed jobs`. Texts may come from the network: all are made printable."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polyfed.core.errors import PolyfedError
from polyfed.core.system.log_lines import escaped
from polyfed.deploy.server.run_log import UNFINISHED
from polyfed.report.text_layout import plain_table, stacked, titled


def status_tables(told: dict[str, Any]) -> Group:
    """Return the status of a server as tables.

    Raises:
        PolyfedError: the answer is not the status of a server.
    """
    try:
        return stacked(*_parts(told))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise PolyfedError(
            f"the status cannot be read ({error!r:.200}): is the server's version another one?"
        ) from None


def _parts(told: dict[str, Any]) -> list[RenderableType]:
    from polyfed.transport.connection import DAY, RENEW, WARNED_DAYS  # only here: a plain install has no cryptography

    nodes = told["nodes"]
    head = f"polyfed {told['polyfed']}: {nodes['online']} of {nodes['registered']} devices online"
    parts: list[RenderableType] = [Text(escaped(head), "bold")]
    left = (float(told["certificate_ends"]) - float(told["time"])) / DAY
    end = f"the server's certificate ends in {left:.1f} days"
    if left <= WARNED_DAYS:
        parts.append(Text(f"{end}, and then no device connects: {RENEW}", "bold red"))
    if told.get("away"):
        away = plain_table("client", "key", left=2)
        for device in told["away"]:
            number = "in none of these runs" if device["client"] is None else str(device["client"])
            away.add_row(Text(escaped(number)), Text(escaped(str(device["key"]))))
        parts.append(titled("Devices that are away", away))
    if told.get("jobs"):
        parts.append(titled("Jobs", job_table(told["jobs"])))
    runs = plain_table("run", "state", "round", "folder", left=2)
    for run in told["runs"]:
        progress = run["progress"]
        where = f"{progress['round']} of {progress['rounds']}", progress["run"]
        runs.add_row(*(Text(escaped(str(word))) for word in (run["id"], run["state"], *where)))
    if told["runs"]:
        parts.append(titled("Latest runs", runs))
    for place, run in enumerate(told["runs"]):
        if place == 0 or run["state"] in UNFINISHED:
            parts += _run(str(run["id"]), run["progress"])
    return parts


def job_table(jobs: Sequence[dict[str, Any]]) -> Table:
    """Return a line for each job, from the facts of `Jobs.facts`."""
    table = plain_table(
        "job", "name", "state", "devices", "round", "bytes up", "bytes down", "epsilon", "no reply", "note", left=3
    )
    for job in jobs:
        table.add_row(*(Text(escaped(word)) for word in _job(job)))
    return table


def _job(job: dict[str, Any]) -> list[str]:
    devices = f"{job['enrolled']} of {job['wanted']}" if job["wanted"] else ""
    epsilon = "" if job["epsilon"] is None else f"{job['epsilon']:.3g}"
    later = job["state"] == "waiting" and job["at"] > time.time()
    note = f"not before {_moment(job['at'])}. {job['reason']}" if later else str(job["reason"])
    sizes = [f"{job[key]:,}" for key in ("bytes_up", "bytes_down")]
    round = f"{job['round']} of {job['rounds']}"
    return [
        str(job["id"]),
        str(job["name"]),
        str(job["state"]),
        devices,
        round,
        *sizes,
        epsilon,
        str(job["missing"]),
        note,
    ]


def job_facts(job: dict[str, Any]) -> Table:
    """Return all that is known about a job, a line for each fact."""
    table = plain_table("", "", left=2)
    rows = {
        "job": f"{job['id']}, {job['name']}",
        "state": f"{job['state']} since {_moment(job['changed'])}",
        "why": job["reason"],
        "purpose": job["purpose"],
        "submitted": f"{_moment(job['submitted'])} by {job['by']}",
        "not before": _moment(job["at"]) if job["at"] else "",
        "tried for": f"{job['wait'] / 3600:g} hours while too few devices answer",
        "folder": job["out"],
        "devices": f"{job['enrolled']} of {job['wanted']} enrolled" if job["wanted"] else "",
        "round": f"{job['round']} of {job['rounds']}",
        "bytes up, down": f"{job['bytes_up']:,}, {job['bytes_down']:,}",
        "epsilon": "" if job["epsilon"] is None else f"{job['epsilon']:.4g}",
        "requests without a reply": job["missing"],
    }
    for client, told in job["reasons"].items():
        rows[f"client {client}"] = f"round {told['round']}, {told['task']}: {told['reason']}"
    for name, value in rows.items():
        if value != "":
            table.add_row(Text(escaped(name), "dim"), Text(escaped(str(value))))
    return table


def _moment(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _run(identity: str, run: dict[str, Any]) -> list[RenderableType]:
    facts = plain_table("", "", left=2)
    rows = {
        "state": run["state"],
        "folder": run["run"],
        "enrolled": f"{run['enrolled']} of {run['wanted']}",
        "round": _progress(run),
        "asked in the latest round": run["cohort"],
        "bytes up, down": f"{run['bytes_up']:,}, {run['bytes_down']:,}",
        "replies missing, late": f"{run['missing_replies']}, {run['late_replies']}",
        "last event": _moment(run["updated"]),
    } | ({"error": run["error"]} if run["error"] else {})
    for name, value in rows.items():
        facts.add_row(Text(name, "dim"), Text(escaped(str(value))))
    parts: list[RenderableType] = [titled(escaped(f"Run {identity}"), facts)]
    if run["reasons"]:
        table = plain_table("client", "round", "task", "why no reply", left=4)
        for client, told in run["reasons"].items():
            table.add_row(*(Text(escaped(str(word))) for word in (client, told["round"], told["task"], told["reason"])))
        parts.append(table)
    return parts


def _progress(run: dict[str, Any]) -> str:
    if run["state"] == "enrolling":
        return "none yet: the server waits for devices to enrol"
    latest = f", the latest took {run['round_seconds']:.1f} s" if run["round_seconds"] else ""
    return f"{run['round']} of {run['rounds']}{latest}"
