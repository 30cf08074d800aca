"""What `polyfed status` shows about devices that are away and about a run that has not begun."""

import json
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polyfed.cli.printing.status_tables import status_tables
from polyfed.deploy.server.jobs import Jobs
from polyfed.deploy.server.membership import MEMBERS
from polyfed.deploy.server.monitor import metrics_of, status_of
from polyfed.deploy.server.run_log import RunStatus

RUNS = ["8", "7", "6"]
LINK: dict[str, Any] = {
    "nodes": {"registered": 3, "online": 1},
    "certificate_ends": 2e9,
    "away": ["SHA256:one", "SHA256:two"],
    "runs": RUNS,
}


def shown(folder: Path, link: dict[str, Any] = LINK) -> str:
    console = Console(width=200, record=True, file=StringIO())
    console.print(status_tables(status_of(link, folder)))
    return " ".join(console.export_text().split())


def test_devices_that_are_away_have_their_numbers_and_keys(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "Devices that are away" in shown(tmp_path), "before any run"
    run.mkdir()
    status = RunStatus(tmp_path / "7", run)
    (run / MEMBERS).write_text(json.dumps({"session": 1, "clients": {"0": "SHA256:here", "1": "SHA256:one"}}))
    told = shown(tmp_path)
    assert "1 of 3 devices online" in told
    assert "1 SHA256:one" in told
    assert "in none of these runs SHA256:two" in told
    assert "SHA256:here" not in told
    assert b"SHA256" not in metrics_of(status_of(LINK, tmp_path))
    jobs = Jobs(tmp_path)
    job = jobs.add([], name="toy\x1b[2J", purpose="", rounds=4, out=str(run), data="", wait=60.0)
    late = jobs.change(job.id, "waiting", at=time.time() + 3600, reason="tries again: 1 of 3", run="7")
    assert late is not None
    link = LINK | {"jobs": [jobs.facts(late)]}
    assert r"1 toy\x1b[2J waiting 0 of 4" in shown(tmp_path, link)
    assert "tries again: 1 of 3" in shown(tmp_path, link)
    (run / MEMBERS).write_text("{")
    assert "in none of these runs SHA256:one" in shown(tmp_path)
    assert "none yet: the server waits for devices to enrol" in told
    assert "0 of 0," not in told
    status("run-started", rounds=5, first_round=1)
    assert "0 of 5" in shown(tmp_path)
    assert "took" not in shown(tmp_path)
    status("round-finished", row={"round": 1, "cohort": [0], "seconds": {"train": 2.0}, "bytes_up": 1, "bytes_down": 1})
    assert "1 of 5, the latest took 2.0 s" in shown(tmp_path)


def test_a_certificate_that_ends_soon_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "certificate" not in shown(tmp_path)
    assert b"polyfed_certificate_ends_timestamp_seconds 2e+09" in metrics_of(status_of(LINK, tmp_path))
    monkeypatch.setitem(LINK, "certificate_ends", time.time() + 6.5 * 24 * 3600)
    assert "certificate ends in 6.5 days" in shown(tmp_path)
