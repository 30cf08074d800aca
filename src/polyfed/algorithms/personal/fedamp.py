"""FedAMP: every client trains near its own cloud model, in which similar clients have larger weights.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021. The
method is attentive message passing. The server keeps a personal cloud model for each client, which is a weighted mean
of all clients' models. Let x be the squared distance between the models of two clients, and let A'(x) be the derivative
of A(x) = 1 - e^(-x / sigma). The weight of the other client's model is alpha A'(x), before the weights are normalised.
In HeurFedAMP, the weights come from cosine similarities. A client trains its own model with a proximal term towards its
cloud model.

polyfed's choice: FedAMP runs separately for each block, and only the clients that own the block take part. In every
round, for each block, the server draws `uploads` clients at random. These clients send the block and get new cloud
blocks. The other clients keep their cloud blocks.

The clients send blocks of personal models, and the server sends cloud blocks. Page: docs/algorithms/fedamp.md.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import mean_loss
from polyfed.algorithms.base import NO_GLOBAL, Algorithm, Broadcast
from polyfed.algorithms.local import Done, Start
from polyfed.algorithms.personal import blocks as exchange
from polyfed.algorithms.personal.blocks import Blocks, Installed, Wanted, layouts
from polyfed.core.batch import Batch
from polyfed.core.option_checks import (
    AT_LEAST_ONE,
    BELOW_ONE,
    COST,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    READING,
    NotSearched,
    SearchRange,
)
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, block_of, keep_on_host, nested, squared_distance, under
from polyfed.federation.clock import Timetable
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.objective import Objective
from polyfed.training import ClientData

CLOUD = "cloud"
"""Prefix of the cloud model in a client's local state."""

PULLED = 0.02
"""A proximal term below this share of the training loss counts as having no effect (docs/algorithms/fedamp.md)."""


@dataclass(frozen=True)
class Clouds:
    """Cloud blocks (blocks of the clients' cloud models) that the server has not sent yet.

    Attributes:
        members: the clients that own these cloud blocks, int64 (S,) in ascending order.
        rows: their flattened blocks (S, P), in the same order.
    """

    members: Tensor
    rows: Tensor

    def __post_init__(self) -> None:
        """Move the client numbers to the CPU, where other methods read them. The blocks stay on their device."""
        keep_on_host(self, "members")

    def of(self, clients: Collection[int]) -> "Clouds":
        """The cloud blocks of the given clients."""
        kept = torch.tensor([client in clients for client in self.members.tolist()], dtype=torch.bool)
        return Clouds(self.members[kept], self.rows[kept.to(self.rows.device)])

    def union(self, others: "Clouds") -> "Clouds":
        """Join these cloud blocks with those of other clients; no client may be in both."""
        members = torch.cat([self.members, others.members])
        order = members.argsort()
        return Clouds(members[order], torch.cat([self.rows, others.rows])[order.to(self.rows.device)])


@dataclass(frozen=True)
class FedAmpState:
    """Server state.

    Attributes:
        params: the common initial model; there is no global model.
        clouds: the cloud blocks to send in the next round, by block. Some are new. The others were sent in the last
            round and did not arrive.
        waited_for: clients asked for an upload in the last round.
        train_loss: mean training loss of the last round, weighted by rows.
        pull: mean proximal term of the clients that uploaded in the last round, as a share of `train_loss`. A client
            counts only if it also received a cloud block in that round. None if no client that uploaded had received a
            cloud block.
    """

    params: Tree
    clouds: dict[str, Clouds] = field(default_factory=dict)
    waited_for: list[int] = field(default_factory=list)
    train_loss: float = float("nan")
    pull: float | None = None


@dataclass(frozen=True, kw_only=True)
class FedAmp(Algorithm[FedAmpState]):
    """Attentive message passing between personal models.

    Attributes:
        uploads: clients that send a block in a round: a share of all clients, or a count.
        heuristic: use HeurFedAMP, with attention from cosine similarities.
        lam: lambda, weight of the proximal term lambda / (2 alpha) ||w - u||^2 towards the cloud model u.
        alpha: step size of message passing in round 1.
        alpha_decay: factor by which alpha is multiplied after every `alpha_every` rounds.
        alpha_every: rounds between two decays of alpha.
        sigma: without `heuristic`, the width sigma of A(x) = 1 - e^(-x / sigma), where 0 stands for 1e6; with it, the
            factor of the cosine similarities in the softmax, where 0 stands for 25.
        self_weight: weight of a client's own model under the heuristic; 0 selects 1 / number of uploads.
        start: local training starts from the client's `own` model or from its `cloud` model.
    """

    captions: ClassVar[Mapping[str, str]] = {
        "pull": "The proximal term towards the cloud models as a share of the training loss; 0.02 hardly matters.",
    }
    mixing: ClassVar[str] = ""
    objectives: ClassVar[tuple[type[Objective], ...]] = (Objective,)

    uploads: Annotated[float | int, COST] = 1.0
    heuristic: Annotated[bool, NotSearched("HeurFedAMP is another method")] = False
    lam: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.1, 1.0, 10.0)] = 1.0
    alpha: Annotated[float, POSITIVE, SearchRange(1.0, 10.0, 100.0, 1000.0, 10000.0)] = 1e4
    alpha_decay: Annotated[float, FRACTION, NotSearched("goes with alpha")] = 0.1
    alpha_every: Annotated[int, AT_LEAST_ONE, NotSearched("goes with alpha")] = 30
    sigma: Annotated[float, NOT_NEGATIVE, NotSearched("0 takes the value of third-party code")] = 0.0
    self_weight: Annotated[float, BELOW_ONE, SearchRange(0.0, 0.3, 0.6, 0.9, beside=("heuristic", True))] = 0.0
    start: Annotated[Literal["own", "cloud"], READING] = "own"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range.
        """
        super().__post_init__()
        exchange.check_uploads(self.uploads)

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = {} if self.heuristic else {"self_weight": "heuristic = false"}
        if fed.rounds <= self.alpha_every:
            result["alpha_decay"] = f"alpha_every = {self.alpha_every} in a run of {fed.rounds} rounds"
        return result | {"evaluate.unimodal": NO_GLOBAL}

    @override
    def init(self, fed: Federation, params: Tree) -> FedAmpState:
        return FedAmpState(params)

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        return {**context.initial, **nested(CLOUD, context.initial)}

    @override
    def round(self, state: FedAmpState, fed: Federation) -> FedAmpState:
        """Send the cloud blocks, let all clients train, collect the uploads, and compute new cloud blocks."""
        downloads = self._downloads(state, fed)
        installed = fed.ask(self.install, list(downloads), downloads, quorum=False)
        trained = fed.ask(self.train_own, list(fed.clients.eligible), Start())
        layout = layouts(fed, state.params)
        count = exchange.num_uploads(self.uploads, len(fed.clients.eligible))
        asked = exchange.wanted(exchange.draw_uploads(fed, count, layout))
        uploads = fed.ask(self.upload, list(asked), asked, quorum=False, accept=exchange.as_wanted(asked, layout))
        lost = downloads.keys() - installed.keys()
        clouds, terms = {}, dict[int, float]()
        weight = self.lam / (2 * self.alpha_at(fed.round))
        for block, form in layout.items():
            members, rows = form.gather(uploads)
            sent = state.clouds[block].of({*members.tolist()} & installed.keys()) if block in state.clouds else None
            if sent is not None and len(sent.members):
                now = rows[torch.isin(members, sent.members).to(rows.device)]
                apart = (now - sent.rows)[:, : form.num_trainable].square().sum(1).tolist()
                for client, squares in zip(sent.members.tolist(), apart, strict=True):
                    terms[client] = terms.get(client, 0.0) + weight * squares
            if block in state.clouds and len((late := state.clouds[block].of(lost - {*members.tolist()})).members):
                clouds[block] = late
            if len(members):
                # clients train towards these cloud models in the next round, so its alpha counts
                made = Clouds(members, self.attention(rows[:, : form.num_trainable], fed.round + 1) @ rows)
                clouds[block] = made.union(clouds[block]) if block in clouds else made
        loss = mean_loss(trained, fed)
        pull = sum(terms.values()) / len(terms) / loss if terms and loss > 0 else None
        return FedAmpState(state.params, clouds, sorted(asked), loss, pull)

    @override
    def observe(self, state: FedAmpState) -> dict[str, float]:
        return {} if state.pull is None else {"pull": state.pull}

    @override
    def concerns(self, logged: Sequence[Mapping[str, float]]) -> list[str]:
        seen = [row["pull"] for row in logged if "pull" in row]
        if self.start == "cloud" or not self.lam or not seen or max(seen) >= PULLED:
            return []
        return [
            f"the proximal term towards the cloud models was at most {max(seen):.1e} of the training loss in "
            f"{len(logged)} rounds, so fedamp trains nearly like local: lower alpha and sigma, as in alpha = 10 and "
            "sigma = 100, or set start = 'cloud'"
        ]

    def alpha_at(self, round: int) -> float:
        """Return alpha in a round, counted from 1."""
        return self.alpha * self.alpha_decay ** ((round - 1) // self.alpha_every)

    def attention(self, w_SP: Tensor, round: int) -> Tensor:
        """Return the weights (S, S) of the uploaded models. Row i is for the cloud model of client i and sums to 1.

        Args:
            w_SP: flattened parameters of a block, one row for each upload.
            round: the number of the round in which clients train towards the cloud models, from 1.
        """
        size, eye = len(w_SP), torch.eye(len(w_SP), dtype=torch.bool, device=w_SP.device)
        if size == 1:
            return torch.ones_like(w_SP[:, :1])
        if self.heuristic:
            unit = F.normalize(w_SP, dim=1)
            own = self.self_weight or 1.0 / size
            similarity = ((self.sigma or 25.0) * (unit @ unit.T)).masked_fill(eye, -torch.inf)
            return (1 - own) * similarity.softmax(1) + own * eye
        sigma = self.sigma or 1e6
        squares = torch.cdist(w_SP, w_SP, compute_mode="donot_use_mm_for_euclid_dist").square()
        others = (self.alpha_at(round) / sigma * torch.exp(-squares / sigma)).masked_fill(eye, 0.0)
        total = others.sum(1, keepdim=True)
        others = others / total.clamp(min=1.0)  # keeps a client's own weight at zero or above
        return others + eye * (1 - others.sum(1, keepdim=True)).clamp(min=0.0)

    @override
    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        return own_model(local)

    @override
    def simulated_seconds(self, state: FedAmpState, times: Timetable) -> float:
        return times.chains(state.waited_for)

    @task()
    def install(self, context: ClientContext, data: ClientData, local: Tree, got: Blocks) -> tuple[Installed, Tree]:
        """Store new cloud blocks."""
        return Installed(), {**local, **nested(CLOUD, got.params)}

    @task()
    def train_own(self, context: ClientContext, data: ClientData, local: Tree, got: Start) -> tuple[Done, Tree]:
        """Train the client's own model with a proximal term towards its cloud model."""
        cloud = under(CLOUD, local)
        weight = self.lam / (2 * self.alpha_at(data.round))

        def loss(w: Tree, batch: Batch) -> Tensor:
            distance = squared_distance(context.model.trainable(w), cloud)
            return context.loss(w, batch) + weight * distance

        fit = data.minimise(loss, cloud if self.start == "cloud" else own_model(local), train=self.train)
        return Done(fit.loss, data.num_rows), {**local, **fit.params}

    @task()
    def upload(self, context: ClientContext, data: ClientData, local: Tree, got: Wanted) -> tuple[Blocks, Tree]:
        """Send the blocks that the server asked for."""
        return exchange.pick(own_model(local), got), local

    def _downloads(self, state: FedAmpState, fed: Federation) -> dict[int, Blocks]:
        trees: dict[int, Tree] = {}
        for block, form in layouts(fed, state.params).items():
            if block in state.clouds:
                clouds = state.clouds[block]
                for client, row in zip(clouds.members.tolist(), clouds.rows, strict=True):
                    trees.setdefault(client, {}).update(form.tree(row))
        return {client: Blocks(tree) for client, tree in trees.items()}


def own_model(local: Tree) -> Tree:
    """The client's own model in its local state."""
    return {name: value for name, value in local.items() if block_of(name) != CLOUD}
