"""The search proposes the same settings again, keeps its budget, and chooses by the scores alone."""

import pytest

from polyfed.experiment.study.search import Searcher
from polyfed.experiment.study.study_schema import Search

SPACE = {"train.lr": {"low": 0.01, "high": 1.0, "scale": "log"}, "algorithm.mu": [0.1, 1.0]}


def carried_out(sampler: str, trials: int = 7, *, lowest: bool = False) -> Searcher:
    searcher = Searcher(Search(trials=trials, seeds=[9], sampler=sampler, batch=3), SPACE, lowest)
    while asked := searcher.ask():
        assert len(asked) <= 3
        searcher.tell(asked, [-abs(values["train.lr"] - 0.1) for values in asked])
    return searcher


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc"])
def test_a_search_is_repeatable_and_spends_its_budget(sampler):
    first, second = carried_out(sampler), carried_out(sampler)
    assert first.trials == second.trials
    assert len(first.trials) == 7
    assert all(0.01 <= values["train.lr"] <= 1.0 for values, _ in first.trials)
    scores = [score for _, score in first.trials]
    assert first.best == first.trials[scores.index(max(scores))][0]
    assert carried_out(sampler, lowest=True).best["train.lr"] != first.best["train.lr"]


@pytest.mark.parametrize("sampler", ["tpe", "grid"])
def test_the_direction_may_be_known_only_after_the_first_batch(sampler):
    searcher = Searcher(Search(trials=2, seeds=[9], sampler=sampler, batch=2), {"algorithm.mu": [0.1, 1.0]})
    asked = searcher.ask()
    searcher.lowest = True
    searcher.tell(asked, [2.0, 1.0])
    assert searcher.best == asked[1]
    assert searcher.trials == [(asked[0], 2.0), (asked[1], 1.0)]


def test_a_grid_has_no_more_trials_than_settings():
    space = {"train.lr": {"low": 0.1, "high": 0.3, "step": 0.1}, "algorithm.mu": [0.1, 1.0]}
    searcher = Searcher(Search(trials=20, seeds=[9], sampler="grid", batch=4), space, lowest=False)
    while asked := searcher.ask():
        searcher.tell(asked, [1.0] * len(asked))
    assert len(searcher.trials) == 6
    assert len({tuple(values.items()) for values, _ in searcher.trials}) == 6


def test_settings_that_diverge_are_never_chosen():
    searcher = Searcher(Search(trials=3, seeds=[9], batch=3), SPACE, lowest=False)
    asked = searcher.ask()
    searcher.tell(asked, [None, 0.2, 0.2])
    assert searcher.best == asked[1], "the first of equal scores"
    assert searcher.ask() == []
    nothing = Searcher(Search(trials=1, seeds=[9]), SPACE, lowest=False)
    nothing.tell(nothing.ask(), [None])
    assert nothing.best is None
