"""Shapley values: the axioms, the definition over all orders, and samples inside their stated error."""

import itertools
import math

import numpy as np
import pytest

from polyfed.evaluation.shapley import shapley


def game(n: int, seed: int = 0, **fixed: float):  # type: ignore[no-untyped-def]
    """A random game, in which coalitions do not simply add up."""
    values: dict[frozenset[int], float] = {frozenset(): 0.5}

    def worth(coalition: frozenset[int]) -> float:
        if coalition not in values:
            values[coalition] = float(np.random.default_rng([seed, *sorted(coalition)]).normal())
        return values[coalition]

    return worth


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_exact_values_are_the_mean_gain_over_all_orders(n: int) -> None:
    worth, players = game(n), list(range(n))
    gains = dict.fromkeys(players, 0.0)
    for order in itertools.permutations(players):
        for place, player in enumerate(order):
            gains[player] += worth(frozenset(order[: place + 1])) - worth(frozenset(order[:place]))
    found = shapley(players, worth, most=6)
    assert found.exact
    for player in players:
        assert found.values[player] == pytest.approx(gains[player] / math.factorial(n), abs=1e-12)


@pytest.mark.parametrize("most", [0, 9])
def test_the_axioms_hold_for_exact_and_for_sampled_values(most: int) -> None:
    base, players = game(6), list(range(6))

    def worth(coalition: frozenset[int]) -> float:
        """Player 5 adds nothing; players 0 and 1 are interchangeable."""
        alike = (
            frozenset({-1})
            if len(coalition & {0, 1}) == 1
            else frozenset({-1, -2})
            if {0, 1} <= coalition
            else frozenset()
        )
        return base(frozenset(k + 10 for k in (coalition - {0, 1, 5}) | alike))

    found = shapley(players, worth, most=most, orders=400)
    assert found.exact == (most == 9)
    total = worth(frozenset(players)) - worth(frozenset())
    assert math.fsum(found.values.values()) == pytest.approx(total, abs=1e-9), "efficiency"
    assert found.values[5] == 0.0, "null player"
    assert found.errors[5] == 0.0
    room = found.errors[0] + found.errors[1] + 1e-12
    assert abs(found.values[0] - found.values[1]) <= room, "symmetry"
    other = game(6, seed=9)
    both = shapley(players, lambda c: worth(c) + 2 * other(c), most=most, orders=400)
    alone = shapley(players, other, most=most, orders=400)
    for player in players:
        assert both.values[player] == pytest.approx(found.values[player] + 2 * alone.values[player], abs=1e-9), (
            "additivity"
        )


def test_samples_lie_inside_their_stated_error_about_as_often_as_it_says() -> None:
    players, hits, count = list(range(7)), 0, 0
    for seed in range(30):
        worth = game(7, seed)
        exact, sampled = shapley(players, worth, most=7), shapley(players, worth, most=6, orders=150, seed=seed)
        assert not sampled.exact
        for player in players:
            hits += abs(exact.values[player] - sampled.values[player]) <= sampled.errors[player]
            count += 1
    assert hits / count >= 0.9


@pytest.mark.parametrize("most", [0, 9])
def test_what_rows_add_to_a_value_is_the_value_of_what_they_add(most: int) -> None:
    """The worth is a sum over rows, so the influences of a player's value sum to it, exact and over the same orders."""
    draw, cache = np.random.default_rng(0), {}

    def rows(coalition: frozenset[int]) -> np.ndarray:
        return cache.setdefault(coalition, draw.normal(size=7))

    found = shapley(range(5), lambda coalition: float(rows(coalition).sum()), most, orders=30, rows=rows)
    for player in range(5):
        assert found.influences[player].sum() == pytest.approx(found.values[player])
