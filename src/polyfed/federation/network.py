"""Simulated time: how long a round would take over given links and on given devices. The run itself does not wait.

There are two channels. `wireless` simulates the radio cell of the FMML paper (docs/algorithms/pfmml.md). It places
devices uniformly in a disc around the base station. It computes path loss by distance, draws Rayleigh fading for each
device and round, and applies Shannon's formula for the rate. `fixed` gives every client the same rates. Simulated time
works with every algorithm. It needs only the bytes of each message, which the ledger gives, and the work of local
training, which the client datasets count (docs/network.md).

Names end with their unit: `_s` seconds, `_bps` bits per second, `_hz` hertz, `_w` watts, `_m` metres, `_flops`
floating-point operations. In shapes, `K` is the number of clients. All numbers are in double precision.
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
"""Cost of a training step in forward passes: one for the forward pass, two for the backward pass (docs/network.md)."""

LATE = "late"
"""The reason of a dropped reply begins with this word if only the simulated time was the cause."""

Count = Callable[[float, Sequence[float]], None]
"""`count(row_flops, rows)` adds work to the clients: client `i` spent `row_flops` operations on each of `rows[i]`
rows."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The [network] section. The defaults are calibrated on the FMML paper (docs/algorithms/pfmml.md, decision W9).

    Attributes:
        channel: `wireless` computes rates from distance, fading and power; `fixed` uses `rate_up_bps` and
            `rate_down_bps`.
        bandwidth_hz: bandwidth of a device's channel.
        power_up_w: a device's transmit power.
        power_down_w: the base station's transmit power for each device.
        noise_dbm_per_hz: power spectral density of the noise.
        carrier_ghz: carrier frequency f in the path loss 32.4 + 20 log10(f in GHz) + 20 log10(d in m) dB.
        cell_radius_m: radius of the disc in which devices are placed uniformly, at least 1 m from its centre.
        fading: whether the channel has Rayleigh fading. Without fading, the gain equals its mean.
        log_base: base of the logarithm in Shannon's formula. Base 2 gives bits per second.
        rate_up_bps: rate from client to server if `channel` is `fixed`.
        rate_down_bps: rate from server to client if `channel` is `fixed`.
        latency_s: delay of each message in either direction, independent of its size.
        compute_flops_per_s: a device's speed.
        stragglers: share of the devices that compute more slowly. polyfed draws them once for the run.
        straggler_slowdown: factor by which stragglers are slower.
        deadline_s: longest time of a client in a round. The server drops slower clients from the round. None waits for
            all clients.
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
        """Check that every value lies in its declared range."""
        check_ranges("[network]", self)

    def links(self, num_clients: int, seed: int) -> "Links":
        """Draw the distance and the speed of every client from the run's seed."""
        share = 1.0 - keys.uniform(keys.key(seed, "distance"), num_clients).double()
        speed = torch.full_like(share, self.compute_flops_per_s)
        slow = keys.choice(keys.key(seed, "stragglers"), num_clients, round(self.stragglers * num_clients))
        speed[slow] /= self.straggler_slowdown
        return Links(self, seed, (self.cell_radius_m * share.sqrt()).clamp(min=1.0), speed)

    def path_loss_db(self, distance_m: Tensor) -> Tensor:
        """Return the path loss in decibels at these distances."""
        return 32.4 + 20 * math.log10(self.carrier_ghz) + 20 * torch.log10(distance_m)

    def rate_bps(self, gain: Tensor, power_w: float) -> Tensor:
        """Return Shannon's rate over a channel with this amplitude gain."""
        noise_w = self.bandwidth_hz * 10 ** ((self.noise_dbm_per_hz - 30) / 10)
        return self.bandwidth_hz * torch.log1p(power_w * gain.square() / noise_w) / math.log(self.log_base)


@dataclass(frozen=True)
class Rates:
    """The rates of some clients in a round, in bits per second, each of shape (K,)."""

    up_bps: Tensor
    down_bps: Tensor


@dataclass(frozen=True)
class Links:
    """The links and devices of a run's clients.

    Attributes:
        network: the [network] section.
        seed: the run's seed.
        distance_m: distance of each client to the base station, (K,).
        compute_flops_per_s: speed of each client's device, (K,).
    """

    network: Network
    seed: int
    distance_m: Tensor
    compute_flops_per_s: Tensor

    def gains(self, round: int, clients: Tensor | None = None) -> Tensor:
        """Return the amplitude gains of a round: Rayleigh distributed with mean 10^(-path loss / 20).

        Args:
            round: the round, from 1.
            clients: the numbers of the clients, int64 (K,). None stands for all clients, in order.
        """
        places = torch.arange(len(self.distance_m)) if clients is None else clients
        mean = 10 ** (-self.network.path_loss_db(self.distance_m[places]) / 20)
        if not self.network.fading:
            return mean
        u = keys.uniform_at(keys.key(self.seed, "channel", round), places).double()
        return mean / math.sqrt(math.pi / 2) * torch.sqrt(-2 * torch.log1p(-u))

    def rates(self, round: int, clients: Tensor | None = None) -> Rates:
        """Return the rates of a round. Rates are at least one bit per second, so that times stay finite.

        The arguments are those of `gains`.
        """
        net = self.network
        if net.channel == "fixed":
            ones = torch.ones(len(self.distance_m) if clients is None else len(clients), dtype=torch.float64)
            return Rates(net.rate_up_bps * ones, net.rate_down_bps * ones)
        gain = self.gains(round, clients)
        up, down = (net.rate_bps(gain, power) for power in (net.power_up_w, net.power_down_w))
        return Rates(up.clamp(min=1.0), down.clamp(min=1.0))


@dataclass(frozen=True)
class Timetable:
    """The simulated time that each client spent in a round.

    Attributes:
        seconds: request number -> client -> seconds of download, compute and upload, in the order of the requests.
        deadline_s: longest time that the server waits in a round, or None if the server waits for all clients.
    """

    seconds: Mapping[int, Mapping[int, float]]
    deadline_s: float | None = None

    def barriers(self) -> float:
        """Return the duration, in seconds, of a round in which clients wait for each other between requests.

        The server sends each request after all replies to the previous request have arrived.
        """
        return self._limited(sum(max(of.values(), default=0.0) for of in self.seconds.values()))

    def chains(self, waited_for: Iterable[int]) -> float:
        """Return the duration, in seconds, of a round in which clients do not wait for each other between requests.

        Args:
            waited_for: the clients for which the server waits.
        """
        total = self.by_client()
        return self._limited(max((total.get(client, 0.0) for client in waited_for), default=0.0))

    def by_client(self) -> dict[int, float]:
        """Return the seconds of each client, summed over all requests."""
        total: dict[int, float] = {}
        for of in self.seconds.values():
            _add(total, of)
        return total

    def _limited(self, seconds: float) -> float:
        return seconds if self.deadline_s is None else min(seconds, self.deadline_s)


def _add(total: dict[int, float], of: Mapping[int, float]) -> None:
    for client, seconds in of.items():
        total[client] = total.get(client, 0.0) + seconds


@dataclass
class Clock:
    """Measures the simulated time of a run, one round at a time.

    Attributes:
        links: the links and devices of the clients.
        ledger: the run's ledger, which lists every message of the round.
        round: the round that is being timed; 0 during set-up and evaluation, which take no simulated time.
        spent_flops: for each request number and client, the operations that were counted in this round.
        unawaited: for each request number, the clients for which the server did not wait.
    """

    links: Links
    ledger: Ledger
    round: int = 0
    spent_flops: dict[int, dict[int, float]] = field(default_factory=dict)
    unawaited: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start without any request."""
        self.begin(self.round)

    def begin(self, round: int) -> None:
        """Start timing a round, with no work counted yet."""
        self.round, self.spent_flops, self.unawaited = round, {}, {}
        # Requests that no longer change are timed only once. A round of split learning has thousands of requests.
        self._settled: dict[int, dict[int, float]] = {}  # like `Timetable.seconds`
        self._total: dict[int, float] = {}  # the seconds of each client in the settled requests
        self._first = 0  # the position in the ledger of the first entry that may belong to another request

    def finish(self) -> Timetable:
        """Return the times of the round and stop timing. Call it before the round's evaluation."""
        times = self.times()
        self.begin(0)
        return times

    def counter(self, request: int, clients: Sequence[int]) -> Count:
        """Return a function that counts the work of these clients in this request."""
        spent = self.spent_flops.setdefault(request, {})

        def count(row_flops: float, rows: Sequence[float]) -> None:
            for client, number in zip(clients, rows, strict=True):
                spent[client] = spent.get(client, 0.0) + row_flops * number

        return count

    def forget(self, request: int, clients: Iterable[int]) -> None:
        """Set the counted work of these clients in this request to zero. The engine will repeat the request."""
        for client in clients:
            self.spent_flops.get(request, {}).pop(client, None)

    def times(self) -> Timetable:
        """Return the times of the round so far, from the entries that the ledger still holds."""
        seconds = {**self._settled, **self._unsettled()}
        return Timetable(dict(sorted(seconds.items())), self.links.network.deadline_s)

    def _by_client(self, request: int) -> dict[int, float]:
        """Return the seconds of each client so far. This is the newest request, so earlier requests become settled."""
        seconds = self._unsettled()
        for number in sorted(number for number in seconds if number < request):
            self._settled[number] = seconds.pop(number)
            _add(self._total, self._settled[number])
        entries, place = self.ledger.entries, self._first
        while place < len(entries) and (entries[place].round, entries[place].request) != (self.round, request):
            place += 1
        self._first = place
        total = dict(self._total)
        for _, of in sorted(seconds.items()):
            _add(total, of)
        return total

    def _unsettled(self) -> dict[int, dict[int, float]]:
        """Return the seconds of each client in each request that is not settled, like `Timetable.seconds`."""
        entries = [entry for entry in self.ledger.entries[self._first :] if entry.round == self.round]
        # only of the clients of the round: lists of a million numbers would take longer than the round
        asked = {client for entry in entries for client in entry.clients}
        spent = [of for request, of in self.spent_flops.items() if request not in self._settled]
        known = sorted(asked.union(*spent))
        places = torch.tensor(known, dtype=torch.int64)
        rates = self.links.rates(self.round, places)
        up, down, speed = (
            dict(zip(known, numbers.tolist(), strict=True))
            for numbers in (rates.up_bps, rates.down_bps, self.links.compute_flops_per_s[places])
        )
        seconds: dict[int, dict[int, float]] = {}
        for entry in entries:
            size_bits = 8 * entry.bytes_each
            rate = down if entry.destination == TO_CLIENT else up
            of = seconds.setdefault(entry.request, {})
            for client in entry.clients:
                cost = size_bits / rate[client] + self.links.network.latency_s
                of[client] = of.get(client, 0.0) + cost
        for request, of in seconds.items():
            for client, flops in self.spent_flops.get(request, {}).items():
                of[client] = of.get(client, 0.0) + flops / speed[client]
        for request, clients in self.unawaited.items():
            if request not in self._settled:
                seconds[request] = {c: s for c, s in seconds.get(request, {}).items() if c not in clients}
        return seconds

    def closed_before(self, request: int, clients: Sequence[int], enough: int) -> dict[int, str]:
        """Close a request when `enough` of the clients have replied, in the order of their simulated times.

        The server does not wait for the slower clients. After this call, `times` no longer counts the time that these
        clients need for this request.

        Args:
            request: the number of the request.
            clients: the clients that reply.
            enough: how many replies close the request. At equal times, the client with the lower number comes first.

        Returns:
            The clients whose replies come after the request has closed, each with the reason.
        """
        if self.round == 0 or len(clients) <= enough:
            return {}
        total = self._by_client(request)
        order = sorted(clients, key=lambda client: (total.get(client, 0.0), client))
        last = total.get(order[enough - 1], 0.0)
        slower = {client for client, seconds in total.items() if seconds > last}
        self.unawaited[request] = slower | set(order[enough:])
        why = f"{LATE}: the request was closed when {enough} clients had replied, after {last:.3g} s simulated"
        return dict.fromkeys(order[enough:], why)

    def late(self, request: int, clients: Iterable[int]) -> dict[int, str]:
        """Return which of these clients have exceeded the round's deadline, each with the reason.

        Args:
            request: the number of the newest request.
            clients: the clients that replied to it.
        """
        deadline = self.links.network.deadline_s
        if deadline is None or self.round == 0:
            return {}
        total = self._by_client(request)
        return {
            client: f"{LATE}: {total[client]:.3g} s simulated, [network] deadline_s = {deadline:g}"
            for client in clients
            if total.get(client, 0.0) > deadline
        }
