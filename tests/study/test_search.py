"""The search proposes the same settings again, keeps its budget, and chooses by the scores alone."""

import pytest

from polyfed.core.errors import RecipeError
from polyfed.experiment.study.search import Searcher, latin
from polyfed.experiment.study.study_schema import Search
from refusals import refuses

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


def test_tpe_learns_from_scores_in_a_small_budget_too():
    proposed = {sampler: [values for values, _ in carried_out(sampler, 10).trials] for sampler in ("tpe", "random")}
    assert proposed["tpe"][:3] == proposed["random"][:3]
    assert all(one != other for one, other in zip(proposed["tpe"][5:], proposed["random"][5:], strict=True))


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


def halved(scores: list[float | None], sampler: str = "random") -> Searcher:
    """Nine trials in one batch, with these scores at every rung: 1, 3 and 9 rounds."""
    search = Search(trials=9, seeds=[9], sampler=sampler, batch=9, prune="halving")
    searcher = Searcher(search, SPACE, rounds=9)
    assert search.rungs(9) == [1, 3, 9]
    asked = searcher.ask()
    running, ended = list(range(9)), {}
    for rung in (1, 3):
        stay = searcher.stay(rung, {place: scores[place] for place in running})
        ended |= {place: rung for place in running if place not in stay}
        running = stay
    searcher.tell(asked, scores, ended)
    assert searcher.ask() == []
    return searcher


@pytest.mark.parametrize("scores", [[*range(9)], [*range(9, 0, -1)], [0.5] * 9], ids=["rising", "falling", "equal"])
def test_halving_spends_the_same_rounds_whatever_the_scores(scores):
    searcher = halved(scores)
    assert searcher.spent == 6 * 1 + 2 * 3 + 1 * 9
    assert sorted(searcher.pruned.values()) == [1] * 6 + [3] * 2
    assert searcher.best == searcher.trials[scores.index(max(scores))][0]


def test_halving_takes_no_diverged_trial_and_never_a_trial_that_stopped_early():
    searcher = halved([None] * 8 + [0.1])
    assert searcher.best == searcher.trials[8][0]
    assert halved([None] * 9).best is None
    late = Searcher(Search(trials=3, seeds=[9], batch=3, prune="halving"), SPACE, rounds=3)
    asked = late.ask()
    late.tell(asked, [0.9, 0.2, 0.8], {0: 1, 2: 1})
    assert late.best == asked[1], "the others have higher scores after fewer rounds"


def test_median_pruning_spends_its_rounds_on_further_trials():
    search = Search(trials=8, seeds=[9], sampler="random", batch=4, prune="median", reduction=2)
    searcher = Searcher(search, SPACE, rounds=4)
    stopped = 0
    while asked := searcher.ask():
        # the first batch is finished whole; afterwards, every second trial is worse than all of it
        scores = [1.0 - (place % 2) * (len(searcher.trials) > 0) for place in range(len(asked))]
        stay = searcher.stay(1, dict(enumerate(scores)))
        ended = {place: 1 for place in range(len(asked)) if place not in stay}
        stopped += len(ended)
        searcher.tell(asked, scores, ended)
    assert stopped > 0
    assert len(searcher.trials) > 8
    assert 8 * 4 - 4 < searcher.spent <= 8 * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prune": "halving", "batch": 2}, "search.prune: reduction"),
        ({"prune": "median", "sampler": "grid"}, "search.prune: further"),
        ({"prune": "early"}, "search.prune: Allowed"),
        ({"reduction": 1}, "search.reduction: must be"),
        ({"confirm": 2}, "search.confirm: seed"),
    ],
)
def test_a_pruning_without_effect_is_refused(options, words):
    with refuses(RecipeError, words):
        Search(trials=4, seeds=[9], **options)


def confirmable(**options) -> Searcher:
    """Four trials of nine rounds with these scores on the first seed: 0.5, 0.9, diverged, 0.7."""
    search = Search(trials=4, seeds=[9, 10, 11], sampler="random", batch=4, confirm=2, **options)
    searcher = Searcher(search, SPACE, rounds=9)
    searcher.tell(searcher.ask(), [0.5, 0.9, None, 0.7])
    return searcher


def test_the_best_trials_are_compared_on_all_seeds_and_the_next_ones_if_they_diverge():
    searcher = confirmable()
    assert (searcher.spent, searcher.best, searcher.unsure()) == (4 * 9, None, [1, 3])
    searcher.confirm([1, 3], [0.6, 0.65])
    assert searcher.best == searcher.trials[3][0]
    assert searcher.unsure() == []
    assert searcher.spent == 4 * 9 + 2 * 2 * 9

    searcher = confirmable()
    searcher.confirm([1, 3], [None, None])
    assert (searcher.best, searcher.unsure()) == (None, [0])
    searcher.confirm([0], [0.1])
    assert searcher.best == searcher.trials[0][0]
    searcher = confirmable()
    searcher.confirm([1, 3, 0], [None, None, None])
    assert (searcher.best, searcher.unsure()) == (None, []), "the one that is left diverged on the first seed"

    searcher = confirmable()
    searcher.lowest = True
    assert searcher.unsure() == [0, 3]


def test_trials_that_stopped_early_are_confirmed_last_and_have_all_rounds_then():
    search = Search(trials=3, seeds=[9, 10], sampler="random", batch=3, confirm=1, prune="halving")
    searcher = Searcher(search, SPACE, rounds=9)
    searcher.tell(searcher.ask(), [0.9, 0.8, 0.1], {0: 1, 1: 3})
    assert searcher.spent == 1 + 3 + 9
    assert searcher.unsure() == [2]
    searcher.confirm([2], [None])
    assert searcher.unsure() == [1], "it got further"
    searcher.confirm([1], [0.8])
    assert searcher.best == searcher.trials[1][0]
    assert searcher.pruned == {0: 1}
    assert searcher.spent == 1 + 9 + 9 + 2 * 9


def test_a_trial_that_diverges_after_the_last_rung_costs_no_other_trial_further_rounds():
    search = Search(trials=4, seeds=[9, 10], sampler="random", batch=4, confirm=2, prune="halving")
    searcher = Searcher(search, SPACE, rounds=9)
    searcher.tell(searcher.ask(), [0.9, None, 0.1, 0.8], {0: 3, 3: 3})
    assert searcher.unsure() == [2], "the first one is not a trial of all rounds"
    searcher.confirm([2], [0.2])
    assert searcher.best == searcher.trials[2][0]
    assert searcher.spent == 3 + 9 + 9 + 3 + 9


def test_trials_that_stopped_go_on_one_by_one_if_each_of_the_others_diverged():
    search = Search(trials=4, seeds=[9, 10], sampler="random", batch=4, prune="halving")
    searcher = Searcher(search, SPACE, rounds=9)
    searcher.tell(searcher.ask(), [0.9, None, 0.1, 0.8], {0: 1, 2: 3, 3: 3})
    spent = searcher.spent
    assert (spent, searcher.best, searcher.unsure()) == (2 * (1 + 9 + 3 + 3), None, [3])
    searcher.confirm([3], [None])
    assert (searcher.best, searcher.unsure()) == (None, [2])
    searcher.confirm([2], [0.4])
    assert (searcher.best, searcher.unsure()) == (searcher.trials[2][0], [])
    assert searcher.spent == spent + 2 * 2 * (9 - 3)


def test_without_confirmation_every_trial_has_all_seeds():
    searcher = Searcher(Search(trials=2, seeds=[9, 10], sampler="random"), SPACE, rounds=5)
    searcher.tell(searcher.ask(), [0.5, 0.4])
    assert (searcher.spent, searcher.unsure()) == (2 * 2 * 5, [])


def test_a_latin_hypercube_tries_all_values_equally_often():
    space = {
        "train.lr": [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0],
        "algorithm.mu": [0.0, 0.1, 1.0],
        "x.y": [True, False],
    }
    for seed, trials in ((0, 7), (1, 14), (2, 42), (3, 100)):
        found = latin(space, trials, seed)
        assert found == latin(space, trials, seed)
        assert len(found) == min(trials, 42)
        assert len({repr(setting) for setting in found}) == len(found)
        counts = [
            [sum(setting[key] == value for setting in found) for value in values] for key, values in space.items()
        ]
        assert all(max(own) - min(own) <= 2 for own in counts)
    assert sorted(setting["train.lr"] for setting in latin(space, 7, 0)) == space["train.lr"]
    assert latin(space, 7, 0) != latin(space, 7, 1)
    searcher = Searcher(Search(trials=7, seeds=[9], sampler="latin", batch=7), {"train.lr": space["train.lr"]})
    asked = searcher.ask()
    searcher.tell(asked, [setting["train.lr"] for setting in asked])
    assert (len(asked), searcher.best, searcher.ask()) == (7, {"train.lr": 1.0}, [])
    with refuses(RecipeError, "search.prune: further"):
        Search(trials=7, seeds=[9], sampler="latin", prune="median")


LINES = {"train.lr": [0.01, 0.1, 1.0], "algorithm.mu": [0.0, 0.5]}


def by_lines(scores, **options) -> Searcher:
    """A search by lines whose trials have these scores: (learning rate, mu or None) -> score."""
    searcher = Searcher(Search(trials=5, seeds=[9, 10], sampler="lines", **options), LINES, rounds=2)
    while asked := searcher.ask():
        own = [(values["train.lr"], values.get("algorithm.mu")) for values in asked]
        searcher.tell(asked, [scores[place] for place in own])
        while unsure := searcher.unsure():
            searcher.confirm(unsure, [scores[(*own[place - len(searcher.trials)], "all")] for place in unsure])
    return searcher


def test_lines_vary_one_key_at_a_time_at_the_best_setting_so_far():
    scores = {(0.01, None): 0.2, (0.1, None): 0.6, (1.0, None): None, (0.1, 0.0): 0.6, (0.1, 0.5): 0.7}
    searcher = by_lines(scores)
    tried = [(values["train.lr"], values.get("algorithm.mu")) for values, _ in searcher.trials]
    assert tried == list(scores)
    assert searcher.best == {"train.lr": 0.1, "algorithm.mu": 0.5}
    assert (searcher.budget, searcher.spent) == (5, 5 * 2 * 2)
    worse = by_lines(scores | {(0.1, 0.5): 0.1})
    assert worse.best == {"train.lr": 0.1}, "no value of the other key is better than its default"
    nothing = by_lines(dict.fromkeys(scores))
    assert (nothing.best, len(nothing.trials)) == (None, 3), "a line without any score ends the search"


def test_lines_confirm_the_best_settings_of_each_line():
    scores = {(0.01, None): 0.2, (0.1, None): 0.6, (1.0, None): 0.5, (1.0, 0.0): 0.9, (1.0, 0.5): 0.4}
    on_all = {(0.1, None, "all"): 0.3, (1.0, None, "all"): 0.5, (1.0, 0.0, "all"): 0.45, (1.0, 0.5, "all"): 0.4}
    searcher = by_lines(scores | on_all, confirm=2)
    assert searcher.confirmed == [1, 2, 3, 4]
    assert searcher.best == {"train.lr": 1.0}, "the luck of the first seed does not count"
    with refuses(RecipeError, "search.prune: lines"):
        Search(trials=5, seeds=[9], sampler="lines", prune="halving")
