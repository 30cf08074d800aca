"""The base class of data sources, and the facts that `polyfed data NAME` prints about a source."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from polyfed.data.columns import Columns


class Source(ABC):
    """A data set that a recipe can name.

    A source is a frozen dataclass whose fields are the keys of `[data]`. Your own source extends this class. `[data]
    name` names it as `package.module:Class`.
    """

    @abstractmethod
    def load(self) -> Columns:
        """Read the data set into a table.

        Raises:
            DataError: The data set cannot be read. The message names the file and tells what to do.
        """


@dataclass(frozen=True)
class Facts:
    """What a user must know about a data set before the first run.

    Attributes:
        title: One line that describes the data.
        modalities: Name -> sample shape and meaning.
        licence: The licence, as the owner states it.
        obtain: Where to get the data; polyfed never downloads data.
        layout: The files that the loader expects.
    """

    title: str
    modalities: dict[str, str]
    licence: str
    obtain: str
    layout: str
