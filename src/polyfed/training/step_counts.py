"""The number of rows and optimiser steps of a local training, computed without any data."""

from polyfed.training.optimisers import Train


def usable_rows(n: int, batch_size: int, skip_single: bool, smallest: int = 0) -> int:
    """Return how many of a client's `n` rows an epoch uses.

    Args:
        n: rows of the client.
        batch_size: rows of a batch; 0 means all rows in one batch.
        skip_single: whether a batch of one row is left out. This is necessary if the model has BatchNorm, because one
            row has no batch statistics.
        smallest: if the last batch of an epoch has fewer rows than this, and it is not the only batch, it is left out.
    """
    size = batch_size or n
    if not n:
        return n
    if skip_single and size == 1:
        return 0
    rest = n % size
    left_out = (skip_single and rest == 1) or (rest < smallest and n > size)
    return n - rest if left_out else n


def rows_trained(num_rows: int, train: Train, *, skip_single: bool) -> int:
    """Return the number of rows that the model processes in a local training. Repeated rows count each time."""
    end = usable_rows(num_rows, train.batch_size, skip_single)
    if train.steps is None or not end:
        return train.epochs * end if end else 0
    size = min(train.batch_size or end, end)
    epochs, rest = divmod(train.steps, -(-end // size))
    return epochs * end + min(rest * size, end)


def steps_trained(num_rows: int, train: Train, *, skip_single: bool, smallest: int = 0) -> int:
    """Return the number of optimiser steps of a local training; `usable_rows` explains the arguments."""
    end = usable_rows(num_rows, train.batch_size, skip_single, smallest)
    if train.steps is not None or not end:
        return train.steps or 0 if end else 0
    return train.epochs * -(-end // (train.batch_size or end))
