"""One client's own device: what its node's configuration says, its data and its policy."""

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from polyfed.core.errors import DataError, RecipeError, did_you_mean
from polyfed.data import Columns, Population, Shards
from polyfed.data.columns import TEST, TRAIN, check_finite
from polyfed.data.sources.npz import Npz
from polyfed.engines.protocol import Facts
from polyfed.experiment.recipe import Recipe, build
from polyfed.privacy.policy import Policy

WHERE = "--node-config"

_PAIR = re.compile(r"""([\w-]+)\s*=\s*("[^"]*"|'[^']*'|\S+)""")
"""A key and its value; values are TOML, and spaces stand between the pairs, as Flower reads it."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """What a SuperNode's `--node-config` says of its client.

    Attributes:
        data: an `.npz` file, or a folder of `.npy` files; rows of split 0 are trained on, rows of split 1 (if the
            file has an array `split`) are the client's own test rows.
        client: its number in the federation, from 0; no two nodes may have the same.
        modalities: which arrays it takes part with, separated by commas.
        policy: its own policy, a TOML file with the [egress.*] tables; without one the default policy holds. What
            a recipe forbids beyond that stays forbidden.
        state: folder for its local state and its ledger; by default `polyfed-state` beside the data.
        silo: number of its silo, or -1.
        relay: `server-sees` agrees that messages within the silo pass through the server.
    """

    data: str
    client: int
    modalities: str
    policy: str = ""
    state: str = ""
    silo: int = -1
    relay: str = "refused"

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if self.client < 0:
            raise RecipeError(f"{WHERE} client = {self.client}; clients are numbered from 0")
        if self.relay not in ("refused", "server-sees"):
            raise RecipeError(f"{WHERE} relay = '{self.relay}'; allowed: refused, server-sees")

    @property
    def held(self) -> tuple[str, ...]:
        """The modalities."""
        return tuple(name.strip() for name in self.modalities.split(",") if name.strip())

    @property
    def folder(self) -> Path:
        """Where its state is."""
        return Path(self.state) if self.state else Path(self.data).absolute().parent / "polyfed-state"


def node_from(text: str) -> NodeConfig:
    """The configuration in the words of `flower-supernode --node-config`.

    Raises:
        RecipeError: they are no pairs of key and TOML value, or a key or value is wrong.
    """
    if rest := _PAIR.sub("", text).strip():
        raise RecipeError(f"{WHERE}: '{rest}' is no key=value; write pairs with spaces between, strings in quotes")
    try:
        table = tomllib.loads("\n".join(f"{key} = {value}" for key, value in _PAIR.findall(text)))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f'{WHERE}: {error}. Values are TOML: strings in quotes, as in data="mine.npz"') from None
    node: NodeConfig = build(WHERE, NodeConfig, table)
    return node


def policy_on(node: NodeConfig, recipe: Recipe, modalities: tuple[str, ...]) -> Policy:
    """The client's own policy, narrowed by the recipe's.

    Raises:
        RecipeError: the file is not there, or says what no policy says.
    """
    told = Policy.parse(recipe.egress, {**dict.fromkeys(modalities), **dict.fromkeys(recipe.egress)})
    if not node.policy:
        return Policy().stricter(told)
    try:
        table = tomllib.loads(Path(node.policy).read_text(encoding="utf-8-sig"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"policy {node.policy}: {error}. Give a TOML file with [egress.*] tables") from None
    # one file may serve all sites: rows for modalities of the federation that this device lacks are no mistake
    rows = {**dict.fromkeys(recipe.model.encoders), **dict.fromkeys(modalities), **dict.fromkeys(node.held)}
    own = Policy.parse(table.get("egress", {}), rows, f"policy {node.policy}: [egress]")
    if strange := [name for name in table if name != "egress"]:
        raise RecipeError(f"policy {node.policy}: no section '{strange[0]}'; a policy has [egress.*] tables only")
    return own.stricter(told)


def population_on(node: NodeConfig, recipe: Recipe, facts: Facts | None) -> Population:
    """A population in which this client has its number and its rows; the rows of all others are elsewhere.

    Args:
        node: the node's configuration.
        recipe: whose [data] says which array is the label, where it speaks of an `.npz`.
        facts: about the federation; None before it is known.

    Raises:
        DataError: the data is not there, is damaged, or does not fit the federation.
    """
    base = recipe.data if isinstance(recipe.data, Npz) else Npz(path="")
    source = replace(base, path=node.data, modalities=_in_order(node, facts), test_share=0.0)
    columns: Columns = source.load()
    check_finite(columns)
    if facts is not None:
        _check_fits(columns, facts, node)
        columns = replace(columns, num_classes=facts.num_classes, class_names=None)
    own = columns.rows(TEST)
    return Population(
        columns=columns,
        train=_only(node.client, columns.rows(TRAIN)),
        test=_only(node.client, own) if len(own) else None,
        holds=torch.ones(node.client + 1, len(columns.modalities), dtype=torch.bool),
        silo=None if node.silo < 0 else torch.full((node.client + 1,), node.silo),
        test_rows=own[:0],
        validation_rows=own[:0],
    )


def check_held(node: NodeConfig, recipe: Recipe) -> None:
    """Refuse modalities that the recipe does not know.

    Raises:
        DataError: with the nearest name.
    """
    for name in node.held:
        if name not in recipe.model.encoders:
            hint = did_you_mean(name, recipe.model.encoders)
            raise DataError(f"{WHERE} modalities: the recipe has no '{name}'; {hint}")


def _in_order(node: NodeConfig, facts: Facts | None) -> tuple[str, ...]:
    if facts is None:
        return node.held
    strange = [name for name in node.held if name not in facts.shapes]
    if strange:
        raise DataError(f"{WHERE} modalities: the federation has no '{strange[0]}', only {list(facts.shapes)}")
    return tuple(name for name in facts.shapes if name in node.held)


def _check_fits(columns: Columns, facts: Facts, node: NodeConfig) -> None:
    for name, column in columns.modalities.items():
        if column.shape != facts.shapes[name]:
            raise DataError(
                f"{node.data}: samples of '{name}' have shape {column.shape}, in the federation {facts.shapes[name]}"
            )
    if columns.num_classes > facts.num_classes:
        raise DataError(f"{node.data}: {columns.num_classes} classes, the federation has {facts.num_classes}")


def _only(client: int, rows: torch.Tensor) -> Shards:
    """All rows with one client, none with those before it."""
    offsets = torch.zeros(client + 2, dtype=torch.int64)
    offsets[-1] = len(rows)
    return Shards(offsets, rows)
