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
    Smashed,
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
from polyfed.core.problems import Conflict
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


CONFLICTS = (
    Conflict(
        key=("train", "clip_norm"),
        when=lambda recipe: recipe.algorithm.train.clip_norm > 0,
        because="the model is cut in two, and neither side has the whole gradient",
        instead="Remove clip_norm",
    ),
    Conflict(
        key=("train", "steps"),
        when=lambda recipe: recipe.algorithm.train.steps is not None,
        because="training of a model that is cut in two is counted in epochs",
        instead="Remove steps and set epochs",
    ),
    Conflict(
        key=("train", "accumulate"),
        when=lambda recipe: recipe.algorithm.train.accumulate > 1,
        because="the gradients at the cut belong to the whole batch",
        instead="Set accumulate = 1",
    ),
)
"""What a method with a cut model cannot use."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The client tasks and the server's step of a cut model.

    Attributes:
        train: training options of both halves.
        u_shaped: whether the head and the labels stay on the client.
    """

    train: Train = Train()
    u_shaped: bool = False

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
                "for the server: set [model] fusion = 'concat' and head = [64], for example",
                ("algorithm", "u_shaped"),
            )

    # the clients' half

    def local(self, context: ClientContext) -> Tree:
        """The client's local state: its half and a fresh optimiser."""
        return fresh_local(context.model, self.lower(context.initial), self.train)

    @task()
    def start(self, context: ClientContext, data: ClientData, local: Tree, got: Half) -> tuple[Smashed, Tree]:
        """Store the received half with a fresh optimiser, and compute the activations of the first batch."""
        after = fresh_local(context.model, got.params, self.train)
        return self._forward(context, data, after, 1), after

    @task()
    def backward(
        self, context: ClientContext, data: ClientData, local: Tree, got: CutGradients
    ) -> tuple[Smashed, Tree]:
        """Train the encoders with the gradients of a step, and compute the activations of the next step's batch."""
        after = self._trained(context, data, local, got)
        return self._forward(context, data, after, got.step + 1), after

    @task()
    def finish(self, context: ClientContext, data: ClientData, local: Tree, got: CutGradients) -> tuple[Half, Tree]:
        """Train the encoders with the gradients of the last step, and return the client's half."""
        after = self._trained(context, data, local, got)
        return Half(client_half(after)), after

    def _forward(self, context: ClientContext, data: ClientData, local: Tree, step: int | Tensor) -> Smashed:
        """Compute the activations of a step's batch."""
        batch = data.batch(self.train, step)
        with torch.no_grad():
            # use a copy, because a forward pass in training mode updates the batch statistics; the zero gives it a
            # client axis under vmap, which a half that all clients received lacks
            zero = torch.zeros_like(next(iter(batch.x.values())).flatten()[0])
            w = {n: v + zero.to(v.dtype) for n, v in client_half(local).items()}
            activations = masked(context.model.features(w, batch), batch.present)
        labels = {} if self.u_shaped else {LABELS: batch.y}
        return Smashed(activations, labels, batch.num_real.to(torch.int64))

    def _trained(self, context: ClientContext, data: ClientData, local: Tree, got: CutGradients) -> Tree:
        """Return the local state after a step of the encoders with the gradients at the cut."""
        batch, model = data.batch(self.train, got.step), context.model
        gradients = {m: padded(g, batch) for m, g in got.gradients.items()}

        def loss(w: Tree, batch: Batch) -> Tensor:
            z = masked(model.features(w, batch), batch.present)
            products = [(z[m] * g).flatten(1).sum(1) for m, g in gradients.items()]
            return batch.sum(torch.stack(products).sum(0))

        half, after = client_half(local), steps_before(local, got.step)
        names = [n for n in half if ".encoder." in n]
        fit = data.minimise(loss, half, train=self.train, only=names, after=after, on=batch)
        return local_after(fit, local)

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

    # the server's half

    def fresh(self, model: Model, params: Tree) -> ServerHalf:
        """A server's half with a fresh optimiser."""
        return ServerHalf(params, self.train.moments(model.trainable(params)))

    def server_step(
        self, fed: Federation, half: ServerHalf, k: int, sent: Smashed, head: HeadGradient | None
    ) -> tuple[ServerHalf, TrainingResult]:
        """Run one training step of the server's half of the model on the activations of client k.

        Args:
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

        The gradients of a step and the activations of the next one are a request and its reply. A client without a
        training step, such as one with a single row and BatchNorm, takes no part.

        Args:
            order: the clients, in the order in which the server serves them within a step.
            params: the whole model, whose lower half the clients start from.
            halves: the server's half for each client, or one half for all clients under `COMMON`; changed in place.

        Returns:
            The clients' halves after training, and their training loss, as in local training: the mean over a
            client's steps, then over the clients by rows. Clients that failed in any step are among the
            `missing` of the replies. This method requires no quorum; the caller checks the quorum once per round.
        """
        skip, accept, lower = fed.context.model.has_batchnorm, self._as_cut(fed), self.lower(params)
        lengths = {k: steps_trained(int(fed.clients.num_rows[k]), self.train, skip_single=skip) for k in order}
        order = [k for k in order if lengths[k]]
        smashed = fed.ask(self.start, order, Half(lower), quorum=False, accept=accept)
        lost, losses, last = dict(smashed.missing), dict.fromkeys(order, 0.0), dict[int, CutGradients]()
        for step in range(1, max(lengths.values(), default=0) + 1):
            sends = self._served(fed, [k for k in order if k in smashed], smashed, halves, step, lost, losses)
            last |= {k: sent for k, sent in sends.items() if lengths[k] == step}
            sends = {k: sent for k, sent in sends.items() if k not in last}
            smashed = fed.ask(self.backward, list(sends), sends, quorum=False, accept=accept) if sends else Replies([])
            lost |= smashed.missing
        far: Accept = lambda _, half: fed.too_far(half.params, lower)  # noqa: E731
        done = fed.ask(self.finish, sorted(last), last, quorum=False, accept=far)
        rows = fed.clients.rows_of(done)
        loss = sum(losses[k] / lengths[k] * rows[k] for k in done) / max(sum(rows.values()), 1)
        return Replies(done.parts, lost | done.missing), loss

    def _served(
        self,
        fed: Federation,
        order: Sequence[int],
        smashed: Replies,
        halves: dict[int, ServerHalf],
        step: int,
        lost: dict[int, str],
        losses: dict[int, float],
    ) -> dict[int, CutGradients]:
        """Train the server's half on the activations of one step, client by client, and return the gradients to send.

        Clients that fail or send false activations are added to `lost`, and each client's loss to `losses`.
        """
        number, result = torch.tensor(step), dict[int, CutGradients]()
        heads = {} if COMMON in halves else self._head_gradients(fed, smashed, halves, number, lost)
        for k in order:
            sent, place = smashed[k], k if k in halves else COMMON
            if place == COMMON:  # the half that trained with the clients before k computes the input of k's head
                heads = self._head_gradients(fed, {k: sent}, halves, number, lost)
            if self.u_shaped and k not in heads:
                continue
            after, fit = self.server_step(fed, halves[place], k, sent, heads.get(k))
            if why := fed.too_far(after.params, halves[place].params, STEP):
                lost[k] = f"its activations are false: {why}"
                fed.emit(
                    "client-missing",
                    round=fed.round,
                    task="cut.backward" if step > 1 else "cut.start",
                    client=k,
                    reason=lost[k],
                )
                continue
            halves[place] = after
            result[k] = CutGradients({m: fit.carry[f"{m}.cut"] for m in sent.activations}, number, sent.num_rows)
            losses[k] += float(heads[k].loss if self.u_shaped else last_loss(fit))
        return result

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
