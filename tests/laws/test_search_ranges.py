"""The law of search ranges: every option that a search could vary says which values it tries, or why none."""

from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from laws.rows import ROWS
from polyfed.algorithms import ALGORITHMS
from polyfed.core.option_checks import not_searched, ranges, search_ranges
from polyfed.data import ClientsSpec
from polyfed.experiment.recipes.sections import PARTS
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.selection import SELECTORS
from polyfed.training.optimisers import Train
from world import algorithm, played, recipe

CLASSES: dict[str, type] = {**ALGORITHMS, **SELECTORS, "[train]": Train, "[server]": ServerOptimiser}


def choice_or_number(hint: Any) -> bool:
    """Whether a type holds numbers or a choice of words, with or without None."""
    if get_origin(hint) in (Union, UnionType):
        return all(choice_or_number(part) for part in get_args(hint) if part is not type(None))
    return hint in (int, float, bool) or get_origin(hint) is Literal


def built(cls: type, **options: Any) -> Any:
    return cls(**options)


@pytest.mark.parametrize("name", CLASSES)
def test_every_number_and_choice_has_a_range_or_a_reason(name: str) -> None:
    cls, hints = CLASSES[name], get_type_hints(CLASSES[name])
    wanted = {f.name for f in fields(cls) if f.name not in PARTS and choice_or_number(hints[f.name])}
    ranged, reasons = set(search_ranges(cls)), set(not_searched(cls))
    assert wanted == ranged | reasons
    assert not ranged & reasons
    assert all(entry.why for entry in not_searched(cls).values())


@pytest.mark.parametrize("name", CLASSES)
def test_the_values_are_accepted_and_surround_the_default(name: str) -> None:
    cls = CLASSES[name]
    defaults = {f.name: f.default for f in fields(cls)}
    for option, searched in search_ranges(cls).items():
        beside, *needed = searched.beside or ("", None)
        assert not beside or beside in defaults
        for other in needed:
            given = {beside: other} if beside else {}
            for value in searched.values:
                made = built(cls, **given, **{option: value})
                assert getattr(made, option) == value
                assert type(value) is type(defaults[option])
            assert searched.applies({**defaults, **given})
        if isinstance(searched.values[0], bool | str):
            assert defaults[option] in searched.values
        else:
            assert list(searched.values) == sorted(set(searched.values))
            assert searched.values[0] <= defaults[option] <= searched.values[-1]
        assert option not in ranges(cls) or all(ranges(cls)[option].holds(value) for value in searched.values)


def test_an_option_without_declaration_is_found() -> None:
    """The first law is not empty: it sees the options that it is about."""
    hints = get_type_hints(ALGORITHMS["cmsfed"])
    assert {n for n, hint in hints.items() if choice_or_number(hint)} >= {"ratio_rule", "sketch", "modality_selection"}
    assert not choice_or_number(get_type_hints(ALGORITHMS["partialfl"])["local_hidden"])


def test_there_is_one_grid_of_seven_learning_rates() -> None:
    assert len(search_ranges(Train)["lr"].values) == 7
    assert list(search_ranges(Train)) == ["lr"]
    assert not any("lr" in search_ranges(cls) for cls in ALGORITHMS.values())


def at_fedavg(name: str) -> dict[str, Any]:
    found = {option: entry.fedavg for option, entry in search_ranges(ALGORITHMS[name]).items()}
    return {option: value for option, value in found.items() if value is not None}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if at_fedavg(name)])
def test_with_the_declared_values_the_method_is_fedavg(name: str) -> None:
    row = ROWS[name]
    others = {"egress": row.egress} | ({"clients": ClientsSpec(**row.clients)} if row.clients else {})
    theirs = played(recipe(algorithm("fedavg"), "vectorised", **others))[1]
    options = {option: value for option, value in row.options.items() if option not in at_fedavg(name)}
    ours = played(recipe(algorithm(name, **options | at_fedavg(name)), "vectorised", **others))[1]
    params = ours.params
    assert all(torch.equal(theirs.params[n], params[n]) for n in theirs.params)
    away = {o: next(v for v in search_ranges(ALGORITHMS[name])[o].values if v != x) for o, x in at_fedavg(name).items()}
    if name != "apfl":  # its global model is that of FedAvg in any case
        other = played(recipe(algorithm(name, **options | away), "vectorised", **others))[1]
        assert not all(torch.equal(theirs.params[n], other.params[n]) for n in theirs.params)


def test_the_server_optimiser_contains_fedavg() -> None:
    at = {option: entry.fedavg for option, entry in search_ranges(ServerOptimiser).items() if entry.fedavg is not None}
    assert at == {"lr": 1.0, "momentum": 0.0}
    theirs = played(recipe(algorithm("fedavg"), "vectorised"))[1]
    ours = played(recipe(algorithm("fedavg", server=ServerOptimiser(optimiser="avgm", **at)), "vectorised"))[1]
    assert all(torch.allclose(theirs.params[n], ours.params[n], atol=1e-6) for n in theirs.params)
