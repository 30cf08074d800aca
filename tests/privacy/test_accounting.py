"""The accountant: epsilon is the library's, noise is found for an epsilon, and rounds for a budget."""

import sys
from typing import Any

import dp_accounting as dp
import pytest
from dp_accounting import pld, rdp

from polyfed.core.errors import RecipeError
from polyfed.privacy.differential.accounting import STEP, Accounting
from refusals import refuses

SETTINGS = [(1.0, 1, 1e-5), (1.5, 8, 1e-3), (4.0, 60, 1e-4), (2.0, 20, 1e-5), (8.0, 200, 1e-6)]
"""(noise multiplier, rounds, delta)."""

PFL = {
    "rdp": [4.72851, 7.80158, 9.27015, 12.30169, 10.08944],
    "pld": [4.37718, 7.01811, 8.52262, 11.48002, 9.48219],
}
"""Epsilon of these settings by the accountants of pfl 0.6.0 (`RDPPrivacyAccountant`, `PLDPrivacyAccountant`)."""


def library(kind: str, relation: Any, event: Any, delta: float) -> float:
    made = rdp.RdpAccountant(neighboring_relation=relation) if kind == "rdp" else pld.PLDAccountant(relation)
    return float(made.compose(event).get_epsilon(delta))


@pytest.mark.parametrize("kind", ["rdp", "pld"])
def test_epsilon_is_that_of_the_library_and_of_pfl(kind: str) -> None:
    for number, ((noise, rounds, delta), pfl) in enumerate(zip(SETTINGS, PFL[kind], strict=True)):
        event = dp.SelfComposedDpEvent(dp.GaussianDpEvent(noise), rounds)
        said = Accounting(kind, delta).epsilon(noise, rounds)
        assert said == pytest.approx(pfl, abs=1e-3)
        if kind == "rdp" or number == 1:  # `pld` takes seconds, and pfl calls the same library
            assert said == pytest.approx(library(kind, dp.NeighboringRelation.REPLACE_SPECIAL, event, delta), abs=1e-9)


def test_each_use_of_the_data_counts() -> None:
    assert Accounting("rdp", 1e-5, uses=3).epsilon(4.0, 5) == Accounting("rdp", 1e-5).epsilon(4.0, 15)
    assert Accounting("rdp", 1e-5).epsilon(4.0, 0) == 0.0


def test_replaced_by_other_data_changes_a_result_twice_as_far() -> None:
    assert Accounting("rdp", 1e-5, swing=2.0).epsilon(4.0, 5) == Accounting("rdp", 1e-5).epsilon(2.0, 5)


def test_a_secret_cohort_of_a_fixed_size_is_that_of_the_library() -> None:
    event = dp.SelfComposedDpEvent(dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(2.0)), 20)
    expected = library("rdp", dp.NeighboringRelation.REPLACE_ONE, event, 1e-5)
    said = Accounting("rdp", 1e-5, swing=2.0, cohort=(10, 100)).epsilon(4.0, 20)
    assert said == pytest.approx(expected, abs=1e-9)
    assert said < Accounting("rdp", 1e-5, swing=2.0).epsilon(4.0, 20)


@pytest.mark.parametrize("epsilon", [0.3, 3.0])
def test_the_noise_that_is_found_spends_the_budget_and_no_more(epsilon: float) -> None:
    accounting = Accounting("rdp", 1e-4, uses=2)
    noise = accounting.noise_multiplier(epsilon, 10)
    assert accounting.epsilon(noise, 10) <= epsilon < accounting.epsilon(noise - 3 * STEP, 10)
    assert noise == round(noise, 4)


def test_the_rounds_that_fit_a_budget() -> None:
    accounting = Accounting("rdp", 1e-3)
    assert accounting.rounds(1.5, 8.0, 100) == 8
    assert accounting.epsilon(1.5, 8) <= 8.0 < accounting.epsilon(1.5, 9)
    assert accounting.rounds(1.5, 8.0, 5) == 5
    assert accounting.rounds(1.5, 0.1, 5) == 0


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with refuses(RecipeError, "pip install 'polyfed[privacy]'"):
        Accounting("rdp", 0.123e-5).epsilon(1.0, 1)
