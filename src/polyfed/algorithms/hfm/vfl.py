"""VFL: every silo trains separately. It is the control that shows the benefit of averaging across silos in HFM.

VFL is HFM without its horizontal step: encoders stay on their devices, and the head stays at its edge. The proximal
term acts only on the head. It pulls towards the last head that the edge sent, because a device receives nothing else.
See docs/algorithms/vfl.md.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyfed.algorithms.hfm.alignment import check_aligned, devices_of_silos
from polyfed.algorithms.hfm.exchange import Exchange, Question
from polyfed.algorithms.hfm.vertical import SiloState, Vertical
from polyfed.core.batch import Batch
from polyfed.core.errors import PolyfedWarning, RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree
from polyfed.evaluation import client_statistics
from polyfed.evaluation.scores import Measured, OwnScore, Predictor, own_score, possible
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.model import Model
from polyfed.model.fusion import masked
from polyfed.privacy.policy import Policy
from polyfed.training import ClientData


@message
class OwnTest(Message):
    """Embeddings (n, E) of a device's own test rows and the ids of these samples (n,), for its edge."""

    embeddings: Tree = carries("embeddings", rows="num_rows", shape=("encoded",))
    ids: Tensor = carries("ids", rows="num_rows", shape=())
    num_rows: Tensor = carries("statistic", within=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class Vfl(Vertical):
    """VFL: training inside silos only. It has the options of `VerticalOptions`; a round has R exchanges, as in HFM."""

    model_for: ClassVar[str] = "silo"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: an option is out of range, or only some clients would be evaluated, which are not whole silos.
        """
        super().__post_init__()
        if self.evaluation.clients is not None:
            raise RecipeError(
                f"[evaluate] clients = {self.evaluation.clients}: vfl evaluates whole silos. Remove it",
                ("evaluate", "clients"),
            )

    def init(self, fed: Federation, params: Tree) -> SiloState:
        """Return the state of `Vertical`, and warn if the policy prevents server evaluation of the silos' models."""
        if not fed.context.policy.allows_models("server"):
            rest = "silos evaluate them on their own test rows, metrics.personal"
            if not may_report(fed.context.policy):
                rest = "as statistics of shared may not reach it either, there will be no accuracy at all"
            elif not (self.evaluation.personal and fed.clients.tested):
                rest = "there will be no accuracy unless [clients] personal_test gives silos test rows of their own"
            warnings.warn(
                "vfl: under [egress] encoders or heads may not reach the server, which therefore cannot evaluate the "
                f"silos' models: no metrics.global; {rest}",
                PolyfedWarning,
                stacklevel=2,
            )
        return super().init(fed, params)

    def anchors(self, local: Tree, got: Exchange) -> Tree:
        """Return the head that the device received."""
        return got.head

    def round(self, state: SiloState, fed: Federation) -> SiloState:
        """Do R exchanges in every silo."""
        return self.vertical(state.with_(silo_bytes=0), fed, devices_of_silos(fed.clients))

    def evaluate(self, state: SiloState, fed: Federation) -> Measured:
        """Evaluate every silo's model on the server's rows, if the policy allows it, and on its own test rows."""
        policy = fed.context.policy
        measured = (
            self._evaluated_by_server(state, fed) if fed.evaluation_clients and policy.allows_models("server") else {}
        )
        if not (self.evaluation.personal and fed.clients.tested and may_report(policy)):
            return Measured(measured)
        group, accuracies = self._evaluated_in_silos(state, fed)
        return Measured(measured | ({"personal": group} if group else {}), accuracies)

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Allow model uploads only for evaluation. The server does not ask for what the policy forbids."""
        own = self.evaluation.personal and may_report(policy)
        asked = {"upload": policy.allows_models("server"), "embed_own": own, "score_silo": own, "score_own": False}
        return asked.get(task, super().will_send(task, field, block, policy))

    @property
    def own_models(self) -> Literal["clients"]:
        """`clients`: every silo has its own model, with encoders on its devices and the head at its edge."""
        return "clients"

    def client_modalities(self, client: int, fed: Federation) -> tuple[str, ...]:
        """The modalities of all devices of the client's silo."""
        held = fed.clients.holds[_members(fed.clients, client)].any(0).tolist()
        return tuple(m for m, has in zip(fed.clients.modalities, held, strict=True) if has)

    def client_model(self, client: int, state: SiloState, fed: Federation, local: Callable[[int], Tree]) -> Tree:
        """The model of the client's silo: encoders from its devices, the head from its edge."""
        silo = fed.clients[client].silo
        assert silo is not None, "there is no run of vfl without silos"
        encoders = {name: v for member in _members(fed.clients, client) for name, v in local(member).items()}
        return encoders | state.heads[silo]

    def _evaluated_by_server(self, state: SiloState, fed: Federation) -> dict[str, dict[str, float]]:
        """Return the mean of the metrics over silos. Encoders and heads are uploaded only for this evaluation.

        A silo's model is evaluated with the modalities that the silo has. A silo is left out if one of its devices does
        not answer.
        """
        silos, measured = devices_of_silos(fed.clients), []
        uploads, _ = self.upload_of(state, fed, silos)
        for members in silos.values():
            if not all(client in uploads for client in members):
                continue
            own = {name: value for client in members for name, value in uploads[client].params.items()}
            measured.append(self.evaluate_globally(own, fed))
        return client_statistics.mean_groups(measured)

    def _evaluated_in_silos(self, state: SiloState, fed: Federation) -> tuple[dict[str, float], dict[int, float]]:
        """Score every silo on its own test rows, under the number of its first device, which computes the score.

        Embeddings of these rows are exchanged as in training. A silo is left out if one of its devices does not answer
        or has no test rows.
        """
        silos = devices_of_silos(fed.clients)
        asked = [client for members in silos.values() for client in members if client in fed.clients.tested]
        own = fed.ask(self.embed_own, asked, Question(), quorum=False)
        send = {}
        for silo, members in silos.items():
            if not all(client in own for client in members):
                continue
            there = [own[client] for client in members]
            check_aligned(silo, {client: one.ids for client, one in zip(members, there, strict=True)})
            known = {modality: h for one in there for modality, h in one.embeddings.items()}
            send[members[0]] = Exchange(state.heads[silo], known, torch.arange(len(there[0].ids)))
        told = fed.ask(self.score_silo, list(send), send, quorum=False, accept=possible(fed))
        return self.over_clients(told, fed)

    @task(scope="silo")
    def embed_own(self, context: ClientContext, data: ClientData, local: Tree, got: Question) -> tuple[OwnTest, Tree]:
        """Compute embeddings of the device's own test rows, for the edge."""
        test, encoders = data.test, self._encoders(context, local)
        found = test.collect(lambda batch: masked(context.model.features(encoders, batch), batch.present))
        return OwnTest(found, test.ids, test.num_rows), local

    @task()
    def score_silo(self, context: ClientContext, data: ClientData, local: Tree, got: Exchange) -> tuple[OwnScore, Tree]:
        """Score the silo's model on its test rows, from the embeddings of all devices."""
        predictor = FromEmbeddings(got.embeddings)
        return own_score(context, got.head, data.test, predictor), local


@dataclass(frozen=True)
class FromEmbeddings(Predictor):
    """Predicts from embeddings (n, E) of all rows, by modality, that were computed before."""

    embeddings: Tree

    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """Logits (B, C) of the head with parameters `w`."""
        return model.fuse(w, {m: h[batch.rows] for m, h in self.embeddings.items()}, batch)


def _members(clients: ClientRegistry, client: int) -> list[int]:
    """Return the devices with rows in the silo of this device."""
    assert clients.silo is not None, "there is no run of vfl without silos"
    found: list[int] = ((clients.silo == clients.silo[client]) & (clients.num_rows > 0)).nonzero().flatten().tolist()
    return found


def may_report(policy: Policy) -> bool:
    """Whether a silo may send the server its number of correct test rows."""
    return policy.allows("statistic", SHARED, "server")
