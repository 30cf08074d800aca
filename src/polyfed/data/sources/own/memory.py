"""memory: data that a Python program holds in memory and passes to `polyfed.run`."""

from dataclasses import dataclass

from typing_extensions import override

from polyfed.core.errors import DataError
from polyfed.data.columns import Columns, Standardise
from polyfed.data.reading.given import Partial, Unmeasured
from polyfed.data.sources.base import Facts, Source


@dataclass(frozen=True, kw_only=True)
class Memory(Source):
    """Data in memory. A recipe's file cannot hold this data, so the file contains only a description.

    Attributes:
        about: A description of the data.
    """

    about: str = ""

    @classmethod
    def of(
        cls,
        columns: Columns,
        standardise: Standardise = "uneven",
        partial: Partial = "refuse",
        unmeasured: Unmeasured = "absent",
    ) -> "Memory":
        """Make a source whose `load` returns this table. The options are what the user said; see `Given`."""
        shapes = ", ".join(f"{name} {column.shape}" for name, column in columns.modalities.items())
        made = cls(about=f"{len(columns):,} rows of {shapes}")
        object.__setattr__(made, "_columns", columns)
        object.__setattr__(made, "standardise", standardise)
        object.__setattr__(made, "partial", partial)
        object.__setattr__(made, "unmeasured", unmeasured)
        return made

    @override
    def load(self) -> Columns:
        """Return the table.

        Raises:
            DataError: This recipe was read from a file, which does not contain the data.
        """
        columns: Columns | None = getattr(self, "_columns", None)
        if columns is None:
            raise DataError(
                f"this run's data ({self.about or 'nothing'}) was in the memory of a Python program, and the recipe's "
                "file does not hold it. Pass it again: polyfed.run('recipe.toml', data=..., labels=...). To run it "
                "from the command line, save it with numpy.savez and write a recipe with `polyfed init`"
            )
        return columns

    @classmethod
    def describe(cls) -> Facts:
        """Origin and layout, as `polyfed data memory` prints them."""
        return Facts(
            title="arrays, data frames and datasets of a Python program",
            modalities={"<name>": "(N, ...) numbers, one sample a row"},
            licence="yours",
            obtain="polyfed.run(data=..., labels=...) in Python; a file cannot name it",
            layout="tensors, arrays, a pandas data frame, or a Dataset of PyTorch or Hugging Face",
        )
