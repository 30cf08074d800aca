"""CreamFL: clients exchange representations of a public paired set instead of weights.

Yu, Liu, Wang, Xu, Liu, "Multimodal Federated Learning via Contrastive Representation Ensemble", ICLR 2023; what is
reusable of it, as in algorithms.md 5.17. The server holds public pairs and a model of all modalities. A client trains
its own model on its rows and is kept near the global representations of the public set by two contrasts; it uploads its
representations of that set; the server weighs them sample by sample and distils the result into its model.

Ours: the public set is the pooled validation split, which the server holds anyway, with its labels ([clients]
validation = 0.05); every step of a client takes a batch of its rows and as many public rows, drawn at random; with more
than two modalities "the other" one is the mean of all others; representations have length 1 when they are compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.algorithms.averaging import State, mean_loss
from polyfed.algorithms.base import Algorithm, Broadcast
from polyfed.algorithms.moon import contrast
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE, POSITIVE
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.federation.client_registry import VALIDATION
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.privacy.policy import Policy
from polyfed.selection import Selector, Uniform, must_be_uniform
from polyfed.training import ClientData, TrainingResult
from polyfed.training.losses import contrastive, cross_entropy
from polyfed.training.optimisers import Moments

WEIGHT, PUBLIC, PREVIOUS, SEEN = "weight.", "public.", "previous.", "seen"
"""Prefixes among a client's local state: its model, the public samples, its last representations of them."""


@message
class Call(Message):
    """Nothing: the server's own rows are wanted."""


@message
class Public(Message):
    """The public set: samples (P, ...) by modality and labels (P,)."""

    samples: Tree = carries("raw", rows="num_rows", shape=("sample",))
    labels: Tensor = carries("labels", rows="num_rows", shape=())
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@message
class Invitation(Message):
    """The public samples, once, to every client."""

    samples: Tree = carries("raw", rows="num_public", shape=("sample",))
    num_public: Tensor = carries("statistic")


@message
class Enrolled(Message):
    """The client has them."""

    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@message
class Guide(Message):
    """Global representations (P, E) of the client's modalities, and under each of them that of the others."""

    own: Tree = carries("embeddings", rows="num_public")
    other: Tree = carries("embeddings", rows="num_public")
    num_public: Tensor = carries("statistic")


@message
class Represented(Message):
    """The client's representations (P, E) of the public set."""

    representations: Tree = carries("embeddings", rows="num_public", shape=("features",))
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)
    num_public: Tensor = carries("statistic")


@dataclass(frozen=True)
class CreamState(State):
    """`params` is the server's model; its optimiser after `steps` steps; the public set."""

    optimiser: Moments = field(default_factory=dict)
    steps: int = 0
    samples: Tree = field(default_factory=dict)
    labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True, kw_only=True)
class CreamFL(Algorithm):
    """See the module. Default weights are those of the paper's code (algorithms.md 5.17).

    Attributes:
        inter: weight of the contrast with the other modality's global representations.
        intra: weight of the contrast with the client's previous representations.
        temperature: of both.
        distil: weight of the server's mean squared distance to the aggregated representations.
        server_epochs: passes of the server over the public set in a round.
        selector: which clients take part, the [selection] section.
    """

    inter: Annotated[float, NOT_NEGATIVE] = 0.5
    intra: Annotated[float, NOT_NEGATIVE] = 0.5
    temperature: Annotated[float, POSITIVE] = 0.5
    distil: Annotated[float, NOT_NEGATIVE] = 0.3
    server_epochs: Annotated[int, NOT_NEGATIVE] = 1
    selector: Selector = Uniform()

    handles_missing_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse selectors that need a global model."""
        super().__post_init__()
        must_be_uniform(self.selector, "creamfl")

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Only the server's own rows are asked to `publish`."""
        return task != "publish"

    # the clients' half

    @task()
    def publish(self, context: ClientContext, data: ClientData, local: Tree, got: Call) -> tuple[Public, Tree]:
        """The server's own rows, which cross no border."""
        rows = data.collect(lambda batch: dict(batch.x) | {"labels": batch.y})
        labels = rows.pop("labels")
        return Public(rows, labels, data.num_rows), local

    @task()
    def enrol(self, context: ClientContext, data: ClientData, local: Tree, got: Invitation) -> tuple[Enrolled, Tree]:
        """Keep the public samples and start from the common model."""
        size = next(iter(got.samples.values())).shape[0]
        kept = {WEIGHT + n: v for n, v in context.initial.items()}
        kept |= {PUBLIC + m: v for m, v in got.samples.items()}
        device = data.num_rows.device
        kept |= {PREVIOUS + m: torch.zeros(size, context.model.feature_size(m), device=device) for m in got.samples}
        return Enrolled(data.num_rows), kept | {SEEN: torch.zeros((), device=device)}

    @task()
    def represent(self, context: ClientContext, data: ClientData, local: Tree, got: Guide) -> tuple[Represented, Tree]:
        """Train on own rows and public pairs, then represent the public set."""
        public, last = under(PUBLIC, local), under(PREVIOUS, local)

        def loss(w: Tree, batch: Batch) -> Tensor:
            value = cross_entropy(context.model.logits(w, batch), batch)
            shared = drawn(public, batch)
            rows, terms = shared.rows, []
            for m, z in context.model.vectors(w, shared).items():
                inter = contrastive(z, got.other[m][rows], shared.ok, temperature=self.temperature, negatives="inter")
                intra = shared.mean(contrast(z, got.own[m][rows], last[m][rows], self.temperature))
                terms.append(self.inter * inter + self.intra * local[SEEN] * intra)
            return value + torch.stack(terms).mean()

        fit = data.minimise(loss, under(WEIGHT, local), train=self.train)
        z = context.model.vectors(fit.params, whole(public))
        kept = {WEIGHT + n: v for n, v in fit.params.items()} | {PUBLIC + m: v for m, v in public.items()}
        kept |= {PREVIOUS + m: v for m, v in z.items()} | {SEEN: torch.ones_like(local[SEEN])}
        return Represented(z, fit.loss, data.num_rows, got.num_public), kept

    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        """A client is judged with its own model."""
        return under(WEIGHT, local)

    # the server's half

    def init(self, fed: Federation, params: Tree) -> CreamState:
        """Take the public set from the server's own rows and hand it to everybody.

        Raises:
            RecipeError: there are no such rows, or the model has one modality only.
        """
        if VALIDATION not in fed.evaluation_clients or len(fed.context.model.modalities) < 2:
            raise RecipeError(
                "creamfl needs public pairs of at least two modalities at the server: set [clients] validation = 0.05"
            )
        public: Public = fed.ask(self.publish, [VALIDATION], Call())[VALIDATION]
        fed.ask(self.enrol, list(fed.clients.eligible), Invitation(public.samples, public.num_rows))
        start = self.selector.start(params)
        return CreamState(params, memory=start, samples=public.samples, labels=public.labels)

    def round(self, state: CreamState, fed: Federation) -> CreamState:
        """Guide the cohort, weigh its representations, distil them."""
        cohort, memory = self.selector.choose(state.memory, state.params, fed)
        state = state.with_(memory=memory)
        with torch.no_grad():
            own = fed.context.model.vectors(state.params, whole(state.samples))
        other = {m: torch.stack([z for n, z in own.items() if n != m]).mean(0) for m in own}
        guide = Guide(own, other, torch.tensor(len(state.labels)))

        def flaw(client: int, reply: Represented) -> str:
            told = {len(z) for z in reply.representations.values()}
            return "" if told == {len(state.labels)} else f"told of {told} public rows, there are {len(state.labels)}"

        replies = fed.ask(self.represent, cohort, guide, accept=flaw)
        if not replies:
            return state
        sent = {m: [replies[k].representations for k in replies] for m in own}
        targets = {
            m: ensemble([z[m] for z in sent[m] if m in z], other[m]) for m in own if any(m in z for z in sent[m])
        }
        return self.distilled(state, targets, fed).with_(train_loss=mean_loss(replies, fed))

    def distilled(self, state: CreamState, targets: Tree, fed: Federation) -> CreamState:
        """Train the server's model on the public set, labels and aggregated representations."""
        model = fed.context.model

        def loss(w: Tree, batch: Batch) -> Tensor:
            z = model.features(w, batch)
            value = cross_entropy(model.fuse(w, z, batch), batch)
            terms = [(model.vector(z[m]) - target[batch.rows]).square().mean() for m, target in targets.items()]
            return value + self.distil * torch.stack(terms).mean()

        after = None
        if state.steps:
            after = TrainingResult({}, torch.zeros(()), torch.tensor(state.steps), moments=state.optimiser)
        train = replace(self.train, epochs=self.server_epochs, steps=None)
        fit = fed.server_data(state.samples, state.labels).minimise(loss, state.params, train=train, after=after)
        return state.with_(params=fit.params, optimiser=fit.moments, steps=int(fit.num_steps))

    def global_params(self, state: CreamState) -> Tree:
        """The server's model."""
        return state.params


def ensemble(sent: list[Tensor], other_PE: Tensor) -> Tensor:
    """Per sample a weighted sum (P, E) of clients' representations: the weights are a softmax over clients of how well
    each tells the sample's counterpart in the other modality from those of the rest.
    """
    return torch.einsum("kp,kpe->pe", weights(sent, other_PE), torch.stack(sent))


def weights(sent: list[Tensor], other_PE: Tensor) -> Tensor:
    """(K, P): softmax over clients of log softmax_j(z_i . g_j) at j = i."""
    z, g = F.normalize(torch.stack(sent), dim=-1), F.normalize(other_PE, dim=-1)
    score = torch.log_softmax(z @ g.T, -1).diagonal(dim1=1, dim2=2)
    return torch.softmax(score, 0)


def under(prefix: str, local: Mapping[str, Tensor]) -> Tree:
    """The part of a local state with this prefix, without it."""
    return {n.removeprefix(prefix): v for n, v in local.items() if n.startswith(prefix)}


def whole(samples: Tree) -> Batch:
    """All public rows, to be looked at."""
    first = next(iter(samples.values()))
    rows = torch.arange(first.shape[0], device=first.device)
    return Batch(x=samples, y=torch.zeros_like(rows), rows=rows)


def drawn(samples: Tree, batch: Batch) -> Batch:
    """As many public rows as the batch has, drawn with replacement from the batch's own stream."""
    assert batch.key is not None
    size = next(iter(samples.values())).shape[0]
    share = keys.uniform(keys.fold_in(batch.key, keys.key("public rows")), batch.y.shape[0], batch.y.device)
    rows = (share * size).to(torch.int64).clamp(max=size - 1)
    return Batch(
        x={m: x[rows] for m, x in samples.items()}, y=torch.zeros_like(rows), rows=rows, ok=batch.ok, key=batch.key
    )
