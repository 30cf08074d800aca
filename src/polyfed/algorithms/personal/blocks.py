"""Helpers for methods in which every client keeps its own model and the server combines these models block by block.

The methods FedAMP, FedFomo and PFMML use these helpers. For each block, the server stacks the clients' values into a
matrix with one row per client. It computes the personal copies by multiplying this matrix with a small coefficient
matrix, so no loop over pairs of clients is needed. In shapes, `K` is the number of clients, `S` the number of clients
that sent a block, and `P` the number of entries in a block.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import FLAG
from polyfed.core.request import Accept
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.model import Model


@message
class Wanted(Message):
    """A request for blocks. It holds one flag under the name of each block that the server wants."""

    blocks: Tree = carries("statistic", dtype="float32", within=FLAG, optional=True)


@message
class Blocks(Message):
    """Some blocks of a model: those that the server asked for, or those that it has for a client."""

    params: Tree = carries("parameters", optional=True)


@message
class Installed(Message):
    """Confirms that the client has stored the blocks that it received. The message has no fields."""


@dataclass(frozen=True)
class Layout:
    """How a block is flattened into a vector of P numbers: parameters first, then floating-point buffers.

    Integer buffers (counters) stay on the client, because a mean of counters has no meaning.

    Attributes:
        names: names of the tensors, in the order of the vector.
        shapes: shapes of the tensors, in the same order.
        num_trainable: number of entries of the vector that are parameters; they come before the buffers. Only
            parameters have gradients, and distances between clients are computed from parameters alone.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    num_trainable: int

    @classmethod
    def of(cls, block: str, params: Tree, model: Model) -> "Layout":
        """Return the layout of a block of the tree `params`."""
        own = [n for n, v in params.items() if block_of(n) == block and v.is_floating_point()]
        own.sort(key=model.is_buffer)
        size = sum(params[name].numel() for name in own if not model.is_buffer(name))
        return cls(tuple(own), tuple(params[name].shape for name in own), size)

    @property
    def num_bits(self) -> int:
        """Return the size of the block in a message in bits, 32 for each number (Upsilon in the FMML paper)."""
        return 32 * sum(shape.numel() for shape in self.shapes)

    def tree(self, row: Tensor) -> Tree:
        """Return a flattened block (P,) as a tree whose tensors share its memory."""
        return {name: value[0] for name, value in self.trees(row.unsqueeze(0)).items()}

    def trees(self, rows: Tensor) -> Tree:
        """Return N flattened blocks (N, P) as a tree whose tensors have a leading axis of length N."""
        parts = torch.split(rows, [shape.numel() for shape in self.shapes], 1)
        return {
            name: part.reshape(len(rows), *shape)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def gather(self, replies: Replies) -> tuple[Tensor, Tensor]:
        """Return the clients that sent this block, int64 (S,) in ascending order, and their flattened blocks (S, P)."""
        parts = [part for part in replies.parts if self.names and self.names[0] in part.message.params]  # type: ignore[attr-defined]
        if not parts:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0)
        senders = torch.tensor([client for part in parts for client in part.clients])
        order = senders.argsort()
        places = torch.split(order.argsort(), [len(part.clients) for part in parts])
        first = parts[0].message.params[self.names[0]]  # type: ignore[attr-defined]
        rows = first.new_empty(len(senders), sum(shape.numel() for shape in self.shapes))
        for part, place in zip(parts, places, strict=True):  # in place, because blocks are large
            start = 0
            for name, shape in zip(self.names, self.shapes, strict=True):
                end = start + shape.numel()
                rows[place.to(rows.device), start:end] = part.message.params[name].reshape(len(place), -1)  # type: ignore[attr-defined]
                start = end
        return senders[order], rows


def layouts(fed: Federation, params: Tree) -> dict[str, Layout]:
    """Return the layouts of all blocks that are not empty, in the order of upload: the modalities, then `shared`."""
    result = {m: Layout.of(m, params, fed.context.model) for m in (*fed.clients.modalities, SHARED)}
    return {block: layout for block, layout in result.items() if layout.names}


def owners(fed: Federation, block: str) -> Tensor:
    """Return a mask, bool (K,), of the clients that have this block and rows to train it on."""
    trains = fed.clients.num_rows > 0
    if block == SHARED:
        return trains
    return trains & fed.clients.holds[:, fed.clients.modalities.index(block)]


def check_uploads(uploads: float | int) -> None:
    """Check the option `uploads`. It is a count of at least 0, or a share above 0 and at most 1.

    Raises:
        RecipeError: `uploads` is neither a count nor a share.
    """
    if not (uploads >= 0 if isinstance(uploads, int) else 0 < uploads <= 1):
        raise RecipeError(
            f"[algorithm] uploads = {uploads}: the number of clients that send a block in a round must be a count of "
            "at least 0, or a share of all clients above 0 and at most 1.0",
            ("algorithm", "uploads"),
        )


def num_uploads(uploads: float | int, num_clients: int) -> int:
    """Return how many clients send a block in a round (K-hat in the FMML paper)."""
    if isinstance(uploads, int):
        return min(uploads, num_clients)
    return max(1, round(uploads * num_clients))


def draw_uploads(fed: Federation, count: int, blocks: Mapping[str, Layout]) -> dict[str, Tensor]:
    """Draw `count` owners of each block, or all if there are fewer. Return one mask, bool (K,), for each block."""
    chosen = {}
    for block in blocks:
        able = owners(fed, block).nonzero().flatten()
        key = keys.key(fed.seed, "uploads", block, fed.round)
        drawn = keys.choice(key, len(able), min(count, len(able)))
        chosen[block] = torch.zeros(len(fed.clients), dtype=torch.bool)
        chosen[block][able[drawn]] = True
    return chosen


def wanted(chosen: Mapping[str, Tensor]) -> dict[int, Wanted]:
    """Return a message for each client from which the server requests at least one block.

    Args:
        chosen: block -> the clients from which the server requests it, bool (K,).
    """
    flag = torch.ones(())  # one tensor for all messages, so that a stack shares equal messages instead of copying them
    asked: dict[int, Tree] = {}
    for block, chosen_K in chosen.items():
        for client in chosen_K.nonzero().flatten().tolist():
            asked.setdefault(client, {})[block] = flag
    return {client: Wanted(blocks) for client, blocks in asked.items()}


def pick(params: Tree, got: Wanted) -> Blocks:
    """Return the blocks of a client's model that the server asked for."""
    return Blocks({n: v for n, v in params.items() if block_of(n) in got.blocks and v.is_floating_point()})


def as_wanted(asked: Mapping[int, Wanted], layout: Mapping[str, Layout]) -> Accept:
    """Return a check for `fed.ask(..., accept=)`: a reply must hold exactly the blocks that the server asked for."""

    def flaw(client: int, reply: Blocks) -> str:
        names = {name for block in asked[client].blocks for name in layout[block].names}
        return "" if reply.params.keys() == names else "sent other blocks than it was asked for"

    return flaw
