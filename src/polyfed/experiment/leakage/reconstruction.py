"""Reconstruction of samples: from gradients or changes of parameters, and from embeddings.

The quality of a rebuilt row is 1 - (squared error of the rebuilt row) / (mean squared distance of the true rows from
the mean public row). An exact copy has quality 1, and the mean public row has quality 0. A gradient does not tell which
rebuilt row belongs to which row of the client, so each rebuilt row is compared with the nearest row of the client.
Shape letters: n rows, F entries of a sample, d size of an embedding.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from sklearn.linear_model import RidgeCV
from torch import Tensor

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.experiment.leakage.capture import Capture, CapturedReply, blocks_of
from polyfed.experiment.leakage.findings import Finding, Tally, Target, measured
from polyfed.experiment.leakage.labels import output_scores
from polyfed.experiment.leakage.membership import public_rows
from polyfed.experiment.leakage.rows import as_sent, embedded, samples_of

REBUILT = "samples rebuilt"

NEURONS = 8
"""The number of neurons of the first layer from which rows are rebuilt. These neurons have the largest gradients of the
bias."""

DUMMIES = 8
"""The largest number of rows that gradient matching rebuilds at once, which limits its time. With more rows, the
rebuilt rows become less distinct."""

OPTIMISED = 8
"""The number of clients that gradient matching attacks. It is small, because this attack takes the longest of all."""

ITERATIONS, STEP = 200, 0.1
"""Iterations and step size of gradient matching. As in Geiping et al., Adam uses the sign of the gradient and the rate
0.1."""

ALPHAS = np.logspace(-4, 6, 11)
"""The strengths of the penalty from which the inverter chooses. With the largest strength, the inverter predicts the
mean row."""


def first_layer_rows(gradient: Mapping[str, Tensor], features: int) -> Tensor:
    """Rebuild rows from the first linear layer of a block: a neuron's weight gradient divided by its bias gradient.

    If the gradient comes from a single row, this quotient equals the row (Phong et al., "Privacy-Preserving Deep
    Learning via Additively Homomorphic Encryption", IEEE TIFS 2018, Section 3). If the gradient comes from a batch, the
    quotient is a weighted mean of the rows that activate the neuron.

    Args:
        gradient: the gradients of the block by name, in the order of the model.
        features: F, entries of a flattened sample.

    Returns:
        Rebuilt rows, float64 (k, F), where k is at most `NEURONS`. If the block has no such layer, k is 0.
    """
    for name, weight in gradient.items():
        bias = gradient.get(name.removesuffix("weight") + "bias") if name.endswith("weight") else None
        if bias is not None and weight.dim() == 2 and weight.shape[1] == features:
            order = bias.abs().argsort(descending=True)[:NEURONS]
            order = order[bias[order] != 0]
            rows = weight[order].double() / bias[order].double()[:, None]
            return rows[rows.isfinite().all(1)]
    return torch.zeros(0, features, dtype=torch.float64)


def match_gradient(
    loss: Callable[[Tree, Batch], Tensor], params: Tree, gradient: Tree, start: Mapping[str, Tensor], y: Tensor
) -> dict[str, Tensor]:
    """Rebuild a batch by matching its gradient: minimise 1 - cosine similarity over the samples.

    Source: Geiping, Bauermeister, Dröge, Moeller, "Inverting Gradients - How easy is it to break privacy in federated
    learning?", NeurIPS 2020, Eq. 4, without their prior for images. Zhu, Liu, Han, "Deep Leakage from Gradients",
    NeurIPS 2019, minimise the squared distance instead.

    Args:
        loss: `loss(params, batch)`, 0-dim.
        params: the parameters at which the gradient was computed.
        gradient: the gradient of a client, by parameter name. If the client sent new parameters instead, the tree holds
            the parameters before training minus the new ones. Parameters that the tree lacks are ignored.
        start: modality -> the samples from which the optimisation starts, float32 (n, ...).
        y: the labels of the rows (n,).

    Returns:
        modality -> rebuilt samples (n, ...).
    """
    x = {m: value.clone().requires_grad_() for m, value in start.items()}
    w = {name: value.detach().clone() for name, value in params.items()}
    leaves = [w[name].requires_grad_() for name in gradient]
    wanted = torch.cat([gradient[name].flatten() for name in gradient])
    adam = torch.optim.Adam(x.values(), lr=STEP)
    falling = torch.optim.lr_scheduler.MultiStepLR(adam, [ITERATIONS * part // 8 for part in (3, 5, 7)], 0.1)
    for _ in range(ITERATIONS):
        value = loss(w, Batch(x=x, y=y, rows=torch.arange(len(y))))
        own = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
        flat = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(own, leaves)])  # noqa: B905
        distance = 1 - torch.nn.functional.cosine_similarity(flat, wanted, dim=0)
        slopes = torch.autograd.grad(distance, list(x.values()), allow_unused=True)
        for sample, slope in zip(x.values(), slopes, strict=True):
            sample.grad = torch.zeros_like(sample) if slope is None else slope.nan_to_num().sign()
        adam.step()
        falling.step()
    return {m: value.detach() for m, value in x.items()}


def nearest(rebuilt: Tensor, rows: Tensor, public: Tensor) -> Tally:
    """Compare rebuilt rows with the nearest rows of a client.

    There are two guesses for which the attacker needs no message: the mean of the public rows, and a random public row.
    The tally also holds the quality of the better one of these two guesses.

    Args:
        rebuilt: (k, F).
        rows: the client's rows, (n, F).
        public: rows that the attacker knows, (p, F). They come from the same data set as the client's rows.
    """
    own, known, mean = rows.double(), public.double(), public.double().mean(0, keepdim=True)
    spread = (own - mean).square().sum(1).mean().clamp(min=1e-12)

    def error(guess: Tensor) -> Tensor:
        return (torch.cdist(guess, own).amin(1).square() / spread).clamp(max=1.0)

    best = min(float(error(mean)), float(error(known).mean()))
    return Tally.of(1 - error(rebuilt.double()), 1 - best)


def samples_rebuilt(found: Capture, seed: int) -> Iterator[Finding]:
    """Try to rebuild each client's samples from the parameters, gradients, embeddings and raw data in its replies."""
    for kind in ("parameters", "gradients"):
        yield from _from_gradients(found, kind)
        yield from _by_matching(found, kind, seed)
    for target, values in embedded(found, "embeddings", REBUILT).items():
        rows = {c: (z, samples_of(found, target.block, own)) for c, (z, own) in values.items()}
        tallies = {c: tally for c, (z, x) in rows.items() if (tally := inverted(z, x, keys.key(seed, c))) is not None}
        yield measured(
            target,
            "linear inverter",
            tallies,
            remark="the attacker knows the samples of half of the rows",
            owners=found.owners,
        )
    for target, sent in as_sent(found, "raw", REBUILT).items():
        copies = {client: Tally.of(np.ones(len(samples)), 0.0) for client, samples in sent.items()}
        yield measured(target, "samples as sent", copies, owners=found.owners)


def inverted(z: Tensor, x: Tensor, key: int) -> Tally | None:
    """Learn to invert embeddings from half of the rows, and rebuild the other half.

    The inverter is a ridge regression, and leave-one-out errors choose the strength of its penalty. If the embeddings
    of the known rows equal their samples, the inverter returns the other embeddings unchanged.

    Args:
        z: embeddings (n, d).
        x: the flattened samples (n, F).
        key: the random key that determines which half is known.

    Returns:
        A tally with one guess for each row of the other half. The quality of a guess is 1 - e / d. Here e is the
        squared error of the rebuilt row. d is the mean squared distance of the rows of the other half from the mean of
        the known rows. The tally also holds the quality of a guess for which the attacker needs no embedding: the
        mean of the known rows. If `z` has fewer than eight rows, the function returns None.
    """
    if len(z) < 8:
        return None
    order = keys.permutation(key, len(z))
    known, other = order[: len(z) // 2], order[len(z) // 2 :]
    inputs, samples = z.double().numpy(), x.double().numpy()
    scale = inputs[known].std(0)
    inputs = (inputs - inputs[known].mean(0)) / np.where(scale > 0, scale, 1.0)
    rebuilt = RidgeCV(ALPHAS).fit(inputs[known], samples[known]).predict(inputs[other]).reshape(len(other), -1)
    if z.shape == x.shape and bool((z[known] == x[known]).all()):
        rebuilt = z[other].double().numpy()
    spread = np.square(samples[other] - samples[known].mean(0)).sum(1)
    unit = max(float(spread.mean()), 1e-12)
    return Tally.of(1 - np.square(samples[other] - rebuilt).sum(1) / unit, 1 - spread / unit)


def _from_gradients(found: Capture, kind: str) -> Iterator[Finding]:
    """Rebuild rows from the first layer of each modality."""
    public = public_rows(found)[0]
    tallies: dict[Target, dict[int, Tally]] = {}
    for reply in found.replies:
        for block, gradient in blocks_of(reply.update(kind)).items():
            if block not in found.population.columns.modalities:
                continue
            own = found.samples(block, found.rows(reply.client))
            rebuilt = first_layer_rows(gradient, own.shape[1])
            if len(rebuilt):
                target = Target(REBUILT, kind, block, reply.seen_by)
                tallies.setdefault(target, {})[reply.client] = nearest(rebuilt, own, found.samples(block, public))
    for target, found_ in tallies.items():
        yield measured(target, "quotients of the first layer", found_, owners=found.owners)


def _by_matching(found: Capture, kind: str, seed: int) -> Iterator[Finding]:
    """Rebuild a small batch of some clients by gradient matching."""
    public = public_rows(found)[0]
    tallies: dict[Target, dict[int, Tally]] = {}
    first: dict[int, CapturedReply] = {}
    for reply in found.replies:
        if reply.tree(kind) and len(first) < OPTIMISED:
            first.setdefault(reply.client, reply)
    for client, reply in first.items():
        for modality, samples in _matched(found, reply, kind, keys.key(seed, "dummies", client)).items():
            own, known = found.samples(modality, found.rows(client)), found.samples(modality, public)
            target = Target(REBUILT, kind, modality, reply.seen_by)
            tallies.setdefault(target, {})[client] = nearest(samples.flatten(1), own, known)
    for target, found_ in tallies.items():
        yield measured(target, "gradient matching", found_, owners=found.owners)


def _matched(found: Capture, reply: CapturedReply, kind: str, key: int) -> dict[str, Tensor]:
    """Rebuild a batch whose gradient matches the gradient of a reply; see `match_gradient`.

    The rebuilt batch has as many rows as the client used, but at most `DUMMIES`.
    """
    context, columns = found.assembly.engine.context(reply.client), found.population.columns
    trainable = context.model.trainable(reply.known)
    gradient = {n: v for n, v in reply.update(kind).items() if n in trainable and bool((v != 0).any())}
    blocks = {name.split(".")[0] for name in gradient}
    read = [m for m in context.modalities if m in context.model.modalities and m in blocks]
    if not gradient or not read or columns.label.is_floating_point():
        return {}
    if not found.num_ids.keys().isdisjoint(read):
        return {}  # token ids have no gradient; the attack on words reads them better
    size = len(found.rows(reply.client))
    count = min(DUMMIES, size, found.assembly.algorithm.train.batch_size or size)
    scores = [s for part in blocks_of(gradient).values() if (s := output_scores(part, columns.num_classes)) is not None]
    y = torch.arange(count) % columns.num_classes
    if scores:  # the classes with positive scores, each in proportion to its score
        share = scores[-1].clamp(min=0) / scores[-1].clamp(min=0).sum()
        y = torch.searchsorted(share.cumsum(0), (torch.arange(count) + 0.5) / count).clamp(max=columns.num_classes - 1)
    start = {m: keys.normal(keys.key(key, m), (count, *columns.modalities[m].shape)) for m in read}
    return match_gradient(context.loss, reply.known, gradient, start, y)
