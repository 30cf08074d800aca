"""Links of real devices: the rates that the server measures, for a deployment with `[network] channel = "measured"`.

The transport measures bytes and seconds by the server's clock (`polyfed.transport.carried`), and this module estimates
from them. A device tells nothing about its link or its speed. It can send slowly, or finish early, and thereby change
its own numbers; those of the others stay.

All estimates of a round are those at its begin. A run that is killed and resumed has them in its checkpoint, so that
it decides the same although the transfers take another time.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.federation.links.network import Network, Rates

WINDOW = 5
"""Number of the newest measurements whose median is the estimate."""

LEAST_BYTES = 4096
"""A transfer of fewer bytes tells more of the delay than of the rate, so that it is not counted (inferred)."""

SHORTEST_S = 1e-3
"""No transfer counts as shorter: this is about what the server can measure (inferred)."""

UP, DOWN, WORK = "up", "down", "work."
"""The names of measurements: of both directions, and, before a task's name, of its computation."""


@dataclass
class MeasuredLinks:
    """The newest measurements of every client.

    Attributes:
        num_clients: K, the number of clients.
        network: the [network] section, whose rates are the measurement before the first one.
        newest: name -> client -> its newest measurements, oldest first: bits per second, or seconds of work.
        round: the estimates of this round, see `begin`.
    """

    num_clients: int
    network: Network
    newest: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    round: dict[str, dict[int, float]] = field(default_factory=dict)

    def learn(
        self,
        client: int,
        *,
        up: tuple[int, float] = (0, 0.0),
        down: tuple[int, float] = (0, 0.0),
        work: tuple[str, float] = ("", 0.0),
    ) -> None:
        """Add what was measured of a request.

        Args:
            client: the client that was asked.
            up: bytes and seconds of its reply.
            down: bytes and seconds of the request.
            work: name of the task, and the seconds that passed between the two.
        """
        for name, (count, seconds) in ((UP, up), (DOWN, down)):
            if count >= LEAST_BYTES:
                self._add(name, client, 8 * count / max(seconds, SHORTEST_S))
        if work[1] > 0:
            self._add(WORK + work[0], client, work[1])

    def _add(self, name: str, client: int, value: float) -> None:
        kept = self.newest.setdefault(name, {})
        first = {UP: [self.network.rate_up_bps], DOWN: [self.network.rate_down_bps]}.get(name, [])
        kept[client] = [*kept.get(client, first), value][-WINDOW:]

    def begin(self) -> None:
        """Take the estimates for a round: what is measured in it counts in the next one."""
        self.round = {
            name: {client: _middle(values) for client, values in of.items()} for name, of in self.newest.items()
        }

    def rates(self) -> Rates:
        """Return the rates of all clients in this round."""
        up, down = self.network.rate_up_bps, self.network.rate_down_bps
        return Rates(self._all(UP, up), self._all(DOWN, down))

    def work_s(self, task: str) -> Tensor:
        """Return the seconds that each client takes for a task, (K,); 0 for a client that has not been measured."""
        return self._all(WORK + task, 0.0)

    def _all(self, name: str, otherwise: float) -> Tensor:
        known = self.round.get(name, {})
        return torch.tensor([known.get(client, otherwise) for client in range(self.num_clients)], dtype=torch.float64)

    def facts(self) -> dict[str, dict[str, float]]:
        """Return the estimates of this round for `rounds.jsonl`; what is not in it is that of the section [network]."""
        return {name: {str(client): value for client, value in sorted(of.items())} for name, of in self.round.items()}

    def sentences(self) -> Iterator[str]:
        """Yield sentences about what decides, for `polyfed check`."""
        net = self.network
        yield (
            f"rates: of each device the median of the newest {WINDOW} transfers of {LEAST_BYTES:,} bytes or more, "
            "measured by the server's clock up to the begin of the round"
        )
        yield (
            f"before the first one: {net.rate_up_bps:g} bit/s up (rate_up_bps) and {net.rate_down_bps:g} bit/s down "
            "(rate_down_bps), which stay among the measurements until enough are newer"
        )
        yield "computation: the seconds between request and reply of earlier rounds, by the server's clock; 0 before"
        yield "rounds.jsonl has the rates by which each round decided (links)"

    def content(self) -> dict[str, Any]:
        """Return the measurements for a checkpoint."""
        return {name: {client: list(values) for client, values in of.items()} for name, of in self.newest.items()}

    def restore(self, content: Mapping[str, Mapping[int, list[float]]]) -> None:
        """Go on with the measurements of a checkpoint."""
        self.newest = {name: {client: list(v) for client, v in of.items()} for name, of in content.items()}


def is_content(value: Any) -> bool:
    """Whether a value of a checkpoint has the form of `MeasuredLinks.content`."""
    number: Callable[[Any], bool] = lambda one: type(one) is float and math.isfinite(one) and one > 0  # noqa: E731
    return isinstance(value, dict) and all(
        isinstance(name, str)
        and isinstance(of, dict)
        and all(type(c) is int and isinstance(v, list) and v and all(map(number, v)) for c, v in of.items())
        for name, of in value.items()
    )


def _middle(values: list[float]) -> float:
    """Return the median, or, of two in the middle, the geometric mean: rates differ by factors."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low == high else math.sqrt(low * high)
