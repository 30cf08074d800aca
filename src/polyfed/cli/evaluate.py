"""The verbs about a trained model: `evaluate` scores it, and `predict` gives its answers for new rows."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from polyfed.cli.application import AsJson, Overrides, app
from polyfed.cli.output import answer
from polyfed.core.errors import RecipeError, command

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Group

    from polyfed.experiment.recipes.recipe import Recipe


NO_CLASS = "{}"
"""How a set without classes is written in CSV, where an empty cell is a row that has no prediction."""

OnlyIds = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With edge.toml: predict only the ids in this file.", show_default=False),
]
PartialRows = Annotated[
    Literal["refuse", "absent"] | None,
    typer.Option(help="Rows with only some cells of a modality. [default: as for the run]", show_default=False),
]


@app.command()
def evaluate(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A run, an exported model or a safetensors file.", show_default=False),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="Another model, compared on the same rows.", show_default=False),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="The clients and their rows. [default: the run's recipe]")
    ] = None,
    overrides: Overrides = None,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Score the rows of this file.")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="Score own validation rows, not test rows.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Score the run's best round, not its last.")] = False,
    group: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN[=A,B]", help="Score groups by a column, of all or these values. May be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write evaluation.json, .csv and .html into this folder.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    job: Annotated[
        Path | None, typer.Option("--app", metavar="DIR", help="Write a job for devices; `polyfed submit` runs it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a saved model without training: per site and pooled, with intervals."""
    from polyfed.experiment.evaluate import Evaluation, job_of, write
    from polyfed.experiment.evaluate import evaluate as score
    from polyfed.experiment.recipes.recipe import load_recipe
    from polyfed.report.pages.evaluation import notes, tables

    groups = _groups(group or [])
    rows = "validation" if validation else "test"
    given = None
    if recipe is not None or overrides:
        path = recipe if recipe is not None else model / "recipe.toml"
        given = load_recipe(path, overrides or [])
    if job is not None:
        if data is not None:
            raise RecipeError("--app writes a job for devices, which score models on their own rows: leave out --data")
        _refuse_unnamed(groups)
        _write_app(job_of(model, given, rows, groups, best, other, for_devices=True), job, as_json=as_json)  # type: ignore[arg-type]
        return
    found: Evaluation = score(model, other, recipe=given, data=data, rows=rows, groups=groups, best=best)  # type: ignore[arg-type]
    if out is not None:
        write(found, out)
    if as_csv:
        typer.echo(found.csv(), nl=False)
        return
    shown = [_shown(*parts) for parts in tables(found.content)]
    answer(found.content, *shown, *notes(found.content), as_json=as_json)


def _shown(title: str, heads: list[str], lines: list[list[str]]) -> "Group":
    """Return a table in which no number is broken or cut."""
    from polyfed.report.text_layout import plain_table, titled, whole

    table = plain_table(*heads)
    for line in lines:
        table.add_row(*line)
    return titled(title, whole(table))


def _refuse_unnamed(groups: dict[str, list[str]]) -> None:
    if unnamed := [column for column, values in groups.items() if not values]:
        raise RecipeError(f"--group {unnamed[0]}: a job for devices must name the values, as in --group sex=F,M")


def _write_app(recipe: "Recipe", folder: Path, *, as_json: bool) -> None:
    """Write the app of a job for devices, and say how to run it."""
    from polyfed.deploy.app_folder import write_job

    made = write_job(recipe, folder)
    answer({"app": str(made)}, f"wrote {made}; run it: {command('submit', made)}", as_json=as_json)


def _groups(words: list[str]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for word in words:
        column, _, values = word.partition("=")
        if not column:
            raise RecipeError(f"--group {word}: must be COLUMN or COLUMN=VALUE,VALUE, as in --group sex=F,M")
        result[column] = [value.strip() for value in values.split(",")] if values else []
    return result


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run or an exported model.", show_default=False)],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="New rows, in the form of the run's data, or edge.toml for the samples of a silo.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a .csv or .json file instead of printing CSV.")
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Also give sets or intervals that hold the truth with this probability.",
            show_default=False,
        ),
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="Predict as this client does, by name or number.")
    ] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="COLUMN", help="A column that names the rows. May be repeated."),
    ] = None,
    only: OnlyIds = None,
    partial: PartialRows = None,
    as_json: AsJson = False,
) -> None:
    """Predict new rows: classes by name with probabilities, or numbers, and the modalities that each row has."""
    from polyfed.core.system.files import replace_text
    from polyfed.core.system.json_and_toml import to_json
    from polyfed.core.system.log_lines import escaped_lines
    from polyfed.experiment.results.run_result import load_models

    if out is not None and out.suffix not in (".csv", ".json"):
        raise RecipeError(f"--out {out}: must end in .csv or .json")
    frame = _of_silo(model, file, only, coverage, client, ids, partial) if file.suffix == ".toml" else None
    if frame is None:
        if only is not None:
            raise RecipeError(f"--only {only} chooses samples of a silo: give edge.toml in place of {file}")
        frame = load_models(model).predict_frame(file, client, coverage=coverage, partial=partial, ids=ids or ())
    if str(frame.columns[0]).partition(".")[0] == "prediction":  # nothing names the rows
        frame.insert(0, "row", range(len(frame)))
    lines = frame.astype(object).where(frame.notna(), None).to_dict("records")
    if "set" in frame.columns:
        # a set without classes has no class that is plausible enough; a row without a prediction has no set
        frame["set"] = ["" if held is None else "|".join(map(str, held)) or NO_CLASS for held in frame["set"]]
    if out is None and not as_json:
        typer.echo(escaped_lines(frame.to_csv(index=False)), nl=False)
        return
    if out is not None:
        replace_text(out, to_json(lines) if out.suffix == ".json" else frame.to_csv(index=False))
    answer(lines, f"{len(frame):,} rows in {out}", as_json=as_json)


def _of_silo(model: Path, file: Path, only: Path | None, *others: object) -> "pd.DataFrame":
    """Return the predictions for the samples of a silo, from its edge and devices.

    Raises:
        RecipeError: an option says how to read a file of rows.
    """
    import pandas as pd

    from polyfed.deploy import predict_at_edge

    names = ("--coverage", "--client", "--id", "--partial")
    if wrong := [name for name, value in zip(names, others, strict=True) if value]:
        raise RecipeError(f"{', '.join(wrong)}: only for a file of rows, and {file} is that of an edge. Leave it out")
    return pd.DataFrame(predict_at_edge(file, model, only))
