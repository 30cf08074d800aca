"""What a source is, and what `polyfed data NAME` tells of it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from polyfed.data.columns import Columns


class Source(ABC):
    """A data set; your own is a subclass, a dataclass whose fields are the keys of [data]."""

    @abstractmethod
    def load(self) -> Columns:
        """The data set as a table.

        Raises:
            DataError: it cannot be read.
        """


@dataclass(frozen=True)
class Facts:
    """Facts about a data set that a user needs before the first run.

    Attributes:
        title: one line.
        modalities: name -> sample shape and meaning.
        licence: as its owner states it.
        obtain: where it comes from; polyfed never downloads by itself.
        layout: the files that the loader expects.
    """

    title: str
    modalities: dict[str, str]
    licence: str
    obtain: str
    layout: str
