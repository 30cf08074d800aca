"""What the server does with the replies: the [server] section, robust aggregation and the server's optimisers.

Robust rules combine replies such that a minority of malicious clients has limited influence on the result.
`aggregate` combines the replies block by block, over the clients that sent the block, as `Replies.mean` does. In
shapes, `K` is the number of clients that sent a block, and `P` the number of entries in the block.
docs/robustness.md describes the rules.

The server's optimisers come from Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (Algorithm 2), and Hsu et
al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019 (FedAvgM).
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from polyfed.core.errors import TooFewReplies
from polyfed.core.option_checks import (
    BELOW_HALF,
    BELOW_ONE,
    IN_RECIPE,
    NOT_NEGATIVE,
    POSITIVE,
    NotSearched,
    SearchRange,
    check_ranges,
)
from polyfed.core.system.openmp import threads_worth
from polyfed.core.tree import Tree, block_of, like, size_bytes
from polyfed.federation import adapters
from polyfed.federation.private_mean import PrivateMean
from polyfed.federation.replies import Replies
from polyfed.model.encoders.lora import pairs
from polyfed.training.optimisers import Moments

WEISZFELD_STEPS, WEISZFELD_TOLERANCE = 100, 1e-6
"""The largest number of steps of Weiszfeld's algorithm, and the relative change of the objective at which the
algorithm stops. Pillutla et al. take at most 4 steps and stop at a relative change of 1e-6. Additional steps cost
little in polyfed, because the replies are already stacked."""

CHUNK = 2**18
"""Number of entries of a block that are compared at a time, to bound the memory."""

BY_ENTRY = ("median", "trimmed-mean")
"""Rules that combine each entry of the replies without the others. The other rules need the replies in memory."""

SMOOTHING = 1e-6
"""The smallest distance by which a weight is divided. Pillutla et al., 2022, call it nu (Algorithm 2)."""


@dataclass(frozen=True, kw_only=True)
class ServerOptimiser:
    """How the server updates the global model with the mean of the replies: the [server] section of a recipe.

    The negative gradient is `mean - params`: the mean of the replies minus the global model. Buffers become the mean.

    Attributes:
        optimiser: `none` (params := params + lr * difference), `avgm`, `adam`, `adagrad` or `yogi`.
        lr: the server's learning rate; FedAvg is `optimiser = "none"` with a rate of 1.
        momentum: momentum of `avgm`.
        beta1: decay of the first moment (Reddi et al. use 0.9).
        beta2: decay of the second moment (Reddi et al. use 0.99).
        tau: number added to the root of the second moment (Reddi et al. use 1e-3). The second moment starts at tau^2.
        aggregate: how the replies are combined, block by block: `mean`; `median`, `trimmed-mean`, `krum`, `multi-krum`,
            `geometric-median` or `norm-clip`, which limit the influence of a minority of lying clients; or `hetlora`,
            `flexlora` or `fedilora`, rules for LoRA adapters (docs/models.md).
        lying: largest share of false replies in one round that `trimmed-mean`, `krum` and `multi-krum` withstand.
        max_norm: largest distance, block by block, that `norm-clip` allows between a reply and the model that was sent;
            0 uses the median distance of the replies.
    """

    optimiser: Annotated[
        Literal["none", "avgm", "adam", "adagrad", "yogi"],
        NotSearched("names the method: FedAvgM, FedAdam, FedAdagrad, FedYogi"),
    ] = "none"
    lr: Annotated[
        float,
        POSITIVE,
        SearchRange(
            0.003, 0.01, 0.03, 0.1, 0.3, 1.0, fedavg=1.0, beside=("optimiser", "avgm", "adam", "adagrad", "yogi")
        ),
    ] = 1.0
    momentum: Annotated[
        float, BELOW_ONE, SearchRange(0.0, 0.5, 0.9, 0.97, fedavg=0.0, beside=("optimiser", "avgm"))
    ] = 0.9
    beta1: Annotated[float, BELOW_ONE, IN_RECIPE] = 0.9
    beta2: Annotated[float, BELOW_ONE, IN_RECIPE] = 0.99
    tau: Annotated[
        float, POSITIVE, SearchRange(0.0001, 0.001, 0.01, 0.1, beside=("optimiser", "adam", "adagrad", "yogi"))
    ] = 1e-3
    aggregate: Annotated[
        Literal[
            "mean",
            "median",
            "trimmed-mean",
            "krum",
            "multi-krum",
            "geometric-median",
            "norm-clip",
            "hetlora",
            "flexlora",
            "fedilora",
        ],
        IN_RECIPE,
    ] = "mean"
    lying: Annotated[float, BELOW_HALF, IN_RECIPE] = 0.2
    max_norm: Annotated[float, NOT_NEGATIVE, IN_RECIPE] = 0.0

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            RecipeError: an option is out of range.
        """
        check_ranges("[server]", self)

    @property
    def idle(self) -> dict[str, str]:
        """Return every option that has no effect in this recipe, with the setting that makes it ineffective."""
        used = {
            "none": (),
            "avgm": ("momentum",),
            "adam": ("beta1", "beta2", "tau"),
            "adagrad": ("beta1", "tau"),
            "yogi": ("beta1", "beta2", "tau"),
        }[self.optimiser]
        unused = (name for name in ("momentum", "beta1", "beta2", "tau") if name not in used)
        idle = dict.fromkeys(unused, f"optimiser = '{self.optimiser}'")
        if self.aggregate not in ("trimmed-mean", "krum", "multi-krum"):
            idle["lying"] = f"aggregate = '{self.aggregate}'"
        if self.aggregate != "norm-clip":
            idle["max_norm"] = f"aggregate = '{self.aggregate}'"
        return idle

    @property
    def single_replies(self) -> str:
        """Why the server needs the replies of single clients; empty if their mean is enough."""
        return "" if self.aggregate == "mean" else f"[server] aggregate = '{self.aggregate}' compares single clients"

    def moments(self, params: Mapping[str, Tensor]) -> Moments:
        """Return the state of the server's optimiser before the first round."""
        if self.optimiser == "none":
            return {}
        if self.optimiser == "avgm":
            return {"momentum": like(params)}
        return {"first": like(params), "second": like(params, self.tau**2)}

    def apply(self, old: Tree, mean: Tree, moments: Moments, trainable: Mapping[str, Tensor]) -> tuple[Tree, Moments]:
        """Update the global model at the end of a round.

        Args:
            old: the global model before the round.
            mean: mean of the replies. Names may be missing (blocks that no client trained); these do not change. It is
                empty afterwards: each of its tensors is let go as soon as its successor is there, so that a server with
                momentum holds two models at most, and not three.
            moments: state of the optimiser.
            trainable: has the names of the parameters; all other names are buffers.

        Returns:
            The global model and the state after the round.
        """
        new = dict(old)
        after = {kind: dict(tree) for kind, tree in moments.items()}
        with threads_worth(size_bytes(mean)):
            for name in list(mean):
                moves = name in trainable and (self.optimiser, self.lr) != ("none", 1.0)
                new[name] = self._moved(name, old[name], mean, after) if moves else mean.pop(name)
        return new, after

    def _moved(self, name: str, old: Tensor, mean: Tree, moments: Moments) -> Tensor:
        """Return a tensor after its step, and take it out of the mean. No name keeps what is not needed next."""
        step = self._direction(name, mean.pop(name) - old, moments)
        step = self.lr * step
        return step.add_(old)

    def _direction(self, name: str, change: Tensor, moments: Moments) -> Tensor:
        if self.optimiser == "none":
            return change
        if self.optimiser == "avgm":
            moments["momentum"][name] = (self.momentum * moments["momentum"][name]).add_(change)
            return moments["momentum"][name]
        first = self.beta1 * moments["first"][name] + (1 - self.beta1) * change
        second, square = moments["second"][name], change.square()
        if self.optimiser == "adagrad":
            second = second + square
        elif self.optimiser == "adam":
            second = self.beta2 * second + (1 - self.beta2) * square
        else:
            second = second - (1 - self.beta2) * square * torch.sign(second - square)
        moments["first"][name], moments["second"][name] = first, second
        return first / (second.sqrt() + self.tau)


@dataclass(frozen=True)
class Group:
    """Tensors of one block, as a matrix with one row for each client. Every client of the group sent all these tensors.

    Attributes:
        block: name of the block, for error messages.
        values: the entries, (K, P), with the clients in ascending order.
        weights: the weights of the clients, (K,), which add up to 1.
        centre: the entries before training, from the tree that the clients started from, (P,).
    """

    block: str
    values: Tensor
    weights: Tensor
    centre: Tensor


def aggregate(
    replies: Replies,
    name: str,
    weights: Mapping[int, float],
    centre: Mapping[str, Tensor],
    server: ServerOptimiser,
    private: PrivateMean | None = None,
) -> Tree:
    """Combine the trees that one field holds in all replies, according to the rule of `[server] aggregate`.

    Args:
        name: a field of the message that holds a tree.
        weights: non-negative weight of each client. Clients with weight 0 do not count. `median`, `trimmed-mean` and
            `krum` give all other clients the same influence.
        centre: the tree that the clients started from. `norm-clip` limits the distance of a reply from this tree.
        server: the options.
        private: the private mean of a recipe with [privacy]. It replaces the rule and the weights. None if the recipe
            has no [privacy].

    Returns:
        The combined tree, without names that no client sent. An integer tensor, such as a counter, becomes the maximum
        of the replies if the rule is `mean`, and the median of the replies under the other rules.

    Raises:
        TooFewReplies: too few clients sent a block for this rule.
    """
    if private is not None:
        return private.of(replies, name, centre)
    full, sent = adapters.padded(replies, name, weights, centre)
    if server.aggregate == "mean" or server.aggregate in adapters.RULES:
        mean = full.mean(name, weights)
        if server.aggregate in adapters.RULES:
            ranks = adapters.ranks_sent(replies, name)
            mean |= _adapters(full, name, weights, centre, adapters.RULES[server.aggregate], ranks)
        return adapters.with_unsent(mean, sent, centre)
    rule = RULES[server.aggregate]
    by_entry = server.aggregate in BY_ENTRY
    result = combined(full, name, weights, centre, lambda group: rule(group, server), by_entry=by_entry)
    return adapters.with_unsent(result, sent, centre)


def combined(
    replies: Replies,
    name: str,
    weights: Mapping[int, float],
    centre: Mapping[str, Tensor],
    rule: Callable[[Group], Tensor],
    only: Collection[str] | None = None,
    *,
    by_entry: bool = False,
) -> Tree:
    """Combine the trees that one field holds in all replies, block by block, with a rule that gets whole blocks.

    Args:
        replies: the replies, whose tensors have the shapes of `centre`.
        name: a field of the message that holds a tree.
        weights: non-negative weight of each client. Clients with weight 0 do not count.
        centre: the tree that the clients started from.
        rule: returns the combined entries (P,) of a group.
        only: the names of tensors to combine. Default: all.
        by_entry: whether the rule may get a part of the entries of a block at a time.

    Returns:
        The combined tree. An integer tensor, such as a counter, becomes the median of the replies.
    """
    result: Tree = {}
    for (block, clients), every in _groups(replies, name, weights).items():
        rows = {key: own for key, own in every.items() if only is None or key in only}
        one = {key: own[0] for key, own in rows.items()}
        result |= {k: torch.stack(own).median(0).values for k, own in rows.items() if not one[k].is_floating_point()}
        real = [key for key in rows if one[key].is_floating_point()]
        if real:
            wide = torch.promote_types(one[real[0]].dtype, torch.float32)
            share = torch.tensor([weights[client] for client in clients], dtype=wide, device=one[real[0]].device)
            form = Group(block, torch.empty(0), share / share.sum(), torch.empty(0))
            if by_entry and sum(one[key].numel() for key in real) > CHUNK:
                result |= {key: _by_chunks(rule, form, rows[key], centre[key], wide) for key in real}
                continue
            values = torch.cat([torch.stack(rows[key]).flatten(1).to(wide) for key in real], 1)
            start = torch.cat([centre[key].flatten().to(values) for key in real])
            entries = rule(replace(form, values=values, centre=start))
            pieces = torch.split(entries, [one[key].numel() for key in real])
            result |= {key: piece.view_as(one[key]).to(one[key]) for key, piece in zip(real, pieces, strict=True)}
    return result


def _by_chunks(
    rule: Callable[[Group], Tensor],
    form: Group,
    rows: Sequence[Tensor],
    centre: Tensor,
    wide: torch.dtype,
) -> Tensor:
    """Return what a rule of `BY_ENTRY` makes of one tensor, from some of its entries at a time, with the same bits.

    Large replies lie in mapped files, so that memory holds no copy of them.

    Args:
        form: the group, without values and centre.
        rows: the tensor of each client.
    """
    flat, start = [row.reshape(-1) for row in rows], centre.reshape(-1)
    entries = torch.empty_like(flat[0])
    for place in range(0, start.numel(), CHUNK):
        part = slice(place, place + CHUNK)
        values = torch.stack([row[part] for row in flat]).to(wide)
        entries[part] = rule(replace(form, values=values, centre=start[part].to(values)))
    return entries.view_as(rows[0])


def _adapters(
    replies: Replies,
    name: str,
    weights: Mapping[int, float],
    centre: Mapping[str, Tensor],
    rule: Callable[[adapters.Adapted], tuple[Tensor, Tensor]],
    ranks: Mapping[str, Mapping[int, int]],
) -> Tree:
    """Return the combined LoRA adapters of the padded replies, block by block."""
    result = Tree()
    for (_, clients), rows in _groups(replies, name, weights).items():
        stacks = {key: torch.stack(own) for key, own in rows.items()}
        for a, b in pairs(stacks):
            device = stacks[a].device
            share = torch.tensor([weights[client] for client in clients], dtype=torch.float64, device=device)
            rank = torch.tensor([ranks[a][client] for client in clients], device=device)
            result[a], result[b] = rule(adapters.Adapted(stacks[a], stacks[b], share / share.sum(), rank, centre[a]))
    return result


def _groups(
    replies: Replies, name: str, weights: Mapping[int, float]
) -> dict[tuple[str, tuple[int, ...]], dict[str, list[Tensor]]]:
    """Group the names of a tree by block and senders: (block, clients ascending) -> name -> the tensor of each."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for part in replies.parts:
        for key, stack in getattr(part.message, name).items():
            rows = zip(part.clients, stack, strict=True)
            pieces.setdefault(key, []).extend((client, row) for client, row in rows if weights[client] > 0)
    groups: dict[tuple[str, tuple[int, ...]], dict[str, list[Tensor]]] = {}
    for key, found in pieces.items():
        ordered = sorted(found, key=lambda item: item[0])
        if ordered:
            senders = tuple(client for client, _ in ordered)
            groups.setdefault((block_of(key), senders), {})[key] = [row for _, row in ordered]
    return groups


def median(group: Group, server: ServerOptimiser) -> Tensor:
    """Return the median of each entry. For an even number of values, it is the mean of the two middle values.

    Source: Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning", ICML 2018, Definition 1.
    """
    return _middle(group.values)


def trimmed_mean(group: Group, server: ServerOptimiser) -> Tensor:
    """Return the mean of each entry without its smallest and its largest values.

    The option `lying` is the share of the values that the function drops at each of the two ends.

    Source: Yin et al., 2018, Definition 2, with beta = `lying`.
    """
    num = len(group.values)
    cut = _liars(group, server)
    return group.values.sort(0).values[cut : num - cut].mean(0)


def krum(group: Group, server: ServerOptimiser) -> Tensor:
    """Return the reply with the smallest sum of squared distances to its K - f - 2 nearest replies.

    f is the number of false replies, `lying` x K.

    Source: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries", NIPS 2017, Section 4.
    """
    return group.values[_krum_scores(group, server).argmin()]


def multi_krum(group: Group, server: ServerOptimiser) -> Tensor:
    """Return the weighted mean of the K - f replies with the smallest Krum scores.

    Source: Blanchard et al., 2017, Section 5.
    """
    scores = _krum_scores(group, server)
    best = scores.argsort(stable=True)[: len(scores) - _liars(group, server)]
    share = group.weights[best]
    return (share / share.sum()) @ group.values[best]


def geometric_median(group: Group, server: ServerOptimiser) -> Tensor:
    """Return the point with the smallest weighted sum of distances to the replies, by smoothed Weiszfeld steps.

    The steps start at the coordinate-wise median, which a minority cannot move far, and not at the mean.

    Source: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022, Algorithm 2.
    """
    point = _middle(group.values).double()
    share, before = group.weights.double(), math.inf
    for _ in range(WEISZFELD_STEPS):
        distances = _distances(group.values, point)
        objective = float(share @ distances)
        if before - objective <= WEISZFELD_TOLERANCE * objective:
            break
        before = objective
        pull = share / distances.clamp(min=SMOOTHING)
        point = _weighted(pull / pull.sum(), group.values)
    return point.to(group.values)


def norm_clip(group: Group, server: ServerOptimiser) -> Tensor:
    """Return the weighted mean of the replies, after clipping the norm of each update to at most `max_norm`.

    An update is the difference between a reply and the model that the server sent. If `max_norm` is 0, the limit is the
    median norm of the updates. Source: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?",
    2019, Section 4. The paper does not use the median norm as the limit; this is polyfed's own choice.
    """
    centre = group.centre.double()
    norms = _distances(group.values, centre)
    limit = norms.new_tensor(server.max_norm) if server.max_norm else norms.median()
    factor = (limit / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
    pull = group.weights.double() * factor
    return (_weighted(pull, group.values) + (1 - pull.sum()) * centre).to(group.values)


RULES: Mapping[str, Callable[[Group, ServerOptimiser], Tensor]] = {
    "median": median,
    "trimmed-mean": trimmed_mean,
    "krum": krum,
    "multi-krum": multi_krum,
    "geometric-median": geometric_median,
    "norm-clip": norm_clip,
}
"""The rules that `[server] aggregate` can name besides `mean`. Each rule returns the combined entries (P,)."""


def _liars(group: Group, server: ServerOptimiser) -> int:
    """Return f, the number of replies that may be false: `lying` x K, rounded up.

    Raises:
        TooFewReplies: there are too few replies for the rule to tolerate f false ones.
    """
    num = len(group.values)
    if why := shortfall(server, num, f"{num} clients sent the block '{group.block}'"):
        raise TooFewReplies(why)
    return tolerance(server, num)[0]


def shortfall(server: ServerOptimiser, num: int, fact: str) -> str:
    """Return why `num` replies are too few for the rule, or "" if they are enough.

    Args:
        server: the options.
        num: number of replies for a block.
        fact: the number of replies in words, as a clause for the text.
    """
    count, least = tolerance(server, num)
    if num >= least:
        return ""
    return (
        f"[server] aggregate = '{server.aggregate}' with lying = {server.lying:g}: {fact}, and the rule needs {least} "
        f"to withstand {count}. Raise [clients] participation (or [algorithm] buffer), lower lying, or use 'median'"
    )


def tolerance(server: ServerOptimiser, num: int) -> tuple[int, int]:
    """Return f, the assumed number of false replies among `num` replies, and the minimum number of replies.

    With fewer replies than this minimum, the rule cannot withstand f false ones. Rules that need no minimum have the
    minimum 0.
    """
    count = math.ceil(server.lying * num - 1e-9)  # 0.2 x 5 is 1.0000000000000002 in floating point
    least = {"trimmed-mean": 2 * count + 1, "krum": 2 * count + 3, "multi-krum": 2 * count + 3}
    return count, least.get(server.aggregate, 0)


def _krum_scores(group: Group, server: ServerOptimiser) -> Tensor:
    """Return, for each reply, the sum of squared distances to its K - f - 2 nearest other replies, (K,).

    A distance is computed from the difference of two replies. The shorter form |x|^2 + |y|^2 - 2xy loses every digit of
    the distance between two honest replies as soon as a false reply is large.
    """
    near = len(group.values) - _liars(group, server) - 2
    apart = torch.zeros(len(group.values), len(group.values), dtype=torch.float64, device=group.values.device)
    for start in range(0, group.values.shape[1], CHUNK):
        piece = group.values[:, start : start + CHUNK].double()
        apart += torch.cdist(piece, piece, compute_mode="donot_use_mm_for_euclid_dist").square()
    apart = apart.nan_to_num(nan=math.inf, posinf=math.inf).fill_diagonal_(math.inf)
    return apart.sort(1).values[:, :near].sum(1)


def _distances(values: Tensor, point: Tensor) -> Tensor:
    """Return the distance of each row of `values` (K, P) from a point (P,) of float64, in float64 (K,).

    The distance between any two finite float32 vectors is finite in float64. In a float64 model it can overflow, and is
    then infinite: no rule takes such a reply.
    """
    squares = values.new_zeros(len(values), dtype=torch.float64)
    for start in range(0, values.shape[1], CHUNK):
        squares += (values[:, start : start + CHUNK].double() - point[start : start + CHUNK]).square().sum(1)
    return squares.sqrt().nan_to_num(nan=math.inf, posinf=math.inf)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Return the sum of the rows of `values`, (K, P), times float64 weights (K,), in float64. Weight 0 drops a row."""
    total = weights.new_zeros(values.shape[1])
    for weight, row in zip(weights.tolist(), values, strict=True):
        if weight:
            total += weight * row.double()
    return total


def _middle(values: Tensor) -> Tensor:
    """Return the median of each column. Each middle value is halved before the sum, which cannot overflow then."""
    ordered, middle = values.sort(0).values, len(values) // 2
    return ordered[middle] if len(ordered) % 2 else ordered[middle - 1] / 2 + ordered[middle] / 2
