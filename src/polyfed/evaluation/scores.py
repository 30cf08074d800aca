"""Scores of models: which models a method has trained, and what clients and evaluation clients report about them.

Server evaluation: the global model is sent to the evaluation clients, which hold the server's test and validation rows
and answer with `Scores`. Personal evaluation: clients answer with an `OwnScore` on their own test rows. Both contain
sums, which `metrics.py` turns into metrics. `TrainedModels` has the hooks by which a method names its models.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.messages import HISTOGRAM, READ, Message, carries, cut, message
from polyfed.core.request import Send
from polyfed.core.schema import EVERY, NOT_NEGATIVE, check_ranges
from polyfed.core.tree import SHARED, Tree, blocks
from polyfed.evaluation import metrics
from polyfed.federation.federation import Federation
from polyfed.model import Model
from polyfed.model.fusion import masked
from polyfed.training import ClientData
from polyfed.training.client_data import FOLD_BATCH
from polyfed.training.prototypes import Prototypes


@message
class ModelToEvaluate(Message):
    """The model to evaluate.

    With `unimodal = "prototype"` also class means (C, E) of its features over the clients' training rows, by modality,
    and which classes have one, bool (C,); both are empty otherwise.
    """

    params: Tree = carries("parameters")
    prototypes: Tree = carries("prototypes", shape=("classes", "features"))
    known: Tree = carries("statistic", shape=("classes",))


@message
class ClassMeans(Message):
    """Class means of a client's training rows.

    Class means (C, E) of the features by modality, zeros for a class without rows, and rows per class (C,), under
    `shared` and under each modality that some rows lack.
    """

    prototypes: Tree = carries("prototypes", shape=("classes", "features"), blocks=(READ,))
    rows_per_class: Tree = carries(
        "statistic", shape=("classes",), within=NOT_NEGATIVE, tells=HISTOGRAM, blocks=(READ, SHARED)
    )


@message
class Scores(Message):
    """Sums over the rows of an evaluation client.

    The confusion matrix (C, C), the number of top-5 hits, the sum of the loss, and for each modality the confusion
    matrix (C, C) of predictions from this modality alone.
    """

    confusion: Tensor = carries("statistic", shape=("classes", "classes"))
    top5_hits: Tensor = carries("statistic")
    loss_sum: Tensor = carries("statistic")
    unimodal: Tree = carries("statistic", shape=("classes", "classes"))


@message
class OwnScore(Message):
    """How many of a client's own test rows its model predicts correctly, and how many there are."""

    hits: Tensor = carries("statistic", within=NOT_NEGATIVE)
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and how to evaluate: the [evaluate] section.

    Attributes:
        every: rounds between two evaluations; the last round is always evaluated; 0 evaluates only the last.
        personal: whether clients with test rows of their own are evaluated on them.
        unimodal: how one modality alone predicts: `head`, its slice of a linear head (as in OGM-GE); `zero`, the model
            with all other features set to zero; `prototype`, the nearest class mean of its features over the training
            rows, which every client sends before each evaluation (kind `prototypes`; only with methods that average
            parameters). `auto` is `head` where the model has a linear head, else `zero`.
    """

    every: Annotated[int, EVERY] = 1
    personal: bool = True
    unimodal: Literal["auto", "head", "zero", "prototype"] = "auto"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range.
        """
        check_ranges("[evaluate]", self)

    def due(self, round: int, rounds: int) -> bool:
        """Whether round number `round` of `rounds` is evaluated."""
        return round == rounds or (self.every > 0 and round % self.every == 0)


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation.

    Attributes:
        metrics: group -> metric -> value, as in result.json.
        personal: client -> accuracy on its own test rows.
    """

    metrics: dict[str, dict[str, float]]
    personal: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Predictor:
    """How a client's own model predicts: here by the logits of the recipe's model. A subclass predicts otherwise."""

    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """Logits (B, C) of the model with parameters `w`, or other scores whose largest is the predicted class's.

        Runs under vmap.
        """
        return model.logits(w, batch)


class TrainedModels(ABC):
    """Which models a method trains. `Algorithm.evaluate` and `Run.predict` both use these hooks, so that they agree."""

    model_for: ClassVar[str] = "client"
    """Whom a personal model belongs to: a `client`, or a `silo`, whose clients share one."""

    @property
    def own_models(self) -> Literal["none", "server", "clients"]:
        """Where personal models are kept: nowhere, in the server's state, or in the clients' local state.

        The default is `clients` for a method that overrides `own_params`, else `none`.
        """
        return "none" if type(self).own_params is TrainedModels.own_params else "clients"

    @property
    def predictor(self) -> Predictor:
        """How a personal model predicts."""
        return Predictor()

    def global_params(self, state: Any) -> Tree | None:
        """The global model, which is evaluated on the server's rows; None where the method has none."""
        return state.params if self.own_models == "none" else None

    @abstractmethod
    def to_judge(self, state: Any, fed: Federation, clients: Sequence[int]) -> Send:
        """What these clients receive for personal evaluation: one message, or a mapping with one for each."""

    def own_params(self, got: Any, local: Tree) -> Tree:
        """The model that a client is evaluated with on its own test rows: the received one unless it keeps its own.

        Args:
            got: the message from `to_judge`.
            local: the client's local state.
        """
        params: Tree = got.params
        return params

    def client_modalities(self, client: int, fed: Federation) -> tuple[str, ...]:
        """The modalities that a client's model reads: those of the client."""
        return fed.clients.owned(client)

    def client_model(self, client: int, state: Any, fed: Federation, local: Callable[[int], Tree]) -> Tree:
        """The model that a client is evaluated with, computed in a simulation, where all local states are available.

        Args:
            client: the client's number.
            state: the server's state.
            fed: the federation; this hook sends no requests.
            local: returns the local state of a client, given its number.
        """
        send = self.to_judge(state, fed, [client])
        got = cut(send if isinstance(send, Message) else send[client], fed.clients[client].blocks)
        return self.own_params(got, local(client))


def scores(model: Model, got: ModelToEvaluate, modalities: Iterable[str], data: ClientData, unimodal: str) -> Scores:
    """Compute the scores of a model on all rows of a client dataset, from all modalities and from each one alone.

    Args:
        model: the recipe's model.
        got: the parameters, and class means under `unimodal = "prototype"`. Parameters of a client that lacks
            modalities predict from the modalities that they have.
        modalities: the modalities to evaluate alone; under `prototype` those without class means are left out.
        data: the client dataset.
        unimodal: how one modality alone predicts, see `Evaluation`.
    """
    size = model.num_classes
    w = got.params
    near = {m: Prototypes(mean, got.known[m]) for m, mean in got.prototypes.items()}
    zero = torch.zeros(size, size, device=data.num_rows.device)
    lacking = set(blocks(model.names(model.modalities))) - set(blocks(w))
    # an explicit `head` is passed on even if the model has no linear head, so that the model raises its own error
    by_head = unimodal == "head" or (unimodal == "auto" and model.linear_head)
    mode: Literal["head", "zero"] = "head" if by_head else "zero"

    def single(features: Mapping[str, Tensor], modality: str, batch: Batch) -> Tensor:
        if unimodal == "prototype":
            return class_mean_scores(model, features, modality, batch, near[modality])
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


def class_mean_scores(
    model: Model, features: Mapping[str, Tensor], modality: str, batch: Batch, near: Prototypes
) -> Tensor:
    """The negative Euclidean distance of each row's feature to each class mean, (B, C); -inf for a class without one.

    A row that lacks the modality has a zero feature, as in training.
    """
    z = model.vector(masked({modality: features[modality]}, batch.present)[modality])
    return (-near.distances(z)).masked_fill(~near.active, float("-inf"))


def predict(
    model: Model,
    w: Tree,
    x: Mapping[str, Any],
    *,
    reads: Collection[str] | None = None,
    present: Mapping[str, Any] | None = None,
    predictor: Predictor = Predictor(),
) -> Tensor:
    """Logits (n, C) of the given samples, computed in batches as in an evaluation.

    Args:
        model: the recipe's model.
        w: its parameters; the computation runs on their device.
        x: modality -> samples (n, ...), tensors or arrays; modalities that are not read are ignored.
        reads: the modalities to read; None means all of the model's.
        present: modality -> bool (n,), for modalities that some rows lack.
        predictor: how `w` predicts.

    Raises:
        RecipeError: a modality is unknown, samples have the wrong shape, the modalities have different numbers of rows,
            or none of the given modalities is read.
    """
    read = [m for m in model.modalities if reads is None or m in reads]
    given = {m: torch.as_tensor(value) for m, value in x.items()}
    there = {m: torch.as_tensor(rows, dtype=torch.bool) for m, rows in (present or {}).items()}
    n = _rows_of(model, given, there)
    if not (used := [m for m in read if m in given]):
        raise RecipeError(f"x has {', '.join(given) or 'no modality'}; the model reads {', '.join(read)}")
    place, found = next(iter(w.values())).device, []
    with torch.no_grad():
        for rows in torch.split(torch.arange(n), FOLD_BATCH):
            numbers = rows.to(place)
            samples = {m: given[m][rows.to(given[m].device)].to(place, torch.float32) for m in used}
            known = {m: there[m][rows.to(there[m].device)].to(place) for m in used if m in there}
            batch = Batch(x=samples, y=torch.zeros_like(numbers), rows=numbers, present=known)
            found.append(predictor.logits(model, w, batch))
    return torch.cat(found)


def _rows_of(model: Model, x: Tree, present: Tree) -> int:
    """The number of samples, after checking names, shapes and lengths."""
    for m in (*x, *present):
        if m not in model.shapes:
            raise RecipeError(f"x has '{m}', which is no modality of this model; {did_you_mean(m, model.shapes)}")
    for m, value in x.items():
        if not value.dim() or tuple(value.shape[1:]) != model.shapes[m]:
            wanted = ", ".join(map(str, ("n", *model.shapes[m])))
            raise RecipeError(f"x['{m}'] has the shape {tuple(value.shape)}; it must be ({wanted}) for n samples")
    counts = {m: len(value) for m, value in x.items()} | {f"present of {m}": len(rows) for m, rows in present.items()}
    if len(set(counts.values())) > 1:
        raise RecipeError(f"every modality must have as many rows as the others; there are {counts}")
    return max(counts.values(), default=0)


def own_score(model: Model, w: Tree, data: ClientData, predictor: Predictor = Predictor()) -> OwnScore:
    """Count how many rows of a client dataset a client's model predicts correctly.

    Args:
        model: the recipe's model.
        w: the client's own model.
        data: the client dataset.
        predictor: how `w` predicts.
    """

    def step(hits: Tensor, batch: Batch) -> Tensor:
        logits = predictor.logits(model, w, batch)
        right = (logits.argmax(-1) == batch.y).to(torch.float32)
        # non-finite logits make the count NaN, so that reply validation drops the reply as diverged
        return hits + batch.sum(torch.where(logits.isfinite().all(-1), right, torch.nan))

    return OwnScore(data.fold(step, torch.zeros((), device=data.num_rows.device)), data.num_rows)
