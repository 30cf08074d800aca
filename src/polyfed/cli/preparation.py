"""`polyfed data prepare NAME`: its options, its progress bar and its summary."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from polyfed.core.errors import RecipeError
from polyfed.data.features.extraction import OnCorrupt
from polyfed.data.features.prepare import prepare
from polyfed.data.features.prepared import Prepared
from polyfed.data.sources import SOURCES
from polyfed.data.sources.media_set import MediaSet
from polyfed.experiment.recipes.parts import build
from polyfed.report.text_layout import SafeConsole

FEW = 10
"""The largest number of skipped samples in the summary. The manifest lists all of them."""


class PrepareProgress:
    """A listener for `prepare`. It shows a progress bar and, above the bar, a line for each skipped clip.

    The bar shows the number of finished clips, the clips per second and the time left.

    Args:
        console: the console to write to. None selects standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console or SafeConsole(stderr=True, highlight=False),
        )
        self.task = self.bar.add_task("", total=None, rate="")

    def __call__(self, event: str, **facts: Any) -> None:
        """Show an event of `prepare`."""
        if event == "prepare-started":
            self.bar.update(self.task, description=facts["name"], total=facts["total"])
            self.bar.start()
        elif event == "clip-done":
            speed = self.bar.tasks[0].speed
            self.bar.update(self.task, completed=facts["done"], rate=f"{speed:.1f} clips/s" if speed else "")
        elif event == "prepare-unchanged":
            self.bar.console.print(f"{facts['name']}: unchanged since it was prepared", markup=False)
        elif event == "clip-skipped":
            self.bar.console.print(f"skipped {facts['name']}: {facts['reason']}", markup=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


def run_prepare(
    name: str, source: Path | None, target: Path | None, workers: int, on_corrupt: OnCorrupt, settings: Sequence[str]
) -> Prepared:
    """Prepare a data source with a progress bar.

    Raises:
        RecipeError: `--from` or `--to` is missing, or an option is wrong.
        DataError: the published folder cannot be used.
    """
    if source is None or target is None:
        raise RecipeError(
            "polyfed data prepare NAME needs --from DIR, the published folder, and --to DIR for the features"
        )
    options = _options(name, source, settings)
    with PrepareProgress() as progress:
        return prepare(name, source, target, workers=workers, on_corrupt=on_corrupt, listener=progress, **options)


def facts_of(made: Prepared) -> dict[str, Any]:
    """The content that `data prepare --json` prints."""
    return {
        "source": made.source,
        "folder": str(made.folder),
        "rows": made.num_rows,
        "classes": made.classes,
        "published": made.published,
        "skipped": made.skipped,
    }


def summary(made: Prepared) -> list[RenderableType]:
    """Return a table with the number of rows of each class, followed by the skipped samples and a closing line.

    If the number of rows of a class was published, it stands beside the number found.
    """
    table = Table("class", "rows", *(["published"] if made.published else []))
    for name, count in made.classes.items():
        table.add_row(name, str(count), *([str(made.published.get(name, ""))] if made.published else []))
    skipped = [Text(f"skipped {entry['sample']}: {entry['reason']}") for entry in made.skipped[:FEW]]
    if len(made.skipped) > FEW:
        skipped.append(Text(f"and {len(made.skipped) - FEW} more, see {made.folder / 'manifest.json'}"))
    line = f'{made.num_rows} rows in {made.folder}; in a recipe: [data] name = "{made.source}", path = "{made.folder}"'
    return [table, *skipped, Text(line)]


def _options(name: str, source: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Return the options of the data source from `key=value` arguments. They are checked like the keys of `[data]`."""
    table: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.removeprefix("data.").partition("=")
        if not equals:
            raise RecipeError(
                f"--set {setting}: write key=value with an option of the data source, as in --set frames=4"
            )
        try:
            table[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            table[key.strip()] = text.strip()  # a word without quotes
    if not issubclass(SOURCES.get(name, object), MediaSet):
        return table  # `prepare` refuses it, and lists the sources that can be prepared
    built = build("[data]", SOURCES[name], table | {"path": str(source)})
    return {key: getattr(built, key) for key in table}
