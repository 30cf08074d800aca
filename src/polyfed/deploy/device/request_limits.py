"""Limits on the number of a server's requests: `max_rounds` and `max_requests` of the device's [limits]."""

import json
from pathlib import Path

from polyfed.core.errors import EgressError
from polyfed.core.request import Request
from polyfed.core.system.files import read_notes, replace_text
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.privacy.egress.limits import Limits

RELEASES = "private-releases.json"
"""File with the requests that the client has answered with noise of its own, and how often."""

REQUESTS = "requests.json"
"""File with the number of requests in each round, next to the local state. So restarts do not reset the number."""


def admit(limits: Limits, folder: Path, request: Request, client: int) -> None:
    """Count a request before it runs, and refuse the request if it exceeds a limit.

    Args:
        limits: the limits of the device.
        folder: the folder of the client and the run.
        request: the request.
        client: the client's number.

    Raises:
        EgressError: the request exceeds a limit.
        CheckpointError: the count on disk is damaged.
    """
    limits.refuse("max_rounds", request.round, client, request.name)
    if limits.max_requests is None:
        return
    path = folder / REQUESTS
    counts = read_notes(path, int)
    number = counts.get(str(request.round), 0) + 1
    limits.refuse("max_requests", number, client, request.name)
    replace_text(path, json.dumps(counts | {str(request.round): number}))


def admit_release(mechanism: Mechanism | None, folder: Path, request: Request, client: int) -> None:
    """Count the replies that this client protects with its own noise, and refuse replies beyond what epsilon allows.

    If the noise comes from the operating system, a repeated request counts again, because its reply has new noise.

    Args:
        mechanism: the mechanism of [privacy], or None.
        folder: the folder of the client and the run.
        request: the request.
        client: the client's number.

    Raises:
        EgressError: the run has used up its privacy budget on this client.
        CheckpointError: the count on disk is damaged.
    """
    if mechanism is None or mechanism.releases is None or request.name not in mechanism.protected:
        return
    path = folder / RELEASES
    counts = read_notes(path, int)
    this = f"{request.round} {request.number} {request.turn}"
    counts[this] = counts.get(this, 0) + 1 if mechanism.secure else 1
    if request.round > mechanism.releases or sum(counts.values()) > mechanism.releases:
        raise EgressError(
            f"client {client} refused task {request.name}: the run's [privacy] allows {mechanism.releases} replies "
            "with noise of this client, and they have been sent. More would raise epsilon: begin a new run"
        )
    replace_text(path, json.dumps(counts))
