"""What a round adds to models, by block: to the global model, and what the clients add to the models that they receive.

The server computes this from data that it already has, so clients send nothing more. With `[checkpoint] updates =
true`, a run also keeps the clients' updates, for `polyfed contribution`.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyfed.core.errors import CheckpointError, DataError
from polyfed.core.messages import Message
from polyfed.core.request import Send
from polyfed.core.system.files import sync
from polyfed.core.system.openmp import threads_worth
from polyfed.core.tree import Tree, block_of, size_bytes
from polyfed.federation.replies import Replies

UPDATES = "updates"
"""The folder of the updates in the folder of a run: a safetensors file for each round."""

MOST_CLIENTS = 8
"""The largest number of clients of a request whose updates are measured. Measuring all would take more time than
computing their mean."""


def block_norms(new: Tree | None, old: Tree | None) -> dict[str, float]:
    """Return the 2-norm of `new - old` in each block, over the floating-point tensors; empty if a model is None.

    Args:
        new: the global model after a round.
        old: the global model before this round.
    """
    if new is None or old is None:
        return {}
    norms: dict[str, list[Tensor]] = {}
    with threads_worth(size_bytes(new)):
        for name, value in new.items():
            before = old.get(name)
            if before is not None and before.shape == value.shape and value.is_floating_point():
                norm = torch.linalg.vector_norm(value.detach() - before.detach().to(value.device), dtype=torch.float64)
                norms.setdefault(block_of(name), []).append(norm)
    return {block: float(torch.linalg.vector_norm(torch.stack(parts))) for block, parts in norms.items()}


class ClientUpdates:
    """The clients' updates in a round, `reply.params - sent.params`. Each reply is read once for both uses.

    - **Norms** for each block. They cover requests in which all clients receive the same message, and at most
      `MOST_CLIENTS` clients of a request.
    - **The updates themselves**, summed over the requests of the round. Under secure aggregation, the server knows only
      the sum of a cohort. Its update is then that of one player, which is named by its clients, such as `0+3+4`.

    Args:
        measured: whether to compute the norms.
        kept: the run's folder, if the updates are kept.
        summed: whether the server reads only sums.
    """

    def __init__(self, *, measured: bool = True, kept: Path | None = None, summed: bool = False) -> None:
        self._measured, self._summed = measured, summed
        self._folder = None if kept is None else kept / UPDATES
        self._norms: dict[str, list[float]] = {}
        self._found: dict[str, Tensor] = {}

    def watch(self, send: Send, replies: Replies) -> None:
        """Read the replies to one request.

        Args:
            send: the message that the clients received, or one for each client.
            replies: their usable replies.
        """
        keep, alike = self._folder is not None and not self._summed, isinstance(send, Message)
        chosen = {*list(replies)[:: -(-len(replies) // MOST_CLIENTS) or 1]} if self._measured and alike else set()
        for part in replies.parts:
            trained = getattr(part.message, "params", None)
            places = [p for p, client in enumerate(part.clients) if client >= 0 and (keep or client in chosen)]
            if not isinstance(trained, dict) or not places:
                continue
            with threads_worth(part.num_bytes):
                for group in [places] if alike else [[place] for place in places]:
                    one = send if isinstance(send, Message) else send[part.clients[group[0]]]
                    sent = getattr(one, "params", None)
                    if isinstance(sent, dict):
                        self._read(sent, trained, part.clients, group, chosen)

    def means(self) -> dict[str, float]:
        """Block -> the mean norm over the measured clients that sent the block, in any order of their replies."""
        return {block: math.fsum(norms) / len(norms) for block, norms in self._norms.items()}

    def _read(self, sent: Tree, trained: Tree, stacked: Sequence[int], group: Sequence[int], chosen: set[int]) -> None:
        """Measure and keep the updates of some clients, which received the same parameters.

        Each sum runs along the last dimension, so a client's norm does not depend on the other clients of its stack.
        The tensors are read one after another, because those of a large model take much memory.

        Args:
            trained: the tensors of a stack.
            stacked: the clients of the stack.
            group: the places of the clients to read.
        """
        norms: dict[str, list[Tensor]] = {}
        clients = [stacked[place] for place in group]
        places = [place for place, client in enumerate(clients) if client in chosen]
        for name, whole in trained.items():
            stack = _at(whole, group)
            before = sent.get(name)
            if before is None or stack.dim() != before.dim() + 1 or not stack.is_floating_point():
                continue
            received = before.detach()[tuple(map(slice, stack.shape[1:]))]  # cut to the ranks of the clients
            moved = stack.detach() - received.to(stack.device)
            if places:
                flat = _at(moved, places).unsqueeze(1).flatten(1).float()  # (clients, numbers), also of one number
                norms.setdefault(block_of(name), []).append(torch.linalg.vector_norm(flat, dim=1))
            if self._folder is not None and received.shape == before.shape:
                for client, own in zip(clients, moved.cpu(), strict=True):
                    self._add(f"{client}|{name}", own)
        for block, parts in norms.items():
            self._norms.setdefault(block, []).extend(torch.stack(parts, dim=1).norm(dim=1).tolist())

    def _add(self, key: str, moved: Tensor) -> None:
        self._found[key] = self._found[key] + moved if key in self._found else moved

    def save(self, round: int, before: Tree | None, after: Tree | None, cohort: Sequence[int]) -> None:
        """Write the updates of a round, if the run keeps them: the whole file or none.

        Raises:
            CheckpointError: the file cannot be written.
        """
        if self._folder is None:
            return
        if self._summed and before is not None and after is not None and cohort:
            for name, value in after.items():
                if name in before and before[name].shape == value.shape and value.is_floating_point():
                    self._add(f"{'+'.join(map(str, cohort))}|{name}", (value.detach() - before[name].detach()).cpu())
        path = self._folder / f"round-{round:06d}.safetensors"
        draft = path.with_name(f".{path.name}.draft")
        try:
            self._folder.mkdir(exist_ok=True)
            save_file({key: value.contiguous().clone() for key, value in self._found.items()}, draft)
            sync(draft)
            os.replace(draft, path)
            sync(self._folder)
        except (OSError, SafetensorError) as error:
            draft.unlink(missing_ok=True)
            raise CheckpointError(
                f"the updates of round {round} could not be written to {self._folder}: {error}. Make room and run "
                "again with --resume (in Python: resume=True)"
            ) from error


def _at(stack: Tensor, places: Sequence[int]) -> Tensor:
    """Return the entries at these places of a stack, without a copy if they are all."""
    return stack if [*places] == [*range(len(stack))] else stack[[*places]]


def kept_updates(folder: Path, rounds: int, cure: str = "") -> list[dict[str, Tree]]:
    """Return, for each round, player -> its update.

    Args:
        cure: the command that makes a run with them.

    Raises:
        DataError: a round has no updates, or a file is damaged.
    """
    result = []
    for round in range(1, rounds + 1):
        path = folder / UPDATES / f"round-{round:06d}.safetensors"
        if not path.exists():
            raise DataError(
                f"{folder} keeps no updates of round {round}, so nobody can tell who contributed what. Run it with "
                f"[checkpoint] updates{f': {cure}' if cure else ''}"
            )
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} is damaged: {error}. Restore it from a copy") from error
        players: dict[str, Tree] = {}
        for key, value in tensors.items():
            player, _, name = key.partition("|")
            players.setdefault(player, {})[name] = value
        result.append(players)
    return result
