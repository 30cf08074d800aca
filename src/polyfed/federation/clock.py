"""Simulated time: how long a round would take over given links and on given devices. The run itself does not wait.

Simulated time works with every algorithm. It needs only the bytes of each message, which the ledger gives, and the work
of local training, which the client datasets count (docs/network.md). `network.py` describes links and devices. Names
end with their unit, as in `network.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from polyfed.federation.links.network import Links
from polyfed.privacy.egress.ledger import TO_CLIENT, Ledger

LATE = "late"
"""The reason of a dropped reply begins with this word if only the simulated time was the cause."""

Count = Callable[[float, Sequence[float]], None]
"""`count(row_flops, rows)` adds work to the clients: client `i` spent `row_flops` operations on each of `rows[i]`
rows."""


@dataclass(frozen=True)
class Timetable:
    """The simulated time that each client spent in a round.

    Attributes:
        seconds: request number -> client -> seconds of download, compute and upload, in the order of the requests.
        deadline_s: longest time that the server waits for one client in a round, summed over the requests. None waits
            for all clients.
    """

    seconds: Mapping[int, Mapping[int, float]]
    deadline_s: float | None = None

    def barriers(self) -> float:
        """Return the duration, in seconds, of a round in which clients wait for each other between requests.

        The server sends each request after all replies to the previous request have arrived. The deadline limits the
        time of each client and not the round. For example, a round in which the clients train in turn can take longer
        than the deadline, although no client is late.
        """
        total, spent = 0.0, dict[int, float]()
        for of in self.seconds.values():
            total += max((self._wait(spent.get(client, 0.0), seconds) for client, seconds in of.items()), default=0.0)
            _add(spent, of)
        return total

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

    def _wait(self, before: float, seconds: float) -> float:
        """Return how long the server waits for a client that spent `before` seconds and now needs `seconds` more."""
        return seconds if self.deadline_s is None else min(seconds, max(self.deadline_s - before, 0.0))

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
        """Return the seconds of each client so far, and settle all requests before `request`, the newest one."""
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
