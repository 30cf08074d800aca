"""Checkpoints: tensors as safetensors and all other values as JSON. They are written atomically and verified when read.

A checkpoint is a folder `round-000012` with `state.safetensors` and `state.json`. The file `latest.json` names the
newest checkpoint and holds the SHA-256 of both files. polyfed replaces `latest.json` last, in one step. So at every
moment, `latest.json` names a complete checkpoint, the old one or the new one, even if the run is killed.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyfed.core.errors import CheckpointError
from polyfed.core.system.files import replace_text, sync
from polyfed.core.system.json_and_toml import parse_json, refuse_extremes
from polyfed.core.system.mapping import LARGE, on_disk
from polyfed.core.tasks import parts
from polyfed.core.tree import memory_of

LATEST, TENSORS, SKELETON = "latest.json", "state.safetensors", "state.json"

RESTORE = "Restore it from a copy, or start again in another --out folder"
"""The advice in errors about a damaged file of a run."""


def save(folder: Path, round: int, content: Any, modules: Collection[str] = ()) -> None:
    """Write a checkpoint, and then delete older ones.

    Args:
        folder: the run's `checkpoint` folder.
        round: the round of the checkpoint.
        content: nested dataclasses, dictionaries, lists, tuples, tensors and plain values.
        modules: `content` may contain dataclasses of polyfed and of these modules, but of no others; see `modules_of`.

    Raises:
        CheckpointError: the disk is full or not writable, or `content` holds a value that could not be read again. The
            previous checkpoint does not change.
    """
    name = f"round-{round:06d}"
    draft = folder / f".{name}.draft"
    tensors: dict[str, Tensor] = {}
    try:
        skeleton = pack(content, tensors, modules)
        refuse_extremes(skeleton)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the state cannot be written to a checkpoint: {error}. Store flat lists and dictionaries, and large "
            "integers as tensors or words"
        ) from None
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file(separate(tensors), draft / TENSORS)
        (draft / SKELETON).write_text(json.dumps(skeleton))
        sums = {file.name: sha256_of(file) for file in sorted(draft.iterdir())}
        for file in draft.iterdir():
            sync(file)
        sync(draft)
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(draft, folder / name)
        replace_text(folder / LATEST, json.dumps({"round": round, "folder": name, "sha256": sums}))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of round {round} could not be written to {folder}: {error}. "
            "The previous checkpoint is untouched; make room and run again with --resume (in Python: resume=True)"
        ) from error
    for old in folder.glob("round-*"):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def put_away(content: Any, folder: Path, modules: Collection[str]) -> Any:
    """Return `content` with its large tensors in a file without a name, as if it had been saved and loaded.

    Args:
        content: see `save`. It is returned as it is if it holds no large tensor in memory.
        folder: where the file lies.
        modules: see `save`.

    Raises:
        CheckpointError: `content` holds a value that a checkpoint cannot hold.
        OSError: the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = pack(content, tensors, modules)
    if all(value.nbytes < LARGE for value in tensors.values()):
        return content
    return unpack(skeleton, on_disk(tensors, folder), modules)


def newest(folder: Path) -> int:
    """Return the round of the newest checkpoint according to `latest.json`, or 0 if there is no readable checkpoint."""
    try:
        return _verified(folder / LATEST)[0]
    except (OSError, ValueError):
        return 0


def load(folder: Path, modules: Collection[str] = (), device: torch.device | str = "cpu") -> tuple[int, Any] | None:
    """Read the newest checkpoint.

    Args:
        folder: the run's `checkpoint` folder.
        modules: the checkpoint may contain dataclasses of polyfed and of these modules, but of no others; see
            `modules_of`.
        device: the device for the tensors.

    Returns:
        (round, content), or None if there is no checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds a dataclass of another module.
    """
    latest = folder / LATEST
    if not latest.exists():
        return None
    try:
        round, place, sums = _verified(latest)
        for name in (TENSORS, SKELETON):
            if sha256_of(place / name) != sums[name]:
                raise CheckpointError(
                    f"checkpoint {place / name} is damaged (its SHA-256 differs from {latest}). {RESTORE}"
                )
        found = load_file(place / TENSORS, device=str(device))
        tensors = {name: value.clone() for name, value in found.items()}
        return round, unpack(parse_json((place / SKELETON).read_text()), tensors, modules)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint in {folder} cannot be read: {error}. {RESTORE}") from error


def _verified(latest: Path) -> tuple[int, Path, dict[str, str]]:
    """Return the round, the folder and the SHA-256 of every file of the newest checkpoint, as listed in `latest.json`.

    Raises:
        ValueError: one of these entries is missing. Without a checksum for each file, polyfed could not verify the
            checkpoint.
    """
    facts = parse_json(latest.read_text())
    if not isinstance(facts, dict):
        raise ValueError(f"{LATEST} is not a JSON object")
    round, name, sums = (facts.get(key) for key in ("round", "folder", "sha256"))
    if type(round) is not int or round < 0:
        raise ValueError(f"{LATEST} does not name a round")
    if not (isinstance(name, str) and re.fullmatch(r"round-\d+", name)):
        raise ValueError(f"{LATEST} does not name the folder of a checkpoint")
    if not (isinstance(sums, dict) and set(sums) == {TENSORS, SKELETON}):
        raise ValueError(f"{LATEST} must hold the SHA-256 of {TENSORS} and of {SKELETON}, and of no other file")
    return round, latest.parent / name, sums


def modules_of(algorithm: Any) -> frozenset[str]:
    """Return the names of the Python modules that define the classes of an algorithm and of its parts.

    Checkpoints of the algorithm may contain dataclasses of these modules.
    """
    return frozenset(type(part).__module__ for _, part in parts(algorithm))


def pack(value: Any, tensors: dict[str, Tensor], modules: Collection[str] | None = None) -> Any:
    """Convert nested values to a JSON structure, the skeleton, which holds a number in place of each tensor.

    Args:
        value: the nested values.
        tensors: the dictionary to which the function adds the tensors, which may share memory with those of `value`.
            The key of a tensor is its number in the skeleton. The keys are strings: "0", "1", and so on.
        modules: `value` may contain dataclasses of polyfed and of these modules. If None, it may contain any dataclass.

    Raises:
        CheckpointError: a checkpoint cannot hold one of the values, or the value is a dataclass of another module.
    """
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = f"{type(value).__module__}:{type(value).__qualname__}"
        if "<locals>" in kind and modules is not None:
            raise CheckpointError(
                f"the state holds a {kind}, which is defined inside a function. Define it at the top of its module"
            )
        if modules is not None and not _known(type(value).__module__, modules):
            raise CheckpointError(
                f"the state holds a {kind}, but only dataclasses of polyfed and of the modules of the algorithm and "
                f"its parts may occur in a checkpoint ({', '.join(sorted(modules))}). Move it there"
            )
        entries = [
            [f.name, pack(getattr(value, f.name), tensors, modules)] for f in dataclasses.fields(value) if f.init
        ]
        return {"class": kind, "fields": entries}
    if isinstance(value, dict):
        return {"dict": [[pack(k, tensors, modules), pack(v, tensors, modules)] for k, v in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [pack(v, tensors, modules) for v in value]}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise CheckpointError(
        f"the state holds a {type(value).__name__}, which a checkpoint cannot hold. Use only tensors, numbers, "
        "strings, booleans, None, and lists, tuples, dictionaries and dataclasses of these"
    )


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors. Those that share memory with an earlier one become copies, because safetensors needs this."""
    first = {memory_of(value): name for name, value in reversed([*tensors.items()])}
    return {name: value if first[memory_of(value)] == name else value.clone() for name, value in tensors.items()}


def unpack(skeleton: Any, tensors: dict[str, Tensor], modules: Collection[str]) -> Any:
    """Return the nested values that `pack` converted to this skeleton and these tensors.

    Raises:
        ValueError: the skeleton is not one that `pack` writes. Some faults raise a KeyError, TypeError, IndexError or
            AttributeError instead.
    """
    ((kind, content), *rest) = skeleton.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {unpack(k, tensors, modules): unpack(v, tensors, modules) for k, v in content}
    if kind in ("list", "tuple"):
        values = [unpack(v, tensors, modules) for v in content]
        return values if kind == "list" else tuple(values)
    if kind == "class":
        init = {name: unpack(v, tensors, modules) for name, v in rest[0][1]}
        cls = _class(content, modules)
        try:
            return cls(**init)
        except Exception as error:  # the class may check its values and raise any exception
            raise ValueError(f"it holds values that {content} does not take: {error}") from error
    return content


def digest(content: Any) -> str:
    """Return the SHA-256 of nested values. It covers their structure, the plain values and the bytes of every tensor.

    The digest does not depend on the names of classes and of their fields, so renaming them in the code does not change
    it.
    """
    tensors: dict[str, Tensor] = {}
    sha = hashlib.sha256(json.dumps(_nameless(pack(content, tensors))).encode())
    for name, value in tensors.items():
        sha.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def num_numbers(content: Any) -> int:
    """Return how many numbers the tensors of nested values hold. If a tensor occurs twice, it is counted twice."""
    tensors: dict[str, Tensor] = {}
    pack(content, tensors)
    return sum(value.numel() for value in tensors.values())


def _nameless(skeleton: Any) -> Any:
    """Return the skeleton with each dataclass replaced by the list of its values."""
    ((kind, content), *rest) = skeleton.items()
    if kind == "class":
        return {"fields": [_nameless(value) for _, value in rest[0][1]]}
    if kind == "dict":
        return {"dict": [[_nameless(k), _nameless(v)] for k, v in content]}
    if kind in ("list", "tuple"):
        return {kind: [_nameless(value) for value in content]}
    return skeleton


def _class(path: str, modules: Collection[str]) -> Any:
    """Return the dataclass that a checkpoint names. It must be in polyfed or one of these modules; nothing is imported.

    Raises:
        ValueError: the class is in another module, has not been imported, or is not a dataclass.
    """
    module, _, name = path.partition(":")
    if not _known(module, modules):
        raise ValueError(f"it holds a {path}, which is in no module of this recipe's algorithm")
    result: Any = sys.modules.get(module)  # the recipe of the run has already imported the module
    for part in name.split("."):
        result = vars(result).get(part) if isinstance(result, ModuleType | type) else None
    # a path may lead to a class that the module has only imported from another one
    home = f"{getattr(result, '__module__', '')}:{getattr(result, '__qualname__', '')}"
    if not (isinstance(result, type) and dataclasses.is_dataclass(result) and home == path):
        raise ValueError(f"it holds a {path}, which is not a dataclass")
    return result


def _known(module: str, modules: Collection[str]) -> bool:
    """Return whether a checkpoint may contain dataclasses of this module."""
    return module in modules or module.split(".")[0] == "polyfed"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
