"""Training inside silos: devices that hold different modalities of the same samples, and an edge between them.

This is the template of HFM (`hfm.py`) and its control VFL (`vfl.py`). In an exchange, the edge draws a mini-batch of
its silo's samples, and the devices send the embeddings of these samples. The edge sends all embeddings and its head to
every device with labels. Every device trains its encoder for Q local rounds, with the other devices' embeddings held
constant. Devices with labels also train a copy of the head. Then the edge computes the mean of the copies.

Letters: M silos, K devices in a silo, N_m samples of silo m, B_m its mini-batch, Q local rounds between two exchanges
(`local_rounds`), R exchanges in a round (`exchanges`). See docs/algorithms/hfm.md.

What happens in a silo is a part (`federation/silos/parts.py`), which the edge of the silo runs. Requests whose replies
only an edge may see have `scope="silo"`. A message from an edge to the server goes through the devices of its silo.
Their policies therefore apply, and their ledgers count the message. The vectorised engine trains all devices of one
modality in one stack, even if these devices belong to different silos.

On the devices, one with labels trains its encoder and a copy of the head on the exchanged embeddings (`practise`). If
`labels_at` is set, a device without labels trains its encoder on the gradients of its embeddings (`guide`, `follow`).

A silo's score comes about as its training does: the devices send embeddings of their test rows, and the first device
that has labels and a usable sample computes the score from all of them. It covers the test samples that this device
holds.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.hfm.alignment import Overlap, devices_of_silos, members_of
from polyfed.algorithms.hfm.messages import (
    Copy,
    Embedded,
    Evaluated,
    Exchange,
    Followed,
    Guidance,
    Ids,
    OwnTest,
    Question,
    Sample,
    Sent,
    Slopes,
    ToEdge,
    bytes_down,
    bytes_up,
    mean_tree,
    shuffled_peers,
    some_rows,
    whole_batch,
)
from polyfed.algorithms.hfm.samples import SiloSamples, no_usable_sample
from polyfed.algorithms.hfm.state import Edge, SiloState, Turn
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError, TooFewReplies
from polyfed.core.messages import Message
from polyfed.core.option_checks import (
    AT_LEAST_ONE,
    COST,
    FRACTION,
    IN_RECIPE,
    NOT_NEGATIVE,
    PLACEBO,
    READING,
    NotSearched,
    SearchRange,
)
from polyfed.core.problems import Conflict
from polyfed.core.request import Accept, HeldOut, Task, names_as_sent
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree, squared_distance
from polyfed.evaluation.conformal import (
    Conformal,
    ScoreCounts,
    counts_shape,
    own_counts,
    own_size_counts,
    possible_counts,
    sizes_shape,
)
from polyfed.evaluation.scores import Measured, OwnScore, Predictor, joined, own_score, possible
from polyfed.evaluation.shrinkage import SizeCounts
from polyfed.evaluation.subsets import metrics_over_clients, subsets_of
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.federation.silos.parts import Ask, Part
from polyfed.model import Model
from polyfed.model.fusion import masked
from polyfed.objective import SUPERVISED, Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import FOLD_BATCH
from polyfed.training.kept_training import KeptTraining
from polyfed.training.optimisers import Train


@dataclass(frozen=True, kw_only=True)
class Vertical(Algorithm[SiloState]):
    """The base class of the methods that train inside silos.

    Attributes:
        local_rounds: Q, local rounds between two exchanges, as in the report.
        exchanges: R, exchanges in a round, as in the report.
        local_unit: a local round is an `epoch`, one pass over B_m in mini-batches of `inner_batch`, or a `step`, one
            gradient step on the whole of B_m, which is Eq. 1 to the letter.
        head_update: how the head is trained. `device_average`: devices train copies, of which the edge computes the
            mean. `server` (C-VFL): it is frozen while devices train their encoders, then the silo's first device with
            labels trains it for Q local rounds on the stale embeddings.
        batch_fraction: |B_m| = max(1, round(batch_fraction * N_m)), as in the report.
        resample: whether every exchange draws a new B_m; otherwise one serves the whole run.
        eval_embeddings: whether the exchanged embeddings are computed in evaluation mode.
        inner_batch: rows of a step if `local_unit` is `epoch`; replaces [train] batch_size.
        mu: strength of the proximal term (Eq. 4) towards the received blocks.
        keep_optimiser: whether a device keeps its optimiser's moments between exchanges. It needs `head_update =
            "device_average"`.
        overlap: which samples of a silo take part: `exact` refuses devices whose samples or their order differ,
            `common` takes those that every modality has, `all` every sample, with zeros for a missing embedding. Under
            the last two, several devices may hold one modality, and the edge takes the mean of their embeddings.
        labels_at: the modality whose devices hold the labels; empty if all do. In each exchange they compute the
            gradients of the loss with respect to the others' embeddings, which the others use in place of labels until
            the next (FedBCD, Liu et al., IEEE TSP 70, 2022).
        placebo: `shuffled` is a control of the same cost: the embeddings from other devices come from other rows of the
            mini-batch. `none` is the method.
    """

    local_rounds: Annotated[int, AT_LEAST_ONE, COST] = 5
    exchanges: Annotated[int, AT_LEAST_ONE, COST] = 2
    local_unit: Annotated[Literal["epoch", "step"], READING] = "epoch"
    head_update: Annotated[Literal["device_average", "server"], READING] = "device_average"
    batch_fraction: Annotated[float, FRACTION, SearchRange(0.05, 0.1, 0.2, 0.5)] = 0.1
    resample: Annotated[bool, READING] = True
    eval_embeddings: Annotated[bool, READING] = True
    inner_batch: Annotated[int, AT_LEAST_ONE, IN_RECIPE] = 64
    mu: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.001, 0.01, 0.1)] = 0.0
    keep_optimiser: Annotated[bool, READING] = False
    overlap: Annotated[Overlap, NotSearched("depends on the data")] = "exact"
    labels_at: str = ""
    placebo: Annotated[Literal["none", "shuffled"], PLACEBO] = "none"

    captions: ClassVar[Mapping[str, str]] = {
        "exchanges": "Exchanges of embeddings so far, in each silo.",
        "local_rounds": "Local rounds so far: exchanges times [algorithm] local_rounds.",
        "staleness": "How far embeddings moved since they were sent, relative to their norm; mean over devices.",
        "silo_bytes": "Bytes that devices and their edge have exchanged inside the silos so far.",
        "server_bytes": "Bytes between the silos and the server so far.",
    }
    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {"clients": {"partition": "silos", "silos": 2}}
    needs_embeddings: ClassVar[bool] = True
    aligns_rows: ClassVar[bool] = True
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("evaluate", "clients"),
            when=lambda recipe: recipe.algorithm.evaluation.clients is not None,
            because="it evaluates whole silos",
            instead="Remove clients",
        ),
        Conflict(
            key=("train", "epochs"),
            when=lambda recipe: recipe.algorithm.train.epochs != 1,
            because="its devices train in local rounds, so epochs have no effect",
            instead="Set [algorithm] local_rounds instead",
        ),
        Conflict(
            key=("train", "steps"),
            when=lambda recipe: recipe.algorithm.train.steps is not None,
            because="its devices train in local rounds, so steps have no effect",
            instead="Set [algorithm] local_rounds instead",
        ),
    )
    objectives: ClassVar[tuple[type[Objective], ...]] = SUPERVISED
    uncompressed: ClassVar[str] = (
        "it counts the bytes of each exchange in a silo itself, and as if none were compressed"
    )
    objectives_because: ClassVar[str] = "devices of a silo exchange embeddings to compute one common output"

    def __post_init__(self) -> None:
        """Refuse options that are out of range, and options that contradict each other.

        Raises:
            RecipeError: an option is out of range, or two options contradict each other. The message says what to set.
        """
        super().__post_init__()
        if self.keep_optimiser and self.head_update == "server":
            raise RecipeError(
                "keep_optimiser needs devices that train the head as well: set [algorithm] head_update = "
                "'device_average', or keep_optimiser = false",
                ("algorithm", "keep_optimiser"),
            )
        if self.keep_optimiser and self.labels_at:
            raise RecipeError(
                "keep_optimiser needs devices that train the head as well, and with labels_at only the devices with "
                "labels do: remove one of the two options",
                ("algorithm", "keep_optimiser"),
            )

    def holds_labels(self, modalities: Sequence[str]) -> bool:
        """Return whether a device with these modalities holds labels."""
        return not self.labels_at or self.labels_at in modalities

    def devices(self, fed: Federation) -> dict[int, list[int]]:
        """Return, for each silo, the devices that have rows; see `devices_of_silos`."""
        return devices_of_silos(fed.clients, self.overlap)

    @abstractmethod
    def anchors(self, local: Tree, head: Tree) -> Tree:
        """Return the values towards which the proximal term pulls, by name.

        Args:
            local: the device's local state.
            head: the head that the device received; empty for a device without labels.
        """

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        head = set(context.model.head())
        encoders = {name: value for name, value in context.initial.items() if name not in head}
        if not self.keep_optimiser:
            return encoders
        shapes = {name: value for name, value in context.model.template.items() if name in head}
        zeros = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in shapes.items()}
        return encoders | KeptTraining.fresh(context.model, encoders | zeros, self.train).state()

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = {"train.batch_size": "batch_fraction and inner_batch, which make the batches"}
        if self.local_unit == "step":
            result["inner_batch"] = "local_unit = 'step'"
        if self.overlap != "all" and round(self.batch_fraction * int(fed.clients.num_rows.max())) <= self.inner_batch:
            result["inner_batch"] = f"batches of at most {self.inner_batch} rows"
        if not fed.context.model.has_modes:
            result["eval_embeddings"] = "a model without dropout and BatchNorm"
        return result

    @override
    def init(self, fed: Federation, params: Tree) -> SiloState:
        """Give every edge the initial head, and compare the sample ids of the devices of each silo.

        Raises:
            RecipeError: the clients form no silos, two devices of a silo hold the same modality under `overlap =
                "exact"`, or no device of a silo holds the labels.
            DataError: the devices of a silo do not hold the same samples.
            TooFewReplies: no device sent its ids.
        """
        silos = self.devices(fed)
        self._check_labels(fed, silos)
        result = fed.in_silos(self.begin, silos, {}, ToEdge(params))
        if len(result.missing) == len(silos):
            raise TooFewReplies("no device of any silo sent its sample ids; see the events for the reasons")
        if result.missing:
            names = ", ".join(map(str, result.missing))
            fed.emit(
                "note", text=f"silo {names}: no device sent its ids yet, so the silo takes part when one has sent them"
            )
        heads = {silo: Edge(self._head(fed, silos[silo], params)) for silo in result.missing}
        return SiloState(params, edges=dict(sorted((heads | result.kept).items())))

    # the parts of a silo, which its edge runs

    def begin(self, silo: int, members: Sequence[int], kept: None, got: ToEdge, fed: Federation) -> Part[Edge]:
        """Ask the devices for their sample ids, and match their rows.

        Raises:
            DataError: the rows cannot be matched.
            TooFewReplies: no device sent its ids.
        """
        own = yield from self.identified(members, Edge(self._head(fed, members, got.params)), fed)
        if not own.ids:
            raise TooFewReplies("none of its devices sent its sample ids")
        self.samples(silo, members, own, fed)
        return own

    def identified(self, members: Sequence[int], own: Edge, fed: Federation) -> Part[Edge]:
        """Ask the devices whose sample ids are not known yet for their ids."""
        unknown = [client for client in members if client not in own.ids]
        ask = dict.fromkeys(unknown, Question())
        result = yield Ask(self.identify, ask, quorum=fed.round == 0, accept=some_rows, if_any=True)
        return replace(own, ids=own.ids | {client: reply.ids.clone() for client, reply in result.items()})

    def samples(self, silo: int, members: Sequence[int], own: Edge, fed: Federation) -> SiloSamples | None:
        """Match the rows of the devices of a silo. Return None if the silo cannot take part yet.

        Raises:
            DataError: the rows cannot be matched (`SiloSamples.of`), or the devices hold no sample that can be used.
        """
        ids = {client: own.ids[client] for client in members if client in own.ids}
        owned = {client: fed.clients.owned(client) for client in ids}
        labelled = [client for client in ids if self.holds_labels(owned[client])]
        if not labelled:
            return None
        result = SiloSamples.of(silo, ids, owned, self.overlap, labelled)
        if not result.count:
            raise no_usable_sample(silo, ids, self.overlap)
        return result

    def exchanged(
        self, silo: int, members: Sequence[int], own: Edge, samples: SiloSamples, fed: Federation
    ) -> Part[Edge]:
        """Do R exchanges, each followed by Q local rounds, in a silo.

        Args:
            silo: its number.
            members: those of its devices that take part.
            own: what its edge keeps.
            samples: its samples.
            fed: the facts about the devices.
        """
        own = replace(own, training=torch.zeros(5, dtype=torch.float64))
        for number in range(self.exchanges):
            turn = Turn(number, silo, members, samples, self._rows(fed, silo, samples.count, number))
            own = yield from self._exchange(own, fed, turn)
        return own

    @override
    def observe(self, state: SiloState) -> dict[str, float]:
        return {
            "exchanges": state.exchanges,
            "local_rounds": state.exchanges * self.local_rounds,
            "staleness": state.drift,
            "silo_bytes": state.silo_bytes,
            "server_bytes": state.server_bytes,
        }

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        if task in ("guide", "follow"):
            return bool(self.labels_at) and block != self.labels_at
        return task != "fit_head" or self.head_update == "server"

    # the edge

    def _exchange(self, own: Edge, fed: Federation, turn: Turn) -> Part[Edge]:
        request = turn.own_rows()
        answers = yield Ask(self.embed, request, turn=turn.number, accept=whole_batch(request))
        fresh = {client: Sent(request[client].rows, reply.embeddings) for client, reply in answers.items()}
        known = {
            c: sent
            for c, sent in (own.sent | fresh).items()
            if c in request and torch.equal(sent.rows, request[c].rows)
        }
        phi = self._phi(own, fed, turn, request, known, answers)
        moved = bytes_down(fed, request) + bytes_up(answers)
        followed: Mapping[int, Any] = {}
        if self.labels_at:
            followed, more = yield from self._guided(fed, turn, request, known, phi)
            moved += more
        copies, more = yield from self._asked(fed, self.practise, phi, turn, heads=self.head_update == "device_average")
        heads_from, moved = copies, moved + more
        if self.head_update == "server":
            hosts = [client for client in turn.members if client in phi][:1]
            host = {client: phi[client] for client in hosts}
            heads_from, more = yield from self._asked(fed, self.fit_head, host, turn, heads=True, quorum=False)
            moved += more
        head = mean_tree([heads_from[client].head for client in turn.members if client in heads_from]) or own.head
        losses = [float(copy.loss) for copy in copies.values()]
        drifts = [float(reply.drift) for reply in (*copies.values(), *followed.values())]
        result = torch.tensor([sum(losses), len(losses), sum(drifts), len(drifts), moved], dtype=torch.float64)
        sent = {} if self.resample else own.sent | fresh
        return replace(own, head=head, sent=sent, training=own.training + result)

    def _asked(
        self, fed: Federation, task: Task, send: Mapping[int, Message], turn: Turn, *, heads: bool, quorum: bool = True
    ) -> Part[tuple[Mapping[int, Any], int]]:
        """Ask devices to do one task of an exchange. Return their replies, and the bytes sent and received.

        If `heads` is set, every reply contains a head. A reply is dropped if the parameters of this head have other
        names than the parameters of the head that the device received.
        """
        accept = names_as_sent("head", send) if heads else None
        replies = yield Ask(task, send, quorum=quorum, turn=turn.number, accept=accept)
        return replies, bytes_down(fed, send) + bytes_up(replies)

    def _phi(
        self,
        own: Edge,
        fed: Federation,
        turn: Turn,
        request: Mapping[int, Sample],
        known: Mapping[int, Sent],
        answers: Collection[int],
    ) -> dict[int, Exchange]:
        """Return Phi for every device that holds labels and has answered.

        Phi consists of the head and the embeddings of the device's samples.
        """
        phi: dict[int, Exchange] = {}
        samples, batch = turn.samples, turn.batch
        pooled = samples.pooled(batch, {c: known[c].embeddings for c in turn.members if c in known})
        for c in turn.members:
            if c not in answers or not self.holds_labels(fed.clients.owned(c)):
                continue
            held = samples.held(batch, c)
            mine = pooled if bool(held.all()) else {m: h[held.to(h.device)] for m, h in pooled.items()}
            phi[c] = Exchange(own.head, mine, request[c].rows)
            if self.placebo == "shuffled":
                key = keys.key(fed.seed, "placebo", turn.silo, fed.round, turn.number)
                phi[c] = shuffled_peers(phi[c], fed.clients.owned(c), key)
        return phi

    def _guided(
        self,
        fed: Federation,
        turn: Turn,
        request: Mapping[int, Sample],
        known: Mapping[int, Sent],
        phi: Mapping[int, Exchange],
    ) -> Part[tuple[Mapping[int, Any], int]]:
        """Train devices without labels (option `labels_at`). Return their replies, and the bytes sent and received."""
        slopes, moved = yield from self._asked(fed, self.guide, phi, turn, heads=False)
        send: dict[int, Guidance] = {}
        samples, batch = turn.samples, turn.batch
        by_modality = samples.pooled(batch, {c: slopes[c].gradients for c in turn.members if c in slopes})
        sent = [c for c in turn.members if c in known]
        for c in sent:
            if self.holds_labels(owned := fed.clients.owned(c)):
                continue
            held = samples.held(batch, c)
            own = {}
            for m in owned:
                if m in by_modality:  # an embedding is a mean over devices, which divides the gradient of each
                    holders = [k for k in sent if m in fed.clients.owned(k)]
                    own[m] = samples.per_holder(by_modality[m], batch, holders)[held.to(by_modality[m].device)]
            if own:
                send[c] = Guidance(own, request[c].rows)
        followed, more = yield from self._asked(fed, self.follow, send, turn, heads=False, quorum=False)
        return followed, moved + more

    def _check_labels(self, fed: Federation, silos: Mapping[int, Sequence[int]]) -> None:
        """Refuse `labels_at` if a silo has no device with this modality."""
        if self.labels_at and self.labels_at not in fed.clients.modalities:
            known = ", ".join(fed.clients.modalities)
            raise RecipeError(
                f"[algorithm] labels_at = '{self.labels_at}' is no modality of the data; it has {known}",
                ("algorithm", "labels_at"),
            )
        for silo, members in silos.items():
            if not any(self.holds_labels(fed.clients.owned(client)) for client in members):
                raise RecipeError(
                    f"silo {silo}: no device holds '{self.labels_at}', so nobody has labels. Choose a modality for "
                    "[algorithm] labels_at that every silo has",
                    ("algorithm", "labels_at"),
                )

    def _rows(self, fed: Federation, silo: int, total: int, number: int) -> Tensor:
        """Return B_m, in random order, from the stream (seed, "silo batch", silo, round, exchange)."""
        when = (fed.round, number) if self.resample else ()
        order = keys.permutation(keys.key(fed.seed, "silo batch", silo, *when), total)
        return order[: max(1, round(self.batch_fraction * total))]

    def _head(self, fed: Federation, members: Sequence[int], params: Tree) -> Tree:
        """Return the head with only the columns of the silo's modalities; other columns would have no input."""
        held = {modality for client in members for modality in fed.clients.owned(client)}
        return {name: params[name] for name in fed.context.model.head(held)}

    # the devices

    @task(scope="silo")
    def identify(self, context: ClientContext, data: ClientData, local: Tree, got: Question) -> tuple[Ids, Tree]:
        """Send the edge the ids of the device's samples."""
        return Ids(data.ids, data.num_rows), local

    @task(scope="silo")
    def embed(self, context: ClientContext, data: ClientData, local: Tree, got: Sample) -> tuple[Embedded, Tree]:
        """Compute the embeddings of B_m for the edge."""
        return Embedded(self._embeddings(context, data, local, got.rows)), local

    @task(scope="silo")
    def practise(self, context: ClientContext, data: ClientData, local: Tree, got: Exchange) -> tuple[Copy, Tree]:
        """Run Q local rounds on B_m (Eq. 1, 2): train the encoders and a copy of the head (if not frozen)."""
        encoders = self._encoders(context, local)
        trained = {*encoders, *self._reached(context, got)}
        if self.head_update == "server":
            trained = set(encoders)
        kept = KeptTraining.of(local).only(trained) if self.keep_optimiser else None
        loss = self._loss(context, trained, local, got)
        fit = self._fit(data.at(got.rows), loss, encoders | got.head, trained, kept=kept)
        after = local | {name: fit.params[name] for name in encoders} | (kept.after(fit).state() if kept else {})
        before = {m: got.embeddings[m] for m in context.modalities}
        if self.overlap != "exact":  # the embeddings of a modality may be means over several devices
            before = self._embeddings(context, data, local, got.rows)
        copy = {name: fit.params[name] for name in got.head if self.head_update == "device_average"}
        drift = self._drift(context, data, before, after, got.rows)
        return Copy(copy, kept.loss(fit) if kept else fit.loss, drift), after

    @task(scope="silo")
    def fit_head(self, context: ClientContext, data: ClientData, local: Tree, got: Exchange) -> tuple[Copy, Tree]:
        """Train only the head for Q local rounds, on the stale embeddings of all devices.

        The device does this in place of the edge, because the edge has no labels.
        """
        trained = self._reached(context, got)
        loss = self._loss(context, trained, local, got, fresh=False)
        fit = self._fit(data.at(got.rows), loss, got.head, trained)
        return Copy(fit.params, fit.loss, torch.zeros_like(fit.loss)), local

    @task(scope="silo")
    def guide(self, context: ClientContext, data: ClientData, local: Tree, got: Exchange) -> tuple[Slopes, Tree]:
        """Under `labels_at`, compute the gradient of each row's loss with respect to the other devices' embeddings."""
        peers = {m: h for m, h in got.embeddings.items() if m != self.labels_at}

        def slopes(batch: Batch) -> Tree:
            own = {m: h[batch.rows] for m, h in got.embeddings.items()}

            def total(z: Tree) -> Tensor:
                return context.loss(got.head, batch, own | z) * batch.num_real  # the sum over rows, not their mean

            return dict(torch.func.grad(total)({m: own[m] for m in peers}))

        return Slopes(data.at(got.rows).collect(slopes) if peers else {}), local

    @task(scope="silo")
    def follow(self, context: ClientContext, data: ClientData, local: Tree, got: Guidance) -> tuple[Followed, Tree]:
        """Under `labels_at`, train the encoders for Q local rounds without labels (FedBCD).

        The loss of a row is the inner product of the row's embedding and a gradient that the device has received. A
        device with labels has computed this gradient of the task's loss with respect to the embedding.
        """
        encoders = self._encoders(context, local)
        anchors = context.model.trainable(self.anchors(local, {}))
        pulled = {name: value for name, value in anchors.items() if name in encoders}
        before = self._embeddings(context, data, local, got.rows)

        def loss(w: Tree, batch: Batch) -> Tensor:
            z = masked(context.model.features(w, batch), batch.present)
            terms = [(z[m] * slope[batch.rows]).flatten(1).sum(1) for m, slope in got.gradients.items()]
            value = batch.mean(torch.stack(terms).sum(0))
            return self._pulled(value, pulled, w)

        fit = self._fit(data.at(got.rows), loss, encoders, set(encoders))
        after = local | {name: fit.params[name] for name in encoders}
        return Followed(self._drift(context, data, before, after, got.rows)), after

    def _loss(
        self, context: ClientContext, trained: set[str], local: Tree, got: Exchange, *, fresh: bool = True
    ) -> Callable[[Tree, Batch], Tensor]:
        """Return the loss of a local round.

        If `fresh`, the device computes its own embeddings in every step. Otherwise, it reads all embeddings, including
        its own, from the exchange `got`.
        """
        # trainable parameters only: the term for BatchNorm statistics would only add a constant to the reported loss
        pulled = context.model.trainable(self.anchors(local, got.head))
        anchors = {name: value for name, value in pulled.items() if name in trained}

        def loss(w: Tree, batch: Batch) -> Tensor:
            own = context.model.features(w, batch) if fresh else {}
            peers = {m: h[batch.rows] for m, h in got.embeddings.items() if m not in own}
            value = context.loss(w, batch, peers | own)
            return self._pulled(value, anchors, w)

        return loss

    def _pulled(self, value: Tensor, anchors: Tree, w: Tree) -> Tensor:
        """Add the proximal term mu/2 ||w - anchors||^2 to a loss, unless mu is 0 or there are no anchors."""
        return value + self.mu / 2 * squared_distance(anchors, w) if self.mu and anchors else value

    def _fit(
        self,
        data: ClientData,
        loss: Callable[[Tree, Batch], Tensor],
        params: Tree,
        trained: set[str],
        *,
        kept: KeptTraining | None = None,
    ) -> TrainingResult:
        """Run Q local rounds on the rows of a mini-batch (Eq. 1)."""
        train: Train = replace(self.train, steps=self.local_rounds, batch_size=0)
        if self.local_unit == "epoch":
            train = replace(self.train, epochs=self.local_rounds, batch_size=self.inner_batch)
        elif kept:  # an epoch of one batch is a step; `after` continues epochs only
            train = replace(self.train, epochs=self.local_rounds, batch_size=0)
        after = kept.earlier() if kept else None
        return data.minimise(loss, params, train=train, only=trained, after=after)

    def _drift(self, context: ClientContext, data: ClientData, before: Tree, after: Tree, rows: Tensor) -> Tensor:
        """Return how far the device's embeddings moved from `before`, relative to the norm of `before`, 0-dim."""
        moved = self._embeddings(context, data, after, rows)
        zero = {modality: torch.zeros_like(value) for modality, value in before.items()}
        drift = squared_distance(moved, before) / squared_distance(before, zero).clamp(min=1e-12)
        return drift.sqrt()

    def _embeddings(self, context: ClientContext, data: ClientData, local: Tree, rows: Tensor) -> Tree:
        """Compute embeddings (B_m, E) of the device's own modalities, with zeros for rows that lack one."""
        encoders = self._encoders(context, local)
        view = data.at(rows)

        def step(parts: list[dict[str, Tensor]], batch: Batch) -> list[dict[str, Tensor]]:
            if not self.eval_embeddings:
                batch = replace(batch, key=data.draw("embeddings"))
            w = {name: value.clone() for name, value in encoders.items()}  # BatchNorm would change the originals
            return [*parts, masked(context.model.features(w, batch), batch.present)]

        # with batch statistics, B_m must be one batch, as it is in a training step
        parts = view.fold(step, [], batch_size=FOLD_BATCH if self.eval_embeddings else len(rows))
        return {modality: torch.cat([part[modality] for part in parts]) for modality in context.modalities}

    def _encoders(self, context: ClientContext, local: Tree) -> Tree:
        return {name: local[name] for name in context.initial if name in local}

    def _reached(self, context: ClientContext, got: Exchange) -> set[str]:
        """Return the names of the head's parameters that the loss depends on.

        Columns of the head for devices without embeddings are left out.
        """
        return set(context.model.head(got.embeddings)) & got.head.keys()

    # the score of a silo on its own test rows

    @override
    def client_modalities(self, client: int, fed: Federation) -> tuple[str, ...]:
        held = fed.clients.holds[members_of(fed.clients, client)].any(0).tolist()
        return tuple(m for m, has in zip(fed.clients.modalities, held, strict=True) if has)

    def scoring(self, policy: Policy) -> dict[str, bool]:
        """Return, for each task in which a silo scores its model, whether the server will ask for it."""
        told = self.evaluation
        scores = (told.personal or told.own_validation) and may_report(policy)
        counts = told.conformal != "none"  # asked for by name, so a policy that forbids it is told before the run
        sizes = counts and told.shrinkage
        return {"embed_own": scores or counts, "score_silo": scores, "count_silo": counts, "size_silo": sizes}

    def with_own_rows(self, found: Measured, fed: Federation, edges: Mapping[int, Edge], params: Tree) -> Measured:
        """Add what the silos' models reach on the silos' own test and validation rows; see `evaluated_in_silos`."""
        if not may_report(fed.context.policy):
            return found
        if self.evaluation.personal and fed.clients.tested:
            found = joined(found, self.evaluated_in_silos(fed, edges, params))
        if self.evaluation.own_validation and fed.clients.validated:
            own = self.evaluated_in_silos(fed, edges, params, "validation").metrics
            renamed = {"personal_validation": own["personal"]} if own else {}
            found = replace(found, metrics=found.metrics | renamed)
        return found

    def evaluated_in_silos(
        self, fed: Federation, edges: Mapping[int, Edge], params: Tree, held_out: HeldOut = "test"
    ) -> Measured:
        """Score every silo on its own test or validation rows, for the group `personal`.

        The score is listed under the number of the silo's first device.

        A silo is left out if one of its devices does not answer or has no such rows, or if no sample can be used.

        Args:
            fed: the federation.
            edges: what the edges keep.
            params: the model; if empty, each device uses its own encoders, and each edge its own head.
            held_out: which rows.
        """
        part = self.silo_scored if held_out == "test" else self.silo_validated
        found = fed.in_silos(part, self.devices(fed), edges, ToEdge(params), accept=possible(fed))
        told, *of_subsets = found.all_of(self.score_silo) or [Replies([])]
        group, scores, of_clients = self.over_clients(told, fed)
        if not group:
            return Measured({})
        measured: dict[tuple[str, ...], list[tuple[float | None, float]]] = {}
        subsets = subsets_of(self.evaluation.subsets, fed.context.model.modalities)
        for subset, replies in zip(subsets, of_subsets, strict=False):  # a false edge may answer fewer requests
            rows = {client: float(reply.num_rows) for client, reply in replies.items()}
            own_score = fed.context.objective.own_score
            measured[subset] = [(own_score(reply.sums, rows[c]), rows[c]) for c, reply in replies.items()]
        of_each, intervals = metrics_over_clients(self.evaluation.subsets, measured, fed)
        each = {members_of(fed.clients, client)[0]: score for client, score in scores.items()}
        return Measured({"personal": group | of_each}, each, intervals={"personal": of_clients | intervals})

    def silo_scored(
        self, silo: int, members: Sequence[int], kept: Edge | None, got: ToEdge, fed: Federation
    ) -> Part[Edge | None]:
        """Score a silo: with all of its modalities, and then with each subset that `[evaluate] subsets` names.

        A silo sees a row that lacks a modality as a zero embedding, and such rows do not count.
        """
        send = yield from self._embedded(silo, members, kept, got, fed, "test")
        yield Ask(self.score_silo, send, quorum=False, accept=possible(fed))
        for subset in subsets_of(self.evaluation.subsets, fed.context.model.modalities):
            parts = {}
            for client, whole in send.items():
                some = {m: h for m, h in whole.embeddings.items() if m in subset}
                if len(some) == len(subset):
                    there = torch.stack([(h != 0).flatten(1).any(1).cpu() for h in some.values()]).all(0)
                    some = {m: h[there.to(h.device)] for m, h in some.items()}
                    if bool(there.any()):
                        parts[client] = replace(whole, embeddings=some, rows=whole.rows[there.to(whole.rows.device)])
            yield Ask(self.score_silo, parts, quorum=False, accept=possible(fed))
        return kept

    def silo_validated(
        self, silo: int, members: Sequence[int], kept: Edge | None, got: ToEdge, fed: Federation
    ) -> Part[Edge | None]:
        """Score a silo on its own validation rows."""
        send = yield from self._embedded(silo, members, kept, got, fed, "validation")
        yield Ask(self.score_silo, send, quorum=False, accept=possible(fed), held_out="validation")
        return kept

    @override
    def calibrate(self, state: SiloState, fed: Federation) -> Conformal | None:
        kind = self.evaluation.conformal
        if kind == "none" or not fed.clients.validated:
            return None
        got = ToEdge({} if self.own_models == "clients" else state.params)
        accept = self._possible_counts(fed)
        result = fed.in_silos(self.silo_counted, self.devices(fed), state.edges, got, accept=accept)
        sizes = result.of(self.size_silo) if self.evaluation.shrinkage else None
        reads, shares = partial(self.client_modalities, fed=fed), partial(members_of, fed.clients)
        by, names = self.evaluation.conformal_groups, fed.context.model.modalities
        return Conformal.of(kind, by, result.of(self.count_silo), names, reads, sizes, shares)

    def silo_counted(
        self, silo: int, members: Sequence[int], kept: Edge | None, got: ToEdge, fed: Federation
    ) -> Part[Edge | None]:
        """Count the scores of a silo's own validation rows, for conformal prediction."""
        send = yield from self._embedded(silo, members, kept, got, fed, "validation")
        accept = self._possible_counts(fed)
        yield Ask(self.count_silo, send, quorum=False, accept=accept, held_out="validation")
        if self.evaluation.shrinkage:
            yield Ask(self.size_silo, send, quorum=False, accept=accept, held_out="validation")
        return kept

    def _possible_counts(self, fed: Federation) -> Accept:
        model = fed.context.model
        counts = possible_counts(counts_shape(self.evaluation.conformal, model, fed.context.objective))
        sizes = possible_counts(sizes_shape(model))
        return lambda client, reply: (sizes if isinstance(reply, SizeCounts) else counts)(client, reply)

    def _embedded(
        self,
        silo: int,
        members: Sequence[int],
        kept: Edge | None,
        got: ToEdge,
        fed: Federation,
        held_out: HeldOut,
    ) -> Part[dict[int, Exchange]]:
        """Let the devices embed their own rows. Return the message to the device that scores the silo, if any."""
        having = set(fed.clients.tested if held_out == "test" else fed.clients.validated)
        head = set(fed.context.model.head())
        encoders = {name: value for name, value in got.params.items() if name not in head}
        asked = dict.fromkeys([client for client in members if client in having], Evaluated(encoders))
        own = yield Ask(self.embed_own, asked, quorum=False, accept=some_rows, held_out=held_out)
        if not all(client in own for client in members):
            return {}
        params = self._head(fed, members, got.params) if got.params else kept.head if kept is not None else {}
        return self._scoring(silo, own, params, fed)

    def _scoring(self, silo: int, own: Mapping[int, Any], head: Tree, fed: Federation) -> dict[int, Exchange]:
        """Return the message to the device that computes a silo's score, or nothing if no sample can be used."""
        owned = {client: fed.clients.owned(client) for client in own}
        labelled = [client for client in own if self.holds_labels(owned[client])]
        ids = {client: one.ids for client, one in own.items()}
        samples = SiloSamples.of(silo, ids, owned, self.overlap, labelled)
        if not samples.count:
            return {}
        batch = torch.arange(samples.count)
        sent = {
            c: {m: h[samples.own_rows(batch, c).to(h.device)] for m, h in one.embeddings.items()}
            for c, one in own.items()
        }
        scorer = next(client for client in labelled if samples.rows(client))
        held = samples.held(batch, scorer)
        known = {m: h[held.to(h.device)] for m, h in samples.pooled(batch, sent).items()}
        return {scorer: Exchange(head, known, samples.own_rows(batch, scorer))}

    @task(scope="silo")
    def embed_own(self, context: ClientContext, data: ClientData, local: Tree, got: Evaluated) -> tuple[OwnTest, Tree]:
        """Compute embeddings of the device's own test or validation rows, for the edge."""
        test, encoders = data.test, got.params or self._encoders(context, local)
        result = test.collect(lambda batch: masked(context.model.features(encoders, batch), batch.present))
        return OwnTest(result, test.ids, test.num_rows), local

    @task()
    def score_silo(self, context: ClientContext, data: ClientData, local: Tree, got: Exchange) -> tuple[OwnScore, Tree]:
        """Score the silo's model on its own rows, from the embeddings of all devices."""
        predictor = FromEmbeddings(got.embeddings)
        return own_score(context, got.head, data.test.at(got.rows), predictor), local

    @task()
    def count_silo(
        self, context: ClientContext, data: ClientData, local: Tree, got: Exchange
    ) -> tuple[ScoreCounts, Tree]:
        """Count how well the silo's model predicts its validation rows, from the embeddings of all devices."""
        whole, rows = replace(context, modalities=tuple(got.embeddings)), data.test.at(got.rows)
        seen = FromEmbeddings(got.embeddings).seen
        return own_counts(whole, got.head, rows, _fused, self.evaluation.conformal, seen), local

    @task()
    def size_silo(
        self, context: ClientContext, data: ClientData, local: Tree, got: Exchange
    ) -> tuple[SizeCounts, Tree]:
        """Count how the sets of the silo's validation rows shrink with a further modality."""
        whole, rows = replace(context, modalities=tuple(got.embeddings)), data.test.at(got.rows)
        return own_size_counts(whole, got.head, rows, _fused, FromEmbeddings(got.embeddings).seen), local


@dataclass(frozen=True)
class FromEmbeddings(Predictor):
    """Predicts from stored embeddings (n, E) of all rows, by modality, and does not compute new ones."""

    embeddings: Tree

    @override
    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """Logits (B, C) of the head with parameters `w`."""
        return model.fuse(w, {m: h[batch.rows] for m, h in self.embeddings.items()}, batch)

    def seen(self, batch: Batch) -> Batch:
        """Return the batch with the embeddings as samples. A row whose embedding is zero lacks the modality."""
        x = {m: h[batch.rows] for m, h in self.embeddings.items()}
        return replace(batch, x=x, present={m: (h != 0).flatten(1).any(1) for m, h in x.items()})


def _fused(model: Model, w: Tree, batch: Batch) -> Tensor:
    """Return the logits (B, C) of a batch of embeddings."""
    return model.fuse(w, batch.x, batch)


def may_report(policy: Policy) -> bool:
    """Whether a silo may send the server its number of correct test rows."""
    return policy.allows("statistic", SHARED, "server")
