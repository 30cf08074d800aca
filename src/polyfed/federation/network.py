"""Network: how long a round would take over given links and on given devices. Time is simulated, never waited for.

Two channels: `wireless` is the cell of the personalised multimodal paper (algorithms.md 4.6): devices uniform in a
disc around the base station, path loss by distance, one Rayleigh draw per device and round, Shannon's rate; `fixed`
gives every client the same rates. Any algorithm can be timed: what crossed is read off the ledger, work is counted as
the views run.

Units stand in the names: `_s` seconds, `_bps` bits a second, `_hz`, `_w` watts, `_m` metres, `_flops`
floating-point operations. Shape letters: `K` clients. Numbers are double precision.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.schema import ABOVE_ONE, AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, PROBABILITY, between, check_ranges
from polyfed.privacy.ledger import TO_CLIENT, Ledger

TRAINING_PASSES = 3
"""A training step costs about three forward passes: one forward, two backward (algorithms.md 4.6)."""

Count = Callable[[float, Sequence[float]], None]
"""`count(row_flops, rows)`: each client did so many operations for each of so many rows."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The [network] section. Defaults are the calibrated values of algorithms.md 4.5, W9.

    Attributes:
        channel: `wireless` (rates from distance, fading and power) or `fixed` (`rate_up_bps`, `rate_down_bps`).
        bandwidth_hz: of a device's channel.
        power_up_w: a device's transmit power.
        power_down_w: the base station's transmit power per device.
        noise_dbm_per_hz: spectral density of the noise.
        carrier_ghz: carrier frequency in the path loss 32.4 + 20 log10(f in GHz) + 20 log10(d in m) dB.
        cell_radius_m: devices are uniform in a disc of this radius, never nearer than 1 m.
        fading: Rayleigh fading; without it the channel's gain is its mean.
        log_base: of the logarithm in Shannon's rate; 2 gives bits (W7).
        rate_up_bps: of `fixed`, device to server.
        rate_down_bps: of `fixed`, server to device.
        latency_s: delay of a message in either direction, however small.
        compute_flops_per_s: a device's speed.
        stragglers: share of devices, drawn once, that compute slower.
        straggler_slowdown: how many times slower.
        deadline_s: a client whose own time in a round exceeds this is dropped from it; None waits for everybody.
    """

    channel: Literal["wireless", "fixed"] = "wireless"
    bandwidth_hz: Annotated[float, POSITIVE] = 1e6
    power_up_w: Annotated[float, POSITIVE] = 0.1
    power_down_w: Annotated[float, POSITIVE] = 0.1
    noise_dbm_per_hz: Annotated[float, between(-300, 100)] = -174.0
    carrier_ghz: Annotated[float, POSITIVE] = 2.6
    cell_radius_m: Annotated[float, POSITIVE] = 50.0
    fading: bool = True
    log_base: Annotated[float, ABOVE_ONE] = 2.0
    rate_up_bps: Annotated[float, POSITIVE] = 20e6
    rate_down_bps: Annotated[float, POSITIVE] = 20e6
    latency_s: Annotated[float, NOT_NEGATIVE] = 0.0
    compute_flops_per_s: Annotated[float, POSITIVE] = 1.8e11
    stragglers: Annotated[float, PROBABILITY] = 0.0
    straggler_slowdown: Annotated[float, AT_LEAST_ONE] = 10.0
    deadline_s: Annotated[float | None, POSITIVE] = None

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        check_ranges("[network]", self)

    def links(self, num_clients: int, seed: int) -> "Links":
        """Place the clients of a run."""
        share = 1.0 - keys.uniform(keys.key(seed, "distance"), num_clients).double()
        speed = torch.full_like(share, self.compute_flops_per_s)
        slow = keys.choice(keys.key(seed, "stragglers"), num_clients, round(self.stragglers * num_clients))
        speed[slow] /= self.straggler_slowdown
        return Links(self, seed, (self.cell_radius_m * share.sqrt()).clamp(min=1.0), speed)

    def path_loss_db(self, distance_m: Tensor) -> Tensor:
        """Path loss at these distances, decibel."""
        return 32.4 + 20 * math.log10(self.carrier_ghz) + 20 * torch.log10(distance_m)

    def rate_bps(self, gain: Tensor, power_w: float) -> Tensor:
        """Shannon's rate over a channel of this amplitude gain."""
        noise_w = self.bandwidth_hz * 10 ** ((self.noise_dbm_per_hz - 30) / 10)
        return self.bandwidth_hz * torch.log1p(power_w * gain.square() / noise_w) / math.log(self.log_base)


@dataclass(frozen=True)
class Rates:
    """Rates of a round, bits a second, (K,) each."""

    up_bps: Tensor
    down_bps: Tensor


@dataclass(frozen=True)
class Links:
    """The clients of a run on a network.

    Attributes:
        seed: of the run.
        distance_m: to the base station, (K,).
        compute_flops_per_s: (K,).
    """

    network: Network
    seed: int
    distance_m: Tensor
    compute_flops_per_s: Tensor

    def gains(self, round: int) -> Tensor:
        """Amplitude gain of every client's channel in a round, (K,): Rayleigh with mean 10^(-path loss / 20)."""
        mean = 10 ** (-self.network.path_loss_db(self.distance_m) / 20)
        if not self.network.fading:
            return mean
        u = keys.uniform(keys.key(self.seed, "channel", round), len(mean)).double()
        return mean / math.sqrt(math.pi / 2) * torch.sqrt(-2 * torch.log1p(-u))

    def rates(self, round: int) -> Rates:
        """Rates of a round (1-based); a channel without any gain gets one bit a second, so that times stay finite."""
        net = self.network
        if net.channel == "fixed":
            ones = torch.ones_like(self.distance_m)
            return Rates(net.rate_up_bps * ones, net.rate_down_bps * ones)
        gain = self.gains(round)
        up, down = (net.rate_bps(gain, power) for power in (net.power_up_w, net.power_down_w))
        return Rates(up.clamp(min=1.0), down.clamp(min=1.0))


@dataclass(frozen=True)
class Timetable:
    """What a round cost each client.

    Attributes:
        seconds: ask -> client -> simulated seconds of download, compute and upload, in order of asks.
        deadline_s: the server waits no longer than this.
    """

    seconds: Mapping[int, Mapping[int, float]]
    deadline_s: float | None = None

    def barriers(self) -> float:
        """Seconds of a round in which every ask waits for its slowest client before the next one starts."""
        return self._limited(sum(max(of.values(), default=0.0) for of in self.seconds.values()))

    def chains(self, waited_for: Iterable[int]) -> float:
        """Seconds of a round in which each client goes through its asks on its own and the server waits for some."""
        total = self.by_client()
        return self._limited(max((total.get(client, 0.0) for client in waited_for), default=0.0))

    def by_client(self) -> dict[int, float]:
        """Seconds of each client over all asks."""
        total: dict[int, float] = {}
        for of in self.seconds.values():
            for client, seconds in of.items():
                total[client] = total.get(client, 0.0) + seconds
        return total

    def _limited(self, seconds: float) -> float:
        return seconds if self.deadline_s is None else min(seconds, self.deadline_s)


@dataclass
class Clock:
    """Simulated time of a run.

    Attributes:
        links: clients and their links.
        ledger: where every crossing of the round is booked.
        round: the round that is timed; 0 while nothing is (set-up, evaluation).
        spent_flops: ask -> client -> operations counted in this round.
    """

    links: Links
    ledger: Ledger
    round: int = 0
    spent_flops: dict[int, dict[int, float]] = field(default_factory=dict)

    def begin(self, round: int) -> None:
        """Enter a round: nothing has been spent."""
        self.round, self.spent_flops = round, {}

    def finish(self) -> Timetable:
        """Leave the round, before its evaluation, which takes no simulated time: what it cost."""
        times = self.times()
        self.begin(0)
        return times

    def counter(self, request: int, clients: Sequence[int]) -> Count:
        """Takes note of the work of these clients in this ask."""
        spent = self.spent_flops.setdefault(request, {})

        def count(row_flops: float, rows: Sequence[float]) -> None:
            for client, number in zip(clients, rows, strict=True):
                spent[client] = spent.get(client, 0.0) + row_flops * number

        return count

    def forget(self, request: int, clients: Iterable[int]) -> None:
        """Take back the work of these clients in this ask: it came to nothing and is done again."""
        for client in clients:
            self.spent_flops.get(request, {}).pop(client, None)

    def times(self) -> Timetable:
        """The round so far: asks whose crossings are still in the ledger."""
        rates, speed = self.links.rates(self.round), self.links.compute_flops_per_s.tolist()
        up, down = rates.up_bps.tolist(), rates.down_bps.tolist()
        seconds: dict[int, dict[int, float]] = {}
        for entry in self.ledger.entries:
            if entry.round != self.round:
                continue
            size_bits = 8 * entry.bytes_each
            rate = down if entry.destination == TO_CLIENT else up
            of = seconds.setdefault(entry.request, {})
            for client in entry.clients:
                cost = size_bits / rate[client] + self.links.network.latency_s
                of[client] = of.get(client, 0.0) + cost
        for request, of in seconds.items():
            for client, flops in self.spent_flops.get(request, {}).items():
                of[client] = of.get(client, 0.0) + flops / speed[client]
        return Timetable(dict(sorted(seconds.items())), self.links.network.deadline_s)

    def late(self, clients: Iterable[int]) -> dict[int, str]:
        """Of these clients, those that have run past the round's deadline, with the reason."""
        deadline = self.links.network.deadline_s
        if deadline is None or self.round == 0:
            return {}
        total = self.times().by_client()
        return {
            client: f"late: {total[client]:.3g} s simulated, [network] deadline_s = {deadline:g}"
            for client in clients
            if total.get(client, 0.0) > deadline
        }
