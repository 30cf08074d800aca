"""The updates of the clients that a run keeps with `[checkpoint] updates = true`, for `polyfed contribution`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyfed.core.errors import CheckpointError, DataError
from polyfed.core.messages import Message
from polyfed.core.request import Send
from polyfed.core.tree import Tree
from polyfed.federation.replies import Replies

UPDATES = "updates"
"""The folder of the updates in the folder of a run: a safetensors file for each round."""


Watch = Callable[[Send, Replies], None]


def together(watchers: Sequence[Watch]) -> Watch:
    """Return a function that calls all of these, for `Federation.watched`."""

    def watch(send: Send, replies: Replies) -> None:
        for one in watchers:
            one(send, replies)

    return watch


class UpdateRecorder:
    """Collects the updates of one round: what clients add to the parameters that they received.

    Under secure aggregation, the server knows only the sum of a cohort. The update of the cohort is then that of one
    player, which is named by its clients, such as `0+3+4`.

    Args:
        folder: the run's folder.
        summed: whether the server reads only sums.
    """

    def __init__(self, folder: Path, *, summed: bool) -> None:
        self._folder, self._summed = folder / UPDATES, summed
        self._found: dict[str, Tensor] = {}

    def watch(self, send: Send, replies: Replies) -> None:
        """Add the updates in the replies to a request; see `ClientUpdates.watch`."""
        if self._summed:
            return
        for part in replies.parts:
            trained = getattr(part.message, "params", None)
            if not isinstance(trained, dict):
                continue
            for place, client in enumerate(part.clients):
                sent = getattr(send if isinstance(send, Message) else send[client], "params", None)
                if client >= 0 and isinstance(sent, dict):
                    self._add(str(client), {name: stack[place] for name, stack in trained.items()}, sent)

    def _add(self, player: str, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> None:
        for name, value in new.items():
            before = old.get(name)
            if before is None or before.shape != value.shape or not value.is_floating_point():
                continue
            moved, key = (value.detach() - before.detach()).cpu(), f"{player}|{name}"
            self._found[key] = self._found[key] + moved if key in self._found else moved

    def save(self, round: int, before: Tree | None, after: Tree | None, cohort: Sequence[int]) -> None:
        """Write the updates of a round, and forget them.

        Raises:
            CheckpointError: the file cannot be written.
        """
        if self._summed and before is not None and after is not None and cohort:
            self._add("+".join(map(str, cohort)), after, before)
        try:
            self._folder.mkdir(exist_ok=True)
            save_file(
                {k: v.contiguous() for k, v in self._found.items()}, self._folder / f"round-{round:06d}.safetensors"
            )
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the updates of round {round} could not be written to {self._folder}: {error}. Make room and run "
                "again with --resume (in Python: resume=True)"
            ) from error
        self._found = {}


def kept_updates(folder: Path, rounds: int) -> list[dict[str, Tree]]:
    """Return, for each round, player -> its update.

    Raises:
        DataError: a round has no updates, or a file is damaged.
    """
    found = []
    for round in range(1, rounds + 1):
        path = folder / UPDATES / f"round-{round:06d}.safetensors"
        if not path.exists():
            raise DataError(
                f"{folder} keeps no updates of round {round}, so nobody can tell who contributed what. Run it with "
                "--set checkpoint.updates=true"
            )
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} is damaged: {error}. Restore it from a copy") from error
        players: dict[str, Tree] = {}
        for key, value in tensors.items():
            player, _, name = key.partition("|")
            players.setdefault(player, {})[name] = value
        found.append(players)
    return found
