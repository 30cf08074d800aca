"""The server's half of client-level differential privacy: a sum of bounded updates with noise, over constants.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018: the estimator
with a fixed denominator. docs/privacy.md has the argument about its sensitivity.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from polyfed.core.gaussian import gaussian, scaled
from polyfed.core.messages import map_fields
from polyfed.core.tree import Tree, block_of
from polyfed.federation.replies import Replies, ReplyStack
from polyfed.privacy.mechanism import Mechanism


@dataclass(frozen=True)
class PrivateMean:
    """Combines the updates of a cohort.

    Attributes:
        mechanism: the clip norm, the noise and the denominators.
        key: key of (run, round, request), which the noise is drawn from.
    """

    mechanism: Mechanism
    key: int

    def of(self, replies: Replies, name: str, sent: Mapping[str, Tensor]) -> Tree:
        """Return, for each block: sent + (sum of the clients' clipped updates + noise) / denominator.

        The server clips again, because a client may not have done so. A block that nobody in the cohort holds gets
        noise too, so that the result does not tell who was in the cohort.

        Args:
            replies: the replies.
            name: a field of the message that holds a tree of parameters.
            sent: the tree that the clients started from.
        """
        mechanism = self.mechanism
        updates = Replies([self._updates(part, name, sent) for part in replies.parts])
        means = updates.mean(name, dict.fromkeys(replies, 1.0))
        senders = self._senders(replies, name)
        found: Tree = {}
        for key, start in sent.items():
            denominator = mechanism.denominators.get(block_of(key), 0.0)
            if not denominator:
                continue
            total = means[key] * senders[key] if key in means else start.new_zeros(start.shape)
            if mechanism.central:
                base = None if mechanism.secure else self.key
                noise = gaussian(base, key, tuple(start.shape), start.device)
                total = total + (mechanism.deviation * noise).to(total.dtype)
            found[key] = start + total / denominator
        return found

    def _updates(self, part: ReplyStack, name: str, sent: Mapping[str, Tensor]) -> ReplyStack:
        """Return the stack with updates in the place of parameters, clipped unless they have noise already."""
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
