"""Power-of-choice: the server draws d random candidates, and the candidates with the largest losses form the cohort.

Cho, Wang, Joshi, "Towards Understanding Biased Client Selection in Federated Learning", AISTATS 2022. In every round,
the server draws d candidates and sends them the global model. Each candidate sends the loss of this model on its
training rows to the server. The clients with the largest losses form the cohort. Page: docs/algorithms/selection.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import AT_LEAST_ONE, COST, READING, NotSearched
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.selection.base import Selector
from polyfed.training import ClientData
from polyfed.training.optimisers import Train


@message
class Candidate(Message):
    """The global model, sent to a candidate that is asked for its loss."""

    params: Tree = carries("parameters")


@message
class OwnLoss(Message):
    """Mean loss of the global model on the client's training rows."""

    loss: Tensor = carries("statistic", dtype="float32")


@dataclass(frozen=True, kw_only=True)
class PowD(Selector):
    """Chooses clients with large losses.

    Attributes:
        d: number of candidates in a round; 10 in CMSFed's comparison.
        candidates: how candidates are drawn without replacement: by `size`, in proportion to their training rows, as in
            the paper, or `uniform`.
        variant: `full` asks candidates for the loss on all their rows, `batch` (cpow-d in the paper) on one mini-batch.
            `reported` (rpow-d) sends no request and uses the training loss that each last reported; clients without one
            come first.
        batch_size: batch size of the variant `batch`.
        allow_incongruent: whether clients may have different modalities, although their losses are then not comparable.
    """

    d: Annotated[int, AT_LEAST_ONE, COST] = 10
    candidates: Annotated[Literal["size", "uniform"], READING] = "size"
    variant: Annotated[Literal["full", "batch", "reported"], COST] = "full"
    batch_size: Annotated[int, AT_LEAST_ONE, COST] = 64
    allow_incongruent: Annotated[bool, NotSearched("depends on the data")] = False

    @property
    def idle(self) -> dict[str, str]:
        """The options that have no effect, each with the setting that causes this."""
        return {} if self.variant == "batch" else {"batch_size": f"variant = '{self.variant}'"}

    @override
    def start(self, params: Tree) -> dict[int, float]:
        return {}

    @override
    def choose(self, memory: dict[int, float], params: Tree, fed: Federation) -> tuple[list[int], dict[int, float]]:
        """Choose the candidates with the largest losses; among equal losses, smaller client numbers come first.

        Raises:
            RecipeError: `d` is out of range, or clients hold different modalities.
        """
        size, pool = self.size(fed.clients), fed.clients.eligible
        if not size <= self.d <= len(pool):
            raise RecipeError(
                f"[selection] d = {self.d}: must be at least the cohort's size, {size}, and at most the number of "
                f"clients with training rows, {len(pool)}",
                ("selection", "d"),
            )
        if not self.allow_incongruent and not bool((fed.clients.holds == fed.clients.holds[0]).all()):
            raise RecipeError(
                "[selection] pow-d compares losses, and those of clients that hold different modalities are not "
                "comparable: choose another selector, or set [selection] allow_incongruent = true",
                ("selection", "allow_incongruent"),
            )
        drawn = self._draw(pool, fed)
        losses = self._losses(drawn, memory, params, fed)
        answered = [client for client in drawn if client in losses]
        return sorted(sorted(answered, key=lambda client: (-losses[client], client))[:size]), memory

    @property
    @override
    def single_replies(self) -> str:
        return "[selection] pow-d compares the losses of single clients"

    reads: ClassVar[tuple[str, ...]] = ("loss",)

    @override
    def learn(self, memory: dict[int, float], params: Tree, replies: Replies, fed: Federation) -> dict[int, float]:
        return memory | replies.numbers("loss") if self.variant == "reported" else memory

    def _draw(self, pool: Sequence[int], fed: Federation) -> list[int]:
        """Draw d candidates without replacement: those with the largest u^(1/weight) (Efraimidis, Spirakis, 2006)."""
        noise = keys.uniform(keys.key(fed.seed, "candidates", fed.round), len(pool)).to(torch.float64)
        rows = fed.clients.num_rows[fed.clients.num_rows > 0].to(torch.float64)  # those of the pool, in its order
        score = (noise + 2.0**-25).log() / (rows if self.candidates == "size" else 1.0)
        return sorted(pool[i] for i in score.topk(self.d).indices.tolist())

    def _losses(self, drawn: list[int], memory: dict[int, float], params: Tree, fed: Federation) -> dict[int, float]:
        if self.variant == "reported":
            return {client: memory.get(client, math.inf) for client in drawn}
        return fed.ask(self.own_loss, drawn, Candidate(params)).numbers("loss")

    @task()
    def own_loss(self, context: ClientContext, data: ClientData, local: Tree, got: Candidate) -> tuple[OwnLoss, Tree]:
        """Compute the mean loss of the received model on the client's rows, or on a mini-batch of them."""
        if self.variant == "batch":
            # one training step with learning rate 0 gives the loss of a random batch
            once = Train(steps=1, batch_size=self.batch_size, lr=0.0)
            fit = data.minimise(lambda w, b: context.loss(w, b.evaluation()), got.params, train=once)
            return OwnLoss(fit.loss), local

        def step(carry: tuple[Tensor, Tensor], batch: Batch) -> Any:
            values, weights = context.row_losses(got.params, batch)
            return carry[0] + batch.sum(values), carry[1] + batch.sum(weights)

        zero = torch.zeros((), device=data.num_rows.device)
        total, weight = data.fold(step, (zero, zero))
        return OwnLoss(total / torch.where(weight > 0, weight, torch.ones_like(weight))), local
