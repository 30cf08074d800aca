"""Attacks on labels: the classes that a client holds, its most frequent class, and the class of each row.

Shape letters: C classes, n rows, d size of an embedding.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from scipy import stats
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from torch import Tensor

from polyfed.core import keys
from polyfed.core.messages import HISTOGRAM
from polyfed.experiment.leakage.capture import Capture, CapturedReply, blocks_of
from polyfed.experiment.leakage.findings import Finding, Tally, Target, measured
from polyfed.experiment.leakage.rows import as_sent, embedded, samples_of

PRESENT, FREQUENT, EACH_ROW = "classes present", "most frequent class", "label of each row"

PERMUTATIONS = 20
"""The number of random orders of the labels. They show how good the best assignment of clusters is by chance."""

FULL = "every attacked client holds every class, or none"
"""The remark if there is nothing to rank."""

Scores = dict[int, Tensor]
"""A map from each client to a score for each class, float64 (C,). A larger score means that the class is more likely
present."""


def output_scores(gradient: Mapping[str, Tensor], num_classes: int) -> Tensor | None:
    """Score the classes of a batch, float64 (C,), by the gradient of the output layer. None if there is no such layer.

    The gradient of the bias is the mean of p - y over rows, so an entry below 0 belongs to a present class. Zhao,
    Mopuri, Bilen, "iDLG", 2020, use this fact for one row, and Wainakh et al., "User-Level Label Leakage from
    Gradients", PoPETs 2022, for batches. If the layer has no bias, the scores come from the gradient of the weights,
    which is nearly an outer product of p - y and the mean input. The scores are then the first left singular vector
    of the gradient of the weights. A singular vector has no fixed sign, so the function chooses the sign with which the
    entry of largest absolute value is positive.

    Args:
        gradient: the gradients of one block, by name. If the client sent parameters instead of gradients: the last
            parameters that the receiver knew before the reply, minus the parameters in the reply.
        num_classes: C. A layer with C outputs counts as an output layer. The function uses the last such layer.
    """
    layers = [value.double() for value in gradient.values() if value.dim() in (1, 2) and len(value) == num_classes]
    layers = [value for value in layers if bool(value.isfinite().all()) and bool((value != 0).any())]
    biases = [value for value in layers if value.dim() == 1]
    if biases:
        return -biases[-1]
    if not layers:
        return None
    first: Tensor = torch.linalg.svd(layers[-1], full_matrices=False).U[:, 0]
    return first * first[first.abs().argmax()].sign()


def classes_of_clients(found: Capture) -> Iterator[Finding]:
    """Infer which classes each client has, and which class is the most frequent one."""
    num = found.population.columns.num_classes
    for target, scores in _scores(found, num).items():
        truth = {client: torch.bincount(found.labels(found.rows(client)), minlength=num) for client in scores}
        method = {
            "parameters": "change of the output layer",
            "gradients": "gradient of the output layer",
            "prototypes": "prototypes that are not zero",
            "statistic": "class counts as sent",
        }[target.kind]
        remark = "pairs of a present and an absent class in the right order"
        yield measured(target, method, presence(scores, truth), remark=remark, empty=FULL, owners=found.owners)
        if target.kind != "prototypes":  # the length of a prototype does not depend on the number of rows
            other = Target(FREQUENT, target.kind, target.block, target.seen_by)
            yield measured(other, f"largest entry, {method}", most_frequent(scores, truth), owners=found.owners)


def presence(scores: Scores, truth: Mapping[int, Tensor]) -> dict[int, Tally]:
    """Measure how often a class that a client holds scores higher than a class that it lacks. Ties count as half.

    The result is compared with the best guess of an attacker who does not see the message. This attacker could rank the
    classes at random, or by how many other clients hold each class. The better of these two rankings is the best guess.
    Clients that hold all classes, and clients that hold no class, are left out.

    Args:
        scores: client -> scores (C,).
        truth: client -> number of rows of each class, (C,).
    """
    there = {client: counts > 0 for client, counts in truth.items()}
    shared = torch.stack(list(there.values())).double().sum(0)
    result = {}
    for client, held in there.items():
        if bool(held.any()) and not bool(held.all()):
            others = shared - held.double()
            result[client] = Tally.of(_ranked(scores[client], held), max(0.5, _ranked(others, held)))
    return result


def _ranked(score: Tensor, held: Tensor) -> float:
    """Return how often the classes that the client holds have higher scores than the other classes.

    The function compares every class that the client holds with every class that it lacks. The result is the share of
    these pairs in which the held class has the higher score. Ties count as half.
    """
    ranks = stats.rankdata(score.numpy())
    held_ones, others = int(held.sum()), int((~held).sum())
    return float((ranks[held.numpy()].sum() - held_ones * (held_ones + 1) / 2) / (held_ones * others))


def most_frequent(scores: Scores, truth: Mapping[int, Tensor]) -> dict[int, Tally]:
    """Guess which class has the most rows of a client: the guess is the class with the largest score.

    If several classes share the largest number of rows, a guess of any of these classes is right.
    """
    top = {client: counts == counts.max() for client, counts in truth.items()}
    guess = float(torch.stack(list(top.values())).double().mean(0).max())
    return {client: Tally.of(float(top[client][scores[client].argmax()]), guess) for client in scores}


def _scores(found: Capture, num_classes: int) -> dict[Target, Scores]:
    """Collect the scores of each client, summed over its replies with equal weights."""
    sums: dict[Target, Scores] = {}
    for reply in found.replies:
        for kind, block, score in _scores_of(reply, num_classes):
            own = sums.setdefault(Target(PRESENT, kind, block, reply.seen_by), {})
            own[reply.client] = own.get(reply.client, 0) + score / score.norm().clamp(min=1e-300)
    return sums


def _scores_of(reply: CapturedReply, num_classes: int) -> Iterator[tuple[str, str, Tensor]]:
    for kind in ("parameters", "gradients"):
        for block, part in blocks_of(reply.update(kind)).items():
            score = output_scores(part, num_classes)
            if score is not None:
                yield kind, block, score
    for _, block, value in reply.parts("prototypes"):
        yield "prototypes", block, (value.flatten(1) != 0).any(1).double()
    for name, block, value in reply.parts("statistic"):
        if reply.message.tells.get(name) == HISTOGRAM:
            yield "statistic", block, value.double()


def labels_of_rows(found: Capture, seed: int) -> Iterator[Finding]:
    """Infer the class of each row: from clusters of embeddings, from predictions, or from labels that were sent."""
    num = found.population.columns.num_classes
    for target, values in embedded(found, "embeddings", EACH_ROW).items():
        truth = _truth(found, values)
        raw = {client: samples_of(found, target.block, rows) for client, (_, rows) in values.items()}
        for method, cluster in (("k-means, each client", _each_client), ("k-means, all clients", _all_clients)):
            tallies = cluster({client: z for client, (z, _) in values.items()}, truth, num, seed)
            known = cluster(raw, truth, num, seed)
            quality = float(np.concatenate([tally.value for tally in known.values()]).mean()) if known else None
            yield measured(target, f"{method}, best assignment", tallies, raw=quality, owners=found.owners)
    for target, values in embedded(found, "predictions", EACH_ROW).items():
        truth, tallies = _truth(found, values), {}
        for client, (logits, _) in values.items():
            tallies[client] = Tally.of((logits.argmax(-1) == truth[client]).double(), _most(truth[client]))
        yield measured(target, "largest logit", tallies, owners=found.owners)
    for target, sent in as_sent(found, "labels", EACH_ROW).items():
        tallies = {client: Tally.of(np.ones(len(y)), _most(y.flatten().long())) for client, y in sent.items()}
        yield measured(target, "labels as sent", tallies, owners=found.owners)


def _most(labels: Tensor) -> float:
    """The share of the most frequent label."""
    return float(torch.bincount(labels).max()) / len(labels)


def _truth(found: Capture, values: Mapping[int, tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
    return {client: found.labels(rows) for client, (_, rows) in values.items()}


def _each_client(values: dict[int, Tensor], truth: Mapping[int, Tensor], num: int, seed: int) -> dict[int, Tally]:
    return {c: assigned(clusters(z, num, seed), truth[c], num, seed) for c, z in values.items() if len(z) > 1}


def _all_clients(values: dict[int, Tensor], truth: Mapping[int, Tensor], num: int, seed: int) -> dict[int, Tally]:
    if len({z.shape[1] for z in values.values()}) != 1 or len(values) < 2:
        return {}
    sizes = [len(z) for z in values.values()]
    found = clusters(torch.cat(list(values.values())), num, seed)
    tally = assigned(found, torch.cat([truth[client] for client in values]), num, seed)
    ends = np.cumsum(sizes)[:-1]
    parts = zip(values, np.split(tally.value, ends), np.split(tally.guess, ends), strict=True)
    return {client: Tally(value, guess) for client, value, guess in parts}


def clusters(z: Tensor, num_classes: int, seed: int) -> Tensor:
    """The cluster of each row by k-means with at most C clusters, int64 (n,).

    Args:
        z: embeddings or samples, (n, d).
        num_classes: C.
        seed: the seed of the first centres.
    """
    few = len(torch.unique(z, dim=0))
    made = KMeans(min(num_classes, few), n_init=4, random_state=seed).fit(z.double().numpy())
    return torch.from_numpy(made.labels_).long()


def assigned(found: Tensor, labels: Tensor, num_classes: int, seed: int) -> Tally:
    """Assign the clusters to classes one to one, so that as many rows as possible are right. Compare with chance.

    An attacker who knows the classes of a few rows can find this assignment. Chance is the larger of two numbers: the
    share of the most frequent class, and the share of rows that such an assignment gets right if the labels are in
    random order.

    Args:
        found: clusters, int64 (n,).
        labels: classes, int64 (n,).
        num_classes: C.
        seed: the seed of the random orders.
    """
    value = _best(found, labels, num_classes)
    orders = [keys.permutation(keys.key(seed, "chance", number), len(labels)) for number in range(PERMUTATIONS)]
    chance = np.mean([float(_best(found, labels[order], num_classes).mean()) for order in orders])
    return Tally.of(value, max(_most(labels), float(chance)))


def _best(found: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Assign the clusters to classes so that as many rows as possible are right.

    A row is right if its cluster is assigned to the row's class. Return float64 (n,): 1 for right rows, otherwise 0.
    """
    table = torch.bincount(found * num_classes + labels, minlength=num_classes * num_classes).view(num_classes, -1)
    cluster, label = linear_sum_assignment(table.numpy(), maximize=True)
    names = torch.zeros(num_classes, dtype=torch.int64)
    names[torch.from_numpy(cluster)] = torch.from_numpy(label)
    return (names[found] == labels).double()
