"""Numbers of a table, which need no extraction."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyfed.data.media.clip import Clip, PlainExtractor, corrupt


@dataclass(frozen=True, kw_only=True)
class Values(PlainExtractor):
    """The numbers in a cell of a table, as float32."""

    def __call__(self, clip: Clip) -> NDArray[np.float32]:
        """The numbers as a float32 array of the same shape; a single number becomes a vector (1,).

        Raises:
            DataError: The cell does not hold finite numbers.
        """
        try:
            found = np.atleast_1d(np.asarray(clip.content(), dtype=np.float32))
        except (TypeError, ValueError) as error:
            raise corrupt(clip, f"is not an array of numbers ({error})") from error
        if not np.isfinite(found).all():
            raise corrupt(clip, "holds numbers that are not finite")
        return found
