"""The accountant: the epsilon of a number of rounds, and the noise for an epsilon, from the library dp-accounting.

This module only describes a run to the library. It contains no formula for epsilon.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from polyfed.core.errors import RecipeError

STEP = 1e-4
"""The accountant rounds each noise multiplier that it finds up to a multiple of this number, so that a recipe can state
the same value."""


@dataclass(frozen=True)
class Accounting:
    """The facts about a run that the accountant needs.

    Attributes:
        accountant: `rdp` or `pld`.
        delta: delta.
        uses: how often one round uses the data of one protected unit (client or row). Each use is a Gaussian mechanism.
        swing: the sensitivity of one use, in clip norms. The mechanism of a use adds noise to a sum over all units. The
            sensitivity is the largest difference between the sums of two neighbouring data sets, which differ only in
            the data of one unit. If the second data set lacks the data of this unit, the sensitivity is 1, because the
            unit then adds zero to the sum. If the second data set has other data for this unit, the sensitivity is 2.
        cohort: (size of the cohort, number of clients) if the cohort is drawn in secret, otherwise None.
    """

    accountant: str
    delta: float
    uses: int = 1
    swing: float = 1.0
    cohort: tuple[int, int] | None = None

    def epsilon(self, noise_multiplier: float, rounds: int) -> float:
        """Return the epsilon of a number of rounds. The epsilon of 0 rounds is 0.

        Args:
            noise_multiplier: standard deviation of the noise as a multiple of the clip norm.
            rounds: number of rounds.
        """
        return _epsilon(self, noise_multiplier, rounds) if rounds * self.uses else 0.0

    def noise_multiplier(self, epsilon: float, rounds: int) -> float:
        """Return the smallest noise multiplier for which all rounds together spend at most this epsilon.

        The result is rounded up to a multiple of `STEP`.
        """
        return _noise_multiplier(self, epsilon, max(rounds * self.uses, 1))

    def rounds(self, noise_multiplier: float, epsilon: float, most: int) -> int:
        """Return the largest number of rounds, at most `most`, that spend at most this epsilon."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.epsilon(noise_multiplier, middle) <= epsilon else (low, middle - 1)
        return low


def epsilon_of_all(uses: Mapping[float, int], delta: float) -> float:
    """Return the epsilon of Gaussian mechanisms with different noise, counted by Renyi differential privacy.

    Args:
        uses: noise multiplier -> number of mechanisms with this noise, which may be 0. The noise multiplier is the
            standard deviation as a multiple of the largest change that one unit can cause.
    """
    dp = _library()
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
    composed = {noise_multiplier: count for noise_multiplier, count in uses.items() if count}
    for noise_multiplier, count in composed.items():
        accountant.compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(noise_multiplier), count))
    return float(accountant.get_epsilon(delta)) if composed else 0.0


def _library() -> Any:
    """Import the library. It is imported late, because its import takes a second.

    Raises:
        RecipeError: it is not installed.
    """
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise RecipeError(f"[privacy] needs dp-accounting ({error}): pip install 'polyfed[privacy]'") from None
    return dp_accounting


def _fresh(accounting: Accounting) -> Any:
    """Make a new accountant with the library dp-accounting.

    Differential privacy compares two neighbouring data sets. For most runs, the second data set is the first one
    without the data of one unit. This unit then adds zero to each sum. The library calls such data sets zero-out
    neighbours. If the cohort is drawn in secret, the library requires another kind of neighbours. The second data
    set is then a copy of the first one in which one unit is replaced by another unit.
    """
    dp = _library()
    relation = dp.NeighboringRelation.REPLACE_ONE if accounting.cohort else dp.NeighboringRelation.REPLACE_SPECIAL
    if accounting.accountant == "pld":
        return dp.pld.PLDAccountant(relation)
    return dp.rdp.RdpAccountant(neighboring_relation=relation)


def _event(accounting: Accounting, noise_multiplier: float, count: int) -> Any:
    """Return a `DpEvent` (library dp-accounting): a unit's data is used `count` times, each time with this noise."""
    dp = _library()
    one = dp.GaussianDpEvent(noise_multiplier / accounting.swing)
    if accounting.cohort is not None:
        size, total = accounting.cohort
        one = dp.SampledWithoutReplacementDpEvent(total, size, one)
    return dp.SelfComposedDpEvent(one, count)


@lru_cache(maxsize=4096)
def _epsilon(accounting: Accounting, noise_multiplier: float, rounds: int) -> float:
    accountant = _fresh(accounting)
    accountant.compose(_event(accounting, noise_multiplier, rounds * accounting.uses))
    return float(accountant.get_epsilon(accounting.delta))


@lru_cache(maxsize=256)
def _noise_multiplier(accounting: Accounting, epsilon: float, count: int) -> float:
    dp = _library()
    result = dp.calibrate_dp_mechanism(
        lambda: _fresh(accounting),
        lambda value: _event(accounting, max(value, STEP), count),  # the search begins at 0, where epsilon is undefined
        epsilon,
        accounting.delta,
        tol=STEP,
    )
    return float(round((result // STEP + 1) * STEP, 10))
