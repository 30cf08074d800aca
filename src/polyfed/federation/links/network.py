"""The simulated links and devices of the clients: the [network] section, and the rates in each round.

There are three channels. `wireless` simulates the radio cell of the FMML paper (docs/algorithms/pfmml.md). It places
devices uniformly in a disc around the base station. It computes path loss by distance, draws Rayleigh fading for each
device and round, and applies Shannon's formula for the rate. `fixed` gives every client the same rates. `measured`
simulates nothing: the server of a deployment measures the rates of its devices (`measured.py`).

Names end with their unit: `_s` seconds, `_bps` bits per second, `_hz` hertz, `_w` watts, `_m` metres, `_flops`
floating-point operations. In shapes, `K` is the number of clients. All numbers are in double precision.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.option_checks import (
    ABOVE_ONE,
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    between,
    check_ranges,
)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The [network] section. The defaults are calibrated on the FMML paper (docs/algorithms/pfmml.md, decision W9).

    Attributes:
        channel: `wireless` computes rates from distance, fading and power; `fixed` uses `rate_up_bps` and
            `rate_down_bps`; `measured` (deployments only) takes what the server measures, by its own clock, of the
            messages that it carries.
        bandwidth_hz: bandwidth of a device's channel.
        power_up_w: a device's transmit power.
        power_down_w: the base station's transmit power for each device.
        noise_dbm_per_hz: power spectral density of the noise.
        carrier_ghz: carrier frequency, for the path loss (docs/network.md).
        cell_radius_m: radius of the disc in which devices are placed uniformly.
        fading: whether the channel has Rayleigh fading; else the gain equals its mean.
        log_base: base of the logarithm in Shannon's formula; 2 for bits per second.
        rate_up_bps: rate from client to server with a `fixed` channel; with a `measured` one, that of a device of which
            nothing is known yet.
        rate_down_bps: the same from server to client.
        latency_s: delay of each message in either direction.
        compute_flops_per_s: a device's speed.
        stragglers: share of the devices that compute more slowly.
        straggler_slowdown: factor by which stragglers are slower.
        deadline_s: longest time of a client in a round, after which the server drops it.
    """

    channel: Literal["wireless", "fixed", "measured"] = "wireless"
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

    @property
    def idle(self) -> dict[str, str]:
        """The options that have no effect, each with the setting that causes this."""
        radio = ("bandwidth_hz", "power_up_w", "power_down_w", "noise_dbm_per_hz", "carrier_ghz", "cell_radius_m")
        simulated = ("latency_s", "compute_flops_per_s", "stragglers", "straggler_slowdown")
        unread = {
            "wireless": ("rate_up_bps", "rate_down_bps"),
            "fixed": (*radio, "fading", "log_base"),
            "measured": (*radio, "fading", "log_base", *simulated),
        }
        result = dict.fromkeys(unread[self.channel], f"channel = '{self.channel}'")
        return result if self.stragglers else result | {"straggler_slowdown": "stragglers = 0"}

    @property
    def measured(self) -> bool:
        """Whether the server measures the rates of real devices."""
        return self.channel == "measured"

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
