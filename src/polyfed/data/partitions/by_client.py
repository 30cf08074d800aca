"""The partition `by-client`: the clients are the natural clients of the data (speakers, subjects, videos)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.data.columns import Columns
from polyfed.data.partitions.base import Partition
from polyfed.data.partitions.dirichlet import Dirichlet
from polyfed.data.partitions.shards import Rows, RowSlices


@dataclass(frozen=True, kw_only=True)
class ByClient(Partition):
    """One client per natural client (speaker, subject, video), in order of the natural clients' numbers.

    If `shards` is above 1, each natural client is cut into that many clients by Dirichlet(alpha) over its labels.
    FedMultimodal does this with UCI-HAR (21 subjects x 5 = 105 clients, `min_size` 5).

    Attributes:
        shards: Clients per natural client.
        alpha: Concentration of the Dirichlet distribution, also of the one that cuts natural clients into `shards`.
        min_size: Minimum number of rows of each shard; unused with one shard.
    """

    shards: int = 1
    alpha: float = 1.0
    min_size: int = 10

    @override
    def split(self, columns: Columns, rows: Rows, key: int) -> Sequence[Rows]:
        """Split the rows by natural client; see `Partition.split`.

        Raises:
            RecipeError: The data has no natural clients, or one of them has too few rows for `shards` clients.
        """
        natural = natural_clients(columns, rows)
        if self.shards == 1:
            return natural
        cut = Dirichlet(num=self.shards, alpha=self.alpha, min_size=self.min_size)
        parts: list[Rows] = []
        for number, of_client in enumerate(natural):
            if len(of_client) < self.shards * self.min_size:
                raise RecipeError(
                    f"natural client {number} has {len(of_client)} training rows, too few for clients.shards = "
                    f"{self.shards} of at least clients.min_size = {self.min_size}; lower one of them",
                    ("clients", "shards"),
                )
            parts += cut.split(columns, of_client, keys.key(key, "natural client", number))
        return parts


def natural_clients(columns: Columns, rows: Rows) -> RowSlices:
    """Group the given rows by natural client, in order of client numbers. Leave out natural clients without rows.

    Raises:
        RecipeError: The data has no natural clients.
    """
    if columns.client is None:
        raise RecipeError(
            f"clients.partition = 'by-client', but data '{columns.name}' has no natural clients; "
            "name their array in data.client, or choose another partition",
            ("clients", "partition"),
        )
    client = columns.client.cpu().numpy()[rows]
    order = np.argsort(client, kind="stable")
    return RowSlices(rows[order], np.concatenate(([0], np.flatnonzero(np.diff(client[order])) + 1, [len(rows)])))
