"""Trackers: hand the numbers of a run, as they come, to a tool in which many runs are looked at together.

A tracker reads the same events as the progress display. It belongs to the server: what it is given is what the server
knows, never anything else of a client. The one that polyfed brings writes files and sends nothing anywhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import RecipeError
from polyfed.experiment.events import Listener

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS = "tensorboard"
"""Folder of TensorBoard's event files inside that of the run."""

FOLLOWED = ("train_loss", "bytes_up", "bytes_down", "simulated_seconds", "seconds", "metrics", "logged")
"""What of a row of rounds.jsonl is a number to follow: one a round, not one a client."""


@dataclass(frozen=True, kw_only=True)
class Tracker(ABC):
    """The [tracking] section; your own is a subclass, a dataclass whose fields are the section's keys."""

    @abstractmethod
    def follow(self, recipe: Mapping[str, Any], folder: Path | None) -> Listener:
        """A listener for one run.

        Args:
            recipe: resolved, as recipe.toml holds it.
            folder: of the run's files; None where it writes none.

        Raises:
            RecipeError: the tool is not installed, or lacks something it needs.
        """


@dataclass(frozen=True, kw_only=True)
class TensorBoard(Tracker):
    """Curves in TensorBoard: `tensorboard --logdir runs`. Needs the extra `polyfed[tracking]`.

    Attributes:
        folder: where event files go; empty: `tensorboard` in the folder of the run.
    """

    folder: str = ""

    def follow(self, recipe: Mapping[str, Any], folder: Path | None) -> Listener:
        """See `Tracker`."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RecipeError(
                f"[tracking] name = 'tensorboard' needs a package ({error}): pip install 'polyfed[tracking]'"
            ) from None
        if not self.folder and folder is None:
            raise RecipeError("[tracking] folder = '': this run writes no files of its own; name a folder")
        return _Curves(recipe, Path(self.folder) if self.folder else Path(folder or "") / EVENTS, SummaryWriter)


class _Curves:
    """Writes the scalars of a run; a resumed run hides what its lost rounds had written."""

    def __init__(self, recipe: Mapping[str, Any], folder: Path, make: type["SummaryWriter"]) -> None:
        self.recipe, self.folder, self.make = recipe, folder, make
        self.writer: SummaryWriter | None = None

    def __call__(self, event: str, **facts: Any) -> None:
        if event == "run-started":
            self.writer = self.make(str(self.folder), purge_step=facts["first_round"])
        if self.writer is None:
            return
        if event == "round-finished":
            for name, value in numbers(facts["row"]):
                self.writer.add_scalar(name, value, facts["row"]["round"])
            self.writer.flush()
        elif event == "run-finished":
            settings = {
                name: value for name, value in _leaves(self.recipe) if isinstance(value, bool | int | float | str)
            }
            scores = dict(numbers({"metrics": facts["result"]["metrics"]}))
            self.writer.add_hparams(settings, {f"last/{name}": value for name, value in scores.items()}, run_name=".")
            self.writer.close()


def numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a row of rounds.jsonl that are one a round, named like paths: `metrics/global/accuracy`."""
    for name, value in _leaves({key: row[key] for key in FOLLOWED if row.get(key) is not None}):
        if isinstance(value, int | float):
            yield name, float(value)


def _leaves(nest: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nest.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", value


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard}
"""By the name in a recipe."""
