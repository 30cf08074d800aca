"""`polyfed evaluate`: score a saved model where the rows are, and compare two models on the same rows."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal
from warnings import warn

import numpy as np
import torch
from torch import Tensor

from polyfed.algorithms.evaluate import SERVER, Evaluate
from polyfed.algorithms.hfm import Hfm
from polyfed.algorithms.hfm.silo_evaluation import EvaluateSilos
from polyfed.algorithms.hfm.silo_exchange import Vertical
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import DataError, NotAllowed, PolyfedWarning, RecipeError, command, did_you_mean
from polyfed.core.problems import Problems
from polyfed.core.scaling import Scaling
from polyfed.core.system.files import RECIPE, RESULT, read_notes, replace_text
from polyfed.data import Columns, Population, Shards, populate, stacked
from polyfed.data.column_fitting import Features, encoded, fits, read_tables
from polyfed.data.columns import TEST, TRAIN, VALIDATION, Column
from polyfed.data.population.population import with_fitted_columns
from polyfed.data.reading.array_files import Arrays
from polyfed.data.reading.draft import EMPTY
from polyfed.data.row_groups import group_codes, values_of
from polyfed.data.sources.own.npz import Npz
from polyfed.data.sources.own.table_files import Table, read, word_columns
from polyfed.evaluation.scores import Evaluation as EvaluationSpec
from polyfed.evaluation.site_scores import exact_outputs
from polyfed.evaluation.subsets import lacking, patterns_of
from polyfed.evaluation.two_models import Floats, delong, mcnemar, paired_bootstrap
from polyfed.experiment.recipes.defaults import scaled
from polyfed.experiment.recipes.recipe import Recipe, recipe_of
from polyfed.experiment.recipes.settings import StopSpec
from polyfed.experiment.recipes.task_choice import prepared
from polyfed.experiment.results.model_facts import COVERAGE, sets_of
from polyfed.experiment.results.run_result import load_models
from polyfed.experiment.results.saved_model import facts_of_data
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.loop import execute
from polyfed.experiment.running.run_state import BEST, load_content
from polyfed.experiment.running.warm_start import DESCRIPTION, values_in
from polyfed.model.stand_ins import is_prototype
from polyfed.objective import Classification, Objective, Ordinal, Regression
from polyfed.report.pages.evaluation import page
from polyfed.report.reading.run_folder import Folder
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
        result = []
        for site, one in {"pooled": self.content["pooled"], **self.content["sites"]}.items():
            parts = [("", one["rows"], one["metrics"])]
            for column, groups in one.get("groups", {}).items():
                for value, told in groups.items():
                    scores = {name: score for name, score in told.items() if name != "rows"}
                    parts.append((f"{column}={value}", told["rows"], scores))
            for group, rows, metrics in parts:
                for name, numbers in metrics.items():
                    about = {"site": site, "group": group, "rows": rows, "metric": name}
                    result.append(about | {key: numbers.get(key) for key in ("value", "low", "high", "error")})
        return result

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
    best: bool = False,
) -> Evaluation:
    """Score the global model of a run, of an exported folder or of a safetensors file, without training.

    Args:
        model: the run's folder, the exported folder, or the file.
        other: another model, which is compared with the first one on the same rows.
        recipe: says which clients have which rows. None takes the recipe of the run in `model`.
        data: a file in the form of the recipe's data: all its rows are scored, or those of its split 1.
        rows: whether clients are scored on their own test rows or on their own validation rows.
        groups: column -> values: scores of the rows with each value too; no values stand for all of the column.
        best: whether to score the model of a run's best round instead of its last one.

    Raises:
        PolyfedError: the model does not fit, or there are no rows to score.
    """
    job = job_of(model, recipe, rows, best=best)
    groups = with_values(groups or {}, job, data)
    job = job_of(model, recipe, rows, groups, best)
    population = population_for(job, data, trained_facts(model))
    job, population = with_lacks(job, population)
    finished = execute(job, None, Emitter([]), population=population)
    content = dict(finished.result["evaluation"])
    names = {str(k): name for k in range(population.num_clients) if (name := population.name_of(k)) is not None}
    names = names if len(set(names.values())) == len(names) else {}
    names = {k: f"{name} (client {k})" if name in BESIDE_SITES else name for k, name in names.items()}
    content["sites"] = {names.get(site, site): told for site, told in content["sites"].items()}
    if population.columns.class_names and content["pooled"]["support"]:
        content["classes"] = list(population.columns.class_names)
    content["model"] = {"path": str(model)} | round_of(model, best=best)
    if rows == "test" and not best:  # the sets are the last model's, and were calibrated on the validation rows
        content |= _sets(model, population)
    if other is not None:
        mine, theirs = (
            assemble(job_of(one, recipe or model, rows, groups, best), population=population) for one in (model, other)
        )
        content["comparison"] = comparison(mine, theirs, rows) | {"models": [str(model), str(other)]}
    return Evaluation(content)


BESIDE_SITES = ("all", "pooled", SERVER)
"""What stands in tables where the name of a client does."""


def _sets(model: str | Path, population: Population) -> dict[str, Any]:
    """Return the entry `sets`: how often the sets of the global model hold the truth of these rows, or why it has none.

    It is empty if the model has no counts for sets, and has `targets` too if it predicts numbers.
    """
    path = Path(model).expanduser()
    about = path / (DESCRIPTION if (path / DESCRIPTION).exists() else RESULT)
    if read_notes(about, lambda entry: entry).get("conformal") is None:
        return {}
    try:
        models = load_models(path)
    except NotAllowed as error:
        return {"sets": {"coverage": COVERAGE, "refused": str(error)}}
    if models.shared is None or not len(population.test_rows):
        return {}
    sets = sets_of(models, population)
    targets = {"targets": list(models.class_names or ())} if isinstance(models.task, Regression) else {}
    return {} if sets is None else {"sets": sets} | targets


def with_values(
    groups: Mapping[str, Sequence[str | int]], job: Recipe, data: str | Path | None
) -> dict[str, list[str | int]]:
    """Return the groups, in which a column without values has all of its values.

    Raises:
        RecipeError: a column has too many values.
    """
    result: dict[str, list[str | int]] = {}
    for name, values in groups.items():
        result[name] = list(values)
        if not values:
            source: Any = job.data
            result[name] = [*values_of(source if data is None else replace(source, path=str(data)), name)]
            if not 0 < len(result[name]) <= MOST_VALUES:
                raise RecipeError(
                    f"--group {name}: the column has {len(result[name])} different values. Name those to score, as in "
                    f"--group {name}=A,B"
                )
    return result


MOST_VALUES = 50
"""The largest number of values of a column of groups that are taken without being named."""


def round_of(model: str | Path, *, best: bool) -> dict[str, Any]:
    """Return the round of a run's model, the last one or the best, and its best round, if it chose one."""
    path = Path(model).expanduser()
    if not (path / RESULT).exists():
        return {}
    result = Folder(path).result
    chosen = result.get("best")
    known = {} if chosen is None else {"best_round": chosen["round"]}
    return {"round": known["best_round"] if best and known else result.get("rounds")} | known


MISSING = "missing"
"""The group by what a row lacks."""


def with_lacks(job: Recipe, population: Population) -> tuple[Recipe, Population]:
    """Return the job with the group `missing`, by what rows lack, and the codes of the rows, if some lack something."""
    method, columns = job.algorithm, population.columns
    shards = (population.test, population.own_validation)
    rows = torch.cat([*(one.rows for one in shards if one is not None), population.test_rows])
    names = tuple(columns.modalities)
    batch = Batch(
        {}, columns.label, torch.arange(len(columns)), present={m: p.cpu() for m, p in columns.present.items()}
    )
    codes = lacking(names, batch)
    there = torch.unique(codes[rows]).tolist()
    assert isinstance(method, Evaluate)
    if there in ([], [0]) or MISSING in method.groups:
        return job, population
    place = torch.full((len(patterns_of(names)),), len(there))
    place[torch.tensor(there)] = torch.arange(len(there))
    values: list[str | int] = [patterns_of(names)[code] for code in there]
    method = replace(method, groups={MISSING: values, **method.groups})
    columns = replace(columns, groups={MISSING: place[codes], **columns.groups})
    return replace(job, algorithm=method), replace(population, columns=columns)


def job_of(
    model: str | Path,
    recipe: Recipe | str | Path | None,
    rows: Rows = "test",
    groups: Mapping[str, Sequence[str | int]] | None = None,
    best: bool = False,
    against: str | Path | None = None,
    *,
    for_devices: bool = False,
) -> Recipe:
    """Return the recipe of an evaluation job; see `evaluate`.

    With `against`, the clients also count on how many rows which of two models is right, and send no answer of a row.
    With `for_devices`, those of a silo score their rows together.

    Raises:
        RecipeError: there is no recipe, the recipe is wrong, or devices of silos have no model to score.
    """
    path = Path(model).expanduser()
    base = recipe_of(_recipe_at(path, recipe))
    columns = {name: list(values) for name, values in (groups or {}).items()}
    second = "" if against is None else str(_chosen(Path(against).expanduser(), best=best))
    method = Evaluate(rows=rows, groups=columns, evaluation=EvaluationSpec(every=1), against=second)
    if for_devices and isinstance(base.algorithm, Vertical):
        method = _in_silos(base.algorithm, method)
    init = _chosen(path, best=best)
    absent: Any = "prototypes" if any(map(is_prototype, values_in(init))) else base.model.absent
    return replace(
        base,
        algorithm=method,
        model=replace(base.model, init=str(init), init_blocks=(), freeze=(), absent=absent),
        rounds=1,
        stop=StopSpec(),
        attack=None,
        privacy=None,
        network=None,
        tracking=None,
        name=f"evaluate-{base.name}",
    )


def _in_silos(trained: Vertical, job: Evaluate) -> EvaluateSilos:
    """Return the job in which the devices of a silo score their rows together.

    Raises:
        RecipeError: the method leaves no model that all silos share.
    """
    if not isinstance(trained, Hfm | EvaluateSilos):
        raise RecipeError(
            f"the silos of '{type(trained).__name__.lower()}' keep their models, so no job can send them one to score. "
            "Read the personal scores of the run, or predict in a silo: `polyfed predict MODEL edge.toml`"
        )
    options: Any = {one.name: getattr(job, one.name) for one in fields(Evaluate)}
    return EvaluateSilos(**options, overlap=trained.overlap, labels_at=trained.labels_at)


def _recipe_at(path: Path, recipe: Recipe | str | Path | None) -> Recipe | Path:
    """Return a given recipe, or where that of a model lies.

    Raises:
        RecipeError: there is none.
    """
    if isinstance(recipe, Recipe):
        return recipe
    folder = path if recipe is None else Path(recipe).expanduser()
    named = folder / RECIPE if folder.is_dir() else folder
    if not named.exists() or (recipe is None and not folder.is_dir()):
        raise RecipeError(
            f"{path} holds no recipe, so its clients and rows are not known. Give one: "
            f"{command('evaluate', path, '--recipe', 'RECIPE.toml')}"
        )
    return named


def _chosen(path: Path, *, best: bool) -> Path:
    """Return the path of the last or of the best model of a run."""
    return path / "checkpoint" / BEST if best else path


@dataclass(frozen=True)
class TrainedFacts:
    """How the data of a model's training became its input.

    Attributes:
        scaling: the shift and scale of each modality. None for a safetensors file, and if devices scaled their rows.
        names: the names of the classes, or None.
        features: the columns of each modality with rules in [data.columns].
        shapes: the shape of a sample of each modality; empty for a safetensors file.
    """

    scaling: dict[str, Scaling] | None = None
    names: tuple[str, ...] | None = None
    features: Mapping[str, Features] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


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
    features = read_tables(facts.get("columns"), shapes)
    known = {name: tuple(shape) for name, shape in shapes.items()}
    return TrainedFacts(read, None if names is None else tuple(names), features, known)


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
        # nothing is drawn, so persons may be unknown
        own = {"test_share": 0.0, "empty_rows": "leave-out", "person": ""}
        source = replace(source, path=str(data), **{name: v for name, v in own.items() if hasattr(source, name)})
        source = source.for_other_rows() if isinstance(source, Table) else source
    wanted = source
    absent: tuple[str, ...] = ()
    if data is not None:
        source, absent = without_absent(source, trained.shapes)
    columns = prepared(job, stacked(source.load(), job.stack))
    if data is not None:
        refuse_other_shapes(columns, source, trained.shapes)
    if trained.features or data is not None:
        columns = _encoded(columns, trained.features)
    columns = _renumbered(_scaled(columns, scaling), names)
    columns = (
        with_absent(columns, tuple(wanted.modalities), {m: trained.shapes[m] for m in absent}) if absent else columns
    )
    columns = replace(columns, groups=codes_of(source, job, len(columns)))
    if data is None:
        seed = job.seed if job.clients.seed is None else job.clients.seed
        population = with_fitted_columns(populate(columns, job.clients, keys.key(seed, "population")))
        rows = torch.unique(population.train.rows)
        population = population if scaling else replace(population, columns=scaled(job, population.columns, rows))
        method: Any = job.algorithm
        shards = population.test if method.rows == "test" else population.own_validation
        pooled = population.test_rows if method.rows == "test" else population.validation_rows
        if shards is None and natural_clients_of(population.columns, pooled):
            return by_natural_client(population.columns, pooled, method.rows)
        return population
    if scaling is None:
        warn(UNSCALED, PolyfedWarning, stacklevel=3)
    if told := [note for note in columns.notes if EMPTY in note]:
        warn(f"{data}: {'; '.join(told)}", PolyfedWarning, stacklevel=3)
    marked = columns.rows(TEST)
    return by_natural_client(columns, marked if len(marked) else columns.rows(TRAIN, VALIDATION), "test")


def by_natural_client(columns: Columns, rows: Tensor, held_out: Rows) -> Population:
    """Return a population that only evaluates: a client for each natural client of these rows, if there are several.

    Args:
        columns: the table.
        rows: positions of the rows to score, ascending.
        held_out: whether they are test or validation rows.
    """
    sites = natural_clients_of(columns, rows)
    test = held_out == "test"
    return Population(
        columns=columns,
        train=Shards.of([rows[:0].numpy()] * max(len(sites), 1)),
        test=Shards.of([rows[codes].numpy() for codes in sites.values()]) if sites and test else None,
        holds=torch.ones(max(len(sites), 1), len(columns.modalities), dtype=torch.bool),
        silo=None,
        test_rows=rows if test else rows[:0],
        validation_rows=rows[:0] if test else rows,
        own_validation=None if test or not sites else Shards.of([rows[codes].numpy() for codes in sites.values()]),
    )


def natural_clients_of(columns: Columns, rows: Tensor) -> dict[str, Tensor]:
    """Return the name of each natural client of these rows, and its places among them; empty without several."""
    if columns.client is None:
        return {}
    numbers = columns.client.cpu()[rows]
    result = torch.unique(numbers).tolist()
    return {columns.name_of_client(k): (numbers == k).nonzero()[:, 0] for k in result} if len(result) > 1 else {}


def without_absent(source: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, tuple[str, ...]]:
    """Return the source without the modalities that its file lacks altogether, and the names of these.

    Args:
        source: a table or an .npz file.
        shapes: the modalities of the model, with the shape of a sample.
    """
    given = getattr(source, "modalities", ())
    if not isinstance(source, Table | Npz) or not given:
        return source, ()
    groups = given if isinstance(given, Mapping) else {name: name for name in given}
    words = {m: [group] if isinstance(group, str) else list(group) for m, group in groups.items()}
    held = held_columns(source)
    absent = tuple(m for m in words if m in shapes and not any(fnmatchcase(c, w) for c in held for w in words[m]))
    if not absent or len(absent) == len(words):
        return source, ()
    kept = {m: group for m, group in groups.items() if m not in absent}
    lost = [word for m in absent for word in words[m]]
    options: dict[str, Any] = {"modalities": kept if isinstance(given, Mapping) else tuple(kept)}
    options["columns"] = {c: r for c, r in source.columns.items() if not any(fnmatchcase(c, w) for w in lost)}
    for name in ("shapes", "layout"):
        if hasattr(source, name):
            options[name] = {m: value for m, value in getattr(source, name).items() if m not in absent}
    if isinstance(source.standardise, tuple | list):
        options["standardise"] = tuple(m for m in source.standardise if m not in absent)
    return replace(source, **options), absent


def held_columns(source: Table | Npz) -> list[str]:
    """Return the columns or arrays of a file that hold a value in some row."""
    if isinstance(source, Table):
        problems = Problems()
        rules = dict.fromkeys(word_columns(source.columns), False)
        frame = read(Path(source.path).expanduser(), problems, lambda _: rules, source.dialect)
        return [str(name) for name in frame.columns if bool(frame[name].notna().any())]
    arrays = Arrays(source.path)
    marks = {name: bool(np.asarray(arrays[name]).any()) for name in arrays.names if name.endswith("_present")}
    return [name for name in arrays.names if marks.get(f"{name}_present", True)]


def with_absent(columns: Columns, order: Sequence[str], absent: Mapping[str, tuple[int, ...]]) -> Columns:
    """Return the table with further modalities that no row has.

    Args:
        columns: the table.
        order: all modalities, in the order of the model.
        absent: the modalities that the table lacks, with the shape of a sample.
    """
    nowhere = torch.zeros(len(columns), dtype=torch.bool)
    blank = {m: Column(torch.zeros(1, *shape), index=nowhere.long()) for m, shape in absent.items()}
    made = {**columns.modalities, **blank}
    return replace(
        columns,
        modalities={m: made[m] for m in order},
        present={**columns.present, **dict.fromkeys(absent, nowhere)},
    )


def refuse_other_shapes(columns: Columns, source: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a file whose samples have other shapes than those that the model was trained on.

    Raises:
        DataError: for each such modality, the columns that are missing, as far as their numbers tell them.
    """
    problems = Problems()
    for name, column in columns.modalities.items():
        if column.coded is not None or (wanted := shapes.get(name, column.shape)) == column.shape:
            continue
        text = f"'{source.path}': '{name}' has samples of shape {column.shape}, and the model reads {tuple(wanted)}"
        given = source.modalities[name] if isinstance(source.modalities, Mapping) else name
        if isinstance(source, Table) and isinstance(given, str) and given.endswith("*") and len(wanted) == 1:
            held = set(held_columns(source))
            numbered = [f"{given[:-1]}{number}" for number in range(wanted[0])]
            if lacking_ := [word for word in numbered if word not in held]:
                text += f": the file has no column '{', '.join(lacking_[:5])}'"
        problems.add(DataError(f"{text}. Give it the columns that the model was trained on"))
    problems.raise_all()


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
    (one, y, clients, sites), (two, *_) = (outputs_of(parts, rows) for parts in (first, second))
    codes = clients.numpy() if 1 < len(torch.unique(clients)) < len(clients) else None
    result: dict[str, Any] = {"rows": len(y), "bootstrap": {}}
    result |= {} if codes is None else {"clients": len(np.unique(codes))}
    metrics = {
        name: partial(_pair, objective, one, two, y, name)
        for name in objective.measured(objective.sums(one, _batch(y)))
    }
    if objective.WHOLE:  # a row drawn twice would be a rival of itself
        first_rows, second_rows = (_rows_of_sites(objective, outputs, y, sites) for outputs in (one, two))
        metrics = {name: partial(_ratios, first_rows[name], second_rows[name]) for name in first_rows}
    for name, metric in metrics.items():
        pair = paired_bootstrap(len(y), metric, clients=codes)
        if pair is not None:
            result["bootstrap"][name] = dataclasses.asdict(pair)
    if isinstance(objective, Classification | Ordinal):
        right = [(objective.decided(outputs) == y).numpy() for outputs in (one, two)]
        result["mcnemar"] = dataclasses.asdict(mcnemar(right[0], right[1], codes))
    names_of = first.population.columns.class_names
    tests = {}
    for label, (positive, mine, theirs, some) in _binary(objective, one, two, y, names_of).items():
        tests[label] = delong(positive, mine, theirs, None if codes is None else codes[some])
    known = {label: dataclasses.asdict(test) for label, test in tests.items() if test is not None}
    return result | ({"delong": known} if known else {})


def _batch(y: Tensor) -> Batch:
    return Batch({}, y, torch.arange(len(y)))


def _pair(
    objective: Objective, one: Tensor, two: Tensor, y: Tensor, name: str, drawn: Any
) -> tuple[float, float] | None:
    rows = torch.from_numpy(drawn)
    result = [objective.measured(objective.sums(outputs[rows], _batch(y[rows]))).get(name) for outputs in (one, two)]
    return None if None in result else (result[0], result[1])  # type: ignore[return-value]


def _rows_of_sites(objective: Objective, outputs: Tensor, y: Tensor, sites: Tensor) -> dict[str, Tensor]:
    """Return the objective's `row_metrics`, (n, 2, T), in which a row is compared with the rows of its own site."""
    result: dict[str, Tensor] = {}
    for site in torch.unique(sites):
        here = (sites == site).nonzero()[:, 0]
        for name, parts in objective.row_metrics(outputs[here], _batch(y[here])).items():
            result.setdefault(name, torch.zeros(len(y), *parts.shape[1:], dtype=torch.float64))[here] = parts
    return result


def _ratios(mine: Tensor, theirs: Tensor, drawn: Any) -> tuple[float, float] | None:
    """Return the mean over targets of the ratio of two sums over some rows, for both models."""
    sums = [parts[torch.from_numpy(drawn)].sum(0) for parts in (mine, theirs)]
    if not bool((sums[0][1] > 0).all()):
        return None
    return float((sums[0][0] / sums[0][1]).mean()), float((sums[1][0] / sums[1][1]).mean())


def _binary(
    objective: Objective, one: Tensor, two: Tensor, y: Tensor, names: Sequence[str] | None
) -> dict[str, tuple[Any, Floats, Floats, Any]]:
    """Return, for each class, label or question, which rows are positive, the scores of both models, and the rows."""
    mine, theirs = objective.ranked_rows(one, _batch(y)), objective.ranked_rows(two, _batch(y))
    result: dict[str, tuple[Any, Floats, Floats, Any]] = {}
    if mine is None or theirs is None:
        return result
    first, positive, negative = mine
    for place in range(positive.shape[1]):
        known = (positive | negative)[:, place]
        scores = (side[known, place].double().numpy() for side in (first, theirs[0]))
        label = objective.ranked_name(place, positive.shape[1], names)
        result[label] = (positive[known, place].numpy(), *scores, known.numpy())  # type: ignore[assignment]
    return result


def outputs_of(parts: Assembly, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the model's outputs for all rows of an evaluation job, site after site, their labels, clients and sites.

    Their clients are the natural clients of the table, or else the sites: the clients of the population.
    """
    engine, context = parts.engine, parts.fed.context
    own = engine.registry.tested if rows == "test" else engine.registry.validated
    clients: list[int] = list(own) or list(parts.fed.evaluation_clients)[:1]
    outputs, labels, codes, sites = [], [], [], []
    natural = parts.population.columns.client
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
        found = exact_outputs(parts.model, context.objective, parts.initial, view)
        if found is not None:
            outputs.append(found[0])
            labels.append(found[1])
            sites.append(torch.full((len(index),), max(client, 0)))
            codes.append(sites[-1] if natural is None else natural.cpu()[index.cpu()])
    numbers = torch.unique(torch.cat(codes), return_inverse=True)[1]
    return torch.cat(outputs), torch.cat(labels), numbers, torch.cat(sites)


def write(found: Evaluation, folder: Path) -> Path:
    """Write evaluation.json, evaluation.csv and evaluation.html into a folder, and return the path of the page.

    Raises:
        RecipeError: the folder holds the evaluation of another model.
        CheckpointError: the evaluation in the folder is damaged.
    """
    path = folder / "evaluation.json"
    if path.exists():
        model = read_notes(path, lambda entry: entry).get("model")
        earlier = model.get("path") if isinstance(model, dict) else None
        if earlier != found.content["model"]["path"]:
            raise RecipeError(
                f"{folder} holds the evaluation of {earlier or 'another model'}. Give another folder, or delete it"
            )
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "evaluation.csv", found.csv())
    replace_text(folder / "evaluation.html", page(found.content, found.lines()))
    replace_text(path, json.dumps(found.content, indent=1))
    return folder / "evaluation.html"
