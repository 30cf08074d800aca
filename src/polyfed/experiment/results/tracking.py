"""Trackers: pass the numbers of a run, while it runs, to a tool that shows many runs together.

A tracker listens to the same events as the progress display. It runs on the server and receives only data that the
server has. The built-in trackers write files on this machine; MLflow and Weights & Biases send the numbers to a server
only if the recipe asks for this.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import check_ranges
from polyfed.experiment.running.events import INTERRUPTED, Listener

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS = "tensorboard"
"""The folder of TensorBoard's event files inside the folder of the run."""

DATABASE = "mlflow.db"
"""The file of MLflow's numbers inside the folder of the run."""

FOLLOWED = ("train_loss", "bytes_up", "bytes_down", "simulated_seconds", "seconds", "metrics", "logged", "norms")
"""The keys of a row of rounds.jsonl that hold one number per round instead of one number per client."""

LONGEST_VALUE = 6000
"""The largest length of a parameter's text that MLflow accepts."""


@dataclass(frozen=True, kw_only=True)
class Tracker(ABC):
    """The section [tracking]. Your own tracker extends this class, and its dataclass fields are the section's keys."""

    @abstractmethod
    def follow(self, recipe: Mapping[str, Any], folder: Path | None) -> Listener:
        """Create a listener for one run.

        Args:
            recipe: the resolved recipe, as in recipe.toml.
            folder: the folder of the run's files. None if the run writes no files.

        Raises:
            RecipeError: the tool is not installed or not configured.
        """


@dataclass(frozen=True, kw_only=True)
class TensorBoard(Tracker):
    """Curves in TensorBoard: `tensorboard --logdir runs`. Needs the extra `polyfed[tracking]`.

    Attributes:
        folder: the folder of the event files, by default `tensorboard` in the run's folder.
    """

    folder: str = ""

    @override
    def follow(self, recipe: Mapping[str, Any], folder: Path | None) -> Listener:
        with _needing("tensorboard", "tracking"):
            from torch.utils.tensorboard import SummaryWriter
        return _Curves(recipe, _place(self.folder, "folder", folder, EVENTS), SummaryWriter)


@dataclass(frozen=True, kw_only=True)
class MLflow(Tracker):
    """A run in MLflow: parameters, metrics by round, the recipe as tags. Needs the extra `polyfed[mlflow]`.

    Attributes:
        uri: where MLflow stores its runs: a database such as `sqlite:///runs/mlflow.db`, or the address of a server,
            which then receives the numbers; by default `mlflow.db` in the folder of the run.
        experiment: the name of the experiment that the run belongs to.
    """

    uri: str = ""
    experiment: str = "polyfed"

    @override
    def follow(self, recipe: Mapping[str, Any], folder: Path | None) -> Listener:
        with _needing("mlflow", "mlflow"):
            from mlflow import MlflowClient
        uri = self.uri or f"sqlite:///{_place('', 'uri', folder, DATABASE).absolute()}"
        return _Logged(recipe, lambda: MlflowClient(tracking_uri=uri), self.experiment)


@dataclass(frozen=True, kw_only=True)
class WandB(Tracker):
    """A run in Weights & Biases. Needs the extra `polyfed[wandb]`.

    Attributes:
        mode: `offline` writes files, which `wandb sync` uploads later. `online` sends the numbers to the server that
            was set by `wandb login`.
        project: the project that the run belongs to.
        folder: the folder of the subfolder `wandb`, by default the folder of the run.
    """

    mode: Literal["offline", "online"] = "offline"
    project: str = "polyfed"
    folder: str = ""

    def __post_init__(self) -> None:
        """Check the options."""
        check_ranges("[tracking]", self)

    @override
    def follow(self, recipe: Mapping[str, Any], folder: Path | None) -> Listener:
        with _needing("wandb", "wandb"):
            import wandb
        return _Uploaded(recipe, self, _place(self.folder, "folder", folder, ""), wandb)


class _Curves:
    """Writes the scalars of a run.

    When a run is resumed, TensorBoard hides the earlier scalars of the rounds that run again.
    """

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
            self.writer.add_hparams(settings(self.recipe), dict(_last(facts["result"])), run_name=".")
            self.writer.close()


class _Logged:
    """Logs a run to MLflow. A resumed run continues MLflow's run of the same name, and each round is logged once."""

    def __init__(self, recipe: Mapping[str, Any], connect: Any, experiment: str) -> None:
        self.recipe, self.connect, self.experiment = recipe, connect, experiment
        self.client: Any = None
        self.run, self.done = "", 0

    def __call__(self, event: str, **facts: Any) -> None:
        if event == "run-started":
            self.client = self.connect()
            self._begin(facts)
        elif self.client is None:
            return
        elif event == "round-finished" and facts["row"]["round"] > self.done:
            for name, value in numbers(facts["row"]):
                self.client.log_metric(self.run, name, value, step=facts["row"]["round"])
        elif event == "run-stopped":
            self.client.set_terminated(self.run, status="KILLED" if facts["reason"] == INTERRUPTED else "FAILED")
        elif event == "run-finished":
            for name, value in _last(facts["result"]):
                self.client.log_metric(self.run, name, value, step=facts["result"]["rounds"])
            self.client.set_terminated(self.run)

    def _begin(self, facts: Mapping[str, Any]) -> None:
        """Find the run that is resumed, or create one."""
        known = self.client.get_experiment_by_name(self.experiment)
        number = self.client.create_experiment(self.experiment) if known is None else known.experiment_id
        found = self.client.search_runs([number], f"tags.`polyfed.run` = '{facts['run']}'")
        if found:
            self.run = found[0].info.run_id
            steps = [entry.step for entry in self.client.get_metric_history(self.run, "bytes_up")]
            self.done = max(steps, default=0)
            self.client.set_terminated(self.run, status="RUNNING")
            return
        name = f"{facts['algorithm']} {facts['run']}"
        tags = {"polyfed.run": facts["run"], "mlflow.runName": name}
        self.run = self.client.create_run(number, tags=tags).info.run_id
        for key, value in settings(self.recipe).items():
            self.client.log_param(self.run, key, str(value)[:LONGEST_VALUE])


class _Uploaded:
    """Logs a run to Weights & Biases. A resumed run has the id of the run that it continues."""

    def __init__(self, recipe: Mapping[str, Any], options: WandB, folder: Path, wandb: Any) -> None:
        self.recipe, self.options, self.folder, self.wandb = recipe, options, folder, wandb
        self.run: Any = None

    def __call__(self, event: str, **facts: Any) -> None:
        if event == "run-started":
            self.folder.mkdir(parents=True, exist_ok=True)
            self.run = self.wandb.init(
                project=self.options.project,
                mode=self.options.mode,
                dir=str(self.folder),
                id=facts["run"],
                name=f"{facts['algorithm']} {facts['run']}",
                resume="allow",
                config=dict(self.recipe),
                settings=self.wandb.Settings(
                    silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True
                ),
            )
            self.run.define_metric("*", step_metric="round")
        elif self.run is None:
            return
        elif event == "round-finished":
            self.run.log({"round": facts["row"]["round"], **dict(numbers(facts["row"]))})
        elif event == "run-stopped":
            self.run.finish(exit_code=1)
        elif event == "run-finished":
            self.run.summary.update(dict(_last(facts["result"])))
            self.run.finish()


@contextmanager
def _needing(name: str, extra: str) -> Iterator[None]:
    """Turn a failed import into an error that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise RecipeError(
            f"[tracking] name = '{name}' needs a package ({error}): pip install 'polyfed[{extra}]'",
            ("tracking", "name"),
        ) from None


def _place(given: str, key: str, folder: Path | None, name: str) -> Path:
    """Return the place of a tracker's files: the given place, or `name` in the folder of the run.

    Raises:
        RecipeError: neither a place nor a folder is given.
    """
    if not given and folder is None:
        raise RecipeError(
            f"[tracking] {key} = '': this run writes no files of its own. Name a {key}", ("tracking", key)
        )
    return Path(given) if given else Path(folder or "") / name


def numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a row of rounds.jsonl that describe the whole round, as (name, value).

    Numbers that describe a single client are left out. Names are paths such as `metrics/global/accuracy`.
    """
    for name, value in _leaves({key: row[key] for key in FOLLOWED if row.get(key) is not None}):
        if isinstance(value, int | float):
            yield name, float(value)


def settings(recipe: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the numbers, texts and booleans of a resolved recipe, by paths such as `train/lr`. Lists are left out."""
    return {name: value for name, value in _leaves(recipe) if isinstance(value, bool | int | float | str)}


def _last(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics of a result, by paths such as `last/metrics/global/accuracy`."""
    for name, value in numbers({"metrics": result["metrics"]}):
        yield f"last/{name}", value


def _leaves(nest: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nest.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", value


TRACKERS: dict[str, type[Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB}
"""Name in a recipe -> class."""
