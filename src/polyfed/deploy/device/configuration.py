"""What a device's owner configures: the data, the policy, and the code that recipes may use on the device."""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from polyfed.algorithms import NAMED
from polyfed.core.errors import DataError, NotAllowed, RecipeError, did_you_mean
from polyfed.core.registry import Allowance, name_of
from polyfed.core.tasks import parts
from polyfed.deploy.device.allowed_arrays import ELSEWHERE, check_arrays, joined_arrays, named_arrays, standard
from polyfed.experiment.recipes.overrides import called
from polyfed.experiment.recipes.parts import build
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe, read_table
from polyfed.model import HuggingFace
from polyfed.privacy.egress.limits import Limits
from polyfed.privacy.egress.policy import Policy, guards_among
from polyfed.privacy.egress.purposes import Purposes
from polyfed.privacy.egress.requirements import NO_REQUIREMENTS, Requirements
from polyfed.selection import SELECTORS, Selector

WHERE = "[[device]]"
"""The table of a device in its file."""

SECTIONS = "[egress.*], [allow], [limits], [require] and [purposes.*]"
"""Names of the sections of a policy file, for error messages."""

RELAYS = ("refused", "edge", "server-sees")
"""Allowed values of `relay`."""

PARTS = ("egress", "allow", "limits", "require", "purposes")

_PAIR = re.compile(r"""([\w-]+)\s*=\s*("[^"]*"|'[^']*'|\S+)""")
"""Pattern of a key and its TOML value. Spaces separate the pairs."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """The configuration of a device, as a table [[device]] of its file gives it; see `device_file`.

    Attributes:
        data: an `.npz` file, or a folder of `.npy` files. The device trains on rows of split 0. If the data has an
            array `split`, rows of split 1 are the device's own test rows, and rows of split 2 its own validation rows.
        client: the device's client number in the federation, from 0. No two devices may have the same number.
        modalities: the arrays with which the device takes part, separated by commas; or the modalities to which the
            recipe joins arrays that [allow] columns lists.
        policy: the policy file, a TOML file with the [egress.*] tables. Without a file, the default policy applies. A
            recipe can forbid more than the policy. The section [allow] lists the code and the saved models that a
            recipe may use on this device. Without this section, a recipe may use neither. The section [limits] sets
            minimum numbers of rows and steps, and maximum numbers of rounds and requests. The section [require] names
            the protection that a recipe must have.
        state: folder for local state and ledger. The default is `polyfed-state` in the same folder as the data.
        silo: number of the device's silo, or -1 if the device belongs to no silo.
        relay: `edge` says that this server is the edge of the device's silo, so that messages within the silo may pass
            through it. `server-sees` lets them pass through any server.
        id_key: file with a secret that the devices of a silo share, and its edge lacks: they replace sample ids by what
            only its holders can compute. Without it, the edge reads the ids.
        checkpoint_seconds: while a task trains, its state is written to `state` each time after so many seconds, so
            that a task whose process dies goes on from there, with the same reply. 0 writes none.

    Raises:
        RecipeError: `client` or `checkpoint_seconds` is negative, or `relay` is another word.
    """

    data: str
    client: int
    modalities: str
    policy: str = ""
    state: str = ""
    silo: int = -1
    relay: str = "refused"
    id_key: str = ""
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Check the numbers and `relay`."""
        if self.client < 0:
            raise RecipeError(f"{WHERE} client = {self.client}; clients are numbered from 0")
        if self.relay not in RELAYS:
            raise RecipeError(f"{WHERE} relay = '{self.relay}'; allowed: {', '.join(RELAYS)}")
        if not 0 <= self.checkpoint_seconds < math.inf:
            raise RecipeError(f"{WHERE} checkpoint_seconds = {self.checkpoint_seconds}; allowed: 0 or more")

    def relays(self, recipe: Recipe) -> bool:
        """Return whether messages within the silo may pass through the server that has sent this recipe."""
        return self.relay == "server-sees" or (self.relay == "edge" and recipe.deployment.relay == "edge")

    @property
    def held(self) -> tuple[str, ...]:
        """The modalities as a tuple."""
        return tuple(name.strip() for name in self.modalities.split(",") if name.strip())

    @property
    def folder(self) -> Path:
        """The folder of the local state and the ledger."""
        if self.state:
            return Path(self.state).expanduser()
        return Path(self.data).expanduser().absolute().parent / "polyfed-state"

    @cached_property
    def rules(self) -> "DevicePolicy":
        """The policy file, which is read once: a device makes a new configuration for each request.

        If it read the file again for every section, and the owner replaced the file meanwhile, a reply could leave that
        neither the old nor the new policy allows.

        Raises:
            RecipeError: see `DevicePolicy.read`.
        """
        return DevicePolicy.read(self.policy)


@dataclass(frozen=True)
class DevicePolicy:
    """What the owner of a device allows, as the policy file says it.

    Attributes:
        path: the file as the owner names it; "" without a file, and then the default policy applies.
        text: the bytes of the file.
        egress: the tables [egress.*], which depend on the modalities of a recipe; see `policy_on`.
        allowance: the code and models that a recipe may use, [allow]. Without the section, it may use none.
        limits: minimum numbers of rows and steps, and maximum numbers of rounds and requests, [limits].
        required: the protection that a recipe must have, [require].
        purposes: the purposes for which the device takes part, [purposes].
    """

    path: str = ""
    text: bytes = b""
    egress: Mapping[str, Any] = field(default_factory=dict)
    allowance: Allowance = Allowance()
    limits: Limits = Limits()
    required: Requirements = NO_REQUIREMENTS
    purposes: Purposes = Purposes()

    @classmethod
    def read(cls, path: str) -> "DevicePolicy":
        """Read a policy file.

        Raises:
            RecipeError: the file cannot be read, or is not a policy.
        """
        if not path:
            return cls()
        try:
            text = Path(path).expanduser().read_bytes()
            table = tomllib.loads(text.decode("utf-8-sig"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RecipeError(f"policy {path}: {error}. Give a TOML file with {SECTIONS}") from None
        if strange := [name for name in table if name not in PARTS]:
            raise RecipeError(f"policy {path}: no section '{strange[0]}'; a policy has {SECTIONS} only")
        if not table:  # perhaps an editor has only begun to write the file
            raise RecipeError(
                f"policy {path}: the file has none of the sections {SECTIONS}. Write the policy into the file, or "
                f"leave out policy in {WHERE} to use the default policy"
            )
        where = f"policy {path}:"
        return cls(
            path,
            text,
            table.get("egress", {}),
            Allowance.parse(table.get("allow", {}), f"{where} [allow]"),
            Limits.parse(table.get("limits", {}), f"{where} [limits]"),
            Requirements.parse(table.get("require", {}), f"{where} [require]"),
            Purposes.parse(table.get("purposes"), where),
        )


def node_from(text: str) -> NodeConfig:
    """Read a configuration from its text on the command line, `polyfed check --node`.

    Raises:
        RecipeError: the text does not consist of pairs of key and TOML value, or a key or value is wrong.
    """
    if rest := _PAIR.sub("", text).strip():
        raise RecipeError(f"--node: '{rest}' is no key=value; separate pairs by spaces and put strings in quotes")
    try:
        table = tomllib.loads("\n".join(f"{key} = {value}" for key, value in _PAIR.findall(text)))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f'--node: {error}. Values are TOML: strings in quotes, as in data="mine.npz"') from None
    node: NodeConfig = build(WHERE, NodeConfig, table)
    return node


def policy_on(node: NodeConfig, recipe: Recipe, modalities: tuple[str, ...]) -> Policy:
    """Return the policy that allows only what both the device's policy and the recipe's policy allow.

    Raises:
        RecipeError: the policy file cannot be read, or is not a policy.
    """
    # several sites may use the same policy file, so it may have rows for modalities that this device lacks
    rows = tuple(dict.fromkeys((*recipe.model.modalities, *modalities, *node.held)))
    result = Policy.parse(recipe.egress, rows, guards=recipe.egress).for_client(node.held)
    rules = node.rules
    if not rules.path:
        return Policy().for_client(node.held).stricter(result)
    guards = guards_among(rules.egress, rows)
    own = Policy.parse(rules.egress, rows, f"policy {rules.path}: [egress]", guards=guards)
    return own.for_client(node.held).stricter(result)


def recipe_on(node: NodeConfig, path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe for use on this device.

    This function removes parts that only the server uses, so their code is not imported: trackers, the source of the
    server's rows, and custom partitions. This device's rows are in `node.data`. Call this function inside
    `registry.only(node.rules.allowance)`.

    Raises:
        NotAllowed: the recipe names code or a saved model that the device's owner has not allowed. The code was not
            imported.
        RecipeError: the recipe is wrong.
    """
    table = _of_a_client(read_table(path, overrides), has_data=bool(node.data))
    try:
        return parse_recipe(table, name=path.stem)
    except NotAllowed:  # the server gets this text, so it must not hold a path of this device
        raise
    except RecipeError as error:
        raise type(error)(f"{called(path, overrides)}: {error}") from None


def _of_a_client(table: Mapping[str, Any], has_data: bool) -> dict[str, Any]:
    kept = {section: entry for section, entry in table.items() if section != "tracking"}
    data, clients = kept.get("data"), kept.get("clients")
    dealt_by_code = isinstance(clients, Mapping) and ":" in str(clients.get("partition", ""))
    if isinstance(clients, Mapping) and dealt_by_code:
        kept["clients"] = {key: value for key, value in clients.items() if key != "partition"}
    if isinstance(data, Mapping):
        name = str(data.get("name", ""))
        if has_data and name == "npz":
            kept["data"] = {**data, "path": ELSEWHERE.path}  # the names of its arrays are those in this device's file
        elif has_data or dealt_by_code or ":" in name:
            kept["data"] = {"name": "npz", "path": ELSEWHERE.path}
    return kept


def used_on(recipe: Recipe) -> Allowance:
    """Return the code and models that devices must allow for this recipe."""
    algorithm, encoders = recipe.algorithm, recipe.model.encoders.values()
    joined = tuple(dict.fromkeys(array for modality, array in joined_arrays(recipe) if array != modality))
    arrays = {role: (name,) for role, name in named_arrays(recipe).items() if name != standard(role)}
    named = [name_of(algorithm, NAMED)]
    named += [name_of(part, SELECTORS) for _, part in parts(algorithm) if isinstance(part, Selector)]
    named += [encoder.kind for encoder in encoders]
    named += recipe.model.classes().values()
    imports = [name for name in named if ":" in name]
    models = [encoder.path for encoder in encoders if isinstance(encoder, HuggingFace)]
    return Allowance(
        imports=tuple(dict.fromkeys(imports)), models=tuple(dict.fromkeys(models)), columns=joined, **arrays
    )


def check_held(node: NodeConfig, recipe: Recipe) -> None:
    """Refuse modalities for which the recipe has no encoder, and arrays that the recipe may not use here.

    Call this function inside `registry.only(node.rules.allowance)`.

    Raises:
        DataError: the recipe has no encoder for a modality. The text suggests the most similar name.
        NotAllowed: the recipe's [data] names an array that it may not use on this device; see `check_arrays`.
    """
    for name in node.held:
        if name not in recipe.model.modalities:
            known = recipe.model.modalities
            hint = did_you_mean(name, known) if known else "a recipe for devices names its encoders, [model.encoders]"
            raise DataError(f"{WHERE} modalities: the recipe has no '{name}'; {hint}")
    check_arrays(recipe, (*node.held, *node.rules.egress))
