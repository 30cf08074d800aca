"""Stacks of clients for tests of local training."""

from collections.abc import Sequence

from torch import Tensor

from polyfed.data.partitions.shards import Shards
from polyfed.training.step_plan import Rows


def stack_of(rows: Sequence[Tensor]) -> Rows:
    """The rows of a stack of clients, given the rows of each client."""
    return Rows.of(Shards.of([own.numpy() for own in rows]), range(len(rows)))
