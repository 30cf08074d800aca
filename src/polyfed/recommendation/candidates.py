"""The methods and options that a policy allows, and why it refuses the others.

Nothing is trained: what a method can send is announced before the first round. A candidate is accepted exactly if
`polyfed check` accepts its recipe, under the recipe's own policy and under that of a device.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import EgressError, PolyfedError, RecipeError
from polyfed.core.messages import LABELS
from polyfed.core.option_checks import IN_RECIPE, PLACEBO, choices, not_searched, simple_types
from polyfed.core.system.json_and_toml import parse_toml
from polyfed.core.tree import SHARED
from polyfed.data import Columns
from polyfed.data.columns import TEST, TRAIN, VALIDATION
from polyfed.data.partitions.persons import told_of_persons
from polyfed.data.stacking import stacked
from polyfed.deploy.device.configuration import used_on
from polyfed.deploy.device.recipe_check import inspect
from polyfed.experiment.checks.check import Check, check, fixes_of, refuse_forbidden
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.recipes.sections import PARTS
from polyfed.experiment.recipes.task_choice import headline_of, with_task
from polyfed.experiment.results.round_facts import code_digest, versions
from polyfed.experiment.running.assembly import assemble, population_of
from polyfed.experiment.study.run_checks import measured_by, metric_fault
from polyfed.privacy.egress.policy import EVERY
from polyfed.recommendation.verdicts import Verdict, Verdicts, digest

REFERENCES = {"local": "floor", "centralized": "ceiling"}
"""Methods that a federation is compared with, and what they are: neither is a federated method to choose."""

SERVERS = {"fedavgm": "avgm", "fedadam": "adam", "fedyogi": "yogi", "fedadagrad": "adagrad"}
"""FedAvg with an optimiser at the server: the name of the method, and `[server] optimiser`."""

EVALUATES = (Algorithm.score.__name__, Algorithm.score_own.__name__, Algorithm.score_subsets.__name__)
"""The tasks that only evaluate."""

VALIDATION_SHARE, UNSEEN_SHARE = 0.1, 0.2
"""The share of the clients' rows on which settings are chosen, unless the recipe or the data say which, and that of the
clients if the test rows too belong to clients that take no part in training."""

FEWEST_CLIENTS = 5
"""With fewer natural clients, none is held out to choose settings."""


@dataclass(frozen=True)
class Candidate:
    """A method with at most one changed option.

    Attributes:
        name: the method, and the option if one is changed, as in `cmsfed prototypes=local`.
        method: the method.
        changes: the sections of the recipe that are replaced, by name.
        option: whether an option is changed.
        refused: why `polyfed check` refuses the recipe. Empty if it accepts it.
        code: the exit code of `polyfed check`: 3 if a policy refuses, 2 if the method does not fit.
        reply_bytes: the bytes of the largest reply that a client sends in training, by the dry run of a round.
        unmeasured: why an accepted recipe cannot be compared with the others. Empty if it can.
    """

    name: str
    method: str
    changes: Mapping[str, Any]
    option: bool = False
    refused: str = ""
    code: int = 0
    unmeasured: str = ""
    reply_bytes: int = 0

    @property
    def planned(self) -> bool:
        """Whether no policy refuses the candidate, so that it can be tried."""
        return not self.refused

    @property
    def verdict(self) -> str:
        """One or two words: `accepted`, `refused`, or `not compared` for an accepted recipe without the score."""
        return "refused" if self.refused else "not compared" if self.unmeasured else "accepted"


@dataclass
class Planner:
    """Decides which candidates are accepted.

    Attributes:
        table: the recipe without its method: the sections of the file, under the policy of the devices.
        policy: the path of a device's policy file, or None.
        metrics: the metrics by which methods are compared. The first one that a run has counts.
        reports: options of [evaluate] that only the recommended recipe has, as far as its method allows them.
        own: the method of the recipe.
        loaded: the data, if another planner of the same data has read them.
        verdicts: the verdicts so far.
    """

    table: dict[str, Any]
    policy: Path | None = None
    metrics: tuple[str, ...] = ()
    reports: Mapping[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    loaded: Columns | None = None
    verdicts: Verdicts = field(default_factory=Verdicts)

    def __post_init__(self) -> None:
        """Take the method out of the recipe, put the policy of the devices in, and choose the metrics.

        Raises:
            PolyfedError: the recipe, the data or the policy is wrong.
        """
        self.table = deepcopy(self.table)
        self.own = dict(self.table.get("algorithm", {}))
        server = {key: value for key, value in self.table.pop("server", {}).items() if key in ("aggregate", "lying")}
        self.table |= {"server": server} if server else {}
        if self.policy is not None:
            self._take_policy(self.policy)
        if not self.metrics:
            self.metrics = default_metrics(self.table, headline_of(with_task(self._plain(), self.columns))["score"])
        clients = self.table.setdefault("clients", {})
        held_out = any(clients.get(key) for key in ("validation", "validation_clients", "personal_validation"))
        if not held_out and not len(self.columns.rows(VALIDATION)):
            others = self._tests_others and len(self._owners(TRAIN)) >= FEWEST_CLIENTS
            clients |= {"validation_clients": UNSEEN_SHARE} if others else {"validation": VALIDATION_SHARE}

    @cached_property
    def columns(self) -> Columns:
        """The data."""
        if self.loaded is not None:
            return self.loaded
        recipe = self._plain()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return stacked(recipe.data.load(), recipe.stack)

    @property
    def _tests_others(self) -> bool:
        """Whether the test rows belong to natural clients that take no part in training."""
        own = self.table.get("clients", {})
        if self.columns.client is None or own.get("personal_test"):
            return False
        if own.get("test_clients") is not None or own.get("folds") is not None:
            return True
        test = self._owners(TEST)
        return len(test) > 0 and not bool(torch.isin(test, self._owners(TRAIN)).any())

    def _owners(self, split: int) -> torch.Tensor:
        """Return the natural clients with rows of a split."""
        assert self.columns.client is not None
        found: torch.Tensor = torch.unique(self.columns.client[self.columns.rows(split)])
        return found

    def tell(self, say: Callable[[str], None], *, persons: bool = False) -> None:
        """Say which question the scores answer: about clients that train, or about others.

        Args:
            say: called with each line.
            persons: whether to name columns that may name persons with rows on both sides; a first recipe has done so.
        """
        own = self.table["clients"]
        if persons and own.get("test_clients") is None and own.get("folds") is None:
            for line in told_of_persons(self.columns):
                say(line)
        if self._tests_others:
            others = "others that do not train either" if own.get("validation_clients") else "those that do"
            cure = '. "--set clients.validation=0" chooses them on others' if own.get("validation") else ""
            say(
                "the test rows belong to clients that take no part in training, and settings are chosen on rows of "
                f"{others}{cure}"
            )
        elif self.columns.client is not None:
            say(
                "the test rows belong to clients that train, so the scores say how good a method is for them. "
                "To ask about clients that take no part in training, add --set clients.test_clients=0.2"
            )

    def _plain(self) -> Recipe:
        """Return the recipe with FedAvg, which every section that does not depend on the method accepts."""
        own = {"name": "fedavg", **self._private_options(ALGORITHMS["fedavg"])}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return parse_recipe({**self.table, "algorithm": own})

    def _take_policy(self, path: Path) -> None:
        """Replace the recipe's policy by that of the devices, as far as it speaks of the recipe's modalities."""
        try:
            given = parse_toml(path.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise RecipeError(f"policy {path}: {error}. Give a TOML file with [egress.*] sections") from None
        known = {*self.columns.modalities, SHARED, LABELS, EVERY}
        self.table["egress"] = {block: row for block, row in given.get("egress", {}).items() if block in known}
        required = given.get("require", {})
        if isinstance(required, Mapping) and required.get("max_epsilon") and "privacy" not in self.table:
            unit = required.get("unit", "client")
            noise = {"noise_at": "client"} if unit == "client" else {}
            spent = {"epsilon": required["max_epsilon"], "delta": required.get("delta", 1e-5)}
            self.table["privacy"] = {"unit": unit, **spent, **noise}
        if isinstance(required, Mapping) and required.get("secure_aggregation"):
            least = {"min_clients": required["min_clients"]} if "min_clients" in required else {}
            self.table.setdefault("secure_aggregation", least)

    def recipe_table(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe of a candidate. It lacks sections that its method does not have."""
        table = deepcopy({**self.table, **changes})
        cls = ALGORITHMS.get(str(table["algorithm"].get("name")))
        parts = {f.name for f in fields(cls)} if cls is not None else set(PARTS)
        for part in ("selector", "server"):
            if part not in parts:
                table.pop(PARTS[part], None)
        return table

    def with_reports(self, table: dict[str, Any]) -> dict[str, Any]:
        """Return a recipe with those of `reports` that it does not set and that `polyfed check` accepts."""
        for option, value in self.reports.items():
            richer = {**table, "evaluate": {option: value, **table.get("evaluate", {})}}
            name = str(richer["algorithm"]["name"])
            table = richer if self.judge(Candidate("reports", name, richer)).planned else table
        return table

    def judged(self) -> list[Candidate]:
        """Return all candidates: every method with its default options, and with each option changed."""
        return [self.judge(candidate) for candidate in self.all()]

    def all(self) -> Iterator[Candidate]:
        """Yield every candidate, without a verdict."""
        for name, cls in ALGORITHMS.items():
            own = {"name": name, **self._private_options(cls)} | (self.own if self.own.get("name") == name else {})
            yield Candidate(name, name, {"algorithm": own})
            for option, value in _options(cls, own):
                shown = str(value).lower() if isinstance(value, bool) else value
                yield Candidate(f"{name} {option}={shown}", name, {"algorithm": {**own, option: value}}, option=True)
        for name, optimiser in SERVERS.items():
            server = {**self.table.get("server", {}), "optimiser": optimiser}
            own = {"name": "fedavg", **self._private_options(ALGORITHMS["fedavg"])}
            yield Candidate(name, name, {"algorithm": own, "server": server})

    def _private_options(self, cls: type[Algorithm]) -> dict[str, Any]:
        """Return the options with which a method can honour the recipe's [privacy]: see `Algorithm.private_options`."""
        if "privacy" not in self.table:
            return {}
        of_clients = self.table["privacy"].get("unit") == "client" and "aggregation" in choices(cls)
        return {**cls.private_options, **({"aggregation": "uniform"} if of_clients else {})}  # equal weights bound each

    def remember(self, folder: Path) -> None:
        """Use the verdicts that an earlier call left in a folder, as far as they still hold."""
        used = used_on(self._plain())
        policy = "" if self.policy is None else self.policy.read_text(encoding="utf-8-sig")
        # code and models of the user may change, the devices of a device's file have data and a budget, and the terms
        # of a policy end on a day
        if not (used.imports or used.models or "device" in parse_toml(policy)):
            today = str(datetime.now(UTC).date()) if policy else ""
            self.verdicts.state = digest(self.columns.fingerprint(), policy, today, versions(), code_digest())
            self.verdicts.read(folder)

    def judge(self, candidate: Candidate) -> Candidate:
        """Return a candidate with the verdict of `polyfed check`, which is made once for each recipe."""
        table, known = self.recipe_table(candidate.changes), self.verdicts.known
        key = digest(table, self.metrics, self.policy is not None)
        if key not in known:
            known[key] = self._verdict(table)
        return replace(candidate, **known[key])

    def _verdict(self, table: Mapping[str, Any]) -> Verdict:
        verdict: Verdict = {"refused": "", "code": 0, "unmeasured": "", "reply_bytes": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                recipe = parse_recipe(table)
                population = population_of(recipe, self.columns)
                refuse_forbidden(assemble(recipe, population=population))  # most refusals need no dry run
                self._refuse_on_device(recipe)
                checked = check(recipe, population)
            except PolyfedError as error:
                return {**verdict, "refused": str(error), "code": error.exit_code}
            if checked.exit_code:
                return {**verdict, "refused": "; ".join(checked.remarks), "code": checked.exit_code}
            known = measured_by(recipe, population)
        fault = "" if known is None else metric_fault(self.metrics, *known)
        return {**verdict, "unmeasured": fault, "reply_bytes": _reply_bytes(checked)}

    def _refuse_on_device(self, recipe: Recipe) -> None:
        """Refuse what a device with the policy would refuse.

        Raises:
            PolyfedError: the device would refuse a part of a message, or the whole recipe.
        """
        if self.policy is None:
            return
        found = inspect(recipe, str(self.policy), loaded=self.columns)
        if found.breaches:
            raise EgressError("; ".join(found.breaches))
        if found.refused:
            kinds = dict.fromkeys(f"{row.kind} of {row.block} to the {row.destination}" for row in found.refused)
            fixes = "; ".join(fixes_of(found.refused, found.policy))
            raise EgressError(
                f"the policy {self.policy} forbids what this algorithm sends: {', '.join(kinds)}. It would leave if "
                f"the policy said: {fixes}"
            )


def default_metrics(table: Mapping[str, Any], score: str) -> tuple[str, ...]:
    """Return the metrics by which a recipe compares methods: on clients' own test rows if they have such rows.

    Otherwise it is the score of the global model; for a method without one, the mean over the clients' models.
    """
    if table.get("clients", {}).get("personal_test"):
        return ("personal.mean",)
    return f"global.{score}", f"global_by_client.{score}"


def reference_changes(name: str, modalities: Iterable[str], metrics: Sequence[str]) -> dict[str, Any]:
    """Return the sections of a reference. Centralized training sees all rows, which no policy of a device allows."""
    if name != "centralized":
        scored = {} if metrics[0].startswith("personal.") else {"global_test": "always"}  # the rungs need its scores
        return {"algorithm": {"name": name, **scored}}
    rows = {modality: {"server": ["raw"]} for modality in modalities}
    rows |= {LABELS: {"server": ["labels"]}, SHARED: {"server": ["statistic"]}}
    return {"algorithm": {"name": name}, "egress": rows}


def reason_of(candidate: Candidate) -> str:
    """Return the first sentence of why a candidate was not tried, on one line."""
    words = " ".join((candidate.refused or candidate.unmeasured).split())
    return words.partition(". ")[0].rstrip(".")


def options_text(entries: Sequence[Candidate]) -> str:
    """Return on one line why a method, or which of its options, is refused.

    Args:
        entries: the method itself, then its options.
    """
    method, options = entries[0], entries[1:]
    if not method.planned:
        return reason_of(method)
    refused = [entry.name.partition(" ")[2] for entry in options if not entry.planned]
    result = reason_of(method)  # why it cannot be compared
    return "; ".join([result] * bool(result) + ([f"not with {', '.join(refused)}"] if refused else []))


def _options(cls: type[Algorithm], own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each choice that differs from the option's value in `own` or from its default."""
    defaults = {f.name: f.default for f in fields(cls)}
    booleans = {name: (True, False) for name, kinds in simple_types(cls).items() if kinds == (bool,)}
    idle = {name for name, entry in not_searched(cls).items() if entry in (PLACEBO, IN_RECIPE)}
    for option, values in {**choices(cls), **booleans}.items():
        if option not in idle and option not in PARTS:
            yield from ((option, value) for value in values if value != own.get(option, defaults[option]))
    yield from (("preset", name) for name in cls.presets if own.get("preset") != name)


def _reply_bytes(checked: Check) -> int:
    """Return the bytes of the largest reply in the dry run of a round, replies that only evaluate left out."""
    owned = [client["rows"] for client in checked.facts["clients"]]
    rows = sum(owned) / max(len(owned), 1)
    sizes = Counter[str]()
    for row in {(row.task, row.field, row.block): row for row in checked.planned if row.in_dry_run}.values():
        if row.task not in EVALUATES:
            sizes[row.task] += round((row.bytes or 0) + row.bytes_per_row * rows)
    return max(sizes.values(), default=0)
