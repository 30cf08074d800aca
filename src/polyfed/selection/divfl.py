"""DivFL: a cohort whose gradients stand for everybody's.

Balakrishnan, Li, Zhou, Himayat, Smith, Bilmes, "Diverse Client Selection for Federated Learning via Submodular
Maximization", ICLR 2022 (algorithms.md 5.7). In the first round every client gives a gradient; afterwards only the
cohort's are renewed ("no overheads"), so that gradients taken at different models are compared: the method accepts it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, subtract, vector
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.selection.base import Selector
from polyfed.selection.submodular import Similarity, greedy, lazy_greedy, sample_size, stochastic_greedy
from polyfed.training import ClientData
from polyfed.training.losses import cross_entropy
from polyfed.training.optimisers import Train


@message
class Point(Message):
    """The global model, where gradients are to be taken."""

    params: Tree = carries("parameters")


@message
class Gradient(Message):
    """The gradient of the cross-entropy over all of a client's rows, or what local training would change."""

    gradient: Tree = carries("gradients")


@dataclass(frozen=True)
class Diversity:
    """What DivFL remembers: vectors and distances, and who was chosen last."""

    similarity: Similarity | None = None
    chosen: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class DivFl(Selector):
    """See the module. Blocks that a client lacks count as zeros.

    Attributes:
        grad: what is compared: `delta`, the change of parameters in local training (CMSFed's comparison), or
            `at_global`, the full-batch gradient at the received model (DivFL's code), asked for in every round.
        greedy: `lazy` and `full` give the same choice; `stochastic` looks at max(b, N / 10) candidates a pass.
        weights: the mean by `samples`, or by `clusters`: how many clients each chosen one is nearest to (in the
            paper, commented out in its code).
        sketch: project vectors to so many entries; 0 keeps them exact.
        train: local training, the [train] section, with which `delta` is found in the first round.
    """

    grad: Literal["delta", "at_global"] = "delta"
    greedy: Literal["stochastic", "lazy", "full"] = "stochastic"
    weights: Literal["samples", "clusters"] = "samples"
    sketch: Annotated[int, NOT_NEGATIVE] = 0
    train: Train = Train()

    def start(self, params: Tree) -> Diversity:
        """Nobody known."""
        return Diversity()

    def choose(self, memory: Diversity, params: Tree, fed: Federation) -> tuple[list[int], Diversity]:
        """The greedy choice of this round."""
        similarity = memory.similarity
        if similarity is None:
            size = sum(value.numel() for value in fed.context.model.trainable(params).values())
            similarity = Similarity.empty(len(fed.clients), size, self.sketch, keys.key(fed.seed, "sketch"))
            similarity = self._asked(similarity, list(fed.clients.eligible), params, fed)
        chosen = self._greedy(similarity, fed)
        if self.grad == "at_global":
            similarity = self._asked(similarity, chosen, params, fed)
        return sorted(chosen), Diversity(similarity, sorted(chosen))

    def learn(self, memory: Diversity, params: Tree, replies: Replies, fed: Federation) -> Diversity:
        """Under `delta`, the cohort's vectors are what its training changed."""
        if self.grad == "at_global" or memory.similarity is None:
            return memory
        own = fed.context.model.trainable(params)
        fresh = {}
        for client, reply in replies.items():
            moved = {name: value for name, value in reply.params.items() if name in own}
            fresh[client] = whole(subtract(moved, own), own)
        return Diversity(memory.similarity.refreshed(fresh), memory.chosen)

    def weigh(self, memory: Diversity, weights: Mapping[int, float]) -> Mapping[int, float]:
        """gamma_i = |C_i| / K under `clusters`: clients whose nearest among those who answered is i."""
        if self.weights == "samples" or memory.similarity is None:
            return weights
        answered = sorted(weights)
        nearest = memory.similarity.distance[memory.similarity.known][:, answered].argmin(1)
        sizes = torch.bincount(nearest, minlength=len(answered)).tolist()
        return dict(zip(answered, map(float, sizes), strict=True))

    def _greedy(self, similarity: Similarity, fed: Federation) -> list[int]:
        size, pool = self.size(fed), list(fed.clients.eligible)
        if self.greedy != "stochastic":
            return (lazy_greedy if self.greedy == "lazy" else greedy)(similarity, size, pool)
        of, key = sample_size(size, len(fed.clients)), keys.key(fed.seed, "greedy", fed.round)
        return stochastic_greedy(similarity, size, pool, of=of, key=key)

    def _asked(self, similarity: Similarity, clients: list[int], params: Tree, fed: Federation) -> Similarity:
        own = fed.context.model.trainable(params)
        replies = fed.ask(self.explore, clients, Point(params))
        return similarity.refreshed({client: whole(reply.gradient, own) for client, reply in replies.items()})

    @task()
    def explore(self, context: ClientContext, data: ClientData, local: Tree, got: Point) -> tuple[Gradient, Tree]:
        """The full-batch gradient of the cross-entropy, or what local training changes; the model is thrown away."""
        own = context.model.trainable(got.params)

        def loss(w: Tree, batch: Batch) -> Tensor:
            return cross_entropy(context.model.logits(w, batch), batch)

        if self.grad == "delta":
            fit = data.minimise(loss, got.params, train=self.train)
            return Gradient({name: fit.params[name] - value for name, value in own.items()}), local
        fit = data.minimise(
            loss,
            got.params,
            train=Train(steps=1, batch_size=0, lr=0.0),
            direction=lambda grads, w, aux, carry: (grads, dict(grads)),
            carry={name: torch.zeros_like(value) for name, value in own.items()},
        )
        return Gradient(fit.carry), local


def whole(part: Tree, template: Tree) -> Tensor:
    """One vector (P,) of a tree that may lack blocks, zeros in their place."""
    return vector({name: part.get(name, torch.zeros_like(value)) for name, value in template.items()})
