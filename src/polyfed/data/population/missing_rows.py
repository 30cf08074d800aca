"""Simulates rows that lack a modality: the keys `missing_rows*` of [clients]. docs/missing.md describes the patterns.

Shape letters: N rows of the table, n rows of one group, M modalities, K clients, C classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import DataError, RecipeError, did_you_mean
from polyfed.core.option_checks import share_of
from polyfed.data.columns import Columns
from polyfed.data.partitions.base import refuse_targets
from polyfed.data.partitions.shards import Shards
from polyfed.data.population.clients import ClientsSpec

Rows = NDArray[np.int64]
Rates = NDArray[np.float64]
Flags = NDArray[np.bool_]

_HALVINGS = 60
"""Steps of the bisection in `_thresholds`, which then is exact to the last bit of a float64."""

_NOBODY = -1
"""Owner of a test row that no client holds."""


@dataclass(frozen=True)
class _Group:
    """Rows that lose modalities at the same rates.

    Attributes:
        name: a name of the group, for its random numbers.
        rows: positions in the table, (n,). A row occurs once for each client that holds it.
        owner: the client of each entry, (n,), or `_NOBODY`.
        rates: modality -> the expected share of rows that lose it.
    """

    name: str
    rows: Rows
    owner: Rows
    rates: Mapping[str, float]


def lost_rows(
    columns: Columns,
    spec: ClientsSpec,
    holds: Tensor,
    train: Shards,
    own_test: Shards | None,
    evaluated: Tensor,
    key: int,
) -> dict[str, Tensor]:
    """Draw which rows lose which modality, from the keys `missing_rows*` of [clients].

    The draw of a row depends on the key, the row and the modality. It does not depend on the partition, except with the
    patterns "client" and "spans". A row that several clients hold loses a modality only if it would lose it at each of
    the clients that hold the modality.

    Args:
        columns: the table. Rows that already lack a modality cannot lose it.
        spec: the section [clients].
        holds: bool (K, M), the modalities that each client may hold.
        train: training rows of each client.
        own_test: own test rows of each client, if any.
        evaluated: test and validation rows of the server, which lose modalities at the rates for tests.
        key: key of the random numbers.

    Returns:
        Modality -> bool (N,), the rows that lose it. Modalities that no row loses have no entry.

    Raises:
        RecipeError: a rate names an unknown modality, the rates are higher than rows with at least one modality allow,
            or the pattern needs classes and the labels are targets.
        DataError: all training rows of a class lack every modality.
    """
    names = tuple(columns.modalities)
    trained = _checked("missing_rows", spec.missing_rows, names, spec)
    tested = trained
    if spec.missing_rows_test is not None:
        tested = _checked("missing_rows_test", spec.missing_rows_test, names, spec)
    there = np.ones((len(columns), len(names)), np.bool_)
    for place, name in enumerate(names):
        if name in columns.present:
            there[:, place] = columns.present[name].cpu().numpy()
    may_hold = np.concatenate([holds.numpy(), holds.any(0)[None].numpy()])  # the last line is for `_NOBODY`
    touched, kept = np.zeros_like(there), np.zeros_like(there)
    for group in _groups(train, own_test, evaluated, trained, tested):
        if not any(group.rates.values()):
            continue
        available = there[group.rows] & may_hold[group.owner]
        lost = _lost(columns, spec, group, available, len(train), key)
        for place in range(len(names)):
            touched[group.rows[available[:, place]], place] = True
            kept[group.rows[available[:, place] & ~lost[:, place]], place] = True
    gone = touched & ~kept
    _refuse_empty_classes(columns, train, there & ~gone, gone)
    return {name: torch.from_numpy(gone[:, place].copy()) for place, name in enumerate(names) if gone[:, place].any()}


def missing_shares(columns: Columns, rows: Shards, holds: Tensor) -> dict[str, Tensor]:
    """Return, for each modality that some rows of the table lack, the share of each client's rows that lack it.

    Returns:
        Modality -> float64 (K,). The share is NaN if the client does not hold the modality or has no rows.
    """
    shares = {}
    for place, name in enumerate(columns.modalities):
        if name in columns.present:
            absent = rows.counts(columns.present[name].cpu().long(), 2)[:, 0].double()
            shares[name] = (absent / rows.sizes.double()).masked_fill(~holds[:, place], torch.nan)
    return shares


def _checked(
    option: str, given: Mapping[str, float] | float, names: Sequence[str], spec: ClientsSpec
) -> dict[str, float]:
    """Return the rate of each modality, after checking names and sum."""
    where = f"clients.{option}"
    for name in given if isinstance(given, Mapping) else ():
        if name not in names:
            raise RecipeError(
                f"{where} names modality '{name}', which the data lacks; {did_you_mean(name, names)}",
                ("clients", option),
            )
    rates = {name: share_of(given, name) for name in names}
    if (total := sum(rates.values())) > len(names) - 1 + 1e-9 and not spec.missing_rows_empty:
        raise RecipeError(
            f"{where}: the rates of the {len(names)} modalities add up to {total:g}. If every row keeps a modality, "
            f"they add up to {len(names) - 1} at most, for example {(len(names) - 1) / len(names):.3g} each. Lower "
            "them, or allow rows without any modality with missing_rows_empty = true",
            ("clients", option),
        )
    return rates


def _groups(
    train: Shards,
    own_test: Shards | None,
    evaluated: Tensor,
    trained: Mapping[str, float],
    tested: Mapping[str, float],
) -> list[_Group]:
    groups = [_Group("train", train.rows.numpy(), train.owner.numpy(), trained)]
    rest = np.unique(evaluated.numpy())
    if own_test is not None:
        groups.append(_Group("own test", own_test.rows.numpy(), own_test.owner.numpy(), tested))
        rest = np.setdiff1d(rest, own_test.rows.numpy())
    return [*groups, _Group("test", rest, np.full(len(rest), _NOBODY), tested)]


def _lost(columns: Columns, spec: ClientsSpec, group: _Group, available: Flags, num_clients: int, key: int) -> Flags:
    """Return which of its available modalities each row of a group loses, bool (n, M)."""
    names = tuple(columns.modalities)
    units = group.rows
    if spec.missing_rows_pattern == "spans":
        units, key = _spans(columns, group, spec.missing_rows_span), keys.key(key, group.name)
    places = torch.from_numpy(units)
    drawn = np.stack([keys.uniform_at(keys.key(key, "lost", name), places).numpy() for name in names], 1)
    rate = _rate_of_rows(columns, spec, group, num_clients, keys.key(key, "rates"))
    if spec.missing_rows_empty:
        return available & (drawn < rate)
    limit, back = _thresholds(rate, available)
    lost: Flags = available & (drawn < limit)
    bare: Flags = np.asarray(available.any(1) & ~(available & ~lost).any(1))
    chance = keys.uniform_at(keys.key(key, "given back"), places).numpy()[bare]
    chosen = (chance[:, None] >= back[bare].cumsum(1)).sum(1)
    chosen = np.where(chosen < len(names), chosen, back[bare].argmax(1))  # the shares may add up to 1 - 1e-16
    lost[np.flatnonzero(bare), chosen] = False
    return lost


def _thresholds(rate: Rates, available: Flags) -> tuple[Rates, Rates]:
    r"""Return how to draw so that each row keeps a modality, and loses modality m with probability `rate` all the same.

    Each available modality is lost with probability `limit` on its own. If a row would lose all of them, it gets one
    back, modality m with probability `back`. With $r_m$ the rate, $S = \sum_m (1 - r_m)$ and $P$ the probability that
    all are lost, $\text{back}_m = (1 - r_m) / S$ and $\text{limit}_m = r_m + P \, \text{back}_m$, so modality m is
    missing with probability $\text{limit}_m - P \, \text{back}_m = r_m$. $P = \prod_m \text{limit}_m$ has a solution
    if $S \ge 1$. Otherwise, as for a client with a single modality, the $1 - r_m$ are scaled up to the sum 1.

    Args:
        rate: (n, M).
        available: (n, M), the modalities that a row can lose.

    Returns:
        `limit` and `back`, both (n, M).
    """
    kinds, of_row = np.unique(np.where(available, rate, 2.0), axis=0, return_inverse=True)
    can = kinds <= 1.0
    keep = np.where(can, 1.0 - kinds, 0.0)
    total = keep.sum(1, keepdims=True)
    even = can / np.maximum(can.sum(1, keepdims=True), 1)
    keep = np.where(total > 0, keep / np.clip(total, 1e-300, 1.0), even)
    back = keep / np.maximum(keep.sum(1, keepdims=True), 1.0)
    low, high = np.zeros((len(kinds), 1)), np.ones((len(kinds), 1))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = np.where(can, 1.0 - keep + middle * back, 1.0).prod(1, keepdims=True) > middle
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    limit = np.where(can, 1.0 - keep + low * back, 0.0)
    flat = of_row.reshape(-1)  # NumPy 2.0 returns (n, 1)
    return limit[flat], back[flat]


def _rate_of_rows(columns: Columns, spec: ClientsSpec, group: _Group, num_clients: int, key: int) -> Rates:
    """Return the rate of each row and modality, (n, M)."""
    mean = np.array(list(group.rates.values()))
    if spec.missing_rows_pattern == "client":
        own = _beta(mean, spec.missing_rows_concentration, num_clients, tuple(group.rates), key)
        return np.concatenate([own, mean[None]])[group.owner]
    if spec.missing_rows_pattern == "label":
        cure = "Use another pattern: 'random', 'client' or 'spans'"
        refuse_targets(columns, "[clients] missing_rows_pattern = 'label' draws a rate for each class", cure)
        own = _beta(mean, spec.missing_rows_concentration, columns.num_classes, tuple(group.rates), key)
        classes: Rows = columns.label.cpu().numpy()[group.rows]
        return own[classes]
    return np.broadcast_to(mean, (len(group.rows), len(mean)))


def _beta(mean: Rates, concentration: float, num: int, names: Sequence[str], key: int) -> Rates:
    """Draw `num` rates of each modality from Beta(mean * concentration, (1 - mean) * concentration), (num, M)."""
    drawn = np.tile(mean, (num, 1))
    for place, name in enumerate(names):
        if 0.0 < mean[place] < 1.0:
            shape = concentration * mean[place], concentration * (1.0 - mean[place])
            drawn[:, place] = keys.generator(keys.key(key, name)).beta(*shape, num)
    return drawn


def _spans(columns: Columns, group: _Group, length: int) -> Rows:
    """Return the number of the span that each row belongs to, (n,).

    A series consists of the rows of a natural client, in the order of the table, or else of the rows of a client.
    """
    series = group.owner if columns.client is None else columns.client.cpu().numpy()[group.rows]
    order = np.lexsort((group.rows, series))
    starts = np.flatnonzero(np.diff(series[order], prepend=series[order][:1] - 1))
    since = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    result = np.empty(len(order), np.int64)
    result[order] = np.cumsum(since % length == 0) - 1
    return result


def _refuse_empty_classes(columns: Columns, train: Shards, there: Flags, gone: Flags) -> None:
    """Refuse a draw after which no training row of a class has a modality."""
    label = columns.label.cpu()
    if not gone.any() or not columns.labelled or label.dim() != 1 or label.is_floating_point():
        return
    rows = train.rows
    before = torch.bincount(label[rows], minlength=columns.num_classes)
    after = torch.bincount(label[rows[torch.from_numpy(there.any(1))[rows]]], minlength=columns.num_classes)
    if len(bare := ((before > 0) & (after == 0)).nonzero()[:, 0]):
        number = int(bare[0])
        name = number if columns.class_names is None else f"'{columns.class_names[number]}'"
        raise DataError(
            f"clients.missing_rows leaves no training row of class {name} with a modality ({len(bare)} such classes). "
            "Lower the rates, or remove missing_rows_empty"
        )
