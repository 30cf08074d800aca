"""The conditions of a study, [[when]]: whether they hold for a recipe, and whether they can hold at all."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.errors import did_you_mean
from polyfed.experiment.study.ranges import at
from polyfed.experiment.study.study_schema import NAMES, When


def holds(match: Mapping[str, Any], table: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Return whether all entries of a condition hold.

    If an entry gives a list of values, it holds if the actual value is in the list.
    """
    for key, wanted in match.items():
        value = names[key] if key in NAMES else at(table, key)
        if value not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def unknown_keys(rules: Sequence[When], tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a text for each key of a condition that no recipe of the study sets. Such a condition never holds.

    Args:
        rules: the conditions.
        tables: the recipes of all cells. If there are none, the result is empty.
    """
    return [
        f"[[when]] {number} match: no recipe of the study sets '{key}'; {did_you_mean(key, NAMES)}, or keys of a recipe"
        for number, rule in enumerate(rules, 1)
        for key in rule.match
        if tables and key not in NAMES and all(at(table, key) is None for table in tables)
    ]
