"""Shapley values of a game: what each player adds to the value of a coalition, on average over all orders.

Source: Shapley, "A value for n-person games", 1953. Sampling over orders: Castro, Gómez, Tejada, Computers & Operations
Research 36 (2009).
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from polyfed.objective.report import Z

P = TypeVar("P", bound=Hashable)


@dataclass(frozen=True)
class Shares(Generic[P]):
    """The Shapley values of a game.

    Attributes:
        values: player -> its value. They sum to the value of all players minus that of none.
        errors: player -> half the width of the 95 % interval of a sampled value; 0 if the values are exact.
        exact: whether the values are exact.
        influences: player -> what each row adds to its value, (n,), if the rows of the worth are known.
    """

    values: dict[P, float]
    errors: dict[P, float]
    exact: bool
    influences: dict[P, NDArray[np.float64]] = field(default_factory=dict)


def shapley(
    players: Sequence[P],
    worth: Callable[[frozenset[P]], float],
    most: int,
    orders: int = 200,
    seed: int = 0,
    rows: Callable[[frozenset[P]], NDArray[np.float64]] | None = None,
) -> Shares[P]:
    """Return the Shapley values of a game.

    Args:
        worth: the value of a coalition.
        most: the largest number of players whose values are computed exactly, from all coalitions.
        orders: the number of random orders for more players.
        seed: the seed of the orders.
        rows: what each row adds to the worth of a coalition, (n,); None if the worth has no rows.
    """
    known: dict[frozenset[P], float] = {}

    def value(coalition: frozenset[P]) -> float:
        if coalition not in known:
            known[coalition] = worth(coalition)
        return known[coalition]

    none = np.zeros(0)
    of_rows = rows or (lambda _: none)
    if len(players) <= most:
        return Shares(
            {player: _exact(players, player, value) for player in players},
            dict.fromkeys(players, 0.0),
            True,
            {} if rows is None else {player: _exact_rows(players, player, rows) for player in players},
        )
    parts = [np.zeros_like(of_rows(frozenset())) for _ in players]
    draw = np.random.default_rng(seed)
    gains = np.zeros((orders, len(players)))
    for row in gains:
        coalition: frozenset[P] = frozenset()
        before, seen = value(coalition), of_rows(coalition)
        for place in draw.permutation(len(players)):
            coalition |= {players[place]}
            after = value(coalition)
            row[place], before = after - before, after
            now = of_rows(coalition)
            parts[place] += (now - seen) / orders
            seen = now
    means, spread = gains.mean(0), gains.std(0, ddof=1) if orders > 1 else np.full(len(players), math.inf)
    errors = Z * spread / math.sqrt(orders)
    return Shares(
        dict(zip(players, means.tolist(), strict=True)),
        dict(zip(players, errors.tolist(), strict=True)),
        False,
        {} if rows is None else dict(zip(players, parts, strict=True)),
    )


def _exact_rows(
    players: Sequence[P], player: P, rows: Callable[[frozenset[P]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    result = np.zeros_like(rows(frozenset()))
    for coalition, weight in coalitions(players, player):
        result = result + weight * (rows(coalition | {player}) - rows(coalition))
    return result


def _exact(players: Sequence[P], player: P, value: Callable[[frozenset[P]], float]) -> float:
    return math.fsum(
        weight * (value(coalition | {player}) - value(coalition)) for coalition, weight in coalitions(players, player)
    )


def coalitions(players: Sequence[P], player: P) -> Iterator[tuple[frozenset[P], float]]:
    """Yield every coalition of the other players, and the weight of what the player adds to it in its Shapley value."""
    others = [other for other in players if other != player]
    for mask in range(1 << len(others)):
        coalition = frozenset(other for place, other in enumerate(others) if mask >> place & 1)
        yield coalition, 1 / (len(players) * math.comb(len(others), len(coalition)))
