"""DivFL: the cohort is the set of clients whose gradients best represent the gradients of all clients.

Balakrishnan, Li, Zhou, Himayat, Smith, Bilmes, "Diverse Client Selection for Federated Learning via Submodular
Maximization", ICLR 2022. The server keeps a gradient vector of each client and chooses the cohort greedily by facility
location (`submodular.py`). In the first round every client sends a vector. Afterwards only the vectors of the cohort
are replaced (the paper's "no overheads"). Vectors from different rounds are therefore compared, as in the paper.

The server sends the global model to the clients, and each client sends one gradient or parameter change to the server.
Page: docs/algorithms/selection.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import COST, NOT_NEGATIVE, READING
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, subtract, vector
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.selection.base import Selector
from polyfed.selection.submodular import Similarity, greedy, lazy_greedy, sample_size, stochastic_greedy
from polyfed.training import ClientData
from polyfed.training.optimisers import Train


@message
class GlobalModel(Message):
    """The global model with which clients compute their gradients."""

    params: Tree = carries("parameters")


@message
class Gradient(Message):
    """The gradient of the cross-entropy on all of a client's rows, or the parameter change of local training."""

    gradient: Tree = carries("gradients")


@dataclass(frozen=True)
class Diversity:
    """The selector's memory.

    Attributes:
        similarity: the clients' vectors and their distances; None before the first round.
        chosen: the last cohort.
        distance: distances of all clients with a vector to the members of `chosen`, when the cohort was chosen, (n, b).
    """

    similarity: Similarity | None = None
    chosen: list[int] = field(default_factory=list)
    distance: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DivFl(Selector):
    """Chooses diverse clients. If a client lacks a block, the client's vector has zeros in place of this block.

    Attributes:
        grad: the vector that describes a client: `delta`, the change of its parameters in local training (CMSFed's
            comparison), or `at_global`, the full-batch gradient at the global model (DivFL's code), which the server
            requests of the cohort in every round.
        greedy: `full` tries every client in each pass, `lazy` makes the same choice with fewer evaluations,
            `stochastic` tries max(b, N / 10) random ones, for a cohort of b from N clients.
        weights: weights of the chosen clients in the mean: `samples`, the method's, or `clusters`, the number of
            clients to which a chosen one is nearest.
        sketch: size to which vectors are projected; 0 does not project them.
        train: the options of [train] for the local training that computes `delta` in the first round.
    """

    grad: Annotated[Literal["delta", "at_global"], COST] = "delta"
    greedy: Annotated[Literal["stochastic", "lazy", "full"], COST] = "stochastic"
    weights: Annotated[Literal["samples", "clusters"], READING] = "samples"
    sketch: Annotated[int, NOT_NEGATIVE, COST] = 0
    train: Train = Train()

    @override
    def start(self, params: Tree) -> Diversity:
        return Diversity()

    @override
    def choose(self, memory: Diversity, params: Tree, fed: Federation) -> tuple[list[int], Diversity]:
        similarity = memory.similarity
        if similarity is None:
            size = sum(value.numel() for value in fed.context.model.trainable(params).values())
            similarity = Similarity.empty(len(fed.clients), size, self.sketch, keys.key(fed.seed, "sketch"))
            similarity = self._refresh(similarity, list(fed.clients.eligible), params, fed)
        chosen = sorted(self._greedy(similarity, fed))
        distance = similarity.distance[similarity.known][:, chosen] if self.weights == "clusters" else None
        if self.grad == "at_global":
            similarity = self._refresh(similarity, chosen, params, fed)
        return chosen, Diversity(similarity, chosen, distance)

    @property
    @override
    def single_replies(self) -> str:
        return "[selection] divfl compares the updates of single clients"

    reads: ClassVar[tuple[str, ...]] = ("params",)

    @override
    def learn(self, memory: Diversity, params: Tree, replies: Replies, fed: Federation) -> Diversity:
        if self.grad == "at_global" or memory.similarity is None:
            return memory
        own = fed.context.model.trainable(params)
        fresh = {}
        for client, reply in replies.items():
            trained = {name: value for name, value in reply.params.items() if name in own}
            fresh[client] = flat_vector(subtract(trained, own), own)
        return replace(memory, similarity=memory.similarity.refreshed(fresh))

    @override
    def weigh(self, memory: Diversity, weights: Mapping[int, float]) -> Mapping[int, float]:
        """Return the weight of each client i: under `clusters` the size |C_i| of its cluster, otherwise `weights[i]`.

        The cluster C_i consists of the clients whose nearest client, among those that answered, is i. Clients that have
        never sent a vector are not counted. When the server computes the weighted mean of the replies, it divides each
        weight by the sum of the weights. The result is the weight of the paper, gamma_i = |C_i| / K.
        """
        if memory.distance is None:
            return weights
        answered = sorted(weights)
        nearest = memory.distance[:, [memory.chosen.index(client) for client in answered]].argmin(1)
        sizes = torch.bincount(nearest, minlength=len(answered)).tolist()
        return dict(zip(answered, map(float, sizes), strict=True))

    def _greedy(self, similarity: Similarity, fed: Federation) -> list[int]:
        size, pool = self.size(fed.clients), list(fed.clients.eligible)
        if self.greedy != "stochastic":
            return (lazy_greedy if self.greedy == "lazy" else greedy)(similarity, size, pool)
        of, key = sample_size(size, len(pool)), keys.key(fed.seed, "greedy", fed.round)
        return stochastic_greedy(similarity, size, pool, of=of, key=key)

    def _refresh(self, similarity: Similarity, clients: list[int], params: Tree, fed: Federation) -> Similarity:
        """Ask clients for their vectors, and replace the old vectors."""
        own = fed.context.model.trainable(params)
        replies = fed.ask(self.gradient, clients, GlobalModel(params))
        return similarity.refreshed({client: flat_vector(reply.gradient, own) for client, reply in replies.items()})

    @task()
    def gradient(
        self, context: ClientContext, data: ClientData, local: Tree, got: GlobalModel
    ) -> tuple[Gradient, Tree]:
        """Compute the full-batch gradient of the loss, or the parameter change of one local training."""
        own = context.model.trainable(got.params)

        if self.grad == "delta":
            fit = data.minimise(context.loss, got.params, train=self.train)
            return Gradient({name: fit.params[name] - value for name, value in own.items()}), local
        fit = data.minimise(
            context.loss,
            got.params,
            train=Train(steps=1, batch_size=0, lr=0.0),
            direction=lambda grads, w, aux, carry: (grads, dict(grads)),
            carry={name: torch.zeros_like(value) for name, value in own.items()},
        )
        return Gradient(fit.carry), local


def flat_vector(part: Tree, template: Tree) -> Tensor:
    """Flatten a tree into a vector (P,), with zeros for the tensors of `template` that it lacks."""
    return vector({name: part.get(name, torch.zeros_like(value)) for name, value in template.items()})
