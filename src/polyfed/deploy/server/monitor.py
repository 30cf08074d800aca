"""Health, metrics and status of a server, for this machine and for other machines.

Two web applications serve this information. The first listens on loopback, so that only this machine can reach it, and
needs no password. The second serves other machines over TLS, and every request needs a token. Both applications run in
the server's process, which holds no PyTorch. Neither listens on the port that devices use.
"""

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import RecipeError
from polyfed.core.system.files import MEMBERS, SIGNED
from polyfed.core.system.json_and_toml import parse_json
from polyfed.deploy.metrics import CONTENT_TYPE, installed, registry
from polyfed.deploy.server.jobs import STATES as JOB_STATES
from polyfed.deploy.server.run_log import UNFINISHED, read_status

TOKEN = "status.token"
"""The file in the folder of the credentials that holds the token for `polyfed status`."""

RUN_NUMBERS = {
    "round": "Rounds of the run that are done.",
    "rounds": "Rounds that the run is to have.",
    "enrolled": "Clients that enrolled in the run.",
    "wanted": "Clients that the run waits for.",
    "cohort": "Clients asked in the latest round.",
    "round_seconds": "Duration of the latest round in seconds.",
}
"""Numbers in the status of a run that become gauges, `polyfed_run_<name>`, with the run's id as the label `run`."""

RUN_COUNTS = {
    "bytes_up": "Bytes that clients sent since the server of the run started.",
    "bytes_down": "Bytes sent to clients since the server of the run started.",
    "missing_replies": "Times that a client gave no usable reply.",
    "late_replies": "Replies that came after their request had been closed.",
}
"""Numbers in the status of a run that become counters, `polyfed_run_<name>_total`, with the same label."""

RUN_STATES = (*UNFINISHED, "finished", "failed")

JOB_NUMBERS = {
    "round": "Rounds of the job that are done.",
    "rounds": "Rounds that the job is to have.",
    "enrolled": "Clients that enrolled in the latest start of the job.",
    "wanted": "Clients that the job waits for.",
    "epsilon": "Epsilon of the job so far; absent without differential privacy.",
}
"""Facts of a job (`Jobs.facts`) that become gauges, `polyfed_job_<name>`. Their label is `id`: Prometheus gives the
label `job` to every series."""

JOB_COUNTS = {
    "bytes_up": "Bytes that clients sent in all starts of the job.",
    "bytes_down": "Bytes sent to clients in all starts of the job.",
    "missing": "Requests of the job without a usable reply.",
    "starts": "Times that the job's process was started.",
}
"""Facts of a job that become counters, `polyfed_job_<name>_total`, with the same label."""

SECURITY = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; "
    "form-action 'none'; base-uri 'none'",
    "referrer-policy": "no-referrer",  # the address holds the token
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
}
"""The headers of a page for browsers."""

Facts = Mapping[str, Any]

Web = Callable[[bytes], tuple[int, str, bytes]]


def token_at(path: Path) -> str:
    """Read the token for `polyfed status`. If the file does not exist, make a random token and write the file.

    Raises:
        RecipeError: the file holds no token, or everybody on this machine can read the file.
    """
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    token = read_token(path)
    if path.stat().st_mode & 0o007:
        raise RecipeError(f"everybody on this machine can read {path}. Write: chmod 640 {path}")
    return token


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        RecipeError: the file is missing or holds no token of at least 32 printable characters.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the token {path} cannot be read ({error}); copy {TOKEN} from the server") from None
    if len(token) < 32 or not token.isprintable() or " " in token:
        raise RecipeError(f"{path} holds no token: remove it, and `polyfed server` writes a new one")
    return token


def status_of(link: Facts, statuses: Path) -> dict[str, Any]:
    """Return the status of a server and its latest runs.

    Args:
        link: `nodes`, `away`, `certificate_ends`, `runs` (names of the latest runs), and as far as there are jobs
            `jobs` (facts of some) and `job_states` (number of jobs in each state) of the server. In the result, each
            device in `away` has the fingerprint of its `key` and, if it has taken part in one of the runs, its number
            as `client`. Each run has `id`, `state` and `progress`.
        statuses: the folder with the statuses of the runs; see `polyfed.deploy.server.run_log`.
    """
    told = {name: read_status(statuses / name) for name in link.get("runs", ())}
    runs = [{"id": name, "state": one["state"], "progress": one} for name, one in told.items() if one is not None]
    numbers: dict[str, str] = {}
    for run in reversed(runs):  # a device may have another number in a newer run
        numbers |= _clients_of(Path(str(run["progress"].get("run", ""))))
    away = [{"client": numbers.get(key), "key": key} for key in link.get("away", ())]
    return {"time": time.time(), **installed(), **link, "away": away, "runs": runs}


def _clients_of(folder: Path) -> dict[str, str]:
    """Return the client number of each device of a run folder, by the fingerprint of its key; see `Membership`.

    The result is empty if the folder holds no readable file about its clients.
    """
    try:
        told = parse_json((folder / MEMBERS).read_text())
        return {device: number for part in ("clients", SIGNED) for number, device in told.get(part, {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def metrics_of(status: Facts) -> bytes:
    """Return the status as Prometheus metrics, without error messages, paths and names."""
    from prometheus_client import Counter, Gauge, generate_latest

    made, nodes = registry(), status["nodes"]
    for name, text in (("registered", "Devices whose public key is registered."), ("online", "Devices connected.")):
        Gauge(f"polyfed_nodes_{name}", text, registry=made).set(float(nodes[name]))
    ends = Gauge("polyfed_certificate_ends_timestamp_seconds", "When the server's certificate ends.", registry=made)
    ends.set(float(status["certificate_ends"]))
    label = ["run"]
    gauges = {name: Gauge(f"polyfed_run_{name}", text, label, registry=made) for name, text in RUN_NUMBERS.items()}
    counts = {name: Counter(f"polyfed_run_{name}", text, label, registry=made) for name, text in RUN_COUNTS.items()}
    states = {
        name: Gauge(f"polyfed_run_{name}", f"1 if the run is {name}.", label, registry=made) for name in RUN_STATES
    }
    updated = Gauge("polyfed_run_updated_timestamp_seconds", "When the run last did something.", label, registry=made)
    for run in status["runs"]:
        identity, progress = str(run["id"]), run["progress"]
        updated.labels(identity).set(float(progress.get("updated", 0.0)))
        for name, state in states.items():
            state.labels(identity).set(float(run["state"] == name))
        for name, gauge in gauges.items():
            gauge.labels(identity).set(float(progress.get(name, 0)))
        for name, count in counts.items():
            count.labels(identity).inc(float(progress.get(name, 0)))
    _add_jobs(made, status)
    return generate_latest(made)


def _add_jobs(made: Any, status: Facts) -> None:
    """Add the metrics of jobs. Their labels are bounded: states, and the numbers of the jobs that the status shows."""
    from prometheus_client import Counter, Gauge

    held = Gauge("polyfed_jobs", "Jobs in this state.", ["state"], registry=made)
    for state, count in status.get("job_states", {}).items():
        held.labels(state).set(float(count))
    gauges = {name: Gauge(f"polyfed_job_{name}", text, ["id"], registry=made) for name, text in JOB_NUMBERS.items()}
    counts = {name: Counter(f"polyfed_job_{name}", text, ["id"], registry=made) for name, text in JOB_COUNTS.items()}
    states = Gauge("polyfed_job_state", "1 for the state of the job, 0 for the others.", ["id", "state"], registry=made)
    changed = Gauge("polyfed_job_changed_timestamp_seconds", "When its state changed.", ["id"], registry=made)
    for job in status.get("jobs", ()):
        identity = str(job["id"])
        changed.labels(identity).set(float(job["changed"]))
        for state in JOB_STATES:
            states.labels(identity, state).set(float(job["state"] == state))
        for name, gauge in gauges.items():
            if job[name] is not None:
                gauge.labels(identity).set(float(job[name]))
        for name, count in counts.items():
            count.labels(identity).inc(float(job[name]))


class ServerMonitor:
    """A web application with the pages `/health`, `/metrics` and `/status`.

    Args:
        link: a function that returns the server's devices and runs.
        statuses: the folder with the statuses of the runs.
        token: if not empty, every request must carry this token in its header `Authorization: Bearer TOKEN`. The answer
            to other requests reveals nothing, not even which pages exist. If the token is empty, there is no page
            `/status`.
        web: answers a request for the page `/` with this query, if there is such a page; see `WebPage`.
    """

    def __init__(self, link: Callable[[], Facts], statuses: Path, token: str = "", web: Web | None = None) -> None:
        self.link, self.statuses, self.web = link, statuses, web
        self._digest = _digest(token.encode()) if token else b""

    async def __call__(self, scope: Facts, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        words = scope["method"], scope["path"], scope["headers"], scope.get("query_string", b"")
        status, kind, body = await asyncio.to_thread(self.page, *words)
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        if kind.startswith("text/html"):
            headers += [(name.encode(), value.encode()) for name, value in SECURITY.items()]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def page(self, method: str, path: str, headers: Any, query: bytes = b"") -> tuple[int, str, bytes]:
        """Return HTTP status, content type and body of a page."""
        if self._digest and not self._knows(headers):
            return 401, "text/plain", b"polyfed: a token is needed\n"
        pages = {"/health": self._health, "/metrics": self._metrics} | (
            {"/status": self._status} if self._digest else {}
        )
        shown = [*pages, "/"] if self.web else [*pages]
        if path not in shown or method != "GET":
            return 404, "text/plain", f"polyfed: here are {', '.join(shown)}\n".encode()
        try:
            if path == "/" and self.web is not None:
                return self.web(query)
            return 200, *pages[path]()
        except Exception as error:  # any error of the server's queue
            return 503, "application/json", json.dumps({"status": "failing", "error": type(error).__name__}).encode()

    def _knows(self, headers: Any) -> bool:
        """Return whether a request carries the token. The time of the comparison does not depend on the token."""
        given = [value for name, value in headers if name.lower() == b"authorization"]
        scheme, _, token = (given[0] if len(given) == 1 else b"").partition(b" ")
        return hmac.compare_digest(_digest(token), self._digest) and scheme.lower() == b"bearer"

    def _health(self) -> tuple[str, bytes]:
        self.link()
        return "application/json", b'{"status": "ok"}'

    def _metrics(self) -> tuple[str, bytes]:
        return CONTENT_TYPE, metrics_of(status_of(self.link(), self.statuses))

    def _status(self) -> tuple[str, bytes]:
        return "application/json", json.dumps(status_of(self.link(), self.statuses)).encode()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
