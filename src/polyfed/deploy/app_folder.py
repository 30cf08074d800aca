"""Write the app of a recipe, and folders of data for the clients of a demonstration."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import Tensor, nn

from polyfed.core.errors import DataError, PolyfedError, RecipeError, command
from polyfed.core.system.json_and_toml import parse_toml, toml_value
from polyfed.core.tree import Tree, size_bytes
from polyfed.data import Column, Columns, Population, stacked
from polyfed.data.columns import OWN_TEST, TEST, VALIDATION
from polyfed.data.reading.array_files import Arrays
from polyfed.data.sources.own.npz import Npz, scaling_names
from polyfed.data.sources.own.table_files import Table
from polyfed.deploy.device.agent import LARGEST_APP
from polyfed.deploy.device.allowed_arrays import array_names, standard
from polyfed.deploy.device.configuration import used_on
from polyfed.deploy.device.data import refuse_own_numbers
from polyfed.deploy.server.enrolment import refuse_fitted_elsewhere
from polyfed.deploy.server.membership import expected
from polyfed.experiment.checks.check import refuse_large
from polyfed.experiment.recipes.conflicts import refuse_conflicts
from polyfed.experiment.recipes.recipe import Recipe, load_recipe, read_table
from polyfed.experiment.recipes.task_choice import task_of
from polyfed.experiment.running.assembly import assemble, model_of, policy_of, population_of
from polyfed.experiment.running.warm_start import given_of, write_text_copy
from polyfed.model import Custom, user_classes

APP, RECIPE, NODES = "app.toml", "recipe.toml", "nodes"

LARGEST_RECIPE = 2**20
"""Bytes of an app that are left for its recipe."""


def placed(recipe: Recipe, data: str = "") -> Recipe:
    """Return the recipe for the server: with the engine `devices`, and the path of the server's own rows, if any.

    Raises:
        RecipeError: options of the recipe cannot go together in a deployment.
    """
    if data and not hasattr(recipe.data, "path"):
        raise RecipeError(f"data = '{data}': [data] of the recipe reads no file. Leave it out")
    source = replace(recipe.data, path=data) if data else recipe.data
    recipe = replace(recipe, data=source, engine=replace(recipe.engine, name="devices"))
    refuse_fitted_elsewhere(recipe)
    refuse_conflicts(recipe, deployed=True)
    return recipe


def write_app(
    recipe_path: str | Path,
    folder: str | Path,
    warn: Callable[[str], None] = lambda text: None,
    overrides: Sequence[str] = (),
) -> Path:
    """Write an app that `polyfed submit` runs: the recipe, the values of its warm start, and `app.toml`.

    `app.toml` names the folder of the run and, if the recipe's [data] has a path, where the server reads its own rows.

    Args:
        folder: folder for the app. It must be new or empty, or hold an app of this recipe's name.
        warn: called with the reason if the recipe's data cannot be read on this machine. The run has no global
            evaluation unless the server can read the data.
        overrides: changes to the recipe, each as `section.key=value`.

    Returns:
        The folder.

    Raises:
        PolyfedError: the recipe is wrong, its replies are too large, or the folder holds other files.
    """
    recipe, folder = load_recipe(recipe_path, overrides), Path(folder)
    given = given_of(recipe)
    _refuse_heavy(recipe, given)
    _check(recipe, warn)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / APP).exists():
        raise RecipeError(f"{folder} is not empty and holds no polyfed app. Choose another folder")
    _refuse_another(folder, recipe.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_text_copy(given, folder)
    text = Path(recipe_path).read_text(encoding="utf-8")
    if overrides:
        text = tomli_w.dumps(read_table(Path(recipe_path), overrides))
    (folder / RECIPE).write_text(text, encoding="utf-8")
    told = {"name": recipe.name, "out": str((folder / "run").absolute()), "data": data_of(recipe)}
    (folder / APP).write_text(tomli_w.dumps(told), encoding="utf-8")
    return folder


def app_config(folder: Path) -> dict[str, str]:
    """Return what `app.toml` says: `name`, `out` and `data`.

    Raises:
        RecipeError: the folder holds no app.
    """
    try:
        result = parse_toml((folder / APP).read_text(encoding="utf-8"))
        return {key: str(result[key]) for key in ("name", "out", "data")}
    except (OSError, ValueError, KeyError) as error:
        write = command("app", folder, "--recipe", "RECIPE.toml")
        raise RecipeError(f"{folder} holds no app ({error!r}); write one: {write}") from None


def _refuse_heavy(recipe: Recipe, given: Tree) -> None:
    """Refuse a warm start that is too large for an app.

    Raises:
        RecipeError: the values take more bytes than devices fetch.
    """
    most = LARGEST_APP // 4 * 3 - LARGEST_RECIPE  # base64 has four characters for three bytes
    if (size := size_bytes(given)) > most:
        raise RecipeError(
            f"[model] init = '{recipe.model.init}' takes {size:,} bytes, and an app, which carries it to the devices, "
            f"holds at most {most:,}. Take fewer blocks: init_blocks",
            ("model", "init"),
        )


def _refuse_another(folder: Path, name: str) -> None:
    """Refuse a folder that holds the app of another recipe."""
    try:
        kept = app_config(folder)["name"]
    except RecipeError:
        return  # there is no app yet, or an earlier write was interrupted: write it again
    if kept != name:
        raise RecipeError(f"{folder} holds the app '{kept}', and this recipe's is '{name}'. Choose another folder")


def _check(recipe: Recipe, warn: Callable[[str], None]) -> None:
    """Before the app is written, find errors that would later end the run on the server.

    Such errors are, for example, a number of devices that no silos have, an encoder that cannot be imported, a model
    that cannot be built, and a reply that is too large.
    """
    placed(recipe)
    if expected(recipe) == 1 and not _says_devices(recipe):
        warn(
            "neither [deployment] nodes nor [clients] num says how many devices there are, so the server waits for one"
        )
    for name, path in recipe.model.classes().items():
        user_classes.found(f"[model] {name}", path, nn.Module)
    for encoder in recipe.model.encoders.values():
        if isinstance(encoder, Custom):
            encoder.encoder_class()
    try:
        columns: Columns = stacked(recipe.data.load(), recipe.stack)
    except DataError as error:
        place = "polyfed submit --data FILE" if data_of(recipe) else "the recipe's [data]"
        warn(f"no global evaluation unless the server can read these rows: {error}. {place} says where they are there")
        return
    _refuse_unlisted(recipe, columns)
    columns = task_of(recipe).prepared(columns)
    shapes = {name: column.shape for name, column in columns.modalities.items()}
    model_of(recipe, shapes, columns.num_classes, policy_of(recipe, columns))
    try:
        assembly = assemble(recipe)
    except PolyfedError:  # the server's rows may be test rows only, from which no simulation can be made
        return
    refuse_large(assembly)


def _says_devices(recipe: Recipe) -> bool:
    """Return whether a recipe says how many devices its server waits for."""
    return recipe.clients.partition == "silos" or bool(recipe.deployment.nodes or recipe.clients.num)


def _refuse_unlisted(recipe: Recipe, columns: Columns) -> None:
    """Refuse the server's own rows if polyfed has numbered the words of their labels, as no device would."""
    if columns.words_sorted and isinstance(recipe.data, Table):
        raise RecipeError(
            f"[data] '{recipe.data.path}': the labels are words, and devices cannot see which number each has here. "
            f"List the classes: class_names = {toml_value(list(columns.class_names or ()))}",
            ("data", "class_names"),
        )
    refuse_own_numbers(columns, f"the server's [data] '{columns.name}'")


def here(recipe: Recipe, population: Population) -> list[str]:
    """Return what a recipe must say for devices on this machine, as overrides: the classes, and how many devices.

    Args:
        recipe: the recipe of a simulation.
        population: its clients, each of which becomes a device.
    """
    columns, result = population.columns, []
    if columns.words_sorted and isinstance(recipe.data, Table):
        result.append(f"data.class_names={toml_value(list(columns.class_names or ()))}")
    if not _says_devices(recipe):
        result.append(f"deployment.nodes={population.num_clients}")
    return result


def write_job(recipe: Recipe, folder: str | Path) -> Path:
    """Write the app of an evaluation job. The server reads the model from the app; devices get it in the request.

    Raises:
        PolyfedError: the recipe is wrong, the model is too large for an app, or the folder holds other files.
    """
    folder = Path(folder)
    with tempfile.TemporaryDirectory(prefix="polyfed-") as spare:
        path = Path(spare) / f"{recipe.name}.toml"
        path.write_text(tomli_w.dumps(recipe.table()), encoding="utf-8")
        return write_app(path, folder)


def data_of(recipe: Recipe) -> str:
    """Return the absolute path of the recipe's data, or "" if its data source has no path."""
    path = getattr(recipe.data, "path", "")
    return str(Path(path).expanduser().absolute()) if path else ""


def write_nodes(recipe: Recipe, folder: str | Path, population: Population | None = None) -> list[Path]:
    """Write a folder for each client of a recipe, with the client's rows and policy, as on a device.

    `data.npz` holds only the modalities that the client has. Only this user can read the folder. The order of the rows
    is the same as in a simulation, so a deployment with these folders gives the same results as the simulation.
    Existing policy files are kept.

    Args:
        recipe: the recipe of a simulation.
        folder: where the devices' folders are made.
        population: the clients of the recipe, if they are known already.

    Returns:
        The folders `nodes/0`, `nodes/1`, ... below `folder`.

    Raises:
        RecipeError: [data.columns] reads image files, which lie beside the file of all clients, or rows were left out.
    """
    population = population or population_of(recipe)
    if isinstance(recipe.data, Npz) and recipe.data.columns:
        _refuse_uncopied(recipe.data, len(population.columns))
    written = []
    for client in range(population.num_clients):
        place = Path(folder) / NODES / str(client)
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o700)  # it holds a copy of the data
        np.savez(place / "data.npz", **_arrays(population, client, recipe))  # type: ignore[arg-type]
        written.append(place)
        if (place / "policy.toml").exists():
            continue
        (place / "policy.toml").write_text(_policy_for(recipe), encoding="utf-8")
    return written


def _refuse_uncopied(source: Npz, rows: int) -> None:
    """Refuse arrays that cannot be copied row by row into the files of single clients."""
    rules = {feature.column: feature.rule for features in source.features.values() for feature in features}
    if images := [column for column, rule in rules.items() if rule is not None and rule.kind == "image"]:
        raise RecipeError(
            f"[data.columns] reads the image files that {', '.join(images)} names, from the folder of this file. Write "
            "a file with the pixels as an array for each client",
            ("data", "columns"),
        )
    if Arrays(source.path)[next(iter(rules))].shape[0] != rows:
        raise RecipeError(
            "[data] empty_rows or stack changes which rows there are, so the arrays of [data.columns] have other rows "
            "than the samples. Write a file for each client yourself",
            ("data", "columns"),
        )


def _policy_for(recipe: Recipe) -> str:
    """Return the text of a client's policy file that allows all that this recipe does in a simulation."""
    head = "# What may leave this client, and what a recipe may use on it ([allow]).\n"
    head += "# This file belongs to the client: the server's recipe can only forbid more.\n"
    rules = {block: {to: list(kinds) for to, kinds in row.items()} for block, row in recipe.egress.items()}
    used = {key: list(names) for key, names in asdict(used_on(recipe)).items() if names}
    return head + tomli_w.dumps({"egress": rules} | ({"allow": used} if used else {}))


def device_tables(recipe: Recipe, places: Sequence[Path], population: Population | None = None) -> list[dict[str, Any]]:
    """Return the table [[device]] for each folder of `write_nodes`, without its key; see `NodeConfig`."""
    population = population or population_of(recipe)
    tables: list[dict[str, Any]] = []
    for client, place in enumerate(places):
        files = {"data": str(place.absolute() / "data.npz"), "policy": str(place.absolute() / "policy.toml")}
        tables.append({**files, "client": client, "modalities": ",".join(population.modalities(client))})
        if population.silo is not None:
            tables[-1] |= {"silo": int(population.silo[client]), "relay": recipe.deployment.relay}
    return tables


def _arrays(population: Population, client: int, recipe: Recipe) -> dict[str, np.ndarray]:
    columns, train = population.columns, population.train[client]
    own, validation = (
        train[:0] if shards is None else shards[client] for shards in (population.test, population.own_validation)
    )
    rows = np.concatenate([train.numpy(), own.numpy(), validation.numpy()])
    arrays: dict[str, np.ndarray] = {}
    made, stored = ({}, None) if not isinstance(recipe.data, Npz) else (recipe.data.features, Arrays(recipe.data.path))
    for name in population.modalities(client):
        if name in made and stored is not None:  # what the words and holes become is fitted by all clients together
            arrays |= {feature.column: stored[feature.column][rows] for feature in made[name]}
        else:
            arrays |= _samples(name, columns.modalities[name], train.new_tensor(rows), recipe)
        if name in columns.present:
            arrays[f"{name}_present"] = columns.present[name].numpy()[rows]
    names = array_names(recipe)
    arrays[names["label"]] = columns.label.numpy()[rows]
    arrays[names["ids"]] = columns.ids.numpy()[rows]
    arrays[names["split"]] = np.repeat([0, TEST, VALIDATION], [len(train), len(own), len(validation)])
    if names["class_names"] != standard("class_names") and columns.class_names:
        arrays[names["class_names"]] = np.array(columns.class_names)
    assert TEST == OWN_TEST == 1
    return arrays


def _samples(name: str, column: Column, rows: Tensor, recipe: Recipe) -> dict[str, np.ndarray]:
    """Return the arrays of a modality, by the names under which the recipe reads them.

    Scaled values would be scaled once more by everything that scales a file as in a model's training. So these arrays
    hold the values as stored, and two others the shift and the scale of the population.
    """
    scaling = {}
    values = column.raw(rows) if column.values.dtype == torch.int64 else column.take(rows)  # token ids stay ids
    if column.shift is not None or column.scale is not None:
        values, one = column.raw(rows), torch.ones(())
        values = values.to(torch.float32) if values.dtype == torch.bfloat16 else values
        parts = (0 * one if column.shift is None else column.shift, one if column.scale is None else column.scale)
        scaling = {n: part.cpu().numpy() for n, part in zip(scaling_names(name), parts, strict=True)}
    group = recipe.data.groups.get(name, [name]) if isinstance(recipe.data, Npz) else [name]
    joined = {group[0]: values} if len(group) == 1 else dict(zip(group, values.unbind(1), strict=True))
    return {array: part.numpy() for array, part in joined.items()} | scaling
