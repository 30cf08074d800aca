"""One changed option at a time: the cells that the law of options tries, and what a run of a cell leaves behind."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from laws.rows import ROWS
from laws.test_laws import world
from polyfed.algorithms import ALGORITHMS
from polyfed.core.errors import PolyfedError, PolyfedWarning
from polyfed.core.option_checks import choices, ranges
from polyfed.data import ClientsSpec
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check_before_run
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.recipes.sections import PARTS
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import assemble
from polyfed.experiment.running.events import Emitter
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.links.network import Network
from polyfed.federation.wire.compression import Wire
from polyfed.model import ModelSpec
from polyfed.privacy.egress.limits import Limits
from polyfed.selection import SELECTORS
from polyfed.training.optimisers import Train
from world import AWKWARD

SECTIONS: dict[str, type] = {
    "model": ModelSpec,
    "train": Train,
    "clients": ClientsSpec,
    "network": Network,
    "limits": Limits,
    "evaluate": Evaluation,
    "server": ServerOptimiser,
    "wire": Wire,
}
"""Sections with one class. [selection] and [algorithm] name theirs, and other laws try [attack] and [privacy]."""

STRIKING: dict[tuple[str, str], list[Any]] = {
    ("model", "embedding"): [5],
    ("model", "head"): [[7]],
    ("model", "fusion"): ["sum", "gated", "attention"],
    ("model", "dropout"): [0.5],
    ("model", "attention_heads"): [2],
    ("train", "steps"): [3],
    ("train", "batch_size"): [5, 0],
    ("train", "lr_end"): [0.01],
    ("train", "lr_step"): [1],
    ("train", "momentum"): [0.5],
    ("train", "weight_decay"): [0.01],
    ("train", "clip_norm"): [0.01],
    ("train", "accumulate"): [4],
    ("clients", "partition"): ["iid", "classes-per-client", "main-class"],
    ("clients", "num"): [5],
    ("clients", "alpha"): [0.1],
    ("clients", "min_size"): [40],
    ("clients", "silos"): [2],
    ("clients", "silo_partition"): ["dirichlet"],
    ("clients", "silo_sizes"): [[3.0, 1.0, 1.0]],
    ("clients", "silo_overlap"): [0.5],
    ("clients", "participation"): [2, 0.5],
    ("clients", "overselect"): [0.5],
    ("clients", "missing"): [{"b": 0.5}],
    ("clients", "keep_both"): [0.5],
    ("clients", "only"): [{"a": [0]}],
    ("clients", "holdings"): [[["a", "b"], ["a", "b"], ["a"]]],
    ("clients", "missing_rows"): [{"b": 0.5}],
    ("clients", "missing_rows_test"): [{"b": 0.9}],
    ("clients", "ranks"): [[2]],
    ("train", "modality_dropout"): [0.5],
    ("clients", "personal_test"): [0.4, "matched"],
    ("clients", "validation"): [0.2],
    ("clients", "personal_validation"): [0.2],
    ("clients", "seed"): [77],
    ("network", "deadline_s"): [1e-9],
    ("network", "latency_s"): [1.0],
    ("network", "stragglers"): [0.5],
    ("wire", "compress"): ["int8", {"a": "top-k"}],
    ("limits", "min_rows"): [10**6],
    ("limits", "min_batch_size"): [10**6],
    ("limits", "min_steps"): [10**6],
    ("limits", "min_rows_per_class"): [10**6],
    ("limits", "min_test_rows"): [10**6],
    ("limits", "max_rounds"): [1],
    ("limits", "max_requests"): [1],
    ("limits", "max_requests_per_day"): [1],
    ("limits", "max_runs_per_day"): [1],
    ("limits", "max_evaluations_per_day"): [0],
    ("evaluate", "clients"): [1],
    ("evaluate", "unimodal"): ["head", "prototype"],  # "auto" is one of these or "zero"
    ("server", "max_norm"): [1e-3],
    ("algorithm", "active_rounds"): [0],
    ("algorithm", "per_epochs"): [0],
    ("algorithm", "inner_batch"): [5],
    ("algorithm", "alpha_every"): [1],
    ("algorithm", "max_age"): [2],
    ("algorithm", "dominance_threshold"): [10.0],
    ("algorithm", "price_per_second"): [1e3],
    ("algorithm", "impact"): [50.0],
    ("algorithm", "recency"): [50.0],
    ("algorithm", "private"): [["b"]],
    ("algorithm", "order"): [["b"]],
}
"""Values that show where the first value that fits the type would not, such as a limit that nobody reaches."""


@dataclass(frozen=True)
class Cell:
    """A recipe in which one option differs from the recipe of the method: `table[section][key] = value`."""

    method: str
    section: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.method} {self.section}.{self.key}={self.value}"


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in sorted(ROWS)} | {
    "pfmml": ("pfmml", {"uploads": 2}),
    "fedpmr without per": ("fedpmr", {"per": False}),
    "fedproto original": ("fedproto", {"mode": "original"}),
    "pmcmfl mfcpl": ("pmcmfl", {"variant": "mfcpl"}),
    "fedmsplit block mean": ("fedmsplit", {"mode": "block_mean"}),
    "cmsfed quantile": ("cmsfed", {"ratio_rule": "quantile", "gradient_split": "exact"}),
    "cmsfed without selection": ("cmsfed", {"modality_selection": False}),
    "split-learning u-shaped": ("split-learning", {"u_shaped": True}),
    "fedavg adam": ("fedavg", {"server": ServerOptimiser(optimiser="adam", lr=0.1)}),
    "fedavg private": ("fedavg", {"private": ("a",)}),
    "fedavg steps": ("fedavg", {"train": Train(lr=0.1, batch_size=16, steps=4)}),
}
"""Configurations of methods: the method and the options that differ from its row of laws."""

SUBTLE = {
    ("pfmml", "softmax_over"): "moves the scores of a block's owners alike; tests/algorithms/test_pfmml.py has a case",
    ("hfl", "absent"): "every row is complete, so only the state has more buffers; tests/algorithms/test_absent.py",
}
"""Options that matter only with other data than those of the laws, and where a test shows it."""

ROUNDS = {"pfmml": 6, "cmsfed": 4, "mfedmc": 3}
"""Rounds, if not two: more where an option needs them to matter."""


def base(configuration: str) -> dict[str, Any]:
    """The table of a small federation for a few rounds, with simulated time and personal test rows where they fit."""
    name, options = VARIANTS[configuration]
    encoders = AWKWARD if name in ("hfm", "vfl") else None
    made = world(name, "sequential", encoders, **({"evaluation": Evaluation(unimodal="zero")} | options))
    made = replace(made, rounds=ROUNDS.get(name, 2), network=Network())
    if name in ("hfm", "vfl"):
        made = replace(made, algorithm=replace(made.algorithm, inner_batch=8))
    own = {"silo_sizes": [4.0, 2.0, 1.0, 1.0], "silos": None} if name == "hfl" else {}
    made = replace(made, clients=replace(made.clients, personal_test=0.25, **own))
    if "u-shaped" in configuration:
        made = replace(made, egress=made.egress | {"shared": {"server": ["parameters", "embeddings", "statistic"]}})
        made = replace(made, model=replace(made.model, head=(5,)))
    table = made.table()
    if "selection" in table:
        table["clients"]["participation"] = 3 if name == "hfl" else 4
    return table


def cells(configuration: str) -> Iterator[Cell]:
    """Every option of every section that the recipe of a configuration may have, with other values than there."""
    table = base(configuration)
    named = {"algorithm": ALGORITHMS[table["algorithm"]["name"]]}
    if "selection" in table:
        named["selection"] = SELECTORS[table["selection"]["name"]]
    for section, cls in (SECTIONS | named).items():
        elsewhere = (
            (*PARTS, "participation", "overselect")
            if section in named
            else ("encoders", "module", "module_options", "blocks", "fusion_options")
        )
        for option in fields(cls):
            if option.init and option.name not in elsewhere and (configuration, option.name) not in SUBTLE:
                now = table.get(section, {}).get(option.name)
                for value in values(cls, section, option, now):
                    yield Cell(configuration, section, option.name, value)


def values(cls: type, section: str, option: "Field[Any]", now: Any) -> list[Any]:
    """Other values of an option: those of `STRIKING`, the other words of a Literal, or one that fits type and range."""
    if (section, option.name) in STRIKING:
        return [value for value in STRIKING[section, option.name] if value != now]
    if option.name in choices(cls):
        return [word for word in choices(cls)[option.name] if word != now]
    kinds = get_type_hints(cls)[option.name]
    words = [word for kind in get_args(kinds) if get_origin(kind) is Literal for word in get_args(kind)]
    if words:
        return [word for word in words if word != now]
    if isinstance(now, bool):
        return [not now]
    allowed = ranges(cls).get(option.name)
    if isinstance(now, (int, float)) or now is None:
        whole = isinstance(now, int) or (now is None and int in get_args(kinds))
        tried = (2, 3, 1) if now is None else (now * 2, now + 1, now - 1)
        if not whole:
            tried = (0.3, 0.7, 1.5) if now is None else (now / 2, now + 0.1, now * 2, now * 0.9)
        fit = [one for one in tried if one != now and (allowed is None or allowed.holds(one))]
        return fit[:1]
    return []


def changed(cell: Cell) -> dict[str, Any]:
    """The table of the cell's recipe."""
    table = base(cell.method)
    section = dict(table.get(cell.section, {}))
    section[cell.key] = cell.value
    if (cell.section, cell.key) == ("clients", "partition"):
        section.pop("num", None) if cell.value == "by-client" else section.setdefault("num", 6)
    return table | {cell.section: section}


def left_by(table: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Run a recipe. Return a digest of everything that the run leaves behind, and its warnings and notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said: list[str] = []

        def listen(event: str, **facts: Any) -> None:
            if event == "note":
                said.append(facts["text"])

        recipe = parse_recipe(table)
        parts = assemble(recipe, emit=Emitter([listen]))
        check_before_run(parts)
        recipe, fed, method = parts.recipe, parts.fed, parts.algorithm
        fed.begin(0)
        state, seen = method.init(fed, parts.initial), list[Any]()
        fed.template = getattr(state, "params", parts.initial)
        for round in range(1, recipe.rounds + 1):
            fed.begin(round)
            state = method.round(state, fed)
            assert fed.clock is not None
            seen.append(method.simulated_seconds(state, fed.clock.finish()))
            if method.evaluation.due(round, recipe.rounds):
                measured = method.evaluate(state, fed)
                seen += [sorted(measured.metrics.items()), sorted(measured.personal.items())]
        if (sets := method.calibrate(state, fed)) is not None:
            seen.append(sets.facts())
        said += [str(one.message) for one in caught if issubclass(one.category, PolyfedWarning)]
    content = {
        "state": state,
        "locals": parts.engine.locals,
        "seen": repr(seen),
        "ledger": repr(list(parts.ledger.rows())),
    }
    return checkpoint.digest(content), said


def verdict(cell: Cell, before: str, told: Sequence[str]) -> str:
    """What became of the option: `changes`, `refused`, `noted`, or `silent`.

    Args:
        cell: the changed recipe.
        before: what the recipe leaves without the change.
        told: what that run says. If it says that an option has no effect, the default may have none either.
    """
    try:
        digest, said = left_by(changed(cell))
    except PolyfedError:
        return "refused"
    noted = any(re.match(rf"\[{cell.section}\] ({cell.key} .*)?has no effect", text) for text in (*said, *told))
    if digest != before:
        return "changes, but a note says that it does not" if noted else "changes"
    return "noted" if noted else "silent"
