"""An entry of a board: the runs of a method, of its control and of its placebo in one scenario, in one JSON file.

An entry comes from a stranger. It is data only: reading it imports nothing, and it names no path but the name of a data
file, which the reader replaces. The rules that make a result comparable (`faults_of`) hold for packing and for
verification alike, so an entry that was edited is refused before anything runs.
"""

import hashlib
import platform
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import NotRequired, TypedDict  # noqa: UP035 - pydantic refuses that of `typing` before Python 3.12

from polyfed.algorithms import ALGORITHMS
from polyfed.core.errors import DataError, RecipeError
from polyfed.core.registry import Allowance, only
from polyfed.core.system.json_and_toml import json_ready, parse_json
from polyfed.experiment.recipes.sections import SECTIONS
from polyfed.experiment.results.round_facts import code_digest, versions
from polyfed.experiment.study.default_ranges import is_fedavg
from polyfed.experiment.study.ranges import at, put
from polyfed.report.comparison.labels import PLACEBO, flat
from polyfed.report.reading.run_schema import RUN_RESULT
from polyfed.report.scores import first_metric

FORMAT = "polyfed board entry 1"

LARGEST = 2**24
"""Largest size in bytes of a file that is read: some thousand runs (inferred)."""

LARGEST_CODE = 2**18
"""Largest number of characters of a method's own code."""

FEWEST_SEEDS = 3

NOT_PACKED = ("versions", "seed", "checkpoint", "tracking", "deployment", "limits")
"""Parts of a resolved recipe that an entry leaves out: they do not change a result, or reach outside of it."""

SAME = (
    "rounds",
    *(f"{name}." for name, part in SECTIONS.items() if not part.of_method and name not in NOT_PACKED),
)
"""The first words of the keys in which method and control agree, except for what the control's search has tried."""

PATHS = ("path", "cache", "transcripts")
"""The keys of [data] that name files."""

_TIMES = "seconds"
"""In the keys of `result.json` that differ from one repetition to the next."""

MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_SEPARATOR = re.compile(r"[/\\]|^~")
_CLASS = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
_NAME = re.compile(r"[\w][\w .,=+()-]{0,79}")

STRICT = ConfigDict(extra="forbid", strict=True)


@with_config(STRICT)
class Code(TypedDict):
    """The module of a method that does not come with polyfed: its name, its SHA-256, and its text."""

    module: str
    sha256: str
    text: str


@with_config(STRICT)
class Made(TypedDict):
    """Where an entry was packed: versions, the digest of polyfed's code, and what PyTorch uses of the processor."""

    versions: dict[str, str]
    polyfed: str
    processor: str


@with_config(STRICT)
class EntryRun(TypedDict):
    """A run: its seed, whether it belongs to the search, what the search chose, its result (None if it diverged)."""

    seed: int
    tuning: bool
    chosen: dict[str, Any]
    result: dict[str, Any] | None


@with_config(STRICT)
class Part(TypedDict):
    """The runs of one method: its name, and its recipe without seed and searched keys."""

    name: str
    recipe: dict[str, Any]
    runs: list[EntryRun]


@with_config(STRICT)
class Entry(TypedDict):
    """The content of a file. `no_placebo` says why there is no `placebo`; `code` is None for polyfed's methods."""

    format: Literal["polyfed board entry 1"]
    scenario: str
    metrics: list[str]
    data: str
    method: Part
    control: Part
    placebo: NotRequired[Part]
    no_placebo: str
    code: Code | None
    made: Made


_SCHEMA: TypeAdapter[Any] = TypeAdapter(Entry)

Role = Literal["method", "control", "placebo"]


def parts_of(entry: Mapping[str, Any]) -> Iterator[tuple[Role, Part]]:
    """Yield the parts of an entry with their roles."""
    roles: tuple[Role, ...] = ("method", "control", "placebo")
    for role in roles:
        if role in entry:
            yield role, entry[role]


def here() -> Made:
    """Return the versions, the code and the processor of this process."""
    used = {name: version for name, version in versions().items() if name != "python"}
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"versions": used, "polyfed": code_digest(), "processor": processor}


def read_entry(file: Path) -> tuple[Entry, str]:
    """Read an entry.

    Returns:
        The entry, which keeps all rules, and the SHA-256 of the file.

    Raises:
        DataError: the file cannot be read, is no entry, or breaks rules. The text tells all of them.
    """
    try:
        size = file.stat().st_size
        raw = b"" if size > LARGEST else file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror or error}. Give a file that `polyfed board pack` wrote") from None
    if size > LARGEST:
        raise DataError(f"{file} has {size:,} bytes, more than the {LARGEST:,} that an entry may have")
    try:
        entry = _SCHEMA.validate_python(parse_json(raw.decode("utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{file} is no entry of a board: {place}: {first['msg']}") from None
    except ValueError as error:
        raise DataError(f"{file} is no entry of a board ({error}). `polyfed board pack` writes one") from None
    with only(Allowance()):  # a rule looks up the control's class, and a stranger may name any
        faults = list(faults_of(entry))
    refuse(f"{file} breaks the rules of the board", faults)
    return entry, hashlib.sha256(raw).hexdigest()


def refuse(what: str, faults: Sequence[str]) -> None:
    """Raise an error that tells the faults, if there are any.

    Raises:
        DataError: there are faults.
    """
    if faults:
        raise DataError("\n".join([f"{what}:", *(f"  {fault}" for fault in faults[:20])]))


def numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a repetition must give again: a result without times."""
    found: dict[str, Any] = json_ready({key: value for key, value in result.items() if _TIMES not in key})
    return found


def reported(part: Part) -> list[EntryRun]:
    """Return the runs of a part that count."""
    return [run for run in part["runs"] if not run["tuning"]]


def trials(part: Part) -> dict[str, list[EntryRun]]:
    """Return the runs of the search by setting."""
    result: dict[str, list[EntryRun]] = {}
    for run in part["runs"]:
        if run["tuning"]:
            result.setdefault(repr(sorted(run["chosen"].items())), []).append(run)
    return result


def table_of(part: Part, run: EntryRun) -> dict[str, Any]:
    """Return the recipe of a run as a table."""
    table = settled(part, run["chosen"])
    if run["tuning"]:
        put(table, "clients.measure_on", "validation")
    return table | {"seed": run["seed"]}


def settled(part: Part, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of a part with the settings of a run.

    Raises:
        RecipeError: a key is inside of a value.
    """
    result = deepcopy(part["recipe"])
    for key, value in chosen.items():
        put(result, key, value)
    return result


def leaves(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return the values of nested tables by their places. `flat` would join two places whose keys have dots."""
    result: dict[tuple[str, ...], Any] = {}
    for key, value in table.items():
        place = (*above, key)
        result |= leaves(value, place) if isinstance(value, dict) and value else {place: value}
    return result


def scores(part: Part, metrics: Sequence[str]) -> dict[int, float]:
    """Return the score of each reported seed."""
    result = {run["seed"]: first_metric(run["result"] or {}, metrics) for run in reported(part)}
    return {seed: first[1] for seed, first in result.items() if first is not None}


def algorithm_of(part: Part) -> str:
    """Return the name of a part's algorithm."""
    return str(at(part["recipe"], "algorithm.name"))


def has_placebo(name: str) -> bool:
    """Return whether a method of polyfed has a placebo."""
    return name in ALGORITHMS and any(field.name == "placebo" for field in fields(ALGORITHMS[name]))


def faults_of(entry: Entry) -> Iterator[str]:
    """Yield a sentence for each rule that an entry breaks."""
    try:
        for role, part in parts_of(entry):
            whole = {repr(run["chosen"]): settled(part, run["chosen"]) for run in part["runs"]}
            faults = dict.fromkeys(fault for recipe in whole.values() for fault in _recipe_faults(recipe))
            yield from (f"{role}: {fault}" for fault in (*faults, *_run_faults(part, entry["metrics"])))
            if any(at(recipe, "algorithm.name") != algorithm_of(part) for recipe in whole.values()):
                yield f"{role}: a search cannot choose the algorithm"
            if not _NAME.fullmatch(part["name"]):
                yield f"{role}: a name has letters, digits and blanks, at most 80 of them"
        yield from _control_faults(entry)
        yield from _placebo_faults(entry)
        yield from _choice_faults(entry)
    except (AttributeError, TypeError, KeyError, ValueError, RecipeError) as error:
        yield f"a recipe has a section that is none, or a key of the search that is none ({error})"
    if not _NAME.fullmatch(entry["scenario"]):
        yield "scenario: a name has letters, digits and blanks, at most 80 of them"
    if (code := entry["code"]) is not None:
        yield from _code_faults(code)
    module, colon, _ = algorithm_of(entry["method"]).partition(":")
    if bool(colon) != (code is not None) or (code is not None and module != code["module"]):
        yield f"method: the recipe names the algorithm '{algorithm_of(entry['method'])}', and `code` is of another"


def _recipe_faults(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the recipe of a run may not have, whether it stands in the recipe of the part or was chosen."""
    for section in NOT_PACKED:
        if section in recipe:
            yield f"the recipe has '{section}', which an entry leaves out"
    for (*above, last), value in leaves(recipe).items():
        head, key = ".".join(above), ".".join((*above, last))
        named = last in PATHS or (isinstance(value, str) and bool(_SEPARATOR.search(value)))
        if head == "data" and named and not (last == "path" and value == Path(str(value)).name):
            yield f"{key} = {value!r} is a path. An entry has at most the name of a data file"
        if key != "algorithm.name" and isinstance(value, str) and _CLASS.fullmatch(value):
            yield f"{key} = {value!r} is a class. An entry brings the code of its method alone"
        if key in ("model.init", "algorithm.against") and value:
            yield f"{key} names another model, which an entry does not hold"
    engine = recipe.get("engine")
    if not isinstance(engine, dict) or engine.get("name", "vectorised") not in ("vectorised", "sequential"):
        yield "[engine] name: only 'vectorised' and 'sequential' repeat a run bit for bit"
    elif engine.get("device", "cpu") == "cuda" or engine.get("threads") != 1:
        yield "[engine]: only device = 'cpu' with threads = 1 repeats a run bit for bit"


def _run_faults(part: Part, metrics: Sequence[str]) -> Iterator[str]:
    seeds = [run["seed"] for run in reported(part)]
    if len(set(seeds)) < FEWEST_SEEDS or len(set(seeds)) < len(seeds):
        yield f"it has the seeds {seeds}, and {FEWEST_SEEDS} different ones or more are needed"
    if shared := {run["seed"] for run in part["runs"] if run["tuning"]} & set(seeds):
        yield f"the seeds {sorted(shared)} chose the settings and are reported too"
    for run in part["runs"]:
        where = f"seed {run['seed']}{' of the search' if run['tuning'] else ''}"
        if run["result"] is None:
            if not run["tuning"]:
                yield f"{where} has no result"
            continue
        try:
            RUN_RESULT.validate_python(run["result"])
        except ValidationError as error:
            yield f"{where}: {error.errors(include_url=False, include_input=False)[0]['msg']} in the result"
            continue
        if first_metric(run["result"], metrics) is None:
            yield f"{where} has none of {', '.join(metrics)}"


def _code_faults(code: Code) -> Iterator[str]:
    if not MODULE.fullmatch(code["module"]):
        yield f"code: the module {code['module']!r} is no plain name of a Python file"
    if len(code["text"]) > LARGEST_CODE:
        yield f"code: it has {len(code['text']):,} characters, more than {LARGEST_CODE:,}"
    if hashlib.sha256(code["text"].encode()).hexdigest() != code["sha256"]:
        yield "code: its text does not have its SHA-256"


def _control_faults(entry: Entry) -> Iterator[str]:
    method, control = entry["method"], entry["control"]
    recipe = _reported_recipe(control)
    options = recipe["algorithm"]
    plain = not options.get("private") and not options.get("fine_tune") and is_fedavg(recipe)
    if algorithm_of(control) != "fedavg" or not plain:
        yield f"control: '{algorithm_of(control)}' is not plain fedavg"
    if algorithm_of(method) == "fedavg" and _differing(method, control, ()) == []:
        yield "method: it is the control itself"
    yield from (f"control: it has another {key} than the method" for key in _differing(method, control, SAME))
    yield from _budget_faults(entry, "control", control)


def _budget_faults(entry: Entry, role: Role, part: Part) -> Iterator[str]:
    own = entry["method"]
    if sorted(run["seed"] for run in reported(own)) != sorted(run["seed"] for run in reported(part)):
        yield f"{role}: it has other seeds than the method"
    searches = {"settings": (len(trials(own)), len(trials(part)))}
    searches["runs of its search"] = (_searched(own), _searched(part))
    for what, (wanted, has) in searches.items():
        if has < wanted:
            yield f"{role}: it has {has} {what}, fewer than the {wanted} of the method. Give both the same budget"


def _searched(part: Part) -> int:
    return sum(run["tuning"] for run in part["runs"])


def _reported_recipe(part: Part) -> dict[str, Any]:
    """Return the recipe of the reported runs, which all have the same settings."""
    return settled(part, next((run["chosen"] for run in reported(part)), {}))


def _differing(method: Part, other: Part, of: Sequence[str]) -> list[str]:
    """Return the keys beginning with one of these words, or all for none, in which the reported runs differ.

    What the search of the other part has tried may differ, but never the data.
    """
    tried = {key for run in other["runs"] if run["tuning"] for key in run["chosen"] if not key.startswith("data.")}
    one, two, absent = leaves(_reported_recipe(method)), leaves(_reported_recipe(other)), object()
    unlike = (".".join(key) for key in sorted(one.keys() | two.keys()) if one.get(key, absent) != two.get(key, absent))
    return [key for key in unlike if key not in tried and (not of or key.startswith(tuple(of)))]


def _placebo_faults(entry: Entry) -> Iterator[str]:
    method, placebo = entry["method"], entry.get("placebo")
    recipe = _reported_recipe(method)
    has = has_placebo(algorithm_of(method)) or PLACEBO in flat(recipe)
    if placebo is None:
        if has:
            yield f"placebo: {algorithm_of(method)} has one (algorithm.placebo), and the entry lacks it"
        elif not has_reason(entry["no_placebo"]):
            yield "no_placebo: say in a sentence why the method has no placebo"
        return
    if at(recipe, PLACEBO) != "none" or at(_reported_recipe(placebo), PLACEBO) in (None, "none"):
        yield "placebo: the method needs algorithm.placebo = 'none', and its placebo another value"
    yield from (
        f"placebo: it has another {key} than the method" for key in _differing(method, placebo, ()) if key != PLACEBO
    )
    if trials(placebo) or not trials(method):
        yield from _budget_faults(entry, "placebo", placebo)
    elif reported(placebo) and reported(placebo)[0]["chosen"] != reported(method)[0]["chosen"]:
        yield "placebo: it has no search, and other settings than the method"


def has_reason(text: str) -> bool:
    """Return whether a text can be the reason why a method has no placebo: one line, neither short nor endless."""
    return 20 <= len(text.strip()) <= 300 and text.isprintable()


def _choice_faults(entry: Entry) -> Iterator[str]:
    """Yield the parts whose reported settings are not those that their search found best."""
    for role, part in parts_of(entry):
        settings = [run["chosen"] for run in reported(part)]
        if any(chosen != settings[0] for chosen in settings):
            yield f"{role}: its reported runs have different settings"
            continue
        means: list[tuple[float, dict[str, Any]]] = []
        tried = trials(part)
        most = max(map(len, tried.values()), default=0)
        lowest = False
        for runs in tried.values():
            firsts = [first_metric(run["result"] or {}, entry["metrics"]) for run in runs]
            if len(runs) == most and all(firsts):
                lowest = any(first[0].lowest for first in firsts if first)
                means.append((statistics.fmean(first[1] for first in firsts if first), runs[0]["chosen"]))
        if not means:
            continue
        best = (min if lowest else max)(mean for mean, _ in means)
        if settings and settings[0] not in [chosen for mean, chosen in means if mean == best]:
            yield f"{role}: its reported settings {settings[0]} are not those that its search found best"


def module_file(path: str) -> Path:
    """Return the file of the module of an algorithm `module:Class`.

    Raises:
        RecipeError: it is no single file.
    """
    module = path.partition(":")[0]
    result = find_spec(module) if MODULE.fullmatch(module) else None
    if result is None or not result.origin or not result.origin.endswith(".py") or result.submodule_search_locations:
        raise RecipeError(
            f"'{path}': an entry holds one file of code, so the method must be in a module that is a single file on "
            "PYTHONPATH"
        )
    return Path(result.origin)
