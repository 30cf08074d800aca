"""Names for groups of runs: the algorithm, and the options in which a group differs from others."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.report.comparison.folds import FOLD_KEYS
from polyfed.report.reading.run_folder import Folder

IGNORED = ("seed", "versions", "checkpoint", "tracking")
"""Parts of a resolved recipe in which runs of one group may differ, because they do not change the method."""

UNNAMED = ("egress.", "limits.")
"""The first words of the recipe's keys that permit what a method does. Methods are named by the other differences, and
by these only if there are no others."""

SCENARIO = ("data.", "clients.", "rounds")
"""The first words of the recipe's keys that describe the scenario. They are the same for all methods of one
scenario."""

PLACEBO = "algorithm.placebo"
"""The option with which an algorithm runs a control experiment of the same cost. The value "none" runs the method."""

MOST_DIFFERENCES = 4
"""The largest number of differing options in a label."""


def method_of(folder: Folder) -> dict[str, Any]:
    """The recipe as a flat table with dotted names, without the parts that may differ within a group."""
    method = flat({key: value for key, value in folder.recipe.items() if key not in IGNORED})
    return {key: value for key, value in method.items() if key not in FOLD_KEYS}


def without_placebo(folder: Folder, searched: Sequence[str]) -> tuple[str, str]:
    """Return a text that is the same for a method and its placebos, and the placebo ("none" for the method itself).

    The recipe of a placebo differs from that of its method only in the key `algorithm.placebo`, and in the values that
    a search chose for its keys `searched`. The placebo is an empty text if the algorithm has no key `placebo`.
    """
    method = method_of(folder)
    placebo = str(method.pop(PLACEBO, ""))
    kept = sorted((key, "" if key in searched else value) for key, value in method.items())
    return repr(kept), placebo


def parts_of(folders: Sequence[Folder]) -> list[tuple[str, str]]:
    """Return the method and the scenario of each group. The scenario is empty if all groups have the same one."""
    tables = [method_of(folder) for folder in folders]
    scenarios = [{k: v for k, v in table.items() if k.startswith(SCENARIO)} for table in tables]
    methods = [{k: v for k, v in table.items() if not k.startswith(SCENARIO)} for table in tables]
    if all(scenario == scenarios[0] for scenario in scenarios):
        return [(label, "") for label in labels_of(folders)]
    return list(zip(_distinct(methods, "algorithm.name"), _distinct(scenarios, "data.name"), strict=True))


def _distinct(tables: Sequence[Mapping[str, Any]], head: str) -> list[str]:
    """Return a label for each table of options. Equal tables have equal labels."""
    unique = {repr(sorted(table.items())): table for table in tables}
    labels = dict(zip(unique, _labels(list(unique.values()), head), strict=True))
    taken = list(labels.values())
    labels = {
        key: label if taken.count(label) == 1 else f"{label} ({number})"
        for number, (key, label) in enumerate(labels.items(), 1)
    }
    return [labels[repr(sorted(table.items()))] for table in tables]


def flat(table: dict[str, Any], head: str = "") -> dict[str, Any]:
    """Nested tables as one flat table with dotted names."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        result |= flat(value, f"{head}{key}.") if isinstance(value, dict) else {f"{head}{key}": value}
    return result


def labels_of(folders: Sequence[Folder]) -> list[str]:
    """A name for each group: its algorithm, and the options in which the group differs from the others.

    Options that only one algorithm has are left out, because the name of the algorithm already distinguishes the group.
    """
    labels = _labels([method_of(folder) for folder in folders], "algorithm.name") if folders else []
    return [
        label if labels.count(label) == 1 else f"{label} ({folder.path.name})"
        for label, folder in zip(labels, folders, strict=True)
    ]


def _labels(methods: Sequence[Mapping[str, Any]], head: str) -> list[str]:
    """Return a label for each table of options, such as "fedavg lr=0.1".

    A label starts with the value that the table has under the key `head`. Then come the options whose values are not
    the same in all tables.
    """
    names = [str(method.get(head, "?")) for method in methods]
    common = [key for key in methods[0] if all(key in method for method in methods)]
    differing = [key for key in common if any(m[key] != methods[0][key] for m in methods)]
    labels = []
    for name, method in zip(names, methods, strict=True):
        twins = [other for other, n in zip(methods, names, strict=True) if n == name]
        own = [k for k in method if k not in common and any(o.get(k) != method[k] for o in twins)]
        keys = [key for key in differing if key != head] + own
        keys = [key for key in keys if not key.startswith(UNNAMED)] if _named_apart(methods, head) else keys
        words = [f"{_short(key, method)}={_value(method[key])}" for key in keys[:MOST_DIFFERENCES]]
        labels.append(" ".join([name, *words]))
    return labels


def _named_apart(methods: Sequence[Mapping[str, Any]], head: str) -> bool:
    """Return whether different tables differ in more than what they permit, so that their names need not say it."""

    def named(method: Mapping[str, Any]) -> str:
        return repr(sorted((key, value) for key, value in method.items() if not key.startswith(UNNAMED)))

    whole = {repr(sorted(method.items())) for method in methods}
    return len({named(method) for method in methods}) == len(whole)


def _short(key: str, method: Mapping[str, Any]) -> str:
    """Return the last part of an option's name, with its section if the method has several options of this name."""
    name = key.rpartition(".")[2]
    alike = [other for other in method if other.rpartition(".")[2] == name]
    return key if name in ("name", "kind", "seed") or len(alike) > 1 else name


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
