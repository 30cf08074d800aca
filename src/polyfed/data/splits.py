"""Fixed splits that a data set draws once, whatever the run's seed."""

import numpy as np
import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.data.columns import TEST, TRAIN


def stratified(label: Tensor, share: float, key: int) -> Tensor:
    """Split codes, int8 (N,): of every class, `round(share * rows)` random rows are test, the rest train."""
    split = np.full(len(label), TRAIN, dtype=np.int8)
    draw = keys.generator(key)
    classes = label.numpy()
    for number in np.unique(classes):
        rows = draw.permutation(np.flatnonzero(classes == number))
        split[rows[: round(share * len(rows))]] = TEST
    return torch.from_numpy(split)


def subset(label: Tensor, split: Tensor, share: float, key: int) -> Tensor:
    """Ascending rows that keep `share` of every class of every split; all rows when share is 1."""
    if share == 1.0:
        return torch.arange(len(label))
    group = label * 4 + split.to(torch.int64)
    return (stratified(group, share, key) == TEST).nonzero()[:, 0]
