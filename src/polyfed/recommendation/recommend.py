"""`polyfed.recommend`: from data or a recipe and the policies of devices to a recipe, a table and a paragraph."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from polyfed.algorithms import ALGORITHMS
from polyfed.core.errors import EgressError, RecipeError, did_you_mean
from polyfed.core.option_checks import choices, search_ranges
from polyfed.core.system.files import replace_text
from polyfed.core.system.json_and_toml import json_ready, parse_toml
from polyfed.data.population.splits import DRAWN
from polyfed.evaluation.client_statistics import mean_and_spread
from polyfed.experiment.recipes.first_recipe import starter
from polyfed.experiment.recipes.overrides import apply
from polyfed.experiment.recipes.recipe import parse_recipe, read_table
from polyfed.experiment.running import machine
from polyfed.experiment.running.events import Listener
from polyfed.experiment.running.lock import alone_in
from polyfed.experiment.study.default_ranges import default_space
from polyfed.experiment.study.ranges import put
from polyfed.recommendation.candidates import REFERENCES, SERVERS, Candidate, Planner, reason_of, reference_changes
from polyfed.recommendation.conclusion import Conclusion, concluded, simplest
from polyfed.recommendation.linear import linear_scores
from polyfed.recommendation.pilot import REFERENCE, Arm, Journal, Pilot
from polyfed.report.formatting import seconds_of
from polyfed.report.pages.page import render
from polyfed.report.pages.template import write_page
from polyfed.report.scores import Metric

ASKED, RESULT, RECIPE, PAGE = "asked.json", "recommendation.json", "recommended.toml", "index.html"
"""The files in the folder of a recommendation: the question, the answer as JSON, the recipe, the page."""

SILENCE = 15.0
"""How many seconds pass without a line while the policies are asked."""

DELTA = 1e-5
"""`[privacy] delta` beside a given epsilon; it has to be below 1 / (number of clients)."""


@dataclass(frozen=True)
class Recommendation:
    """The answer of `recommend`.

    Attributes:
        candidates: every method and option, with the verdict of `polyfed check`.
        conclusion: the chosen method and the tests. None if only the candidates were listed.
        arms: the methods of the pilot.
        folder: the folder with the recipe, the page and the runs.
    """

    candidates: tuple[Candidate, ...]
    conclusion: Conclusion | None
    arms: tuple[Arm, ...]
    folder: Path

    @property
    def paragraph(self) -> str:
        """The recommendation in sentences; empty if only the candidates were listed."""
        return "" if self.conclusion is None else self.conclusion.paragraph

    def facts(self) -> dict[str, Any]:
        """Return the content of `recommendation.json`."""
        result = {} if self.conclusion is None else self.conclusion.facts()
        return {
            **result,
            "recipe": None if self.conclusion is None else str(self.folder / RECIPE),
            "page": None if self.conclusion is None else str(self.folder / PAGE),
            "methods": self.table(),
            "candidates": [
                {key: value for key, value in asdict(c).items() if key != "changes"} | {"planned": c.planned}
                for c in self.candidates
            ],
        }

    def by_method(self) -> dict[str, list[Candidate]]:
        """Return the candidates of each method: the method itself, then those with a changed option."""
        result: dict[str, list[Candidate]] = {}
        for candidate in self.candidates:
            result.setdefault(candidate.method, []).append(candidate)
        return result

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each method of the pilot, the best first."""
        rows = []
        lowest = self.conclusion is not None and self.conclusion.metric.lowest
        for arm in sorted(self.arms, key=lambda arm: (not arm.scores, arm.scores and arm.mean * (1 if lowest else -1))):
            mean, spread = mean_and_spread(list(arm.scores.values())) if arm.scores else (None, None)
            rows.append(
                {
                    "method": arm.name,
                    "option": arm.option or None,
                    "role": arm.role,
                    "mean": mean,
                    "spread": spread,
                    "seeds": sorted(arm.scores),
                    "scores": [arm.scores[seed] for seed in sorted(arm.scores)],
                    "settings": dict(arm.chosen),
                    "trials": arm.trials,
                    "validation": arm.validation,
                    "round_bytes": arm.round_bytes,
                    "edges": list(arm.edges),
                    "dropped": arm.dropped or arm.same,
                }
            )
        return rows


def recommend(
    given: str | Path | Mapping[str, Any],
    out: str | Path = "runs/recommendation",
    *,
    minutes: float = 30.0,
    policy: str | Path | None = None,
    metric: str | None = None,
    methods: Sequence[str] = (),
    max_bytes: float | None = None,
    max_seconds: float | None = None,
    epsilon: float | None = None,
    overrides: Sequence[str] = (),
    reading: Mapping[str, Any] | None = None,
    task: str | None = None,
    jobs: int | None = None,
    listeners: Sequence[Listener] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Recommendation:
    """Find the method for these data, under these policies, within a time.

    A stopped recommendation goes on in its folder; its minutes add up. `jobs`, `listeners`: as in `polyfed.sweep`.

    Args:
        given: a data file as in `polyfed init`, or a recipe (its file or table), whose method is one candidate.
        out: the folder.
        minutes: the time; 0 only lists the candidates and writes nothing.
        policy: a device's policy file, by default the recipe's [egress].
        metric: the metric by which methods are compared, such as `global.uar`; see `default_metrics`.
        methods: the only methods to consider. By default all.
        max_bytes: the most bytes of a run, in both directions.
        max_seconds: the most seconds of a run.
        epsilon: the budget of differential privacy of a run; adds the section [privacy] to a recipe without it.
        overrides: each `section.key=value`.
        reading: for a data file: `label`, `client`, `leave_out` ..., as in `polyfed init`; so is `task`.
        say: called with a line about each guess and decision.

    Raises:
        EgressError: the policy refuses every method.
        TooFewReplies: no method finished within the time.
    """
    started = time.monotonic()
    if minutes < 0:
        raise RecipeError(f"--minutes {minutes:g}: must be 0 (only list the candidates) or more")
    table, reports = _table_of(given, overrides, dict(reading or {}), task, epsilon, say)
    planner = Planner(table, None if policy is None else Path(policy), () if metric is None else (metric,), reports)
    planner.tell(say, persons=isinstance(given, Mapping) or Path(given).suffix == ".toml")
    wanted, folder = _wanted(methods), Path(out)
    asked = json_ready({"recipe": planner.table, "metrics": planner.metrics, "methods": sorted(wanted)})
    question = json.dumps(asked, indent=1, sort_keys=True, default=str)
    if minutes:
        _is_claimed(folder, question)  # before half a minute of verdicts
    planner.remember(folder)
    candidates = _judged(planner, wanted, say)
    if not minutes:  # a list alone writes nothing, so it is no question that takes the folder
        return Recommendation(candidates, None, (), folder)
    _claim(folder, question)
    with alone_in(folder, "another recommendation is writing here", "Wait for it, or choose another folder"):
        journal = Journal(folder / "plan.json", minutes, started=started)
        pilot = Pilot(folder, planner.table, planner.metrics, journal, jobs or machine.cores(), listeners, say=say)
        pilot.named, pilot.limits = frozenset(methods), {"bytes": max_bytes, "seconds": max_seconds}
        return _carried_out(pilot, planner, candidates)


def _judged(planner: Planner, wanted: set[str], say: Callable[[str], None]) -> tuple[Candidate, ...]:
    """Return the candidates of these methods with their verdicts, and say from time to time how many there are.

    Raises:
        EgressError: the policies leave no method.
    """
    entries = [entry for entry in planner.all() if entry.method in wanted]
    result, told = list[Candidate](), time.monotonic()
    for number, entry in enumerate(entries):
        if time.monotonic() - told > SILENCE:
            told = time.monotonic()
            say(f"policies: {number} of {len(entries)} methods and options checked")
        result.append(planner.judge(entry))
    if not any(c.planned for c in result if c.method not in REFERENCES):
        raise EgressError(_all_refused(result))
    return tuple(result)


def _carried_out(pilot: Pilot, planner: Planner, candidates: tuple[Candidate, ...]) -> Recommendation:
    """Carry out the pilot, and write the files of the folder."""
    planner.verdicts.write(pilot.folder)
    pilot.arms = _arms(planner, candidates)
    for arm in pilot.arms.values():
        arm.named = arm.name in pilot.named
    with pilot:
        pilot.carry_out(lambda arm: _placebo_of(planner, arm))
        order, subsets, skipped = _chosen(pilot, planner)
    if not pilot.out_of_time:
        spent = seconds_of(pilot.journal.spent)
        pilot.say(f"all that fits is done after {spent} of {pilot.journal.minutes:g} minutes")
    lost = _not_tried(pilot, candidates)
    arms = list(pilot.arms.values())
    metric = pilot.metric or Metric.of(planner.metrics[0])
    if scores := linear_scores(planner, metric, sorted(order[0].scores)):
        arms.append(Arm("linear", REFERENCE, {}, scores=scores))
    conclusion = concluded(arms, metric, subsets, lost, order=order, skipped=skipped)
    timed = replace(conclusion, out_of_time=pilot.out_of_time, minutes=pilot.journal.minutes)
    result = Recommendation(candidates, timed, tuple(arms), pilot.folder)
    _write(result, planner)
    planner.verdicts.write(pilot.folder)
    pilot.journal.write()
    return result


def _chosen(pilot: Pilot, planner: Planner) -> tuple[list[Arm], dict[str, dict[int, float]], str]:
    """Return the candidates with the most seeds, the best first, the scores of the chosen one from every subset of the
    modalities, and why there are none.
    """
    rivals = [arm for arm in pilot.arms.values() if arm.role == "candidate" and not arm.failed]
    scored = [arm for arm in rivals if arm.scores and not arm.same]
    if not scored:  # what is known so far: validation scores, or who runs at all
        known = [arm for arm in rivals if arm.seconds and not arm.same]
        sign = -1 if Metric.of(planner.metrics[0]).lowest else 1
        lost = -math.inf
        known.sort(key=lambda arm: (lost if arm.validation is None else sign * arm.validation, -arm.rank), reverse=True)
        return known[:1], {}, "the time ended before"
    most = max(len(arm.scores) for arm in scored)
    order = sorted((arm for arm in scored if len(arm.scores) == most), key=pilot.standing)
    choice = simplest(order)
    if len(planner.columns.modalities) < 2:
        return order, {}, ""
    if pilot.out_of_time:
        return order, {}, "the time ended before"
    changes = {**_sections(choice), "evaluate": {"subsets": "all"}}
    judged = planner.judge(Candidate("subsets", choice.name, changes))
    if not judged.planned:
        return order, {}, reason_of(judged)
    pilot.say(f"{choice.name} from every subset of the modalities")
    subsets = pilot.subsets(choice)
    return order, subsets, "" if subsets else "the time left is too short"


def _table_of(
    given: str | Path | Mapping[str, Any],
    overrides: Sequence[str],
    reading: dict[str, Any],
    task: str | None,
    epsilon: float | None,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the table of a recipe: of the file, or a first one for the data; with [privacy] if epsilon is given.

    Of a first recipe, the section [evaluate] is apart: what it reports costs each run time, and some methods lack it.

    Raises:
        PolyfedError: the file cannot be read.
    """
    table, reports = deepcopy(dict(given)) if isinstance(given, Mapping) else {}, dict[str, Any]()
    if not isinstance(given, Mapping):
        table, reports = _read(Path(given), overrides, reading, task, say)
    if epsilon is not None:
        table.setdefault("privacy", {"unit": "client", "delta": DELTA})["epsilon"] = epsilon
    return table, reports


def _read(
    path: Path, overrides: Sequence[str], reading: dict[str, Any], task: str | None, say: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    if path.suffix == ".toml":
        if any(value is not None for value in (*reading.values(), task)):
            raise RecipeError(f"{path} is a recipe, whose sections [data] and [task] say how the data are read")
        return read_table(path, overrides), {}
    told: dict[str, Any] = {}
    for override in overrides:
        apply(told, override)
    data = {key: value for key, value in reading.items() if value is not None}
    first = starter(path, told.get("data", {}) | data, task)
    held = any(key in told.get("clients", {}) for key in ("test_clients", "folds"))
    for note in first.notes:
        if not (held and (DRAWN in note or "[clients] test_clients" in note)):  # the override answers it
            say(f"guessed: {note}")
    made = parse_toml(first.text)
    reports = dict(made.pop("evaluate", {}))
    for override in overrides:
        apply(made, override)
    return made, reports


def _wanted(methods: Sequence[str]) -> set[str]:
    """Return the methods to consider: those that are named, and FedAvg, Local and centralized training.

    Raises:
        RecipeError: there is no such method.
    """
    known = {*ALGORITHMS, *SERVERS}
    for name in methods:
        if name not in known:
            raise RecipeError(f"--methods: no method '{name}'; {did_you_mean(name, known)}")
    return {*methods, "fedavg", *REFERENCES} if methods else known


def _claim(folder: Path, question: str) -> None:
    """Take a folder that is empty or holds the same question.

    Raises:
        RecipeError: the folder cannot be written, or holds other files or another question.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"--out {folder}: {error.strerror or error}. Choose a folder that can be written") from None
    if not _is_claimed(folder, question):
        replace_text(folder / ASKED, question)


def _is_claimed(folder: Path, question: str) -> bool:
    """Return whether a folder holds this question, and not nothing.

    Raises:
        RecipeError: it cannot be read, or holds other files or another question.
    """
    try:
        others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
        if ASKED in others and (folder / ASKED).read_text(encoding="utf-8") == question:
            return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RecipeError(f"--out {folder}: {error.strerror or error}. Choose a folder that can be written") from None
    if ASKED in others:
        raise RecipeError(
            f"--out {folder} holds a recommendation for other data, policies or methods. Choose another folder"
        )
    if others:
        raise RecipeError(f"--out {folder} is not empty and holds no recommendation ({others[0]}, ...)")
    return False


def _all_refused(candidates: Sequence[Candidate]) -> str:
    """Return the error text for policies that leave no method."""
    lines = [f"  {c.name}: {reason_of(c)}" for c in candidates if not c.option and c.method not in REFERENCES]
    return "\n".join(["no method can run under this policy:", *lines])


def _arms(planner: Planner, candidates: Sequence[Candidate]) -> dict[str, Arm]:
    """Return the methods of the pilot: of each, the first accepted candidate that can be compared; and the references.

    The space of a search lacks values that a policy refuses.
    """
    result: dict[str, Arm] = {}
    for candidate in candidates:
        if candidate.method in REFERENCES or not candidate.planned or candidate.unmeasured:
            continue
        if candidate.method not in result:
            arm = result[candidate.method] = Arm(candidate.method, "candidate", _searchable(candidate.changes))
            option = candidate.name.partition(" ")[2] if candidate.option else ""
            arm.option = " = ".join(option.partition("=")[::2]) if option else ""
    for name, role in REFERENCES.items():
        changes = reference_changes(name, planner.columns.modalities, planner.metrics)
        own = _without_policy(planner) if name == "centralized" else planner
        judged = own.judge(Candidate(name, name, changes))
        if judged.planned and not judged.unmeasured:
            result[name] = Arm(name, role, changes)
    for arm in result.values():
        arm.space = _space(planner if arm.name != "centralized" else _without_policy(planner), arm)
    return result


def _without_policy(planner: Planner) -> Planner:
    """Return the planner of the ceiling, which no policy of a device binds."""
    table = {key: value for key, value in planner.table.items() if key not in ("privacy", "secure_aggregation")}
    table["algorithm"] = planner.own or {"name": "fedavg"}
    return Planner(table, None, planner.metrics, loaded=planner.columns, verdicts=planner.verdicts)


def _searchable(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes without options that the search varies: a recipe's own values are where it starts."""
    own = dict(changes["algorithm"])
    ranged = search_ranges(ALGORITHMS[own["name"]])
    kept = {key: value for key, value in own.items() if key not in ranged or isinstance(value, str | bool)}
    return {**changes, "algorithm": kept}


def _space(planner: Planner, arm: Arm) -> dict[str, list[Any]]:
    """Return the keys that the search of a method varies. Choices that a policy refuses are left out."""
    result = {}
    for key, values in default_space(arm.name, arm.changes).items():
        section, _, name = key.partition(".")
        if section == "algorithm" and isinstance(values[0], str | bool):
            own = arm.changes["algorithm"]
            tries = (Candidate(name, arm.name, {**arm.changes, "algorithm": {**own, name: v}}) for v in values)
            values = [v for v, tried in zip(values, tries, strict=True) if planner.judge(tried).planned]
        if len(values) > 1:
            result[key] = values
    return result


def _placebo_of(planner: Planner, arm: Arm) -> dict[str, Any] | None:
    """Return the sections of a method's placebo, the first that is accepted, or None."""
    own = arm.changes["algorithm"]
    for word in choices(ALGORITHMS[own["name"]]).get("placebo", ()):
        changes = {**arm.changes, "algorithm": {**own, "placebo": word}}
        if word != "none" and planner.judge(Candidate("placebo", arm.name, changes)).planned:
            return changes
    return None


def _sections(arm: Arm) -> dict[str, Any]:
    """Return the sections of a method with the chosen values that belong to them."""
    result = deepcopy(arm.changes)
    for key, value in arm.chosen.items():
        if key.partition(".")[0] in result:
            put(result, key, value)
    return result


def _not_tried(pilot: Pilot, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Return name -> why, for each method that has no score: those that a policy refuses come first."""
    tried = {arm.name for arm in pilot.arms.values() if arm.scores}
    result: dict[str, tuple[int, str]] = {}
    for candidate in candidates:
        if candidate.method in tried or candidate.option or candidate.method in REFERENCES:
            continue
        arm = pilot.arms.get(candidate.method)
        why = arm.dropped if arm is not None and arm.dropped else reason_of(candidate) or "the time ended before"
        result[candidate.method] = (-candidate.code if arm is None else 1, why)
    return {name: why for name, (_, why) in sorted(result.items(), key=lambda entry: entry[1][0])}


def _write(found: Recommendation, planner: Planner) -> None:
    """Write the recipe, the page and the JSON."""
    assert found.conclusion is not None
    choice, metric = found.conclusion.choice, found.conclusion.metric
    table = planner.recipe_table(choice.changes)
    for key, value in choice.chosen.items():
        put(table, key, value)
    table = planner.with_reports(table)
    parse_recipe(table)
    head = "".join(f"# {sentence}\n" for sentence in found.conclusion.sentences())
    text = f"# Written by `polyfed recommend`.\n{head}{tomli_w.dumps(json_ready(table))}"
    replace_text(found.folder / RECIPE, text)
    replace_text(found.folder / RESULT, json.dumps(json_ready(found.facts()), indent=1))
    page = render(
        "recommendation.html",
        found=found,
        rows=found.table(),
        share=metric.share,
        recipe=text,
        reasons={c.name: reason_of(c) for c in found.candidates},
        drawn={"charts": []},
    )
    write_page(found.folder / PAGE, page)
