"""The backdoor attack: training rows with a trigger and a false label teach the model to react to the trigger.

Bagdasaryan, Veit, Hua, Estrin, Shmatikov, "How To Backdoor Federated Learning", AISTATS 2020. The trigger is a pattern
of extreme values in one modality. It corresponds to the bright pixels in Gu, Dolan-Gavitt, Garg, "BadNets", 2017.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.data import Column, Population

MOST_ROWS = 4096
"""The number of training rows that polyfed reads to find their largest value, which becomes the value of the trigger.
More rows would hardly change this value."""


@dataclass(frozen=True)
class Trigger:
    """A pattern in the samples of one modality.

    Attributes:
        modality: the modality.
        size: the number of entries that the pattern covers. These are the last entries of the flattened sample.
        value: the value of these entries as the model receives them, after shift and scale of the column.
    """

    modality: str
    size: int
    value: float

    @classmethod
    def of(cls, population: Population, modality: str, size: int) -> "Trigger":
        """Make the trigger for a data set: its value is the largest value of the modality in the training rows.

        Args:
            population: the data.
            modality: the modality; empty for the first modality of the data.
            size: see the class.

        Raises:
            RecipeError: the data has no such modality, or its samples have fewer entries than the trigger.
        """
        modalities = population.columns.modalities
        name = modality or next(iter(modalities))
        if name not in modalities:
            raise RecipeError(
                f"[attack] modality = '{name}': the data has no such modality. Allowed: {', '.join(modalities)}",
                ("attack", "modality"),
            )
        if size > (entries := math.prod(modalities[name].shape)):
            raise RecipeError(
                f"[attack] trigger_size = {size}: a sample of '{name}' has {entries} entries, and the trigger covers "
                "some of them. Set a smaller trigger_size",
                ("attack", "trigger_size"),
            )
        rows = population.train.rows[:MOST_ROWS]
        if name in population.columns.present:
            rows = rows[population.columns.present[name][rows]]
        largest = float(modalities[name].take(rows).max()) if len(rows) else 1.0
        return cls(name, size, largest)

    def stamped(self, column: Column, rows: Tensor) -> Column:
        """Return a column that holds only these rows, each with the trigger.

        Args:
            column: the column of the modality.
            rows: int64 (n,).
        """
        values = column.raw(rows).clone()
        wanted = torch.full((1, *column.shape), self.value, dtype=torch.float64)
        if column.scale is not None:
            wanted = wanted * column.scale.double()
        if column.shift is not None:
            wanted = wanted + column.shift.double()
        if not values.is_floating_point():
            limits = torch.iinfo(values.dtype)
            wanted = wanted.round().clamp(limits.min, limits.max)
        flat = values.reshape(len(values), -1)
        flat[:, -self.size :] = wanted.to(values.dtype).reshape(1, -1)[:, -self.size :]
        return replace(column, values=flat.view(values.shape), index=None, blank=None)

    def planted(self, column: Column, rows: Tensor) -> Column:
        """Return a copy of the column in which these rows have the trigger. The given column does not change."""
        stamped = self.stamped(column, rows).values
        if column.index is None:
            values = column.values.clone()
            values[rows] = stamped
            return replace(column, values=values)
        index = column.index.clone()  # other rows may share these entries, so the changed entries are appended
        index[rows] = torch.arange(len(rows)) + len(column.values)
        return replace(column, values=torch.cat([column.values, stamped]), index=index)


def poisoned(
    population: Population, trigger: Trigger, attackers: Iterable[int], target: int, share: float, seed: int
) -> Population:
    """Return the population in which some training rows of the attackers have the trigger and the target class.

    The rows of an attacker that does not hold the modality of the trigger stay unchanged.

    Args:
        population: the honest population.
        attackers: the numbers of the attackers.
        target: the class that the model should predict for rows with the trigger.
        share: the share of an attacker's rows that are changed; at least one row is changed.
        seed: the seed of the run. It determines which rows are changed.

    Raises:
        RecipeError: the data has no classes, or no class with the number `target`.
    """
    columns = population.columns
    if columns.label.is_floating_point() or not 0 <= target < columns.num_classes:
        allowed = "the data has no classes" if columns.label.is_floating_point() else f"0 to {columns.num_classes - 1}"
        raise RecipeError(f"[attack] target = {target}: allowed: {allowed}", ("attack", "target"))
    chosen = [torch.zeros(0, dtype=torch.int64)]
    for client in sorted(attackers):
        rows = population.train[client]
        if trigger.modality in columns.present:
            rows = rows[columns.present[trigger.modality][rows]]
        if trigger.modality in population.modalities(client) and len(rows):
            count = max(1, round(share * len(rows)))
            chosen.append(rows[torch.tensor(keys.choice(keys.key(seed, "backdoor", client), len(rows), count))])
    changed = torch.cat(chosen)
    label = columns.label.clone()
    label[changed] = target
    column = trigger.planted(columns.modalities[trigger.modality], changed)
    modalities = {**columns.modalities, trigger.modality: column}
    return replace(population, columns=replace(columns, modalities=modalities, label=label))
