"""Trained models: what predicts after a run, and how it is saved and loaded without the run.

A saved model is a folder with `model.json`, `global.safetensors` where there is a global model, and one file for each
client that has a model of its own. The folder is written beside and renamed over; files are verified as they are read.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyfed.algorithms import PREDICTORS
from polyfed.core.errors import DataError, RecipeError, UnknownClient
from polyfed.core.files import sync
from polyfed.core.registry import find, name_of
from polyfed.core.tree import SHARED, Tree, select
from polyfed.evaluation.scores import Predictor, predict
from polyfed.experiment.checkpoint import sha256_of
from polyfed.experiment.recipe import build, plain
from polyfed.model import Model, ModelSpec, build_model
from polyfed.model.encoders import entry_of

FORMAT = 1
"""Of a saved model; a folder of another one is not read."""

DESCRIPTION, GLOBAL = "model.json", "global.safetensors"


@dataclass(frozen=True, repr=False)
class Models:
    """The trained models of a run, or of a folder that `Run.export` wrote.

    Attributes:
        algorithm: the method's name.
        spec: the [model] section.
        model: the model, as functions of a Tree.
        predictor: how a client's own model predicts.
        shared: the global model, or None; see `params`.
        clients: the modalities that each client's model reads, by its number.
        tree_of: the Tree of one of these clients.
        own: whether clients have models of their own; otherwise each predicts with its part of the global model.
        model_for: whose own model it is: a `client`'s, or a `silo`'s, whose devices share it.
        class_names: of each class, where the data names them.
        elsewhere: why clients' own models are not here; empty where they are.
    """

    algorithm: str
    spec: ModelSpec
    model: Model
    predictor: Predictor
    shared: Tree | None
    clients: Mapping[int, tuple[str, ...]]
    tree_of: Callable[[int], Tree]
    own: bool
    model_for: str = "client"
    class_names: tuple[str, ...] | None = None
    elsewhere: str = ""

    def __repr__(self) -> str:
        own = ["clients' own models elsewhere" if self.elsewhere else f"own models of {len(self.clients)} clients"]
        parts = ["a global model"] * (self.shared is not None) + own * self.own
        return f"Models({self.algorithm}: {' and '.join(parts)})"

    @property
    def params(self) -> Tree:
        """The global model.

        Raises:
            RecipeError: the method trains none.
        """
        if self.shared is None:
            raise RecipeError(
                f"{self.algorithm} has no global model: it trains one model a {self.model_for}. Pass client=k for "
                f"that of client k, as in predict(x, client={next(iter(self.clients), 0)}), or take it from personal[k]"
            )
        return self.shared

    @property
    def personal(self) -> "Personal":
        """The clients' own models, by client.

        Raises:
            RecipeError: they are not here.
        """
        self._refuse_elsewhere()
        return Personal(self)

    def predict(
        self, x: Mapping[str, Any], client: int | None = None, *, present: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Logits (n, C), made as the evaluation of the run made them.

        Args:
            x: modality -> samples (n, ...), as the data set gives them (standardised as it was); one that is left out
                is a zero feature.
            client: whose model predicts: its own where the method trains such, otherwise its part of the global one. A
                modality that this model does not have is ignored. None: the global model.
            present: modality -> bool (n,), for one that some of these rows lack.

        Raises:
            RecipeError: there is no global model or no such client, or `x` does not fit the model.
        """
        if client is None:
            return predict(self.model, self.params, x, present=present)
        w = self.of(client)
        return predict(self.model, w, x, reads=self.clients[client], present=present, predictor=self.predictor)

    def of(self, client: int) -> Tree:
        """The model that a client predicts with.

        Raises:
            UnknownClient: there is no such client.
            RecipeError: clients' own models are not here.
        """
        self._refuse_elsewhere()
        if isinstance(client, bool) or not isinstance(client, Integral) or client not in self.clients:
            raise UnknownClient(f"client = {client!r}: there is no such client. {_allowed(list(self.clients))}")
        return self.tree_of(int(client))

    def _refuse_elsewhere(self) -> None:
        if self.own and self.elsewhere:
            raise RecipeError(self.elsewhere)


class Personal(Mapping[int, Tree]):
    """The clients' own models, each put together when it is looked up; empty where clients have none."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def __getitem__(self, client: int) -> Tree:
        """A copy of the client's model.

        Raises:
            UnknownClient: it has none.
        """
        if not self._models.own:
            raise UnknownClient(f"{self._why_empty()}. Use params, or predict(x, client={client!r})")
        return self._models.of(client)

    def __iter__(self) -> Iterator[int]:
        return iter(self._models.clients if self._models.own else ())

    def __len__(self) -> int:
        return len(self._models.clients) if self._models.own else 0

    def __contains__(self, client: object) -> bool:
        return self._models.own and client in self._models.clients

    def __repr__(self) -> str:
        return f"Personal({len(self)} models)" if self._models.own else f"Personal(empty: {self._why_empty()})"

    def _why_empty(self) -> str:
        return f"{self._models.algorithm} trains one global model, and no client has a model of its own"


def _allowed(clients: Sequence[int]) -> str:
    if len(clients) == clients[-1] + 1:
        return f"Clients are numbers from 0 to {clients[-1]}"
    return f"Clients are {', '.join(map(str, clients[:8]))}{', ...' if len(clients) > 8 else ''}"


def save(models: Models, folder: str | Path) -> Path:
    """Write models to a folder that is new or empty; whoever reads it finds all of them or none.

    Returns:
        The folder's absolute path.

    Raises:
        RecipeError: the folder holds something, the models are not here, or an encoder has options that are no JSON.
        DataError: it cannot be written.
    """
    if models.shared is None:
        models._refuse_elsewhere()
    target = Path(folder).expanduser().resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise RecipeError(f"{target} exists and is no empty folder; nothing is replaced. Choose another folder")
    description = _description(models)
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    try:
        draft.mkdir(parents=True)
        trees = {} if models.shared is None else {GLOBAL: models.shared}
        sums = {name: _put(tree, draft / name) for name, tree in trees.items()}
        for client in models.clients if models.own and not models.elsewhere else ():
            sums[_file_of(client)] = _put(models.tree_of(client), draft / _file_of(client))
        (draft / DESCRIPTION).write_text(json.dumps(description | {"sha256": sums}, indent=1), encoding="utf-8")
        for path in (draft / DESCRIPTION, draft):
            sync(path)
        os.replace(draft, target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise DataError(f"no model could be written to {target}: {error}. Make room, or choose another") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _put(tree: Tree, path: Path) -> str:
    """Write a Tree; its SHA-256."""
    # cloned: tensors may share memory, which the format refuses
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in tree.items()}, path)
    sync(path)
    return sha256_of(path)


def _file_of(client: int) -> str:
    return f"client-{client:06d}.safetensors"


def _description(models: Models) -> dict[str, Any]:
    """What model.json holds beside the sums of the files."""
    held: dict[tuple[str, ...], list[int]] = {}
    for client, modalities in models.clients.items():
        held.setdefault(modalities, []).append(client)
    spec = plain(models.spec) | {"encoders": {name: entry_of(entry) for name, entry in models.spec.encoders.items()}}
    try:
        build("[model]", ModelSpec, json.loads(json.dumps(spec)))
    except (TypeError, RecipeError) as error:
        raise RecipeError(f"model.json cannot say how to build this model: {error}. Name its parts in words") from error
    return {
        "format": FORMAT,
        "polyfed": version("polyfed"),
        "algorithm": models.algorithm,
        "model": spec,
        "shapes": models.model.shapes,
        "reads": models.model.modalities,
        "classes": models.model.num_classes,
        "class_names": models.class_names,
        "clients": [{"modalities": modalities, "clients": clients} for modalities, clients in held.items()],
        "own_models": models.own,
        "model_for": models.model_for,
        "elsewhere": models.elsewhere,
        "predictor": {"name": name_of(models.predictor, PREDICTORS)} | plain(models.predictor),
    }


def load_model(folder: str | Path, device: torch.device | str = "cpu") -> Models:
    """The models that `Run.export` wrote; clients' own are read when they are looked up.

    Encoders of the user's own are imported by their names, as a recipe does it: load what you trust.

    Args:
        folder: of the models.
        device: where they go.

    Raises:
        DataError: the folder holds no saved model, or one that is damaged.
        RecipeError: a class that it names cannot be imported.
    """
    folder = Path(folder).expanduser()
    said = _described(folder)
    try:
        shapes = {name: tuple(shape) for name, shape in said["shapes"].items()}
        spec = build("[model]", ModelSpec, said["model"])
        model = build_model(spec, shapes, said["classes"], said["reads"])
        how, names, sums, own = dict(said["predictor"]), said["class_names"], dict(said["sha256"]), said["own_models"]
        clients = {k: tuple(group["modalities"]) for group in said["clients"] for k in group["clients"]}
        shared = _read(folder / GLOBAL, sums[GLOBAL], model, model.modalities, device) if GLOBAL in sums else None

        @cache
        def tree_of(client: int) -> Tree:
            if not own:
                return select(shared or {}, (*clients[client], SHARED))
            name = _file_of(client)
            return _read(folder / name, sums[name], model, clients[client], device)

        return Models(
            algorithm=said["algorithm"],
            spec=spec,
            model=model,
            predictor=build("[predictor]", find(how.pop("name"), PREDICTORS, Predictor), how),
            shared=shared,
            clients=dict(sorted(clients.items())),
            tree_of=tree_of,
            own=own,
            model_for=said["model_for"],
            class_names=None if names is None else tuple(names),
            elsewhere=said["elsewhere"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / DESCRIPTION} is damaged ({error!r}). Restore it from a copy") from error


def _described(folder: Path) -> dict[str, Any]:
    """What model.json says."""
    try:
        said = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} holds no saved model that can be read: {error}") from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        by = said.get("polyfed", "?") if isinstance(said, dict) else "?"
        raise DataError(f"{folder / DESCRIPTION} is no description of format {FORMAT}; polyfed {by} wrote it. Use that")
    return said


def _read(path: Path, wanted: str, model: Model, modalities: Sequence[str], device: torch.device | str) -> Tree:
    """A Tree of the model, or of its part for these modalities."""
    try:
        if sha256_of(path) != wanted:
            raise ValueError(f"its SHA-256 is not that in {DESCRIPTION}")
        # cloned: a file's tensors lie at any address, and sums over unaligned memory may round otherwise
        tree = {name: value.clone() for name, value in load_file(path, device=str(device)).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{path} is damaged: {error}. Restore it from a copy") from error
    shapes = {name: value.shape for name, value in model.template.items()}
    if wrong := [name for name in model.names(modalities) if name not in tree or tree[name].shape != shapes[name]]:
        raise DataError(
            f"{path} has no '{wrong[0]}' of the shape that {DESCRIPTION} asks for. Restore both from a copy"
        )
    return tree
