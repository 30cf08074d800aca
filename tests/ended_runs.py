"""Runs that have ended, one for each case of `CASES`, and the samples of their test rows."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import polyfed
from laws.rows import ROWS
from laws.test_laws import world
from polyfed.algorithms import ALGORITHMS
from polyfed.data.columns import Columns
from polyfed.data.sources import Toy
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.selection import Uniform
from world import AWKWARD

PRIVATE = {"fedrep", "lg-fedavg", "fedbn", "pfedmma"}
OWN_MODELS = {
    "local", "fedamp", "fedfomo", "pfmml", "fedgkt", "creamfl", "vfl", "fedmsplit", "fedproto original",
    "fedavg-ft", "ditto", "apfl", "pfedme", "mfedmc", "fedcouncil", "pepsy", *PRIVATE,
}  # fmt: skip
"""Methods that train one model for each client."""

NO_GLOBAL = OWN_MODELS - {"creamfl", "fedmsplit", "fedavg-ft", "ditto", "apfl", "pfedme", "fedcouncil", "pepsy"}
"""The methods among them that train no other model."""

HEADED = ("partialfl all", "split-learning u-shaped", "splitfed u-shaped")
"""Cases whose model needs a hidden layer."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ROWS} | {
    "fedproto original": ("fedproto", {"mode": "original", "feature_norm": 2.0}),
    "fedproto original logits": ("fedproto", {"mode": "original", "predict_by": "logits"}),
    "pmcmfl mfcpl": ("pmcmfl", {"variant": "mfcpl"}),
    "fedmsplit block_mean": ("fedmsplit", {"mode": "block_mean"}),
    "partialfl all": ("partialfl", {"global_model": "all"}),
    "split-learning u-shaped": ("split-learning", {"u_shaped": True}),
    "splitfed u-shaped": ("splitfed", {"version": 2, "u_shaped": True}),
    "local always": ("local", {"global_test": "always"}),
}


def made(case: str, engine: str = "vectorised", encoders: Any = AWKWARD) -> Recipe:
    name, options = CASES[case]
    if "selector" in ALGORITHMS[name].__dataclass_fields__:
        options = options | {"selector": Uniform()}
    found = world(name, engine, encoders, **options)
    if case in HEADED:
        found = replace(found, model=replace(found.model, head=(8,)))
    if options.get("u_shaped"):
        kinds = ["parameters", "embeddings", "statistic"]
        found = replace(found, egress={**found.egress, "shared": {"server": kinds}})
    return replace(found, rounds=2, clients=replace(found.clients, personal_test=0.3))


@functools.cache
def ended(case: str, engine: str = "vectorised") -> tuple[polyfed.Run, Assembly]:
    """A run, and its parts before the first round."""
    recipe = made(case, engine)
    return polyfed.run(recipe), assemble(recipe)


def samples(columns: Columns, rows: Tensor) -> dict[str, Tensor]:
    return {m: column.raw(rows) for m, column in columns.modalities.items()}


def present(columns: Columns, rows: Tensor) -> dict[str, Tensor]:
    return {m: there[rows] for m, there in columns.present.items()}


@dataclass(frozen=True)
class Gappy(Toy):
    """Every third row lacks `b`."""

    def load(self) -> Columns:
        columns = super().load()
        return replace(columns, present={"b": torch.arange(len(columns)) % 3 > 0}, class_names=("k", "l", "m", "n"))
