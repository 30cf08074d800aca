"""Chooses the rows of a silo's devices: all groups of devices hold the same rows, or rows that overlap only partly."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core import keys
from polyfed.data.partitions.persons import dealt_units
from polyfed.data.partitions.shards import Shards, share_of
from polyfed.data.population.clients import ClientsSpec
from polyfed.data.population.modality_assignment import devices_per_silo


def dealt_to_devices(
    silos: Shards, spec: ClientsSpec, modalities: Sequence[str], key: int, person: Tensor | None = None
) -> Shards:
    """Give the rows of each silo to its devices.

    Devices with the same entry in `holdings` form a group, and the rows of a group are dealt to its devices. Normally,
    every group gets all rows of the silo. If `silo_overlap` is set, it is the share of the silo's rows that are
    common: every group gets the common rows. Each of the remaining rows goes to a single group, which is drawn at
    random. If the data names persons, persons and not rows are dealt.

    Args:
        silos: the rows of each silo.
        spec: the schema of `[clients]`.
        modalities: the modalities of the data.
        key: key of the random numbers.
        person: int64 (N,), the person of each row of the table, or None.

    Returns:
        The rows of each device, silo by silo, in the order of `holdings`.
    """
    held_by = [[name] for name in modalities] if spec.holdings is None else spec.holdings
    entries: list[tuple[str, ...]] = [tuple(sorted(names)) for names in held_by]
    groups = list(dict.fromkeys(entries))
    if len(groups) == len(entries) and spec.silo_overlap is None:
        return silos.repeated(devices_per_silo(spec, modalities))
    parts: list[NDArray[np.int64]] = []
    for silo in range(len(silos)):
        rows, draw = silos[silo].numpy(), keys.generator(keys.key(key, silo))
        unit = dealt_units(person, rows)
        num = int(unit.max(initial=-1)) + 1
        held = _held(num, len(groups), 1.0 if spec.silo_overlap is None else spec.silo_overlap, draw)
        of_group = [draw.permutation(np.flatnonzero(held[number])) for number in range(len(groups))]
        seen = dict.fromkeys(groups, 0)
        for entry in entries:
            own = of_group[groups.index(entry)][seen[entry] :: entries.count(entry)]
            parts.append(np.sort(rows[np.isin(unit, own)]))
            seen[entry] += 1
    return Shards.of(parts)


def of_clients(shards: Shards, clients: Sequence[int]) -> Shards:
    """Return the rows of these clients only, in this order."""
    return Shards.of([shards[client].numpy() for client in clients])


def _held(num_rows: int, num_groups: int, overlap: float, draw: np.random.Generator) -> NDArray[np.bool_]:
    """Return which group holds which row, bool (groups, rows); floor(overlap * rows) rows belong to all groups."""
    held = np.ones((num_groups, num_rows), dtype=np.bool_)
    single = draw.permutation(num_rows)[int(share_of(overlap, num_rows)) :]
    held[:, single] = False
    held[draw.integers(0, num_groups, len(single)), single] = True
    return held
