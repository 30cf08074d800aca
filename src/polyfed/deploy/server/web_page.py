"""The web page of a server: its devices and jobs, for a browser on this machine. It only reads.

Who opens it must know the token of the status port, as `http://127.0.0.1:PORT/?token=TOKEN`. Names, reasons and logs
are untrusted text, which Jinja escapes. The page has no script, and the browser may load nothing else from it.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from markupsafe import Markup

from polyfed.core.system.log_lines import escaped_lines
from polyfed.deploy.server.jobs import LOG, Jobs
from polyfed.report.pages.template import asset, environment

END_OF_LOG = 2**14
"""Bytes of the end of each log that the page shows."""


class WebPage:
    """Makes the page.

    Args:
        jobs: the jobs of the server.
        status: returns what `status_of` does.
        token: who does not send it gets nothing.
    """

    def __init__(self, jobs: Jobs, status: Callable[[], Mapping[str, Any]], token: str) -> None:
        self.jobs, self.status, self._digest = jobs, status, _digest(token)
        self._template = environment().get_template("server.html")

    def answer(self, query: bytes) -> tuple[int, str, bytes]:
        """Return HTTP status, content type and body of the answer to a request with this query."""
        given = parse_qs(query.decode("latin-1"), max_num_fields=10).get("token", [])
        if len(given) != 1 or not hmac.compare_digest(_digest(given[0]), self._digest):
            return (
                401,
                "text/plain",
                b"polyfed: open /?token=TOKEN, with the token in status.token of the credentials\n",
            )
        told = self.status()
        logs = {job["id"]: self._log(int(job["id"])) for job in told["jobs"]}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        text = self._template.render(told=told, logs=logs, now=now, style=Markup(asset("report.css")))
        return 200, "text/html; charset=utf-8", text.encode()

    def _log(self, number: int) -> str:
        try:
            with open(self.jobs.place(number) / LOG, "rb") as file:
                file.seek(max(file.seek(0, 2) - END_OF_LOG, 0))
                return escaped_lines(file.read(END_OF_LOG).decode(errors="replace"))
        except OSError:  # it has not started
            return ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
