"""The values that `--set` reads; tests/cli/test_cli.py covers its errors."""

from typing import Any

import pytest

from polyfed.core.errors import RecipeError
from polyfed.experiment.recipes.overrides import apply
from refusals import refuses


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr=0.1", {"train": {"lr": 0.1}}),
        ("train.lr=.5", {"train": {"lr": 0.5}}),
        ("train.lr=-2.E-1", {"train": {"lr": -0.2}}),
        (" train . lr = 1 ", {"train": {"lr": 1}}),
        ("seed=3", {"seed": 3}),
        ("engine.replay=false", {"engine": {"replay": False}}),
        ("data.name=my.module:Class", {"data": {"name": "my.module:Class"}}),
        ("data.path=C:\\data\\x=1.npz", {"data": {"path": "C:\\data\\x=1.npz"}}),
        ("data.path=", {"data": {"path": ""}}),
        ('data.path="a b"', {"data": {"path": "a b"}}),
        ('egress."a".server=["raw"]', {"egress": {"a": {"server": ["raw"]}}}),
        ('data={name="toy"}', {"data": {"name": "toy"}}),
    ],
)
def test_an_override_is_written_where_it_says(override: str, expected: dict[str, Any]) -> None:
    table: dict[str, Any] = {}
    apply(table, override)
    assert table == expected


def test_a_key_that_needs_quotes_says_how_to_write_them() -> None:
    with refuses(RecipeError, "_ needs"):
        apply({}, 'egress.*.server=["raw"]')


@pytest.mark.parametrize(
    "override", ["", "=", "=1", "a", "a.=1", ".a=1", "a b=1", "a=1\nb=2", "a\nb=2", 'a="b', "a=[b]"]
)
def test_what_says_no_place_or_no_value_is_refused_and_changes_nothing(override: str) -> None:
    table: dict[str, Any] = {"a": 1}
    with refuses(RecipeError, "--set"):
        apply(table, override)
    assert table == {"a": 1}
