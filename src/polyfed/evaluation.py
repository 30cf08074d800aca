"""Judging models: what an examiner and a client report, and how the sums are made."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from polyfed import metrics
from polyfed.batch import Batch
from polyfed.errors import RecipeError
from polyfed.messages import Message, carries, message
from polyfed.model import Model
from polyfed.tree import Tree
from polyfed.view import View


@message
class Scores(Message):
    """Sums over an examiner's rows: confusion (C, C), hits, summed loss; per modality a confusion matrix."""

    confusion: Tensor = carries("statistic")
    top5_hits: Tensor = carries("statistic")
    loss_sum: Tensor = carries("statistic")
    unimodal: Tree = carries("statistic")


@message
class OwnScore(Message):
    """How many of its own test rows a client gets right."""

    hits: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and how to evaluate: the [evaluation] section.

    Attributes:
        every: rounds between evaluations; the last round is always evaluated; 0 means only the last.
        personal: whether clients with test rows of their own are asked how many they get right.
        unimodal: how one modality alone is judged: `head` (its slice of a linear head, OGM-GE's way), `zero`
            (other features zero); see algorithms.md 7.3. `auto` takes `head` where the model has a linear head.
    """

    every: int = 1
    personal: bool = True
    unimodal: Literal["auto", "head", "zero"] = "auto"

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if self.every < 0:
            raise RecipeError(f"[evaluation] every = {self.every}: must be 0 (only the last round) or more")

    def due(self, round: int, rounds: int) -> bool:
        """Whether this round is evaluated."""
        return round == rounds or (self.every > 0 and round % self.every == 0)


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation: groups as in result.json, and accuracy by client on its own test rows."""

    metrics: dict[str, dict[str, float]]
    personal: dict[int, float] = field(default_factory=dict)


def scores(model: Model, w: Tree, modalities: Iterable[str], data: View, unimodal: str) -> Scores:
    """Judge a model on all rows of a view, fused and one modality at a time."""
    size = model.num_classes
    zero = torch.zeros(size, size, device=data.num_rows.device)
    # `head` asked for by name goes through: a model without a linear head then refuses, saying so
    by_head = unimodal == "head" or (unimodal == "auto" and model.linear_head)
    mode: Literal["head", "zero"] = "head" if by_head else "zero"

    def step(carry: Any, batch: Batch) -> Any:
        matrix, hits, loss, alone = carry
        features = model.features(w, batch)
        logits = model.fuse(w, features, batch)
        rows = torch.nn.functional.cross_entropy(logits, batch.y, reduction="none")

        def single(modality: str) -> Tensor:
            guess = model.unimodal_logits(w, features, modality, batch, mode)
            return metrics.confusion(guess, batch.y, batch.ok, size)

        return (
            matrix + metrics.confusion(logits, batch.y, batch.ok, size),
            hits + metrics.top_k_hits(logits, batch.y, batch.ok),
            loss + batch.sum(rows),
            {modality: total + single(modality) for modality, total in alone.items()},
        )

    start = (zero, zero[0, 0], zero[0, 0], dict.fromkeys((m for m in modalities if m in model.modalities), zero))
    return Scores(*data.fold(step, start))


def own_score(model: Model, w: Tree, data: View) -> OwnScore:
    """Count how many rows of a view a model gets right."""

    def step(hits: Tensor, batch: Batch) -> Tensor:
        right = model.logits(w, batch).argmax(-1) == batch.y
        return hits + batch.sum(right.to(torch.float32))

    return OwnScore(data.fold(step, torch.zeros((), device=data.num_rows.device)), data.num_rows)
