"""Evaluation of a silo's model on the silo's own test rows, across the devices of the silo.

As in training, each device sends its embeddings of these test rows to the edge. The edge sends the embeddings of all
devices to one device of the silo, and this device computes the score. It is the first device that has labels and holds
a usable sample. Without `labels_at`, every device has labels. The score covers the test samples that this device holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.algorithms.hfm.alignment import devices_of_silos
from polyfed.algorithms.hfm.devices import Devices
from polyfed.algorithms.hfm.exchange import Exchange, some_rows
from polyfed.algorithms.hfm.samples import SiloSamples
from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree
from polyfed.evaluation.scores import OwnScore, Predictor, own_score, possible
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.model import Model
from polyfed.model.fusion import masked
from polyfed.privacy.egress.policy import Policy
from polyfed.training import ClientData


@message
class Evaluated(Message):
    """Asks a device for embeddings of its own test rows.

    `params` holds the encoders that compute the embeddings. If `params` is empty, the device uses its own encoders.
    """

    params: Tree = carries("parameters", part="encoders", optional=True)


@message
class OwnTest(Message):
    """Embeddings (n, E) of a device's own test rows and the ids of these samples (n,), for its edge."""

    embeddings: Tree = carries("embeddings", rows="num_rows", shape=("encoded",))
    ids: Tensor = carries("ids", rows="num_rows", shape=())
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class SiloScores(Devices):
    """The tasks of the devices, and the evaluation of silos. `VerticalOptions` lists the options."""

    def devices(self, fed: Federation) -> dict[int, list[int]]:
        """Return, for each silo, the devices that have rows; see `devices_of_silos`."""
        return devices_of_silos(fed.clients, self.overlap)

    def client_modalities(self, client: int, fed: Federation) -> tuple[str, ...]:
        """The modalities of all devices in the client's silo. These devices together use one model."""
        held = fed.clients.holds[members_of(fed.clients, client)].any(0).tolist()
        return tuple(m for m, has in zip(fed.clients.modalities, held, strict=True) if has)

    def evaluated_in_silos(
        self, fed: Federation, heads: Mapping[int, Tree], encoders: Tree
    ) -> tuple[dict[str, float], dict[int, float]]:
        """Score every silo on its own test rows. The score is listed under the number of the silo's first device.

        A silo is left out if one of its devices does not answer or has no test rows, or if no test sample can be used.

        Args:
            fed: the federation.
            heads: the head of each silo.
            encoders: the encoders to use; if empty, each device uses its own.
        """
        silos, tested = self.devices(fed), set(fed.clients.tested)
        asked = [client for members in silos.values() for client in members if client in tested]
        own = fed.ask(self.embed_own, asked, Evaluated(encoders), quorum=False, accept=some_rows)
        send = {}
        for silo, members in silos.items():
            if not all(client in own for client in members):
                continue
            there = {client: own[client] for client in members}
            owned = {client: fed.clients.owned(client) for client in members}
            labelled = [client for client in members if self.holds_labels(owned[client])]
            ids = {client: one.ids for client, one in there.items()}
            samples = SiloSamples.of(silo, ids, owned, self.overlap, labelled)
            if not samples.count:
                continue
            batch = torch.arange(samples.count)
            sent = {
                c: {m: h[samples.own_rows(batch, c).to(h.device)] for m, h in one.embeddings.items()}
                for c, one in there.items()
            }
            scorer = next(client for client in labelled if samples.rows(client))
            held = samples.held(batch, scorer)
            known = {m: h[held.to(h.device)] for m, h in samples.pooled(batch, sent).items()}
            send[scorer] = Exchange(heads[silo], known, samples.own_rows(batch, scorer))
        told = fed.ask(self.score_silo, list(send), send, quorum=False, accept=possible(fed))
        group, scores = self.over_clients(told, fed)
        return group, {members_of(fed.clients, client)[0]: score for client, score in scores.items()}

    @task(scope="silo")
    def embed_own(self, context: ClientContext, data: ClientData, local: Tree, got: Evaluated) -> tuple[OwnTest, Tree]:
        """Compute embeddings of the device's own test rows, for the edge."""
        test, encoders = data.test, got.params or self._encoders(context, local)
        found = test.collect(lambda batch: masked(context.model.features(encoders, batch), batch.present))
        return OwnTest(found, test.ids, test.num_rows), local

    @task()
    def score_silo(self, context: ClientContext, data: ClientData, local: Tree, got: Exchange) -> tuple[OwnScore, Tree]:
        """Score the silo's model on its test rows, from the embeddings of all devices."""
        predictor = FromEmbeddings(got.embeddings)
        return own_score(context, got.head, data.test.at(got.rows), predictor), local


@dataclass(frozen=True)
class FromEmbeddings(Predictor):
    """Predicts from stored embeddings (n, E) of all rows, by modality, and does not compute new ones."""

    embeddings: Tree

    def logits(self, model: Model, w: Tree, batch: Batch) -> Tensor:
        """Logits (B, C) of the head with parameters `w`."""
        return model.fuse(w, {m: h[batch.rows] for m, h in self.embeddings.items()}, batch)


def members_of(clients: ClientRegistry, client: int) -> list[int]:
    """Return the devices with rows in the silo of this device."""
    assert clients.silo is not None, "there is no run without silos"
    found: list[int] = ((clients.silo == clients.silo[client]) & (clients.num_rows > 0)).nonzero().flatten().tolist()
    return found


def may_report(policy: Policy) -> bool:
    """Whether a silo may send the server its number of correct test rows."""
    return policy.allows("statistic", SHARED, "server")
