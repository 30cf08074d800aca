"""VFL: every silo trains separately. A comparison with HFM shows the benefit of averaging across silos.

VFL is HFM without its horizontal step: encoders stay on their devices, and the head stays at its edge. The only
parameters that a device receives are the head of its edge. The proximal term therefore acts only on the head, and pulls
it towards the head that the edge sent last. See docs/algorithms/vfl.md.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from polyfed.algorithms.base import SCORING
from polyfed.algorithms.hfm.alignment import devices_of_silos, members_of
from polyfed.algorithms.hfm.messages import ToEdge
from polyfed.algorithms.hfm.silo_exchange import Vertical, may_report
from polyfed.algorithms.hfm.state import Edge, SiloState
from polyfed.core.errors import PolyfedWarning
from polyfed.core.messages import Message, carries, message
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.evaluation import client_statistics
from polyfed.evaluation.scores import Measured, rows_alone, total
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.silos.parts import Ask, Part
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData


@message
class Handed(Message):
    """An edge's message to a device before the device sends its model: the head, for the first device of the silo."""

    head: Tree = carries("parameters", whole=True, part="head", optional=True)


@message
class Uploaded(Message):
    """A device's reply to the server: its encoders. The first device of an edge also sends the head of the edge."""

    params: Tree = carries("parameters", partial=True, whole=True)


@dataclass(frozen=True, kw_only=True)
class Vfl(Vertical):
    """VFL: training inside silos only. It has the options of `Vertical`; a round has R exchanges, as in HFM."""

    mixing: ClassVar[str] = "vfl trains each device on the embeddings of others"
    model_for: ClassVar[str] = "silo"

    @override
    def init(self, fed: Federation, params: Tree) -> SiloState:
        if not fed.context.policy.allows_models("server"):
            rest = "silos evaluate them on their own test rows, metrics.personal"
            if not may_report(fed.context.policy):
                rest = "as statistics of shared may not reach it either, there will be no accuracy at all"
            elif not (self.evaluation.personal and fed.clients.tested):
                rest = "there will be no accuracy unless [clients] personal_test gives silos test rows of their own"
            warnings.warn(
                "under [egress] encoders or heads may not reach the server, which therefore cannot evaluate the silos' "
                f"models: no metrics.global; {rest}",
                PolyfedWarning,
                stacklevel=2,
            )
        return super().init(fed, params)

    @override
    def anchors(self, local: Tree, head: Tree) -> Tree:
        return head

    @override
    def devices(self, fed: Federation) -> dict[int, list[int]]:
        """Return, for each silo, the devices that have rows.

        Raises:
            RecipeError: two devices of a silo hold the same modality. Their encoders would never be averaged.
        """
        return devices_of_silos(fed.clients)

    @override
    def round(self, state: SiloState, fed: Federation) -> SiloState:
        result = fed.in_silos(self.trained, self.devices(fed), state.edges, ToEdge({}))
        told = [edge.training for edge in result.kept.values()]
        return state.after(told, self.exchanges).with_(edges=state.edges | result.kept)

    def trained(self, silo: int, members: Sequence[int], kept: Edge | None, got: ToEdge, fed: Federation) -> Part[Edge]:
        """Do R exchanges in a silo."""
        own = yield from self.identified(members, kept or Edge(), fed)
        samples = self.samples(silo, members, own, fed)
        if samples is None:
            return replace(own, training=torch.zeros_like(own.training))
        return (yield from self.exchanged(silo, list(samples.places), own, samples, fed))

    @override
    def evaluate(self, state: SiloState, fed: Federation) -> Measured:
        policy = fed.context.policy
        possible = fed.evaluation_clients and policy.allows_models("server")
        result = self._evaluated_by_server(state, fed) if possible else Measured({})
        return self.with_own_rows(result, fed, state.edges, {})

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        asked = {"upload": policy.allows_models("server"), **self.scoring(policy), **dict.fromkeys(SCORING, False)}
        return asked.get(task, super().will_send(task, field, block, policy))

    @property
    @override
    def own_models(self) -> Literal["clients"]:
        return "clients"

    @override
    def client_model(self, client: int, state: SiloState, fed: Federation, local: Callable[[int], Tree]) -> Tree:
        silo = fed.clients[client].silo
        assert silo is not None, "there is no run of vfl without silos"
        encoders = {name: v for member in members_of(fed.clients, client) for name, v in local(member).items()}
        return encoders | state.heads[silo]

    def _evaluated_by_server(self, state: SiloState, fed: Federation) -> Measured:
        """Return the mean of the metrics over silos. Encoders and heads are uploaded only for this evaluation.

        A silo's model is evaluated with the modalities that the silo has. A silo is left out if one of its devices does
        not answer.
        """
        silos, measured = self.devices(fed), []
        uploads = fed.in_silos(self.uploaded, silos, state.edges, ToEdge({})).of(self.upload)
        for members in silos.values():
            if not all(client in uploads for client in members):
                continue
            own = {name: value for client in members for name, value in uploads[client].params.items()}
            measured.append(self.evaluate_globally(own, fed))
        groups = client_statistics.mean_groups([one.metrics for one in measured])
        known = {
            group: rows_alone([one.intervals[group] for one in measured if group in one.intervals]) for group in groups
        }
        return Measured(groups, confusion=total(one.confusion for one in measured), intervals=known)

    def uploaded(self, silo: int, members: Sequence[int], kept: Edge, got: ToEdge, fed: Federation) -> Part[Edge]:
        """Let the devices of a silo send their encoders, and the first one also the head of the edge."""
        yield Ask(self.upload, {client: Handed(kept.head if client == members[0] else {}) for client in members})
        return kept

    @task()
    def upload(self, context: ClientContext, data: ClientData, local: Tree, got: Handed) -> tuple[Uploaded, Tree]:
        """Send the device's encoders to the server. The first device of a silo also forwards the head of its edge."""
        return Uploaded(self._encoders(context, local) | got.head), local
