"""What a server's operator does with devices: `polyfed server init`, `token` and `revoke`."""

import hashlib
import ipaddress
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509

from polyfed.core.errors import RecipeError, command, counted
from polyfed.core.system.files import replace_text
from polyfed.deploy import credentials
from polyfed.deploy.credentials import AUTHORITY_KEY, LOOPBACK, SERVER, check_server, write_credentials
from polyfed.transport.connection import host_and_port
from polyfed.transport.tokens import HOURS, JOINED, LARGEST_RECIPE, OPEN, Entry, JoinToken, Register, check_name

PORT = 9092

OFFERED = "recipe.toml"
"""The file in the credentials with the recipe that `polyfed device join` shows to the owner of a device."""


@dataclass(frozen=True)
class Issued:
    """A token for a device. Nothing else has its text.

    Attributes:
        entry: the device in the register.
        token: the text of the token.
        silo: the silo of the edge that has made it; -1 for a token of a server.
    """

    entry: Entry
    token: str
    silo: int = -1

    @property
    def command(self) -> str:
        """What to type on the device."""
        silo = f" --silo {self.silo} --relay edge" if self.silo >= 0 else ""
        return f"{command('device', 'join', self.token)} --data FILE{silo}"

    def facts(self) -> dict[str, Any]:
        """The content that `--json` prints."""
        return {**self.entry.facts(), "token": self.token, "join": self.command}


def begin(
    folder: Path,
    hosts: Sequence[str],
    port: int,
    names: Sequence[str],
    hours: float,
    recipe: Path | None = None,
    silo: int = -1,
) -> list[Issued]:
    """Make the folder of a server: its authority, its certificate, and a token for each device.

    Args:
        folder: the folder, which holds no server yet.
        hosts: names and addresses under which devices reach the server. Tokens have the first one.
        port: the port on which it will serve devices.
        names: names of the devices, numbered from 0, or at the edge of a silo after those of the silos before it; ""
            for `device-NUMBER`.
        hours: how long tokens are valid.
        recipe: a recipe for the owners of devices to check before they join.
        silo: the silo of which this server is the edge; -1 for none.

    Raises:
        RecipeError: an argument is wrong, or the folder holds a server.
    """
    held = [name for name in (*SERVER, AUTHORITY_KEY) if os.path.lexists(folder / name)]
    if held and not set(SERVER) <= set(held):
        raise RecipeError(
            f"{folder} holds only {', '.join(held)} of a server. If devices have joined it, restore the other files "
            "from a copy; if an earlier `polyfed server init` was cut off, delete them and run this again"
        )
    if held:
        raise RecipeError(
            f"{folder} holds a server already ({', '.join(held)}), which was left as it is. Another device: "
            f"{command('server', 'token', folder)}"
        )
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"{folder} is a file; give a new folder")
    given = [name for name in names if name]
    for name in given:
        check_name(name)
    if twice := [name for name, count in Counter(given).items() if count > 1]:
        raise RecipeError(f"--name {twice[0]} stands twice; each device has a name of its own")
    text = None if recipe is None else _recipe_text(recipe)
    address = _address(hosts[0], port)
    write_credentials(folder, 0, hosts)
    folder.chmod(0o700)
    if text is not None:
        replace_text(folder / OFFERED, text)
    with registered(folder) as register, register.together():
        register.address(address)
        first = len(names) * max(register.silo(silo, len(names)), 0)
        return [_issue(folder, register, name, number, hours) for number, name in enumerate(names, first)]


def add_hosts(folder: Path, names: Sequence[str]) -> tuple[list[str], str]:
    """Let devices reach the server under further names. Return the new ones, and the command for tokens with the first.

    Raises:
        RecipeError: see `credentials.add_hosts`.
    """
    with registered(folder) as register:
        port = host_and_port(register.address() or _address(_host_of(folder), PORT))[1]
    new = credentials.add_hosts(folder, names)
    return new, command("server", "token", folder, "--address", _address(names[0], port))


def issue(folder: Path, name: str, number: int | None, hours: float = HOURS, address: str = "") -> Issued:
    """Make a token for one more device.

    Args:
        address: `HOST:PORT` of the server; "" for that of `polyfed server init`, or else that of the certificate.

    Raises:
        RecipeError: the folder holds no server, an argument is wrong, or another device has the name or number.
    """
    check_server(folder, [name for name in SERVER if (folder / name).exists()])
    with registered(folder) as register:
        if address:
            check_server(folder, SERVER, [host_and_port(address)[0]])
        register.address(address or register.address() or _address(_host_of(folder), PORT))
        return _issue(folder, register, name, number, hours)


def _issue(folder: Path, register: Register, name: str, number: int | None, hours: float) -> Issued:
    secret, entry = register.issue(name, number, hours)
    authority = hashlib.sha256((folder / "ca.pem").read_bytes()).digest()
    return Issued(entry, JoinToken(register.address(), authority, secret).text(), register.silo())


@contextmanager
def registered(folder: Path) -> Iterator[Register]:
    """Open the register of a folder with a server.

    Raises:
        RecipeError: the folder holds no server, or the register cannot be used.
    """
    if not (folder / "server.pem").exists():
        raise RecipeError(f"{folder} holds no server; make one: {command('server', 'init', folder, '--host', 'NAME')}")
    register = Register(folder)
    try:
        yield register
    finally:
        register.close()


def devices(folder: Path) -> list[dict[str, Any]]:
    """Return facts about the devices of a server: those with a token, and keys that were added without one.

    Raises:
        RecipeError: the folder holds no server.
    """
    with registered(folder) as register:
        register.check()
        entries, renewals, now = register.entries(), register.renewals(), register.replaced()
    known = {one.name for one in entries if one.state == JOINED}
    known |= {f"{one.name}.next" for one in renewals if not one.since}
    loose = sorted(path.stem for path in folder.glob("*.pub") if path.stem not in known)
    plain = {"number": None, "ends": 0.0, "key": "", "joined": 0.0, "ended": 0.0, "state": "a key without a token"}
    present = (one._replace(key=now.get(one.key, one.key)) for one in entries)
    return [*(one.facts() for one in present), *({**plain, "name": name} for name in loose)]


def start_of(folder: Path) -> str:
    """The command that starts the server of a folder."""
    with registered(folder) as register:
        port = host_and_port(register.address())[1]
    return command("server", folder, *(["--port", port] if port != PORT else []))


def lines(folder: Path, issued: Sequence[Issued], hours: float) -> Iterator[str]:
    """What to print of new tokens."""
    if not issued:
        yield f"no tokens were asked for; one for each device: {command('server', 'token', folder)}"
        return
    yield (
        f"on each device, within {hours:g} hours. Whoever has a token can join in its place, so send each to one owner "
        "over a channel that you trust:"
    )
    for one in issued:
        yield f"# device {one.entry.number}, {one.entry.name}"
        yield one.command


def told_of(entry: Entry | str) -> str:
    """What to print after a revocation."""
    if isinstance(entry, str):
        return f"the key {entry} is gone; its device is refused from its next call on"
    who = f"device {entry.number}, {entry.name},"
    if not entry.key:
        return f"{who} had not joined; its token is withdrawn"
    return f"{who} is revoked: its key {entry.key} is refused from its next call on"


def moment(seconds: float) -> str:
    """A time as tables show it, or "" for none."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC" if seconds else ""


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line about how many devices have joined."""
    joined = sum(row["state"] == JOINED for row in rows)
    waiting = sum(row["state"] == OPEN for row in rows)
    return f"{counted(joined, 'device has', 'devices have')} joined, {counted(waiting, 'token is', 'tokens are')} open"


def _address(host: str, port: int) -> str:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    host_and_port(address)
    return address


def _host_of(folder: Path) -> str:
    """Return the first name of the server's certificate, or loopback if it has no other."""
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    known = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    names = [str(one.value) for one in known if isinstance(one, x509.DNSName | x509.IPAddress)]
    return next((name for name in names if name not in LOOPBACK and not _loops(name)), LOOPBACK[0])


def _loops(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _recipe_text(path: Path) -> str:
    from polyfed.experiment.recipes.recipe import load_recipe  # only here, as it imports PyTorch

    load_recipe(path)
    text = path.read_text(encoding="utf-8")
    if len(text.encode()) > LARGEST_RECIPE:
        raise RecipeError(f"{path} has more than {LARGEST_RECIPE:,} bytes, which no device takes")
    return text
