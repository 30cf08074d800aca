"""What clients tell about columns of words and empty cells before the first round: announced, checked and booked.

[data.columns] is fitted to the rows of the clients (`data/column_fitting.py`), so each client tells the words of its
rows, and sums and counts of its numbers. No task carries them: in a simulation the server reads them, a device reports
them when it enrols. They are statistics of the modality, so the policy, `polyfed check` and the ledger treat them as
such, and nobody tells them if the recipe names words and means.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.messages import Crossing
from polyfed.data.column_fitting import Features, Statistics, Told
from polyfed.data.column_rules import Feature, rules_of, suggestion
from polyfed.data.sources.own.npz import Npz
from polyfed.data.sources.own.table_files import Table
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.privacy.egress.announcement import Announced
from polyfed.privacy.egress.ledger import Entry, Ledger
from polyfed.privacy.egress.policy import Policy

SET_UP, MESSAGE, SERVER = "set-up", "ColumnStatistics", "server"
"""The name of the step and of the message in announcements and ledgers, and where the message goes."""


def announced(columns: Mapping[str, Features], policy: Policy) -> Iterator[Announced]:
    """Yield each column that is fitted, as a part of a message that every client sends before the first round."""
    for modality, features in columns.items():
        for feature in features:
            if feature.rule is not None and feature.rule.is_fitted:
                allowed = policy.allows("statistic", modality, SERVER)
                yield Announced(
                    task=SET_UP,
                    message=MESSAGE,
                    field=feature.column,
                    kind="statistic",
                    block=modality,
                    destination=SERVER,
                    allowed=allowed,
                    fix="" if allowed else policy.fix(("statistic",), modality, SERVER),
                    tells=_tells(feature),
                )


def _tells(feature: Feature) -> str:
    assert feature.rule is not None
    if feature.of_words:
        return f"the words that {feature.rule.min_rows} of a client's training rows have"
    return f"the sum and the number of the cells of a client's training rows, if {feature.rule.min_rows} have one"


def sizes_of(told: Sequence[Statistics]) -> dict[tuple[str, str], int]:
    """Return (modality, column) -> the bytes of the client that tells most."""
    sizes: dict[tuple[str, str], int] = {}
    for statistics in told:
        for modality, own in statistics.items():
            for column, one in own.items():
                sizes[modality, column] = max(sizes.get((modality, column), 0), one.bytes)
    return sizes


def book(ledger: Ledger, told: Sequence[Statistics]) -> None:
    """Record what each client told, as round 0 of the run."""
    alike: dict[tuple[tuple[Crossing, ...], tuple[str, ...]], list[int]] = {}
    for client, statistics in enumerate(told):
        if statistics:
            parts, hashes = parts_of(statistics)
            alike.setdefault((parts, hashes if ledger.hashing else ()), []).append(client)
    for (parts, hashes), clients in alike.items():
        ledger.book(entry_of(tuple(clients), parts, hashes))


def entry_of(
    clients: tuple[int, ...], parts: tuple[Crossing, ...], hashes: tuple[str, ...], *, sent: bool = True
) -> Entry:
    """Return the entry of the ledger for clients that told, or were not allowed to tell, these parts."""
    contents = hashes if sent else tuple("" for _ in hashes)
    return Entry(0, 0, clients, MESSAGE, parts, SERVER, (sent,) * len(parts), contents)


def parts_of(statistics: Statistics) -> tuple[tuple[Crossing, ...], tuple[str, ...]]:
    """Return what a client told as parts of a message, and the SHA-256 of each."""
    listed = [(modality, column, told) for modality, own in statistics.items() for column, told in own.items()]
    parts = tuple(
        Crossing(column, "statistic", modality, _kind(told), (len(told.words) or 2,), told.bytes)
        for modality, column, told in listed
    )
    return parts, tuple(hashlib.sha256(json.dumps(asdict(told)).encode()).hexdigest() for *_, told in listed)


def _kind(told: Told) -> str:
    return "words" if told.words else "float64"


def refuse_unnoised(recipe: Recipe, columns: Mapping[str, Features]) -> None:
    """Refuse to fit columns if the recipe promises that the server sees no single client's data without noise or mask.

    Raises:
        RecipeError: the recipe has [privacy] or [secure_aggregation], and columns without words or a mean.
    """
    method: Any = recipe.algorithm
    section = "privacy" if recipe.privacy is not None else "secure_aggregation"
    if recipe.privacy is None and getattr(method, "secure_aggregation", None) is None:
        return
    if fitted := [f for features in columns.values() for f in features if f.rule is not None and f.rule.is_fitted]:
        raise RecipeError(f"[{section}] with {named(fitted)}", ("data", "columns"))


def named(fitted: Sequence[Feature]) -> str:
    """Return the end of an error text: which columns would be told as they are, and how to name words and means."""
    return (
        f"[data.columns] {', '.join(f.column for f in fitted)}: each client would tell its words and means without "
        f"noise and without a mask. Name them in the recipe, as in {stated(fitted)}"
    )


def stated(fitted: Iterable[Feature]) -> str:
    """Return the rules of these columns with which nobody needs to tell words and means."""
    return suggestion({feature.column: _stated(feature) for feature in fitted})


def _stated(feature: Feature) -> dict[str, Any]:
    assert feature.rule is not None
    kept = {"size": feature.rule.size} if feature.rule.size else {}
    if feature.of_words:
        return {"kind": feature.rule.kind, **kept, "words": ["...", "..."]}
    return {"kind": feature.rule.kind, **feature.rule.start_and_impute, "mean": 0.0}


def fitted_columns(recipe: Recipe) -> list[Feature]:
    """Return the columns of a recipe's file that are fitted to the rows of the clients."""
    if not isinstance(recipe.data, Npz | Table):
        return []
    rules = rules_of("[data.columns]", recipe.data.columns)
    return [Feature(column=column, rule=rule) for column, rule in rules.items() if rule.is_fitted]


def refuse_forbidden(statistics: Statistics, policy: Policy, client: int) -> None:
    """Refuse to tell what a client's policy forbids.

    Raises:
        EgressError: the policy forbids a statistic of a modality. The text says what would allow it.
    """
    for modality, own in statistics.items():
        if not policy.allows("statistic", modality, SERVER):
            fix = policy.fix(("statistic",), modality, SERVER)
            raise EgressError(
                f"client {client} refused to tell the words and means of {', '.join(own)} (a statistic of {modality}) "
                f"to the server. It would tell them if the client's policy said: {fix}. Nobody needs to tell them if "
                "[data.columns] of the recipe names words and mean"
            )
