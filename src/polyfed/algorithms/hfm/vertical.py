"""Training inside silos: devices that hold different modalities of the same samples, and an edge between them.

This is the template of HFM (`hfm.py`) and its control VFL (`vfl.py`). In an exchange, the edge draws a mini-batch of
its silo's samples, and the devices send the embeddings of these samples. The edge sends all embeddings and its head to
every device with labels. Every device trains its encoder for Q local rounds, with the other devices' embeddings held
constant. Devices with labels also train a copy of the head. Then the edge computes the mean of the copies.

Letters: M silos, K devices in a silo, N_m samples of silo m, B_m its mini-batch, Q local rounds between two exchanges
(`local_rounds`), R exchanges in a round (`exchanges`). See docs/algorithms/hfm.md.

This file is the server half: it runs the edges. The tasks of the devices are in `devices.py`. Requests whose replies
only an edge may see have `scope="silo"`. A message from an edge to the server goes through the first device of its
silo. That device's policy therefore applies, and its ledger counts the message. The vectorised engine trains all
devices of one modality in one stack, even if these devices belong to different silos.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.algorithms.hfm.exchange import (
    Exchange,
    Forward,
    Guidance,
    Question,
    Sample,
    Sent,
    bytes_down,
    bytes_up,
    mean_tree,
    shuffled_peers,
    some_rows,
    whole_batch,
)
from polyfed.algorithms.hfm.samples import SiloSamples, no_usable_sample
from polyfed.algorithms.hfm.silo_scores import SiloScores
from polyfed.algorithms.hfm.state import SiloState, Turn
from polyfed.core import keys
from polyfed.core.errors import RecipeError, TooFewReplies
from polyfed.core.messages import Message
from polyfed.core.request import Task, names_as_sent
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.objective import SUPERVISED, Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.training.kept_training import KeptTraining


@dataclass(frozen=True, kw_only=True)
class Vertical(SiloScores):
    """The base class of the methods that train inside silos. `VerticalOptions` lists the options."""

    needs_embeddings: ClassVar[bool] = True

    aligns_rows: ClassVar[bool] = True
    objectives: ClassVar[tuple[type[Objective], ...]] = SUPERVISED
    objectives_because: ClassVar[str] = "devices of a silo exchange embeddings to compute one common output"

    def local(self, context: ClientContext, key: int) -> Tree:
        """Return the encoders with their common initial values and, if `keep_optimiser` is set, the moments."""
        head = set(context.model.head())
        encoders = {name: value for name, value in context.initial.items() if name not in head}
        if not self.keep_optimiser:
            return encoders
        shapes = {name: value for name, value in context.model.template.items() if name in head}
        zeros = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in shapes.items()}
        return encoders | KeptTraining.fresh(context.model, encoders | zeros, self.train).state()

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
        heads = {silo: self._head(fed, members, params) for silo, members in silos.items()}
        state = self.identified(SiloState(params, heads=heads), fed)
        if not state.ids:
            raise TooFewReplies("no device of any silo sent its sample ids; see the events for the reasons")
        self.samples(state, fed)
        if late := [silo for silo, members in silos.items() if not any(client in state.ids for client in members)]:
            names = ", ".join(map(str, late))
            fed.emit(
                "note", text=f"silo {names}: no device sent its ids yet, so the silo takes part when one has sent them"
            )
        return state

    def identified(self, state: SiloState, fed: Federation) -> SiloState:
        """Ask the devices whose sample ids are not known yet for their ids."""
        unknown = [c for members in self.devices(fed).values() for c in members if c not in state.ids]
        if not unknown:
            return state
        told = fed.ask(self.identify, unknown, Question(), quorum=fed.round == 0, accept=some_rows)
        return state.with_(ids=state.ids | {client: reply.ids.clone() for client, reply in told.items()})

    def samples(self, state: SiloState, fed: Federation) -> dict[int, SiloSamples]:
        """Match the rows of the devices of each silo, and leave out silos that cannot take part yet.

        Raises:
            DataError: the rows of a silo's devices cannot be matched (`SiloSamples.of`), or the devices of a silo hold
                no sample that can be used.
        """
        found = {}
        for silo, members in self.devices(fed).items():
            ids = {client: state.ids[client] for client in members if client in state.ids}
            owned = {client: fed.clients.owned(client) for client in ids}
            labelled = [client for client in ids if self.holds_labels(owned[client])]
            if labelled:
                found[silo] = SiloSamples.of(silo, ids, owned, self.overlap, labelled)
                if not found[silo].count:
                    raise no_usable_sample(silo, ids, self.overlap)
        return found

    def vertical(
        self, state: SiloState, fed: Federation, silos: Mapping[int, list[int]], samples: Mapping[int, SiloSamples]
    ) -> SiloState:
        """Do R exchanges, each followed by Q local rounds, in several silos at once.

        Args:
            state: the state. In the returned state, `train_loss` and `drift` are means over devices.
            fed: the federation.
            silos: the silos that take part, each with those of its devices that take part.
            samples: the samples of these silos.
        """
        drifts: list[float] = []
        losses: list[float] = []
        for number in range(self.exchanges):
            batches = {silo: self._rows(fed, silo, samples[silo].count, number) for silo in silos}
            state, copies, followed = self._exchange(state, fed, Turn(number, silos, samples, batches))
            losses += copies.numbers("loss").values()
            drifts += [*copies.numbers("drift").values(), *followed.numbers("drift").values()]
        mean = {"train_loss": losses, "drift": drifts}
        return state.with_(**{name: sum(values) / len(values) for name, values in mean.items() if values})

    def sent_models(self, state: SiloState, fed: Federation, silos: Mapping[int, list[int]]) -> tuple[Replies, int]:
        """Return the devices' encoders, each silo's head from its first device, and the bytes sent to the devices."""
        heads = {members[0]: state.heads[silo] for silo, members in silos.items()}
        send = {client: Forward(heads.get(client, {})) for members in silos.values() for client in members}
        return fed.ask(self.upload, sorted(send), send), bytes_down(fed, send)

    def observe(self, state: SiloState) -> dict[str, float]:
        """Return the exchanges and local rounds so far, the staleness, and the bytes inside and outside of silos."""
        return {
            "exchanges": state.exchanges,
            "local_rounds": state.exchanges * self.local_rounds,
            "staleness": state.drift,
            "silo_bytes": state.silo_bytes,
            "server_bytes": state.server_bytes,
        }

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Return whether the recipe sets the option that the task needs, such as `labels_at` for the task `guide`."""
        if task in ("guide", "follow"):
            return bool(self.labels_at) and block != self.labels_at
        return task != "fit_head" or self.head_update == "server"

    # the edge

    def _exchange(self, state: SiloState, fed: Federation, turn: Turn) -> tuple[SiloState, Replies, Replies]:
        request = turn.own_rows()
        answers = fed.ask(self.embed, sorted(request), request, turn=turn.number, accept=whole_batch(request))
        fresh = {client: Sent(request[client].rows, reply.embeddings) for client, reply in answers.items()}
        known = {
            c: sent
            for c, sent in (state.sent | fresh).items()
            if c in request and torch.equal(sent.rows, request[c].rows)
        }
        phi = self._phi(state, fed, turn, request, known, answers)
        moved = bytes_down(fed, request) + bytes_up(answers)
        followed = Replies([])
        if self.labels_at:
            followed, more = self._guided(fed, turn, request, known, phi)
            moved += more
        copies, more = self._asked(fed, self.practise, phi, turn, heads=self.head_update == "device_average")
        heads_from, moved = copies, moved + more
        if self.head_update == "server":
            there = ([c for c in members if c in phi] for members in turn.silos.values())
            hosts = {members[0]: phi[members[0]] for members in there if members}
            heads_from, more = self._asked(fed, self.fit_head, hosts, turn, heads=True, quorum=False)
            moved += more
        heads = {
            silo: mean_tree([heads_from[client].head for client in members if client in heads_from])
            or state.heads[silo]
            for silo, members in turn.silos.items()
        }
        after = state.with_(
            heads=state.heads | heads,
            sent={} if self.resample else state.sent | fresh,
            exchanges=state.exchanges + 1,
            silo_bytes=state.silo_bytes + moved,
        )
        return after, copies, followed

    def _asked(
        self, fed: Federation, task: Task, send: Mapping[int, Message], turn: Turn, *, heads: bool, quorum: bool = True
    ) -> tuple[Replies, int]:
        """Ask devices to do one task of an exchange. Return their replies, and the bytes sent and received.

        If `heads` is set, every reply contains a head. The server rejects a reply if the parameters of this head have
        other names than the parameters of the head that the server sent to the device.
        """
        accept = names_as_sent("head", send) if heads else None
        replies = fed.ask(task, sorted(send), send, quorum=quorum, turn=turn.number, accept=accept)
        return replies, bytes_down(fed, send) + bytes_up(replies)

    def _phi(
        self,
        state: SiloState,
        fed: Federation,
        turn: Turn,
        request: Mapping[int, Sample],
        known: Mapping[int, Sent],
        answers: Replies,
    ) -> dict[int, Exchange]:
        """Return Phi for every device that holds labels and has answered.

        Phi consists of the head and the embeddings of the device's samples.
        """
        phi: dict[int, Exchange] = {}
        for silo, members in turn.silos.items():
            samples, batch = turn.samples[silo], turn.batches[silo]
            pooled = samples.pooled(batch, {c: known[c].embeddings for c in members if c in known})
            for c in members:
                if c not in answers or not self.holds_labels(fed.clients.owned(c)):
                    continue
                held = samples.held(batch, c)
                own = pooled if bool(held.all()) else {m: h[held.to(h.device)] for m, h in pooled.items()}
                phi[c] = Exchange(state.heads[silo], own, request[c].rows)
                if self.placebo == "shuffled":
                    key = keys.key(fed.seed, "placebo", silo, fed.round, turn.number)
                    phi[c] = shuffled_peers(phi[c], fed.clients.owned(c), key)
        return phi

    def _guided(
        self,
        fed: Federation,
        turn: Turn,
        request: Mapping[int, Sample],
        known: Mapping[int, Sent],
        phi: Mapping[int, Exchange],
    ) -> tuple[Replies, int]:
        """Train devices without labels (option `labels_at`). Return their replies, and the bytes sent and received."""
        slopes, moved = self._asked(fed, self.guide, phi, turn, heads=False)
        send: dict[int, Guidance] = {}
        for silo, members in turn.silos.items():
            samples, batch = turn.samples[silo], turn.batches[silo]
            by_modality = samples.pooled(batch, {c: slopes[c].gradients for c in members if c in slopes})
            sent = [c for c in members if c in known]
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
        followed, more = self._asked(fed, self.follow, send, turn, heads=False, quorum=False)
        return followed, moved + more

    def _check_labels(self, fed: Federation, silos: Mapping[int, Sequence[int]]) -> None:
        """Refuse `labels_at` if a silo has no device with this modality."""
        if self.labels_at and self.labels_at not in fed.clients.modalities:
            known = ", ".join(fed.clients.modalities)
            raise RecipeError(f"[algorithm] labels_at = '{self.labels_at}' is no modality of the data; it has {known}")
        for silo, members in silos.items():
            if not any(self.holds_labels(fed.clients.owned(client)) for client in members):
                raise RecipeError(
                    f"silo {silo}: no device holds '{self.labels_at}', so nobody has labels. Choose a modality for "
                    "[algorithm] labels_at that every silo has"
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
