"""Finds the line numbers of faults in a recipe's file, for error texts."""

import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from polyfed.core.errors import PolyfedError
from polyfed.core.problems import copied, joined
from polyfed.experiment.recipes.overrides import called

Key = tuple[str, ...]

_HEADER = re.compile(r"\s*\[\[?(?P<key>[^\[\]]+)\]\]?\s*(#.*)?$")
_ENTRY = re.compile(
    r"""\s*(?P<key>(?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=(?P<rest>.*)"""
)


def in_file(errors: Sequence[PolyfedError], path: Path, text: str, overrides: Sequence[str]) -> PolyfedError:
    """Return one exception for all faults of a recipe's file.

    Args:
        errors: the faults. The attribute `key` of each fault is its place in the recipe.
        text: the content of the file.
        overrides: `section.key=value` from the command line. They replace lines of the file.

    Returns:
        An exception whose text names the file. If there are several faults, the text has one line for each fault.
        Each of these lines begins with the place of its fault: the number of the line in the file, or the override.
    """
    lines: dict[Key, int] = {}
    for key, number in _places(text):
        lines.setdefault(key, number)
    placed = [(_place(error.key, lines, overrides), error) for error in errors]
    placed.sort(key=lambda pair: (_line(pair[1].key, lines) or math.inf) if pair[0].startswith("line") else math.inf)
    places, numbered = [place for place, _ in placed], [error for _, error in placed]
    if len(errors) == 1:  # the name of the recipe already contains the overrides
        places = ["" if place.startswith("--set") else place for place in places]
    result = joined(numbered, places)
    return copied(result, f"{called(path, overrides)}: {result}")


def _place(key: Key, lines: dict[Key, int], overrides: Sequence[str]) -> str:
    """Return the words with which an error text begins, to say where the fault is; "" if the place is not known.

    Such words are "line 3: ", or "--set rounds=0: " for a value from the command line.
    """
    for override in overrides:
        name = _names(override.partition("=")[0])
        if key and name and name[: len(key)] == key[: len(name)]:
            return f"--set {override}: "
    line = _line(key, lines)
    return f"line {line}: " if line else ""


def _line(key: Key, lines: dict[Key, int]) -> int | None:
    """The line of an option, or of the section or table that should have it."""
    return next((lines[key[:length]] for length in range(len(key), 0, -1) if key[:length] in lines), None)


def _places(text: str) -> Iterator[tuple[Key, int]]:
    """Yield the line number, from 1, of each section and key of a TOML text. Lines inside long values are skipped."""
    section: Key = ()
    value = ""
    for number, line in enumerate(text.splitlines(), 1):
        if value:  # a value that spans several lines
            value += f"\n{line}"
            value = "" if _whole(value) else value
        elif header := _HEADER.match(line):
            section = _names(header["key"])
            yield section, number
        elif entry := _ENTRY.match(line):
            names = _names(entry["key"])
            yield from (((*section, *names[:length]), number) for length in range(1, len(names) + 1))
            rest = entry["rest"]
            value = "" if _whole(rest) else rest


def _names(key: str) -> Key:
    """The parts of a dotted key."""
    try:
        found = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    names: list[str] = []
    while isinstance(found, dict):
        ((name, found),) = found.items()
        names.append(name)
    return tuple(names)


def _whole(value: str) -> bool:
    """Whether a text is a complete TOML value."""
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return False
    return True
