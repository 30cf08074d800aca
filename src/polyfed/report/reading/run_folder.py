"""Reads the folder of a run line by line, because its files may be larger than memory."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from polyfed.core.errors import DataError, PolyfedWarning, command
from polyfed.core.system.files import EGRESS, FACTS, RECIPE, RESULT, ROUNDS, STUDY
from polyfed.core.system.json_and_toml import parse_toml
from polyfed.report.reading.run_schema import LIMIT, ROUND_ROW, RUN_FACTS, RUN_RESULT, parse_as
from polyfed.report.scores import Headline


@dataclass(frozen=True)
class Folder:
    """The files of one run, which may be unfinished.

    Attributes:
        path: the folder.

    Raises:
        DataError: the folder holds no run. Every property and method raises this error if the file that it reads is
            damaged.
    """

    path: Path

    def __post_init__(self) -> None:
        if not (self.path / RECIPE).is_file():
            if (self.path / STUDY).is_file():
                raise DataError(
                    f"{self.path} holds a study and no run. The page of the study is {self.path / 'index.html'}. To "
                    f"compare its runs, write {command('compare', self.path)}. For one run, give its folder, "
                    f"which {STUDY} names"
                )
            inside = sorted(found.parent.name for found in self.path.glob(f"*/{RECIPE}"))
            more = (
                f". It holds folders of runs; give {self.path}/{inside[0]}, or {self.path}/* for all" if inside else ""
            )
            raise DataError(
                f"{self.path} holds no run (no {RECIPE}). Give a folder that `polyfed run --out` made{more}"
            )

    @cached_property
    def recipe_text(self) -> str:
        """The text of recipe.toml."""
        try:
            return (self.path / RECIPE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise damaged(self.path / RECIPE, error) from None

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as a table."""
        try:
            table = parse_toml(self.recipe_text)
        except ValueError as error:
            raise damaged(self.path / RECIPE, error) from None
        for section in ("algorithm", "data", "engine"):
            if not isinstance(table.get(section, {}), dict):
                raise damaged(self.path / RECIPE, f"'{section}' is not a section")
        rounds = table.get("rounds", 0)
        if type(rounds) is not int or not 0 <= rounds < LIMIT:
            raise damaged(self.path / RECIPE, f"rounds = {rounds!r} is not a number of rounds")
        return table

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The content of run.json; empty if there is none."""
        return self.json(FACTS, RUN_FACTS)

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of result.json; empty if the run is not finished."""
        return self.json(RESULT, RUN_RESULT)

    @property
    def headline(self) -> Headline:
        """The metrics by which the run is judged."""
        return Headline.of(self.facts.get("task") or self.result.get("task"))  # known results have no run.json

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return int(self.facts.get("num_clients", len(self.facts.get("clients", ()))))

    @property
    def num_rounds(self) -> int:
        """The number of rounds of the recipe."""
        return int(self.recipe.get("rounds", 0))

    @property
    def modalities(self) -> list[str]:
        """The modalities, in the order of the model."""
        blocks = self.facts.get("egress") or self.facts.get("blocks") or {}
        return [block for block in blocks if block not in ("shared", "labels")]

    def rounds(self) -> Iterator[dict[str, Any]]:
        """The rows of rounds.jsonl."""
        for number, line in self.lines(ROUNDS):
            try:
                row = parse_as(ROUND_ROW, line)
            except ValueError as error:
                raise damaged(self.path / ROUNDS, error, number) from None
            yield row

    def lines(self, name: str) -> Iterator[tuple[int, str]]:
        """The lines of a file with their numbers, without a last line that a killed run left incomplete."""
        path = self.path / name
        if not path.is_file():
            return
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith("\n"):
                        yield number, line
        except OSError as error:
            raise damaged(path, error) from None

    def egress_lines(self) -> Iterator[tuple[int, str]]:
        """The lines of the ledger with their numbers."""
        return self.lines(EGRESS)

    def json(self, name: str, schema: TypeAdapter[Any]) -> dict[str, Any]:
        """The content of a JSON file; empty if there is none."""
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            return parse_as(schema, path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise damaged(path, error) from None


def finished(paths: Iterable[Path]) -> dict[Path, Folder]:
    """Return the folders that hold finished runs. A pattern such as `runs/*` also matches other folders.

    Raises:
        DataError: there are folders, but none of them holds a finished run.
    """
    found, others = {}, []
    for path in paths:
        try:
            folder = Folder(path)
            if not folder.result:
                raise DataError(f"{path} is not finished (no result.json). Resume it with `polyfed run --resume`")
            found[path] = folder
        except DataError as error:
            others.append(error)
    if others and not found:
        raise others[0]
    for why in others:
        warnings.warn(f"left out: {why}", PolyfedWarning, stacklevel=3)
    return found


def numbers_of(result: dict[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a result.json under dotted names such as `metrics.global.accuracy`. Texts are left out."""
    found: dict[str, float | None] = {}
    for key, value in result.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": number for name, number in numbers_of(value).items()}
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            found[key] = value
    return found


def damaged(path: Path, why: object, line: int | None = None) -> DataError:
    """The error for a damaged file.

    Args:
        why: what is wrong with it.
        line: the number of the line, from 1; None for the whole file.
    """
    place = f"{path}" if line is None else f"{path}, line {line}"
    return DataError(f"{place} is damaged: {why}. Restore it from a copy, or run the recipe again")
