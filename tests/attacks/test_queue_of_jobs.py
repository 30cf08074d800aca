"""The queue of jobs: other users of the server's machine, damaged records, and what a cancelled job costs devices."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import uvicorn

from engines.own_devices import own_devices
from engines.test_jobs import Records, until
from engines.test_own_modes import method
from polyfed.core.errors import RecipeError
from polyfed.deploy.device import tasks
from polyfed.deploy.processes import HOST, free_ports
from polyfed.deploy.server.job_process import work
from polyfed.deploy.server.jobs import CANCELLED, RECORD, RUNNING, WAITING, Jobs
from polyfed.deploy.server.monitor import ServerMonitor, status_of
from polyfed.deploy.server.queued_run import enqueue
from polyfed.deploy.server.run_log import STATUS_FOLDER, RunStatus
from polyfed.deploy.server.web_page import WebPage

NOBODY = 65534
DEEDS: dict[str, Callable[[Path], object]] = {
    "sees": lambda folder: Jobs(folder).all(),
    "lists": lambda folder: list((folder / "jobs").iterdir()),
    "reads": lambda folder: (folder / "jobs" / "1" / RECORD).read_text(),
    "cancels": lambda folder: Jobs(folder).order(1, "cancel"),
    "submits": lambda folder: (folder / "jobs" / "2").mkdir(),
}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("deed", DEEDS)
def test_another_user_of_the_machine_neither_submits_nor_cancels_nor_sees_a_job(deed: str, open_folder: Path) -> None:
    jobs = Records(open_folder)
    jobs.put()
    jobs.folder.chmod(0o777)  # as a copy may have it
    Jobs(open_folder)
    os.seteuid(NOBODY)
    try:
        with pytest.raises((PermissionError, RecipeError)):
            DEEDS[deed](open_folder)
    finally:
        os.seteuid(0)
    assert jobs.states() == [WAITING]


def broken(told: dict[str, Any]) -> list[str]:
    edits: list[dict[str, Any]] = [
        {"id": 2},
        {"id": "1"},
        {"state": "owned"},
        {"out": ["a"]},
        {"at": "soon"},
        {"more": 1},
        {"starts": None},
    ]
    return [json.dumps(told | edit) for edit in edits] + ["", "[]", "null", "[" * 10**5, '{"id": 1}', "1" * 10**5]


def test_a_record_of_any_form_stops_neither_the_server_nor_the_other_jobs(tmp_path: Path) -> None:
    jobs = Records(tmp_path)
    jobs.put()
    jobs.put()
    path, supervisor = jobs.place(1) / RECORD, jobs.supervisor(0)
    for text in broken(json.loads(path.read_text())):
        path.write_text(text)
        supervisor.look()
        assert (jobs.damaged(), [job.id for job in jobs.all()]) == ([1], [2]), text[:80]


@pytest.mark.parametrize("order", ["pause", "cancel"])
def test_a_cancelled_job_costs_devices_nothing_more(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Both devices are in the middle of a task, which nobody waits for any more; none gets another one."""
    monkeypatch.setenv(STATUS_FOLDER, "")
    begun, go, answer, count = Event(), Event(), tasks.answer, [0]

    def slow(task: Any) -> dict[str, Any]:
        count[0] += 1
        if count[0] > 3:  # all have enrolled
            begun.set()
            go.wait(60)
        return answer(task)

    monkeypatch.setattr(tasks, "answer", slow)
    with own_devices(tmp_path, method("fedavg")) as federation:
        jobs, queue = Jobs(federation.credentials), federation.server.hub.queue
        enqueue(federation.app, federation.credentials, {}, 0.0, 3600.0)
        jobs.change(1, WAITING, state=RUNNING, starts=1)

        def cancel() -> None:
            assert begun.wait(60)
            assert queue.wanted()
            jobs.order(1, order)

        thread = Thread(target=cancel)
        thread.start()
        work(jobs, 1, 1)
        thread.join()
        asked = count[0]
        assert not queue.wanted(), "the tasks that waited are deleted"
        run = jobs.get(1).run
        assert not [path for path in queue.folder.iterdir() if path.name.startswith(run)]
        go.set()
        until(lambda: "nobody waits for its reply any more" in capsys.readouterr().err)
    assert count[0] <= asked + 2, "a device that waited for its turn in this process finds nobody"
    assert (jobs.get(1).state == CANCELLED) == (order == "cancel")
    assert not [path for path in queue.folder.iterdir() if path.name.startswith(run)], "late replies leave nothing"


class Reader(HTMLParser):
    """The texts and tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.texts, self.attributes = list[str](), list[str](), list[tuple[str, str | None]]()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(1)>"&\x1b[2J'


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """The port on loopback and the token of a server with a hostile job."""
    jobs, token = Records(tmp_path), "t" * 64
    jobs.put(name=HOSTILE, purpose=HOSTILE)
    jobs.change(1, WAITING, reason=HOSTILE, run="7")
    status = RunStatus(tmp_path / "runs" / "7", tmp_path / "run-1")
    status("client-missing", round=1, task="update", client=1, reason=HOSTILE)
    (jobs.place(1) / "log").write_text("x" * 2**15 + f"\n{HOSTILE}\n")

    def facts() -> dict[str, Any]:
        shown = [jobs.facts(job) for job in jobs.all()]
        return {"nodes": {"registered": 3, "online": 2}, "away": [HOSTILE], "runs": ["7"], "jobs": shown}

    web = WebPage(jobs, lambda: status_of(facts(), tmp_path / "runs"), token)
    monitor = ServerMonitor(facts, tmp_path / "runs", web=web.answer)
    (port,) = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(monitor, host=HOST, port=port, lifespan="off", ws="none", log_config=None))
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield port, token
    server.should_exit = True
    thread.join(30)


def got(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
    connection = HTTPConnection(HOST, port, timeout=60)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


def test_the_page_shows_jobs_as_text_to_those_who_have_the_token(page: tuple[int, str]) -> None:
    port, token = page
    status, headers, body = got(port, f"/?token={token}")
    assert status == 200
    seen = Reader(body)
    assert not {"script", "img", "iframe", "form", "link"} & set(seen.tags)
    assert not [name for name, value in seen.attributes if name.startswith("on") or name in ("src", "href")]
    text = " ".join(seen.texts)
    assert "2 of 3 devices online" in text
    assert text.count("<script>alert(1)</script><img src=x onerror=alert(1)>") == 6, "escaped, and shown as it is"
    assert "\x1b" not in seen.texts[-3:]
    assert len(body) < 2**16, "only the end of a log"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert (headers["referrer-policy"], headers["cache-control"]) == ("no-referrer", "no-store")


def test_without_the_token_the_page_says_nothing_and_nothing_can_be_changed(page: tuple[int, str]) -> None:
    port, token = page
    many = "&".join(["a=1"] * 50)
    for query in (
        "",
        "?token=",
        f"?token={token[:-1]}",
        f"?token={token}&token={token}",
        f"?token={token}x",
        f"?{many}",
    ):
        status, _, body = got(port, f"/{query}")
        assert (status in (401, 503), "alert" in body, "devices" in body) == (True, False, False), query
    for how in ("POST", "PUT", "DELETE", "PATCH"):
        assert got(port, f"/?token={token}", how)[0] == 404
    for path in ("/health", "/metrics"):
        assert "alert" not in got(port, path)[2]
