"""The answers of devices in a round under secure aggregation, which a run keeps until the round has ended.

Devices reveal the masks of a request once. If a run was killed after that and began the round again, it would ask for
new masks of the same replies, and devices refuse, as two sums could tell single replies. With the answers that it has
kept, the run goes on within the request: it asks the same again, bit for bit, which devices answer.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.core.errors import PolyfedError
from polyfed.core.request import Request
from polyfed.core.system.files import sync
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.system.mapping import mapped
from polyfed.federation.secure_aggregation.messages import PublicKeys
from polyfed.federation.wire.wire_format import Packet, frames, pieces, unframed

FACTS = "facts.json"

Answers = dict[int, Packet | str]
Sent = Callable[[Collection[int]], None]


@dataclass(frozen=True)
class Exchange:
    """A request to several clients, and their answers.

    Attributes:
        number: number of the request in its round.
        asked: digest of the packets to the clients.
        opens: whether it begins a session of secure aggregation.
        masked: whether its replies are masked; the masks are revealed next.
        reached: the clients to which a packet has left.
        answers: the answers, or the reasons why there are none.
    """

    number: int
    asked: str
    opens: bool
    masked: bool
    reached: tuple[int, ...]
    answers: Answers


class KeptAnswers:
    """The answers of the present round, in a folder.

    Args:
        folder: the folder, which is made when there is something to keep.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._round = folder, -1
        self._last: Exchange | None = None

    def through(
        self, request: Request, packets: Mapping[int, Packet], sent: Sent, ask: Callable[[Sent], Any]
    ) -> Answers:
        """Return the answers that were kept of this request, or ask and note what comes.

        Args:
            request: gives the place in the run, and the type of the replies.
            packets: the packet to each client.
            sent: called with the clients to which packets leave or have left.
            ask: sends the packets, calls its argument as `sent`, and returns the answers.

        Raises:
            OSError: the answers cannot be written.
        """
        self._begin(request.round)
        asked, result, self._last = _digest_of(packets), self._read(self._place(request.number)), None
        if result is not None and result.asked == asked:
            self._last = result
            sent(result.reached)
            return {client: _of_session(one, packets[client]) for client, one in result.answers.items()}
        self._forget(request.number)
        reached = list[int]()

        def noted(clients: Collection[int]) -> None:
            reached.extend(clients)
            sent(clients)

        answers: Answers = ask(noted)
        opens, masked = request.reply is PublicKeys, request.reply.masks is not None
        self._last = Exchange(request.number, asked, opens, masked, tuple(reached), answers)
        self._write(self._last)
        return answers

    def _stopped(self, last: Exchange, *, fault: bool) -> None:
        """Forget the last answers, which may be why the run ends now. The same request is asked again then.

        If a request has failed twice, the session begins anew, unless masks were revealed: a device may have lost its
        keys.

        Args:
            last: the last answers.
            fault: whether the run ends because of an error.
        """
        number, marker = last.number, self._place(0).with_name(f"failed-{last.number}")
        if not fault or not marker.exists():
            self._forget(number)
            if fault:
                marker.touch()
            return
        kept = self._kept()
        opened = max((one.number for one in kept if one.opens and one.number <= number), default=number)
        revealed = any(one.masked for one in kept if opened < one.number < number)
        self._forget(number if revealed else opened)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Forget the answers that nobody needs any more: all if the run has come to its end, else see `_stopped`."""
        if kind is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif self._last is not None:
            self._stopped(self._last, fault=issubclass(kind, PolyfedError))

    def _place(self, number: int) -> Path:
        return self.folder / f"{self._round:06d}" / f"{number:06d}"

    def _begin(self, round: int) -> None:
        if round == self._round:
            return
        self._round = round
        for path in self.folder.glob("*"):
            if path != self._place(0).parent:
                shutil.rmtree(path, ignore_errors=True)

    def _kept(self) -> list[Exchange]:
        return [one for path in self._place(0).parent.glob("[0-9]*") if (one := self._read(path)) is not None]

    def _forget(self, number: int) -> None:
        """Forget the answers to this request and to later ones, which follow from it."""
        for path in self._place(0).parent.glob("[0-9]*"):
            if path.name >= self._place(number).name:
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, one: Exchange) -> None:
        place = self._place(one.number)
        draft = place.with_name(f".{place.name}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True, mode=0o700)
        lost = {client: answer for client, answer in one.answers.items() if isinstance(answer, str)}
        for client in one.answers.keys() - lost.keys():
            with open(draft / str(client), "wb") as file:
                file.writelines(frames(one.answers[client]))  # type: ignore[arg-type]
            sync(draft / str(client))
        facts = {"asked": one.asked, "opens": one.opens, "masked": one.masked, "reached": one.reached, "lost": lost}
        (draft / FACTS).write_text(json.dumps(facts | {"order": [*one.answers]}))
        sync(draft / FACTS)
        draft.rename(place)
        sync(place.parent)

    def _read(self, place: Path) -> Exchange | None:
        """Return what was kept in a folder, or None if there is nothing that can be read."""
        try:
            facts = parse_json((place / FACTS).read_text())
            answers: Answers = {}
            for client in facts["order"]:
                lost = facts["lost"].get(str(client))
                answers[client] = lost if lost is not None else unframed(mapped(place / str(client)))
            reached = tuple(facts["reached"])
            return Exchange(int(place.name), facts["asked"], facts["opens"], facts["masked"], reached, answers)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _digest_of(packets: Mapping[int, Packet]) -> str:
    """Return a digest of packets, without what a restart of the server changes."""
    total, known = hashlib.sha256(), dict[int, bytes]()  # one body goes to many clients
    for client, packet in packets.items():
        own = packet.header["request_id"]
        told = {name: value for name, value in packet.header.items() if name not in ("request_id", "kept")}
        place = {name: value for name, value in own.items() if name != "session"}
        total.update(json.dumps([client, place, told]).encode())
        if id(packet.body) not in known:
            body = hashlib.sha256()
            for piece in pieces(packet.body):
                body.update(piece)
            known[id(packet.body)] = body.digest()
        total.update(known[id(packet.body)])
    return total.hexdigest()


def _of_session(answer: Packet | str, packet: Packet) -> Packet | str:
    """Return an answer under the id of the request that asks the same in the present session."""
    if isinstance(answer, str):
        return answer
    asked, said = packet.header["request_id"], answer.header.get("request_id")
    if not isinstance(said, dict) or said | {"session": asked["session"]} != asked:
        return answer  # to another question, as it was before
    return Packet(answer.header | {"request_id": asked}, answer.body)
