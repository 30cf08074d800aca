"""Training inside silos: devices that hold different modalities of the same samples, and an edge between them.

The template of HFM (`algorithms/hfm.py`) and its control VFL (`algorithms/vfl.py`), algorithms.md 3.2: the edge draws
a mini-batch of its silo's rows, devices send the embeddings of those rows, the edge passes all of them on with its
head, and every device trains its encoder and a copy of the head for Q local rounds, the others' embeddings held
constant. After that the edge takes the mean of the copies. Letters as there: M silos, K devices in a silo, N_m rows of
silo m, B_m its mini-batch, Q local rounds between two exchanges, R exchanges in a round.

The edges are run by the server half of this file. What only they may see is asked with `scope="silo"`, and what an
edge passes on to the server leaves through its silo's first device, so that a policy rules over it and the ledger
has it. All devices of one modality, across silos, are one group of the vectorised engine.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from polyfed.algorithms.averaging import State
from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.hfm.alignment import check_aligned, devices_of_silos
from polyfed.algorithms.hfm.exchange import (
    Copy,
    Embedded,
    Exchange,
    Forward,
    Ids,
    Question,
    Sample,
    Sent,
    Upload,
    bytes_down,
    bytes_up,
    mean_tree,
    stale_embeddings,
)
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.request import Accept, names_as_sent
from polyfed.core.schema import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, squared_distance
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model.fusion import masked
from polyfed.privacy.policy import Policy
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import FOLD_BATCH
from polyfed.training.losses import cross_entropy
from polyfed.training.optimisers import Train


@dataclass(frozen=True)
class SiloState(State):
    """Averaging's state, and the edges'.

    Attributes:
        heads: the head of each silo's edge.
        sent: last embeddings of each device, kept where they can be of use again (`resample = false`).
        drift: mean relative drift of the embeddings within Q local rounds, in the last round.
        exchanges: number of exchanges so far.
        silo_bytes: what crossed between devices and their edges in the last round, both ways.
        server_bytes: what crossed between devices and the server in the last round, both ways.
    """

    heads: dict[int, Tree] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    drift: float = 0.0
    exchanges: int = 0
    silo_bytes: int = 0
    server_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Vertical(Algorithm):
    """See the module; the switches are those of algorithms.md 3.3.

    Attributes:
        q: local rounds between two exchanges (5 in the report).
        r: exchanges in a round (2 in the report).
        local_unit: `epoch`: a local round is a pass over B_m in mini-batches of `inner_batch`; `step`: one gradient
            step on the whole of B_m, Eq. 1 to the letter.
        head_update: `device_average`: devices train copies, the edge takes their mean; `server` (C-VFL): devices keep
            it frozen while it is trained for Q local rounds on the stale embeddings. As an edge has no labels, its
            first device does that for it.
        batch_fraction: |B_m| = max(1, round(batch_fraction * N_m)); a tenth in the report.
        resample: draw a new B_m at every exchange; otherwise one for the whole run.
        eval_embeddings: embeddings that are exchanged are computed in evaluation mode (BatchNorm, dropout).
        inner_batch: rows of a step with `local_unit = "epoch"`; takes the place of [train] batch_size.
        mu: strength of the proximal term (Eq. 4) over what was received from above; 0 leaves it out.
    """

    q: Annotated[int, AT_LEAST_ONE] = 5
    r: Annotated[int, AT_LEAST_ONE] = 2
    local_unit: Literal["epoch", "step"] = "epoch"
    head_update: Literal["device_average", "server"] = "device_average"
    batch_fraction: Annotated[float, FRACTION] = 0.1
    resample: bool = True
    eval_embeddings: bool = True
    inner_batch: Annotated[int, AT_LEAST_ONE] = 64
    mu: Annotated[float, NOT_NEGATIVE] = 0.0

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        super().__post_init__()
        if self.train.epochs != 1 or self.train.steps is not None:
            raise RecipeError("[train] epochs and steps have no effect here: [algorithm] q counts the local rounds")

    @abstractmethod
    def anchors(self, local: Tree, got: Exchange) -> Tree:
        """What the proximal term pulls towards, by name."""

    def local(self, context: ClientContext, key: int) -> Tree:
        """The device's encoders, from the common start."""
        head = set(context.model.head())
        return {name: value for name, value in context.initial.items() if name not in head}

    def init(self, fed: Federation, params: Tree) -> SiloState:
        """Common initial head; the devices' sample ids are compared.

        Raises:
            RecipeError: the clients form no silos, or a modality of a silo is at two devices.
            DataError: devices of a silo that do not hold the same samples in the same order.
        """
        silos = devices_of_silos(fed.clients)
        devices = [client for members in silos.values() for client in members]
        ids = {client: reply.ids for client, reply in fed.ask(self.identify, devices, Question()).items()}
        for silo, members in silos.items():
            check_aligned(silo, {client: ids[client] for client in members if client in ids})
        return SiloState(params, heads={silo: self._head(fed, members, params) for silo, members in silos.items()})

    def vertical(self, state: SiloState, fed: Federation, silos: Mapping[int, list[int]]) -> SiloState:
        """R exchanges, each followed by Q local rounds, in these silos at once, with these devices of theirs.

        `train_loss` is the mean over devices.
        """
        drifts: list[float] = []
        losses: list[float] = []
        for number in range(self.r):
            state, copies = self._exchange(state, fed, silos, number)
            losses += copies.numbers("loss").values()
            drifts += copies.numbers("drift").values()
        mean = {"train_loss": losses, "drift": drifts}
        return state.with_(**{name: sum(values) / len(values) for name, values in mean.items() if values})

    def upload_of(self, state: SiloState, fed: Federation, silos: Mapping[int, list[int]]) -> tuple[Replies, int]:
        """Encoders of these devices, and through each silo's first its head; bytes of the edges' handing over."""
        heads = {members[0]: state.heads[silo] for silo, members in silos.items()}
        send = {client: Forward(heads.get(client, {})) for members in silos.values() for client in members}
        return fed.ask(self.upload, sorted(send), send), bytes_down(fed, send)

    def observe(self, state: SiloState) -> dict[str, float]:
        """Exchanges and local rounds so far, staleness, and what crossed where."""
        return {
            "exchanges": state.exchanges,
            "local_rounds": state.exchanges * self.q,
            "staleness": state.drift,
            "silo_bytes": state.silo_bytes,
            "server_bytes": state.server_bytes,
        }

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Only with `head_update = "server"` a device trains the head for its edge."""
        return task != "fit_head" or self.head_update == "server"

    # the edge

    def _exchange(
        self, state: SiloState, fed: Federation, silos: Mapping[int, list[int]], number: int
    ) -> tuple[SiloState, Replies]:
        samples = {silo: Sample(self._rows(fed, silo, members, number)) for silo, members in silos.items()}
        request = {client: samples[silo] for silo, members in silos.items() for client in members}
        answers = fed.ask(self.embed, sorted(request), request, turn=number, accept=_of_these_rows(request))
        fresh = {client: Sent(request[client].rows, reply.embeddings) for client, reply in answers.items()}
        known = state.sent | fresh
        phi: dict[int, Exchange] = {}
        for silo, members in silos.items():
            embeddings = stale_embeddings(samples[silo].rows, [known[c] for c in members if c in known])
            exchange = Exchange(state.heads[silo], embeddings, samples[silo].rows)
            phi |= {client: exchange for client in members if client in answers}
        accept = None if self.head_update == "server" else names_as_sent("head", phi)
        copies = fed.ask(self.practise, sorted(phi), phi, turn=number, accept=accept)
        heads_from, moved = (
            copies,
            bytes_down(fed, request) + bytes_up(answers) + bytes_down(fed, phi) + bytes_up(copies),
        )
        if self.head_update == "server":
            hosts = {
                there[0]: phi[there[0]] for members in silos.values() if (there := [c for c in members if c in phi])
            }
            heads_from = fed.ask(
                self.fit_head, sorted(hosts), hosts, quorum=False, turn=number, accept=names_as_sent("head", hosts)
            )
            moved += bytes_down(fed, hosts) + bytes_up(heads_from)
        heads = {
            silo: mean_tree([heads_from[client].head for client in members if client in heads_from])
            or state.heads[silo]
            for silo, members in silos.items()
        }
        after = state.with_(
            heads=state.heads | heads,
            sent={} if self.resample else known,
            exchanges=state.exchanges + 1,
            silo_bytes=state.silo_bytes + moved,
        )
        return after, copies

    def _rows(self, fed: Federation, silo: int, members: Sequence[int], number: int) -> Tensor:
        """B_m, in random order, from the stream (seed, "silo batch", silo, round, exchange)."""
        total = int(fed.clients.num_rows[members[0]])
        when = (fed.round, number) if self.resample else ()
        order = keys.permutation(keys.key(fed.seed, "silo batch", silo, *when), total)
        return order[: max(1, round(self.batch_fraction * total))]

    def _head(self, fed: Federation, members: Sequence[int], params: Tree) -> Tree:
        """The head with the parts of a silo's modalities: others would have no input there."""
        held = {modality for client in members for modality in fed.clients.owned(client)}
        return {name: params[name] for name in fed.context.model.head(held)}

    # devices

    @task(scope="silo")
    def identify(self, context: ClientContext, data: ClientData, local: Tree, got: Question) -> tuple[Ids, Tree]:
        """Tell the edge which samples the device holds."""
        return Ids(data.ids, data.num_rows), local

    @task(scope="silo")
    def embed(self, context: ClientContext, data: ClientData, local: Tree, got: Sample) -> tuple[Embedded, Tree]:
        """Embeddings of B_m, for the edge."""
        return Embedded(self._embeddings(context, data, local, got.rows)), local

    @task(scope="silo")
    def practise(self, context: ClientContext, data: ClientData, local: Tree, got: Exchange) -> tuple[Copy, Tree]:
        """Q local rounds on B_m (Eq. 1, 2): the encoders, and a copy of the head unless it is kept frozen."""
        encoders = self._encoders(context, local)
        trained = {*encoders, *self._reached(context, got)}
        if self.head_update == "server":
            trained = set(encoders)
        fit = self._fit(context, data, encoders | got.head, trained, local, got)
        after = local | {name: fit.params[name] for name in encoders}
        moved = self._embeddings(context, data, after, got.rows)
        before = {modality: got.embeddings[modality] for modality in moved}
        zero = {modality: torch.zeros_like(value) for modality, value in before.items()}
        drift = squared_distance(moved, before) / squared_distance(before, zero).clamp(min=1e-12)
        copy = {name: fit.params[name] for name in got.head if self.head_update == "device_average"}
        return Copy(copy, fit.loss, drift.sqrt()), after

    @task(scope="silo")
    def fit_head(self, context: ClientContext, data: ClientData, local: Tree, got: Exchange) -> tuple[Copy, Tree]:
        """Q local rounds of the head alone on the stale embeddings of all, for the edge."""
        fit = self._fit(context, data, got.head, self._reached(context, got), local, got, fresh=False)
        return Copy(fit.params, fit.loss, torch.zeros_like(fit.loss)), local

    @task()
    def upload(self, context: ClientContext, data: ClientData, local: Tree, got: Forward) -> tuple[Upload, Tree]:
        """Encoders, and what the edge forwards, to the server."""
        return Upload(self._encoders(context, local) | got.head), local

    def _fit(
        self,
        context: ClientContext,
        data: ClientData,
        params: Tree,
        trained: set[str],
        local: Tree,
        got: Exchange,
        *,
        fresh: bool = True,
    ) -> TrainingResult:
        # parameters alone: a pull on statistics of batches would only add to the loss that is told
        pulled = context.model.trainable(self.anchors(local, got))
        anchors = {name: value for name, value in pulled.items() if name in trained}

        def loss(w: Tree, batch: Batch) -> Tensor:
            own = context.model.features(w, batch) if fresh else {}
            peers = {m: h[batch.rows] for m, h in got.embeddings.items() if m not in own}
            value = cross_entropy(context.model.fuse(w, peers | own, batch), batch)
            return value + self.mu / 2 * squared_distance(anchors, w) if self.mu and anchors else value

        train: Train = replace(self.train, steps=self.q, batch_size=0)
        if self.local_unit == "epoch":
            train = replace(self.train, epochs=self.q, batch_size=self.inner_batch)
        return data.at(got.rows).minimise(loss, params, train=train, only=trained)

    def _embeddings(self, context: ClientContext, data: ClientData, local: Tree, rows: Tensor) -> Tree:
        """Embeddings (B_m, E) of the device's own modalities, zero in rows that lack one."""
        encoders = self._encoders(context, local)
        view = data.at(rows)

        def step(parts: list[dict[str, Tensor]], batch: Batch) -> list[dict[str, Tensor]]:
            if not self.eval_embeddings:
                batch = replace(batch, key=data.draw("embeddings"))
            w = {name: value.clone() for name, value in encoders.items()}  # batch statistics would move the original
            return [*parts, masked(context.model.features(w, batch), batch.present)]

        # with batch statistics all of B_m must be one batch, as it is in a step
        parts = view.fold(step, [], batch_size=FOLD_BATCH if self.eval_embeddings else len(rows))
        return {modality: torch.cat([part[modality] for part in parts]) for modality in context.modalities}

    def _encoders(self, context: ClientContext, local: Tree) -> Tree:
        return {name: local[name] for name in context.initial if name in local}

    def _reached(self, context: ClientContext, got: Exchange) -> set[str]:
        """Names of the head that the loss reaches: not the parts of a device that sent nothing."""
        return set(context.model.head(got.embeddings)) & got.head.keys()


def _of_these_rows(asked: Mapping[int, Sample]) -> Accept:
    def flaw(client: int, reply: Embedded) -> str:
        sent, wanted = {m: len(h) for m, h in reply.embeddings.items()}, len(asked[client].rows)
        return "" if all(n == wanted for n in sent.values()) else f"sent embeddings of {sent} rows, not of {wanted}"

    return flaw
