"""The web page of a server: what it shows to whom, as text and in a real browser (slow)."""

from collections.abc import Iterator
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import uvicorn

from browser import Browser, browser, needs_browser
from engines.test_jobs import Records, until
from polyfed.deploy.processes import HOST, free_ports
from polyfed.deploy.server.jobs import WAITING
from polyfed.deploy.server.monitor import ServerMonitor, status_of
from polyfed.deploy.server.run_log import RunStatus
from polyfed.deploy.server.web_page import WebPage


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


LONG = "long" * 200
HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(1)>"&\x1b[2J'


@pytest.fixture
def page(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """The port on loopback and the token of a server with a hostile job and one with long words."""
    jobs, token = Records(tmp_path), "t" * 64
    jobs.put(name=HOSTILE, purpose=HOSTILE)
    jobs.change(1, WAITING, reason=HOSTILE, run="7")
    jobs.put(name=LONG, purpose=LONG)
    jobs.change(2, WAITING, reason=LONG, run="8")
    status = RunStatus(tmp_path / "runs" / "7", tmp_path / "run-1")
    status("client-missing", round=1, task="update", client=1, reason=HOSTILE)
    status = RunStatus(tmp_path / "runs" / "8", tmp_path / "run-2")
    status("client-missing", round=1, task="update", client=1, reason=LONG)
    (jobs.place(1) / "log").write_text("x" * 2**15 + f"\n{HOSTILE}\n")

    def facts() -> dict[str, Any]:
        shown = [jobs.facts(job) for job in jobs.all()]
        return {"nodes": {"registered": 3, "online": 2}, "away": [HOSTILE, LONG], "runs": ["7", "8"], "jobs": shown}

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


# in a browser

DRAWN = """
Object.fromEntries([...document.querySelectorAll("table")].map(table =>
    [table.id, [...table.rows].map(row => [...row.cells].map(cell => cell.innerText.trim()))]))
"""
"""The texts of the tables by id, as they are drawn."""

TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

SCREENS = {"phone": 375, "desktop": 1280}


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path) as made:
        yield made


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("screen", SCREENS)
def test_a_browser_shows_the_page_runs_nothing_and_loads_nothing_else(
    screen: str, page: tuple[int, str], window: Browser
) -> None:
    port, token = page
    address = f"http://{HOST}:{port}/?token={token}"
    window.open(address, SCREENS[screen])
    assert window.value(TOO_WIDE) <= 0, "nobody has to scroll to the side"
    tables = window.value(DRAWN)
    assert tables["away"] == [["client", "key"], ["", HOSTILE], ["", LONG]]
    assert [row[:4] for row in tables["jobs"]] == [
        ["job", "name", "purpose", "state"],
        ["2", LONG, LONG, "waiting"],
        ["1", HOSTILE, HOSTILE, "waiting"],
    ]
    assert [row[-1] for row in tables["jobs"]] == ["why", LONG, HOSTILE]
    refusals = window.value("[...document.querySelectorAll('li')].map(one => one.innerText)")
    assert refusals == [f"client 1, round 1, update: {why}" for why in (LONG, HOSTILE)]
    seen = "document.querySelector('#log-1').checkVisibility()"
    assert not window.value(seen), "the log is folded"
    window.click("details:has(#log-1) summary")
    assert window.value(seen)
    assert window.value(TOO_WIDE) <= 0
    assert not window.told("Page.javascriptDialogOpening"), "no foreign script has run"
    assert not window.told("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"), "no complaint"
    assert {one["request"]["url"] for one in window.told("Network.requestWillBeSent")} == {address}
