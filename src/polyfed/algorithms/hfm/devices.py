"""The half of HFM and VFL that runs on the devices of a silo: embeddings, and Q local rounds on a mini-batch.

A device with labels trains its encoder and a copy of the head on the exchanged embeddings (`practise`). If `labels_at`
is set, a device without labels trains its encoder on the gradients of its embeddings (`guide`, `follow`).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyfed.algorithms.hfm.exchange import (
    Copy,
    Embedded,
    Exchange,
    Followed,
    Forward,
    Guidance,
    Ids,
    Question,
    Sample,
    Slopes,
    Upload,
)
from polyfed.algorithms.hfm.options import VerticalOptions
from polyfed.core.batch import Batch
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, squared_distance
from polyfed.federation.context import ClientContext
from polyfed.model.fusion import masked
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import FOLD_BATCH
from polyfed.training.kept_training import KeptTraining
from polyfed.training.optimisers import Train


@dataclass(frozen=True, kw_only=True)
class Devices(VerticalOptions):
    """The tasks of the devices. `VerticalOptions` lists the options."""

    @abstractmethod
    def anchors(self, local: Tree, head: Tree) -> Tree:
        """Return the values towards which the proximal term pulls, by name.

        Args:
            local: the device's local state.
            head: the head that the device received; empty for a device without labels.
        """

    def holds_labels(self, modalities: Sequence[str]) -> bool:
        """Return whether a device with these modalities holds labels."""
        return not self.labels_at or self.labels_at in modalities

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

    @task()
    def upload(self, context: ClientContext, data: ClientData, local: Tree, got: Forward) -> tuple[Upload, Tree]:
        """Send the device's encoders to the server. The first device of a silo also forwards the head of its edge."""
        return Upload(self._encoders(context, local) | got.head), local

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
