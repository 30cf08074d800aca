"""Saved models: write the trained models of a run to a folder, and load them without the run.

A saved model is a folder with `model.json`, `global.safetensors` if there is a global model, and one file for each
client that has its own model. `save` writes to a temporary folder and then renames this folder. `load_model` verifies
each file when it reads the file.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from polyfed.algorithms import PREDICTORS
from polyfed.core.errors import DataError, NotAllowed, RecipeError
from polyfed.core.registry import Allowance, find, name_of, only
from polyfed.core.scaling import Scaling
from polyfed.core.system.files import sync
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.tree import SHARED, Tree, digest, select
from polyfed.data.column_fitting import Features, as_tables, read_tables
from polyfed.data.sources.own.new_rows import RowForm
from polyfed.evaluation.scores import Predictor
from polyfed.experiment.recipes.parts import build
from polyfed.experiment.recipes.recipe import as_table
from polyfed.experiment.results.models import Models, read_conformal
from polyfed.experiment.running.checkpoint import sha256_of
from polyfed.experiment.running.warm_start import DESCRIPTION, FROZEN, GLOBAL
from polyfed.model import Model, ModelSpec, build_model
from polyfed.model.encoders.catalogue import entry_of
from polyfed.model.plain_module import write_onnx
from polyfed.objective import OBJECTIVES, Classification, Objective

FORMAT = 1
"""The version of the folder's layout. polyfed does not read other versions."""


def save(models: Models, folder: str | Path, *, onnx: bool = False) -> Path:
    """Write models to a new or empty folder. A reader finds either all models or none.

    Args:
        onnx: whether to write each model as an ONNX file as well.

    Returns:
        The folder's absolute path.

    Raises:
        RecipeError: the folder is not empty, the models are not on this machine, or an encoder has options that JSON
            cannot hold.
        ModelError: a model cannot be written as ONNX.
        DataError: the folder cannot be written.
    """
    if models.shared is None:
        models.check_here()
    target = Path(folder).expanduser().resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise RecipeError(f"{target} exists and is not an empty folder; nothing was replaced. Choose another folder")
    description = _description(models)
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    try:
        draft.mkdir(parents=True)
        trees = {} if models.shared is None else {GLOBAL: models.shared}
        if kept := select(models.model.unsent, models.spec.freeze):
            trees[FROZEN] = kept
        sums = {name: _write_tree(tree, draft / name) for name, tree in trees.items()}
        for client in models.clients if models.own and not models.elsewhere else ():
            sums[_file_of(client)] = _write_tree(models.tree_of(client), draft / _file_of(client))
        for name in [name for name in sums if onnx and name != FROZEN]:
            who = None if name == GLOBAL else int(name.removeprefix("client-").partition(".")[0])
            module = models.module(who)
            facts: dict[str, Any] = {
                "modalities": list(module.reads),
                "task": models.task.NAME,
                "classes": models.class_names,
            }
            facts |= {"columns": as_tables(models.features)} if models.features else {}
            write_onnx(module, (draft / name).with_suffix(".onnx"), facts)
        (draft / DESCRIPTION).write_text(json.dumps(description | {"sha256": sums}, indent=1), encoding="utf-8")
        for path in (draft / DESCRIPTION, draft):
            sync(path)
        os.replace(draft, target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"the model could not be written to {target}: {error}. Make room, or choose another folder"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _write_tree(tree: Tree, path: Path) -> str:
    """Write a Tree and return the SHA-256 of its file."""
    path.touch()  # safetensors makes files that only their owner can read, unlike the other files of the folder
    mode = path.stat().st_mode
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in tree.items()}, path)
    path.chmod(mode)
    sync(path)
    return sha256_of(path)


def _file_of(client: int) -> str:
    return f"client-{client:06d}.safetensors"


def _description(models: Models) -> dict[str, Any]:
    """The content of model.json, except for the checksums of the other files."""
    held: dict[tuple[str, ...], list[int]] = {}
    for client, modalities in models.clients.items():
        held.setdefault(modalities, []).append(client)
    own, encoders = models.spec.classes(), {name: entry_of(entry) for name, entry in models.spec.encoders.items()}
    options = {name: dict(getattr(models.spec, name)) for name in ("fusion_options", "module_options")}
    spec = as_table(models.spec) | own | options | {"encoders": encoders}
    if isinstance(models.spec.module, nn.Module):
        raise RecipeError(
            f"the model is a {own['module']} that was made before the run, and model.json cannot say how. Give [model] "
            "module the class, with module_options"
        )
    try:
        build("[model]", ModelSpec, json.loads(json.dumps(spec)))
    except (TypeError, RecipeError) as error:
        raise RecipeError(
            f"model.json cannot describe how to build this model: {error}. Use encoders whose kind and options can be "
            "written in a recipe"
        ) from error
    return {
        "format": FORMAT,
        "polyfed": version("polyfed"),
        "algorithm": models.algorithm,
        "model": spec,
        "shapes": models.model.shapes,
        "reads": models.model.modalities,
        "classes": models.model.num_classes,
        "key": models.model.key,
        "frozen": digest(models.model.frozen),
        "constants": digest(models.model.constants),
        "class_names": models.class_names,
        "task": {"name": name_of(models.task, OBJECTIVES)} | as_table(models.task),
        "clients": [{"modalities": modalities, "clients": clients} for modalities, clients in held.items()],
        "own_models": models.own,
        "model_for": models.model_for,
        "elsewhere": models.elsewhere,
        "scaling": None if models.scaling is None else {m: by.as_lists() for m, by in models.scaling.items()},
        "columns": as_tables(models.features),
        "rows": models.rows.as_table(),
        "conformal": None if models.conformal is None else models.conformal.facts(),
        "predictor": {"name": name_of(models.predictor, PREDICTORS)} | as_table(models.predictor),
    }


def load_model(
    folder: str | Path,
    device: torch.device | str = "cpu",
    *,
    imports: Sequence[str] = (),
    backbones: Sequence[str] = (),
) -> Models:
    """Load the models that `Run.export` wrote. A client's own model is read only when it is accessed.

    The folder may come from somebody else, and `model.json` may name modules to import and pretrained models to read.
    The function refuses them, unless the caller allows them with `imports` and `backbones`.

    Args:
        folder: the folder of the models.
        device: the device for the tensors.
        imports: user-defined classes that `model.json` may name, as `package.module:Class`, or `package.*` for all
            classes of a package. Importing a module runs its code.
        backbones: pretrained models that an encoder of `model.json` may read. Each entry is exactly the `path` of an
            encoder.

    Raises:
        DataError: the folder holds no saved model, or a damaged one.
        NotAllowed: `model.json` names a class that is not in `imports`, or a pretrained model that is not in
            `backbones`.
        RecipeError: a class that `model.json` names cannot be imported.
    """
    folder = Path(folder).expanduser()
    said = _read_description(folder)
    allowance = Allowance(imports=tuple(imports), models=tuple(backbones))
    try:
        _check_allowed(folder, said, allowance)
        with only(allowance):
            return _models(folder, said, device)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / DESCRIPTION} is damaged ({error!r}). Restore it from a copy") from error


def facts_of_data(
    folder: Path,
) -> tuple[dict[str, Scaling] | None, tuple[str, ...] | None, dict[str, Features], dict[str, tuple[int, ...]]]:
    """Return the scaling, the names of the classes, the columns and the shapes of samples of a model's training.

    The first two are None where they are unknown.

    Raises:
        DataError: the folder holds no saved model, or a damaged one.
    """
    said = _read_description(folder)
    try:
        shapes = _shapes(said)
        features = read_tables(said.get("columns"), shapes)
        return _scaling(said["scaling"], shapes), _class_names(said), features, shapes
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DataError(f"{folder / DESCRIPTION} is damaged ({error!r}). Restore it from a copy") from error


def _check_allowed(folder: Path, said: Mapping[str, Any], allowance: Allowance) -> None:
    """Refuse code and pretrained models that the caller of `load_model` has not allowed.

    Raises:
        NotAllowed: the caller has not allowed a class or a pretrained model that `model.json` names. The text contains
            the argument that would allow it.
    """
    encoders = list(said["model"]["encoders"].values())
    classes = [str(encoder["kind"]) for encoder in encoders]
    classes += [str(said["predictor"]["name"]), str(said.get("task", {}).get("name", ""))]
    classes += [str(said["model"].get(name, "")) for name in ("fusion", "module")]
    for path in classes:
        if ":" in path and not allowance.has_import(path):
            raise NotAllowed(
                f"{folder / DESCRIPTION} names the code '{path}', and importing it would run it. If you trust it, call "
                f'load_model(..., imports=["{path}"])'
            )
    for path in (str(encoder["path"]) for encoder in encoders if encoder["kind"] == "hf"):
        if path not in allowance.models:
            raise NotAllowed(
                f"{folder / DESCRIPTION} names the pretrained model '{path}'. If you trust it, call "
                f'load_model(..., backbones=["{path}"])'
            )


def _models(folder: Path, said: Mapping[str, Any], device: torch.device | str) -> Models:
    """Build the models that model.json describes."""
    shapes = _shapes(said)
    spec = build("[model]", ModelSpec, said["model"])
    try:
        given = _read_frozen(folder, said["sha256"])
        model = build_model(spec, shapes, said["classes"], _reads(said), said.get("key", 0), given)
    except (RuntimeError, OverflowError) as error:  # PyTorch refuses sizes that are negative or too large
        raise ValueError(f"its model cannot be built: {error}") from error
    if digest(model.frozen) != said["frozen"]:
        raise DataError(
            f"{folder / DESCRIPTION}: the frozen parameters differ from those of the run. Restore the pretrained "
            "model that the run read, or the code of your own module"
        )
    if digest(model.constants) != said["constants"]:
        raise DataError(
            f"{folder / DESCRIPTION}: the constant buffers differ from those of the run. Their values depend on "
            "more than the seed, for example because they were drawn with NumPy. Restore the code or the file "
            "that they come from"
        )
    task = dict(said.get("task", {"name": Classification.NAME}))
    objective = build("[task]", find(task.pop("name"), OBJECTIVES, Objective), task)
    how, sums, own = dict(said["predictor"]), dict(said["sha256"]), said["own_models"]
    clients = {k: tuple(group["modalities"]) for group in said["clients"] for k in group["clients"]}
    shared = _read_tree(folder / GLOBAL, sums[GLOBAL], model, model.modalities, device) if GLOBAL in sums else None

    @cache
    def tree_of(client: int) -> Tree:
        if not own:
            return select(shared or {}, (*clients[client], SHARED))
        name = _file_of(client)
        if name not in sums:
            raise DataError(f"{folder / DESCRIPTION} has no checksum of {name}. Restore it from a copy")
        return _read_tree(folder / name, sums[name], model, clients[client], device)

    return Models(
        algorithm=said["algorithm"],
        spec=spec,
        model=model,
        task=objective,
        predictor=build("[predictor]", find(how.pop("name"), PREDICTORS, Predictor), how),
        shared=shared,
        clients=dict(sorted(clients.items())),
        tree_of=tree_of,
        own=own,
        model_for=said["model_for"],
        class_names=_class_names(said),
        elsewhere=said["elsewhere"],
        scaling=_scaling(said["scaling"], shapes),
        features=read_tables(said.get("columns"), shapes),
        rows=RowForm.read(said.get("rows")),
        conformal=read_conformal(said.get("conformal"), model, objective),
    )


def _shapes(said: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = {str(name): tuple(shape) for name, shape in said["shapes"].items()}
    if not all(type(side) is int and side > 0 for shape in shapes.values() for side in shape):
        raise ValueError(f"these are no shapes of samples: {said['shapes']!s:.200}")
    return shapes


def _reads(said: Mapping[str, Any]) -> tuple[str, ...]:
    reads = said["reads"]
    if not isinstance(reads, list) or not reads or any(name not in said["shapes"] for name in reads):
        raise ValueError(f"reads = {reads!s:.200} is no list of its modalities")
    return tuple(reads)


def _class_names(said: Mapping[str, Any]) -> tuple[str, ...] | None:
    names = said["class_names"]
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise ValueError(f"class_names = {names!s:.200} is no list of distinct names")
    return tuple(names)


def _scaling(said: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Scaling] | None:
    """Read the shift and scale of each modality. None means that they are unknown."""
    return None if said is None else {m: Scaling.read(value, shapes[m]) for m, value in said.items()}


def _read_description(folder: Path) -> dict[str, Any]:
    """The content of model.json."""
    try:
        said = parse_json((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} holds no saved model that can be read: {error}") from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        by = said.get("polyfed", "?") if isinstance(said, dict) else "?"
        raise DataError(
            f"{folder / DESCRIPTION} is not of format {FORMAT}; polyfed {by} wrote it. Load it with that version"
        )
    return said


def _read_frozen(folder: Path, sums: Mapping[str, str]) -> Tree:
    """Read the values of the blocks that [model] freeze kept."""
    if FROZEN not in sums:
        return {}
    try:
        if sha256_of(folder / FROZEN) != sums[FROZEN]:
            raise ValueError(f"its SHA-256 differs from the one in {DESCRIPTION}")
        return dict(load_file(folder / FROZEN))
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder / FROZEN} is damaged: {error}. Restore it from a copy") from error


def _read_tree(path: Path, wanted: str, model: Model, modalities: Sequence[str], device: torch.device | str) -> Tree:
    """Read a Tree of the model, or of the model's part for these modalities."""
    try:
        if sha256_of(path) != wanted:
            raise ValueError(f"its SHA-256 differs from the one in {DESCRIPTION}")
        tree = {name: value.clone() for name, value in load_file(path, device=str(device)).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{path} is damaged: {error}. Restore it from a copy") from error
    shapes = {name: value.shape for name, value in model.template.items()}
    ours = model.names(modalities)
    wrong = [name for name in ours if name not in tree or tree[name].shape != shapes[name]]
    if wrong := wrong or [n for n in ours if tree[n].is_floating_point() != model.template[n].is_floating_point()]:
        raise DataError(
            f"{path} has no '{wrong[0]}' of the shape and type that {DESCRIPTION} asks for. Restore both from a copy"
        )
    return tree
