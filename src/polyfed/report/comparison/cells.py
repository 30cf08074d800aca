"""A value of a comparison with its mean and spread over the runs of a group, and the column that holds it."""

import math
from dataclasses import dataclass

from polyfed.report.formatting import MISSING, number_of


@dataclass(frozen=True)
class Cell:
    """Mean and spread of one value, such as the accuracy, over the runs of a group.

    Attributes:
        mean: arithmetic mean.
        spread: sample standard deviation, which is 0 for a single run.
        n: the number of runs that have this value. If folds are pooled, the number of seeds.
        of: the number of all runs in the group, with or without this value. If folds are pooled, the number of all
            seeds.
        interval: the interval of 95 % over the test rows of a single run, or of pooled folds, if it is known.
    """

    mean: float
    spread: float
    n: int
    of: int
    interval: tuple[float, float] | None = None

    def text(self, unit: str) -> str:
        """Return mean and spread as text; with an interval, the value and that, as in `47.1 (38.7 to 55.6)`.

        If the unit is `share`, both numbers are written in percent, but without the sign "%".
        """
        if not math.isfinite(self.mean):
            return MISSING
        ends = self.interval or ()
        values = [self.mean] if self.n == 1 or self.spread == 0 or ends else [self.mean, self.spread]
        words = [f"{100 * value:.1f}" if unit == "share" else number_of(value, unit) for value in (*values, *ends)]
        return f"{words[0]} ({words[1]} to {words[2]})" if ends else " ± ".join(words)


@dataclass(frozen=True)
class Column:
    """A column of the comparison.

    Attributes:
        name: the key of the cells, which is a dotted path in result.json.
        title: what the column shows.
        unit: `share` (written in percent), `bytes`, `seconds` or `number`.
    """

    name: str
    title: str
    unit: str

    @property
    def heading(self) -> str:
        """Return the title, with a "%" if the column holds shares, because cells are written without "%"."""
        return f"{self.title} %" if self.unit == "share" else self.title

    @property
    def is_quality(self) -> bool:
        """Return whether the column shows the quality of a model rather than its cost."""
        return self.unit == "share"
