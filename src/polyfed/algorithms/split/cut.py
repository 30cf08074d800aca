"""A model cut into two halves: the clients have the encoders (lower half), the server has the rest (upper half).

The cut is the point where the features of the modalities enter the fusion. In a U-shaped model, the client also has the
head, so that labels stay on the client. In every training step, the activations of a batch go to the server, and their
gradients return to the client. On both sides, a step is one call of `ClientData.minimise` on that batch. The optimiser
continues from the step before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.algorithms.split.messages import (
    CutGradients,
    Half,
    HeadGradient,
    HeadInput,
    Ready,
    Smashed,
    StepNumber,
    client_half,
    fresh_local,
    last_loss,
    local_after,
    padded,
    steps_before,
)
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import LABELS
from polyfed.core.request import Accept
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model
from polyfed.model.fusion import masked
from polyfed.training import ClientData, TrainingResult
from polyfed.training.kept_training import earlier_steps
from polyfed.training.optimisers import Moments, Train
from polyfed.training.step_plan import steps_trained

STEP = 1.0
"""An optimiser step that moves the server's half by more than this many times its norm follows from false activations.
No other client shows what is usual: split learning trains with one client at a time."""

COMMON = -1
"""The key of a server's half that serves all clients. Otherwise the keys are client numbers."""


@dataclass(frozen=True)
class ServerHalf:
    """The server's half: its parameters, and the moments of its optimiser after `steps` steps."""

    params: Tree
    moments: Moments
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The client tasks and the server's step of a cut model.

    Attributes:
        train: training options of both halves.
        u_shaped: whether the head and the labels stay on the client.
    """

    train: Train = Train()
    u_shaped: bool = False

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: `train.clip_norm` is set, although neither side has the whole gradient, or `train.steps` or
            `train.accumulate` is set.
        """
        if self.train.clip_norm or self.train.steps is not None:
            raise RecipeError(
                "[train] clip_norm and steps cannot be used with a model that is cut in two: neither side has the "
                "whole gradient, and training is counted in epochs. Remove clip_norm and steps"
            )
        if self.train.accumulate > 1:
            raise RecipeError(
                "[train] accumulate cannot be used with a model that is cut in two: the gradients at the cut belong to "
                "the whole batch. Set accumulate = 1"
            )

    def lower(self, tree: Tree) -> Tree:
        """The client's half of a tree: the encoders, and with `u_shaped` also the head."""
        return {n: v for n, v in tree.items() if ".encoder." in n or (self.u_shaped and n.startswith("shared.head."))}

    def upper(self, tree: Tree) -> Tree:
        """The server's half of a tree: everything that is not in the client's half (`lower`)."""
        low = self.lower(tree)
        return {n: v for n, v in tree.items() if n not in low}

    def template(self, task: str, whole: Tree) -> Tree:
        """Return the part of the model that a task receives: the client's half, or the whole model for others."""
        return self.lower(whole) if task == "cut.start" else whole

    def check(self, model: Model) -> None:
        """Check that both halves of a model have parameters.

        Raises:
            RecipeError: nothing is left for the server, or the client of a U-shaped model has no head.
        """
        if not self.upper(model.template) or (self.u_shaped and not model.joint_size):
            raise RecipeError(
                "[algorithm] u_shaped = true needs a model with a head, for the client, and a fusion with parameters, "
                "for the server: set [model] fusion = 'concat' and head = [64], for example"
            )

    # the clients' half

    def local(self, context: ClientContext) -> Tree:
        """The client's local state: its half and a fresh optimiser."""
        return fresh_local(context.model, self.lower(context.initial), self.train)

    @task()
    def start(self, context: ClientContext, data: ClientData, local: Tree, got: Half) -> tuple[Ready, Tree]:
        """Store the received half and start a fresh optimiser for it."""
        return Ready(data.num_rows), fresh_local(context.model, got.params, self.train)

    @task()
    def forward(self, context: ClientContext, data: ClientData, local: Tree, got: StepNumber) -> tuple[Smashed, Tree]:
        """Compute the activations of this step's batch."""
        batch = data.batch(self.train, got.step)
        with torch.no_grad():
            # use a copy, because `backward` updates the batch statistics
            w = {n: v.clone() for n, v in client_half(local).items()}
            activations = masked(context.model.features(w, batch), batch.present)
        labels = {} if self.u_shaped else {LABELS: batch.y}
        return Smashed(activations, labels, batch.num_real.to(torch.int64)), local

    @task()
    def train_head(
        self, context: ClientContext, data: ClientData, local: Tree, got: HeadInput
    ) -> tuple[HeadGradient, Tree]:
        """U-shaped: compute the loss of this step's batch with the client's head, and train the head."""
        batch, model = data.batch(self.train, got.step), context.model
        joint = padded(got.joint, batch)

        def loss(w: Tree, batch: Batch) -> Tensor:
            return context.objective.loss(model.classify(w, w["shared.cut"], batch), batch)

        def without_cut(grads: Tree, w: Tree, aux: Tree, carry: Tree) -> tuple[Tree, Tree]:
            return {n: g for n, g in grads.items() if n != "shared.cut"}, {"cut": grads["shared.cut"]}

        fit = data.minimise(
            loss,
            client_half(local) | {"shared.cut": joint},
            train=self.train,
            direction=without_cut,
            carry={"cut": torch.zeros_like(joint)},
            only=("shared",),
            after=steps_before(local, got.step),
            on=batch,
        )
        reply = HeadGradient(fit.carry["cut"], last_loss(fit), batch.num_real.to(torch.int64))
        return reply, local_after(fit, local)

    @task()
    def backward(self, context: ClientContext, data: ClientData, local: Tree, got: CutGradients) -> tuple[Ready, Tree]:
        """Train the encoders with the gradients at the cut."""
        batch, model = data.batch(self.train, got.step), context.model
        gradients = {m: padded(g, batch) for m, g in got.gradients.items()}

        def loss(w: Tree, batch: Batch) -> Tensor:
            z = masked(model.features(w, batch), batch.present)
            products = [(z[m] * g).flatten(1).sum(1) for m, g in gradients.items()]
            return batch.sum(torch.stack(products).sum(0))

        half, after = client_half(local), steps_before(local, got.step)
        names = [n for n in half if ".encoder." in n]
        fit = data.minimise(loss, half, train=self.train, only=names, after=after, on=batch)
        return Ready(data.num_rows), local_after(fit, local)

    @task()
    def finish(self, context: ClientContext, data: ClientData, local: Tree, got: StepNumber) -> tuple[Half, Tree]:
        """Return the client's half."""
        return Half(client_half(local)), local

    # the server's half

    def fresh(self, model: Model, params: Tree) -> ServerHalf:
        """A server's half with a fresh optimiser."""
        return ServerHalf(params, self.train.moments(model.trainable(params)))

    def server_step(
        self, fed: Federation, half: ServerHalf, k: int, sent: Smashed, head: HeadGradient | None
    ) -> tuple[ServerHalf, TrainingResult]:
        """Run one training step of the server's half of the model on the activations of client k.

        Args:
            fed: the federation.
            half: the server's half before the step.
            k: the client.
            sent: the client's activations, with labels unless the model is U-shaped.
            head: the gradient from the client's head if the model is U-shaped, else None.

        Returns:
            The server's half after the step, and the training result, whose `carry` has the gradients at the cut.
        """
        model = fed.context.model
        cuts = {f"{m}.cut": z for m, z in sent.activations.items()}
        batch = self.received(fed, k, sent, half.steps)

        def loss(w: Tree, batch: Batch) -> Tensor:
            features = {m: w[f"{m}.cut"] for m in sent.activations}
            if head is None:
                return fed.context.loss(w, batch, features)
            product: Tensor = model.joint(w, features, batch) * head.gradient
            return product.sum()

        def without_cut(grads: Tree, w: Tree, aux: Tree, carry: Tree) -> tuple[Tree, Tree]:
            return {n: g for n, g in grads.items() if n not in cuts}, {n: grads[n] for n in cuts}

        data = fed.server_data(sent.activations, number=k)
        after = earlier_steps(half.moments, half.steps)
        fit = data.minimise(loss, half.params | cuts, train=self.train, direction=without_cut, after=after, on=batch)
        params = {n: v for n, v in fit.params.items() if n not in cuts}
        return ServerHalf(params, fit.moments, half.steps + 1), fit

    def received(self, fed: Federation, k: int, sent: Smashed, step: int) -> Batch:
        """Return a training batch for the rows of client k. Its `x` is empty: clients send activations, not samples."""
        n = int(sent.num_rows)
        rows = torch.arange(n, device=next(iter(sent.activations.values())).device)
        key = keys.key(fed.seed, "server dropout", k, fed.round, step)
        return Batch(x={}, y=sent.labels.get(LABELS, torch.zeros_like(rows)), rows=rows, key=key)

    def exchange(
        self, fed: Federation, order: Sequence[int], params: Tree, halves: dict[int, ServerHalf]
    ) -> tuple[Replies, float]:
        """Run all training steps of a round with these clients in parallel.

        Args:
            fed: the federation.
            order: the clients, in the order in which the server serves them within a step.
            params: the whole model, whose lower half the clients start from.
            halves: the server's half for each client, or one half for all clients under `COMMON`; changed in place.

        Returns:
            The clients' halves after training, and the mean loss per row. Clients that failed in any step are among the
            `missing` of the replies. This method requires no quorum; the caller checks the quorum once per round.
        """
        started = fed.ask(self.start, order, Half(self.lower(params)), quorum=False)
        there, lost = set(started), dict(started.missing)
        lengths = {
            k: steps_trained(int(fed.clients.num_rows[k]), self.train, skip_single=fed.context.model.has_batchnorm)
            for k in order
            if k in there
        }
        total, rows = 0.0, 0
        for step in range(1, max(lengths.values(), default=0) + 1):
            active = [k for k in order if k in there and lengths[k] >= step]
            number = torch.tensor(step)
            smashed = fed.ask(self.forward, active, StepNumber(number), quorum=False, accept=self._as_cut(fed))
            heads = {} if COMMON in halves else self._head_gradients(fed, smashed, halves, number, lost)
            gradients = {}
            for k in [k for k in active if k in smashed]:
                sent, place = smashed[k], k if k in halves else COMMON
                if place == COMMON:  # the half that trained with the clients before k computes the input of k's head
                    heads = self._head_gradients(fed, {k: sent}, halves, number, lost)
                if self.u_shaped and k not in heads:
                    continue
                after, fit = self.server_step(fed, halves[place], k, sent, heads.get(k))
                if why := fed.too_far(after.params, halves[place].params, STEP):
                    lost[k] = f"its activations are false: {why}"
                    fed.emit("client-missing", round=fed.round, task="cut.forward", client=k, reason=lost[k])
                    continue
                halves[place] = after
                cut = {m: fit.carry[f"{m}.cut"] for m in sent.activations}
                gradients[k] = CutGradients(cut, number, sent.num_rows)
                loss = heads[k].loss if self.u_shaped else last_loss(fit)
                total, rows = total + float(loss) * int(sent.num_rows), rows + int(sent.num_rows)
            trained = fed.ask(self.backward, list(gradients), gradients, quorum=False)
            there.difference_update(k for k in active if k not in trained)
            lost |= smashed.missing | trained.missing
        lower = self.lower(params)
        end = StepNumber(torch.tensor(0))
        done = fed.ask(
            self.finish, sorted(there), end, quorum=False, accept=lambda _, half: fed.too_far(half.params, lower)
        )
        return Replies(done.parts, lost | done.missing), total / max(rows, 1)

    def _as_cut(self, fed: Federation) -> Accept:
        """Return a check for `fed.ask`: a reply must have rows, with the activations of all modalities of the client.

        It must also have labels, unless the labels stay on the client (`u_shaped`).
        """
        labels = set() if self.u_shaped else {LABELS}

        def flaw(client: int, reply: Smashed) -> str:
            whole = reply.activations.keys() == {*fed.clients.owned(client)} and reply.labels.keys() == labels
            if not int(reply.num_rows):
                return "sent no rows"
            return "" if whole else "sent other activations or labels than the cut has"

        return flaw

    def _head_gradients(
        self,
        fed: Federation,
        smashed: Mapping[int, Smashed],
        halves: dict[int, ServerHalf],
        step: Tensor,
        lost: dict[int, str],
    ) -> Mapping[int, HeadGradient]:
        """In a U-shaped model, send each client the input of its head. The replies contain the gradient of this input.

        If clients fail, this method adds them to `lost`, with the reasons. In any other model, the server holds the
        head. The method then asks no client and returns no replies.
        """
        if not self.u_shaped:
            return {}
        sends = {}
        for k, sent in smashed.items():
            half = halves[k if k in halves else COMMON]
            with torch.no_grad():
                batch = self.received(fed, k, sent, half.steps)
                joint = fed.context.model.joint(half.params, sent.activations, batch)
            sends[k] = HeadInput(joint, step, sent.num_rows)

        def flaw(client: int, reply: HeadGradient) -> str:
            return "" if reply.gradient.shape == sends[client].joint.shape else "sent a gradient of another shape"

        replies = fed.ask(self.train_head, list(sends), sends, quorum=False, accept=flaw)
        lost |= replies.missing
        return replies


def will_send(cut: Cut, task: str, field: str, block: str) -> bool:
    """Answer `Algorithm.will_send` for the tasks of a cut model."""
    if task == "cut.train_head" or (task == "cut.finish" and block == SHARED):  # only a U-shaped client has a head
        return cut.u_shaped
    return not (field == "labels" and cut.u_shaped)
