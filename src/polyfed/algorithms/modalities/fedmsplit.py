"""FedMSplit: the server keeps personal models and mixes them block by block with the models of similar clients.

Chen, Zhang, "FedMSplit: Correlation-Adaptive Federated Multi-Task Learning across Multimodal Split Networks", KDD 2022.
Neither the text of the paper nor the code of its authors is publicly available. This implementation therefore follows
third-party descriptions. The server keeps a model for each client. After every round, the server mixes the blocks of
the cohort. The block of another client has a larger weight if the parameters of the two clients are more similar, and
if the two clients share more modalities.

polyfed's choices: the default similarity is the cosine with a temperature, and `similarity = "dot"` is the dot product
of the publication. With dot products of whole parameter vectors, each client would give all attention to itself, so
clients would share nothing. The global model for server evaluation is the mean of the personal models of all clients
that took part, weighted by rows.

The messages are the same as under FedAvg, but each client receives its own model. Page: docs/algorithms/fedmsplit.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, State, mean_loss
from polyfed.algorithms.base import Broadcast
from polyfed.core.batch import Batch
from polyfed.core.option_checks import NOT_NEGATIVE, POSITIVE, READING, SearchRange
from polyfed.core.request import Send, names_as_sent
from polyfed.core.tree import SHARED, Tree, block_of, blocks, mean_of, select, squared_distance, vector, weighted_sum
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation


@dataclass(frozen=True)
class SplitState(State):
    """Server state; `params` is the mean of the personal models.

    Attributes:
        models: client -> its personal model.
    """

    models: dict[int, Tree] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FedMSplit(Averaging[SplitState]):
    """Personal models that are mixed by attention.

    Attributes:
        mode: `personal`, or `block_mean`, FedAvg per block, which the CMSFed paper's tables seem to report.
        lam: lambda, weight of the proximal term lambda * ||w - w_received||^2 in `personal`.
        similarity: similarity of parameter vectors: their `cosine` divided by the temperature, or their `dot` product
            divided by the root of the number of entries.
        temperature: temperature of `cosine`.
    """

    mode: Annotated[Literal["personal", "block_mean"], SearchRange("personal", "block_mean", fedavg="block_mean")] = (
        "personal"
    )
    lam: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.001, 0.01, 0.1, 1.0)] = 0.01
    similarity: Annotated[Literal["cosine", "dot"], READING] = "cosine"
    temperature: Annotated[float, POSITIVE, SearchRange(0.05, 0.1, 0.5, 1.0, beside=("similarity", "cosine"))] = 0.1

    mixing: ClassVar[str] = ""
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {"example": ("update.params",)}

    @property
    @override
    def averages_models(self) -> bool:  # type: ignore[override]
        return self.mode == "block_mean"

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = super().idle_options(fed)
        if self.mode == "block_mean":
            return result | dict.fromkeys(("lam", "similarity", "temperature"), "mode = 'block_mean'")
        result |= {"temperature": "similarity = 'dot'"} if self.similarity == "dot" else {}
        return result | {"aggregation": "mode = 'personal'"}

    @override
    def init(self, fed: Federation, params: Tree) -> SplitState:
        return SplitState(**vars(super().init(fed, params)))

    @override
    def round(self, state: SplitState, fed: Federation) -> SplitState:
        if self.mode == "block_mean":
            return super().round(state, fed)  # type: ignore[no-any-return]
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        sends = {client: Broadcast(self._own(state, client, fed)) for client in cohort}
        replies = fed.ask(self.update, cohort, sends, accept=names_as_sent("params", sends))
        if not replies:
            return state.with_(memory=memory)
        memory = self.selector.learn(memory, state.params, replies, fed)
        trained = {client: reply.params for client, reply in replies.items()}
        models = state.models | self.mixed(trained, fed)
        params = state.params | mean_of(models, fed.clients.rows_of(models))
        return state.with_(memory=memory, models=models, params=params, train_loss=mean_loss(replies, fed))

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        loss = super().loss(context, w, batch, got, local)
        if self.mode == "block_mean":
            return loss
        return loss + self.lam * squared_distance(context.model.trainable(w), got.params)

    @property
    @override
    def single_replies(self) -> str:
        """Return why the server has to read the reply of each client, or an empty text if sums of replies are enough.

        With `mode = "personal"`, the server mixes the models of individual clients.
        """
        mixes = "mode = 'personal' mixes the models of single clients" if self.mode == "personal" else ""
        return mixes or super().single_replies

    @property
    @override
    def own_models(self) -> Literal["none", "server"]:
        """Return where the clients' own models are kept: with `mode = "personal"`, on the server."""
        return "server" if self.mode == "personal" else "none"

    @override
    def global_params(self, state: SplitState) -> Tree:
        return state.params

    @override
    def evaluation_message(self, state: SplitState, fed: Federation, clients: Sequence[int]) -> Send:
        if self.mode == "block_mean":
            return super().evaluation_message(state, fed, clients)
        return {client: Broadcast(self._own(state, client, fed)) for client in clients}

    def mixed(self, trained: Mapping[int, Tree], fed: Federation) -> dict[int, Tree]:
        """Mix the models of a cohort block by block, weighted by attention and by shared modalities.

        Args:
            trained: client -> its trained model.

        Returns:
            client -> its next personal model.
        """
        clients = sorted(trained)
        attention = self._attention(trained, clients, fed)
        owned = {client: set(fed.clients.owned(client)) for client in clients}
        after: dict[int, Tree] = {}
        for i, client in enumerate(clients):
            common = [owned[client] & owned[other] for other in clients]
            bond = torch.tensor(
                [float(sum(attention[m][i, j] for m in both)) / (1 + len(both)) for j, both in enumerate(common)]
            )
            after[client] = {}
            for block in blocks(trained[client]):
                share = attention[block][i] * bond
                if not bool(share.sum() > 0):  # under `dot`, a client that shares no modality can get all attention
                    share = torch.zeros_like(share).index_fill(0, torch.tensor([i]), 1.0)
                own = select(trained[client], [block])
                after[client] |= _mix(own, share / share.sum(), [trained[other] for other in clients])
        return after

    def _attention(self, trained: Mapping[int, Tree], clients: list[int], fed: Federation) -> dict[str, Tensor]:
        """Return an attention matrix (S, S) for each block, where S is the number of clients.

        Entry (i, j) is the attention of client i to client j. If client i owns the block, row i sums to 1. If client i
        does not own the block, row i and column i are zero.
        """
        result = {}
        for block in (*fed.clients.modalities, SHARED):
            own = [select(fed.context.model.trainable(trained[client]), [block]) for client in clients]
            owners = torch.tensor([block == SHARED or block in fed.clients.owned(c) for c in clients])
            if not bool(owners.any()):
                continue
            flat = [vector(tree) for tree in own]
            longest = max(flat, key=len)
            rows = torch.stack([row if len(row) else torch.zeros_like(longest) for row in flat])
            scores = self._scores(rows).cpu().masked_fill(~owners, float("-inf"))
            result[block] = torch.softmax(scores, 1) * owners.unsqueeze(1)
        return result

    def _scores(self, rows_SP: Tensor) -> Tensor:
        if self.similarity == "dot":
            return rows_SP @ rows_SP.T / math.sqrt(max(rows_SP.shape[1], 1))
        unit_SP = torch.nn.functional.normalize(rows_SP, dim=1)
        return unit_SP @ unit_SP.T / self.temperature

    def _own(self, state: SplitState, client: int, fed: Federation) -> Tree:
        if client in state.models:
            return state.models[client]
        return select(fed.context.initial, fed.clients[client].blocks)


def _mix(own: Tree, shares: Tensor, others: list[Tree]) -> Tree:
    block = block_of(next(iter(own)))
    used = [(float(share), tree) for share, tree in zip(shares, others, strict=True) if float(share) > 0]
    assert all(any(block_of(name) == block for name in tree) for _, tree in used), (
        "a positive weight for a client that lacks the block"
    )
    return {name: weighted_sum([tree[name] for _, tree in used], [share for share, _ in used]) for name in own}
