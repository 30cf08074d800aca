"""Stores, in a run folder, which device has which client number, and the number of the server's session.

A device logs in with its private key, so the server recognises it by its public key. The first device that enrols with
a client number keeps this number, and the server refuses the number to all other devices.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import BadReply, CheckpointError, RecipeError
from polyfed.core.system.files import MEMBERS, SIGNED, replace_text
from polyfed.core.system.json_and_toml import parse_json
from polyfed.data.population.modality_assignment import devices_per_silo
from polyfed.engines.protocol import Enrolment, SiloEnrolment
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.federation.wire.wire_format import Packet

PART = "took_part"
"""The key of the clients that have taken part in the run."""


def expected(recipe: Recipe) -> int:
    """Return the number of devices for which the server of a deployment waits.

    With silos, each silo has one device for each entry of `holdings`, or for each modality.

    Raises:
        RecipeError: `[deployment] nodes` contradicts the number of devices of the silos, or is missing although only
            the data decides the number of silos, or `min_nodes` is larger than the number of devices.
    """
    wanted = _expected(recipe)
    if recipe.deployment.min_nodes > wanted:
        raise RecipeError(
            f"[deployment] min_nodes = {recipe.deployment.min_nodes}, but the run has {wanted} devices. Lower it",
            ("deployment", "min_nodes"),
        )
    return wanted


def expected_edges(recipe: Recipe) -> int:
    """Return the number of edges, one for each silo, for which the server of a deployment waits; see `expected`."""
    return expected(recipe) // devices_per_silo(recipe.clients, recipe.model.modalities)


def _expected(recipe: Recipe) -> int:
    nodes, clients = recipe.deployment.nodes, recipe.clients
    if clients.partition != "silos":
        return nodes or clients.num or 1
    each, silos = devices_per_silo(clients, recipe.model.modalities), clients.num_silos()
    if silos is None and (nodes == 0 or nodes % each):
        raise RecipeError(
            f"[deployment] nodes = {nodes}: with [clients] silo_partition = '{clients.silo_partition}' the data "
            f"decides the number of silos, which the server does not see. Set nodes to the number of devices, "
            f"{each} a silo",
            ("deployment", "nodes"),
        )
    if silos is None:
        return nodes
    if nodes not in (0, silos * each):
        raise RecipeError(
            f"[deployment] nodes = {nodes}, but {silos} silos of {each} devices are {silos * each} devices. Remove "
            "nodes, or set [clients] silos to the number of silos that take part",
            ("deployment", "nodes"),
        )
    return silos * each


def is_same_device(one: str, other: str, renewed: Mapping[str, str]) -> bool:
    """Return whether two keys are those of one device; see `Membership` for `renewed`."""
    return renewed.get(one, one) == renewed.get(other, other)


class Membership:
    """The clients of a run folder. The first device that enrols with a client number keeps the number.

    Only one server may use the folder at a time (`polyfed.deploy.server.server.only_server`).

    Args:
        folder: the run folder, which must exist.
        joined: returns the client number of each device that has joined the server with a token, by the fingerprint of
            its key. No other device may take such a number, and such a device no other number.
        renewed: returns the present key of each device that has replaced its key, by the fingerprint of every old one.
        registered: returns the present keys of all devices that the server knows; none if it does not know.
        most: how many clients the run has; 0 if any number may enrol.

    Attributes:
        session: the number of the server's current session. A new session begins each time the server starts. Its
            number is larger than the numbers of all earlier sessions, even if the clock was set back.
        left_out: clients that may not take part in this session, each with the reason.
        silos: silo -> the devices of the silo, if the clients are edges.

    Raises:
        CheckpointError: the file in the folder is damaged.
    """

    def __init__(
        self,
        folder: Path,
        joined: Callable[[], Mapping[str, int]] = dict,
        renewed: Callable[[], Mapping[str, str]] = dict,
        registered: Callable[[], Collection[str]] = tuple,
        most: int = 0,
    ) -> None:
        self._path, self._joined, self._renewed = folder / MEMBERS, joined, renewed
        self._registered, self._most = registered, most
        session, self._devices, self.silos, self._signed, self._part = self._read()
        self.session: int = max(session + 1, int(time.time() * 1000))
        self.left_out: dict[int, str] = {}
        self._write()

    def refusal(self, packet: Packet, device: str) -> str:
        """Return the reason to refuse an enrolment, or "" to accept it. If the client number is new, record the device.

        Args:
            packet: the enrolment, which has not been checked yet.
            device: the name of the device, which is the fingerprint of its key in the format of `ssh-keygen -l`.
        """
        header = packet.header
        members: list[int] | None = None
        try:
            if "devices" in header:
                edge = SiloEnrolment.read(header)
                client, members = edge.silo, sorted(one.client for one in edge.devices)
            else:
                client = Enrolment.read(header).client
        except BadReply as error:
            return str(error)
        if client in self.left_out:
            return f"client {client} was left out: {self.left_out[client]}"
        if why := self._not_as_joined(client, device):
            return why
        self._follow()
        number = str(client)
        if own := [taken for taken, known in self._devices.items() if known == device and taken != number]:
            return (
                f"the device with key {device} is client {own[0]}, and now says that it is client {number}. One device "
                f"is one client: correct its number, or the file {MEMBERS} in the run folder"
            )
        if self._devices.get(number, device) != device:
            return (
                f"client {number} belongs to the device with key {self._devices[number]}, and this one has {device}. "
                f"Give this device another client number; if it replaces the other one, write its key into {MEMBERS} "
                "in the run folder"
            )
        if number not in self._part and self._is_full():
            return (
                f"the run has its {self._most} clients, and client {client} is none of them. It takes part if "
                "[clients] num rises, or after the device of one of them is revoked"
            )
        if number not in self._devices or (members is not None and self.silos.get(client) != members):
            self._devices[number] = device
            self.silos |= {} if members is None else {client: members}
            self._write()
        return ""

    def begin(self, clients: Iterable[int]) -> None:
        """Note who takes part. The run keeps a place for each of them, also while its device is away."""
        if more := {str(client) for client in clients} - self._part:
            self._part |= more
            self._write()

    def _is_full(self) -> bool:
        """Return whether enough clients have taken part whose devices have not been revoked since."""
        known = {*self._registered()}
        return 0 < self._most <= sum(not known or self._devices.get(number) in known for number in self._part)

    def signed_by(self, client: int, key: str) -> bool:
        """Return whether a key is one of those of a client's device, and note that it has signed the ledger with it.

        Its key at the end of the run stays noted too: an earlier certificate names that one.
        """
        known = self._devices.get(str(client), key)
        if not is_same_device(known, key, self._renewed()):
            return False
        if self._signed.get(str(client), known) != key:
            self._signed[str(client)] = key
            self._write()
        return True

    def _follow(self) -> None:
        """Note the present keys of devices that have replaced theirs."""
        renewed = self._renewed()
        now = {number: renewed.get(device, device) for number, device in self._devices.items()}
        if now != self._devices:
            self._devices = now
            self._write()

    def _not_as_joined(self, client: int, device: str) -> str:
        """Return why a device that joined with a token has another number, or a number is another such device's."""
        joined = self._joined()
        if joined.get(device, client) != client:
            return (
                f"the device with key {device} has joined the server as client {joined[device]}, and now says that it "
                f"is client {client}. Write client = {joined[device]} into its file"
            )
        if device not in joined and client in joined.values():
            return (
                f"client {client} has joined the server with another key than {device}. Give this device another "
                "client number, or revoke the other one: polyfed server revoke"
            )
        return ""

    def _read(self) -> tuple[int, dict[str, str], dict[int, list[int]], dict[str, str], set[str]]:
        """Return the number of the last session, client number -> device, the devices of silos with an edge, with which
        key a client has signed if it is not that of its device, and which clients have taken part.
        """
        if not self._path.exists():
            return -1, {}, {}, {}, set()
        try:
            result: dict[str, Any] = parse_json(self._path.read_text())
            devices = {str(number): device for number, device in result["clients"].items()}
            if not all(isinstance(device, str) for device in devices.values()):
                raise ValueError("a client has no key")
            silos = {int(silo): list(map(int, own)) for silo, own in result.get("silos", {}).items()}
            signed = {str(number): str(key) for number, key in result.get(SIGNED, {}).items()}
            part = {str(int(client)) for client in result.get(PART, ())}
            return int(result.get("session", -1)), devices, silos, signed, part
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self._path} is damaged: {error}. Restore it from a copy") from error

    def _write(self) -> None:
        silos = {"silos": {str(silo): own for silo, own in self.silos.items()}} if self.silos else {}
        signed = {SIGNED: self._signed} if self._signed else {}
        part = {PART: sorted(map(int, self._part))} if self._part else {}
        told = {"session": self.session, "clients": self._devices, **silos, **signed, **part}
        replace_text(self._path, json.dumps(told, indent=1))
        self._path.chmod(0o600)
