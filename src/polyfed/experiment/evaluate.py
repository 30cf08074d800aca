"""`polyfed evaluate`: score a saved model where the rows are, and compare two models on the same rows."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor

from polyfed.algorithms.evaluate import Evaluate
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import DataError, PolyfedWarning, RecipeError, command, did_you_mean
from polyfed.core.scaling import Scaling
from polyfed.core.system.files import RECIPE
from polyfed.data import Columns, Population, Shards, populate, stacked
from polyfed.data.column_fitting import Features, encoded, fits, read_tables
from polyfed.data.columns import TEST
from polyfed.data.population.population import with_fitted_columns
from polyfed.data.row_groups import group_codes
from polyfed.evaluation.scores import Evaluation as EvaluationSpec
from polyfed.evaluation.scores import all_rows
from polyfed.evaluation.two_models import Floats, delong, mcnemar, paired_bootstrap
from polyfed.experiment.recipes.defaults import scaled
from polyfed.experiment.recipes.recipe import Recipe, recipe_of
from polyfed.experiment.recipes.settings import StopSpec
from polyfed.experiment.recipes.task_choice import prepared
from polyfed.experiment.results.saved_model import facts_of_data
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.loop import execute
from polyfed.experiment.running.run_state import load_content
from polyfed.experiment.running.warm_start import DESCRIPTION
from polyfed.objective import Classification, MultiLabel, Objective, Ordinal
from polyfed.objective.report import log_odds
from polyfed.report.pages.evaluation import page
from polyfed.training import SingleClientData

UNSCALED = (
    "the shift and scale of the model's samples are not known, so the rows of the file are taken as they are. Give the "
    "folder of the run, or one that run.export wrote, to scale them as in training"
)

Rows = Literal["test", "validation"]


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model, for each site and for all sites together.

    Attributes:
        content: the entry `evaluation` of result.json; with two models, also `comparison`.
    """

    content: dict[str, Any]

    def lines(self) -> list[dict[str, Any]]:
        """Return a line for each site, group and metric: `site`, `group`, `rows`, `metric` and the numbers."""
        found = []
        for site, one in {"pooled": self.content["pooled"], **self.content["sites"]}.items():
            parts = [("", one["rows"], one["metrics"])]
            for column, groups in one.get("groups", {}).items():
                for value, told in groups.items():
                    scores = {name: score for name, score in told.items() if name != "rows"}
                    parts.append((f"{column}={value}", told["rows"], scores))
            for group, rows, metrics in parts:
                for name, numbers in metrics.items():
                    about = {"site": site, "group": group, "rows": rows, "metric": name}
                    found.append(about | {key: numbers.get(key) for key in ("value", "low", "high", "error")})
        return found

    def csv(self) -> str:
        """Return `lines` as CSV."""
        text = io.StringIO()
        names = ("site", "group", "rows", "metric", "value", "low", "high", "error")
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.lines())
        return text.getvalue()


def evaluate(
    model: str | Path,
    other: str | Path | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    data: str | Path | None = None,
    rows: Rows = "test",
    groups: Mapping[str, Sequence[str | int]] | None = None,
) -> Evaluation:
    """Score the global model of a run, of an exported folder or of a safetensors file, without training.

    Args:
        model: the run's folder, the exported folder, or the file.
        other: another model, which is compared with the first one on the same rows.
        recipe: says which clients have which rows. None takes the recipe of the run in `model`.
        data: a file in the form of the recipe's data: all its rows are scored, or those of its split 1.
        rows: whether clients are scored on their own test rows or on their own validation rows.
        groups: column -> values: scores of the rows with each value too.

    Raises:
        PolyfedError: the model does not fit, or there are no rows to score.
    """
    job = job_of(model, recipe, rows, groups)
    population = population_for(job, data, trained_facts(model))
    finished = execute(job, None, Emitter([]), population=population)
    content = dict(finished.result["evaluation"])
    if other is not None:
        mine, theirs = (
            assemble(job_of(one, recipe or model, rows, groups), population=population) for one in (model, other)
        )
        content["comparison"] = comparison(mine, theirs, rows)
    return Evaluation(content)


def job_of(
    model: str | Path,
    recipe: Recipe | str | Path | None,
    rows: Rows = "test",
    groups: Mapping[str, Sequence[str | int]] | None = None,
) -> Recipe:
    """Return the recipe of an evaluation job.

    Raises:
        RecipeError: there is no recipe, or the recipe is wrong.
    """
    path = Path(model).expanduser()
    if not isinstance(recipe, Recipe):
        folder = path if recipe is None else Path(recipe).expanduser()
        named = folder / RECIPE if folder.is_dir() else folder
        if not named.exists() or (recipe is None and not folder.is_dir()):
            raise RecipeError(
                f"{path} holds no recipe, so its clients and rows are not known. Give one: "
                f"{command('evaluate', path, '--recipe', 'RECIPE.toml')}"
            )
        recipe = named
    base = recipe_of(recipe)
    columns = {name: list(values) for name, values in (groups or {}).items()}
    method = Evaluate(rows=rows, groups=columns, evaluation=EvaluationSpec(every=1))
    return replace(
        base,
        algorithm=method,
        model=replace(base.model, init=str(path), init_blocks=(), freeze=()),
        rounds=1,
        stop=StopSpec(),
        attack=None,
        privacy=None,
        network=None,
        tracking=None,
        name=f"evaluate-{base.name}",
    )


@dataclass(frozen=True)
class TrainedFacts:
    """How the data of a model's training became its input.

    Attributes:
        scaling: the shift and scale of each modality. None for a safetensors file, and if devices scaled their rows.
        names: the names of the classes, or None.
        features: the columns of each modality with rules in [data.columns].
    """

    scaling: dict[str, Scaling] | None = None
    names: tuple[str, ...] | None = None
    features: Mapping[str, Features] = field(default_factory=dict)


def trained_facts(model: str | Path) -> TrainedFacts:
    """Return how the data of a saved model's training became its input, as far as its folder says it.

    Raises:
        DataError, CheckpointError: a file is damaged.
    """
    path = Path(model).expanduser()
    if (path / DESCRIPTION).exists():
        return TrainedFacts(*facts_of_data(path))
    facts: Mapping[str, Any] = {}
    if (path / RECIPE).exists():
        found = load_content(path / "checkpoint", recipe_of(path / RECIPE).algorithm)
        facts = {} if found is None else found[1].get("federation", {})
    shapes = facts.get("shapes", {})
    names, scaling = facts.get("class_names"), facts.get("scaling")
    read = None if scaling is None else {m: Scaling.read(by, tuple(shapes[m])) for m, by in scaling.items()}
    return TrainedFacts(read, None if names is None else tuple(names), read_tables(facts.get("columns"), shapes))


def population_for(job: Recipe, data: str | Path | None, trained: TrainedFacts) -> Population:
    """Return the clients of an evaluation job, with the rows of the recipe or of a file.

    Args:
        job: the recipe of the job.
        data: the file, or None.
        trained: how the data of the model's training became its input.
    """
    scaling, names = trained.scaling, trained.names
    source = job.data
    if data is not None:
        if not hasattr(source, "path"):
            raise RecipeError(
                f"--data {data}: the recipe's data '{type(source).__name__}' has no path. Use npz or table"
            )
        own = {"test_share": 0.0} if hasattr(source, "test_share") else {}
        source = replace(source, path=str(data), **own)
    columns = prepared(job, stacked(source.load(), job.stack))
    if trained.features or data is not None:
        columns = _encoded(columns, trained.features)
    columns = _renumbered(_scaled(columns, scaling), names)
    columns = replace(columns, groups=codes_of(source, job, len(columns)))
    if data is None:
        seed = job.seed if job.clients.seed is None else job.clients.seed
        population = with_fitted_columns(populate(columns, job.clients, keys.key(seed, "population")))
        rows = torch.unique(population.train.rows)
        return population if scaling else replace(population, columns=scaled(job, population.columns, rows))
    if scaling is None:
        warn(UNSCALED, PolyfedWarning, stacklevel=3)
    marked = columns.rows(TEST)
    nobody = Shards(torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    return Population(
        columns=columns,
        train=nobody,
        test=None,
        holds=torch.ones(1, len(columns.modalities), dtype=torch.bool),
        silo=None,
        test_rows=marked if len(marked) else torch.arange(len(columns)),
        validation_rows=marked[:0],
    )


def codes_of(source: Any, job: Recipe, rows: int) -> dict[str, Tensor]:
    """Return the groups of each row for the columns of an evaluation job."""
    method: Any = job.algorithm
    return group_codes(source, getattr(method, "groups", {}), rows)


def _encoded(columns: Columns, features: Mapping[str, Features]) -> Columns:
    """Return the columns with the words and the means of the model's training.

    Raises:
        DataError: the rows have columns with rules, and the model's files do not say what they became.
    """
    own = fits(columns)
    for name, after in own.items():
        known = [feature.column for feature in features.get(name, ())]
        if known != [feature.column for feature in after]:
            raise DataError(
                f"'{name}' has the columns {', '.join(f.column for f in after)}, and the model was trained with "
                f"{', '.join(known) or 'numbers'}. Name the same columns in [data]"
            )
    for name, column in columns.modalities.items():
        made = column.features or ()
        if made and made[0].is_whole and made != features.get(name):
            rules = [None if f.rule is None else f.rule.kind for f in features.get(name, ())]
            raise DataError(
                f"'{name}' is made of the column '{made[0].column}' by another rule in [data.columns] than "
                f"in training ({', '.join(map(str, rules)) or 'none'}). Write the rule of the run's recipe.toml"
            )
    return encoded(columns, features) if own else columns


def _scaled(columns: Columns, scaling: Mapping[str, Scaling] | None) -> Columns:
    """Return the columns with the shift and scale of the model's training, instead of those of these rows."""
    if scaling is None:
        return columns
    made = {
        name: replace(c, shift=scaling[name].shift, scale=scaling[name].scale) if name in scaling else c
        for name, c in columns.modalities.items()
    }
    return replace(columns, modalities=made, standardise=False)


def _renumbered(columns: Columns, names: Sequence[str] | None) -> Columns:
    """Return the columns with the class numbers of the model's training, if both have names.

    Raises:
        DataError: the rows have a class that the model does not know.
    """
    mine = columns.class_names
    if names is None or mine is None or tuple(mine) == tuple(names) or columns.label.is_floating_point():
        return columns
    if strange := [name for name in mine if name not in names]:
        raise DataError(
            f"the rows have the class '{strange[0]}', which the model does not; {did_you_mean(strange[0], names)}"
        )
    order = torch.tensor([list(names).index(name) for name in mine])
    return replace(columns, label=order[columns.label], num_classes=len(names), class_names=tuple(names))


# two models on the same rows


def comparison(first: Assembly, second: Assembly, rows: Rows) -> dict[str, Any]:
    """Compare two models on the same rows: the entry `comparison` of an evaluation.

    Args:
        first: the job of the first model.
        second: the job of the second model, with the same population.
        rows: which own rows are scored.

    Returns:
        `mcnemar` on correct decisions, `delong` on the AUROC of each class or label, and `bootstrap` on each metric.
        Each is there if the task has it.
    """
    objective = first.fed.context.objective
    (one, y), (two, _) = (outputs_of(parts, rows) for parts in (first, second))
    found: dict[str, Any] = {"rows": len(y), "bootstrap": {}}
    names = objective.measured(objective.sums(one, _batch(y))).keys()
    for name in names:
        pair = paired_bootstrap(len(y), partial(_pair, objective, one, two, y, name))
        if pair is not None:
            found["bootstrap"][name] = dataclasses.asdict(pair)
    if isinstance(objective, Classification | Ordinal):
        right = [(objective.decided(outputs) == y).numpy() for outputs in (one, two)]
        found["mcnemar"] = dataclasses.asdict(mcnemar(*right))
    tests = {label: delong(*parts) for label, parts in _binary(objective, one, two, y).items()}
    known = {label: dataclasses.asdict(test) for label, test in tests.items() if test is not None}
    return found | ({"delong": known} if known else {})


def _batch(y: Tensor) -> Batch:
    return Batch({}, y, torch.arange(len(y)))


def _pair(
    objective: Objective, one: Tensor, two: Tensor, y: Tensor, name: str, drawn: Any
) -> tuple[float, float] | None:
    rows = torch.from_numpy(drawn)
    found = [objective.measured(objective.sums(outputs[rows], _batch(y[rows]))).get(name) for outputs in (one, two)]
    return None if None in found else (found[0], found[1])  # type: ignore[return-value]


def _binary(objective: Objective, one: Tensor, two: Tensor, y: Tensor) -> dict[str, tuple[Any, Floats, Floats]]:
    """Return, for each class, label or question, which rows are positive, and the scores of both models."""
    found: dict[str, tuple[Any, Floats, Floats]] = {}
    if isinstance(objective, Classification):
        scores = [log_odds(outputs).numpy() for outputs in (one, two)]
        for c in [1] if one.shape[1] == 2 else range(one.shape[1]):
            found[str(c)] = ((y == c).numpy(), scores[0][:, c], scores[1][:, c])
    elif isinstance(objective, Ordinal):
        for k in range(one.shape[1]):
            found[f"above {k}"] = ((y > k).numpy(), one[:, k].double().numpy(), two[:, k].double().numpy())
    elif isinstance(objective, MultiLabel):
        for t in range(one.shape[1]):
            known = ~y[:, t].isnan()
            parts = (outputs[known, t].double().numpy() for outputs in (one, two))
            found[str(t)] = ((y[known, t] == 1).numpy(), *parts)  # type: ignore[assignment]
    return found


def outputs_of(parts: Assembly, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the model's outputs for all rows of an evaluation job, client after client, and their labels."""
    engine, context = parts.engine, parts.fed.context
    own = engine.registry.tested if rows == "test" else engine.registry.validated
    clients: list[int] = list(own) or list(parts.fed.evaluation_clients)[:1]
    outputs, labels = [], []
    for client in clients:
        index = engine.own_rows(client, rows) if client >= 0 else engine.rows(client)
        view = SingleClientData(
            engine.columns,
            index,
            engine.context(client).modalities,
            parts.model,
            0,
            1,
            1,
            torch.zeros(0, dtype=torch.int64),
        )
        found = all_rows(view, lambda batch: context.objective.outputs(parts.model, parts.initial, batch))
        if found is not None:
            outputs.append(found[0].cpu())
            labels.append(found[1].y.cpu())
    return torch.cat(outputs), torch.cat(labels)


def write(found: Evaluation, folder: Path) -> Path:
    """Write evaluation.json, evaluation.csv and evaluation.html into a folder, and return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps(found.content, indent=1), encoding="utf-8")
    (folder / "evaluation.csv").write_text(found.csv(), encoding="utf-8")
    (folder / "evaluation.html").write_text(page(found.content, found.lines()), encoding="utf-8")
    return folder / "evaluation.html"
