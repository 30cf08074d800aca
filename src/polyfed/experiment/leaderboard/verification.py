"""Runs an entry of a board again and compares every number, without trusting the file.

The entry's recipes run under an `Allowance` (core/registry.py): they import no class but the entry's own method, read
no saved model, and no data but that which the reader names. The code of a method runs only if the reader asks for it by
its digest, or brings the file.
"""

import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polyfed.core.errors import DataError, Diverged, NotAllowed, PolyfedError, RecipeError, command
from polyfed.core.registry import Allowance, only
from polyfed.core.system.files import replace_text
from polyfed.core.system.json_and_toml import to_json
from polyfed.data import Columns
from polyfed.data.stacking import stacked
from polyfed.experiment.leaderboard.entry import (
    Entry,
    EntryRun,
    Part,
    algorithm_of,
    here,
    leaves,
    numbers,
    parts_of,
    read_entry,
    refuse,
    reported,
    table_of,
)
from polyfed.experiment.recipes.engine_choice import pytorch_settings
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import population_of
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.loop import execute
from polyfed.experiment.study.plan import quiet
from polyfed.experiment.study.ranges import at
from polyfed.report.comparison.labels import flat

RECEIPT = "polyfed board receipt 1"

STATE = "state_sha256"
"""The key of the digest of the final model in `result.json`."""

MOST_NAMED = 3
"""Largest number of differing values that are named for each run."""

LEAST_DIGITS = 12
"""Fewest digits of the SHA-256 by which a reader allows code to run."""


@dataclass
class Repetition:
    """What the repetition of an entry has found.

    Attributes:
        entry: the entry.
        sha256: the SHA-256 of its file.
        search: whether the runs of the search were repeated too.
        runs: the number of repeated runs.
        faults: what differs, in sentences; none if every number is the same.
        remarks: what the reader must know besides, in sentences.
    """

    entry: Entry
    sha256: str
    search: bool
    runs: int = 0
    faults: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def receipt(self) -> dict[str, Any]:
        """Return who checked what, when and where, for the page of a board."""
        return {
            "format": RECEIPT,
            "entry": self.sha256,
            "runs": self.runs,
            "search": self.search,
            "differing": len(self.faults),
            "when": datetime.now(UTC).date().isoformat(),
            "made": here(),
        }


def verify_entry(
    file: str | Path,
    *,
    data: str | Path | None = None,
    code: str | Path | None = None,
    run_code: str = "",
    search: bool = False,
    receipt: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Repetition:
    """Run an entry again, and compare every number and state digest.

    Args:
        file: the entry.
        data: the data file or folder, for an entry whose data does not come with polyfed.
        code: a file with the method's code, which must be that of the entry.
        run_code: the beginning of the SHA-256 of the entry's code, which allows it to run.
        search: whether to repeat the runs of the search too.
        receipt: a file for who checked what, when and where.
        say: called with a sentence before each run.

    Raises:
        DataError: the file is no entry, breaks rules of the board, or the data is another.
        NotAllowed: the entry has code that the reader did not allow.
        RecipeError: the entry needs data or other code.
    """
    file, data, code = Path(file), _path(data), _path(code)
    entry, digest = read_entry(file)
    result = Repetition(entry, digest, search)
    with _allowed_code(entry, file, code, run_code) as imports:
        _check_data(entry, file, data, imports)
        todo = [
            (role, part, run) for role, part in parts_of(entry) for run in part["runs"] if search or not run["tuning"]
        ]
        for number, (role, part, run) in enumerate(todo, 1):
            say(f"run {number} of {len(todo)}: {role}, {part['name']}, seed {run['seed']}")
            result.faults += [f"{role}, seed {run['seed']}: {one}" for one in _differences(part, run, data, imports)]
            result.runs += 1
    if result.faults:
        result.faults.append(_cause(entry))
    left = sum(run["tuning"] for _, part in parts_of(entry) for run in part["runs"])
    if left and not search:
        result.remarks.append(f"not repeated: the {left} runs of the search (--search)")
    if "placebo" not in entry:
        result.remarks.append(f"no placebo: {entry['no_placebo']}")
    if receipt is not None:
        replace_text(Path(receipt), to_json(result.receipt()) + "\n")
    return result


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def refuse_differing(file: Path, found: Repetition) -> None:
    """Raise an error that tells what differs.

    Raises:
        DataError: something differs.
    """
    refuse(f"{file} does not repeat", found.faults)


def code_of(file: Path) -> str:
    """Return the code of an entry's method, to be read.

    Raises:
        RecipeError: the entry has none.
    """
    code = read_entry(file)[0]["code"]
    if code is None:
        raise RecipeError(f"{file} has no code: its method comes with polyfed")
    return code["text"]


@contextmanager
def _allowed_code(entry: Entry, file: Path, given: Path | None, run_code: str) -> Iterator[tuple[str, ...]]:
    """Make the code of an entry's method importable, if the reader allows it. Yield the classes that may be imported.

    Raises:
        NotAllowed: the reader did not allow it.
        RecipeError: the reader allowed other code, or a package of this name is installed.
    """
    code = entry["code"]
    if code is None:
        if given is not None or run_code:
            raise RecipeError(f"{file} has no code: its method comes with polyfed. Leave out --code and --run-code")
        yield ()
        return
    module, digest = code["module"], code["sha256"]
    lines = code["text"].count("\n")
    if given is not None:
        if given.read_bytes() != code["text"].encode():
            raise RecipeError(f"--code {given} is not the code of the entry (SHA-256 {digest})")
    elif not run_code:
        raise NotAllowed(
            f"{file} has code of its author, {module}.py: {lines} lines, SHA-256 {digest}. It can do whatever you can "
            f"do, so it is not run unasked. Read it with `{command('board', 'code', file)}`; then add "
            f"--run-code {digest[:LEAST_DIGITS]}, or --code FILE with your own copy"
        )
    elif len(run_code) < LEAST_DIGITS or not digest.startswith(run_code):
        raise NotAllowed(
            f"--run-code {run_code} is not the SHA-256 of the entry's code, {digest}: do not run it unread"
        )
    known = False
    with suppress(ImportError, ValueError):
        known = module in sys.modules or importlib.util.find_spec(module) is not None
    if known:
        raise RecipeError(
            f"the entry's code is the module '{module}', and there is another of this name. Run elsewhere"
        )
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{module}.py"
        path.write_text(code["text"], encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            yield tuple({algorithm_of(part) for _, part in parts_of(entry) if ":" in algorithm_of(part)})
        finally:
            sys.path.remove(folder)
            sys.modules.pop(module, None)
            importlib.invalidate_caches()


def _check_data(entry: Entry, file: Path, data: Path | None, imports: tuple[str, ...]) -> None:
    """Refuse other data than that of the entry, and a method that has a placebo but lacks it here.

    Raises:
        DataError: the data is another.
        RecipeError: the entry needs --data, or does not use it.
    """
    part = entry["method"]
    needed = at(part["recipe"], "data.path")
    if needed is not None and data is None:
        raise RecipeError(f"{file} needs its data, '{needed}', which an entry does not hold. Give it: --data PATH")
    if needed is None and data is not None:
        raise RecipeError(f"--data {data}: the data of {file} comes with polyfed. Leave it out")
    recipe = _recipe(part, part["runs"][0], data, imports)
    if "placebo" not in entry and hasattr(recipe.algorithm, "placebo"):  # `faults_of` knows only polyfed's methods
        raise DataError(f"{file}: the method has an option `placebo`, and the entry lacks the placebo")
    with _restricted(imports, recipe):
        columns = _loaded(recipe, entry["method"], data)
    if columns.fingerprint() != entry["data"]:
        raise DataError(f"{file} is about other data than {data or at(part['recipe'], 'data.name')}: its rows differ")


def _recipe(part: Part, run: EntryRun, data: Path | None, imports: tuple[str, ...]) -> Recipe:
    """Return the recipe of a run, with the reader's data."""
    table = table_of(part, run)
    if data is not None:
        table["data"]["path"] = str(data)
    with only(Allowance(imports=imports)):
        try:
            return quiet(table)
        except NotAllowed as error:
            raise NotAllowed(f"the recipe of {part['name']} names what an entry may not: {error}") from None


def _loaded(recipe: Recipe, part: Part, data: Path | None) -> Columns:
    """Return the data of a recipe. Those of the reader bear the entry's name, whatever the reader's file is called."""
    columns = stacked(recipe.data.load(), recipe.stack)
    result = reported(part)[0]["result"]
    if data is None or result is None:
        return columns
    return replace(columns, name=str(result["dataset"]))


@contextmanager
def _restricted(imports: tuple[str, ...], recipe: Recipe) -> Iterator[None]:
    """Refuse what the recipe of a stranger may not use. Arrays are the reader's own, and nothing of them is sent."""
    said = recipe.table()["data"]
    roles = {role: (str(said[role]),) for role in ("label", "ids", "split", "class_names") if said.get(role)}
    joined = flat({"columns": said.get("columns", {}), "modalities": said.get("modalities", {})})
    names = [name for value in joined.values() for name in (value if isinstance(value, list) else [value])]
    columns = tuple(str(name) for name in (*names, *(said.get("columns") or {})))
    with only(Allowance(imports=imports, columns=columns, **roles)):
        yield


def _differences(part: Part, run: EntryRun, data: Path | None, imports: tuple[str, ...]) -> Iterator[str]:
    """Run a recipe, and yield what is not as in the entry."""
    recipe = _recipe(part, run, data, imports)
    result: dict[str, Any] | None
    try:
        with _restricted(imports, recipe), warnings.catch_warnings(), pytorch_settings(recipe):
            warnings.simplefilter("ignore")  # the author has seen them
            population = population_of(recipe, _loaded(recipe, part, data))
            result = json.loads(to_json(numbers(execute(recipe, None, Emitter([]), population=population).result)))
    except Diverged:
        result = None
    except DataError:
        raise
    except PolyfedError as error:
        yield f"the run fails: {error}"
        return
    if result is None or run["result"] is None:
        if result is not run["result"]:
            yield f"training {'diverges' if result is None else 'does not diverge'} here"
        return
    yield from _other_values(run["result"], result)


def _other_values(told: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values that differ, the first ones by name."""
    file, own, absent = leaves(told), leaves(found), object()
    keys = sorted(file.keys() | own.keys(), key=lambda key: (key != (STATE,), key[0] != "metrics", key))
    wrong = [key for key in keys if file.get(key, absent) != own.get(key, absent)]
    for key in wrong[:MOST_NAMED]:
        yield f"{'.'.join(key)} is {own.get(key, 'absent')} here, and {file.get(key, 'absent')} in the file"
    if len(wrong) > MOST_NAMED:
        yield f"and {len(wrong) - MOST_NAMED} more values, of {len(keys)}"


def _cause(entry: Entry) -> str:
    """Return the likely cause of differences."""
    told, now = entry["made"], here()
    used = now["versions"]
    other = [f"{n} {v} there, {used.get(n, 'none')} here" for n, v in told["versions"].items() if used.get(n) != v]
    if told["processor"] != now["processor"]:
        other.append(f"the processor {told['processor']} there, {now['processor']} here")
    if other:
        return f"likely cause: {', '.join(other)}, which may sum in another order. Repeat it with the same"
    if told["polyfed"] != now["polyfed"]:
        return "likely cause: the code of polyfed is another (same versions and processor)"
    return "the same code, versions and processor made this entry, so its numbers are not those of its recipes"
