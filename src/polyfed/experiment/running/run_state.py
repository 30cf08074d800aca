"""The content of a run's checkpoint, which is checked before a resumed run uses it.

`checkpoint.py` reads and writes any nested structure of values. This file knows which values a run keeps.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyfed.algorithms import NAMED
from polyfed.algorithms.base import Algorithm, ServerState
from polyfed.core.errors import CheckpointError, RecipeError
from polyfed.core.registry import name_of
from polyfed.core.scaling import Scaling
from polyfed.core.system.files import sync
from polyfed.data import Columns, scaling_of
from polyfed.data.column_fitting import as_tables, features_of, read_tables
from polyfed.data.sources.own.new_rows import RowForm
from polyfed.engines.base import Engine
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.checkpoint import RESTORE, num_numbers, sha256_of
from polyfed.federation.federation import Federation
from polyfed.federation.links.measured import is_content

OF_CLIENTS = ("num_rows", "holds", "silo")
"""The facts about clients: fields of `ClientRegistry`."""

KNOWN = "known"
"""Beside them, bool: whether a client has had training rows since the run began, if one is away now."""

CLIENTS = "clients-{}.safetensors"
"""The name of the file with these facts. The name contains the first 16 digits of the file's SHA-256."""

TOTALS = ("bytes_up", "bytes_down", "seconds", "simulated_seconds")
"""Sums over the rounds of a run, which a resumed run continues."""


def kept_facts(fed: Federation, columns: Columns, form: RowForm, known: Tensor, folder: Path) -> dict[str, Any]:
    """Return the facts about the clients and the model that `load_run` needs to load a run without its data.

    The facts about clients are written to a file in the folder of the checkpoints. They change only if a run is
    resumed, so every checkpoint only names this file. For a million clients, the file takes 10 MB.

    Args:
        known: the clients of the run so far; see `KNOWN`.

    Raises:
        CheckpointError: the file cannot be written.
    """
    registry, model, scaling = fed.clients, fed.context.model, scaling_of(columns)
    facts = {name: getattr(registry, name) for name in OF_CLIENTS}
    facts |= {} if torch.equal(known, registry.num_rows.cpu() > 0) else {KNOWN: known}
    return {
        "shapes": {name: list(shape) for name, shape in model.shapes.items()},
        "classes": fed.context.num_classes,
        "class_names": columns.class_names,
        "scaling": None if scaling is None else {name: by._asdict() for name, by in scaling.items()},
        "columns": as_tables(features_of(columns)),
        "rows": form.as_table(),
        "clients": _write_clients(folder, {name: value for name, value in facts.items() if value is not None}),
    }


def _write_clients(folder: Path, facts: dict[str, Tensor]) -> dict[str, str]:
    """Write the facts about clients, and return the name and the SHA-256 of the file."""
    draft = folder / ".clients.draft"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.cpu().contiguous() for name, value in facts.items()}, draft)
        sync(draft)
        sha = sha256_of(draft)
        os.replace(draft, folder / CLIENTS.format(sha[:16]))
        sync(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the facts about clients could not be written to {folder}: {error}. Make room and run again with "
            "--resume (in Python: resume=True)"
        ) from error
    return {"file": CLIENTS.format(sha[:16]), "sha256": sha}


def _read_clients(folder: Path, place: dict[str, Any]) -> dict[str, Tensor | None]:
    """Read the facts about clients.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    name, sha = str(place.get("file")), str(place.get("sha256"))
    try:
        if name != CLIENTS.format(sha[:16]) or sha256_of(folder / name) != sha:
            raise CheckpointError(f"{folder / name} is damaged: its SHA-256 is not the noted one. {RESTORE}")
        return dict.fromkeys((*OF_CLIENTS, KNOWN)) | load_file(folder / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}. {RESTORE}") from error


def load_content(
    folder: Path, algorithm: Algorithm, device: torch.device | str = "cpu"
) -> tuple[int, dict[str, Any]] | None:
    """Return the newest checkpoint of a run as (round, content), or None if there is no checkpoint.

    Args:
        folder: the run's `checkpoint` folder.
        algorithm: the algorithm of the run. The checkpoint may contain only dataclasses of polyfed, and dataclasses
            from the Python modules that define the algorithm and its parts.
        device: the device for the tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, or lacks an entry that every run keeps.
    """
    found = checkpoint.load(folder, checkpoint.modules_of(algorithm), device)
    if found is None:
        return None
    round, content = found
    facts = content.get("federation") if isinstance(content, dict) else None
    if isinstance(facts, dict) and isinstance(facts.get("clients"), dict):
        content["federation"] = facts | _read_clients(folder, facts["clients"])
    if wrong := _wrong_key(content):
        raise CheckpointError(f"the checkpoint in {folder} has no usable entry '{wrong}'. {RESTORE}")
    return round, content


BEST = "best"
"""The folder of the best round's state, in the folder of the checkpoints."""


def best_folder(checkpoints: Path, round: int) -> Path:
    """Return the folder of the state of the best round. It has the layout of a folder of checkpoints."""
    return checkpoints / BEST / f"{round:06d}"


def kept_best(
    checkpoints: Path, round: int | None, algorithm: Algorithm, device: torch.device | str = "cpu"
) -> dict[str, Any] | None:
    """Return `round`, `state` and `locals` of the best round, or None if the run has none.

    Args:
        checkpoints: the run's `checkpoint` folder.
        round: the best round according to the checkpoint of the run.
        algorithm: the algorithm of the run; see `load_content`.
        device: the device for the tensors.

    Raises:
        CheckpointError: the state is damaged or gone.
    """
    if round is None:
        return None
    found = checkpoint.load(best_folder(checkpoints, round), checkpoint.modules_of(algorithm), device)
    content = None if found is None else found[1]
    if not isinstance(content, dict) or content.get("round") != round or not _is_locals(content.get("locals")):
        raise CheckpointError(f"{best_folder(checkpoints, round)} has not the best model, of round {round}. {RESTORE}")
    return content


def forget_bests(checkpoints: Path, round: int | None) -> None:
    """Delete the states of former best rounds."""
    for folder in (checkpoints / BEST).glob("*"):
        if round is None or folder != best_folder(checkpoints, round):
            shutil.rmtree(folder, ignore_errors=True)


def _wrong_key(content: Any) -> str:
    """Return the first entry that is missing or has a wrong type, or "" if all entries are right."""
    if not isinstance(content, dict):
        return "run"
    checks = {
        "run": isinstance(content.get("run"), str),
        "round": type(content.get("round")) is int,
        "state": "state" in content,
        "locals": _is_locals(content.get("locals")),
        "totals": _are_numbers(content.get("totals"), (int, float), TOTALS),
        "places": _are_numbers(content.get("places"), (int,)),
        "best": content.get("best") is None or type(content["best"]) is int,
        "links": content.get("links") is None or is_content(content["links"]),
        "federation": _are_facts(content.get("federation")) or "federation" not in content,
    }
    return next((key for key, fits in checks.items() if not fits), "")


def _is_locals(value: Any) -> bool:
    """Whether the value maps client numbers to Trees."""
    return isinstance(value, dict) and all(
        type(client) is int and isinstance(tree, dict) and all(isinstance(v, Tensor) for v in tree.values())
        for client, tree in value.items()
    )


def _are_numbers(value: Any, types: tuple[type, ...], names: tuple[str, ...] = ()) -> bool:
    """Whether the value maps strings to numbers of 0 or more, and has all of these names."""
    return (
        isinstance(value, dict)
        and set(names) <= set(value)
        and all(isinstance(name, str) and type(v) in types and v >= 0 for name, v in value.items())
    )


def _are_facts(value: Any) -> bool:
    """Whether the value has the form of the facts that `kept_facts` returns."""
    if not isinstance(value, dict):
        return False
    shapes, names = value.get("shapes"), value.get("class_names")
    num_rows, holds, silo, known = (value.get(key) for key in (*OF_CLIENTS, KNOWN))
    return (
        isinstance(shapes, dict)
        and all(isinstance(shape, list) and all(type(side) is int for side in shape) for shape in shapes.values())
        and type(value.get("classes")) is int
        and _is_scaling(value.get("scaling"), shapes)
        and _are_columns(value.get("columns"), shapes)
        and _is_form(value.get("rows"))
        and (names is None or (isinstance(names, tuple) and all(isinstance(name, str) for name in names)))
        and (isinstance(num_rows, Tensor) and num_rows.dim() == 1)
        and (isinstance(holds, Tensor) and holds.shape == (len(num_rows), len(shapes)))
        and (silo is None or (isinstance(silo, Tensor) and silo.shape == num_rows.shape))
        and (known is None or (isinstance(known, Tensor) and known.dtype == torch.bool and known.dim() == 1))
    )


def _is_scaling(value: Any, shapes: dict[str, list[int]]) -> bool:
    """Return whether the value is valid: None (unknown scaling), or a shift and a scale for some of the modalities."""
    if value is None:
        return True
    try:
        return all(bool(Scaling.read(found, tuple(shapes[name]))) for name, found in value.items())
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _are_columns(value: Any, shapes: dict[str, list[int]]) -> bool:
    """Return whether the value is None or describes columns that give samples of these shapes."""
    try:
        return read_tables(value, shapes) is not None
    except (KeyError, TypeError, ValueError, AttributeError, RecipeError):
        return False


def _is_form(value: Any) -> bool:
    """Return whether the value is None or says how rows were read."""
    try:
        return RowForm.read(value) is not None
    except (KeyError, TypeError, ValueError, AttributeError, RecipeError):
        return False


def num_kept(state: Any, engine: Engine) -> dict[str, int]:
    """Count the tensor entries that an algorithm keeps from round to round, including the parameters of models.

    Args:
        engine: the engine, for the clients' local states.

    Returns:
        The count of the server (`server`), and the largest count of a client (`client`). `client` is absent if the
        clients keep their state elsewhere.
    """
    kept = {"server": num_numbers(state)}
    if engine.keeps_locals:
        kept["client"] = max((sum(v.numel() for v in local.values()) for local in engine.locals.values()), default=0)
    return kept


def checked_state(algorithm: Algorithm, state: Any, hook: str = "round") -> ServerState:
    """Return the state that `init` or `round` returned.

    Raises:
        RecipeError: it is no state, for example None, because `round` or `merge` has no `return`.
    """
    if isinstance(state, ServerState):
        return state
    raise RecipeError(
        f"{name_of(algorithm, NAMED)}: `{hook}` returned {type(state).__name__}, not a state with the fields "
        "`params` and `train_loss`. The last line of `init`, `round` or `merge` must return one, as in: "
        "return state.with_(params=...)"
    )
