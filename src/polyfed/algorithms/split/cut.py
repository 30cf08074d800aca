"""A model cut in two: the clients keep the encoders, the server has what comes after (algorithms.md 5.11, 5.12).

The cut runs where the modalities' features enter the fusion. U-shaped, the head comes back to the client, and with it
the labels stay there. Each batch is an exchange: activations up, their gradients down; on both sides a step is one of
`ClientData.minimise` on that batch, the optimiser going on from the step before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.algorithms.split.messages import Cue, Evaluated, Feedback, Half, Joint, Ready, Smashed
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import LABELS
from polyfed.core.request import Accept
from polyfed.core.tasks import task
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model
from polyfed.model.fusion import masked
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import steps_trained
from polyfed.training.losses import cross_entropy
from polyfed.training.optimisers import Moments, Train

WEIGHT, MOMENT = "weight.", "moment."
"""Prefixes of a client's half and of its optimiser among the client's local state."""


@dataclass(frozen=True)
class Upper:
    """The server's half: its parameters, and its optimiser after `steps` steps."""

    params: Tree
    moments: Moments
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The tasks of the clients, and the server's step.

    Attributes:
        train: of both halves.
        u_shaped: whether the head and the labels stay on the client.
    """

    train: Train = Train()
    u_shaped: bool = False

    def __post_init__(self) -> None:
        """Refuse what needs the whole gradient or the whole training at once."""
        if self.train.clip_norm or self.train.steps is not None:
            raise RecipeError(
                "a model that is cut in two has no norm of the whole gradient and counts in epochs: "
                "leave out train.clip_norm and train.steps"
            )

    def lower(self, tree: Tree) -> Tree:
        """The client's half of a tree."""
        return {n: v for n, v in tree.items() if ".encoder." in n or (self.u_shaped and n.startswith("shared.head."))}

    def upper(self, tree: Tree) -> Tree:
        """The server's half."""
        low = self.lower(tree)
        return {n: v for n, v in tree.items() if n not in low}

    def check(self, model: Model) -> None:
        """Refuse a model that leaves the server nothing, or the client no head."""
        if not self.upper(model.template) or (self.u_shaped and not model.joint_size):
            raise RecipeError(
                "u_shaped = true needs a head for the client and a fusion with parameters for the server: "
                "[model] fusion = 'concat' and head = [64], for example"
            )

    # the clients' half

    def local(self, context: ClientContext) -> Tree:
        """Room for the client's half and its optimiser."""
        return self._kept(context.model, self.lower(context.initial))

    def _kept(self, model: Model, half: Tree) -> Tree:
        """A half with a fresh optimiser."""
        moments = self.train.moments(model.trainable(half))
        kept = {f"{MOMENT}{kind}/{n}": v for kind, tree in moments.items() for n, v in tree.items()}
        return {WEIGHT + n: v for n, v in half.items()} | kept

    @task()
    def start(self, context: ClientContext, data: ClientData, local: Tree, got: Half) -> tuple[Ready, Tree]:
        """Take the half; its optimiser starts afresh (algorithms.md 5.11)."""
        return Ready(data.num_rows), self._kept(context.model, got.params)

    @task()
    def forward(self, context: ClientContext, data: ClientData, local: Tree, got: Cue) -> tuple[Smashed, Tree]:
        """Embed the batch of this step."""
        batch = data.batch(self.train, got.step)
        with torch.no_grad():
            w = {n: v.clone() for n, v in half_of(local).items()}  # batch statistics are written in `backward`
            activations = masked(context.model.features(w, batch), batch.present)
        labels = {} if self.u_shaped else {LABELS: batch.y}
        return Smashed(activations, labels, batch.num_real.to(torch.int64)), local

    @task()
    def close(self, context: ClientContext, data: ClientData, local: Tree, got: Joint) -> tuple[Evaluated, Tree]:
        """U-shaped: judge the batch with the client's own head, and train that."""
        batch, model = data.batch(self.train, got.step), context.model
        joint = padded(got.joint, batch)

        def loss(w: Tree, batch: Batch) -> Tensor:
            return cross_entropy(model.classify(w, w["shared.cut"], batch), batch)

        def apart(grads: Tree, w: Tree, aux: Tree, carry: Tree) -> tuple[Tree, Tree]:
            return {n: g for n, g in grads.items() if n != "shared.cut"}, {"cut": grads["shared.cut"]}

        fit = data.minimise(
            loss,
            half_of(local) | {"shared.cut": joint},
            train=self.train,
            direction=apart,
            carry={"cut": torch.zeros_like(joint)},
            only=("shared",),
            after=leg(local, got.step),
            on=batch,
        )
        return Evaluated(fit.carry["cut"], last_loss(fit), batch.num_real.to(torch.int64)), kept_after(fit, local)

    @task()
    def backward(self, context: ClientContext, data: ClientData, local: Tree, got: Feedback) -> tuple[Ready, Tree]:
        """Train the encoders on the gradients that came back."""
        batch, model = data.batch(self.train, got.step), context.model
        gradients = {m: padded(g, batch) for m, g in got.gradients.items()}

        def loss(w: Tree, batch: Batch) -> Tensor:
            z = masked(model.features(w, batch), batch.present)
            products = [(z[m] * g).flatten(1).sum(1) for m, g in gradients.items()]
            return batch.sum(torch.stack(products).sum(0))

        names = [n for n in half_of(local) if ".encoder." in n]
        after = leg(local, got.step)
        fit = data.minimise(loss, half_of(local), train=self.train, only=names, after=after, on=batch)
        return Ready(data.num_rows), kept_after(fit, local)

    @task()
    def finish(self, context: ClientContext, data: ClientData, local: Tree, got: Cue) -> tuple[Half, Tree]:
        """Give the half back."""
        return Half(half_of(local)), local

    # the server's half

    def fresh(self, model: Model, params: Tree) -> Upper:
        """A server's half with a fresh optimiser."""
        return Upper(params, self.train.moments(model.trainable(params)))

    def teach(
        self, fed: Federation, upper: Upper, k: int, sent: Smashed, evaluated: Evaluated | None
    ) -> tuple[Upper, TrainingResult]:
        """One step of the server's half on a client's activations; `carry` holds the gradients at the cut."""
        model = fed.context.model
        cuts = {f"{m}.cut": z for m, z in sent.activations.items()}
        batch = self.received(fed, k, sent, upper.steps)

        def loss(w: Tree, batch: Batch) -> Tensor:
            features = {m: w[f"{m}.cut"] for m in sent.activations}
            if evaluated is None:
                return cross_entropy(model.fuse(w, features, batch), batch)
            product: Tensor = model.joint(w, features, batch) * evaluated.gradient
            return product.sum()

        def apart(grads: Tree, w: Tree, aux: Tree, carry: Tree) -> tuple[Tree, Tree]:
            return {n: g for n, g in grads.items() if n not in cuts}, {n: grads[n] for n in cuts}

        view = fed.server_data(sent.activations, number=k)
        after = TrainingResult({}, torch.zeros(()), torch.tensor(upper.steps), moments=upper.moments)
        fit = view.minimise(loss, upper.params | cuts, train=self.train, direction=apart, after=after, on=batch)
        params = {n: v for n, v in fit.params.items() if n not in cuts}
        return Upper(params, fit.moments, upper.steps + 1), fit

    def received(self, fed: Federation, k: int, sent: Smashed, step: int) -> Batch:
        """The rows a client sent as a training batch."""
        n = int(sent.num_rows)
        rows = torch.arange(n, device=next(iter(sent.activations.values())).device)
        key = keys.key(fed.seed, "server dropout", k, fed.round, step)
        return Batch(x={}, y=sent.labels.get(LABELS, torch.zeros_like(rows)), rows=rows, key=key)

    def exchange(
        self, fed: Federation, order: Sequence[int], params: Tree, uppers: dict[int, Upper]
    ) -> tuple[Replies, float]:
        """All steps of a round with these clients, who work side by side.

        Args:
            fed: the federation.
            order: clients, in the order in which the server serves them within a step.
            params: the whole model; its lower half is where the clients start.
            uppers: the server's half of each client, or one for all under number -1; changed in place.

        Returns:
            The halves that came back, without those of clients that were lost on the way, and the mean loss of a row.
            Whoever is missing is missing there: with turns, other clients have answered or are still to be asked.
        """
        started = fed.ask(self.start, order, Half(self.lower(params)), quorum=False)
        there, lost = list(started), dict(started.missing)
        lengths = {
            k: steps_trained(int(fed.clients.num_rows[k]), self.train, skip_single=fed.context.model.has_batchnorm)
            for k in order
            if k in there
        }
        total, rows = 0.0, 0
        for step in range(1, max(lengths.values(), default=0) + 1):
            active = [k for k in order if k in there and lengths[k] >= step]
            number = torch.tensor(step)
            smashed = fed.ask(self.forward, active, Cue(number), quorum=False, accept=self._at_the_cut(fed))
            evaluated = self._judged(fed, smashed, uppers, number)
            feedback = {}
            for k in [k for k in active if k in (evaluated if self.u_shaped else smashed)]:
                sent, place = smashed[k], k if k in uppers else -1
                uppers[place], fit = self.teach(fed, uppers[place], k, sent, evaluated.get(k))
                feedback[k] = Feedback({m: fit.carry[f"{m}.cut"] for m in sent.activations}, number, sent.num_rows)
                loss = evaluated[k].loss if self.u_shaped else last_loss(fit)
                total, rows = total + float(loss) * int(sent.num_rows), rows + int(sent.num_rows)
            trained = fed.ask(self.backward, list(feedback), feedback, quorum=False)
            there = [k for k in there if k not in active or k in trained]
            lost |= smashed.missing | evaluated.missing | trained.missing
        done = fed.ask(self.finish, there, Cue(torch.tensor(0)), quorum=False)
        return Replies(done.parts, lost | done.missing), total / max(rows, 1)

    def _at_the_cut(self, fed: Federation) -> Accept:
        labels = set() if self.u_shaped else {LABELS}

        def flaw(client: int, reply: Smashed) -> str:
            whole = reply.activations.keys() == {*fed.clients.owned(client)} and reply.labels.keys() == labels
            return "" if whole else "sent other activations or labels than the cut has"

        return flaw

    def _judged(self, fed: Federation, smashed: Replies, uppers: dict[int, Upper], step: Tensor) -> Replies:
        """U-shaped: the way up to the clients' heads and back; nothing otherwise."""
        if not self.u_shaped:
            return Replies([])
        sends = {}
        for k, sent in smashed.items():
            upper = uppers[k if k in uppers else -1]
            with torch.no_grad():
                batch = self.received(fed, k, sent, upper.steps)
                joint = fed.context.model.joint(upper.params, sent.activations, batch)
            sends[k] = Joint(joint, step, sent.num_rows)

        def flaw(client: int, reply: Evaluated) -> str:
            return "" if reply.gradient.shape == sends[client].joint.shape else "sent a gradient of another shape"

        return fed.ask(self.close, list(sends), sends, quorum=False, accept=flaw)


def will_send(cut: Cut, task: str, field: str, block: str) -> bool:
    """What `Algorithm.will_send` says of a cut's tasks."""
    if task == "cut.close" or (task == "cut.finish" and block == SHARED):  # the head, which a client has under a U
        return cut.u_shaped
    return not (field == "labels" and cut.u_shaped)


def half_of(local: Tree) -> Tree:
    """The client's half among its local state."""
    return {n.removeprefix(WEIGHT): v for n, v in local.items() if n.startswith(WEIGHT)}


def leg(local: Tree, step: Tensor) -> TrainingResult:
    """The client's training up to before this step."""
    moments: Moments = {}
    for name, value in local.items():
        if name.startswith(MOMENT):
            kind, _, of = name.removeprefix(MOMENT).partition("/")
            moments.setdefault(kind, {})[of] = value
    return TrainingResult({}, torch.zeros((), device=step.device), step - 1, moments=moments)


def kept_after(fit: TrainingResult, local: Tree) -> Tree:
    """The local state after a step."""
    kept = {f"{MOMENT}{kind}/{n}": v for kind, tree in fit.moments.items() for n, v in tree.items()}
    found = {WEIGHT + n: v for n, v in fit.params.items()} | kept
    return {name: found[name] for name in local}


def last_loss(fit: TrainingResult) -> Tensor:
    """The loss of a single step whose `after` had a loss of 0: the mean over all steps is a share of it."""
    return fit.loss * fit.num_steps


def padded(rows: Tensor, batch: Batch) -> Tensor:
    """Rows that came back for a batch, with zeros where the batch is padded further than they are."""
    missing = batch.y.shape[0] - rows.shape[0]
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def one_turn(cut: Cut, fed: Federation, params: Tree, k: int, uppers: dict[int, Upper]) -> tuple[Tree, float, Replies]:
    """Split learning's turn of one client: the whole model after it, its loss, and its half if it came back."""
    done, loss = cut.exchange(fed, [k], params, uppers)
    lower = done[k].params if k in done else {}
    return params | lower | uppers[-1].params, loss, done


def halves_of(params: Tree, cut: Cut, clients: Sequence[int], fed: Federation) -> dict[int, Upper]:
    """An upper half of its own for every client, with the parts of the modalities that it owns."""
    found = {}
    for k in clients:
        own = {n: v for n, v in cut.upper(params).items() if block_of(n) in fed.clients[k].blocks}
        found[k] = cut.fresh(fed.context.model, own)
    return found
