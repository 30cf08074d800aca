"""Membership inference: decides whether a row was among the training rows of a client.

Two attacks: a threshold on the loss (Yeom, Giacomelli, Fredrikson, Jha, "Privacy Risk in Machine Learning", CSF 2018),
and LiRA with a few shadow models (Carlini, Chien, Nasr, Song, Terzis, Tramer, "Membership Inference Attacks From First
Principles", IEEE S&P 2022).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.experiment.leakage.capture import Capture, CapturedReply
from polyfed.experiment.leakage.findings import Finding, Tally, Target, measured
from polyfed.federation.context import ClientContext
from polyfed.objective import Classification
from polyfed.training import SingleClientData

MEMBERSHIP = "membership of rows"

ALL = "every block"
"""The name of the block for an attack that reads every block."""

FEWEST_PUBLIC = 50
"""The smallest number of validation rows. If there are fewer, the audit uses the test rows as rows that no client
trained on."""

LEAST_SPREAD = 1e-3
"""Smallest standard deviation of LiRA's normal distributions, so that equal confidences do not divide by zero."""

AGAINST_TEST = "against test rows"
"""The remark of an attack that uses the test rows as rows that no client trained on."""

Losses = Callable[[Tree, Tensor], Tensor]
"""`losses(params, rows)` returns the loss of each row, float64 (n,)."""


def public_rows(found: Capture) -> tuple[Tensor, str]:
    """Return rows that no client trained on, and what these rows are called: "validation rows" or "test rows".

    The function returns the validation rows, or the test rows if there are too few validation rows.
    """
    population = found.population
    if len(population.validation_rows) >= FEWEST_PUBLIC:
        return population.validation_rows.cpu(), "validation rows"
    return population.test_rows.cpu(), "test rows"


@dataclass(frozen=True)
class Candidates:
    """Rows for which an attack guesses whether a model was trained on them.

    Half of the rows are members: a client trained on them. The other half are non-members: no client trained on them.
    In tasks with classes, half of the rows of each class are members.

    Attributes:
        rows: row numbers, int64 (2n,), with the members first.
        member: bool (2n,).
    """

    rows: Tensor
    member: Tensor

    @classmethod
    def draw(cls, members: Tensor, others: Tensor, labels: Tensor, key: int) -> "Candidates":
        """Draw equal numbers of members and non-members, and make these numbers as large as possible.

        Args:
            members: row numbers of the members.
            others: row numbers of the non-members.
            labels: the labels of the whole table. If the labels are classes, the numbers of drawn members and
                non-members are also equal within each class.
            key: the random key.
        """
        groups = [(members, others)]
        if not labels.is_floating_point():
            classes = sorted(set(labels[members].tolist()))
            groups = [(members[labels[members] == c], others[labels[others] == c]) for c in classes]
        pairs = []
        for number, sides in enumerate(groups):
            count = min(len(side) for side in sides)
            orders = [keys.permutation(keys.key(key, number, s), len(side)) for s, side in enumerate(sides)]
            pairs.append([side[order[:count]] for side, order in zip(sides, orders, strict=True)])
        inside, outside = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
        return cls(torch.cat([inside, outside]), torch.arange(2 * len(inside)) < len(inside))


def loss_threshold(loss: Tensor, member: Tensor) -> Tally:
    """Guess that each row of the half with the smaller losses is a member.

    Args:
        loss: the loss of each candidate, (2n,).
        member: whether the candidate is a member, bool (2n,).
    """
    return _halves(-loss, member)


def likelihood_ratio(own: Tensor, shadows: Tensor, inside: Tensor, member: Tensor) -> Tally:
    """Run the attack LiRA: guess that one half of the candidates, with the larger likelihood ratios, are members.

    For each candidate, the attack fits two normal distributions: one to the confidences of the shadow models that
    trained on the candidate, and one to the confidences of the other shadow models. All candidates share the same two
    standard deviations, as the paper advises for few shadow models.

    Args:
        own: for each candidate, the attacked model's confidence in the true class, as a logit, (2n,).
        shadows: for each shadow model and candidate, the model's confidence in the true class, as a logit, (S, 2n).
        inside: whether the shadow model trained on the candidate, bool (S, 2n).
        member: whether the candidate is a member, bool (2n,).
    """
    likelihoods = []
    for side in (inside, ~inside):
        mean = (shadows * side).sum(0) / side.sum(0).clamp(min=1)
        mean = torch.where(side.any(0), mean, shadows[side].mean())
        spread = ((shadows - mean).square() * side).sum() / side.sum().clamp(min=1)
        deviation = spread.sqrt().clamp(min=LEAST_SPREAD)
        likelihoods.append(-((own - mean) / deviation).square() / 2 - deviation.log())
    return _halves(likelihoods[0] - likelihoods[1], member)


def _halves(score: Tensor, member: Tensor) -> Tally:
    """Guess that each candidate with a score above the median is a member.

    If the score of a candidate equals the median, its guess counts as half right.
    """
    middle = score.double().median() if not len(score) else score.double().quantile(0.5)
    right = torch.where(member, score > middle, score < middle).double()
    return Tally.of(torch.where(score == middle, torch.full_like(right, 0.5), right), 0.5)


def membership(found: Capture, shadows: int, seed: int) -> Iterator[Finding]:
    """Attack the last parameters of each client, and the last global model that the server sent to clients.

    Args:
        found: the captured replies.
        shadows: number of LiRA's shadow models for each client. If 0, the attack uses only the loss.
    """
    candidates, remark = candidates_of(found, seed), f"against {public_rows(found)[1]}"
    last = {(r.client, r.seen_by): r for r in found.replies if r.tree("parameters")}
    for seen_by in sorted({way for _, way in last}):
        replies = {client: reply for (client, way), reply in last.items() if way == seen_by}
        modalities = found.assembly.model.modalities
        for block in (ALL, *(modalities if len(modalities) > 1 else ())):
            target = Target(MEMBERSHIP, "parameters", block, seen_by)
            tallies = {c: _of_reply(found, reply, block, candidates[c]) for c, reply in replies.items()}
            yield measured(target, "loss below the median", _without_none(tallies), remark=remark, owners=found.owners)
        if shadows and isinstance(found.assembly.fed.context.objective, Classification):
            target = Target(MEMBERSHIP, "parameters", ALL, seen_by)
            ratios = {c: _lira(found, reply, candidates[c], shadows, seed) for c, reply in replies.items()}
            yield measured(
                target, f"LiRA, {shadows} shadow models", _without_none(ratios), remark=remark, owners=found.owners
            )
    yield from _of_global_model(found, candidates, remark)


def candidates_of(found: Capture, seed: int) -> dict[int, Candidates]:
    """Return the candidates of each attacked client.

    The devices of a silo have training rows in common, so they get the same public rows. Two clients that
    are not in the same silo never get the same public row. If all clients shared a few public rows, and these happened
    to be unusually easy or difficult, the guesses about all clients would be affected in the same way.

    Args:
        found: the captured replies.
    """
    label, owners = found.population.columns.label, found.owners
    clients = sorted({reply.client for reply in found.replies})
    owner = {client: client if owners is None else owners[client] for client in clients}
    public = public_rows(found)[0]
    public = public[keys.permutation(keys.key(seed, "public rows"), len(public))]
    shares: dict[int, list[Tensor]] = {own: [] for own in owner.values()}
    held = {own: set(_groups(label[found.rows(client)])) for client, own in owner.items()}
    groups = _groups(label[public])
    for group in sorted(set(groups)):
        wanting = [own for own in shares if group in held[own]]
        rows = public[torch.tensor([one == group for one in groups])]
        for place, own in enumerate(wanting):
            shares[own].append(rows[place :: len(wanting)])
    none = torch.zeros(0, dtype=torch.int64)
    return {
        client: Candidates.draw(
            found.rows(client), torch.cat([none, *shares[own]]), label, keys.key(seed, "members", client)
        )
        for client, own in owner.items()
    }


def _groups(labels: Tensor) -> list[int]:
    """Return the class of each row, or 0 for all rows in a task without classes."""
    return [0] * len(labels) if labels.is_floating_point() else labels.tolist()


def _of_global_model(found: Capture, candidates: Mapping[int, Candidates], remark: str) -> Iterator[Finding]:
    context = found.assembly.fed.context
    model = found.model if found.model.keys() >= context.initial.keys() else {}
    tallies = {}
    for client in sorted(found.trained & candidates.keys()) if model else ():
        own = candidates[client]
        if len(own.rows):
            tallies[client] = loss_threshold(losses_of(found, context, context.modalities, model, own.rows), own.member)
    if tallies:
        target = Target(MEMBERSHIP, "parameters", ALL, "client")
        yield measured(target, "loss below the median", tallies, remark=remark, owners=found.owners)


def _of_reply(found: Capture, reply: CapturedReply, block: str, candidates: Candidates) -> Tally | None:
    """Attack one reply: guess membership from the losses of the model in the reply.

    If `block` is a modality, the model reads only this modality. If `block` is `ALL`, the model reads all modalities.
    """
    context = found.assembly.engine.context(reply.client)
    read = [m for m in context.modalities if m in context.model.modalities and block in (m, ALL)]
    if not read or not len(candidates.rows) or (block != ALL and block not in _sent(reply)):
        return None
    params = {**reply.known, **reply.tree("parameters")}
    return loss_threshold(losses_of(found, context, read, params, candidates.rows), candidates.member)


def _sent(reply: CapturedReply) -> set[str]:
    return {name.split(".")[0] for name in reply.tree("parameters")}


def _without_none(tallies: Mapping[int, Tally | None]) -> dict[int, Tally]:
    return {client: tally for client, tally in tallies.items() if tally is not None}


def losses_of(found: Capture, context: ClientContext, read: Sequence[str], params: Tree, rows: Tensor) -> Tensor:
    """The loss of each row, float64 (n,).

    Args:
        found: the captured replies.
        context: the context of the client.
        read: the modalities that the model reads. The model treats other modalities as absent.
        params: the model.
        rows: row numbers (n,).
    """
    with torch.no_grad():
        total, weight = context.row_losses(params, batch_of(found, read, rows))
    return total.double() / weight.double().clamp(min=1e-12)


def batch_of(found: Capture, read: Sequence[str], rows: Tensor) -> Batch:
    """Rows of the table as a batch in evaluation mode."""
    columns = found.population.columns
    present = {m: columns.present[m][rows] for m in read if m in columns.present}
    x = {m: columns.modalities[m].take(rows) for m in read}
    return Batch(x=x, y=columns.label[rows], rows=torch.arange(len(rows)), present=present)


def _lira(found: Capture, reply: CapturedReply, candidates: Candidates, shadows: int, seed: int) -> Tally | None:
    """Attack with shadow models.

    Each shadow model starts from the received parameters and trains on a random half of the candidates.
    """
    context, columns = found.assembly.engine.context(reply.client), found.population.columns
    read = [m for m in context.modalities if m in context.model.modalities]
    total = len(candidates.rows)
    if total < 4 or not read:
        return None
    confidences, halves = [], []
    for number in range(shadows):
        key = keys.key(seed, "shadow", reply.client, number)
        inside = torch.zeros(total, dtype=torch.bool)
        inside[keys.permutation(key, total)[: total // 2]] = True
        data = SingleClientData(columns, candidates.rows[inside], tuple(read), context.model, key, reply.round, 1)
        train = found.assembly.algorithm.train
        fit = data.minimise(context.loss, {n: v.clone() for n, v in reply.known.items()}, train=train)
        confidences.append(_confidence(found, context, read, fit.params, candidates.rows))
        halves.append(inside)
    params = {**reply.known, **reply.tree("parameters")}
    own = _confidence(found, context, read, params, candidates.rows)
    return likelihood_ratio(own, torch.stack(confidences), torch.stack(halves), candidates.member)


def _confidence(found: Capture, context: ClientContext, read: Sequence[str], params: Tree, rows: Tensor) -> Tensor:
    """The logit of the probability of the true class, float64 (n,): log p - log(1 - p)."""
    batch = batch_of(found, read, rows)
    with torch.no_grad():
        logits = context.model.logits(params, batch).double()
    true = torch.nn.functional.one_hot(batch.y, logits.shape[1]).bool()
    return logits[true] - logits.masked_fill(true, -torch.inf).logsumexp(1)
