"""Assemble the parts of a run from a recipe: clients with their data, model, policy, engine, federation."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polyfed.algorithms.base import Algorithm, ServerState
from polyfed.core import keys
from polyfed.core.errors import RecipeError, counted
from polyfed.core.problems import Problems
from polyfed.core.system.mapping import on_disk
from polyfed.core.tree import SHARED, Tree, blocks, clone, digest, select, size_bytes, under
from polyfed.data import Columns, Population, populate, stacked
from polyfed.data.column_fitting import features_of
from polyfed.data.population.population import with_fitted_columns
from polyfed.data.row_groups import group_codes
from polyfed.engines.base import Engine, asks_own
from polyfed.engines.edges import EdgeRemote
from polyfed.experiment.checks.client_checks import refuse_clients
from polyfed.experiment.checks.protection import guarantee_of
from polyfed.experiment.checks.rank_checks import client_ranks, rank_facts
from polyfed.experiment.checks.sum_checks import refuse_few_replies, refuse_small_cohorts
from polyfed.experiment.recipes.conflicts import refuse_conflicts
from polyfed.experiment.recipes.cross_checks import check_model, refuse_idle_batches
from polyfed.experiment.recipes.defaults import guesses_of, scaled, with_encoders
from polyfed.experiment.recipes.engine_choice import device_of, engine_of
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.task_choice import prepared, refuse_unfit, task_facts, task_of, with_task
from polyfed.experiment.results.label_counts import dealt_classes, label_counts, rows_without, tests_without
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.column_statistics import book, refuse_unnoised
from polyfed.experiment.running.constants import constant_facts
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.run_state import checked_state
from polyfed.experiment.running.stopping import refuse_spent
from polyfed.experiment.running.warm_start import AGAINST, given_of, warmed
from polyfed.federation.client_registry import TEST, registry_of
from polyfed.federation.clock import Clock
from polyfed.federation.federation import Federation
from polyfed.federation.links.measured import MeasuredLinks
from polyfed.model import Model, build_model
from polyfed.privacy.differential.guarantee import Guarantee
from polyfed.privacy.egress.announcement import Announcer
from polyfed.privacy.egress.ledger import Ledger
from polyfed.privacy.egress.policy import Policy, refuse_guarded
from polyfed.training.optimisers import Train


@dataclass
class Assembly:
    """The parts of a run, before its first round.

    Attributes:
        recipe: the recipe, with its task and an encoder for every modality.
        population: the data and its division into clients.
        model: the model, as functions of a Tree.
        policy: the egress policy.
        initial: the model's initial parameters, which are drawn from the run's seed.
        ledger: the ledger, which records every message.
        engine: the engine, which runs tasks on the clients.
        fed: the federation, which the algorithm uses.
        was_guessed: whether polyfed chose the task according to the labels, because the recipe names no task.
        guesses: sentences about guesses that polyfed made while it read the data, and about encoders that the recipe
            does not name.
        guarantee: the guarantee of differential privacy, or None without the section [privacy].
        given: the values of a warm start, by name.
        deployed: whether this is the server of a deployment.
        against: the second model of an evaluation job; empty without one.
        spare: where large tensors lie that memory need not hold, or None to hold them.
    """

    recipe: Recipe
    population: Population
    model: Model
    policy: Policy
    initial: Tree
    ledger: Ledger
    engine: Engine
    fed: Federation
    was_guessed: bool = False
    guesses: tuple[str, ...] = ()
    guarantee: Guarantee | None = None
    given: Tree = field(default_factory=dict)
    deployed: bool = False
    against: Tree = field(default_factory=dict)
    spare: Path | None = None

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the recipe."""
        return self.recipe.algorithm

    def start(self) -> ServerState:
        """Run the method's `init` as round 0, and return the state before round 1."""
        book(self.ledger, self.population.told)
        self.fed.begin(0)
        state = checked_state(self.algorithm, self.algorithm.init(self.fed, self.initial), "init")
        state = replace(state, against=self.against) if self.against else state  # type: ignore[type-var]
        state = self.put_away(state)
        self.fed.expect(state.params)
        return state

    def put_away(self, state: ServerState) -> ServerState:
        """Return the state with its large tensors on the disk, so that memory holds them only while it makes others.

        Raises:
            CheckpointError: the state cannot be written to a checkpoint either.
            OSError: the disk is full.
        """
        if self.spare is None or self.engine.device.type != "cpu":
            return state
        away: ServerState = checkpoint.put_away(state, self.spare, checkpoint.modules_of(self.algorithm))
        return away

    def resume(self, state: ServerState, locals: Mapping[int, Tree], round: int) -> None:
        """Continue after a round, with the state and the local states that the run had then."""
        self.engine.resume(locals, self.algorithm.settled(state, round))
        self.fed.expect(state.params)


ENGINES = ("sequential", "vectorised", "flower")
"""The engines of simulations. A run on `flower` gets its engine from `polyfed.deploy`, as one on devices does."""


def population_of(recipe: Recipe, loaded: Columns | None = None) -> Population:
    """Load the recipe's data, unless they are given, divide them among the clients, and scale the features."""
    columns = prepared(recipe, stacked(recipe.data.load(), recipe.stack) if loaded is None else loaded)
    seed = recipe.seed if recipe.clients.seed is None else recipe.clients.seed
    population = with_fitted_columns(populate(columns, recipe.clients, keys.key(seed, "population")))
    population = replace(population, columns=scaled(recipe, population.columns, torch.unique(population.train.rows)))
    method: Any = recipe.algorithm
    if groups := getattr(method, "groups", {}):
        codes = group_codes(recipe.data, groups, len(columns))
        population = replace(population, columns=replace(population.columns, groups=codes))
    return population if recipe.attack is None else recipe.attack.poison(population, recipe.seed)


def model_of(
    recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], num_classes: int, policy: Policy, given: Tree | None = None
) -> Model:
    """Build the model that the algorithm needs.

    Args:
        shapes: modality -> shape of a sample.
        num_classes: the number of classes, or the number of targets if the task has no classes.
        policy: the egress policy. Some algorithms leave out modalities that the policy does not allow to leave the
            clients.
        given: the values of a warm start, for the blocks that [model] freeze names.
    """
    spec, read = recipe.algorithm.model_spec(recipe.model, tuple(shapes), policy)
    return build_model(spec, shapes, task_of(recipe).num_outputs(num_classes), read, _init_key(recipe), given)


def initial_of(recipe: Recipe, model: Model, given: Tree | None = None) -> Tree:
    """Return the initial parameters on the run's device: the values of a warm start, the others from the run's seed."""
    device = device_of(recipe)
    drawn = warmed(model.init(_init_key(recipe)), model, given or {}, recipe)
    return {name: value.to(device) for name, value in drawn.items()}


def _init_key(recipe: Recipe) -> int:
    """Return the random key of initial and frozen parameters: one key, because a single call may draw both."""
    return keys.key(recipe.seed, "init")


def assemble(
    recipe: Recipe,
    run: str = "run",
    emit: Emitter | None = None,
    *,
    population: Population | None = None,
    engine: Callable[..., Engine] | None = None,
    one_device: bool = False,
    folder: Path | None = None,
    deployed: bool = False,
    spare: Path | None = None,
) -> Assembly:
    """Build all parts of a run.

    Args:
        run: the run's name in the ledger.
        emit: called with every event.
        population: the clients. By default, they come from the recipe's data.
        engine: the engine's constructor. By default, the recipe names the engine.
        one_device: whether `population` has only one device. Checks that need all clients are then skipped.
        folder: the folder of a run or of an app that may hold a copy of the warm start's values.
        deployed: whether this is the server of a deployment. The ledger then has the SHA-256 of each part of a message,
            for the audit log, and noise comes from the operating system's generator.
        spare: a folder for large tensors of the server, or None to hold them in memory.

    Raises:
        PolyfedError: the recipe, the data or the model is wrong, or they do not fit each other.
    """
    emit, population = emit or Emitter(), population or population_of(recipe)
    made = _completed(recipe, population, folder, one_device=one_device, deployed=deployed)
    # from here on the recipe is complete, and only read: engine and federation see what recipe.toml will say
    ledger = Ledger(run, hashing=deployed)
    copied = clone if spare is None else partial(on_disk, folder=spare)
    built = (engine or engine_of(made.recipe))(
        population,
        made.model,
        made.recipe.algorithm,
        made.initial,
        policy=made.policy,
        ledger=ledger,
        device=device_of(made.recipe),
        emit=emit,
        debug=made.recipe.engine.debug,
        **time_of(made.recipe, population.num_clients, ledger),
        objective=task_of(made.recipe),
        privacy=None if made.guarantee is None else made.guarantee.mechanism,
        limits=made.recipe.limits,
        wire=made.recipe.wire,
        copied=copied,
    )
    cap = made.recipe.deployment.rows_cap if deployed else 0.0
    fed = _federation(made.recipe, built, None if one_device else population.num_clients, cap)
    # what the mixing of this model reveals of a modality is known only to the announcer of the engine
    policy = built.announcer.with_model(made.policy)
    initial = made.initial
    if spare is not None and built.device.type == "cpu":
        initial = copied(initial)
        made.model.put_away(copied)  # only a server that trains or evaluates uses the modules
    parts = population, made.model, policy, initial, ledger, built, fed
    rest = recipe.task is None, made.guesses, made.guarantee, made.given, deployed
    return Assembly(made.recipe, *parts, *rest, _against_of(made.recipe, made.model, made.given), spare)


def _against_of(recipe: Recipe, model: Model, given: Tree) -> Tree:
    """Return the second model of an evaluation job, or an empty Tree.

    Raises:
        RecipeError: it does not fit the recipe's model.
    """
    method: Any = recipe.algorithm
    other = under(AGAINST, given)
    fixed = {**model.frozen, **model.constants}
    if odd := [name for name in other if name in fixed and not torch.equal(other[name], fixed[name].cpu().float())]:
        raise RecipeError(
            f"[algorithm] against = '{method.against}': '{odd[0]}' is frozen and differs between the two models, so no "
            "client can compute both with one model. Evaluate each with a job of its own",
            ("algorithm", "against"),
        )
    return initial_of(replace(recipe, model=replace(recipe.model, init=method.against)), model, other) if other else {}


def _federation(recipe: Recipe, engine: Engine, num_clients: int | None, rows_cap: float) -> Federation:
    """Return the federation of a run. The number of clients is None if only one of them is known."""
    return Federation(
        clients=engine.registry,
        engine=engine,
        owner=recipe.algorithm,
        context=engine.context(TEST),
        template=engine.initial,
        seed=recipe.seed,
        rounds=recipe.rounds,
        evaluation_clients=engine.evaluation_clients,
        min_replies=recipe.engine.min_replies,
        outlier_factor=recipe.engine.outlier_factor,
        rows_cap=rows_cap,
        combine=recipe.engine.combine == "nodes",
        emit=engine.emit,
        clock=engine.clock,
        links=engine.links,
        attack=recipe.attack,
        ranks=client_ranks(recipe, engine.model, num_clients),
        privacy=engine.privacy,
        compression=engine.compression,
        edges=engine if isinstance(engine, EdgeRemote) else None,
    )


@dataclass(frozen=True)
class _Completed:
    """A recipe with everything that the data and the privacy budget decide, and what was made to decide it.

    Attributes:
        recipe: with its task, an encoder for every modality, and the rounds and the noise of its budget.
    """

    recipe: Recipe
    policy: Policy
    guesses: tuple[str, ...]
    given: Tree
    model: Model
    initial: Tree
    guarantee: Guarantee | None


def _completed(
    recipe: Recipe, population: Population, folder: Path | None, *, one_device: bool, deployed: bool
) -> _Completed:
    """Complete a recipe. The guarantee comes last, because it depends on the blocks of the model that clients send."""
    recipe, policy, guesses = _with_data(recipe, population, one_device=one_device, deployed=deployed)
    shapes = {name: column.shape for name, column in population.columns.modalities.items()}
    given = given_of(recipe, folder)
    model = model_of(recipe, shapes, population.columns.num_classes, policy, given)
    check_model(recipe.algorithm, model)
    if not one_device and isinstance(train := getattr(recipe.algorithm, "train", None), Train):
        refuse_idle_batches(train, model, torch.unique(population.train.sizes).tolist())
    initial, clients = initial_of(recipe, model, given), registry_of(population)
    if not one_device:
        refuse_small_cohorts(recipe, clients)
        refuse_few_replies(recipe, clients)
    announcer = Announcer(recipe.algorithm, model, task_of(recipe), policy, asks_own(recipe.algorithm, clients))
    guarantee = guarantee_of(recipe, population, announcer, initial, deployed=deployed, one_device=one_device)
    if guarantee is not None:
        refuse_spent(recipe.stop, guarantee)
        recipe = replace(recipe, rounds=guarantee.rounds, privacy=guarantee.resolved)
    return _Completed(recipe, policy, guesses, given, model, initial, guarantee)


def _with_data(
    recipe: Recipe, population: Population, *, one_device: bool, deployed: bool
) -> tuple[Recipe, Policy, tuple[str, ...]]:
    """Return three things: the recipe with its task and all encoders, the recipe's policy, and `Assembly.guesses`.

    All faults are raised together, in one error.
    """
    columns, problems = population.columns, Problems()
    policy = problems.attempt(lambda: policy_of(recipe, columns, lenient=deployed or one_device))
    problems.attempt(lambda: refuse_unnoised(recipe, features_of(columns)))
    filled = problems.attempt(lambda: with_encoders(recipe, columns))
    # not the filled recipe: a fault of an encoder must not hide those of the task, nor the other way round
    tasked = problems.attempt(lambda: with_task(recipe, columns, population.train.rows))
    if deployed or one_device:
        problems.attempt(lambda: refuse_conflicts(recipe, deployed=True))
    if tasked is not None:
        problems.attempt(lambda: refuse_unfit(tasked, population))
        problems.attempt(lambda: refuse_clients(tasked, population, one_device=one_device))
        if policy is not None:
            found = recipe.algorithm.faults(recipe.model, tuple(columns.modalities), policy, task_of(tasked))
            for fault in found:
                problems.add(fault)
    problems.raise_all()
    assert policy is not None
    assert filled is not None
    assert tasked is not None
    return replace(tasked, model=filled.model), policy, guesses_of(recipe, columns)


def policy_of(recipe: Recipe, columns: Columns, *, lenient: bool = False) -> Policy:
    """Return the recipe's policy, whose rows name modalities, or columns of the data that no modality may read.

    Args:
        columns: its data.
        lenient: whether the columns of all data are not known here, so that a row may name any.

    Raises:
        RecipeError: a row is wrong.
        EgressError: a column that has a row of its own is read.
    """
    method: Any = recipe.algorithm
    names = [name for group in columns.origin.values() for name in group]
    policy = Policy.parse(recipe.egress, columns.modalities, guards=[*recipe.egress] if lenient else names)
    used = {use: group for use, group in columns.origin.items() if use}
    refuse_guarded(recipe.egress, {**used, "[algorithm] groups": tuple(getattr(method, "groups", {}))})
    return policy


def time_of(recipe: Recipe, num_clients: int, ledger: Ledger) -> dict[str, Any]:
    """Return what [network] tells of time: the `clock` of simulated time, or the measured `links`; nothing without."""
    network = recipe.network
    if network is None:
        return {}
    if network.measured:
        return {"links": MeasuredLinks(num_clients, network)}
    return {"clock": Clock(network.links(num_clients, recipe.seed), ledger)}


def facts_of(assembly: Assembly, limit: int = 1000) -> dict[str, Any]:
    """Return the facts of run.json: data, clients (at most `limit`), bytes of each block, and the resolved policy.

    If the partition is `classes-per-client` or `main-class`, the facts of each client include the classes that the
    partition assigned to this client (docs/partitions.md).
    """
    registry, modalities = assembly.fed.clients, assembly.fed.clients.modalities
    population, columns = assembly.population, assembly.population.columns
    shown = [registry[client] for client in range(min(limit, len(registry)))]
    without = rows_without(population, len(shown))
    return {
        "data": {
            "rows": len(columns),
            "classes": columns.num_classes,
            **({"class_names": list(columns.class_names)} if columns.class_names else {}),
            "test_rows": len(population.test_rows),
            "validation_rows": len(population.validation_rows),
            "sha256": columns.fingerprint(),
            **tests_without(population),
        },
        "task": task_facts(assembly.recipe, columns.num_classes, was_guessed=assembly.was_guessed),
        "num_clients": len(registry),
        "clients": [
            {"id": c.id, "rows": c.num_rows, "modalities": list(c.modalities)}
            | ({} if (name := population.name_of(c.id)) is None else {"name": name})
            | dealt_classes(population, assembly.recipe.clients.partition, c.id)
            | label_counts(population, c.id)
            | without[c.id]
            for c in shown
        ],
        "blocks": block_sizes(assembly),
        **constant_facts(assembly.model),
        **({"init": {"sha256": digest(assembly.given)}} if assembly.given else {}),
        **rank_facts(assembly.fed.ranks),
        "egress": assembly.policy.table(modalities),
        "not_in_ledger": [*not_in_ledger(assembly)],
        "captions": dict(assembly.algorithm.captions),
    }


def announced_by(assembly: Assembly) -> list[dict[str, Any]]:
    """Return, for each set of modalities that some client holds, everything that its replies can hold."""
    return [
        {"modalities": list(own), "parts": [asdict(row) for row in assembly.engine.announcement(own).rows.values()]}
        for own in assembly.fed.clients.holdings()
    ]


def not_in_ledger(assembly: Assembly) -> Iterator[str]:
    """Yield what the server of a simulation reads of the data although no message carries it."""
    population, clients = assembly.population, assembly.recipe.clients
    counts = {"validation": len(population.validation_rows), "test": len(population.test_rows)}
    listed = " and ".join(counted(count, f"{name} row", f"{name} rows") for name, count in counts.items() if count)
    if assembly.deployed:
        return
    if isinstance(names := population.columns.standardise, tuple) and names:
        yield (
            f"the mean and the deviation of each feature of {', '.join(names)}, over all training rows, which scale "
            "the samples (standardise) and are in the run's folder. Devices use those of their own rows"
        )
    if not listed:
        return
    yield (
        f"{listed}, samples and labels: the server of a simulation reads them, no message carries them and no ledger "
        "books them. Devices keep theirs"
    )
    if clients.validation and assembly.fed.clients.validated:
        yield (
            f"[clients] personal_validation = {clients.validation} in place of validation leaves the validation rows "
            "with their clients"
        )


def block_sizes(assembly: Assembly) -> dict[str, int]:
    """Return the size of each block of the model in bytes, without frozen parameters."""
    names = (*assembly.model.modalities, SHARED)
    return {block: size_bytes(select(assembly.initial, [block])) for block in names}


def private_sizes(assembly: Assembly) -> dict[str, int]:
    """Return the size in bytes of the private part of each block, without blocks that are sent whole."""
    kept = assembly.algorithm.private_names(assembly.model)
    private = {name: value for name, value in assembly.initial.items() if name in kept}
    return {block: size_bytes(select(private, [block])) for block in blocks(private)}
