"""VFL: every silo trains separately. A comparison with HFM shows the benefit of averaging across silos.

VFL is HFM without its horizontal step: encoders stay on their devices, and the head stays at its edge. The only
parameters that a device receives are the head of its edge. The proximal term therefore acts only on the head, and pulls
it towards the head that the edge sent last. See docs/algorithms/vfl.md.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from typing_extensions import override

from polyfed.algorithms.base import SCORING
from polyfed.algorithms.hfm.alignment import devices_of_silos, members_of
from polyfed.algorithms.hfm.silo_exchange import Vertical, may_report
from polyfed.algorithms.hfm.state import SiloState
from polyfed.core.errors import PolyfedWarning
from polyfed.core.tree import Tree
from polyfed.evaluation import client_statistics
from polyfed.evaluation.scores import Measured, joined, rows_alone, total
from polyfed.federation.federation import Federation
from polyfed.privacy.egress.policy import Policy


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
        state = self.identified(state.with_(silo_bytes=0), fed)
        samples = self.samples(state, fed)
        return self.vertical(state, fed, {silo: list(own.places) for silo, own in samples.items()}, samples)

    @override
    def evaluate(self, state: SiloState, fed: Federation) -> Measured:
        policy = fed.context.policy
        possible = fed.evaluation_clients and policy.allows_models("server")
        found = self._evaluated_by_server(state, fed) if possible else Measured({})
        if not (self.evaluation.personal and fed.clients.tested and may_report(policy)):
            return found
        return joined(found, self.evaluated_in_silos(fed, state.heads, {}))

    @override
    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        own = self.evaluation.personal and may_report(policy)
        asked = {
            "upload": policy.allows_models("server"),
            "embed_own": own,
            "score_silo": own,
            **dict.fromkeys(SCORING, False),
        }
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
        uploads, _ = self.sent_models(state, fed, silos)
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
