"""Replies with noise that a device has sent, kept so that a repeated request gets the same reply bit for bit.

A resumed server repeats the requests after its last checkpoint, and sends a request again if a device was offline. If
nothing in a reply is random, a device computes the same reply again. But noise of [privacy] comes from the operating
system, so a second computation gives another reply, and two replies together reveal more than one of them. A device
therefore keeps each reply with noise until the server confirms that it will not repeat the round. The kept reply
reveals nothing new, so it costs no epsilon. Under secure aggregation, two replies with other noise would also have the
same masks, and their difference would have no mask.

A request is the same only if everything that decides the reply is the same; see `secrets_once.digest_of_use`.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polyfed.core.system.json_and_toml import parse_json
from polyfed.deploy.device.state_store import REPLY, path_of, places_of
from polyfed.engines.protocol import RUN_NAME, RequestId
from polyfed.experiment.running import checkpoint
from polyfed.federation.wire_format import Packet
from polyfed.privacy.egress.requirements import Release


@dataclass(frozen=True)
class KeptReplies:
    """The kept replies of one client in one run.

    Attributes:
        folder: folder of the client and the run.
        use: digest of everything that decides the reply to the present request.
    """

    folder: Path
    use: str

    def find(self, request_id: RequestId) -> Packet | None:
        """Return the reply that the client has sent to the same request, or None.

        Raises:
            CheckpointError: the reply on disk is damaged.
        """
        found = checkpoint.load(path_of(self.folder, request_id.place, REPLY))
        if found is None or found[1]["use"] != self.use:
            return None
        return Packet(parse_json(found[1]["header"]), found[1]["body"].numpy().tobytes())

    def keep(self, request_id: RequestId, reply: Packet, kept: int) -> None:
        """Write a reply to the disk, before it leaves. Delete replies that no request can need any more.

        Args:
            request_id: id of the request.
            reply: the reply, without a request id.
            kept: the newest round that the server will never repeat.

        Raises:
            CheckpointError: the reply cannot be written.
        """
        body = torch.frombuffer(bytearray(reply.body or b"\0"), dtype=torch.uint8)[: len(reply.body)]
        content = {"use": self.use, "header": json.dumps(reply.header), "body": body}
        checkpoint.save(path_of(self.folder, request_id.place, REPLY), request_id.round, content)
        for place in places_of(self.folder, REPLY):
            if place[0] <= kept and place < request_id.place:  # the server can always repeat its newest request
                shutil.rmtree(path_of(self.folder, place, REPLY))


def unpaid_rounds(hello: Mapping[str, Any], rounds: int, release: Release | None, folder: Path, client: int) -> int:
    """Return in how many rounds a run may still ask a device for a reply that adds to the epsilon of the device.

    The result counts every coming round, except those whose reply the device has kept. If the server lies about the
    coming rounds, it gains nothing, because the device also checks its budget before every single reply.

    Args:
        hello: the header of the request to enrol. It has the number of coming rounds and, if the run goes on, its name.
        rounds: number of rounds of the recipe.
        release: the noise of a reply, and the number of rounds that ask for one. None if the device limits no epsilon.
        folder: the state folder of the device.
        client: the client's number.
    """
    if release is None:
        return 0
    left, run = hello.get("rounds_left"), hello.get("run")
    done = max(rounds - (left if type(left) is int else 1), 0)
    last = max(release.rounds, done + 1)
    kept = set[int]()
    if isinstance(run, str) and RUN_NAME.fullmatch(run):
        kept = {place[0] for place in places_of(folder / run / f"client-{client}", REPLY)}
    return last - done - sum(done < round <= last for round in kept)
