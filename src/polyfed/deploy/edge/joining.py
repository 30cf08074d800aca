"""Join a federation as the edge of a silo, `polyfed edge join`: its key, its file, and tokens for its devices.

Everything is prepared in a folder beside its place, which is renamed at the end. If the way breaks off, the same
command goes on with the same key, which the server may know by then, and makes the rest anew: nobody has seen the
tokens of its devices.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.core.errors import RecipeError
from polyfed.core.system.files import replace_text, sync
from polyfed.core.system.json_and_toml import toml_value
from polyfed.deploy.device.agent import alone_in
from polyfed.deploy.edge.edge_file import EdgeConfig, edge_file
from polyfed.deploy.newcomer import key_at, newcomer
from polyfed.deploy.server.registration import OFFERED, Issued, begin
from polyfed.transport.tokens import JoinToken

EDGE = "edge.toml"
"""The file that joining writes for `polyfed edge`."""


@dataclass(frozen=True)
class Silo:
    """What the operator of an edge joins with.

    Attributes:
        folder: a new folder for everything that the edge has.
        hosts: names and addresses under which the devices of the silo reach the edge. Tokens have the first one.
        port: the port for them.
        devices: how many there are.
        hours: how long their tokens are valid.
        policy: a policy file: what of the silo may leave for the server. None for the default policy.
    """

    folder: Path
    hosts: Sequence[str]
    devices: int
    port: int = EdgeConfig.port
    hours: float = 24.0
    policy: Path | None = None


@dataclass(frozen=True)
class JoinedEdge:
    """An edge that has joined.

    Attributes:
        address: of the federation's server.
        silo: number of its silo.
        file: its file, for `polyfed edge`.
        credentials: the folder in which its devices are registered.
        tokens: a token for each device.
    """

    address: str
    silo: int
    file: Path
    credentials: Path
    tokens: tuple[Issued, ...]


def join(token: str, silo: Silo) -> JoinedEdge:
    """Join the server of a token as an edge, or go on where an earlier call broke off.

    The number of the token is that of the silo. The devices of all silos are numbered one after another: those of silo
    2 with two devices each are 4 and 5.

    Raises:
        RecipeError: the token, an argument or the answer of the server refuses it.
        TransportError: the server does not answer, or is another one.
    """
    folder = Path(os.path.abspath(silo.folder))
    known, stage = JoinToken.read(token), folder.with_name(f".{folder.name}.polyfed-join")
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{silo.folder} is not empty, and nothing is written over. Give a new folder")
    with alone_in(stage) as lock, newcomer(known, stage / EdgeConfig.key) as own:
        place = own.asked()
        tokens = _prepared(stage, known.address, silo, place.number)
        if place.recipe:  # the devices' owners see what the server shows; a device trusts no recipe
            replace_text(stage / EdgeConfig.credentials / OFFERED, place.recipe)
        (stage / EdgeConfig.ca).write_bytes(own.door.authority)
        key_at(own.key)
        edge_file(stage / EDGE)  # reads the key, too, and must fit before the server knows it
        own.register()
        lock.unlink()
        stage.rename(folder)
        sync(folder.parent)
    credentials = silo.folder / EdgeConfig.credentials
    return JoinedEdge(known.address, place.number, silo.folder / EDGE, credentials, tuple(tokens))


def _prepared(stage: Path, address: str, silo: Silo, number: int) -> list[Issued]:
    """Write the file of the edge and the credentials of its devices, and return their tokens."""
    credentials = stage / EdgeConfig.credentials
    shutil.rmtree(credentials, ignore_errors=True)
    lines = [
        f"# The edge of silo {number}, of the server {address}. Paths begin at this folder.",
        f"server = {toml_value(address)}",
        f"ca = {toml_value(EdgeConfig.ca)}",
        f"key = {toml_value(EdgeConfig.key)}",
        f"silo = {number}",
        f"devices = {silo.devices}",
        f"credentials = {toml_value(EdgeConfig.credentials)}",
        f"port = {silo.port}",
        f"state = {toml_value(EdgeConfig.state)}",
    ]
    if silo.policy is not None:
        lines.append(f"policy = {toml_value(os.path.abspath(silo.policy.expanduser()))}")
    replace_text(stage / EDGE, "\n".join([*lines, ""]))
    return begin(credentials, silo.hosts, silo.port, [""] * silo.devices, silo.hours, silo=number)
