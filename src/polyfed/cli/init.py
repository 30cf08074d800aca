"""`polyfed init`: a first recipe for your own data file, and the lines of a recipe that an algorithm needs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.base import Algorithm
from polyfed.cli.printing import catalogue
from polyfed.core.errors import PolyfedError, RecipeError, again, command, did_you_mean
from polyfed.core.messages import DESTINATIONS, KINDS, LABELS
from polyfed.core.problems import Problems, copied
from polyfed.core.system.files import replace_text
from polyfed.core.system.json_and_toml import parse_toml, toml_value
from polyfed.core.tree import SHARED
from polyfed.data.column_rules import rules_of
from polyfed.data.reading.array_files import existing
from polyfed.data.reading.column_guess import START, rule_for
from polyfed.data.sources.own.table_files import read
from polyfed.experiment.recipes.file_reading import dialect_of
from polyfed.experiment.recipes.first_recipe import Starter, starter
from polyfed.experiment.recipes.overrides import apply
from polyfed.model import ModelSpec
from polyfed.privacy.egress.policy import EVERY, Policy


def write_recipe(
    file: Path,
    out: Path,
    columns: Mapping[str, str | list[str] | None],
    rules: Mapping[str, Any] | None = None,
    task: str | None = None,
    *,
    leave_out: Sequence[str] = (),
    overrides: Sequence[str] = (),
    force: bool = False,
) -> tuple[str, ...]:
    """Write a complete recipe for a data file.

    Args:
        file: the data file.
        out: the recipe to write.
        columns: values of the [data] options `label`, `client`, `person`, `split` and `class_names`. All but the last
            are names of an array or column; `label` may be a list of names. `class_names` is a list of the names of the
            classes. If a value is None, the function guesses it, except for `person`.
        rules: the section [data.columns], or nothing.
        task: name of the task; if None, the labels determine the task.
        leave_out: columns or arrays that form no modality.
        overrides: more options of [data] and [clients], each as `section.key=value`.
        force: whether to replace the recipe `out`.

    Returns:
        Sentences about all guesses.

    Raises:
        RecipeError: the file `out` exists already, or an override is of another section.
        PolyfedError: the data cannot be read, or no labels or modalities are found in it.
    """
    if out.exists() and not force:
        raise RecipeError(
            f"{out} exists already; nothing was replaced. Choose another file with --out, or replace it with --force"
        )
    try:
        made = _made(file, out, columns, rules or {}, task, leave_out, overrides)
    except PolyfedError as error:
        if not out.exists():
            raise
        raise copied(error, f"{error}\n{out} is the recipe from before") from None
    replace_text(out, made.text)
    return made.notes


def _made(
    file: Path,
    out: Path,
    columns: Mapping[str, str | list[str] | None],
    rules: Mapping[str, Any],
    task: str | None,
    leave_out: Sequence[str],
    overrides: Sequence[str],
) -> Starter:
    result: dict[str, Any] = {}
    for override in overrides:
        apply(result, override)
    if strange := [override for override in overrides if override.partition(".")[0] not in ("data", "clients")]:
        others = [("--set", override) for override in strange]
        first = again(otherwise=command("init", file, "--out", out), without=others)
        then = command("run", out, *(word for option in others for word in option))
        raise RecipeError(
            f"--set {strange[0]}: init takes options of [data] and [clients]. Give the others to the commands that "
            f"read the recipe: {first}, then {then}"
        )
    known = result.get("data", {}) | {key: value for key, value in columns.items() if value is not None}
    ruled = {**known.get("columns", {}), **_dated(file, rules, known)}
    options = known | ({"columns": ruled} if ruled else {}) | {"leave_out": leave_out}
    return starter(file, options, task, result.get("clients", {}))


def _dated(file: Path, rules: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rules, with the start and the format of each date for which the user has given neither."""
    if DATE not in rules.values():
        return dict(rules)
    frame, result = read(existing(file, "data"), Problems(), dialect=dialect_of(options)), {}
    for column, rule in rules.items():
        guess = rule_for(frame[column]) if rule == DATE and column in frame.columns else rule
        result[column] = {"kind": DATE, "start": START} if guess is None or isinstance(guess, str) else guess
        result[column] = rule if rule != DATE else result[column]
    return result


DATE = "date"

SOME = "a"
"""The modality of the printed recipe that may be shared, for a method that cannot run with one row for all of them."""


def rules_in(words: Sequence[str]) -> dict[str, Any]:
    """Return the rules of columns that the command line gives, each as NAME=RULE.

    Raises:
        RecipeError: a word is no such rule.
    """
    result: dict[str, Any] = {}
    for word in words:
        name, _, rule = word.partition("=")
        try:
            result[name] = parse_toml(f"it = {rule}")["it"] if rule.strip().startswith("{") else rule
            if result[name] != DATE:  # its start and format are guessed from the cells
                rules_of("--column", {name: result[name]})
        except ValueError as error:
            raise RecipeError(f"--column {word}: {error}. Write NAME=one-hot, NAME=mean, or a table in TOML") from None
    return result


_MEANS = {
    EVERY: "every modality without a row of its own",
    SOME: "the modalities that may be shared; the method keeps at least one private",
}

_BASE: dict[str, dict[str, Any]] = {
    "data": {"name": "toy", "rows": 400},
    "clients": {"partition": "iid", "num": 4},
    "train": {"lr": 0.1},
}
"""The data and the clients of the printed recipe."""


def lines_for(name: str | None) -> str:
    """Return a whole recipe for an algorithm with default options, which runs as it is, on synthetic data.

    Raises:
        RecipeError: no name is given, or there is no such algorithm.
    """
    if name is None:
        raise RecipeError(f"--recipe needs the name of an algorithm; {did_you_mean('', ALGORITHMS)}")
    needs = catalogue.algorithm_named(name).needs
    lines = [
        f"# {name} on synthetic data. `polyfed init FILE` writes [data], [clients] and [model] for yours.",
        "seed = 1",
        "rounds = 2",
    ]
    for section in (*_BASE, *(needs.keys() - _BASE.keys())):
        own = needs.get(section, {})
        held = {} if "partition" in own else _BASE.get(section, {})
        told = f"  # {name} needs {', '.join(own)}" if own else ""
        lines += ["", f"[{section}]{told}", *(f"{key} = {toml_value(value)}" for key, value in {**held, **own}.items())]
    lines += ["", "[algorithm]", f'name = "{name}"']
    needed = egress_of(name)
    if not needed:
        lines += ["", "# no [egress] rows are needed: without any, parameters, gradients and statistics may leave"]
    for block, row in needed.items():
        lines += ["", f"[egress.{json.dumps(block) if block == EVERY else block}]"]
        lines += [f"{destination} = {json.dumps(kinds)}" for destination, kinds in row.items()]
        if block in _MEANS:
            lines[-len(row) - 1] += f"  # {_MEANS[block]}"
    return "\n".join(lines)


def egress_of(name: str) -> dict[str, dict[str, list[str]]]:
    """Return the policy that allows exactly the data that an algorithm with default options sends.

    Raises:
        RecipeError: there is no such algorithm.
    """
    cls = catalogue.algorithm_named(name)
    needed: dict[tuple[str, str], set[str]] = {}
    for row in catalogue.crossings(cls):
        if row.way not in DESTINATIONS:
            continue
        blocks = [LABELS] if row.kind == LABELS else row.blocks.split(", ")
        for block in blocks:
            needed.setdefault((EVERY if block == "modalities" else block, row.way), set()).add(row.kind)
    rows: dict[str, dict[str, list[str]]] = {}
    for block in (EVERY, SHARED, LABELS):  # modalities come first, because `shared` inherits from them
        for destination in DESTINATIONS:
            kinds = needed.get((block, destination), set())
            policy = Policy.parse(rows, ["any"])
            if not kinds <= policy.kinds("any" if block == EVERY else block, destination):
                rows.setdefault(block, {})[destination] = [kind for kind in KINDS if kind in kinds]
    if EVERY in rows and not _runs(cls, rows):
        return {SOME if block == EVERY else block: row for block, row in rows.items()}
    return rows


def _runs(cls: type[Algorithm], rows: dict[str, dict[str, list[str]]]) -> bool:
    """Return whether the algorithm can train a model under this policy, in a federation with two modalities."""
    names = ("one", "two")
    try:
        cls().model_spec(ModelSpec(), names, Policy.parse(rows, names))
    except RecipeError:
        return False
    return True
