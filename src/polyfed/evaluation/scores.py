"""Judging models: what an examiner and a client report, and how the sums are made."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.messages import HISTOGRAM, Message, carries, message
from polyfed.core.schema import EVERY, NOT_NEGATIVE, check_ranges
from polyfed.core.tree import Tree, blocks
from polyfed.evaluation import metrics
from polyfed.model import Model
from polyfed.model.fusion import masked
from polyfed.training import ClientData
from polyfed.training.prototypes import Prototypes


@message
class ModelToEvaluate(Message):
    """A model to judge. With `unimodal = "prototype"` also class means (C, E) by modality of its features over the
    clients' training rows, and which classes have one, bool (C,); nothing otherwise.
    """

    params: Tree = carries("parameters")
    prototypes: Tree = carries("prototypes", shape=("classes", "features"))
    known: Tree = carries("statistic", shape=("classes",))


@message
class ClassMeans(Message):
    """Of a client's training rows: class means (C, E) of the features by modality, zeros for a class without rows, and
    rows per class (C,), under `shared` and under each modality that rows lack.
    """

    prototypes: Tree = carries("prototypes", shape=("classes", "features"))
    rows_per_class: Tree = carries("statistic", shape=("classes",), within=NOT_NEGATIVE, tells=HISTOGRAM)


@message
class Scores(Message):
    """Sums over an examiner's rows: confusion (C, C), hits, summed loss; per modality a confusion matrix."""

    confusion: Tensor = carries("statistic", shape=("classes", "classes"))
    top5_hits: Tensor = carries("statistic")
    loss_sum: Tensor = carries("statistic")
    unimodal: Tree = carries("statistic", shape=("classes", "classes"))


@message
class OwnScore(Message):
    """How many of its own test rows a client gets right."""

    hits: Tensor = carries("statistic", within=NOT_NEGATIVE)
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and how to evaluate: the [evaluate] section.

    Attributes:
        every: rounds between evaluations; the last round is always evaluated; 0 means only the last.
        personal: whether clients with test rows of their own are asked how many they get right.
        unimodal: how one modality alone is judged: `head` (its slice of a linear head, OGM-GE's way), `zero`
            (other features zero), `prototype` (the nearest class mean of its features over the training rows, which
            every client sends before each evaluation: kind `prototypes`); see algorithms.md 7.3. `auto` takes `head`
            where the model has a linear head, else `zero`. Only methods that average parameters know `prototype`.
    """

    every: Annotated[int, EVERY] = 1
    personal: bool = True
    unimodal: Literal["auto", "head", "zero", "prototype"] = "auto"

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        check_ranges("[evaluate]", self)

    def due(self, round: int, rounds: int) -> bool:
        """Whether this round is evaluated."""
        return round == rounds or (self.every > 0 and round % self.every == 0)


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation: groups as in result.json, and accuracy by client on its own test rows."""

    metrics: dict[str, dict[str, float]]
    personal: dict[int, float] = field(default_factory=dict)


def scores(model: Model, got: ModelToEvaluate, modalities: Iterable[str], data: ClientData, unimodal: str) -> Scores:
    """Judge a model on all rows of a view, fused and one modality at a time.

    Args:
        model: the model.
        got: its parameters, and class means where one modality alone is judged by them. A model of a client that lacks
            modalities is judged by what it has (algorithms.md 7.4).
        modalities: those judged alone; one of which no class mean is known is left out under `prototype`.
        data: the rows.
        unimodal: as in `Evaluation`.
    """
    size = model.num_classes
    w = got.params
    near = {m: Prototypes(mean, got.known[m]) for m, mean in got.prototypes.items()}
    zero = torch.zeros(size, size, device=data.num_rows.device)
    lacking = set(blocks(model.names(model.modalities))) - set(blocks(w))
    # `head` asked for by name goes through: a model without a linear head then refuses, saying so
    by_head = unimodal == "head" or (unimodal == "auto" and model.linear_head)
    mode: Literal["head", "zero"] = "head" if by_head else "zero"

    def single(features: Mapping[str, Tensor], modality: str, batch: Batch) -> Tensor:
        if unimodal == "prototype":
            return nearness(model, features, modality, batch, near[modality])
        return model.unimodal_logits(w, features, modality, batch, mode)

    def step(carry: Any, batch: Batch) -> Any:
        matrix, hits, loss, alone = carry
        if lacking:
            batch = replace(batch, x={m: x for m, x in batch.x.items() if m not in lacking})
        features = model.features(w, batch)
        logits = model.fuse(w, features, batch)
        rows = torch.nn.functional.cross_entropy(logits, batch.y, reduction="none")
        return (
            matrix + metrics.confusion(logits, batch.y, batch.ok, size),
            hits + metrics.top_k_hits(logits, batch.y, batch.ok),
            loss + batch.sum(rows),
            {
                m: total + metrics.confusion(single(features, m, batch), batch.y, batch.ok, size)
                for m, total in alone.items()
            },
        )

    known = near if unimodal == "prototype" else model.modalities
    evaluated = [m for m in modalities if m in model.modalities and m in known and m not in lacking]
    return Scores(*data.fold(step, (zero, zero[0, 0], zero[0, 0], dict.fromkeys(evaluated, zero))))


def nearness(model: Model, features: Mapping[str, Tensor], modality: str, batch: Batch, near: Prototypes) -> Tensor:
    """Minus the Euclidean distance of each row's feature to each class mean, (B, C); -inf for a class without one.

    A row that lacks the modality has a zero feature, as everywhere else (algorithms.md 7.3).
    """
    z = model.vector(masked({modality: features[modality]}, batch.present)[modality])
    return (-near.distances(z)).masked_fill(~near.active, float("-inf"))


def own_score(model: Model, w: Tree, data: ClientData) -> OwnScore:
    """Count how many rows of a view a model gets right."""

    def step(hits: Tensor, batch: Batch) -> Tensor:
        logits = model.logits(w, batch)
        right = (logits.argmax(-1) == batch.y).to(torch.float32)
        # a row without finite logits is no hit and no miss: the count tells it, and the reply is dropped as diverged
        return hits + batch.sum(torch.where(logits.isfinite().all(-1), right, torch.nan))

    return OwnScore(data.fold(step, torch.zeros((), device=data.num_rows.device)), data.num_rows)
