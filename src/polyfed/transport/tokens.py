"""Join tokens, and the register of the devices that may join a server and of those that have.

A token tells a new device where the server is, by what it recognises the server, and a secret that registers one public
key. Whoever holds the token can join in the device's place, so it is short-lived, and its first key uses it up. The
server stores the SHA-256 of the secret alone: a secret has 128 random bits, which nobody finds from its digest.
"""

import base64
import hashlib
import os
import re
import secrets
import sqlite3
import time
from binascii import Error as Base64Error
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from polyfed.core.errors import PolyfedError, RecipeError, command, did_you_mean
from polyfed.core.system.files import replace_text, sync, without_links
from polyfed.transport.connection import host_and_port
from polyfed.transport.logins import Renewal, fingerprint, replaced_keys
from polyfed.transport.queue import at_once
from polyfed.transport.register_log import (
    COLUMNS,
    DEVICES,
    FILES,
    GONE,
    LOOSE,
    RENEWALS,
    REPLACED,
    SETTINGS,
    RegisterLog,
    Table,
    digest,
    of_kind,
    refuse_difference,
)

PREFIX = "polyfed-join-"
"""The beginning of every token, by which people and scanners for leaked secrets know one."""

VERSION, CHECK, AUTHORITY, SECRET = 1, 4, 32, 16
"""The version of tokens, and the bytes of their checksum, of the authority's fingerprint and of the secret."""

HOURS, MOST_HOURS = 24.0, 24.0 * 30
"""Hours for which a token is valid, and the most that an operator may give it."""

_ADDRESS = re.compile(r"[A-Za-z0-9._:\[\]-]{1,300}")
"""The letters of `host:port`; nothing else reaches a file or the terminal of a device."""

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Names of devices: that of its key's file, so no dot and no slash, and no number, which could be another device's."""

MOST_NUMBER = 10**6
"""Client numbers of devices that join are below this."""

LARGEST_RECIPE = 2**20
"""Largest size in bytes of the recipe that a server shows to new devices."""

LARGEST_KEY = 1000
"""Longest public key of a kind that polyfed takes, in characters; that of ECDSA P-521 has 268."""

REGISTER = "devices.sqlite3"
"""The register's file, in the folder of the credentials."""

RETIRED = "retired"
"""The folder in the credentials with the public keys that devices have replaced, with which older logs are checked."""

LOCK_SECONDS = 10.0
"""How long a write waits for that of another process."""


@dataclass(frozen=True)
class JoinToken:
    """What a new device must know of its server.

    Attributes:
        address: `host:port` of the server.
        authority: SHA-256 of `ca.pem`.
        secret: registers one key.
    """

    address: str
    authority: bytes
    secret: bytes

    def text(self) -> str:
        """Return the token as people copy it: one word, with a checksum."""
        result = bytes([VERSION]) + self.authority + self.secret + self.address.encode("ascii")
        return PREFIX + base64.urlsafe_b64encode(_check(result) + result).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> Self:
        """Read a token. Blanks and line breaks, which a mail may add, do not count.

        Raises:
            RecipeError: it is none, or it was mistyped or cut short.
        """
        word = "".join(text.split())
        if not word.startswith(PREFIX):
            raise RecipeError(
                f"this is no join token, which begins with {PREFIX}. `polyfed server token DIR` makes one"
            )
        wrong = RecipeError(
            "the token is mistyped or cut short: its checksum is wrong. Copy it once more, from its beginning "
            f"{PREFIX} to its end"
        )
        try:
            body = word.removeprefix(PREFIX)
            whole = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            told = whole[CHECK:]
            start = 1 + AUTHORITY + SECRET
            address = told[start:].decode("ascii")
            if _check(told) != whole[:CHECK] or len(told) <= start:
                raise wrong
        except (Base64Error, ValueError):
            raise wrong from None
        if told[0] != VERSION:
            raise RecipeError("the token is of another version of polyfed; install that of the server")
        if not _ADDRESS.fullmatch(address):
            raise RecipeError(f"the token names {address!r}, which is no address of a server")
        host_and_port(address)
        made = cls(address, told[1 : 1 + AUTHORITY], told[1 + AUTHORITY : start])
        if made.text() != word:
            raise wrong
        return made


def _check(told: bytes) -> bytes:
    return hashlib.sha256(b"polyfed join token\n" + told).digest()[:CHECK]


def digest_of(secret: bytes) -> str:
    """Return what the server stores of a secret."""
    return hashlib.sha256(b"polyfed join secret\n" + secret).hexdigest()


def joining_text(secret: bytes, certificate: bytes) -> bytes:
    """Return what a device signs to join: it has the private key, and joins this server and no other.

    Args:
        certificate: the server's certificate, DER.
    """
    return f"polyfed join\n{digest_of(secret)}\n{hashlib.sha256(certificate).hexdigest()}".encode()


OPEN, JOINED, LATE, WITHDRAWN, REVOKED = "open", "joined", "late", "withdrawn", "revoked"
"""The states of a device in the register: its token waits, its key is registered, nobody used its token in time, the
operator withdrew its token, or revoked its key."""


class Entry(NamedTuple):
    """A device in the register.

    Attributes:
        token: SHA-256 of the secret of its token.
        number: its client number.
        name: its name, that of the file of its key.
        ends: when its token ends, in seconds since 1970.
        key: fingerprint of the key with which it joined; "" if it has not joined.
        joined: when it joined; 0 if it has not.
        ended: when its token or its key was revoked; 0 if it was not.
    """

    token: str
    number: int
    name: str
    ends: float
    key: str = ""
    joined: float = 0.0
    ended: float = 0.0

    @property
    def state(self) -> str:
        """One of the states; by the server's clock alone."""
        if self.ended:
            return REVOKED if self.key else WITHDRAWN
        return JOINED if self.key else LATE if time.time() > self.ends else OPEN

    def facts(self) -> dict[str, Any]:
        """What `--json` prints of it: nothing that lets anybody join."""
        result = {name: value for name, value in self._asdict().items() if name != "token"}
        return {**result, "state": self.state}


class NotJoined(Exception):
    """The server registers no key for this call. The text is one of the words of `polyfed.transport.joining.WHY`.

    Attributes:
        entry: the device whose token it was, if there is one.
    """

    def __init__(self, why: str, entry: Entry | None = None) -> None:
        super().__init__(why)
        self.entry = entry


_FIELDS = ", ".join(Entry._fields)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS devices (
    token TEXT PRIMARY KEY, number INTEGER NOT NULL, name TEXT NOT NULL, ends REAL NOT NULL, key TEXT NOT NULL,
    joined REAL NOT NULL, ended REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS renewals (
    key TEXT PRIMARY KEY, device TEXT NOT NULL, name TEXT NOT NULL, since REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, key TEXT NOT NULL, state TEXT NOT NULL);
"""

_KEYS = {DEVICES: "token", RENEWALS: "key", SETTINGS: "name", FILES: "name"}
"""The first column of each table."""

LOG_KEY = "log"
"""The setting with the key of the register's log, so that no other log passes for it."""


class Register:
    """The register of a server. The web server and the commands of its operator use it at the same time.

    Every change is in the register's signed log before it holds (`polyfed.transport.register_log`).

    Args:
        folder: the credentials; the public keys `NAME.pub` lie there, and this file decides nothing about a key: one
            whose file is gone is revoked, and one that an operator adds without a token is registered.

    Raises:
        RecipeError: the register is damaged, or this user cannot write it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.log = folder, folder / REGISTER, RegisterLog(folder)
        try:
            os.close(without_links(str(self.path), os.O_RDWR | os.O_CREAT, 0o600))  # only this user reads it
            self._rows = sqlite3.connect(self.path, LOCK_SECONDS, isolation_level=None, check_same_thread=False)
            self._rows.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise RecipeError(f"{self.path} cannot be used: {error}. Restore it from a copy") from None

    def close(self) -> None:
        """Close the file."""
        self._rows.close()

    def check(self) -> None:
        """Compare the register with its log.

        Raises:
            RecipeError: somebody has changed a row, or the log is gone. The text names the row.
            PolyfedError: the log is damaged.
        """
        if not self._is_signed(self._table()):  # so it is also while another process writes
            with at_once(self._rows):
                self._signed()

    def settle(self) -> None:
        """Write into the log which key files have come or gone by other hands than polyfed's."""
        with self._changing():
            pass

    def note(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Write events, such as refusals, to the log.

        Raises:
            PolyfedError, OSError: the register was changed, or the log cannot be written.
        """
        with self._changing(events):
            pass

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make all changes of the block at once, or none."""
        with self._changing():
            yield

    @contextmanager
    def _changing(self, events: Sequence[Mapping[str, Any]] = ()) -> Iterator[None]:
        """Make all writes of the block at once, with a line in the log for each, or none if the block or a line fails.

        If the process is killed between the log and the register, the next use makes the register what the log says.
        A block within another one is a part of it.
        """
        if self._rows.in_transaction:
            yield
            return
        with at_once(self._rows):
            before = self._signed()
            if not self.log.begun or LOG_KEY not in self._settings():
                self._rows.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (LOG_KEY, self.log.begin()))
            yield
            self._note_files()
            after = self._table()
            if events or after != before:
                self.log.note(before, after, events)

    def _is_signed(self, table: Table) -> bool:
        """Return whether the newest line of the log signs this register. One that has never been signed is."""
        key = table.get(f"{SETTINGS} {LOG_KEY}")
        if not self.log.begun or key is None:
            return not self.log.begun and key is None
        return key == [self.log.key()] and digest(table) == self.log.digest()

    def _signed(self) -> Table:
        """Return the register as its log signs it; an empty one if there is no log yet.

        Raises:
            RecipeError, PolyfedError: see `check`.
        """
        table = self._table()
        if self._is_signed(table):
            return table if self.log.begun else {}
        if not self.log.begun:
            raise RecipeError(
                f"the signed log of {self.path} is gone: {self.log.folder}. Restore this folder from a copy"
            )
        key = table.get(f"{SETTINGS} {LOG_KEY}")
        if key not in (None, [self.log.key()]):
            raise RecipeError(
                f"{self.path} was changed by somebody else than polyfed, or is not that of the log in "
                f"{self.log.folder}: their keys differ. Restore the one that was changed from a copy"
            )
        before, now = self.log.told()
        if now.get(f"{SETTINGS} {LOG_KEY}") != [self.log.key()]:
            raise RecipeError(
                f"the log in {self.log.folder} is not signed with the key with which it began. Restore it from a copy"
            )
        rows = {place: row for place, row in now.items() if place != f"{SETTINGS} {LOG_KEY}"}
        adopted = not before and table == rows  # killed when the log of an older register began
        if table and table != before and not adopted:
            refuse_difference(self.path, table, now)
        for kind, columns in COLUMNS.items():
            marks = ", ".join("?" * (len(columns) + 1))
            self._rows.execute(f"DELETE FROM {kind}")
            written = [[place.partition(" ")[2], *now[place]] for place in of_kind(now, kind)]
            self._rows.executemany(f"INSERT INTO {kind} VALUES ({marks})", written)
        return self._table()

    def _table(self) -> Table:
        """Return all rows as the log names them."""
        result = Table()
        for kind, columns in COLUMNS.items():
            names = ", ".join((_KEYS[kind], *columns))
            for key, *values in self._rows.execute(f"SELECT {names} FROM {kind} ORDER BY rowid"):
                result[f"{kind} {key}"] = values
        return result

    def _settings(self) -> dict[str, str]:
        return dict(self._rows.execute("SELECT name, value FROM settings"))

    def _note_files(self) -> None:
        """Note key files that somebody has added, replaced, deleted or put back by hand."""
        renewals, found = self.renewals(), dict[str, str]()
        for path in self.folder.glob("*.pub"):
            found[path.stem] = ""
            with suppress(OSError, ValueError, IndexError):  # no key: the web server's log says so
                found[path.stem] = fingerprint(path.read_bytes())
        known = {name: (key, state) for name, key, state in self._rows.execute("SELECT name, key, state FROM files")}
        now, strange = replaced_keys(renewals), dict[str, tuple[str, str]]()
        next_of = {(one.device, one.key) for one in renewals if not one.since}
        for row in self._rows.execute(f"SELECT {_FIELDS} FROM devices WHERE key != '' AND ended = 0").fetchall():
            entry = Entry(*row)
            key = found.pop(entry.name, None)
            if key == "":  # it is being written, or no key: nothing new is known
                strange |= {entry.name: known[entry.name]} if entry.name in known else {}
            elif key != now.get(entry.key, entry.key) and (entry.key, key) not in next_of:
                strange[entry.name] = (entry.key, GONE) if key is None else (key, REPLACED)
        for one in renewals:
            if not one.since:
                found.pop(f"{one.name}.next", None)
        strange |= {name: (key, LOOSE) for name, key in found.items() if key}
        for name in known.keys() | strange.keys():
            if known.get(name) != strange.get(name):
                self._rows.execute("DELETE FROM files WHERE name = ?", (name,))
                if name in strange:
                    self._rows.execute("INSERT INTO files VALUES (?, ?, ?)", (name, *strange[name]))

    def entries(self) -> list[Entry]:
        """Return all devices by number, the newest last."""
        return [self._entry(row) for row in self._rows.execute(f"SELECT {_FIELDS} FROM devices ORDER BY number, rowid")]

    def _entry(self, row: Any) -> Entry:
        """Return the entry of a row; revoked if the file of its key is gone, which an operator may have deleted."""
        entry = Entry(*row)
        gone = entry.key and not entry.ended and not self._key(entry.name).exists()
        return entry._replace(ended=entry.joined) if gone else entry

    def numbers(self) -> dict[str, int]:
        """Return the number of each device that has joined, by the fingerprint of its present key.

        Raises:
            PolyfedError: see `check`.
        """
        self.check()
        now = self.replaced()
        return {now.get(one.key, one.key): one.number for one in self.entries() if one.state == JOINED}

    def renewals(self) -> list[Renewal]:
        """Return the keys that replace, or have replaced, another one of the same device, the newest last."""
        rows = self._rows.execute("SELECT key, device, name, since FROM renewals ORDER BY rowid")
        return [Renewal(*row) for row in rows]

    def replaced(self) -> dict[str, str]:
        """Return old key -> the present one of its device, for keys that were replaced."""
        return replaced_keys(self.renewals())

    def keys(self) -> set[str]:
        """Return the fingerprints of the keys that lie in the folder, without those that renew another one."""
        result = set[str]()
        for path in self.folder.glob("*.pub"):
            if not path.name.endswith(".next.pub"):
                with suppress(OSError, ValueError, IndexError):  # no key: the web server's log says so
                    result.add(fingerprint(path.read_bytes()))
        return result

    # what the operator does

    def address(self, new: str = "") -> str:
        """Return where devices reach the server, or "" if nobody has said so; keep a new address."""
        if new:
            host_and_port(new)
        return self._setting("address", new)

    def silo(self, new: int = -1, devices: int = 0) -> int:
        """Return the silo of which this server is the edge, or -1 for none.

        Args:
            new: a new number to keep.
            devices: the number of devices of each silo.
        """
        if new >= 0:
            self._setting("devices", str(devices))
        return int(self._setting("silo", str(new) if new >= 0 else "") or -1)

    def _own_numbers(self) -> range:
        """Return the numbers that devices of this server may have: at the edge of a silo, those of the silo."""
        silo, devices = self.silo(), int(self._setting("devices", "") or 0)
        return range(silo * devices, (silo + 1) * devices) if silo >= 0 and devices else range(MOST_NUMBER)

    def _setting(self, name: str, new: str) -> str:
        if new and self._settings().get(name) != new:
            with self._changing():
                self._rows.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, new))
        row = self._rows.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        return "" if row is None else str(row[0])

    def issue(self, name: str = "", number: int | None = None, hours: float = HOURS) -> tuple[bytes, Entry]:
        """Make the secret of a new device. A token of the same number that has ended gives way to it.

        Args:
            name: its name; "" for `device-NUMBER`.
            number: its client number; None for the lowest that nobody has; at the edge of a silo, one of the silo.
            hours: how long the token is valid.

        Raises:
            RecipeError: the name, the number or the time is not allowed, or another device has the name or number.
        """
        if not 0 < hours <= MOST_HOURS:
            raise RecipeError(f"--hours {hours:g}: a token is valid for more than 0 and at most {MOST_HOURS:g} hours")
        if number is not None and not 0 <= number < MOST_NUMBER:
            raise RecipeError(f"--number {number}: clients are numbered from 0, and below {MOST_NUMBER:,}")
        check_name(name or "device")
        secret = secrets.token_bytes(SECRET)
        with self._changing():
            taken = [one for one in self.entries() if one.state in (OPEN, JOINED)]
            number = self._free_number(number, {one.number for one in taken})
            entry = Entry(digest_of(secret), number, name or f"device-{number}", time.time() + 3600 * hours)
            for one in taken:
                if (clash := one.number == number) or one.name == entry.name:
                    what = f"number {number}" if clash else f"name {one.name}"
                    raise RecipeError(
                        f"the {what} is that of {_who(one)}. Choose another, or first: "
                        f"{command('server', 'revoke', self.folder, one.name)}"
                    )
            if os.path.lexists(self._key(entry.name)):
                raise RecipeError(
                    f"{self._key(entry.name)} is the key of another device. Choose another name, or first: "
                    f"{command('server', 'revoke', self.folder, entry.name)}"
                )
            marks = ", ".join("?" * len(entry))
            self._rows.execute(f"INSERT INTO devices VALUES ({marks})", entry)
        return secret, entry

    def _free_number(self, wanted: int | None, used: Collection[int]) -> int:
        """Return the number of a new device.

        Raises:
            RecipeError: the edge of a silo has no such number, or none is free.
        """
        own, silo = self._own_numbers(), self.silo()
        theirs = f"the devices of silo {silo} have the numbers {own[0]} to {own[-1]}, and later ones are of other silos"
        if silo >= 0 and wanted is None and own == range(MOST_NUMBER):
            raise RecipeError(
                f"an older polyfed made {self.folder}, and says not how many devices silo {silo} has. Give the number "
                "of the new one: --number N"
            )
        if wanted is not None and wanted not in own:
            raise RecipeError(f"--number {wanted}: {theirs}")
        if wanted is None and all(number in used for number in own):
            revoke, token = (command("server", verb, self.folder) for verb in ("revoke", "token"))
            raise RecipeError(f"{theirs}. All are taken; to replace a device: {revoke} NAME, then {token}")
        return next(number for number in own if number not in used) if wanted is None else wanted

    def revoke(self, who: str) -> Entry | str:
        """Take a device's key away, or withdraw its token. It is refused from its next call on.

        Args:
            who: its number, its name, or the name of the file of a key that has joined without a token.

        Returns:
            The device, or the name of a key without an entry.

        Raises:
            RecipeError: there is no such device.
        """
        with self._changing():
            mine = [one for one in self.entries() if one.state in (OPEN, LATE, JOINED)]
            result = next((one for one in reversed(mine) if who in (one.name, str(one.number))), None)
            files = {path.stem: path for path in self.folder.glob("*.pub")}
            name = result.name if result is not None else who
            if result is None and name not in files:
                known = {*files, *(one.name for one in mine)}
                raise RecipeError(f"{self.folder} has no device '{who}'; {did_you_mean(who, known)}")
            if result is not None:
                self._rows.execute("UPDATE devices SET ended = ? WHERE token = ?", (time.time(), result.token))
            if name in files and (result is None or result.key):
                files[name].unlink(missing_ok=True)
                self._forget_next(name)
                sync(self.folder)
        return name if result is None else result._replace(ended=time.time())

    # what the web server does

    def find(self, secret: bytes, key: str = "") -> Entry:
        """Return the device whose token has a secret.

        Args:
            key: fingerprint of the key that asks. That of the key which has used the token up may ask again, because
                the answer may have been lost.

        Raises:
            NotJoined: no token has this secret, or it is late, revoked or used up.
        """
        row = self._rows.execute(f"SELECT {_FIELDS} FROM devices WHERE token = ?", (digest_of(secret),)).fetchone()
        if row is None:
            raise NotJoined("unknown")
        entry = self._entry(row)
        if entry.state == OPEN or (entry.state == JOINED and entry.key == key):
            return entry
        raise NotJoined({JOINED: "used", LATE: "late"}.get(entry.state, "revoked"), entry)

    def enter(self, secret: bytes, line: bytes, known: bool) -> Entry:
        """Register the key of a device.

        Args:
            secret: that of its token.
            line: its public key, from `public_line`.
            known: whether the server knows this key already.

        Raises:
            NotJoined: see `find`; or the key is that of another device, or a file has the name.
            OSError: the key cannot be written; then the token is unused.
        """
        written = list[Path]()
        try:
            return self._entered(secret, line, known, written)
        except (OSError, PolyfedError):  # the log cannot be written, so the key does not count
            for path in written:
                path.unlink(missing_ok=True)
            raise

    def _entered(self, secret: bytes, line: bytes, known: bool, written: list[Path]) -> Entry:
        """Register the key of a device, and add its file to `written`; see `enter`."""
        key, now = fingerprint(line), time.time()
        with self._changing():  # two that hold one token come one after the other
            entry = self.find(secret, key)
            path = self._key(entry.name)
            own = path.is_file() and not path.is_symlink() and path.read_bytes() == line
            if entry.key and own:
                return entry
            if entry.key:  # its file was replaced
                raise NotJoined("revoked", entry)
            if (known and not own) or any(one.key == key and one.state == JOINED for one in self.entries()):
                raise NotJoined("known")
            if not own:  # a server that was killed between the file and the row goes on here
                self._write(path, line)
                written.append(path)
            self._rows.execute("UPDATE devices SET key = ?, joined = ? WHERE token = ?", (key, now, entry.token))
        return entry._replace(key=key, joined=now)

    def renew(self, device: str, name: str, line: bytes) -> None:
        """Register the next key of a device beside its present one, which holds until the next one is used.

        An earlier next key that nobody has used gives way: a thief who has planted one is out after a renewal.

        Args:
            device: the name of the device, which is the fingerprint of its first key.
            name: the name of the file of its present key, without `.pub`.
            line: the new public key, from `public_line`.

        Raises:
            NotJoined: the key is known, or a file has the name of the new one.
            OSError: the key cannot be written; then nothing has changed.
        """
        key = fingerprint(line)
        with self._changing():
            known = self.renewals()
            taken = {one.key for one in self.entries()} | {one.key for one in known} | {one.device for one in known}
            if (
                any((one.key, one.device, one.since) == (key, device, 0.0) for one in known)
                and self._next(name).exists()
            ):
                return  # the answer was lost
            if key in taken and not any(one.key == key and not one.since for one in known):
                raise NotJoined("known")
            self._forget_next(name)
            self._write(self._next(name), line)
            self._rows.execute("INSERT INTO renewals VALUES (?, ?, ?, 0)", (key, device, name))

    def confirm(self, key: str) -> None:
        """Let a new key, whose holder has just used it, replace the old one, which ends.

        Raises:
            OSError: the disk is full; then both keys hold.
        """
        with self._changing():
            one = next((one for one in self.renewals() if one.key == key and not one.since), None)
            if one is None:
                return
            new, now = self._next(one.name), self._key(one.name)
            if new.exists():  # not so if the server was killed before the row was written
                retired = self.folder / RETIRED
                retired.mkdir(mode=0o700, exist_ok=True)
                count = sum(path.stem.startswith(f"{one.name}.") for path in retired.glob("*.pub"))
                replace_text(retired / f"{one.name}.{count + 1}.pub", now.read_text(encoding="ascii"))
                os.replace(new, now)
                sync(self.folder)
            self._rows.execute("UPDATE renewals SET since = ? WHERE key = ?", (time.time(), key))

    def _forget_next(self, name: str) -> None:
        """Drop the next key of a device, if there is one that nobody has used."""
        if self._rows.execute("DELETE FROM renewals WHERE name = ? AND since = 0", (name,)).rowcount:
            self._next(name).unlink(missing_ok=True)

    def _next(self, name: str) -> Path:
        """The file of a device's next key. Its stem has a dot, so it is that of no other device."""
        return self.folder / f"{name}.next.pub"

    def _key(self, name: str) -> Path:
        return self.folder / f"{name}.pub"

    def _write(self, path: Path, line: bytes) -> None:
        """Write a public key whole, and over no other file.

        Raises:
            NotJoined: a file has its name.
        """
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with open(draft, "xb", opener=without_links) as file:
                file.write(line)
            sync(draft)
            os.link(draft, path)
        except FileExistsError:
            raise NotJoined("name") from None
        finally:
            with suppress(OSError):
                draft.unlink()
        sync(self.folder)


def _who(entry: Entry) -> str:
    result = "has joined" if entry.state == JOINED else "has an open token"
    return f"device {entry.number}, {entry.name}, which {result}"


def check_name(name: str) -> None:
    """Refuse a name that may not be that of a device.

    Raises:
        RecipeError: it is not made of at most 64 letters, digits, `-` and `_`, or begins with no letter.
    """
    if not NAME.fullmatch(name):
        raise RecipeError(
            f"--name {name!r}: a name has at most 64 letters, digits, - and _, and begins with a letter, as hospital-a"
        )


def public_line(text: str) -> tuple[bytes, Any]:
    """Return a public key as the server writes it, without comments and options, and the key itself.

    Raises:
        ValueError: it is no key of a kind that polyfed takes.
    """
    if len(text) > LARGEST_KEY or not text.isascii():
        raise ValueError("a key is shorter")
    try:
        key = load_ssh_public_key(text.encode())
    except (UnsupportedAlgorithm, NotImplementedError) as error:  # a compressed point
        raise ValueError(str(error)) from None
    if not isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
        raise ValueError(f"a key of type {type(key).__name__}")
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH), key
