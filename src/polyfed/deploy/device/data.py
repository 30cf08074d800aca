"""Reads the data of a device, and checks that it fits the federation."""

import hashlib
import hmac
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from polyfed.core.errors import DataError, NotAllowed, RecipeError
from polyfed.core.registry import allowed_arrays
from polyfed.data import Columns, Population, Shards
from polyfed.data.column_fitting import Statistics, agreed, encoded, fits, read_tables, statistics
from polyfed.data.columns import TEST, TRAIN, VALIDATION, check_finite
from polyfed.data.population.population import warn_of_divided
from polyfed.data.reading.array_files import Arrays
from polyfed.data.reading.row_facts import number_of
from polyfed.data.row_groups import device_groups
from polyfed.data.sources.own.npz import ROWS, Npz
from polyfed.deploy.device.allowed_arrays import ELSEWHERE
from polyfed.deploy.device.configuration import WHERE, NodeConfig
from polyfed.engines.protocol import Facts
from polyfed.experiment.recipes.defaults import scaled
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.task_choice import task_of

LEAST_KEY = 32
"""Least bytes of the key of `id_key`."""

NEW_KEY = "Make one, and copy it to all devices of the silo, but not to its edge: openssl rand -hex 32"


def population_on(
    node: NodeConfig,
    recipe: Recipe,
    facts: Facts | None,
    vet: Callable[[int], None] = lambda rows: None,
    least: int = 0,
) -> Population:
    """Return a population in which only this client has rows.

    Args:
        node: the device's configuration.
        recipe: the recipe. If its data source is `npz`, the section [data] says which arrays hold labels and ids.
        facts: shapes and classes of the federation, or None if they are not known yet.
        vet: called with the number of training rows before the data is compared with `facts`. It raises the refusal of
            a device that takes no part in the run. If the comparison came first, the server could find out shapes and
            classes by trying facts until the data fits them.
        least: how many rows a word or a mean of a column must have so that the device tells it at enrolment.

    Raises:
        DataError: the data cannot be read, is damaged, or does not fit the federation.
        NotAllowed: the recipe leaves out the array with which the owner marks training rows.
    """
    base = recipe.data if isinstance(recipe.data, Npz) else ELSEWHERE
    if base.ids == ROWS:  # row numbers identify samples in a single table, but not across the files of several devices
        base = replace(base, ids=Npz.ids)
    # a device belongs to one client and has only one test set, so it needs neither of the first two arrays; it draws no
    # split, so a recipe has no say in who the persons are
    base = replace(base, client=Npz.client, split_personal=Npz.split_personal, person=Npz.person)
    if not base.split:  # the owner decides which rows train, so a recipe cannot take the array of the split away
        base = replace(base, split=Npz.split)
    _refuse_left_out_split(base.split, node)
    source = replace(base, path=node.data, **_arrays_of(base, node, facts), test_share=0.0)
    columns = _loaded(source, recipe, node)
    method: Any = recipe.algorithm
    columns = replace(columns, groups=device_groups(node.data, getattr(method, "groups", {}), len(columns)))
    if recipe.algorithm.aligns_rows and columns.numbered:
        raise DataError(
            f"{node.data} has no sample ids, and row numbers do not show that the devices of a silo hold the same "
            f"samples. Save the array 'id' in it: an integer or word for each row, the same on every device of the silo"
        )
    if node.id_key and not columns.numbered:
        columns = replace(columns, ids=pseudonyms(columns.ids, Path(node.id_key)))
    vet(len(columns.rows(TRAIN)))
    result = statistics(columns, columns.rows(TRAIN), least=least) if facts is None else {}
    columns = _encoded(columns, result, facts, node)
    if facts is not None:
        _check_fits(columns, facts, node, task_of(recipe).OF_CLASSES)
        columns = replace(columns, num_classes=facts.num_classes, class_names=None)
    columns = _scaled(columns, recipe, facts)
    own, validation = columns.rows(TEST), columns.rows(VALIDATION)
    return Population(
        columns=columns,
        train=_only(node.client, columns.rows(TRAIN)),
        test=_only(node.client, own) if len(own) else None,
        holds=torch.ones(node.client + 1, len(columns.modalities), dtype=torch.bool),
        silo=None if node.silo < 0 else torch.full((node.client + 1,), node.silo),
        test_rows=own[:0],
        validation_rows=own[:0],
        own_validation=_only(node.client, validation) if len(validation) else None,
        told=({},) * node.client + (result,) if result else (),
    )


def _loaded(source: Npz, recipe: Recipe, node: NodeConfig) -> Columns:
    """Return the rows, and warn if their split divides persons, whom nothing else on a device reads."""
    columns: Columns = task_of(recipe).prepared(refuse_own_numbers(source.load(), node.data))
    check_finite(columns)
    warn_of_divided(columns)
    return replace(columns, person=None, unread_names={})


def pseudonyms(ids: torch.Tensor, path: Path) -> torch.Tensor:
    """Replace sample ids by numbers that only those can compute who have a key: 63 bits of HMAC-SHA-256.

    Args:
        ids: the sample ids, int64 (N,).
        path: file with the key.

    Raises:
        DataError: the file cannot be read or is too short, or two ids get the same number.
    """
    try:
        key = path.expanduser().read_bytes().strip()
    except OSError as error:
        raise DataError(f"{WHERE} id_key: {path} cannot be read ({error}). {NEW_KEY}") from None
    if len(key) < LEAST_KEY:
        raise DataError(f"{WHERE} id_key: {path} holds {len(key)} bytes, and a key at least {LEAST_KEY}. {NEW_KEY}")
    made = [number_of(hmac.new(key, b"polyfed sample id\n%d" % one, hashlib.sha256)) for one in ids.tolist()]
    if len({*made}) < len(made):
        raise DataError(f"{WHERE} id_key: two sample ids get the same number, by chance. {NEW_KEY}")
    return torch.tensor(made, dtype=torch.int64)


def _arrays_of(base: Npz, node: NodeConfig, facts: Facts | None) -> dict[str, Any]:
    """Return the modalities of this device with their arrays, and the rules of these arrays."""
    order, said = _in_order(node, facts), base.modalities
    if isinstance(said, Mapping):
        kept = {name: said.get(name, name) for name in order}
        used = {array for group in kept.values() for array in ([group] if isinstance(group, str) else group)}
        return {"modalities": kept, "columns": {name: rule for name, rule in base.columns.items() if name in used}}
    return {"modalities": order, "columns": {name: rule for name, rule in base.columns.items() if name in order}}


def _encoded(columns: Columns, told: Statistics, facts: Facts | None, node: NodeConfig) -> Columns:
    """Return the columns with numbers in place of words, empty cells and dates.

    Before the federation has agreed, the words and means are those of this device alone. The server sends the agreed
    ones, but cannot change a rule of the recipe.

    Raises:
        DataError: the federation has other columns, or its words and means cannot be read.
    """
    before = fits(columns)
    if facts is None:
        return encoded(columns, agreed(before, [told], node.data, lenient=True))
    try:
        known = read_tables({name: facts.columns[name] for name in before}, facts.shapes)
        for name, features in before.items():
            if [(f.column, f.rule) for f in known[name]] != [(f.column, f.rule) for f in features]:
                raise ValueError(f"other columns of '{name}'")
    except (KeyError, TypeError, ValueError, AttributeError, RecipeError) as error:
        raise DataError(f"the server sent no words and means that fit [data.columns] ({error!r})") from None
    return encoded(columns, known)


def _scaled(columns: Columns, recipe: Recipe, facts: Facts | None) -> Columns:
    """Return the columns, standardised with the statistics of this device's own training rows.

    With "uneven", all devices standardise the same modalities: each reports at enrolment which of its own are uneven,
    and `facts` name those that most devices reported. Before that, the result is scaled by the device's own finding.
    """
    if columns.standardise == "uneven" and facts is not None:
        columns = replace(columns, standardise=tuple(name for name in facts.standardise if name in columns.modalities))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `polyfed check --node` says what the owner of the device must know
        return scaled(recipe, columns, columns.rows(TRAIN))


def _refuse_left_out_split(split: str, node: NodeConfig) -> None:
    """Refuse a recipe that would train on all rows of data whose owner marks the training rows in another array.

    If the data has no array with the standard name of the split, all rows train. But if the owner allows another array
    as the split, and the data has this array, it may mark rows that must not train.

    Args:
        split: the name of the array that the recipe uses as the split.
        node: the device's configuration.

    Raises:
        NotAllowed: the data does not have the array `split`, but another array that the owner allows as the split.
    """
    allowed = allowed_arrays("split")
    if not allowed or split in (arrays := Arrays(node.data)):
        return
    if found := [name for name in allowed if name in arrays]:
        raise NotAllowed(
            f"the data of this device has no array '{split}', but the array '{found[0]}', which its owner allows as "
            f"[data] split. Without it, rows that the owner may have left out would train. Set [data] split = "
            f"'{found[0]}' in the recipe, or the owner renames the array to '{Npz.split}'"
        )


def refuse_own_numbers(columns: Columns, where: str) -> Columns:
    """Return the columns, unless their labels are words that polyfed has numbered from this file alone.

    Every machine sorts only the words of its own file. Two machines with different words would give one number to two
    different classes, and no error would show it.

    Args:
        columns: the rows of one machine of a deployment.
        where: the file or folder of the rows.

    Raises:
        DataError: the labels are words, and the file does not list the names of the classes.
    """
    if columns.words_sorted:
        raise DataError(
            f"{where}: the labels are words and the file does not list the classes, so each device would number only "
            "the words of its own file, and one number would mean different classes on different devices. Save an "
            "array 'label_name' in it with the names of all classes, the same on every device and on the server, or "
            'save class numbers from 0 as labels. If the task uses no labels, set [data] label = "" in the recipe'
        )
    return columns


def _in_order(node: NodeConfig, facts: Facts | None) -> tuple[str, ...]:
    """Return the device's modalities in the order of the federation. Those that the federation lacks come last."""
    if facts is None:
        return node.held
    known = tuple(name for name in facts.shapes if name in node.held)
    return (*known, *(name for name in node.held if name not in facts.shapes))


def _check_fits(columns: Columns, facts: Facts, node: NodeConfig, of_classes: bool) -> None:
    if strange := [name for name in node.held if name not in facts.shapes]:
        raise DataError(f"{WHERE} modalities: the federation has no '{strange[0]}', only {list(facts.shapes)}")
    for name, column in columns.modalities.items():
        if column.shape != facts.shapes[name]:
            raise DataError(
                f"{node.data}: samples of '{name}' have the shape {column.shape}, but in the federation they have the "
                f"shape {facts.shapes[name]}"
            )
    here, there = columns.num_classes, facts.num_classes
    if here > there or (here != there and not of_classes):
        what = "classes" if of_classes else "targets a row"
        raise DataError(f"{node.data}: {here} {what}, the federation has {there}")


def _only(client: int, rows: torch.Tensor) -> Shards:
    """Give all rows to the client with this number, and no rows to clients 0 to `client` - 1."""
    offsets = torch.zeros(client + 2, dtype=torch.int64)
    offsets[-1] = len(rows)
    return Shards(offsets, rows)
