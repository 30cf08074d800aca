"""Large matrices of tests: each run tries a part of them, and `make check-all` tries all."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def one_in(count: int, cells: Iterable[Any], first: int = 0) -> list[Any]:
    """Return parameters of which every `count`-th is always tried, beginning at the place `first`."""
    return [_param(cell, place % count == first) for place, cell in enumerate(cells)]


def in_turns(rows: Sequence[Any], *axes: Sequence[Any]) -> list[Any]:
    """Return the product of rows and axes. Each row always has one of the combinations, the next row the next one."""
    others = list(product(*axes))
    return [
        _param((row, *other), place % len(others) == number)
        for place, row in enumerate(rows)
        for number, other in enumerate(others)
    ]


def _param(cell: Any, always: bool) -> Any:
    values = cell if isinstance(cell, tuple) else (cell,)
    return pytest.param(*values, marks=() if always else pytest.mark.slow)
