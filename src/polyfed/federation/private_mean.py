"""The server's part of client-level differential privacy: (sum of clipped updates + noise) / constant, by block.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018: the estimator
with a fixed denominator. docs/privacy.md has the argument about its sensitivity.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyfed.core.privacy_noise import INSIDE, Clip, DiscreteGaussian
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.federation.replies import Replies
from polyfed.federation.secure_aggregation.sums import SummedReplies
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.training.optimisers import Moments

CLIP_NORM = "clip_norm"
"""Name of the entry of a server state's moments that holds the clip norm of the next round, under adaptive clipping."""

UNIT_ROUNDOFF = 2.0**-24
"""Largest relative error of one rounding in float32 (IEEE 754)."""


@dataclass(frozen=True)
class PrivateMean:
    """Combines the updates of a cohort.

    Attributes:
        mechanism: the clip norm, the noise and the denominators.
        key: key of (run, round, request), which the noise is drawn from.
    """

    mechanism: Mechanism
    key: int

    @classmethod
    def after(cls, mechanism: Mechanism, key: int, moments: Moments) -> "PrivateMean":
        """Return the `PrivateMean` for one round. Under adaptive clipping, its clip norm comes from `moments`."""
        if CLIP_NORM in moments:
            mechanism = replace(mechanism, clip=Clip(float(moments[CLIP_NORM][CLIP_NORM])))
        return cls(mechanism, key)

    def over(self, denominators: Mapping[str, float]) -> "PrivateMean":
        """Return the same mean with these denominators, by block. They must not depend on protected data."""
        return replace(self, mechanism=replace(self.mechanism, denominators=denominators))

    def adapted(self, replies: Replies, name: str, sent: Mapping[str, Tensor], moments: Moments) -> Moments:
        """Return the moments, in which the entry `CLIP_NORM` now holds the clip norm of the next round.

        Without adaptive clipping, the moments do not change.

        Args:
            replies: the replies, with updates that the clients did not clip.
            name: a field of the message that holds a tree of parameters.
            sent: the tree that the clients started from.
            moments: the moments of the server state.
        """
        mechanism, rule = self.mechanism, self.mechanism.adaptive
        if rule is None:
            return moments
        noise, total = DiscreteGaussian(rule.count_noise), torch.zeros((), dtype=torch.float64)
        for part in replies.parts:
            updates = {key: stack - sent[key] for key, stack in getattr(part.message, name).items()}
            terms = mechanism.clip.within(updates, len(part.clients)).double() - 0.5
            total = total + noise.total(terms, torch.ones_like(terms))
        count = noise.released(total, None if mechanism.secure else self.key, "number of updates below the clip norm")
        norm = rule.after(mechanism.clip.total, float(count), mechanism.denominators[SHARED])
        return moments | {CLIP_NORM: {CLIP_NORM: torch.tensor(norm, dtype=torch.float64)}}

    def of(self, replies: Replies, name: str, sent: Mapping[str, Tensor]) -> Tree:
        """Return, for each block: sent + (sum of the clients' clipped updates + noise) / denominator.

        The server clips again, because a client may not have done so. Under secure aggregation it cannot, because it
        reads only the sum. A block that nobody in the cohort holds gets noise too, so that the result does not tell who
        was in the cohort.

        Args:
            replies: the replies, or their sums.
            name: a field of the message that holds a tree of parameters.
            sent: the tree that the clients started from.
        """
        mechanism, deviation = self.mechanism, self.mechanism.deviation
        if isinstance(replies, SummedReplies):
            deviation *= _growth(replies, name, sent, mechanism)
            noise = DiscreteGaussian(deviation)
            totals = _from_sums(replies, name, sent, noise)
        else:
            noise = DiscreteGaussian(deviation)
            totals = self._from_replies(replies, name, sent, noise)
        result: Tree = {}
        for key, start in sent.items():
            denominator = mechanism.denominators.get(block_of(key), 0.0)
            if not denominator:
                continue
            total = totals[key] if key in totals else torch.zeros_like(start, dtype=torch.float64)
            if mechanism.central:
                total = noise.released(total, None if mechanism.secure else self.key, key)
            else:
                total = total * noise.step
            result[key] = start + (total / denominator).to(start.dtype)
        return result

    def _from_replies(self, replies: Replies, name: str, sent: Mapping[str, Tensor], noise: DiscreteGaussian) -> Tree:
        """Return the sum of the updates as a whole number of steps, which does not depend on the order of the replies.

        Each update is clipped first, unless its client has already added noise.
        """
        result: Tree = {}
        for part in replies.parts:
            stacks = {key: stack - sent[key] for key, stack in getattr(part.message, name).items()}
            if self.mechanism.central:
                factors = self.mechanism.clip.factors(stacks)
            else:
                factors = {key: torch.full((len(stack),), 1 / INSIDE).to(stack) for key, stack in stacks.items()}
            for key, stack in stacks.items():
                total = noise.total(stack, factors[key])
                result[key] = result[key] + total if key in result else total
        return result


def _from_sums(replies: SummedReplies, name: str, sent: Mapping[str, Tensor], noise: DiscreteGaussian) -> Tree:
    """Return the sum of the updates as a whole number of steps, from the sum of the parameters."""
    result: Tree = {}
    for key, start in sent.items():
        if (name, key) in replies.sums:
            count = len(replies.senders[name, key])
            result[key] = ((replies.sums[name, key].double() - count * start.double()) / noise.step).round()
    return result


def _growth(replies: SummedReplies, name: str, sent: Mapping[str, Tensor], mechanism: Mechanism) -> float:
    """Return the factor by which the noise grows, to cover what rounding adds to one client's contribution to the sum.

    A client rounds its parameters twice: to float32, and then to integers. The server cannot clip the result again. It
    rounds the sum to the grid of the noise, which moves the sums of two neighbouring data sets apart by at most one
    step per entry. Differential privacy compares the results on two neighbouring data sets. Both results can have these
    errors, hence the factor 2 of the errors of a client.
    """
    summed = [(key, start) for key, start in sent.items() if (name, key) in replies.errors]
    whole = math.sqrt(sum(replies.errors[name, key] ** 2 * start.numel() for key, start in summed))
    size = math.sqrt(sum(float(start.double().square().sum()) for start in sent.values()))
    rounding = 2 * (whole + UNIT_ROUNDOFF * (size + 2 * mechanism.clip.total))
    rest = 1 - mechanism.grid_share(sum(start.numel() for start in sent.values()))
    assert rest > 0, "the recipe was refused"
    return (1 + rounding / mechanism.clip.least) / rest
