"""The server's part of client-level differential privacy: (sum of clipped updates + noise) / constant, by block.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018: the estimator
with a fixed denominator. docs/privacy.md has the argument about its sensitivity.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyfed.core.gaussian import Clip, gaussian, scaled
from polyfed.core.messages import map_fields
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.federation.replies import Replies, ReplyStack
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
        count = 0.0
        for part in replies.parts:
            updates = {key: stack - sent[key] for key, stack in getattr(part.message, name).items()}
            count += float((mechanism.clip.within(updates, len(part.clients)).double() - 0.5).sum())
        base = None if mechanism.secure else self.key
        count += rule.count_noise * float(gaussian(base, "number of updates below the clip norm", (1,), "cpu"))
        norm = rule.after(mechanism.clip.total, count, mechanism.denominators[SHARED])
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
            totals = _from_sums(replies, name, sent)
            deviation *= 1 + _rounding(replies, name, sent, mechanism) / mechanism.clip.least
        else:
            totals = self._from_replies(replies, name, sent)
        found: Tree = {}
        for key, start in sent.items():
            denominator = mechanism.denominators.get(block_of(key), 0.0)
            if not denominator:
                continue
            total = totals[key] if key in totals else start.new_zeros(start.shape)
            if mechanism.central:
                base = None if mechanism.secure else self.key
                noise = gaussian(base, key, tuple(start.shape), start.device)
                total = total + (deviation * noise).to(total.dtype)
            found[key] = start + total / denominator
        return found

    def _from_replies(self, replies: Replies, name: str, sent: Mapping[str, Tensor]) -> Tree:
        """Return the sum of the updates. Each update is clipped first, unless its client has already added noise."""
        updates = Replies([self._updates(part, name, sent) for part in replies.parts])
        means = updates.mean(name, dict.fromkeys(replies, 1.0))
        senders = self._senders(replies, name)
        return {key: mean * senders[key] for key, mean in means.items()}

    def _updates(self, part: ReplyStack, name: str, sent: Mapping[str, Tensor]) -> ReplyStack:
        """Return the stack with the update of each client in place of its parameters.

        The updates are clipped. If the clients have already added noise, the updates stay as they are.
        """
        stacks = {key: stack - sent[key] for key, stack in getattr(part.message, name).items()}
        if self.mechanism.central:
            factors = self.mechanism.clip.factors(stacks)
            stacks = {key: scaled(stack, factors[key]) for key, stack in stacks.items()}
        changed = map_fields(part.message, lambda field, value: stacks if field == name else value)
        return ReplyStack(part.clients, changed)

    def _senders(self, replies: Replies, name: str) -> dict[str, int]:
        """Return how many clients sent each tensor."""
        counts: dict[str, int] = {}
        for part in replies.parts:
            for key in getattr(part.message, name):
                counts[key] = counts.get(key, 0) + len(part.clients)
        return counts


def _from_sums(replies: SummedReplies, name: str, sent: Mapping[str, Tensor]) -> Tree:
    """Return the sum of the updates, from the sum of the parameters. It is computed in float64."""
    found: Tree = {}
    for key, start in sent.items():
        if (name, key) in replies.sums:
            count = len(replies.senders[name, key])
            found[key] = (replies.sums[name, key].double() - count * start.double()).to(start.dtype)
    return found


def _rounding(replies: SummedReplies, name: str, sent: Mapping[str, Tensor], mechanism: Mechanism) -> float:
    """Return an upper bound on how much rounding can increase the norm of one client's contribution to the sum.

    A client rounds its parameters twice: to float32, and then to integers. The server cannot clip the result again, so
    the noise has to be large enough for both rounding errors. Differential privacy compares the results on two
    neighbouring data sets. Both results can have these errors, hence the factor 2.
    """
    summed = [(key, start) for key, start in sent.items() if (name, key) in replies.errors]
    whole = math.sqrt(sum(replies.errors[name, key] ** 2 * start.numel() for key, start in summed))
    size = math.sqrt(sum(float(start.double().square().sum()) for start in sent.values()))
    return 2 * (whole + UNIT_ROUNDOFF * (size + 2 * mechanism.clip.total))
