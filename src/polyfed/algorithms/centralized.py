"""Centralized: all rows on one machine, the ceiling that federated methods are measured against.

algorithms.md 5.10. Clients hand over samples and labels once, through the same gate as everything else: any sane policy
refuses, and only a recipe that says `raw` and `labels` may go gets past it. From then on nothing crosses. The server
trains on the pooled rows as a client trains on its own; rounds times epochs passes in all, the optimiser never starts
afresh.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from polyfed.algorithms.averaging import State
from polyfed.algorithms.base import Algorithm
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE, POSITIVE
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import ModelSpec
from polyfed.privacy.policy import Policy
from polyfed.training import ClientData, TrainingResult
from polyfed.training.losses import cross_entropy


@message
class Request(Message):
    """Nothing: the signal to hand over everything."""


@message
class Handover(Message):
    """A client's rows: samples (n, ...) by modality, which of them are there where some are not, and labels (n,)."""

    samples: Tree = carries("raw", rows="num_rows", shape=("sample",))
    present: Tree = carries("raw", rows="num_rows", shape=())
    labels: Tensor = carries("labels", rows="num_rows", shape=())
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True)
class Pool(State):
    """The model, its optimiser after `num_steps` steps, and the pooled rows.

    Attributes:
        samples: modality -> (N, ...), zero where nobody has it.
        present: modality -> bool (N,), for one that some rows lack.
        labels: (N,).
        optimiser: moments of the optimiser; `moments` of the template stays empty.
        num_steps: steps so far.
    """

    samples: Tree = field(default_factory=dict)
    present: Tree = field(default_factory=dict)
    labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    optimiser: dict[str, Tree] = field(default_factory=dict)
    num_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Centralized(Algorithm):
    """See the module.

    Attributes:
        width: hidden sizes and the embedding are multiplied by this; the PartialFL paper compares with a larger model.
    """

    width: Annotated[float, POSITIVE] = 1.0

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        super().__post_init__()
        if self.train.steps is not None:
            raise RecipeError(
                "centralized counts in epochs, as its training goes on over rounds: leave out train.steps"
            )

    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        """The recipe's model, `width` times as wide."""
        return spec.widened(self.width), modalities

    def init(self, fed: Federation, params: Tree) -> Pool:
        """Collect all rows, in the order of clients."""
        given = fed.ask(self.hand_over, list(fed.clients.eligible), Request())
        labels = torch.cat([given[k].labels for k in given])
        samples, present = pooled(given, fed)
        return Pool(params, samples=samples, present=present, labels=labels)

    def round(self, state: Pool, fed: Federation) -> Pool:
        """Train on the pooled rows for the epochs of a round."""
        model = fed.context.model

        def loss(w: Tree, batch: Batch) -> Tensor:
            return cross_entropy(model.logits(w, batch), batch)

        leg = None
        if state.num_steps:
            leg = TrainingResult({}, torch.zeros(()), torch.tensor(state.num_steps), moments=state.optimiser)
        view = fed.server_data(state.samples, state.labels, present=state.present)
        fit = view.minimise(loss, state.params, train=self.train, after=leg)
        steps = int(fit.num_steps)
        mean = float(fit.loss) * steps / max(steps - state.num_steps, 1)
        return state.with_(params=fit.params, optimiser=fit.moments, num_steps=steps, train_loss=mean)

    @task()
    def hand_over(self, context: ClientContext, data: ClientData, local: Tree, got: Request) -> tuple[Handover, Tree]:
        """Everything the client has."""

        def rows(batch: Batch) -> Tree:
            there = {f"present.{m}": yes for m, yes in batch.present.items()}
            return dict(batch.x) | there | {"label": batch.y}

        found = data.collect(rows)
        samples = {m: found[m] for m in context.modalities}
        present = {m: found[f"present.{m}"] for m in context.modalities if f"present.{m}" in found}
        return Handover(samples, present, found["label"], data.num_rows), local


def pooled(given: Replies, fed: Federation) -> tuple[Tree, Tree]:
    """Samples of all clients under each other, zeros where a client lacks the modality, and who has which row."""
    samples: Tree = {}
    present: Tree = {}
    shapes: dict[str, Any] = fed.context.model.shapes
    for m in fed.clients.modalities:
        values, there = [], []
        for k in given:
            reply, n = given[k], len(given[k].labels)
            ones = torch.ones(n, dtype=torch.bool, device=reply.labels.device)
            values.append(reply.samples.get(m, torch.zeros(n, *shapes[m], device=ones.device)))
            there.append(reply.present.get(m, ones if m in reply.samples else ~ones))
        samples[m], flags = torch.cat(values), torch.cat(there)
        if not bool(flags.all()):
            present[m] = flags
    return samples, present
