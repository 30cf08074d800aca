"""The verbs `algorithms` and `data`: what methods and data sources there are, and preparing a data source."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.application import AsJson, app
from polyfed.cli.output import answer
from polyfed.core.errors import RecipeError


class OnCorrupt(StrEnum):
    """What `data prepare` does with a file that cannot be used."""

    fail = "fail"
    skip = "skip"


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List the algorithms, or describe one: its idea, its hyper-parameters and what can cross."""
    from polyfed.cli import catalogue, catalogue_pages

    if name is None:
        answer(catalogue.algorithm_list(), catalogue_pages.algorithm_list(), as_json=as_json)
    else:
        answer(catalogue.algorithm_facts(name), catalogue_pages.algorithm_page(name), as_json=as_json)


@app.command()
def data(
    words: Annotated[list[str] | None, typer.Argument(metavar="[NAME] | prepare NAME", show_default=False)] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="prepare: the folder of the published data set.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="prepare: the folder to write the features to.")
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="prepare: how many files are read at the same time.")] = 1,
    on_corrupt: Annotated[
        OnCorrupt, typer.Option(help="prepare: fail at a file that cannot be used, or skip it.")
    ] = OnCorrupt.fail,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="key=value", help="prepare: an option of the data source.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the data sources, describe one (modalities, licence, options), or extract its features once."""
    from polyfed.cli import catalogue, catalogue_pages, preparation

    match words or []:
        case []:
            answer(catalogue.source_list(), catalogue_pages.source_list(), as_json=as_json)
        case ["prepare", name]:
            made = preparation.run_prepare(name, source, target, workers, on_corrupt.value, settings or [])
            answer(preparation.facts_of(made), *preparation.summary(made), as_json=as_json)
        case [name] if name != "prepare":
            answer(catalogue.source_facts(name), catalogue_pages.source_page(name), as_json=as_json)
        case _:
            raise RecipeError(
                "write `polyfed data`, `polyfed data NAME`, or `polyfed data prepare NAME --from DIR --to DIR`"
            )
