"""Trackers: pass the numbers of a run, as they come, to a tool that shows many runs together.

A tracker listens to the same events as the progress display. It runs on the server and is given only what the server
knows. The built-in tracker writes files and sends nothing over a network.
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
"""The folder of TensorBoard's event files inside the folder of the run."""

FOLLOWED = ("train_loss", "bytes_up", "bytes_down", "simulated_seconds", "seconds", "metrics", "logged")
"""Keys of a row of rounds.jsonl that hold one number per round, not one per client."""


@dataclass(frozen=True, kw_only=True)
class Tracker(ABC):
    """The section [tracking]. A tracker of your own is a subclass; its dataclass fields are the section's keys."""

    @abstractmethod
    def follow(self, recipe: Mapping[str, Any], folder: Path | None) -> Listener:
        """Create a listener for one run.

        Args:
            recipe: the resolved recipe, as in recipe.toml.
            folder: the folder of the run's files; None if the run writes none.

        Raises:
            RecipeError: the tool is not installed or not configured.
        """


@dataclass(frozen=True, kw_only=True)
class TensorBoard(Tracker):
    """Curves in TensorBoard: `tensorboard --logdir runs`. Needs the extra `polyfed[tracking]`.

    Attributes:
        folder: the folder of the event files; empty means `tensorboard` in the folder of the run.
    """

    folder: str = ""

    def follow(self, recipe: Mapping[str, Any], folder: Path | None) -> Listener:
        """Create the listener that writes the event files; see `Tracker.follow`."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RecipeError(
                f"[tracking] name = 'tensorboard' needs a package ({error}): pip install 'polyfed[tracking]'"
            ) from None
        if not self.folder and folder is None:
            raise RecipeError("[tracking] folder = '': this run writes no files of its own. Name a folder")
        return _Curves(recipe, Path(self.folder) if self.folder else Path(folder or "") / EVENTS, SummaryWriter)


class _Curves:
    """Writes the scalars of a run. When a run is resumed, TensorBoard hides the scalars of rounds that run again."""

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
    """The numbers of a row of rounds.jsonl that there is one of per round, as (name, value); names are paths such as
    `metrics/global/accuracy`."""
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
"""Name in a recipe -> class."""
