"""The copies that still have to reach their devices: copies of the last round, and older copies that were lost."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.algorithms.personal.blocks import Blocks, Layout
from polyfed.algorithms.pfmml.coefficients import BlockState
from polyfed.core.tree import Tree


@dataclass(frozen=True)
class Deliveries:
    """The copies that the server still has to send, block by block.

    Attributes:
        blocks: the server's knowledge about each block.
        undelivered: by block, bool (K,). True for a device whose newest copy was built before the last round and has
            not arrived yet.
    """

    blocks: Mapping[str, BlockState]
    undelivered: Mapping[str, Tensor]

    def due(self, block: str) -> Tensor:
        """Return the devices, bool (K,), to which the server must still send their newest copy.

        There are two kinds of such devices. For the first kind, the server built the copy in the last round. For the
        second kind, it sent the copy earlier, but the message did not arrive.
        """
        sent = self.blocks[block].sent
        return sent | self.undelivered.get(block, torch.zeros_like(sent))

    def messages(self, laid: Mapping[str, Layout], clients: Collection[int] | None = None) -> dict[int, Blocks]:
        """Return the copies to send, by device. If `clients` is given, return only the copies for these devices.

        Args:
            laid: the layout of each block.
            clients: the devices.
        """
        trees: dict[int, Tree] = {}
        for block, layout in laid.items():
            for client in self.due(block).nonzero().flatten().tolist():
                if clients is not None and client not in clients:
                    continue
                copy = self.blocks[block].copy_of(client)
                assert copy is not None, "a copy is due that was never built"
                trees.setdefault(client, {}).update(layout.tree(copy))
        return {client: Blocks(tree) for client, tree in trees.items()}

    def lost(self, asked: Collection[int], installed: Collection[int]) -> dict[str, Tensor]:
        """Return, by block, the devices that did not confirm the copy sent to them, bool (K,).

        Args:
            asked: devices to which copies were sent.
            installed: devices that confirmed their copies.
        """
        result = {}
        for block in self.blocks:
            due = self.due(block)
            unheard = torch.tensor([client in asked and client not in installed for client in range(len(due))])
            result[block] = due & unheard
        return result
