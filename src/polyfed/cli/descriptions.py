"""The verbs `algorithms`, `data`, `recipes`, `docs` and `init`: what comes with polyfed, and a recipe for your data."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from polyfed.cli.application import AsJson, LeaveOut, Person, app, typed_options
from polyfed.cli.output import answer
from polyfed.core.errors import Call, RecipeError, called, command, did_you_mean
from polyfed.core.system.files import shipped


class OnCorrupt(StrEnum):
    """The reaction of `data prepare` to a file that cannot be used."""

    fail = "fail"
    skip = "skip"


@app.command()
def algorithms(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
    recipe: Annotated[bool, typer.Option("--recipe", help="Print a recipe for NAME that runs as it is.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the algorithms, or describe one: its idea, its hyper-parameters and what can leave a client."""
    from polyfed.cli import init
    from polyfed.cli.printing import catalogue, catalogue_pages

    if recipe:
        lines = init.lines_for(name)
        answer({"recipe": lines}, *lines.split("\n"), as_json=as_json)
        return
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
    """List the data sources, describe one (modalities, licence, options), or write the features of one to a folder."""
    from polyfed.cli import preparation
    from polyfed.cli.printing import catalogue, catalogue_pages

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


HOW_TO_GO_ON = "polyfed recipes NAME prints one, polyfed recipes NAME --copy copies it into this folder"


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy NAME into this folder, or all recipes into a new folder `recipes`.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the recipes that come with polyfed, print one, or copy them."""
    from polyfed.cli.printing import catalogue_pages
    from polyfed.experiment.recipes import collection

    if copy:
        chosen, folder = ([name], Path()) if name is not None else (collection.names(), Path("recipes"))
        written = [str(path) for path in collection.copy_recipes(chosen, folder)]
        go_on = f". Go on with: {command('run', written[0])}" if name is not None else ""
        what = written[0] if name is not None else f"{len(written)} recipes in {folder}"
        answer({"written": written}, f"wrote {what}{go_on}", as_json=as_json)
    elif name is not None:
        text = collection.text_of(name)
        answer({"recipe": text}, *text.splitlines(), as_json=as_json)
    else:
        rows = [{"name": each, "about": collection.headline(each)} for each in collection.names()]
        answer(rows, catalogue_pages.listed("Recipes that come with polyfed", rows, HOW_TO_GO_ON), as_json=as_json)


@app.command()
def docs(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List the pages of the documentation, or print one, such as data or algorithms/cmsfed."""
    from polyfed.cli.printing import catalogue_pages

    folder = shipped("docs")
    pages = {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.md"))}
    if name is None:
        rows = [{"name": each, "about": title_of(path), "path": str(path)} for each, path in pages.items()]
        answer(
            rows,
            catalogue_pages.listed("Pages of the documentation", rows, "polyfed docs NAME prints one"),
            as_json=as_json,
        )
        return
    plain = name.removeprefix("docs/").removesuffix(".md")
    if plain not in pages:
        raise RecipeError(f"the documentation has no page '{plain}'; {did_you_mean(plain, pages)}")
    text = pages[plain].read_text(encoding="utf-8")
    answer({"page": text, "path": str(pages[plain])}, *text.splitlines(), as_json=as_json)


@app.command(context_settings={"allow_extra_args": True})  # so that the error for several files can name the cure
def init(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help=".npz, .csv, .tsv, .parquet or .jsonl.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="RECIPE.toml", help="The recipe to write.")] = Path("recipe.toml"),
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Array or column of the labels; once for each target of a row."),
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="Array or column of the client that each row belongs to.")
    ] = None,
    person: Person = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=RULE",
            help="Make numbers of a column: one-hot, mean, date, or a table in TOML; polyfed docs data.",
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Array or column: train, test, validation.")] = None,
    class_name: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="Class of a table, from the first to the last; once for each class."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="The task, such as retrieval. [default: as the labels suggest]")
    ] = None,
    leave_out: LeaveOut = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="section.key=value", help="Of [data] or [clients], as in data.separator=;"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing recipe.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a complete recipe for a data file, and print all guesses."""
    from polyfed.cli import init

    call = Call("init", str(file), typed_options(context))
    if context.args:
        joined = call.again(("--client", "site"), file=f"joined{file.suffix}")
        raise RecipeError(
            f"init reads one file, and {' '.join([str(file), *context.args])} are several. Join them into one file. "
            "If each holds the rows of a site, add a column (.npz: an array) that names it, as in "
            f"pandas.concat(pandas.read_csv(file).assign(site=file) for file in files), and write {joined}. If they "
            "are splits, add `split`, which says train, test or validation for each row. Or give a data frame for each "
            "split in Python, as in polyfed.run(data={'train': ..., 'test': ...})"
        )
    labels = label[0] if label and len(label) == 1 else label or None
    columns = {"label": labels, "client": client, "person": person, "split": split, "class_names": class_name}
    told: dict[str, Any] = {"leave_out": leave_out or (), "overrides": overrides or (), "force": force}
    with called(call):
        notes = init.write_recipe(file, out, columns, init.rules_in(column or ()), task, **told)
    plain = command("init", file)  # the next one replaces the recipe that this one has written
    notes = notes if force else tuple(note.replace(plain, f"{plain} --force") for note in notes)
    lines = [f"guessed: {note}" for note in notes]
    lines.append(f"wrote {out}. Go on with: {command('check', out)}, then {command('run', out)}")
    answer({"recipe": str(out), "guessed": notes}, *lines, as_json=as_json)


def title_of(page: Path) -> str:
    """The first heading of a page."""
    match = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return page.stem if match is None else match[1]
