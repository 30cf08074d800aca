"""Small data sets with labels of every kind, and recipes on them: unequal clients, missing targets and modalities."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyfed.data import ClientsSpec
from polyfed.data.columns import Column, Columns
from polyfed.data.sources.base import Source
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.objective import OBJECTIVES, Objective
from world import algorithm, recipe

ROWS = 300


@dataclass(frozen=True)
class Made(Source):
    """Two modalities that both tell about two hidden numbers, and labels of one kind that follow from these.

    Attributes:
        kind: `classification`, `multi-label`, `regression`, `ordinal` or `retrieval`.
        hidden: share of targets that are unknown.
    """

    kind: str = "regression"
    hidden: float = 0.2

    def load(self) -> Columns:
        draw = torch.Generator().manual_seed(7)
        z = torch.randn(ROWS, 2, generator=draw)
        a = z @ torch.randn(2, 5, generator=draw) + 0.3 * torch.randn(ROWS, 5, generator=draw)
        b = z @ torch.randn(2, 4, generator=draw) + 0.3 * torch.randn(ROWS, 4, generator=draw)
        unknown = torch.rand(ROWS, 3, generator=draw) < self.hidden
        label, size = labels(self.kind, z, unknown)
        split = (torch.arange(ROWS) % 5 == 0).to(torch.int8)
        return Columns(
            name="made",
            modalities={"a": Column(a), "b": Column(b)},
            label=label,
            num_classes=size,
            split=split,
            ids=torch.arange(ROWS),
            client=torch.arange(ROWS) ** 2 // 18_000,
        )


def labels(kind: str, z: Tensor, unknown: Tensor) -> tuple[Tensor, int]:
    """Labels of one kind, and their size."""
    three = torch.stack([z[:, 0], z[:, 1], z.sum(1)], 1)
    if kind in ("classification", "ordinal", "retrieval"):
        return (three[:, 2].clamp(-1.4, 1.4) + 1.5).long(), 3
    targets = three * 2 + 1 if kind == "regression" else (three > 0.3).float()
    return targets.masked_fill(unknown, torch.nan), 3


KINDS = {
    "classification": OBJECTIVES["classification"](),
    "multi-label": OBJECTIVES["multi-label"](),
    "regression": OBJECTIVES["regression"](),
    "ordinal": OBJECTIVES["ordinal"](),
    "retrieval": OBJECTIVES["retrieval"](dimension=8, temperature=0.2),  # type: ignore[call-arg]
}
"""A task of every kind."""


def made_recipe(
    kind: str, method: str = "fedavg", engine: str = "sequential", task: Objective | None = None, **options: Any
) -> Recipe:
    """A recipe of three rounds on five natural clients of unequal size, each with test rows of its own."""
    data = Made("classification" if kind == "retrieval" else kind)
    base = recipe(algorithm(method, **options), engine, data=data, task=task or KINDS[kind])
    holdings = [["a", "b"]] if kind == "retrieval" else [["a", "b"], ["a"], ["a", "b"], ["b"]]
    clients = ClientsSpec(partition="by-client", personal_test=0.25, holdings=holdings)
    return replace(base, clients=clients)
