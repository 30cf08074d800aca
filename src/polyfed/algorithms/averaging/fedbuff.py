"""FedBuff: the server averages as soon as some clients have replied, and slow clients count less, and later.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated Learning with Buffered Asynchronous Aggregation",
AISTATS 2022, Algorithms 1 and 2. In the paper's notation, M clients train at a time (`participation`), the buffer
holds K updates (`buffer`), an update of staleness tau counts by 1 / sqrt(1 + tau) (`exponent = 0.5`), and the server
moves by its learning rate (`[server] lr`) times the mean of the buffer.

Two things differ from the paper: a client that replies gets its next model with the next version, not between two
versions, so that with K = M nobody is late; and each block of the model has its own staleness.

The server sends the model. The clients send trained parameters, training loss and number of rows. Page:
docs/algorithms/fedbuff.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polyfed.algorithms.averaging.buffered import Buffered


@dataclass(frozen=True, kw_only=True)
class FedBuff(Buffered):
    """Buffered asynchronous averaging: `Buffered` without any change."""

    mixing: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"buffer": 10, "aggregation": "uniform"}}
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = {"example": ("update.params",)}
