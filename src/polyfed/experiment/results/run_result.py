"""The finished run: what `polyfed.run` returns, and what `polyfed.load_run` reads from a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch
from torch import Tensor

from polyfed.algorithms import NAMED
from polyfed.core import keys
from polyfed.core.errors import CheckpointError, PolyfedWarning, RecipeError
from polyfed.core.registry import name_of
from polyfed.core.request import Request, Send
from polyfed.core.scaling import Scaling
from polyfed.core.system.files import RECIPE, RESULT
from polyfed.core.tree import SHARED, Tree, select
from polyfed.data.column_fitting import Features, read_tables
from polyfed.data.reading.given import Partial
from polyfed.data.sources.own.new_rows import RowForm
from polyfed.engines.base import first_local
from polyfed.evaluation.conformal import PredictionSets
from polyfed.experiment.recipes.recipe import Recipe, load_recipe
from polyfed.experiment.recipes.task_choice import task_of
from polyfed.experiment.results.display import clients_frame, metrics_frame, run_html
from polyfed.experiment.results.models import ClientModalities, Models, Personal, read_conformal
from polyfed.experiment.results.records import Records
from polyfed.experiment.results.saved_model import load_model, save
from polyfed.experiment.running.assembly import model_of
from polyfed.experiment.running.checkpoint import RESTORE
from polyfed.experiment.running.constants import constant_facts, refuse_changes
from polyfed.experiment.running.run_state import kept_best, load_content
from polyfed.experiment.running.warm_start import DESCRIPTION, given_of, warmed
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Answer
from polyfed.model import Model
from polyfed.privacy.egress.policy import Policy

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        result: the content of result.json.
        rounds: the rows of rounds.jsonl.
        state: the final server state.
        model: the model, as functions of a Tree of parameters.
        folder: the folder of the run's files, or None if it wrote none.
        models: the trained models; `params`, `personal`, `predict` and `export` use them.
        facts: the content of run.json, with at most 1000 clients.
        best: the models of the best round (`[stop] metric`), or None without validation rows.
    """

    result: dict[str, Any]
    rounds: list[dict[str, Any]]
    state: Any
    model: Model
    folder: Path | None
    models: Models = field(repr=False)
    best: Models | None = field(default=None, repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        """A short text, without the many numbers of `state` and `model`."""
        evaluated = self.result["metrics"].get("global", self.result["metrics"].get("personal", {}))
        main = self.models.task.SCORE
        headline = {main: main, "mean": f"mean personal {main}"}
        score = next((f", {words} {evaluated[name]:.4f}" for name, words in headline.items() if name in evaluated), "")
        where = "" if self.folder is None else f", files in {self.folder}"
        return f"Run({self.result['algorithm']} on {self.result['dataset']}, {len(self.rounds)} rounds{score}{where})"

    def _repr_html_(self) -> str:
        return run_html(self.result, repr(self))

    @property
    def history(self) -> "pd.DataFrame":
        """One row per round. Nested values have dotted names, such as `metrics.global.accuracy`."""
        import pandas as pd  # here: it takes half a second, and a client may start a process per request

        return pd.json_normalize(self.rounds)

    @property
    def metrics(self) -> "pd.DataFrame":
        """One row per metric and evaluated round, for plots: `round`, `group`, `metric`, `value`."""
        return metrics_frame(self.rounds)

    @property
    def clients(self) -> "pd.DataFrame":
        """One row per client: what it holds, and how it took part.

        `rows`, `modalities` and `labels` (training rows of each class) are what it holds. `asked` and `missing` count
        rounds, and `personal_score` is its last one.
        """
        return clients_frame(self.rounds, self.facts.get("clients", ()))

    @property
    def params(self) -> Tree:
        """The parameters of the trained global model.

        Raises:
            RecipeError: the algorithm trains one model per client instead.
        """
        return self.models.params

    @property
    def personal(self) -> Personal:
        """The clients' own models, client -> Tree, each assembled on access; empty if the algorithm trains none.

        Raises:
            RecipeError: the clients ran in other processes or on devices, which keep their models.
        """
        return self.models.personal

    @property
    def scaling(self) -> Mapping[str, Scaling] | None:
        """Modality -> `shift` and `scale` of the input, which `predict` and the exported models apply.

        For a modality that polyfed standardised, `shift` and `scale` are the means and standard deviations of the
        training rows. None means that the scaling is unknown; see `Models.scaling`.
        """
        return self.models.scaling

    def predict(self, x: Any, client: int | str | None = None, *, present: Mapping[str, Any] | None = None) -> Tensor:
        """Compute predictions with the model that the run evaluated, so that they agree with the run's metrics.

        For classification, they are logits (n, C); docs/evaluation.md#choose-a-task describes the other tasks.
        `models.task.decided` turns them into decisions, such as classes.

        Args:
            x: modality -> samples (n, ...) before polyfed shifts and scales them, in the unit of your file or arrays.
                `predict` applies `scaling`. A modality that is left out counts as a zero feature, as for a client that
                lacks it. A row of NaN also counts as a zero feature. Or a data frame with the run's columns.
            client: predict with the model of this client: its own model if the algorithm trains one per client,
                otherwise the global model as this client uses it. Modalities that the client lacks are ignored. None
                selects the global model.
            present: modality -> which rows have it, bool (n,). Give this for each modality that some rows lack.

        Raises:
            RecipeError: there is no global model or no such client, or `x` does not fit the model.
        """
        logits = self.models.predict(x, client, present=present)
        if self.models.own and client is not None and self.models.number_of(client) not in self._participants:
            warn(
                f"client {client} was asked in none of the {len(self.rounds)} rounds: its own model is "
                "still the initial one",
                PolyfedWarning,
                stacklevel=2,
            )
        return logits

    def predict_set(
        self,
        x: Any,
        coverage: float = 0.9,
        client: int | str | None = None,
        *,
        present: Mapping[str, Any] | None = None,
    ) -> PredictionSets:
        """Return sets of classes, or intervals, that hold the truth with probability `coverage`; see docs/missing.md.

        The recipe needs `[evaluate] conformal`. The other arguments are those of `predict`.

        Raises:
            RecipeError: the run counted no scores, there are too few validation rows for this coverage, or `x` does
                not fit the model.
        """
        return self.models.predict_set(x, coverage, client, present=present)

    def predict_frame(
        self,
        x: Any,
        client: int | str | None = None,
        *,
        coverage: float | None = None,
        present: Mapping[str, Any] | None = None,
        partial: Partial | None = None,
        ids: Sequence[str] = (),
    ) -> "pd.DataFrame":
        """Return the answer for each row by name, as a data frame; see `Models.predict_frame`."""
        return self.models.predict_frame(x, client, coverage=coverage, present=present, partial=partial, ids=ids)

    def used(
        self, x: Any, client: int | str | None = None, *, present: Mapping[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Return which modalities `predict` uses for these samples: modality -> bool (n,), for each one that it reads.

        The arguments and errors are those of `predict`.
        """
        return self.models.used(x, client, present=present)

    def export(self, folder: str | Path, *, onnx: bool = False, best: bool = False) -> Path:
        """Write the global model and the clients' own models to a new folder, for `polyfed.load_model`.

        Args:
            best: whether to write the models of the best round instead of the last one.
            onnx: whether to write each model as an ONNX file as well. ONNX files need the extra `onnx`.

        Returns:
            The folder's absolute path.

        Raises:
            RecipeError: the folder is not empty, the clients keep their models elsewhere, or an encoder has options
                that JSON cannot hold.
            ModelError: a model cannot be written as ONNX.
            DataError: the folder cannot be written.
        """
        if best and self.best is None:
            raise RecipeError("the run has no best round, because it measured nothing on validation rows: best=False")
        return save(self.best if best and self.best is not None else self.models, folder, onnx=onnx)

    @cached_property
    def _participants(self) -> set[int]:
        """The clients that were in the cohort of any round."""
        return {client for row in self.rounds for client in row.get("cohort", ())}


def with_names(models: Models, facts: Mapping[str, Any]) -> Models:
    """Return the models with the names of the clients in run.json."""
    names = {int(one["id"]): str(one["name"]) for one in facts.get("clients", ()) if "name" in one}
    return replace(models, client_names=names)


def models_of(
    recipe: Recipe,
    fed: Federation,
    state: Any,
    locals: Mapping[int, Tree] | None,
    class_names: tuple[str, ...] | None = None,
    scaling: Mapping[str, Scaling] | None = None,
    conformal: Mapping[str, Any] | None = None,
    features: Mapping[str, Features] | None = None,
    rows: RowForm | None = None,
) -> Models:
    """Collect the trained models of a run. Arguments that are not listed are those of `Models`.

    Args:
        recipe: the recipe of the run.
        fed: the federation, for facts about the clients; the models keep no reference to its engine or data.
        locals: the local state of each client that was asked; None if the clients ran elsewhere.
        conformal: the entry `conformal` of result.json, for `predict_set`.
    """
    algorithm, registry, context = recipe.algorithm, fed.clients, fed.context
    name, owner = name_of(algorithm, NAMED), algorithm.own_models
    facts = replace(fed, engine=_NoClients(), clock=None, emit=lambda *_, **__: None)
    device = next(iter(context.initial.values())).device
    kept = locals if owner == "clients" and locals is not None else {}

    def local(client: int) -> Tree:
        if owner != "clients":
            return {}
        if client in kept:
            return kept[client]
        owned = registry.owned(client)
        here = replace(
            context, modalities=owned, initial=select(context.initial, (*owned, SHARED)), evaluation_client=False
        )
        return first_local(algorithm, here, fed.seed, client, device)

    def tree_of(client: int) -> Tree:
        own = algorithm.client_model(client, state, facts, local)
        return {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in own.items()}

    return Models(
        algorithm=name,
        spec=algorithm.model_spec(recipe.model, registry.modalities, context.policy)[0],
        model=context.model,
        task=context.objective,
        predictor=algorithm.predictor,
        shared=algorithm.global_params(state),
        clients=ClientModalities(registry, partial(algorithm.client_modalities, fed=facts)),
        tree_of=tree_of,
        own=owner != "none",
        model_for=algorithm.model_for,
        class_names=class_names,
        elsewhere=_elsewhere(name, algorithm.model_for) if owner == "clients" and locals is None else "",
        scaling=scaling,
        features=features or {},
        rows=rows or RowForm(),
        conformal=read_conformal(conformal, context.model, context.objective),
    )


def _elsewhere(name: str, model_for: str) -> str:
    """Return why the server has no copy of the clients' own models."""
    return (
        f"{name} trains one model per {model_for}, and the clients keep these models: they run in "
        "processes of their own or on devices, and the server has no copy"
    )


class _NoClients:
    """An engine without clients, for a run that has ended."""

    name = "no-clients"

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        """Raise a RecipeError. A finished run is loaded without clients, so nobody can answer the request."""
        raise RecipeError(
            f"{request.name} was asked after the run: client_model and global_params must not ask clients"
        )


def load_models(folder: Path) -> Models:
    """Load the models of a run or of an exported folder; see `load_run` and `load_model`."""
    return load_model(folder) if (folder / DESCRIPTION).exists() else load_run(folder).models


def load_run(folder: str | Path) -> Run:
    """Load a finished run, with its models, from the folder that `polyfed run --out` wrote. Its data set is not needed.

    If the folder's recipe.toml names user-defined classes, this function imports them, which runs their code. Load only
    runs that you trust.

    Args:
        folder: the folder of the run.

    Raises:
        RecipeError: the folder holds no finished run, or its recipe names a class that cannot be imported.
        DataError: the frozen parameters or the constant buffers of the model differ from those of the run.
        CheckpointError: the files are damaged, or were written by a version of polyfed that kept no models.
    """
    folder = Path(folder).expanduser()
    if not (folder / RESULT).exists() or not (folder / RECIPE).exists():
        raise RecipeError(
            f"{folder} holds no finished run. Finish it with --resume (in Python: resume=True), or give the "
            "folder of another run"
        )
    records, recipe = Records(folder, resume=True), load_recipe(folder / RECIPE)
    found = load_content(records.checkpoints, recipe.algorithm)
    if found is None or "federation" not in found[1]:
        raise CheckpointError(
            f"{records.checkpoints} holds no models that can be loaded. Run it again with this version of polyfed"
        )
    content, facts = found[1], found[1]["federation"]
    shapes = {name: tuple(shape) for name, shape in facts["shapes"].items()}
    policy = Policy.parse(recipe.egress, shapes, guards=recipe.egress)
    given = given_of(recipe, folder)
    model = model_of(recipe, shapes, facts["classes"], policy, given)
    refuse_changes(records.facts(), constant_facts(model), folder, "cannot load")
    fed = _facts_of(recipe, model, facts, policy, given)
    elsewhere = recipe.engine.apart
    if (scaling := facts["scaling"]) is not None:
        scaling = {name: Scaling.read(value, shapes[name]) for name, value in scaling.items()}

    features, rows = read_tables(facts.get("columns"), shapes), RowForm.read(facts.get("rows"))
    result = records.result()

    def models(kept: Mapping[str, Any], conformal: Mapping[str, Any] | None = None) -> Models:
        own = None if elsewhere else kept["locals"]
        made = models_of(recipe, fed, kept["state"], own, facts["class_names"], scaling, conformal, features, rows)
        return with_names(made, records.facts())

    best = kept_best(records.checkpoints, content.get("best"), recipe.algorithm)
    try:
        last = result, records.rounds(), content["state"], model, folder, models(content, result.get("conformal"))
    except ValueError as error:
        raise CheckpointError(f"{folder / RESULT}: {error}. {RESTORE}") from error
    return Run(*last, None if best is None else models(best), records.facts())


def _facts_of(recipe: Recipe, model: Model, facts: Mapping[str, Any], policy: Policy, given: Tree) -> Federation:
    """Return the federation of a run that has ended: facts about its clients and its model, and nobody to ask."""
    shapes, initial = model.shapes, warmed(model.init(keys.key(recipe.seed, "init")), model, given, recipe)
    context = ClientContext(
        model,
        tuple(shapes),
        facts["classes"],
        initial,
        evaluation_client=True,
        policy=policy,
        objective=task_of(recipe),
    )
    return Federation(
        clients=ClientRegistry(tuple(shapes), facts["num_rows"], facts["holds"], facts["silo"]),
        engine=_NoClients(),
        owner=recipe.algorithm,
        context=context,
        template=initial,
        seed=recipe.seed,
        rounds=recipe.rounds,
    )
