"""Receipts of devices that were away when their run ended: they sign when they come back.

For each such run the credentials have a file `receipts/<run>.json`, which says who has not signed. The process of
`polyfed server` looks who of them is online and starts another one, `python -m polyfed.deploy.server.late_receipts
CREDENTIALS RUN`, which asks them as at the end of the run and adds their receipts to those in the folder of the run.
After `KEPT_SECONDS` nobody is asked any more, and a line of the log says so.
"""

import json
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from polyfed.core.errors import PolyfedError, RecipeError, command
from polyfed.core.system.files import MEMBERS, RECEIPTS, replace_text
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.system.log_lines import logger_of
from polyfed.experiment.running.lock import alone_in
from polyfed.transport.queue import Queue
from polyfed.transport.tokens import Register

FOLDER = "receipts"
"""The folder in the credentials of a server with a file for each run whose receipts are not all there."""

KEPT_SECONDS = 30 * 24 * 3600.0
"""For so long after the end of a run, who has not signed is asked (inferred: a device that is repaired or moved)."""

LOOK_SECONDS = 5.0
"""Seconds between two looks who is online."""

FIRST_PAUSE, LONGEST_PAUSE = 60.0, 3600.0
"""A device that is online and does not sign, for example because it has another release, is asked again after the
first pause, and after twice as long each time, at most after the longest one (inferred)."""

LOCK_SECONDS = 30.0
"""How long it waits for another process that uses the folder of the run, such as `polyfed certify`."""

MOST_SECONDS = 300.0
"""A process that asks is ended after so long. It waits for `countersignatures.SIGN_SECONDS`."""

PROCESS = "polyfed.deploy.server.late_receipts"

LOGGER = logger_of("receipts", "stderr")

_NAME = re.compile(r"[A-Za-z0-9_\-]{1,100}")
"""`polyfed.engines.protocol.RUN_NAME`, whose module imports PyTorch."""


@dataclass(frozen=True)
class Absent:
    """A device, or the edge of a silo, that has not signed.

    Attributes:
        node: what the queue calls the device: the fingerprint of its first key.
        tries: how often it was asked.
        at: it is not asked before this moment.
    """

    node: str
    tries: Annotated[int, Field(ge=0, lt=64)] = 0
    at: float = 0.0

    def asked(self, now: float) -> "Absent":
        """Return the entry after one more try."""
        pause = min(FIRST_PAUSE * 2.0**self.tries, LONGEST_PAUSE)
        return replace(self, tries=min(self.tries + 1, 63), at=now + pause)


@dataclass(frozen=True)
class Owed:
    """A run whose receipts are not all there. Moments are seconds since 1970.

    Attributes:
        run: its name.
        out: its folder.
        recipe: the text of its recipe, which goes with a request.
        until: nobody is asked after this moment.
        rows: number of the rows of its ledger. A run that has gone on has more, and asks again at its end.
        absent: who has not signed: numbers of clients, or of silos with an edge.
    """

    run: str
    out: str
    recipe: str
    until: float
    rows: int
    absent: dict[int, Absent] = field(default_factory=dict)


_OWED: TypeAdapter[Owed] = TypeAdapter(Owed)


def owe(credentials: Path, out: Path, recipe: str) -> None:
    """Note who has not signed a run that has ended, so that the server asks later; or that nobody is missing.

    Args:
        credentials: those of the server.
        out: the folder of the run.
        recipe: the text of its recipe.
    """
    from polyfed.deploy.server.countersignatures import ledgers_of, without_receipt  # only here: they import PyTorch
    from polyfed.report.reading.run_folder import Folder

    run = str(Folder(out).facts.get("run", ""))
    members, silos = _members(out)
    known = ledgers_of(out, run)
    with closing(Register(credentials)) as register:
        first = {one.key: one.device for one in register.renewals()}
    missing = without_receipt(_receipts(out), known, silos)
    absent = {number: Absent(first.get(members[number], members[number])) for number in missing if number in members}
    if not absent or not _NAME.fullmatch(run):
        _path(credentials, run).unlink(missing_ok=True)
        return
    (credentials / FOLDER).mkdir(mode=0o700, exist_ok=True)
    rows = sum(len(own.rows) for own in known.values())
    _write(credentials, Owed(run, str(out.absolute()), recipe, time.time() + KEPT_SECONDS, rows, absent))
    LOGGER.info("%s %s; the server asks when they are back", _who(absent, silos), _lacking(out))


def _members(out: Path) -> tuple[dict[int, str], dict[int, list[int]] | None]:
    """Return the key of each client, and the devices of each silo if these have edges."""
    told = parse_json((out / MEMBERS).read_text(encoding="utf-8"))
    silos = {int(silo): [*map(int, own)] for silo, own in told["silos"].items()} if "silos" in told else None
    return {int(number): str(key) for number, key in told["clients"].items()}, silos


def _receipts(out: Path) -> dict[str, object]:
    path = out / RECEIPTS
    result = parse_json(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(result, dict):
        raise ValueError(f"{path} holds no receipts")
    return result


def _who(absent: Mapping[int, Absent], silos: object) -> str:
    return f"{'clients' if silos is None else 'silos'} {', '.join(map(str, sorted(absent)))}"


def _lacking(out: str | Path) -> str:
    return f"have not signed the run in {out}"


def _path(credentials: Path, run: str) -> Path:
    return credentials / FOLDER / f"{run}.json"


def _write(credentials: Path, owed: Owed) -> None:
    replace_text(_path(credentials, owed.run), json.dumps(asdict(owed), indent=1))


def read(credentials: Path, run: str) -> Owed | None:
    """Return what a run lacks, or None if it lacks nothing.

    Raises:
        ValueError: the file is damaged.
    """
    if not _NAME.fullmatch(run):
        raise ValueError(f"{run[:100]!r} is no name of a run")
    try:
        result = _OWED.validate_json(_path(credentials, run).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ValueError(str(error.errors()[0]["msg"])) from None
    if result.run != run:
        raise ValueError("it is that of another run")
    return result


class LateReceipts:
    """Looks who has come back, in a thread of the process of `polyfed server`.

    Args:
        credentials: those of the server.
        words: the command that becomes the process that asks; the name of a run follows.
    """

    def __init__(self, credentials: Path, words: Sequence[str] = ()) -> None:
        self.credentials, self.stop = credentials, Event()
        self.words = [*(words or [sys.executable, "-P", "-m", PROCESS, str(credentials)])]
        self.queue = Queue(credentials / "queue")
        self.child: subprocess.Popen[bytes] | None = None
        self._began, self._told = 0.0, set[str]()

    def run(self) -> None:
        """Look until `stop` is set."""
        while not self.stop.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception as error:  # a full disk, ...; the next look may succeed
                self._tell(f"late receipts cannot be looked after now: {error}")
        if self.child is not None:
            self.child.kill()
            self.child.wait()
        self.queue.close()

    def look(self) -> None:
        """End what has expired, and ask who is back."""
        if self.child is not None and self.child.poll() is None:
            if time.monotonic() - self._began > MOST_SECONDS:
                self.child.kill()
            return
        self.child, now = None, time.time()
        if not (several := list(self._all())):
            return
        online = {*(self.queue.online() or ())}
        for owed in several:
            if owed.until <= now:
                self._expire(owed)
            elif self.child is None and (due := due_of(owed, online, now)):
                absent = {**owed.absent, **{number: owed.absent[number].asked(now) for number in due}}
                _write(self.credentials, replace(owed, absent=absent))  # first, so that no fault repeats at once
                words = [*self.words, owed.run, *map(str, due)]
                self.child, self._began = _started(words), time.monotonic()

    def _all(self) -> Iterator[Owed]:
        for path in sorted((self.credentials / FOLDER).glob("*.json")):
            try:
                if (owed := read(self.credentials, path.stem)) is not None:
                    yield owed
            except ValueError as error:
                self._tell(f"{path} is damaged: {error}. Remove it, and call `polyfed submit` for its run again")

    def _expire(self, owed: Owed) -> None:
        _path(self.credentials, owed.run).unlink(missing_ok=True)
        days, numbers = KEPT_SECONDS / 24 / 3600, ", ".join(map(str, sorted(owed.absent)))
        LOGGER.warning(
            "%s %s in %g days and are asked no more: %s certifies the run without them",
            *(numbers, _lacking(owed.out), days, command("certify", owed.out)),
        )

    def _tell(self, text: str) -> None:
        if text not in self._told:  # a line for each look would fill the disk of the log
            self._told.add(text)
            LOGGER.warning("%s", text)


def _started(words: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)


def due_of(owed: Owed, online: set[str], now: float) -> list[int]:
    """Return who is to be asked now."""
    return [number for number, one in sorted(owed.absent.items()) if one.node in online and one.at <= now]


def collect(credentials: Path, run: str, numbers: Sequence[int]) -> list[int]:
    """Ask clients, or edges of silos, for the receipts of a run that has ended, and add what they sign to its folder.

    Args:
        credentials: those of the server.
        run: the name of the run.
        numbers: who is asked.

    Returns:
        Who has not signed yet.

    Raises:
        PolyfedError: the folder of the run cannot be used.
        OSError, ValueError: a file is damaged or cannot be written.
    """
    from polyfed.deploy.device.tasks import packed  # only here: they import PyTorch
    from polyfed.deploy.server.countersignatures import ledgers_of, receipts_of
    from polyfed.deploy.server.membership import is_same_device
    from polyfed.engines.queued import QueueTransport

    owed = read(credentials, run)
    if owed is None or owed.until <= time.time():
        return []
    out, keys = Path(owed.out), dict[int, str]()
    members, silos = _members(out)
    _refuse_further(credentials, owed, ledgers_of(out, run))
    with closing(Register(credentials)) as register:
        renewed = register.replaced()

    def signed_by(number: int, key: str) -> bool:
        keys[number] = key
        return is_same_device(members.get(number, key), key, renewed)

    transport = QueueTransport(queue=Queue(credentials / "queue"), app=packed(owed.recipe, ""))
    transport.node_of.update({number: owed.absent[number].node for number in numbers if number in owed.absent})
    try:
        late = receipts_of(ledgers_of(out, run), run, transport, signed_by, silos)
    finally:
        transport.end()
    with alone_in(out, "another process is writing this run", "Its devices are asked again", seconds=LOCK_SECONDS):
        _refuse_further(credentials, owed, known := ledgers_of(out, run))
        return _added(credentials, owed, late, known, silos, keys)


def _refuse_further(credentials: Path, owed: Owed, known: Mapping[int, Any]) -> None:
    """Ask nobody about a run that has gone on since its end.

    Raises:
        RecipeError: it has.
    """
    if sum(len(own.rows) for own in known.values()) != owed.rows:
        _path(credentials, owed.run).unlink(missing_ok=True)
        raise RecipeError(f"the run in {owed.out} has gone on, so its devices sign at its next end")


def _added(
    credentials: Path,
    owed: Owed,
    late: Mapping[str, Any],
    known: Mapping[int, Any],
    silos: Mapping[int, Sequence[int]] | None,
    keys: Mapping[int, str],
) -> list[int]:
    """Add receipts to the folder of a run. Return who has not signed yet."""
    from polyfed.deploy.server.countersignatures import with_late, without_receipt
    from polyfed.deploy.server.membership import Membership
    from polyfed.privacy.egress.audit_log.receipts import receipts_text

    out = Path(owed.out)
    kept = _receipts(out)
    result = with_late(kept, late, LOGGER.warning)
    if result != kept:
        with closing(Register(credentials)) as register:
            members = Membership(out, renewed=register.replaced)
            for number, key in keys.items():
                members.signed_by(number, key)
        replace_text(out / RECEIPTS, receipts_text(result))
    missing = [number for number in without_receipt(result, known, silos) if number in owed.absent]
    if missing:
        _write(credentials, replace(owed, absent={number: owed.absent[number] for number in missing}))
    else:
        _path(credentials, owed.run).unlink(missing_ok=True)
    return missing


def main(credentials: Path, run: str, numbers: Sequence[int]) -> int:
    """Ask for late receipts in this process. Return the exit code."""
    try:
        collect(credentials, run, numbers)
    except (PolyfedError, OSError, ValueError, sqlite3.Error) as error:
        LOGGER.warning("late receipts of the run %s: %s", run, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], [int(number) for number in sys.argv[3:]]))
