"""The purposes for which a device takes part: the [purposes] section of its policy file. No recipe can loosen it.

An example:

    [purposes.sepsis-2027]
    until = 2027-03-31
    training = false

A recipe names its purpose, `[deployment] purpose`. With this section, a device takes part only in runs for a purpose
that it lists, until the end of the day `until` (UTC, by the device's own clock), and lets tasks read its training rows
or its held-out rows only if it says so. What a task is called does not matter: the device watches what it reads. No
device can verify whether a run serves the purpose that its recipe names.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import checked


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What holds for one purpose: a table [purposes.NAME].

    Attributes:
        until: the last day on which the device takes part; None for no end.
        training: whether tasks may read the training rows.
        evaluation: whether tasks may read the device's own test and validation rows.
    """

    until: date | None = None
    training: bool = True
    evaluation: bool = True

    def sentence(self) -> str:
        """Return the terms in words, such as `until 2027-03-31, evaluation only`."""
        both = {
            (True, True): "training and evaluation",
            (True, False): "training only",
            (False, True): "evaluation only",
        }
        what = both.get((self.training, self.evaluation), "neither training nor evaluation")
        return what if self.until is None else f"until {self.until}, {what}"


@dataclass(frozen=True)
class Purposes:
    """The section [purposes].

    Attributes:
        named: purpose -> terms; None without the section, and then the device takes part for any purpose.
    """

    named: Mapping[str, Terms] | None = None

    @classmethod
    def parse(cls, table: Any, where: str) -> "Purposes":
        """Read the section.

        Args:
            table: the section as parsed from TOML, or None if the file has none.
            where: the file, for messages.

        Raises:
            RecipeError: it is not made of tables, or a key or value of one is wrong.
        """
        if table is None:
            return cls()
        if not isinstance(table, Mapping) or not all(isinstance(entry, Mapping) for entry in table.values()):
            raise RecipeError(
                f"{where} [purposes] is made of tables, such as [purposes.sepsis] with until = 2027-03-31"
            )
        return cls({name: _terms(entry, f"{where} {header(name)}") for name, entry in table.items()})

    def terms(self, purpose: str) -> Terms | None:
        """Return the terms of a purpose; None if the device does not take part for it."""
        return ANY if self.named is None else self.named.get(purpose)

    def refusal(self, purpose: str, now: datetime, evaluates: bool | None = None) -> str:
        """Return why the device takes no part in a run, or "".

        Args:
            purpose: what the recipe names.
            now: the moment, with its time zone.
            evaluates: whether the run only evaluates, if that is to be compared too.
        """
        terms = self.terms(purpose)
        if terms is None:
            said = f"its purpose is {json.dumps(purpose)}" if purpose else "it names no purpose ([deployment] purpose)"
            fix = f": {header(purpose)}" if purpose else " no [purposes], or the recipe named one of them"
            return f"{said}, and this device takes part for certain purposes only. It would if its policy file had{fix}"
        if terms.until is not None and now.astimezone(UTC).date() > terms.until:
            return f"{header(purpose)} until = {terms.until} of the device has passed"
        if evaluates is False and not terms.training:
            return f"{header(purpose)} training = false of the device, and the recipe trains"
        if evaluates and not terms.evaluation:
            return f"{header(purpose)} evaluation = false of the device, and the recipe evaluates"
        return ""

    def sentences(self) -> tuple[str, ...]:
        """Return each purpose with its terms in words."""
        if self.named == {}:
            return ("the device takes part for no purpose",)
        return tuple(f"{header(name)} {terms.sentence()}" for name, terms in (self.named or {}).items())


@dataclass(frozen=True, kw_only=True)
class _Flags:
    """The keys of a table that are truth values."""

    training: bool = True
    evaluation: bool = True


ANY = Terms()
"""The terms of every purpose on a device without the section."""


def header(purpose: str) -> str:
    """Return the header of the table of a purpose in TOML."""
    return f"[purposes.{purpose if re.fullmatch('[A-Za-z0-9_-]+', purpose) else json.dumps(purpose)}]"


def _terms(table: Mapping[str, Any], where: str) -> Terms:
    until = table.get("until")
    if until is not None and (not isinstance(until, date) or isinstance(until, datetime)):
        raise RecipeError(f"{where} until = {until!r}: must be a day without quotes, as in until = 2027-03-31")
    rest = {key: value for key, value in table.items() if key != "until"}
    return Terms(until=until, **checked(where, _Flags, rest))
