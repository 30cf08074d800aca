"""Warm start: `[model] init` fills the initial model with the values of another run or file, whole or block by block.

A run keeps a copy of these values in its folder, and an app carries one to the server and the devices, so nobody needs
the other run again.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from polyfed.algorithms import NAMED
from polyfed.core.errors import CheckpointError, DataError, NotAllowed, RecipeError, did_you_mean
from polyfed.core.registry import name_of, restricted
from polyfed.core.system.files import RECIPE, sync
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.tree import Tree, block_of, blocks, nested, select
from polyfed.experiment.recipes.recipe import Recipe, load_recipe
from polyfed.experiment.running.checkpoint import sha256_of
from polyfed.experiment.running.run_state import BEST, kept_best, load_content
from polyfed.model import Model
from polyfed.model.stand_ins import is_prototype, is_zero_input

COPY = "init.safetensors"
"""The copy of the values in the folder of a run."""

APP_COPY = "init.json"
"""The copy of the values in the folder of an app: a safetensors file as base64, because apps hold only text."""

AGAINST = "@against"
"""The block of the values of an evaluation job's second model. No modality can have this name."""

DESCRIPTION, GLOBAL, FROZEN = "model.json", "global.safetensors", "frozen.safetensors"
"""Files of a folder that `Run.export` wrote."""


def given_of(recipe: Recipe, folder: Path | None = None) -> Tree:
    """Return the values of the recipe's warm start, by name. Without [model] init, there are none.

    Args:
        folder: the folder of a run or of an app. If it holds a copy of the values, they come from there.

    Raises:
        RecipeError: the source does not exist, or has no model for `init`.
        DataError, CheckpointError: a file is damaged.
        NotAllowed: this is a device, and the recipe's app holds no copy. A server must not name files of a device.
    """
    path = recipe.model.init
    if not path:
        return {}
    if (copied := copy_in(folder)) is not None:
        result = _read_text(copied) if copied.name == APP_COPY else _read(copied)
    elif restricted():
        raise NotAllowed(
            f"[model] init = '{path}' names a file, and the app carries no copy of it. Write the app again with "
            "`polyfed app`",
            ("model", "init"),
        )
    else:
        result = values_in(Path(path).expanduser())
        other = getattr(recipe.algorithm, "against", "")
        result = result | (nested(AGAINST, values_in(Path(other).expanduser())) if other else {})
    if not result:
        raise DataError(f"[model] init = '{path}' holds no parameters. Give another model", ("model", "init"))
    if wrong := [name for name, value in result.items() if not bool(value.isfinite().all())]:
        raise DataError(
            f"[model] init = '{path}': '{wrong[0]}' holds NaN or infinity. Give another model", ("model", "init")
        )
    wanted = recipe.model.init_blocks or blocks(result)
    if missing := [block for block in wanted if block not in blocks(result)]:
        raise RecipeError(
            f"[model] init_blocks: '{path}' has no block '{missing[0]}'; {did_you_mean(missing[0], blocks(result))}",
            ("model", "init_blocks"),
        )
    return select(result, wanted)


def values_in(path: Path) -> Tree:
    """Return the global model of a run's folder, of a folder that `Run.export` wrote, or of a safetensors file.

    Raises:
        RecipeError: there is no such file, or it holds no global model.
        DataError, CheckpointError: a file is damaged.
    """
    if path.is_file():
        return _read(path)
    if (path / DESCRIPTION).exists():
        try:
            sums = parse_json((path / DESCRIPTION).read_text(encoding="utf-8"))["sha256"]
            return {name: value for file in (GLOBAL, FROZEN) for name, value in _listed(path, file, sums).items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path / DESCRIPTION} is damaged ({error!r}). Restore it from a copy") from error
    if (path / RECIPE).exists():
        return _of_run(path)
    if path.name == BEST and (path.parent.parent / RECIPE).exists():
        return _of_run(path.parent.parent, best=True)
    what = "holds neither a run nor an exported model" if path.is_dir() else "does not exist"
    raise RecipeError(
        f"{path} {what}. Give the folder of a run, a folder that run.export wrote, or a safetensors file",
        ("model", "init"),
    )


def _of_run(folder: Path, *, best: bool = False) -> Tree:
    recipe = load_recipe(folder / RECIPE)
    found = load_content(folder / "checkpoint", recipe.algorithm)
    if found is None:
        raise CheckpointError(f"{folder} holds no checkpoint yet. Finish its run, or give another model")
    content: Mapping[str, Any] = found[1]
    if best:
        chosen = kept_best(folder / "checkpoint", content.get("best"), recipe.algorithm)
        if chosen is None:
            raise RecipeError(
                f"{folder} chose no best round. Run it with validation rows, as in --set clients.validation=0.1, or "
                "take its last round"
            )
        content = chosen
    params = recipe.algorithm.global_params(content["state"])
    if params is None:
        raise RecipeError(
            f"{folder} holds no global model, because {name_of(recipe.algorithm, NAMED)} trains one for each "
            "client. Export one of them: safetensors.torch.save_file(run.personal[k], FILE)",
            ("model", "init"),
        )
    kept = _read(folder / COPY) if (folder / COPY).exists() else {}
    return select(kept, recipe.model.freeze) | params


def _listed(folder: Path, file: str, sums: Mapping[str, str]) -> Tree:
    if file not in sums:
        if file == GLOBAL:
            raise RecipeError(f"{folder} holds only models of clients. Give [model] init one of its files")
        return {}
    if sha256_of(folder / file) != sums[file]:
        raise DataError(f"{folder / file} is damaged: its SHA-256 differs from the one in {DESCRIPTION}. Restore it")
    return _read(folder / file)


def _read(path: Path) -> Tree:
    try:
        return _reals(load_file(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"{path} is no safetensors file that can be read: {error}. Restore it from a copy") from error


def _reals(found: Tree) -> Tree:
    """Return the values as float32.

    Raises:
        ValueError: a value is complex or a truth value, and so no parameter.
    """
    if wrong := [name for name, value in found.items() if value.is_complex() or value.dtype == torch.bool]:
        raise ValueError(f"'{wrong[0]}' is {found[wrong[0]].dtype}, and parameters are real numbers")
    return {name: value.to(torch.float32) for name, value in found.items()}


def copy_in(folder: Path | None) -> Path | None:
    """Return the copy of the values in the folder of a run or of an app, or None."""
    paths = [] if folder is None else [folder / name for name in (COPY, APP_COPY)]
    return next((path for path in paths if path.exists()), None)


def _read_text(path: Path) -> Tree:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        return _reals(load(base64.b64decode(content["safetensors"])))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path.name} of the app cannot be read: {error}. Write the app again") from error


def write_text_copy(given: Tree, folder: Path) -> None:
    """Write the values into the folder of an app."""
    if given:
        content = save({name: value.cpu().contiguous().clone() for name, value in given.items()})
        text = json.dumps({"safetensors": base64.b64encode(content).decode()})
        (folder / APP_COPY).write_text(text, encoding="utf-8")


def write_copy(given: Tree, folder: Path) -> None:
    """Write the values into the folder of a run, so that it does not need their source again."""
    if given:
        save_file({name: value.cpu().contiguous().clone() for name, value in given.items()}, folder / COPY)
        sync(folder / COPY)


def warmed(initial: Tree, model: Model, given: Tree, recipe: Recipe) -> Tree:
    """Return the initial parameters with the values of the warm start in their places.

    Raises:
        RecipeError: a value does not fit. The text names each one, with both shapes.
    """
    frozen, faults = {**model.frozen, **model.constants}, []
    mine = {**{name: value.shape for name, value in initial.items()}, **{n: v.shape for n, v in frozen.items()}}
    given = {name: value for name, value in given.items() if block_of(name) != AGAINST}
    given = {name: value for name, value in given.items() if name in mine or not is_zero_input(name)}
    if not given:
        return initial
    used = set(blocks(given))
    for name in [name for name in mine if block_of(name) in used and name not in given and name in initial]:
        if is_prototype(name) or is_zero_input(name):  # a model that was trained without them has none
            continue
        faults.append(f"'{name}' is missing in it")
    for name, value in given.items():
        if name not in mine:
            faults.append(f"this model has no '{name}'")
        elif mine[name] != value.shape:
            faults.append(f"'{name}' has the shape {tuple(value.shape)}, and {tuple(mine[name])} here")
    if not recipe.model.init_blocks:
        faults += [f"it has no block '{block}'" for block in blocks(initial) if block not in used]
    if faults:
        fits = [b for b in blocks(initial) if b in used and not any(f"'{b}." in fault for fault in faults)]
        hint = f"Use the blocks that fit: init_blocks = {fits}" if fits else "Give a model of the same encoders"
        listed = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise RecipeError(
            f"[model] init = '{recipe.model.init}' does not fit this model: {listed}. {hint}", ("model", "init")
        )
    return {
        name: given[name].to(value.device, value.dtype) if name in given else value for name, value in initial.items()
    }
