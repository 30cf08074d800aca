"""Stacks of clients, and the programs that take their training steps, for tests of local training."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from polyfed.data.partitions.shards import Shards
from polyfed.training.programs.program import Program
from polyfed.training.step_plan import Rows


def stack_of(rows: Sequence[Tensor]) -> Rows:
    """The rows of a stack of clients, given the rows of each client."""
    return Rows.of(Shards.of([own.numpy() for own in rows]), range(len(rows)))


def steps_of_programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that fills with how many steps each call of a program took."""
    taken: list[int] = []
    original = Program.__call__

    def spied(self: Program, state: Any, columns: Any, steps: range, outside: Any, **options: Any) -> Any:
        taken.append(len(steps))
        return original(self, state, columns, steps, outside, **options)

    monkeypatch.setattr(Program, "__call__", spied)
    return taken
