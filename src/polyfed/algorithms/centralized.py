"""Centralized: train on all rows in one place. This is the upper baseline for federated methods.

The method has no paper. Every client sends its samples and labels once, before round 1, through the egress gate. The
policy must therefore allow `raw` and `labels`. The server then trains on the pooled rows. In total, it passes over them
R * E times, where R is the number of rounds and E is [train] epochs. One optimiser continues over all rounds.

For training, clients send only these samples and labels, and no parameters or gradients. Page:
docs/algorithms/centralized.md.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import State
from polyfed.algorithms.base import Algorithm
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE, OF_MODEL, POSITIVE
from polyfed.core.problems import Conflict
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import ModelSpec
from polyfed.objective import Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData
from polyfed.training.kept_training import earlier_steps


@message
class RowsWanted(Message):
    """Asks for all rows of a client. Has no fields."""


@message
class AllRows(Message):
    """All training rows of a client: samples (n, ...) by modality, and labels (n,), or (n, T) if there are T targets.

    `present` holds a bool (n,) for every modality that some of the rows lack.
    """

    samples: Tree = carries("raw", rows="num_rows", shape=("sample",))
    present: Tree = carries("raw", rows="num_rows", shape=())
    labels: Tensor = carries("labels", rows="num_rows", shape=("label",))
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class Pool(State):
    """Server state: the model, its optimiser, and the pooled rows of all clients.

    Attributes:
        samples: modality -> (N, ...), zeros for rows that lack the modality.
        present: modality -> bool (N,), for modalities that some rows lack.
        labels: class of each row, int64 (N,), or targets, float32 (N, T).
        optimiser: moments of the optimiser; the inherited field `moments` stays empty.
        num_steps: training steps so far.
    """

    samples: Tree = field(default_factory=dict)
    present: Tree = field(default_factory=dict)
    labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    optimiser: dict[str, Tree] = field(default_factory=dict)
    num_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Centralized(Algorithm[Pool]):
    """The server trains on the pooled rows of all clients.

    Attributes:
        width: factor for the hidden sizes and the embedding, for a comparison with a larger model, as in the PartialFL
            paper.
    """

    mixing: ClassVar[str] = "the server trains on the rows of all modalities"
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("train", "steps"),
            when=lambda recipe: recipe.algorithm.train.steps is not None,
            because="its training continues over rounds and is counted in epochs",
            instead="Remove steps and set epochs",
        ),
    )
    objectives: ClassVar[tuple[type[Objective], ...]] = (Objective,)

    width: Annotated[float, POSITIVE, OF_MODEL] = 1.0

    @override
    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        return spec.widened(self.width), modalities

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        return {"network.*": "a method whose clients do nothing in a round: they send their rows before the first"}

    @override
    def init(self, fed: Federation, params: Tree) -> Pool:
        replies = fed.ask(self.send_rows, list(fed.clients.eligible), RowsWanted())
        labels = torch.cat([replies[k].labels for k in replies])
        samples, present = pooled(replies, fed)
        return Pool(params, samples=samples, present=present, labels=labels)

    @override
    def round(self, state: Pool, fed: Federation) -> Pool:
        earlier = None
        if state.num_steps:
            earlier = earlier_steps(state.optimiser, state.num_steps)
        data = fed.server_data(state.samples, state.labels, present=state.present)
        fit = data.minimise(fed.context.loss, state.params, train=self.train, after=earlier)
        steps = int(fit.num_steps)
        mean = float(fit.loss) * steps / max(steps - state.num_steps, 1)
        return state.with_(params=fit.params, optimiser=fit.moments, num_steps=steps, train_loss=mean)

    @task()
    def send_rows(self, context: ClientContext, data: ClientData, local: Tree, got: RowsWanted) -> tuple[AllRows, Tree]:
        """Send all training rows of the client."""

        def rows(batch: Batch) -> Tree:
            there = {f"present.{m}": yes for m, yes in batch.present.items()}
            return dict(batch.x) | there | {"label": batch.y}

        result = data.collect(rows)
        samples = {m: result[m] for m in context.modalities}
        present = {m: result[f"present.{m}"] for m in context.modalities if f"present.{m}" in result}
        return AllRows(samples, present, result["label"], data.num_rows), local


def pooled(replies: Replies, fed: Federation) -> tuple[Tree, Tree]:
    """Concatenate the samples of all clients, with zeros where a client lacks a modality.

    Returns:
        Samples (N, ...) by modality, and bool (N,) for every modality that some rows lack.
    """
    samples: Tree = {}
    present: Tree = {}
    shapes: dict[str, Any] = fed.context.model.shapes
    for m in fed.clients.modalities:
        values, there = [], []
        for k in replies:
            reply, n = replies[k], len(replies[k].labels)
            ones = torch.ones(n, dtype=torch.bool, device=reply.labels.device)
            values.append(reply.samples.get(m, torch.zeros(n, *shapes[m], device=ones.device)))
            there.append(reply.present.get(m, ones if m in reply.samples else ~ones))
        samples[m], flags = torch.cat(values), torch.cat(there)
        if not bool(flags.all()):
            present[m] = flags
    return samples, present
