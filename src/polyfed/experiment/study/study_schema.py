"""The dataclasses of a study. Each section of the file has a dataclass, whose fields are the keys of the section."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import AT_LEAST_ONE, NOT_NEGATIVE, between, check_ranges
from polyfed.experiment.study.ranges import values_of

LISTED = ("grid", "latin")
"""The samplers that know all their settings before the first trial."""

WITH_VALUES = (*LISTED, "lines")
"""The samplers that need values instead of ranges."""

NAMES = ("method", "scenario")
"""The words of `match` that are not keys of a recipe."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The conditions of a comparison of methods: data, clients and rounds.

    Attributes:
        recipe: The recipe from which every run of this scenario starts, as a path relative to the study's file. The
            default is the study's `recipe`.
        metric: The metric that is reported. The default is the study's `metric`.
        set: Keys of the recipe and their values.
        unset: Keys or sections that are removed from the recipe.
        curve: Whether methods are not searched here, because validation rows cannot judge them. Every value of [search]
            `keys` is then a line of the table, and the scenario is left out of the mean ranks.
    """

    recipe: str | None = None
    metric: str | list[str] | None = None
    set: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    curve: bool = False


@dataclass(frozen=True, kw_only=True)
class Method:
    """One of the methods that a study compares. Each method is a line of the table of results.

    Attributes:
        set: Keys of the recipe and their values. Without `algorithm.name`, the name of the method is also the name of
            the algorithm.
        unset: Keys or sections that are removed from the recipe.
        grid: Keys and their lists or ranges; every combination is a line of the table.
        search: Keys and their lists or ranges; the search chooses a value on validation rows.
        settings_of: The name of another method. This method then has no search of its own: in each scenario, it takes
            the values that the search chose for the other method. A method and its placebo can thus have the same
            settings.
        ranked: Whether the method has a mean rank. A reference or a placebo that would take the ranks of others has
            none.
    """

    set: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    grid: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    settings_of: str | None = None
    ranked: bool = True


@dataclass(frozen=True, kw_only=True)
class When:
    """A rule for the runs to which all entries of `match` apply: change keys of their recipes, or leave them out.

    Attributes:
        match: `method`, `scenario` or keys of the recipe, each with a value or a list of values.
        set: Keys of the recipe and their values.
        unset: Keys or sections that are removed from the recipe.
        skip: The reason why the study leaves out these runs. If empty, the study does not leave them out.
    """

    match: dict[str, Any]
    set: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    skip: str = ""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How settings are chosen: each method gets the same number of trials on validation rows, with separate seeds.

    Attributes:
        trials: The number of settings that are tried for each method in each scenario.
        seeds: The seeds of each trial. They must differ from the reported seeds.
        keys: Keys that are searched for every method, with their lists or ranges.
        ranges: With "default", every method also searches the values that its options declare, and the learning rate.
            Keys of the method, of `keys` and of `set` have precedence.
        sampler: "tpe", "random" or "qmc", which are Optuna's; "grid", which tries every combination; "latin", which
            tries all values of each key equally often (a Latin hypercube; McKay, Beckman & Conover, Technometrics 21,
            1979); or "lines", which tries all values of the first key of `keys`, then at the best one all values of the
            next key, and so on. The last three need lists, or ranges with `count` or `step`.
        sampler_seed: The seed of the sampler.
        batch: The number of trials that the sampler proposes before it sees their scores. These trials can run at the
            same time. The result depends on this number, but not on the number of processes.
        confirm: With a number above 0, trials run with the first of `seeds` only, and then the best ones, so many at
            once, with all of them. The best mean of these is chosen. If training diverged with each, the next follow.
            The sampler "lines" does so after every line.
        prune: How trials stop early, by their validation scores at the *rungs*: the rounds `least_rounds`,
            `least_rounds * reduction` and so on. "halving" (successive halving; Jamieson & Talwalkar 2016) keeps one of
            `reduction` trials of a batch at each rung, so every method spends the same number of rounds. "median" stops
            a trial that is below the median of the finished ones (Optuna's MedianPruner), and tries further settings
            until `trials` times the full number of rounds are spent. Empty: every trial runs to its last round.
        reduction: The factor between two rungs.
        least_rounds: The first rung.
        score_over: A trial's score is the mean over its last evaluations, so many (over all, if it has fewer). The
            score of one round depends on where that round left a training that swings.
    """

    trials: Annotated[int, AT_LEAST_ONE]
    seeds: list[int] | dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    ranges: Literal["", "default"] = ""
    sampler: Literal["tpe", "random", "qmc", "grid", "latin", "lines"] = "tpe"
    sampler_seed: Annotated[int, NOT_NEGATIVE] = 0
    batch: Annotated[int, AT_LEAST_ONE] = 4
    confirm: Annotated[int, NOT_NEGATIVE] = 0
    prune: Literal["", "halving", "median"] = ""
    reduction: Annotated[int, between(2, 100)] = 3
    least_rounds: Annotated[int, AT_LEAST_ONE] = 1
    score_over: Annotated[int, AT_LEAST_ONE] = 1

    def __post_init__(self) -> None:
        """Check types and ranges of the options, and refuse combinations without effect.

        Raises:
            RecipeError: an option has a wrong value, or no trial could ever be stopped.
        """
        check_ranges("[search]", self)
        if self.confirm and len(values_of(self.seeds)) < 2:
            raise RecipeError(
                f"[search] confirm = {self.confirm} runs the best trials again with the other seeds, and there is one "
                "seed. Give two or more",
                ("search", "confirm"),
            )
        if self.prune == "halving" and self.batch < self.reduction:
            raise RecipeError(
                f"[search] prune = 'halving': a batch of {self.batch} trials is smaller than reduction = "
                f"{self.reduction}. Set batch to {self.reduction} or more, for example to the number of trials",
                ("search", "prune"),
            )
        if self.prune and self.sampler == "lines":
            raise RecipeError(
                "[search] sampler = 'lines' compares the values of one key at the last round. Leave out prune, or use "
                "another sampler; confirm saves runs too",
                ("search", "prune"),
            )
        if self.prune == "median" and self.sampler in LISTED:
            raise RecipeError(
                "[search] prune = 'median' tries further settings with the rounds that it saves, and the sampler "
                f"'{self.sampler}' has no others. Use prune = 'halving', or another sampler",
                ("search", "prune"),
            )

    def rungs(self, rounds: int) -> list[int]:
        """Return the rounds at which trials of this many rounds are compared; the last one is the last round."""
        result, rung = [], self.least_rounds
        while self.prune and rung < rounds:
            result.append(rung)
            rung *= self.reduction
        return [*result, rounds]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study: every method in every scenario, with every combination of the grid, on every seed.

    Attributes:
        title: The question of the study, as a title for its page.
        recipe: The recipe from which every run starts, as a path relative to the study's file. A scenario may have its
            own recipe.
        seeds: The reported seeds: a list or a range.
        metric: The reported metric of result.json, at the last round. If this key is a list, the first metric that a
            run has is reported.
        set: Keys of the recipe and their values, for every run.
        unset: Keys or sections that are removed from every recipe.
        grid: Keys and their lists or ranges, for every method; every combination is a line of the table.
        methods: Name -> method.
        scenarios: Name -> scenario. If there are none, `recipe` is the only scenario.
        when: Rules that change keys of some runs or leave out these runs. The study applies the rules in the order of
            this list.
        search: How settings are chosen. None if no method has keys to search.
        name: The name of the study's folder, which is the name of its file.
        folder: Relative paths to recipes start in this folder.
    """

    title: str = ""
    recipe: str | None = None
    seeds: list[int] | dict[str, Any]
    metric: str | list[str] = "global.accuracy"
    set: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    grid: dict[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Method]
    scenarios: dict[str, Scenario] = field(default_factory=dict)
    when: Sequence[When] = ()
    search: Search | None = None
    name: str = "study"
    folder: Path = Path()

    @property
    def reported_seeds(self) -> list[int]:
        """The seeds whose runs are reported."""
        return values_of(self.seeds)

    @property
    def tuning_seeds(self) -> list[int]:
        """The seeds of the search; empty without a search."""
        return [] if self.search is None else values_of(self.search.seeds)

    @property
    def reads_rounds(self) -> bool:
        """Whether the search reads more of a trial than its last score."""
        return self.search is not None and (bool(self.search.prune) or self.search.score_over > 1)

    @property
    def first_seeds(self) -> list[int]:
        """The seeds of every trial; those that `confirm` names have all tuning seeds."""
        return self.tuning_seeds[:1] if self.search is not None and self.search.confirm else self.tuning_seeds

    def searched_keys(self, method: str) -> dict[str, Any]:
        """The keys whose values a search chooses for a method, with their lists or ranges.

        For a method with `settings_of`, these are the keys of the method that it names.
        """
        own = self.methods[method]
        searched = self.methods.get(own.settings_of or "", own)
        return searched.search if self.search is None else self.search.keys | searched.search

    def grid_of(self, method: str) -> dict[str, Any]:
        """The keys of a method's grid, with their lists or ranges."""
        return self.grid | self.methods[method].grid

    def curve_of(self, scenario: str) -> dict[str, Any]:
        """The keys whose values are lines of the table of a scenario, instead of a search; empty without a curve."""
        return self.search.keys if self.search is not None and self.scenarios[scenario].curve else {}

    def metrics_of(self, scenario: str) -> list[str]:
        """Return the metrics of a scenario. The study reports the first of these metrics that a run has."""
        metric = self.scenarios[scenario].metric or self.metric
        return [metric] if isinstance(metric, str) else list(metric)
