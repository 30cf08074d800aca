"""Parse JSON and TOML files that another person may have written or damaged, and write both.

A file can be valid JSON or TOML and still crash the code that uses its values: a very deep nesting breaks code that
walks through the values, and an integer of thousands of digits cannot become a float. The functions here refuse such a
file with a ValueError, as if it were invalid.
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

MOST_DEPTH = 200
"""The deepest nesting that is accepted, counted in lists and tables. The files that polyfed writes are nested far less
deeply."""

CAUSES = "TOML needs quotes around words, `true` and `false` in lower case, and one `key = value` on each line"

_STRING_OR_COMMENT = re.compile(
    r"""("{3}(?:\\.|(?!"{3}).)*+(?:"{3})?|'{3}(?:(?!'{3}).)*+(?:'{3})?|"(?:\\[^\n]|[^"\\\n])*+"?|'[^'\n]*+'?)|#[^\n]*+""",
    re.DOTALL,
)
"""A string of TOML, which is group 1, or a comment. A string without an end extends to the end of the line or of the
text, so no attempt to match fails, and a search reads each character once."""

_DOTTED = re.compile(r"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+)++")
"""A dotted key without its last part. Strings must have been replaced by single letters."""

LARGEST = 10**300
"""Integers of at least this size are refused, because a float cannot hold them."""


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: `text` is not JSON, is nested too deeply, or holds an integer that is too large.
    """
    return _guarded(lambda: json.loads(text))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: `text` is not TOML, is nested too deeply, or holds an integer that is too large. If the text is not
            TOML, the error quotes the line and names the usual causes.
    """
    _refuse_long_keys(text)
    try:
        table: dict[str, Any] = _guarded(lambda: tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = text.splitlines()[int(place[1]) - 1].strip() if place else ""
        shown = f", which reads: {line:.80}" if line.isprintable() and line else ""
        raise ValueError(f"{error}{shown}. {CAUSES}") from None
    return table


def toml_value(value: Any) -> str:
    """Return a value on one line of TOML: a string, a number, a list, or an inline table."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{toml_key(key)} = {toml_value(entry)}' for key, entry in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


def toml_key(name: str) -> str:
    """Return a key of TOML: bare if its letters allow that, else in quotes."""
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else toml_value(name)


def _refuse_long_keys(text: str) -> None:
    """Refuse TOML with a dotted key of too many parts, such as `a.a.a.a = 1`, before Python's parser reads it.

    The parser needs time and memory that grow with the square of the number of parts, so a key of 100 kB would take
    gigabytes.
    """
    plain = _STRING_OR_COMMENT.sub(lambda found: "s" if found[1] else "", text)
    if any(found[0].count(".") >= MOST_DEPTH for found in _DOTTED.finditer(plain)):
        raise ValueError(_too_deep())


def _guarded(parse: Callable[[], Any]) -> Any:
    """Parse text, and refuse content that is nested too deeply or holds an integer that is too large."""
    try:
        content = parse()
    except RecursionError:
        raise ValueError(_too_deep()) from None
    refuse_extremes(content)
    return content


def refuse_extremes(content: Any) -> None:
    """Refuse lists and dictionaries that are nested too deeply, or that hold an integer that is too large.

    Raises:
        ValueError: the content exceeds a limit. The text names the limit.
    """
    level, depth = [content], 0
    while level:
        if depth > MOST_DEPTH:
            raise ValueError(_too_deep())
        below: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                below.extend(entry.values())
            elif isinstance(entry, list):
                below.extend(entry)
            elif isinstance(entry, int) and not -LARGEST < entry < LARGEST:
                raise ValueError("it holds an integer of more than 300 digits")
        level, depth = below, depth + 1


def _too_deep() -> str:
    return f"it is nested more than {MOST_DEPTH} levels deep"


def json_ready(value: Any) -> Any:
    """Convert nested lists and dictionaries for JSON. Numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: json_ready(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(content: Any) -> str:
    """Return indented JSON without NaN or infinity: the format of result.json and of `polyfed run --json`."""
    return json.dumps(json_ready(content), indent=1, allow_nan=False)
