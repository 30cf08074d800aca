"""What a run gives back, at its end or later from its folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch
from torch import Tensor

from polyfed.algorithms import ALGORITHMS
from polyfed.core import keys
from polyfed.core.errors import CheckpointError, PolyfedWarning, RecipeError
from polyfed.core.files import RECIPE, RESULT
from polyfed.core.registry import name_of
from polyfed.core.request import Request, Send
from polyfed.core.tree import SHARED, Tree, select
from polyfed.engines.base import first_local
from polyfed.experiment.assembly import model_of
from polyfed.experiment.models import Models, Personal
from polyfed.experiment.recipe import Recipe, load_recipe
from polyfed.experiment.records import Records
from polyfed.experiment.run_checkpoint import load_content
from polyfed.experiment.saved_model import save
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Answer
from polyfed.model import Model
from polyfed.privacy.policy import Policy

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        result: what result.json holds.
        rounds: what rounds.jsonl holds.
        state: the final server state.
        model: the model, as functions of a Tree.
        folder: where the files are, or None.
        models: the trained models; `params`, `personal`, `predict` and `export` are about them.
    """

    result: dict[str, Any]
    rounds: list[dict[str, Any]]
    state: Any
    model: Model
    folder: Path | None
    models: Models = field(repr=False)

    def __repr__(self) -> str:
        """In short: `state` and `model` hold a model's worth of numbers."""
        evaluated = self.result["metrics"].get("global", self.result["metrics"].get("personal", {}))
        score = next((f", {name} {evaluated[name]:.4f}" for name in ("accuracy", "mean") if name in evaluated), "")
        where = "" if self.folder is None else f", files in {self.folder}"
        return f"Run({self.result['algorithm']} on {self.result['dataset']}, {len(self.rounds)} rounds{score}{where})"

    @property
    def history(self) -> "pd.DataFrame":
        """One row a round; nested values under dotted names, as `metrics.global.accuracy`."""
        import pandas as pd  # half a second that a client which starts for every ask need not wait

        return pd.json_normalize(self.rounds)

    @property
    def params(self) -> Tree:
        """The trained global model.

        Raises:
            RecipeError: the method trains one model a client instead.
        """
        return self.models.params

    @property
    def personal(self) -> Personal:
        """The clients' own models, client -> Tree, each put together when it is looked up; empty where they have none.

        Raises:
            RecipeError: the clients ran elsewhere, and their models are there.
        """
        return self.models.personal

    def predict(
        self, x: Mapping[str, Any], client: int | None = None, *, present: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Logits (n, C); see `Models.predict`. By what the run's `evaluate` judges: its metrics are those of this call.

        Args:
            x: modality -> samples (n, ...), as the data set gives them (standardised as it was); one that is left out
                is a zero feature, as in a client that lacks it.
            client: predict with the model of this client: its own where the method trains such, otherwise the global
                model as this client uses it. Modalities that the client lacks are ignored. None: the global model.
            present: modality -> bool (n,), for one that some of these rows lack.

        Raises:
            RecipeError: there is no global model, no such client, or `x` does not fit the model.
        """
        logits = self.models.predict(x, client, present=present)
        if self.models.own and client is not None and client not in self._asked:
            warn(
                f"client {client} was asked in none of the {len(self.rounds)} rounds: its own model is the one that it "
                "started from",
                PolyfedWarning,
                stacklevel=2,
            )
        return logits

    def export(self, folder: str | Path) -> Path:
        """Write the global model and the clients' own to a new folder, which `polyfed.load_model` reads.

        Returns:
            The folder's absolute path.

        Raises:
            RecipeError: the folder holds something; the models are with the clients, elsewhere; or they have parts that
                cannot be written down.
            DataError: the folder cannot be written.
        """
        return save(self.models, folder)

    @cached_property
    def _asked(self) -> set[int]:
        """The clients that were asked something in some round."""
        return {client for row in self.rounds for client in row.get("cohort", ())}


def best_round(rounds: Sequence[dict[str, Any]], metric: str = "macro_f1") -> dict[str, Any] | None:
    """The round with the best validation macro-F1 (the first of equals) and its metrics; None without validation."""
    evaluated = [row for row in rounds if row.get("metrics", {}).get("validation", {}).get(metric) is not None]
    if not evaluated:
        return None
    best = max(evaluated, key=lambda row: row["metrics"]["validation"][metric])
    return {"round": best["round"], "metrics": best["metrics"]}


def models_of(
    recipe: Recipe,
    fed: Federation,
    state: Any,
    locals: Mapping[int, Tree] | None,
    class_names: tuple[str, ...] | None = None,
) -> Models:
    """The models that a run has trained.

    Args:
        recipe: of the run.
        fed: facts about the clients; what it holds of the engine and of its data is left behind.
        state: the server's state.
        locals: what each client keeps, for those that have been asked; None: the clients ran elsewhere.
        class_names: of each class, where the data names them.
    """
    algorithm, registry, context = recipe.algorithm, fed.clients, fed.context
    name, owner = name_of(algorithm, ALGORITHMS), algorithm.own_models
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

    elsewhere = ""
    if owner == "clients" and locals is None:
        elsewhere = (
            f"{name} trains one model a {algorithm.model_for}, and these are with the clients: the clients of engine "
            "'flower' run in processes of their own or on devices, which keep their models, and the server keeps none"
        )
    return Models(
        algorithm=name,
        spec=algorithm.model_spec(recipe.model, registry.modalities, context.policy)[0],
        model=context.model,
        predictor=algorithm.predictor,
        shared=algorithm.global_params(state),
        clients={client: algorithm.client_modalities(client, facts) for client in registry if registry.owned(client)},
        tree_of=tree_of,
        own=owner != "none",
        model_for=algorithm.model_for,
        class_names=class_names,
        elsewhere=elsewhere,
    )


class _NoClients:
    """The engine of a run that is over."""

    name = "nobody"

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        """Refuse: no client is there any more."""
        raise RecipeError(
            f"{request.name} was asked after the run: to_judge and client_model must do without asking clients"
        )


def load_run(folder: str | Path) -> Run:
    """A finished run from the folder that `polyfed run --out` wrote, with its models; its data need not be there.

    Raises:
        RecipeError: the folder holds no finished run, or its recipe names a class that cannot be imported.
        CheckpointError: its files are damaged, or were written before runs could be loaded.
    """
    folder = Path(folder).expanduser()
    if not (folder / RESULT).exists() or not (folder / RECIPE).exists():
        raise RecipeError(f"{folder} holds no finished run. Finish it by --resume, or give the folder of another one")
    records, recipe = Records(folder, resume=True), load_recipe(folder / RECIPE)
    found = load_content(records.checkpoints, recipe.algorithm)
    if found is None or "federation" not in found[1]:
        raise CheckpointError(f"{records.checkpoints} holds no models that can be loaded; an older polyfed wrote it")
    content, facts = found[1], found[1]["federation"]
    shapes = {name: tuple(shape) for name, shape in facts["shapes"].items()}
    policy = Policy.parse(recipe.egress, shapes)
    model = model_of(recipe, shapes, facts["classes"], policy)
    initial = model.init(keys.key(recipe.seed, "init"))
    context = ClientContext(model, tuple(shapes), facts["classes"], initial, evaluation_client=True, policy=policy)
    fed = Federation(
        clients=ClientRegistry(tuple(shapes), facts["num_rows"], facts["holds"], facts["silo"]),
        engine=_NoClients(),
        owner=recipe.algorithm,
        context=context,
        template=initial,
        seed=recipe.seed,
        rounds=recipe.rounds,
    )
    locals = None if recipe.engine.name == "flower" else content["locals"]
    models = models_of(recipe, fed, content["state"], locals, facts["class_names"])
    return Run(records.result(), records.rounds(), content["state"], model, folder, models)
