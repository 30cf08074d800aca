"""The runs of a recommendation, in stages that keep the time. Each stage is a study in the same folder.

1. *probe*: two rounds of every method, which measure its seconds and bytes and find methods that fail.
2. *search*: the same number of trials for each method, halved by their validation scores. Then three seeds.
3. *seeds*: the better half of the methods, with placebos, on five seeds; then the best on ten.
4. *modalities*: the chosen method again, scored from every subset of the modalities.

A run that is finished is never repeated, because all stages share the folder `study` and a run is named by its content.
What depends on the measured time (how many trials, which methods go on) is written to `plan.json` when it is decided. A
recommendation that was killed therefore goes on to the same end, as long as its time suffices.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import tomli_w
from pydantic import Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from polyfed.core.errors import CheckpointError, TooFewReplies, counted
from polyfed.core.system.files import replace_text
from polyfed.core.system.json_and_toml import json_ready
from polyfed.evaluation.subsets import GAIN, SUBSET
from polyfed.experiment.running.events import Listener
from polyfed.experiment.study import scheduler
from polyfed.experiment.study.board import Board, Entry
from polyfed.experiment.study.default_ranges import beside_fedavg, is_fedavg
from polyfed.experiment.study.plan import value_text
from polyfed.experiment.study.pool import Pool
from polyfed.experiment.study.ranges import put
from polyfed.report.formatting import seconds_of
from polyfed.report.reading.run_schema import ANY_KEYS, parse_as
from polyfed.report.scores import Metric

TUNING = (101, 102, 103)
"""The seeds on which settings are chosen."""

LADDER = ((21, 3), (14, 3), (14, 2), (7, 2), (7, 1))
"""Numbers of trials and of tuning seeds, the most expensive first; seven is the number of learning rates."""

STEPS = (3, 5, 10)
"""The numbers of seeds after each stage."""

SEARCH_SHARE = 0.6
"""The share of the time that search and the first seeds may take."""

EVALUATED = 1.25
"""What evaluations and checkpoints add to the seconds of the rounds, as a factor."""

PROBE_SHARE = 0.25
"""The share of the time that the probes may take. Until `ENOUGH` methods are probed, it is twice as much."""

ENOUGH = 5
"""How many methods are worth a search."""

LATE = "the time for the probes ended before its own"
"""Why a method goes no further whose cost was not measured."""

SAFETY = 0.85
"""The part of the time that is planned, because runs beside each other take longer than alone."""

REFERENCE = "reference"
"""The role of a model that is not trained by polyfed."""

REDUCTION = 3
PROBED = 2

AVERAGED = 3
"""How many of its last evaluations the score of a trial is the mean of, if a third of the run has so many: training of
few rounds swings, and a search that stops trials evaluates at these rounds anyway (docs/sweep.md)."""


class TimeUp(Exception):
    """The time of the recommendation is over."""


class ProbesUp(TimeUp):
    """The time of the probes is over."""


@dataclass
class Arm:
    """A method of the pilot.

    Attributes:
        name: its name.
        role: `candidate`, `floor`, `ceiling`, `reference`, or the name of the method of which it is the placebo.
        changes: the sections of the recipe that it replaces.
        space: the keys that its search varies, with their values.
        chosen: the values that the search chose, by key.
        scores: seed -> score.
        dropped: why it does not go on. Empty if it does.
        failed: whether a run on a reported seed failed.
        diverged: the reported seed on which training diverged with the chosen values.
        ranked: the settings of the search with their validation scores, the best first, without those that diverged.
        round_bytes: bytes of a round in both directions, by the probe. None if it has not been measured.
        seconds: seconds of a whole run, by the probe.
        overhead: seconds of a run besides its rounds.
        edges: sentences about chosen values at an edge of their ranges.
        trials: the number of settings that the search tried.
        validation: the validation score of the chosen setting.
        named: whether the caller asked for this method.
        same: why the method is FedAvg with the values that its search chose; empty if it is not.
        near: a sentence about chosen values at which an option is as in FedAvg; empty if there are none.
        option: the option that makes it possible, as in `mode = original`, if it is refused without; else empty.
        interval: what result.json says about the score over the test rows, of the first reported seed.
    """

    name: str
    role: str
    changes: dict[str, Any]
    space: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, Any] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    dropped: str = ""
    failed: bool = False
    diverged: int | None = None
    ranked: list[tuple[Mapping[str, Any], float]] = field(default_factory=list)
    round_bytes: float | None = None
    seconds: float = 0.0
    overhead: float = 0.0
    edges: list[str] = field(default_factory=list)
    trials: int = 0
    validation: float | None = None
    named: bool = False
    same: str = ""
    near: str = ""
    option: str = ""
    interval: Mapping[str, Any] | None = None

    @property
    def title(self) -> str:
        """The name in a sentence, with the option that makes it possible."""
        return f"{self.name} with {self.option}" if self.option else self.name

    @property
    def bytes_to_compare(self) -> float:
        """Bytes of a round; a method that was not measured counts as the most expensive."""
        return math.inf if self.round_bytes is None else self.round_bytes

    @property
    def rank(self) -> int:
        """Who keeps the time if it is short: FedAvg, then methods that were asked for, then the others."""
        return 0 if self.name == "fedavg" else 1 if self.named else 3 if self.role in ("floor", "ceiling") else 2

    @property
    def settled(self) -> dict[str, Any]:
        """The `set` of a study's method with the chosen values."""
        return {**self.changes, **self.chosen}

    @property
    def probed(self) -> dict[str, Any]:
        """The `set` of the probe: with the smallest learning rate of the search, since the recipe's may diverge."""
        rates = self.space.get("train.lr", [])
        return {**self.changes, **({"train.lr": min(rates)} if rates else {})}

    def take(self, values: Mapping[str, Any]) -> None:
        """Go on with other values, as if the search had chosen them."""
        self.chosen, self.scores = dict(values), {}
        self.dropped, self.failed, self.diverged, self.interval = "", False, None, None

    def calm(self) -> bool:
        """Go on with the next best setting whose learning rates are smaller. Return whether there is one."""
        rates = {key: value for key, value in self.chosen.items() if key.endswith(".lr")}
        while self.ranked:
            values, score = self.ranked.pop(0)
            own = {key: values[key] for key in rates}
            if own != rates and all(own[key] <= rate for key, rate in rates.items()):
                self.edges = [
                    f"{keys_text(self.chosen)} was better on validation rows and diverged with seed {self.diverged}"
                ]
                self.take(values)
                self.validation = score
                return True
        return False

    @property
    def mean(self) -> float:
        """The mean score."""
        return sum(self.scores.values()) / len(self.scores)


_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Few = Annotated[int, Field(ge=0, le=100)]


@with_config(ANY_KEYS)
class _Cost(TypedDict):
    """What a round of a method costs."""

    bytes: _Amount
    seconds: _Amount
    overhead: _Amount


@with_config(ANY_KEYS)
class _Unknown(TypedDict):
    """Why what a method costs is unknown."""

    why: str


@with_config(ANY_KEYS)
class _Search(TypedDict):
    """How many settings are tried, and which methods are not searched, with the reason."""

    trials: Annotated[int, Field(ge=1, le=100)]
    tuning_seeds: Annotated[int, Field(ge=1, le=len(TUNING))]
    dropped: dict[str, str]


@with_config(ANY_KEYS)
class _Placebo(TypedDict):
    of: str
    set: dict[str, Any]


@with_config(ANY_KEYS)
class _Seeds(TypedDict):
    """How many seeds a stage has, and which methods it leaves out and which placebos it adds."""

    seeds: _Few
    dropped: dict[str, str]
    placebos: dict[str, _Placebo]


PLAN: TypeAdapter[Any] = TypeAdapter(
    with_config(ANY_KEYS)(
        TypedDict(  # type: ignore[operator]
            "PLAN",
            {
                "seconds": _Amount,
                "probe": dict[str, _Cost | _Unknown],
                "search": _Search,
                "subsets": bool,
                **{f"seeds-{seeds}": _Seeds for seeds in STEPS[1:]},
            },
            total=False,
        )
    )
)
"""The content of `plan.json`, which somebody may have damaged."""

AGAIN = "Delete it: finished runs stay, and only the decisions are made again"


@dataclass
class Journal:
    """What a recommendation has decided and how long it has taken, in `plan.json`.

    Attributes:
        path: the file.
        minutes: the time of all calls together.
        clock: returns seconds.
        started: the time of the clock when the call began.
    """

    path: Path
    minutes: float
    clock: Callable[[], float] = time.monotonic
    started: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)
    _before: float = 0.0
    _written: float = -math.inf

    def __post_init__(self) -> None:
        """Read the file of an earlier call."""
        if self.path.is_file():
            try:
                self.facts = parse_as(PLAN, self.path.read_bytes())
            except ValueError as error:
                raise CheckpointError(f"{self.path} is damaged: {error}. {AGAIN}") from error
        self._before = float(self.facts.get("seconds", 0.0))

    @property
    def spent(self) -> float:
        """Seconds of this call and of those before it."""
        return self._before + self.clock() - self.started

    @property
    def left(self) -> float:
        """Seconds that remain."""
        return 60 * self.minutes - self.spent

    def decided(self, key: str, decide: Callable[[], Any]) -> Any:
        """Return an earlier decision, or decide now and write the decision down."""
        if key not in self.facts:
            self.facts[key] = decide()
            self.write()
        return self.facts[key]

    def write(self) -> None:
        """Write the file."""
        self._written = self.clock()
        replace_text(self.path, json.dumps(self.facts | {"seconds": self.spent}, indent=1))

    def tick(self) -> None:
        """Write the time every five seconds, so that a killed call counts.

        Raises:
            TimeUp: the time is over.
        """
        if self.clock() - self._written > 5:
            self.write()
        if self.left <= 0:
            raise TimeUp


@dataclass
class Pilot:
    """Carries out the stages.

    Attributes:
        folder: the folder of the recommendation.
        base: the recipe without its method.
        metrics: the metrics of the study.
        journal: decisions and time.
        jobs: the most runs at once.
        listeners: called with the events of the sweeps.
        arms: the methods by name.
        limits: the largest bytes and seconds of a run; None for no limit.
        say: called with a line about each decision.
        named: the methods that the caller asked for.
    """

    folder: Path
    base: Mapping[str, Any]
    metrics: tuple[str, ...]
    journal: Journal
    jobs: int
    listeners: Sequence[Listener] = ()
    arms: dict[str, Arm] = field(default_factory=dict)
    limits: Mapping[str, float | None] = field(default_factory=dict)
    say: Callable[[str], None] = lambda _: None
    named: frozenset[str] = frozenset()
    out_of_time: bool = False
    late: Callable[[Board], bool] = lambda _: False
    metric: Metric | None = None
    board: Board | None = None
    pool: Pool | None = None

    @property
    def rounds(self) -> int:
        """The rounds of a run."""
        return int(self.base.get("rounds", 10))

    @property
    def going(self) -> list[Arm]:
        """The methods that go on."""
        return [arm for arm in self.arms.values() if not arm.dropped]

    def carry_out(self, placebos: Callable[[Arm], dict[str, Any] | None]) -> None:
        """Carry out all stages but the last, or as many as the time allows.

        Args:
            placebos: returns the sections of a method's placebo, or None.

        Raises:
            TooFewReplies: the time is too short for the probe of a single method.
        """
        self.arms = dict(sorted(self.arms.items(), key=lambda entry: entry[1].rank))
        try:
            self._probe()
            if self.journal.left <= 0 or not self.going:
                raise TimeUp
            self._search()
            for stage, seeds in enumerate(STEPS[1:], 1):
                self._seeds(stage, seeds, placebos)
        except TimeUp:
            self.out_of_time = True
        if not any(arm.seconds and not arm.failed for arm in self.arms.values() if arm.role == "candidate"):
            why = next((f" ({arm.name}: {arm.dropped})" for arm in self.arms.values() if arm.dropped), "")
            raise TooFewReplies(
                f"no method has finished {PROBED} rounds in {self.journal.minutes:g} minutes, so there is nothing to "
                f"recommend{why}. Give more --minutes (the same command goes on)"
            )

    def _drop(self, why: Mapping[str, str]) -> None:
        """Let methods go no further, and say it."""
        for name, reason in why.items():
            self._arm(name).dropped = reason
            self.say(f"{name} goes no further: {reason}")

    def _arm(self, name: str) -> Arm:
        """Return a method that the plan names.

        Raises:
            CheckpointError: the plan is of another recommendation.
        """
        if name not in self.arms:
            raise CheckpointError(f"{self.journal.path} is damaged: there is no method '{name}'. {AGAIN}")
        return self.arms[name]

    def _study(self, name: str, methods: Mapping[str, Any], seeds: Sequence[int], **more: Any) -> Board:
        """Run a study, and return its board.

        Args:
            name: the stage, for the title.
            methods: the section of the study with this name.
            seeds: the seeds that are reported.
            more: further sections of the study; `set` adds to the pilot's, `rounds` replaces the recipe's.

        Raises:
            TimeUp: the time is over. The board holds what is finished.
        """
        recipe = self.folder / "base.toml"
        replace_text(recipe, tomli_w.dumps(json_ready({**self.base, "algorithm": {"name": "fedavg"}})))
        changes = {"evaluate.every": 0} | more.pop("set", {})
        rounds = more.pop("rounds", self.rounds)
        study = {
            "title": f"recommendation: {name}",
            "recipe": str(recipe.absolute()),
            "seeds": list(seeds),
            "metric": list(self.metrics),
            "set": {"rounds": rounds, "checkpoint.every": rounds, **changes},
            "methods": dict(methods),
            **more,
        }

        def listen(event: str, board: Board) -> None:
            self.board = board
            self.journal.tick()
            if event != "sweep-finished" and self.late(board):
                raise ProbesUp

        assert self.pool is not None, "the pilot is used in a `with` block"
        return scheduler.carried_out(study, self.folder / "study", self.pool, [*self.listeners, listen])

    def __enter__(self) -> Self:
        """Start the processes, which all stages share: each takes seconds to load the libraries."""
        self.pool = scheduler.processes(self.folder / "study", self.jobs)
        self.pool.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the processes."""
        if self.pool is not None:
            self.pool.__exit__(*error)

    def _probe(self) -> None:
        """Measure seconds and bytes of all methods, and drop those that fail or cost too much."""

        costs = self.journal.facts.get("probe") or self._measured()
        # the first run of each process also loads libraries, so a single overhead says little
        usual = statistics.median([cost["overhead"] for cost in costs.values() if "why" not in cost] or [0.0])
        lost = {}
        for name, cost in costs.items():
            arm = self._arm(name)
            if why := cost.get("why"):
                lost[name] = why
                continue
            arm.round_bytes, arm.overhead = cost["bytes"], usual
            arm.seconds = arm.overhead + EVALUATED * cost["seconds"] * self.rounds
            lost |= {name: why} if (why := self._too_expensive(arm)) else {}
        self.say(f"{PROBED} rounds of {len(costs)} methods: {len(costs) - len(lost)} go on")
        self._drop(lost)

    def _measured(self) -> dict[str, Any]:
        """Run the probes and return what each costs, or why it is unknown."""
        must = [arm for arm in self.arms.values() if arm.rank < 2]
        result, whole = dict[str, Any](), True
        begin, share = self.journal.spent, PROBE_SHARE * self.journal.left

        def late(board: Board) -> bool:
            few = len(must) + board.count("finished") < ENOUGH
            return self.journal.spent - begin > (2 if few else 1) * share

        for arms in (must, [arm for arm in self.arms.values() if arm not in must]):
            self.board = None
            try:
                probed = {arm.name: {"set": arm.probed} for arm in arms}
                self._study("probe", probed, TUNING[:1], rounds=PROBED) if arms else None
            except TimeUp:
                whole = False
            board: Board | None = self.board  # a listener sets it
            entries = {} if board is None else {board.cells[n].method: es[0] for n, es in board.reported.items()}
            for arm in arms:
                entry = entries.get(arm.name)
                ended = entry is not None and entry.ended
                result[arm.name] = _cost(entry, PROBED) if entry is not None and ended else {"why": LATE}
            self.late = late
        self.late = lambda _: False
        if whole:  # else more minutes may suffice for the rest
            self.journal.decided("probe", lambda: result)
        return result

    def _too_expensive(self, arm: Arm) -> str:
        """Return why a run of a method exceeds the budget, or ""."""
        if arm.role != "candidate":
            return ""
        assert arm.round_bytes is not None  # measured by the probe
        total = arm.round_bytes * self.rounds
        if (most := self.limits.get("bytes")) is not None and total > most:
            return f"its run sends {total:,.0f} bytes in both directions, and the budget is {most:,.0f}"
        if (most := self.limits.get("seconds")) is not None and arm.seconds > most:
            return f"its run takes about {arm.seconds:.0f} seconds, and the budget is {most:g}"
        return ""

    def _search(self) -> None:
        """Choose the settings of each method, and run it on the first seeds."""
        planned = self.journal.facts.get("search") or self._planned_search()
        wanted = [arm for arm in self.arms.values() if arm.dropped in ("", LATE)]
        if len([arm for arm in self.going if arm.name not in planned["dropped"]]) < 2 <= len(wanted):
            self._drop(planned["dropped"])
            self.say(self._warning())
            raise TimeUp
        plan = self.journal.decided("search", lambda: planned)
        self._drop(plan["dropped"])
        trials, seeds = plan["trials"], TUNING[: plan["tuning_seeds"]]
        self.say(f"search: {trials} settings on {counted(len(seeds), 'seed', 'seeds')} of {_names(self.going)}")
        search = {
            "trials": trials,
            "seeds": list(seeds),
            "sampler": "latin",
            "batch": trials,
            "prune": "halving",
            "reduction": REDUCTION,
            "least_rounds": self._least,
            "score_over": min(AVERAGED, max(1, self.rounds // self._least // REDUCTION)),
        }
        for rank in sorted({arm.rank for arm in self.going}):  # the references last, so that they starve no method
            arms = [arm for arm in self.going if arm.rank == rank]
            searched = {arm.name: {"set": arm.changes, "search": arm.space} for arm in arms}
            self._report("search", searched, range(1, STEPS[0] + 1), search=search)

    @property
    def _least(self) -> int:
        return max(1, self.rounds // REDUCTION**2)

    def _planned_search(self) -> dict[str, Any]:
        """Choose the largest budget that fits the time; if none does, drop the slowest methods, named ones last."""
        dropped: dict[str, str] = {}
        while True:
            arms = [arm for arm in self.going if arm.name not in dropped]
            # rather fewer seeds than a method less that was asked for
            share = SEARCH_SHARE if any(arm.rank > 1 for arm in arms) else 1.0
            time_left = SAFETY * share * self.journal.left * self.jobs
            for trials, seeds in LADDER:
                if sum(self._price(arm, trials, seeds) for arm in arms) <= time_left:
                    return {"trials": trials, "tuning_seeds": seeds, "dropped": dropped}
            slow = max(arms, key=lambda arm: (min(arm.rank, 2), arm.seconds))
            if not slow.rank:
                return {"trials": LADDER[-1][0], "tuning_seeds": LADDER[-1][1], "dropped": dropped}
            price = self._price(slow, *LADDER[-1]) / self.jobs
            dropped[slow.name] = (
                f"{self.journal.minutes:.3g} minutes are too few for all methods, and it is the slowest of those left "
                f"(about {seconds_of(price)})"
            )

    def _warning(self) -> str:
        """Return about how many minutes the comparison of FedAvg and the next method takes."""
        known = [arm for arm in self.arms.values() if arm.seconds]
        priced = sorted(self._price(arm, *LADDER[-1]) for arm in known)
        each = statistics.median(
            arm.overhead + PROBED * (arm.seconds - arm.overhead) / max(self.rounds, 1) for arm in known
        )
        search = sum((priced * 2)[:2]) / (SAFETY * SEARCH_SHARE * self.jobs)
        seconds = max(search + self.journal.spent, each * len(self.arms) / (PROBE_SHARE * self.jobs))
        return (
            f"{self.journal.minutes:.3g} minutes are too few to compare even two methods, so nothing more is run. "
            f"About {math.ceil(seconds / 60)} minutes may be enough, fewer with --methods A,B; the same command goes on"
        )

    def _price(self, arm: Arm, trials: int, seeds: int) -> float:
        """Return about how many seconds the search and the first seeds of a method take."""
        each, last, left, total = (arm.seconds - arm.overhead) / max(self.rounds, 1), 0, trials, 0.0
        rungs = [self._least, self._least * REDUCTION, self.rounds]
        for rung in (rung for rung in rungs if rung <= self.rounds):
            total += left * (arm.overhead + each * (rung - last))
            last, left = rung, math.ceil(left / REDUCTION)
        return seeds * total + STEPS[0] * arm.seconds

    def _learn(self) -> None:
        """Read chosen settings and scores from the board."""
        board = self.board
        if board is None:
            return
        for number, entries in board.reported.items():
            cell, arm = board.cells[number], self.arms[board.cells[number].method]
            arm.scores |= {entry.seed: score for entry in entries if (score := entry.score(self.metrics)) is not None}
            if number in board.searches:
                arm.chosen, arm.edges = dict(entries[0].chosen), board.edges(number)
                arm.ranked = board.searches[number].ranked
                arm.same, arm.near = _as_fedavg(arm, {**self.base, **arm.changes})
            if failed := [entry.why for entry in entries if entry.state == "failed"]:
                arm.dropped, arm.failed = " ".join(failed[0].split()).partition(": ")[0], True
                arm.diverged = next((entry.seed for entry in entries if entry.diverged), None)
            self.metric = self.metric or board.metric(number, entries)
            if self.metric is not None and entries:
                group, _, name = self.metric.name.partition(".")
                arm.interval = entries[0].result.get("intervals", {}).get(group, {}).get(name)
            assert cell.scenario
        for number, search in board.searches.items():
            arm = self.arms[board.cells[number].method]
            arm.trials = len(search.trials)
            if (best := search.best) is not None:
                arm.chosen = arm.chosen or dict(best)
                arm.validation = next(score for values, score in search.trials if values == best and score is not None)
        for number, why in board.blocked.items():
            if (arm := self.arms[board.cells[number].method]).role == "candidate" and not arm.dropped:
                arm.dropped = why if self.journal.left > 0 else "the time ended before its search"

    def _report(self, name: str, methods: Mapping[str, Any], seeds: Sequence[int], **more: Any) -> None:
        """Run a study with reported seeds, and read what it found, also if the time ends in it.

        Methods that diverged go on with the next best setting of smaller learning rates: the best rate of a search on
        few seeds is often near divergence, which says nothing against the method.
        """
        try:
            self._study(name, methods, seeds, **more)
        finally:
            self._learn()
        again = [arm for arm in self.arms.values() if arm.diverged is not None and arm.calm()]
        if not again:
            return
        for arm in again:
            arm.same, arm.near = _as_fedavg(arm, {**self.base, **arm.changes})
            self.say(f"{arm.name} goes on with {keys_text(arm.chosen)}: {arm.edges[-1]}")
        placebos = [arm for arm in self.arms.values() if arm.role in {method.name for method in again}]
        for placebo in placebos:
            placebo.take(self.arms[placebo.role].chosen)
        self._report("smaller learning rates", _settled([*again, *placebos]), seeds)

    def _seeds(self, stage: int, seeds: int, placebos: Callable[[Arm], dict[str, Any] | None]) -> None:
        """Let the better half of the methods go on, with the placebos of those that have one, on more seeds."""
        plan = self.journal.decided(f"seeds-{seeds}", lambda: self._planned_seeds(stage, seeds, placebos))
        self._drop(plan["dropped"])
        for name, entry in plan["placebos"].items():
            method = self._arm(entry["of"])
            self.arms.setdefault(name, Arm(name, method.name, entry["set"], chosen=dict(method.chosen)))
        if plan["seeds"] <= max(len(arm.scores) for arm in self.going):
            self.say(f"the time left is too short for {seeds} seeds")
            return
        self.say(f"{plan['seeds']} seeds of {_names(self.going)}")
        self._report(f"{plan['seeds']} seeds", _settled(self.going), range(1, plan["seeds"] + 1))

    def _planned_seeds(
        self, stage: int, seeds: int, placebos: Callable[[Arm], dict[str, Any] | None]
    ) -> dict[str, Any]:
        """Choose the methods that go on, and how many seeds the time allows."""
        rivals = sorted((arm for arm in self.going if arm.role == "candidate" and arm.scores), key=self.standing)
        most = max(3, math.ceil(len(rivals) / 2)) if stage == 1 else 3
        stay = {arm.name for arm in rivals[:most]} | {"fedavg"}
        done = len(rivals[0].scores) if rivals else 0
        dropped = {arm.name: f"behind after {len(arm.scores)} seeds" for arm in rivals if arm.name not in stay}
        unscored = (arm for arm in self.going if arm.role == "candidate" and not arm.scores)
        dropped |= {arm.name: "it has no score" for arm in unscored}
        dropped |= {arm.name: f"{arm.role} is behind" for arm in self.going if arm.role in dropped}
        added = dict[str, Any]()
        for arm in rivals[:most] if stage == 1 else ():
            if (changes := placebos(arm)) is not None:
                added[f"{arm.name} placebo"] = {"of": arm.name, "set": changes}
        costs = [arm.seconds * (seeds - len(arm.scores)) for arm in self.going if arm.name not in dropped]
        costs += [self.arms[entry["of"]].seconds * seeds for entry in added.values()]
        room = SAFETY * self.journal.left * self.jobs
        if sum(costs) > room:
            return {"seeds": done, "dropped": {}, "placebos": {}}
        return {"seeds": seeds, "dropped": dropped, "placebos": added}

    def standing(self, arm: Arm) -> tuple[float, float, str]:
        """Return a key that sorts the best method first; of equal ones, the one with fewer bytes."""
        assert self.metric is not None
        sign = 1 if self.metric.lowest else -1
        return sign * arm.mean, arm.bytes_to_compare, arm.name

    def subsets(self, arm: Arm) -> dict[str, dict[int, float]]:
        """Run the chosen method once more, scored from every subset of the modalities.

        Returns:
            Subset, as in `audio+text` -> seed -> score on the rows that have all modalities (of a score of single
            clients on their rows with this subset). Empty if the time is over or the method has no such scores.
        """
        seeds = sorted(arm.scores)
        if self.journal.decided("subsets", lambda: arm.seconds * len(seeds) > self.journal.left * self.jobs):
            return {}
        try:
            board = self._study("modalities", _settled([arm]), seeds, set={"evaluate.subsets": "all"})
        except TimeUp:
            self.out_of_time = True
            return {}
        group = self.metrics[0].partition(".")[0]
        found: dict[str, dict[int, float]] = {}
        for entry in board.reported.get(0, []):
            for name, score in _on_complete_rows(entry.result.get("metrics", {}).get(group, {}), self.metric).items():
                found.setdefault(name, {})[entry.seed] = score
        return found


def _on_complete_rows(metrics: Mapping[str, float], metric: Metric | None) -> dict[str, float]:
    """Return the score from each subset on the rows that have all modalities, which alone can be subtracted.

    `subset.text` is about all rows with a text. By how much all modalities are better on the others, `gain.text` says.
    """
    found = {name.removeprefix(SUBSET): float(score) for name, score in metrics.items() if name.startswith(SUBSET)}
    whole, sign = max(found, key=lambda name: name.count("+"), default=""), 1 if metric and metric.lowest else -1
    for name in found.keys() - {whole}:
        if (gain := metrics.get(f"{GAIN}{name}")) is not None:
            found[name] = found[whole] + sign * float(gain)
    return found


def _settled(arms: Iterable[Arm]) -> dict[str, Any]:
    """Return the methods of a study with the values that their searches chose."""
    return {arm.name: {"set": arm.settled} for arm in arms}


def _names(arms: Iterable[Arm]) -> str:
    return ", ".join(arm.name for arm in arms)


def _as_fedavg(arm: Arm, table: dict[str, Any]) -> tuple[str, str]:
    """Return why a method is FedAvg with its chosen values, and in which of them it is like FedAvg if it is not.

    Both are empty if neither is so.
    """
    table = deepcopy(table)
    for key, value in arm.chosen.items():
        put(table, key, value)
    if arm.name == "fedavg" or (found := beside_fedavg(table)) is None:
        return "", ""
    if is_fedavg(table):
        own = {key: value for key, value in arm.chosen.items() if not key.startswith("train.")}
        return f"it is FedAvg with the values that its search chose ({keys_text(own)})" if own else "it is FedAvg", ""
    equal = {key: value for key, value in found[0].items() if key in arm.chosen}
    if not equal:
        return "", ""
    rest = [f"{key} = {value_text(own)} (FedAvg: {value_text(value)})" for key, (own, value) in found[1].items()]
    return "", f"With {keys_text(equal)}, {arm.name} differs from FedAvg only in {', '.join(rest)}."


def keys_text(values: Mapping[str, Any]) -> str:
    """Return the values of keys with their sections, such as `train.lr = 0.1, server.lr = 1`."""
    return ", ".join(f"{key} = {value_text(value)}" for key, value in values.items())


def _cost(entry: Entry, rounds: int) -> dict[str, Any]:
    """Return seconds and bytes of a round and the seconds besides, or why the run failed."""
    if entry.state != "finished":
        return {"why": " ".join(entry.why.split()) or "its run has not finished"}
    result = entry.result
    seconds = float(result.get("seconds_per_round") or 0.0)
    return {
        "bytes": (result["bytes_up"] + result["bytes_down"]) / rounds,
        "seconds": seconds,
        "overhead": max(float(result["seconds_total"]) - rounds * seconds, 0.0),
    }
