"""Judging models: which ones a method has trained, what an examiner and a client report, how the sums are made."""

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

    prototypes: Tree = carries("prototypes", shape=("classes", "features"), blocks=(READ,))
    rows_per_class: Tree = carries(
        "statistic", shape=("classes",), within=NOT_NEGATIVE, tells=HISTOGRAM, blocks=(READ, SHARED)
    )


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


@dataclass(frozen=True)
class Predictor:
    """How a client's own model, a Tree, becomes logits: by the model itself. A subclass predicts in another way."""

    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """Logits (B, C), or scores of which the largest is the predicted class; runs under vmap."""
        return model.logits(w, batch)


class TrainedModels(ABC):
    """Which models an algorithm trains. `evaluate` and `Run.predict` both ask these methods, so that they agree."""

    model_for: ClassVar[str] = "client"
    """Whose own model it is where clients have their own: a `client`'s, or a `silo`'s, whose devices share one."""

    @property
    def own_models(self) -> Literal["none", "server", "clients"]:
        """Who keeps a model of each client's own: nobody, the server in its state, or the clients in their local state.

        A method that overrides `own_params` judges clients with what they keep; others say otherwise here.
        """
        return "none" if type(self).own_params is TrainedModels.own_params else "clients"

    @property
    def predictor(self) -> Predictor:
        """How a client's own model predicts."""
        return Predictor()

    def global_params(self, state: Any) -> Tree | None:
        """The trained model of all clients, which `evaluate` judges on the server's rows; None where there is none."""
        return state.params if self.own_models == "none" else None

    @abstractmethod
    def to_judge(self, state: Any, fed: Federation, clients: Sequence[int]) -> Send:
        """What these clients receive to judge their model on their own test rows: one message, or one for each."""

    def own_params(self, got: Any, local: Tree) -> Tree:
        """The model a client is judged with on its own test rows: the global one unless it keeps its own."""
        params: Tree = got.params
        return params

    def client_modalities(self, client: int, fed: Federation) -> tuple[str, ...]:
        """The modalities that the model of a client can read: its own."""
        return fed.clients.owned(client)

    def client_model(self, client: int, state: Any, fed: Federation, local: Callable[[int], Tree]) -> Tree:
        """The model that a client is judged with, made where all clients are at hand.

        Args:
            client: its number.
            state: the server's state.
            fed: facts about the clients; nobody is asked.
            local: the local state of a client.
        """
        send = self.to_judge(state, fed, [client])
        got = cut(send if isinstance(send, Message) else send[client], fed.clients[client].blocks)
        return self.own_params(got, local(client))


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


def predict(
    model: Model,
    w: Tree,
    x: Mapping[str, Any],
    *,
    reads: Collection[str] | None = None,
    present: Mapping[str, Any] | None = None,
    predictor: Predictor = Predictor(),
) -> Tensor:
    """Logits (n, C) of samples that lie in no table, batch by batch, as in an evaluation.

    Args:
        model: the model.
        w: its parameters, which say the device.
        x: modality -> samples (n, ...), tensors or arrays; one that is not read is ignored.
        reads: the modalities that are read; None: all of the model's.
        present: modality -> bool (n,), for one that some rows lack.
        predictor: how `w` predicts.

    Raises:
        RecipeError: an unknown modality, samples of another shape, unequal numbers of rows, or nothing that is read.
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
    """How many samples these are, all checked."""
    for m in (*x, *present):
        if m not in model.shapes:
            raise RecipeError(f"x has '{m}', which is no modality of this model; {did_you_mean(m, model.shapes)}")
    for m, value in x.items():
        if not value.dim() or tuple(value.shape[1:]) != model.shapes[m]:
            wanted = ", ".join(map(str, ("n", *model.shapes[m])))
            raise RecipeError(f"x['{m}'] has the shape {tuple(value.shape)}; it must be ({wanted}), one sample a row")
    counts = {m: len(value) for m, value in x.items()} | {f"present of {m}": len(rows) for m, rows in present.items()}
    if len(set(counts.values())) > 1:
        raise RecipeError(f"every modality needs as many rows as the others; there are {counts}")
    return max(counts.values(), default=0)


def own_score(model: Model, w: Tree, data: ClientData, predictor: Predictor = Predictor()) -> OwnScore:
    """Count how many rows of a view a client's model gets right."""

    def step(hits: Tensor, batch: Batch) -> Tensor:
        logits = predictor.logits(model, w, batch)
        right = (logits.argmax(-1) == batch.y).to(torch.float32)
        # a row without finite logits is no hit and no miss: the count tells it, and the reply is dropped as diverged
        return hits + batch.sum(torch.where(logits.isfinite().all(-1), right, torch.nan))

    return OwnScore(data.fold(step, torch.zeros((), device=data.num_rows.device)), data.num_rows)
