"""Join a federation from a device, `polyfed device join`, and renew its key, `polyfed device renew`.

Joining writes the key, the policy and the file of the device. Everything is prepared in a private folder beside its
place, and put there at the end, over no file that exists. A key that a server may know stays in that folder if the way
breaks off afterwards, so that the same command goes on with it.

A key is renewed in three steps: the server takes the new key beside the old one, the new one takes the place of the old
one here, and its first use at the server ends the old one there. Whatever breaks off in between, the key in the file is
one that the server takes.
"""

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from polyfed.core.errors import DataError, PolyfedError, RecipeError, command, counted
from polyfed.core.messages import KINDS
from polyfed.core.system.files import replace_text, sync
from polyfed.core.system.json_and_toml import parse_toml, toml_key, toml_value
from polyfed.data import Columns
from polyfed.data.columns import TEST, TRAIN, check_finite
from polyfed.deploy.device.agent import alone_in
from polyfed.deploy.device.allowed_arrays import ROLES, standard
from polyfed.deploy.device.configuration import RELAYS, NodeConfig
from polyfed.deploy.device.data import refuse_own_numbers
from polyfed.deploy.device.device_file import device_file
from polyfed.deploy.device.recipe_check import Inspection, inspect
from polyfed.deploy.edge.edge_file import edge_file, is_edge
from polyfed.deploy.newcomer import key_at, newcomer
from polyfed.experiment.recipes.defaults import kind_of
from polyfed.experiment.recipes.file_reading import read_file
from polyfed.privacy.egress.policy import DEFAULT, Policy, guards_among
from polyfed.transport.connection import SKEW_SECONDS, Connection, different_clocks
from polyfed.transport.joining import Place
from polyfed.transport.logins import PrivateKey
from polyfed.transport.tokens import JoinToken

CA, POLICY, KEY, DEVICE = "ca.pem", "policy.toml", "node.key", "device.toml"
"""The files that joining writes. The last one is complete only if all others are."""

WITHIN_SILO, SHARED_WITHIN_SILO = ["parameters", "embeddings"], ["parameters", "statistic", "ids"]
"""What the methods with silos, HFM and VFL, send within a silo of a modality, and of what belongs to none."""

STAGE = ".polyfed-join"
"""The folder in which joining prepares them."""


@dataclass(frozen=True)
class Wanted:
    """What the owner of a device joins with.

    Attributes:
        data: an `.npz` file, or a folder of `.npy` files.
        folder: where the files of the device go.
        policy: a policy file of the owner's; None to write one for the data.
        modalities: the arrays with which the device takes part; () for those that polyfed finds.
        label: the array of the labels; "" for the one that polyfed finds, if there is one.
        silo: the number of the device's silo, or -1.
        relay: what may pass what the device sends within its silo; one of `RELAYS`.
        state: folder in which the device keeps its state; None for the one beside the data.
    """

    data: Path
    folder: Path
    policy: Path | None = None
    modalities: tuple[str, ...] = ()
    label: str = ""
    silo: int = -1
    relay: str = NodeConfig.relay
    state: Path | None = None

    def __post_init__(self) -> None:
        """Check `relay`, before the owner is asked about it."""
        if self.relay not in RELAYS:
            raise RecipeError(f"--relay {self.relay}: allowed: {', '.join(RELAYS)}")
        if self.relay != NodeConfig.relay and self.silo < 0:
            raise RecipeError(f"--relay {self.relay} is about messages within a silo: add --silo N, its number")

    @property
    def written(self) -> tuple[str, ...]:
        """The files that joining writes."""
        return tuple(name for name in (CA, POLICY, KEY, DEVICE) if name != POLICY or self.policy is None)


@dataclass(frozen=True)
class Proposal:
    """What the owner of a device sees before it joins.

    Attributes:
        address: of the server.
        authority: fingerprint of the server's authority, which is the token's.
        place: the number and the name that the server gives to the device.
        inspection: the data, and what may leave under the policy; with the server's recipe, also what it would send.
        notes: what polyfed guessed about the data, and what the owner should know.
    """

    address: str
    authority: str
    place: Place
    inspection: Inspection
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Joined:
    """A device that has joined.

    Attributes:
        address: of the server.
        number: its client number.
        file: its file, for `polyfed device`.
        written: the new files.
    """

    address: str
    number: int
    file: Path
    written: tuple[str, ...]


def join(token: str, wanted: Wanted, agree: Callable[[Proposal], bool]) -> Joined | None:
    """Join the server of a token, or go on where an earlier call broke off.

    Args:
        agree: shows the proposal to the owner and returns the answer. Nothing is registered before.

    Returns:
        The device, or None if the owner did not agree; then nothing is left of it.

    Raises:
        RecipeError: the token, a file or the answer of the server refuses it.
        DataError: the data cannot be used.
        TransportError: the server does not answer, or is another one.
    """
    known, stage, new = JoinToken.read(token), wanted.folder / STAGE, not wanted.folder.exists()
    _refuse_taken(wanted, stage)
    ready = (stage / DEVICE).exists()
    columns, table, notes = (None, {}, ()) if ready else _read(wanted)
    with alone_in(stage):
        if columns is None:
            return _placed(wanted, stage)
        try:
            with newcomer(known, stage / KEY) as own:
                place = own.asked()
                relays = wanted.relay != NodeConfig.relay
                if wanted.policy is None:
                    replace_text(stage / POLICY, policy_text(columns, table, wanted.data.name, in_silo=relays))
                node = _node(wanted, columns, place.number, stage)
                inspection, why = _inspected(node, columns, place.recipe, stage)
                clocks = different_clocks(own.door.skew) if abs(own.door.skew) > SKEW_SECONDS else ""
                told = (*notes, *filter(None, (clocks, why)))
                if not agree(Proposal(known.address, known.authority.hex(), place, inspection, told)):
                    return None
                own.register()
                (stage / CA).write_bytes(own.door.authority)
                replace_text(stage / DEVICE, _device_text(wanted, node, known.address, place))
                return _placed(wanted, stage)
        finally:
            if new:
                with suppress(OSError):  # it holds something
                    wanted.folder.rmdir()


def _refuse_taken(wanted: Wanted, stage: Path) -> None:
    """Refuse a folder with files that joining would write, unless an earlier call put them there.

    Raises:
        RecipeError: there is such a file, or the folder is none.
    """
    if wanted.folder.exists() and not wanted.folder.is_dir():
        raise RecipeError(f"{wanted.folder} is a file; --folder is the folder for the files of the device")
    there = [name for name in wanted.written if os.path.lexists(wanted.folder / name)]
    if taken := [name for name in there if not _same(stage / name, wanted.folder / name)]:
        raise RecipeError(
            f"{wanted.folder} has {', '.join(taken)} already, and nothing is written over. Choose another --folder"
            + (", or give this policy: --policy policy.toml" if taken == [POLICY] else "")
        )
    if wanted.policy is not None and not wanted.policy.is_file():
        raise RecipeError(f"--policy {wanted.policy} is no file")


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(one.lstat(), other.lstat()) and stat.S_ISREG(one.lstat().st_mode)
    except OSError:
        return False


def _read(wanted: Wanted) -> tuple[Columns, dict[str, object], tuple[str, ...]]:
    """Read the data as a device does, and find its modalities and labels.

    Returns:
        The rows, the options of [data] that read them, and sentences about what was guessed.

    Raises:
        DataError: they cannot be read, or a device would refuse them.
    """
    path = wanted.data
    if path.exists() and not path.is_dir() and path.suffix != ".npz":
        raise DataError(
            f"--data {path}: a device reads an .npz file or a folder of .npy files, one array for each modality and an "
            "array 'label'. Save it with numpy.savez (polyfed docs deploy-reference)"
        )
    options: dict[str, object] = {"test_share": 0.0, "standardise": False, "label": wanted.label or None}
    options |= {"modalities": list(wanted.modalities) or None}
    reading = read_file(path, options, needs_labels=False)
    columns = refuse_own_numbers(reading.columns, str(path))
    check_finite(columns)
    if not len(columns.rows(TRAIN)):
        raise DataError(f"--data {path} has no rows to train on: its array 'split' has no 0")
    return columns, reading.table, reading.remarks


def policy_text(columns: Columns, table: dict[str, object], name: str, *, in_silo: bool = False) -> str:
    """Return a policy file for data: what may leave by default, spelled out, with the lines that an owner may add.

    The block `shared` has no row: it then follows those of the modalities, also after the owner has made one stricter.

    Args:
        table: the options of [data] with which polyfed reads the data.
        name: the name of the data file.
        in_silo: also write what the owner may add for messages within the silo, which are refused without it.
    """
    kinds = toml_value([kind for kind in KINDS if kind in DEFAULT])
    other = {role: value for role in ROLES if (value := table.get(role)) and value != standard(role)}
    label = str(table.get("label") or "")
    classes = f", {columns.num_classes} classes" if label and not columns.label.is_floating_point() else ""
    lines = [
        f"# What may leave this device, and what a recipe may use here. Written for {name}; every line may be changed.",
        "# A recipe can only forbid more. The device reads this file for every request: to change it, write a new file",
        "# and rename it. `polyfed docs egress` explains it; `polyfed check RECIPE --node device.toml` tries a recipe.",
        "#",
        f"# {counted(len(columns.rows(TRAIN)), 'row', 'rows')} to train on, {len(columns.rows(TEST)):,} to test on; "
        f"{f'labels: the array {label}{classes}' if label else 'no labels'}",
        f"# All kinds: {', '.join(KINDS)}. Those that no row names stay here.",
    ]
    for modality, column in columns.modalities.items():
        lines += ["", f"[egress.{toml_key(modality)}]  # {kind_of(column)}", f"server = {kinds}"]
        lines += [f"# silo = {toml_value(WITHIN_SILO)}  # within the silo"] if in_silo else []
    lines += [
        "",
        "[egress.labels]",
        "server = []",
        "",
        "# Layers that read several modalities, losses, scores and counts of rows (`shared`) may send what every",
        "# modality above may. To let them send more, with the risk that `polyfed docs egress` describes:",
        "# [egress.shared]",
        f"# server = {kinds}",
        *([f"# silo = {toml_value(SHARED_WITHIN_SILO)}"] if in_silo else []),
        "",
        "# What training may reveal of few rows, and how often a server may ask:",
        "# [limits]",
        "# min_batch_size = 8          # rows in a step of training: one step on one row reveals the row",
        "# max_runs_per_day = 5",
        "# max_requests_per_day = 5000",
        "",
        "# Protection that a recipe must have:",
        "# [require]",
        "# secure_aggregation = true   # the server reads only sums,",
        "# min_clients = 5             # over at least so many devices",
        "",
    ]
    if other:
        lines += ["[allow]  # arrays that a recipe may name in this role, besides the standard names"]
        lines += [f"{role} = {toml_value([value])}" for role, value in other.items()]
    else:
        lines += ["# Code and saved models that a recipe may use here; without these lines, none:", "# [allow]"]
        lines += ['# imports = ["my_package.encoders:Face"]']
    return "\n".join([*lines, ""])


def _node(wanted: Wanted, columns: Columns, number: int, stage: Path) -> NodeConfig:
    policy = stage / POLICY if wanted.policy is None else wanted.policy
    return NodeConfig(
        data=str(wanted.data.expanduser().absolute()),
        client=number,
        modalities=",".join(columns.modalities),
        policy=str(policy),
        silo=wanted.silo,
        relay=wanted.relay,
    )


def _inspected(node: NodeConfig, columns: Columns, recipe: str, stage: Path) -> tuple[Inspection, str]:
    """Return what may leave the device, and what the server's recipe would send; or why the latter is not known.

    Raises:
        RecipeError: the policy is wrong.
    """
    rules = node.rules
    guards = guards_among(rules.egress, node.held)
    policy = Policy.parse(rules.egress, node.held, f"policy {node.policy}: [egress]", guards=guards)
    rows = len(columns.rows(TRAIN)), len(columns.rows(TEST))
    shapes = {name: column.shape for name, column in columns.modalities.items()}
    plain = Inspection(
        node,
        policy.for_client(node.held),
        rows,
        shapes,
        columns.num_classes,
        (),
        limits=rules.limits.sentences(),
        required=rules.required.sentences(),
    )
    if not recipe:
        return plain, ""
    path = stage / "recipe.toml"
    replace_text(path, recipe)
    try:
        return inspect(path, node), ""
    except PolyfedError as error:
        said = str(error).replace(f"{stage}{os.sep}", "")
        return plain, f"this device would refuse the recipe that the server is about to run: {said}"


def _device_text(wanted: Wanted, node: NodeConfig, address: str, place: Place) -> str:
    """Return the text of the device's file."""
    folder, policy = wanted.folder.absolute(), POLICY
    if wanted.policy is not None:
        policy = _from(wanted.policy, folder)
    lines = [
        f"# Device {place.number}, {place.name}, of the server {address}. Start it: {command('device', DEVICE)}",
        f"server = {toml_value(address)}",
        f"ca = {toml_value(CA)}",
        "",
        "[[device]]",
        f"key = {toml_value(KEY)}",
        f"data = {toml_value(_from(wanted.data, folder))}",
        f"client = {place.number}",
        f"modalities = {toml_value(list(node.held))}",
        f"policy = {toml_value(policy)}",
        *([f"silo = {wanted.silo}"] if wanted.silo >= 0 else []),
        *([f"relay = {toml_value(wanted.relay)}"] if wanted.relay != NodeConfig.relay else []),
        *([f"state = {toml_value(_from(wanted.state, folder))}"] if wanted.state is not None else []),
        "",
    ]
    return "\n".join(lines)


def _from(path: Path, folder: Path) -> str:
    """Return a path from the folder of the device's file: relative if it is in the folder."""
    path, folder = (Path(os.path.abspath(one)) for one in (path.expanduser(), folder))
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _placed(wanted: Wanted, stage: Path) -> Joined:
    """Put the prepared files into their place, over no file that exists, and delete the folder of the preparation."""
    result = parse_toml((stage / DEVICE).read_text(encoding="utf-8"))
    for name in (name for name in wanted.written if not _same(stage / name, wanted.folder / name)):
        _put(stage / name, wanted.folder / name)
    sync(wanted.folder)
    shutil.rmtree(stage)
    return Joined(result["server"], result["device"][0]["client"], wanted.folder / DEVICE, wanted.written)


def _put(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        raise RecipeError(
            f"{target} has come meanwhile, and nothing is written over. Move it away; the same command goes on"
        ) from None
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise
        source.rename(target)


@dataclass(frozen=True)
class Renewed:
    """A device with a new key.

    Attributes:
        client: its number; that of the silo, for an edge.
        key: the file of the key.
        before: fingerprint of the key that has ended.
        now: fingerprint of the key that holds.
    """

    client: int
    key: Path
    before: str
    now: str


def renew(file: Path, client: int | None = None, key: Path | None = None) -> list[Renewed]:
    """Renew the keys of the devices of a file, or go on where an earlier call broke off. The processes run on.

    Args:
        file: that of `polyfed device` or of `polyfed edge`.
        client: only this device.
        key: the file of the key, if the one that the file names is a copy of it.

    Raises:
        RecipeError: a file is wrong, there is no such device, or the server does not know its key.
        TransportError: the server does not answer, or is another one.
    """
    told = edge_file(file) if is_edge(file) else device_file(file)
    several = [one for one in told["devices"] if client in (None, one["config"]["client"])]
    if not several:
        known = ", ".join(str(one["config"]["client"]) for one in told["devices"])
        raise RecipeError(f"{file} has no device with the number {client}; it has {known}")
    if key is not None and len(several) > 1:
        raise RecipeError(f"--key is the key of one device, and {file} has {len(several)}: add --client N")
    server = told["server"], Path(told["ca"])
    return [_renewed(*server, one["config"]["client"], Path(one["key"]) if key is None else key) for one in several]


def _renewed(server: str, ca: Path, client: int, path: Path) -> Renewed:
    path = path.resolve()
    draft, kept = (path.with_name(f".{path.name}.polyfed-{word}") for word in ("next", "old"))
    try:
        if draft.exists() or not kept.exists():  # else the new key is in its place, and only its first use is missing
            new = key_at(draft, path)
            _asked(server, ca, PrivateKey(path), new)
            kept.unlink(missing_ok=True)
            os.link(path, kept)
            draft.rename(path)
            sync(path.parent)
        before, now = PrivateKey(kept), PrivateKey(path)
        _asked(server, ca, now)
        kept.unlink()
        sync(path.parent)
    except OSError as error:
        raise RecipeError(f"{path.parent} cannot be written: {error}. The key holds as it is; try again") from None
    return Renewed(client, path, before.fingerprint, now.fingerprint)


def _asked(server: str, ca: Path, key: PrivateKey, new: PrivateKey | None = None) -> None:
    connection = Connection(server, ca, key, Event(), lambda text: None)
    try:
        connection.renew(new)
    finally:
        connection.close()


def start_of(joined: Joined) -> str:
    """The command that starts a device."""
    return command("device", joined.file)


def names_in(text: str | None) -> tuple[str, ...]:
    """Return the modalities that the command line gives, separated by commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())
