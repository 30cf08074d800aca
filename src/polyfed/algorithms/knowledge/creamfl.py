"""CreamFL: clients exchange representations of a public set of paired samples instead of weights.

Yu, Liu, Wang, Xu, Liu, "Multimodal Federated Learning via Contrastive Representation Ensemble", ICLR 2023. The server
holds a public set of paired samples and a model of all modalities. A client trains its own model on its rows. Two
contrastive terms keep its representations of the public set close to the global ones. The client uploads these
representations. For each public sample, the server computes a weighted mean of the clients' representations. It then
trains its own model towards these means by distillation.

polyfed's choices: the public set is the pooled validation split with its labels ([clients] validation = 0.05). In every
step, a client takes a batch of its rows and the same number of public rows, drawn at random. With more than two
modalities, "the other modality" is the mean of all others. Representations are normalised to length 1 before they are
compared.

Every client receives the public samples once. In every round, the server sends global representations, and the clients
send local representations. Page: docs/algorithms/creamfl.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import State, mean_loss
from polyfed.algorithms.averaging.moon import contrast
from polyfed.algorithms.base import Algorithm, Broadcast
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import AT_LEAST_ONE, COST, NOT_NEGATIVE, POSITIVE, SearchRange
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, nested, under
from polyfed.federation.client_registry import VALIDATION
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.privacy.egress.policy import Policy
from polyfed.selection import Selector, Uniform
from polyfed.training import ClientData
from polyfed.training.client_data import TRAINING_PASSES, Passes
from polyfed.training.kept_training import earlier_steps
from polyfed.training.losses import contrastive
from polyfed.training.optimisers import Moments

WEIGHT, PUBLIC, PREVIOUS, SEEN = "weight", "public", "previous", "seen"
"""Names in a client's local state. The first three are prefixes: of its model, of the public samples and of its
previous representations of these samples. The last is a flag that is 1 after the client has taken part once."""


@message
class PublicSetWanted(Message):
    """Asks for the server's own validation rows, which become the public set. Has no fields.

    Only the evaluation client `VALIDATION` receives this message. It is part of the server and holds these rows.
    """


@message
class PublicSet(Message):
    """The public set: samples (P, ...) by modality and labels (P,)."""

    samples: Tree = carries("raw", rows="num_rows", shape=("sample",))
    labels: Tensor = carries("labels", rows="num_rows", shape=())
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class PublicSamples(Message):
    """The public samples (P, ...) by modality, which every client receives once."""

    samples: Tree = carries("raw", rows="num_public", shape=("sample",))
    num_public: Tensor = carries("statistic", dtype="int64", within=AT_LEAST_ONE)


@message
class Stored(Message):
    """Confirms that the client has stored the public samples."""

    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class GlobalRepresentations(Message):
    """Global representations of the public set, (P, E) by modality.

    For each modality m of the client, `own` holds the global representations of m under the name m. `other` holds, also
    under the name m, the mean of the global representations of all modalities except m.
    """

    own: Tree = carries("embeddings", rows="num_public", shape=("features",))
    other: Tree = carries("embeddings", rows="num_public", shape=("features",))
    num_public: Tensor = carries("statistic", dtype="int64", within=AT_LEAST_ONE)


@message
class LocalRepresentations(Message):
    """The client's representations of the public set, (P, E) by modality."""

    representations: Tree = carries("embeddings", rows="num_public", shape=("features",))
    loss: Tensor = carries("statistic", dtype="float32")
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)
    num_public: Tensor = carries("statistic", dtype="int64", within=AT_LEAST_ONE)


@dataclass(frozen=True)
class CreamState(State):
    """Server state; `params` is the server's model.

    Attributes:
        optimiser: moments of the server model's optimiser.
        steps: training steps of the server's model so far.
        samples: the public samples (P, ...) by modality.
        labels: the public labels (P,).
    """

    optimiser: Moments = field(default_factory=dict)
    steps: int = 0
    samples: Tree = field(default_factory=dict)
    labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True, kw_only=True)
class CreamFL(Algorithm[CreamState]):
    """Contrastive representation ensemble. The default weights of the loss terms come from the authors' code.

    Attributes:
        inter: weight of the inter-modal contrast, which uses the other modality's global representations.
        intra: weight of the intra-modal contrast, which uses the client's previous representations.
        temperature: temperature of both contrastive terms.
        distil: weight of the distillation term in the server's loss, the mean squared distance between its
            representations and the aggregated ones.
        server_epochs: epochs of the server over the public set in a round.
        selector: the rule from the [selection] section that chooses which clients take part in a round. Only `uniform`
            is allowed.
    """

    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {"clients": {"validation": 0.1}}
    mixing: ClassVar[str] = "creamfl contrasts the embeddings of each modality with all others"
    objectives_because: ClassVar[str] = "the server trains on the class numbers of its public set"

    inter: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.1, 0.5, 1.0)] = 0.5
    intra: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.1, 0.5, 1.0)] = 0.5
    temperature: Annotated[float, POSITIVE, SearchRange(0.1, 0.5, 1.0)] = 0.5
    distil: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.1, 0.3, 1.0)] = 0.3
    server_epochs: Annotated[int, NOT_NEGATIVE, COST] = 1
    selector: Selector = Uniform()

    needs_embeddings: ClassVar[bool] = True
    handles_missing_rows: ClassVar[bool] = False
    trains_one_model: ClassVar[bool] = False

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        return task != "publish"

    # the clients' half

    @task()
    def publish(
        self, context: ClientContext, data: ClientData, local: Tree, got: PublicSetWanted
    ) -> tuple[PublicSet, Tree]:
        """Read the server's own rows. They do not leave the server."""
        rows = data.collect(lambda batch: dict(batch.x) | {"labels": batch.y})
        labels = rows.pop("labels")
        return PublicSet(rows, labels, data.num_rows), local

    @task()
    def store(self, context: ClientContext, data: ClientData, local: Tree, got: PublicSamples) -> tuple[Stored, Tree]:
        """Store the public samples, and start the client's own model from the common initial model."""
        size = next(iter(got.samples.values())).shape[0]
        kept = nested(WEIGHT, context.initial)
        kept |= nested(PUBLIC, got.samples)
        device = data.num_rows.device
        zeros = {m: torch.zeros(size, context.model.feature_size(m), device=device) for m in got.samples}
        kept |= nested(PREVIOUS, zeros)
        return Stored(data.num_rows), kept | {SEEN: torch.zeros((), device=device)}

    @task()
    def represent(
        self, context: ClientContext, data: ClientData, local: Tree, got: GlobalRepresentations
    ) -> tuple[LocalRepresentations, Tree]:
        """Train on the client's rows and on public rows, then compute representations of the public set."""
        public, last = under(PUBLIC, local), under(PREVIOUS, local)

        def loss(w: Tree, batch: Batch) -> Tensor:
            value = context.loss(w, batch)
            shared = draw_public(public, batch)
            rows, terms = shared.rows, []
            for m, z in context.model.vectors(w, shared).items():
                inter = contrastive(z, got.other[m][rows], shared.ok, temperature=self.temperature, negatives="inter")
                intra = shared.mean(contrast(z, got.own[m][rows], last[m][rows], self.temperature))
                terms.append(self.inter * inter + self.intra * local[SEEN] * intra)
            return value + torch.stack(terms).mean()

        passes = Passes(encoders=TRAINING_PASSES)  # as many public rows as own ones
        fit = data.minimise(loss, under(WEIGHT, local), train=self.train, passes=passes)
        z = context.model.vectors(fit.params, public_batch(public))
        kept = nested(WEIGHT, fit.params) | nested(PUBLIC, public)
        kept |= nested(PREVIOUS, z) | {SEEN: torch.ones_like(local[SEEN])}
        return LocalRepresentations(z, fit.loss, data.num_rows, got.num_public), kept

    @override
    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        return under(WEIGHT, local)

    # the server's half

    @override
    def init(self, fed: Federation, params: Tree) -> CreamState:
        """Take the server's validation rows as the public set and send its samples to every client.

        Raises:
            RecipeError: the server has no validation rows, or the model has one modality only.
        """
        if VALIDATION not in fed.evaluation_clients or len(fed.context.model.modalities) < 2:
            raise RecipeError(
                "creamfl needs validation rows at the server as its public set, and a model of at least two "
                "modalities: set [clients] validation = 0.05, and use data with several modalities",
                ("clients", "validation"),
            )
        public: PublicSet = fed.ask(self.publish, [VALIDATION], PublicSetWanted())[VALIDATION]
        fed.ask(self.store, list(fed.clients.eligible), PublicSamples(public.samples, public.num_rows))
        start = self.selector.start(params)
        return CreamState(params, memory=start, samples=public.samples, labels=public.labels)

    @override
    def round(self, state: CreamState, fed: Federation) -> CreamState:
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        state = state.with_(memory=memory)
        with torch.no_grad():
            own = fed.context.model.vectors(state.params, public_batch(state.samples))
        other = {m: torch.stack([z for n, z in own.items() if n != m]).mean(0) for m in own}
        send = GlobalRepresentations(own, other, torch.tensor(len(state.labels)))

        def flaw(client: int, reply: LocalRepresentations) -> str:
            rows = {len(z) for z in reply.representations.values()}
            return "" if rows == {len(state.labels)} else f"has {rows} public rows instead of {len(state.labels)}"

        replies = fed.ask(self.represent, cohort, send, accept=flaw)
        if not replies:
            return state
        sent = {m: [replies[k].representations for k in replies] for m in own}
        targets = {
            m: ensemble([z[m] for z in sent[m] if m in z], other[m]) for m in own if any(m in z for z in sent[m])
        }
        return self.distilled(state, targets, fed).with_(train_loss=mean_loss(replies, fed))

    def distilled(self, state: CreamState, targets: Tree, fed: Federation) -> CreamState:
        """Train the server's model on the public labels and the aggregated representations."""
        model = fed.context.model

        def loss(w: Tree, batch: Batch) -> Tensor:
            z = model.features(w, batch)
            value = fed.context.loss(w, batch, z)
            terms = [(model.vector(z[m]) - target[batch.rows]).square().mean() for m, target in targets.items()]
            return value + self.distil * torch.stack(terms).mean()

        after = None
        if state.steps:
            after = earlier_steps(state.optimiser, state.steps)
        train = replace(self.train, epochs=self.server_epochs, steps=None)
        fit = fed.server_data(state.samples, state.labels).minimise(loss, state.params, train=train, after=after)
        return state.with_(params=fit.params, optimiser=fit.moments, steps=int(fit.num_steps))

    @override
    def global_params(self, state: CreamState) -> Tree:
        return state.params


def ensemble(sent: list[Tensor], other_PE: Tensor) -> Tensor:
    """Aggregate the clients' representations into one, (P, E): a weighted sum for each sample, see `weights`.

    Args:
        sent: representations (P, E) of each client.
        other_PE: global representations of the other modality.
    """
    return torch.einsum("kp,kpe->pe", weights(sent, other_PE), torch.stack(sent))


def weights(sent: list[Tensor], other_PE: Tensor) -> Tensor:
    """Return the weights (K, P) of the clients for each public sample.

    Each client has a contrastive score for the sample. The softmax of these scores over the clients gives the weights.
    The score of a client's representation z_i of sample i is log softmax_j(z_i . g_j) at j = i, where g_j is the global
    representation of sample j in the other modality. The score is high if z_i identifies its counterpart.
    """
    z, g = F.normalize(torch.stack(sent), dim=-1), F.normalize(other_PE, dim=-1)
    score = torch.log_softmax(z @ g.T, -1).diagonal(dim1=1, dim2=2)
    return torch.softmax(score, 0)


def public_batch(samples: Tree) -> Batch:
    """All public rows as one batch, without labels."""
    first = next(iter(samples.values()))
    rows = torch.arange(first.shape[0], device=first.device)
    return Batch(x=samples, y=torch.zeros_like(rows), rows=rows)


def draw_public(samples: Tree, batch: Batch) -> Batch:
    """Draw as many random public rows as the batch has rows, without replacement, with the batch's own key.

    The contrastive losses compare each drawn row with all other drawn rows, which are its negatives. No row may
    therefore be drawn twice. If the batch has more rows than the public set, the surplus rows are marked as padding.
    """
    assert batch.key is not None
    size, wanted = next(iter(samples.values())).shape[0], batch.y.shape[0]
    place = torch.arange(wanted, device=batch.y.device)
    drawn = keys.uniform(keys.fold_in(batch.key, keys.key("public rows")), size, batch.y.device).argsort()
    rows, ok = drawn[place % size], batch.ok
    if wanted > size:
        ok = place < size if ok is None else ok & (place < size)
    return Batch(x={m: x[rows] for m, x in samples.items()}, y=torch.zeros_like(rows), rows=rows, ok=ok, key=batch.key)
