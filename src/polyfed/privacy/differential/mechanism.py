"""The mechanism: a client changes its reply before the egress gate, so that one client or one row is protected.

Shape letters: `K` clients of a stack.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.core.messages import Message, map_fields, map_tensors, map_value
from polyfed.core.privacy_noise import Clip, DiscreteGaussian, scaled
from polyfed.core.tree import Tree
from polyfed.privacy.differential.adaptive_clipping import AdaptiveClipping
from polyfed.training.per_sample import PerSample


@dataclass(frozen=True)
class Mechanism:
    """The rules by which clients and server protect one client, or one row, in a run.

    Attributes:
        unit: `client` or `example`.
        central: whether the server adds the noise.
        clip: the limits of an update, or of the gradient of a row.
        noise_multiplier: standard deviation of the noise as a multiple of `clip.total`.
        protected: for each task, the fields of its reply that the mechanism protects.
        withheld: for each task, the fields of its reply that clients fill with zeros.
        denominators: for each block, the constant by which the server divides the sum of the updates. Empty on a
            device, which does not need them.
        secure: whether noise comes from the operating system's generator. Otherwise it comes from the run's keys.
        clients_clip: whether clients clip their updates. Under adaptive clipping, only the server knows the clip norm.
        adaptive: how the clip norm changes from round to round. None if the clip norm stays the same. Devices
            always have None.
        releases: largest number of protected replies that one client may send in a run, if clients add the
            noise; else None.
    """

    unit: str
    central: bool
    clip: Clip
    noise_multiplier: float
    protected: Mapping[str, tuple[str, ...]]
    withheld: Mapping[str, tuple[str, ...]]
    denominators: Mapping[str, float] = field(default_factory=dict)
    secure: bool = False
    clients_clip: bool = True
    adaptive: AdaptiveClipping | None = None
    releases: int | None = None

    @property
    def update_noise(self) -> float:
        """Noise multiplier of the updates. It exceeds `noise_multiplier` under adaptive clipping."""
        adaptive = self.adaptive
        return self.noise_multiplier if adaptive is None else adaptive.update_noise(self.noise_multiplier)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise of one release."""
        return self.update_noise * self.clip.total

    def grid_share(self, entries: int) -> float:
        """Return one step of the grid in each of `entries` entries, as a norm and as a share of the smallest limit.

        Secure aggregation reveals only a sum, so the server rounds the sum instead of the single updates, and its noise
        must cover this norm, too.
        """
        return DiscreteGaussian(self.deviation).step * math.sqrt(entries) / self.clip.least

    def per_sample(self, task: str) -> PerSample | None:
        """Return how the training of a task protects single rows; None if it does not protect single rows."""
        if self.unit != "example" or task not in self.protected:
            return None
        return PerSample(self.clip, self.deviation, self.secure)

    def covers(self, task: str, field: str) -> bool:
        """Return whether the client protects a field of its reply: it adds noise to the field or fills it with 0."""
        by_noise = not self.central and field in self.protected.get(task, ())
        return by_noise or field in self.withheld.get(task, ())

    def withholds(self, field: str) -> bool:
        """Return whether clients fill this field of a reply with zeros."""
        return any(field in fields for fields in self.withheld.values())

    def of_stack(self, task: str, sent: Mapping[str, Any], reply: Any, keys: Sequence[int]) -> Any:
        """Return the stacked replies with clipped updates, with noise, and with zeros in withheld fields.

        Args:
            task: name of the task.
            sent: the fields of the message that the clients received. Tensors in `sent` may have a leading client axis.
            reply: the replies. Every tensor has a leading client axis.
            keys: for each client, the key of (run, round, client), from which the noise of this client is drawn.
        """
        protected = self.protected.get(task, ()) if self.unit == "client" and self.clients_clip else ()
        withheld = self.withheld.get(task, ())

        def change(name: str, value: Any) -> Any:
            if name in withheld:
                return map_value(value, torch.zeros_like)
            return self._bounded(sent[name], value, keys) if name in protected else value

        return map_fields(reply, change)

    def of_one(self, task: str, sent: Message, reply: Message, key: int) -> Any:
        """Return the reply of one client, with the changes that `of_stack` makes to stacked replies.

        The arguments have the same meaning as in `of_stack`, but the tensors of the reply have no leading client axis.
        """
        if task not in self.protected and task not in self.withheld:
            return reply
        fields = {name: getattr(sent, name) for name in sent.kinds}
        stack = map_tensors(reply, lambda tensor: tensor.detach().unsqueeze(0))
        return map_tensors(self.of_stack(task, fields, stack, [key]), lambda tensor: tensor.squeeze(0))

    def _bounded(self, sent: Tree, trained: Tree, keys: Sequence[int]) -> Tree:
        """Return the parameters (K, ...) with clipped updates, and with noise if the clients add it."""
        updates = {name: stack - sent[name] for name, stack in trained.items()}
        factors = self.clip.factors(updates)
        result: Tree = {}
        for name, update in updates.items():
            bounded = scaled(update, factors[name]) if self.central else self._noisy(update, factors[name], name, keys)
            result[name] = sent[name] + bounded
        return result

    def _noisy(self, updates: Tensor, factors: Tensor, name: str, keys: Sequence[int]) -> Tensor:
        """Return the clipped updates (K, ...) with the noise of each client."""
        noise = DiscreteGaussian(self.deviation)
        whole = zip(noise.whole(updates, factors), keys, strict=True)
        noisy = [noise.released(one, None if self.secure else key, name) for one, key in whole]
        return torch.stack(noisy).to(updates.dtype)
