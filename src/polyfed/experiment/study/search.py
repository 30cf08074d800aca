"""The search for settings with Optuna. Every cell of a study gets the same number of trials.

A trial is scored on validation rows.

With `[search] prune`, trials stop early. All trials of a batch first run to the first rung; those that stay go on to
the next one from their checkpoints, so no round is computed twice.

A search stores nothing on disk. Its proposals depend only on the seed of the sampler and on the scores so far. A sweep
that was killed therefore proposes the same settings again, and finds their scores among the finished runs.
"""

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyfed.core.errors import RecipeError
from polyfed.experiment.study.ranges import Range, combinations, entry_of, lines_size, values_of
from polyfed.experiment.study.study_schema import LISTED, Search

try:
    import optuna
except ImportError:  # only a study with a search needs Optuna
    optuna = None  # type: ignore[assignment]

Values = Mapping[str, Any]

CYCLES = 8
"""How many times the wanted number of settings a Latin hypercube draws, because some are drawn twice."""


@dataclass
class Searcher:
    """The search of one cell.

    Attributes:
        search: The section [search].
        space: The searched keys with their lists or ranges.
        lowest: Whether the smallest score is the best one. This depends on the metric, and only a finished run shows
            which of the study's metrics it has. The caller therefore sets the attribute after the first batch of runs,
            before it passes the scores to `tell`.
        rounds: The rounds of a whole trial.
        trials: The settings that were tried, with their scores. The score is None if training diverged.
        pruned: The trials that stopped early, by their places in `trials`, with their last rounds.
        confirmed: The places of the trials that went on to all rounds and seeds after their batch; see `unsure`.
        spent: The rounds that the trials had together, on all seeds.
    """

    search: Search
    space: Mapping[str, Any]
    lowest: bool = False
    rounds: int = 1
    trials: list[tuple[Values, float | None]] = field(default_factory=list)
    pruned: dict[int, int] = field(default_factory=dict)
    confirmed: list[int] = field(default_factory=list)
    spent: int = 0

    def __post_init__(self) -> None:
        """Start Optuna's study, which samplers that list their settings do not need.

        Raises:
            RecipeError: Optuna is not installed.
        """
        self._spaces = {key: entry_of(entry) for key, entry in self.space.items()}
        self._seeds = len(values_of(self.search.seeds))
        self._first = 1 if self.search.confirm else self._seeds
        self._asked: list[Any] = []
        self._listed: list[Values] = []
        self._lines = iter(self.space if self.by_lines else ())
        self._begin = 0  # the place of the first trial of the line
        self._study: Any = None
        if self.by_lines:
            return
        if self.search.sampler in LISTED:
            search, grid = self.search, self.search.sampler == "grid"
            drawn = combinations(self.space) if grid else latin(self.space, search.trials, search.sampler_seed)
            self._listed = list(itertools.islice(drawn, search.trials))
            return
        if optuna is None:
            raise RecipeError("[search] needs Optuna: pip install 'polyfed[study]'")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # before a whole batch is finished, a median means little
            pruner = optuna.pruners.MedianPruner(n_startup_trials=self.search.batch, n_warmup_steps=0)
            self._study = optuna.create_study(direction="maximize", sampler=self._sampler(), pruner=pruner)

    @property
    def by_lines(self) -> bool:
        """Whether the search varies one key at a time."""
        return self.search.sampler == "lines"

    @property
    def budget(self) -> int:
        """The number of trials. It is smaller than the study's number if there are fewer settings."""
        if self.by_lines:
            return lines_size(self.space)
        return min(self.search.trials, len(self._listed)) if self._study is None else self.search.trials

    @property
    def best(self) -> Values | None:
        """Return the setting with the best score (of several, the first one), or None if all trials diverged."""
        whole = [place for place in range(len(self.trials)) if place not in self.pruned]
        compared = map(self.trials.__getitem__, self.confirmed if self.search.confirm else whole)
        scored = [(values, score) for values, score in compared if score is not None]
        if not scored:
            return None
        chosen = (min if self.lowest else max)(scored, key=lambda trial: trial[1])
        return chosen[0]

    @property
    def ranked(self) -> list[tuple[Values, float]]:
        """The trials that did not diverge, the best first; those that stopped come last, the longest first."""
        sign = 1 if self.lowest else -1
        scored = [(place, values, score) for place, (values, score) in enumerate(self.trials) if score is not None]
        scored.sort(key=lambda trial: (-self.pruned.get(trial[0], self.rounds), sign * trial[2]))
        return [(values, score) for _, values, score in scored]

    def ask(self) -> list[Values]:
        """Return the settings of the next batch, or an empty list when all trials are used."""
        if self.by_lines:
            return self._line()
        done = len(self.trials)
        left = self.budget - done
        if self.search.prune == "median":
            left = self.budget - -(-self.spent // (self.rounds * self._first))
        number = min(self.search.batch, left)
        if self._study is None:
            return self._listed[done : done + number]
        self._asked = [self._study.ask() for _ in range(number)]
        return [{key: _suggested(trial, key, space) for key, space in self._spaces.items()} for trial in self._asked]

    def _line(self) -> list[Values]:
        """Return the values of the next key at the best setting so far. A key that is not reached keeps its default."""
        best, key = self.best if self.trials else {}, next(self._lines, None)
        if best is None or key is None:
            return []
        self._begin = len(self.trials)
        return [{**best, key: value} for value in values_of(self.space[key])]

    def stay(self, rung: int, scores: Mapping[int, float | None]) -> list[int]:
        """Return which trials of the last batch go on after a rung.

        Args:
            rung: the round of the rung.
            scores: place of a trial in the batch -> its score at the rung, for the trials that are still running.
        """
        ranked = {place: -score if self.lowest else score for place, score in scores.items() if score is not None}
        if self._study is not None:
            for place, value in ranked.items():
                self._asked[place].report(value, rung)
        if self.search.prune == "median":
            return [place for place in ranked if not self._asked[place].should_prune()]
        best = sorted(ranked, key=lambda place: (-ranked[place], place))
        return sorted(best[: math.ceil(len(scores) / self.search.reduction)])

    def tell(
        self, asked: Sequence[Values], scores: Sequence[float | None], ended: Mapping[int, int] | None = None
    ) -> None:
        """Report the scores of the last batch, in the order of its settings.

        Args:
            asked: the settings.
            scores: their scores, at the last rounds that they had.
            ended: place in the batch -> the last round, for trials that stopped early.
        """
        ended = ended or {}
        for place in range(len(asked)):
            self.spent += self._first * ended.get(place, self.rounds)
            if place in ended:
                self.pruned[len(self.trials) + place] = ended[place]
        self.trials += zip(asked, scores, strict=True)
        for place, (trial, score) in enumerate(zip(self._asked, scores, strict=False)):  # a grid has no Optuna trials
            if score is None:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            elif place in ended:
                self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            else:
                self._study.tell(trial, -score if self.lowest else score)

    def unsure(self) -> list[int]:
        """Return which trials need all rounds and seeds next, best first, by their places; none if one can be chosen.

        A search that confirms asks for its best trials. One that prunes asks, if training diverged with each trial that
        went to the end, for the best of those that stopped. Trials that got further come first, as the others need more
        rounds. A search by lines asks for the trials of its last line.
        """
        whole = [place for place in range(len(self.trials)) if place not in self.pruned]
        sure = [place for place in (self.confirmed if self.search.confirm else whole) if place >= self._begin]
        if any(self.trials[place][1] is not None for place in sure):
            return []
        sign = 1 if self.lowest else -1
        tried = list(enumerate(self.trials))[self._begin :]
        left = {place: score for place, (_, score) in tried if score is not None and place not in sure}
        last = {place: self.pruned.get(place, self.rounds) for place in left}
        furthest = [place for place in left if last[place] == max(last.values())]
        return sorted(furthest, key=lambda place: sign * left[place])[: self.search.confirm or 1]

    def confirm(self, places: Sequence[int], scores: Sequence[float | None]) -> None:
        """Report the scores of trials with all rounds and seeds, in the order of `unsure`."""
        for place, score in zip(places, scores, strict=True):
            self.spent += self._seeds * self.rounds - self._first * self.pruned.pop(place, self.rounds)
            self.trials[place] = self.trials[place][0], score
            self.confirmed.append(place)

    def _sampler(self) -> Any:
        samplers, seed = optuna.samplers, self.search.sampler_seed
        if self.search.sampler == "tpe":
            # Optuna draws the first 10 trials at random; a small budget would then be random search under another name
            first = min(10, max(self.search.batch, self.budget // 2))
            return samplers.TPESampler(n_startup_trials=first, seed=seed, constant_liar=True)
        return {"random": samplers.RandomSampler, "qmc": samplers.QMCSampler}[self.search.sampler](seed=seed)


def latin(space: Mapping[str, Any], trials: int, seed: int) -> list[Values]:
    """Return different settings in which all values of each key occur equally often, as far as their number allows.

    Args:
        space: the keys with their lists, or ranges with `count` or `step`.
        trials: the largest number of settings. There are fewer if the keys have fewer combinations.
        seed: the seed of the order of each key's values.
    """
    orders = []
    for place, entry in enumerate(space.values()):
        values, draws = values_of(entry), np.random.default_rng((seed, place))
        cycles = math.ceil(CYCLES * trials / len(values))
        orders.append([values[n] for _ in range(cycles) for n in draws.permutation(len(values))][: CYCLES * trials])
    drawn = (dict(zip(space, setting, strict=True)) for setting in zip(*orders, strict=True))
    result: dict[str, Values] = {repr(setting): setting for setting in itertools.chain(drawn, combinations(space))}
    return list(result.values())[:trials]


def _listed(space: list[Any] | Range) -> list[Any]:
    return list(space.values()) if isinstance(space, Range) else space


def _suggested(trial: Any, key: str, space: list[Any] | Range) -> Any:
    """Return the value that a trial proposes for a key. Floats are rounded to four digits for the tables."""
    if isinstance(space, list) or space.count is not None:
        options = _listed(space)
        if all(isinstance(option, bool | int | float | str) for option in options):
            return trial.suggest_categorical(key, options)
        return options[trial.suggest_categorical(key, list(range(len(options))))]
    log = space.scale == "log"
    if space.is_whole:
        return trial.suggest_int(key, space.low, space.high, step=int(space.step or 1), log=log)
    return float(f"{trial.suggest_float(key, space.low, space.high, step=space.step, log=log):.4g}")
