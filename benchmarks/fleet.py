"""What a federation of many devices needs of its server, extended from measured points.

`python benchmarks/fleet.py` prints the table of docs/results/fleet.md. Change `COST` for another machine: `python
benchmarks/transport.py fleet` measures it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What one device, request or round costs the server, and what it needs without devices."""

    server_mb: float = 49.0
    device_mb: float = 0.545
    idle_ms_a_minute: float = 183.0
    device_idle_ms_a_minute: float = 2.18
    login_ms: float = 7.6
    request_ms: float = 4.7
    answer_ms: float = 6.5
    key_us: float = 18.0
    server_ledger_kb: float = 5.0
    device_ledger_kb: float = 5.5
    files: int = 13


COST = Cost()
"""From 3 and 200 devices, and for the ledgers from 20 rounds of three devices, 2026-11-28; `answer_ms`, until all have
answered, from 200 devices, 2026-11-27."""

ROUNDS, SMALL, LARGE, GIGABIT = 1000, 36e3, 100e6, 125e6
"""Rounds a month, sizes in bytes of the two models, and the bytes a second of a link of 1 Gbit/s."""

Rule = Callable[[int, int, Cost], float]

ROWS: dict[str, tuple[str, Rule]] = {
    "memory of `polyfed server`": ("B", lambda n, k, c: 1e6 * (c.server_mb + c.device_mb * n)),
    "its processor time while nobody asks, cores": (
        "",
        lambda n, k, c: (c.idle_ms_a_minute + c.device_idle_ms_a_minute * n) / 60e3,
    ),
    "its processor time until all have logged in": ("s", lambda n, k, c: c.login_ms / 1e3 * n),
    "its processor time for one request": ("s", lambda n, k, c: c.request_ms / 1e3 * k),
    "one request until all have answered, without their work": ("s", lambda n, k, c: c.answer_ms / 1e3 * k),
    "its processor time for keys until all have joined": ("s", lambda n, k, c: c.key_us / 1e6 * n * n),
    "open files": ("", lambda n, k, c: c.files + n),
    "files of keys": ("", lambda n, k, c: n),
    "36 kB: bytes of a round": ("B", lambda n, k, c: 2 * SMALL * k),
    "100 MB: bytes of a round": ("B", lambda n, k, c: 2 * LARGE * k),
    "100 MB: a round's bytes at 1 Gbit/s": ("s", lambda n, k, c: 2 * LARGE * k / GIGABIT),
    "100 MB: disk for the replies of a round": ("B", lambda n, k, c: LARGE * (k + 1)),
    "ledgers at the server, a month": ("B", lambda n, k, c: 1e3 * c.server_ledger_kb * k * ROUNDS),
    "ledgers at a device, a month": ("B", lambda n, k, c: 1e3 * c.device_ledger_kb * ROUNDS * k / n),
}
"""What is needed: its unit, and the rule from the devices, those asked in a round, and the costs."""

FLEETS = ((10, 10), (1000, 1000), (100_000, 100_000), (100_000, 1000))
"""Devices, and how many of them a round asks."""


def shown(value: float, unit: str) -> str:
    """Return a number with two significant digits and its unit."""
    if unit == "s" and value >= 3600:
        return f"{rounded(value / 3600)} h"
    sizes = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")] if unit == "B" else [(1.0, unit)]
    size, name = next((one for one in sizes if value >= one[0]), sizes[-1])
    return f"{rounded(value / size)} {name}".strip()


def rounded(value: float) -> str:
    """Return a number with two significant digits, and whole ones of more digits as they are."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{float(f'{value:.2g}'):g}"


def table(fleets: Sequence[tuple[int, int]] = FLEETS, cost: Cost = COST) -> str:
    """Return the table in Markdown."""
    heads = [f"{n:,}" + (f", {k:,} asked" if k < n else "") for n, k in fleets]
    lines = ["| devices | " + " | ".join(heads) + " |", "|---" + "|---:" * len(fleets) + "|"]
    for name, (unit, rule) in ROWS.items():
        lines.append(f"| {name} | " + " | ".join(shown(rule(n, k, cost), unit) for n, k in fleets) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
