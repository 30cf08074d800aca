"""From the section [privacy] to the mechanism and the guarantee of a run; refuses what cannot be honoured."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import RecipeError
from polyfed.core.gaussian import Clip
from polyfed.core.registry import name_of
from polyfed.core.tree import SHARED, Tree, blocks
from polyfed.data import Population
from polyfed.engines.base import Engine
from polyfed.experiment.privacy_support import methods_that_honour
from polyfed.experiment.recipe import Recipe
from polyfed.experiment.task_choice import task_of
from polyfed.federation.federation import Federation
from polyfed.model import Model
from polyfed.privacy.accounting import Accounting
from polyfed.privacy.differential import Privacy
from polyfed.privacy.guarantee import UNPROTECTED, Guarantee, in_words, states_of
from polyfed.privacy.mechanism import Mechanism
from polyfed.selection import Selector, Uniform


def guarantee_of(recipe: Recipe, fed: Federation, engine: Engine) -> Guarantee | None:
    """Return the guarantee of a run, or None if the recipe has no section [privacy].

    Args:
        recipe: the recipe, with its task.
        fed: the federation, for facts about the clients.
        engine: the engine; an engine of a deployment draws noise from the operating system.

    Raises:
        RecipeError: the recipe cannot honour its section, or data crosses that it neither protects nor accepts.
    """
    spec = recipe.privacy
    if spec is None:
        return None
    model = engine.model
    _refuse(recipe, spec, fed, engine)
    _refuse_own_test_rows(recipe, spec, engine.population)
    accounting = _accounting(recipe, spec, fed)
    _refuse_delta(spec, fed)
    noise, rounds = _noise_and_rounds(recipe, spec, accounting)
    made = mechanism_of(recipe, model, engine.initial, noise, secure=engine.deployed)
    mechanism = replace(made, denominators=_denominators(recipe, fed) if spec.unit == "client" else {})
    parts = states_of(engine.announcement(fed.clients.modalities).rows, mechanism)
    open_parts = [part for part, state in parts if state == UNPROTECTED and part.kind not in spec.unprotected]
    if open_parts:
        kinds = ", ".join(f'"{kind}"' for kind in dict.fromkeys([*spec.unprotected, *(p.kind for p in open_parts)]))
        raise RecipeError(
            f"[privacy] does not protect what this recipe lets cross: {in_words(open_parts)}. Change the recipe so "
            f"that these parts do not cross, or accept that they cross unprotected: unprotected = [{kinds}]",
            ("privacy", "unprotected"),
        )
    return Guarantee(spec, accounting, mechanism, parts, rounds, recipe.rounds)


def mechanism_of(recipe: Recipe, model: Model, initial: Tree, noise: float | None, *, secure: bool) -> Mechanism:
    """Return the mechanism as a client knows it, without the denominators of the server.

    Args:
        recipe: the recipe.
        model: the model of the federation.
        initial: the initial parameters, for the blocks of the model.
        noise: the noise multiplier. With None, it follows from the recipe alone.
        secure: whether noise comes from the operating system's generator.
    """
    spec, method = recipe.privacy, recipe.algorithm
    assert spec is not None, "only a recipe with [privacy] has a mechanism"
    releases = None
    if not spec.central:
        found, releases = _noise_and_rounds(recipe, spec, _accounting(recipe, spec, None))
        noise = found if noise is None else noise
    elif noise is None:
        noise = 0.0  # the server adds the noise
    kept = method.private_names(model)
    own = blocks(name for name in initial if spec.unit == "example" or name not in kept)
    spare = () if "statistic" in spec.unprotected or not _spares(method) else method.spare
    return Mechanism(
        unit=spec.unit,
        central=spec.central,
        clip=Clip.of(spec.clip_norm, own, by_block=spec.clip == "per-block"),
        noise_multiplier=noise,
        protected=_by_task(method.honours(spec.unit)),
        withheld=_by_task(spare),
        secure=secure,
        releases=releases,
    )


def _refuse_own_test_rows(recipe: Recipe, spec: Privacy, population: Population) -> None:
    """Refuse scores on the clients' own test rows that nobody has accepted as unprotected.

    Data without a test set has no other rows for the test of the global model.

    Raises:
        RecipeError: the server would test on such rows.
    """
    own = population.test
    if own is None or "statistic" in spec.unprotected or not recipe.algorithm.evaluation.every:
        return
    if bool(torch.isin(population.test_rows, own.rows).any()):
        raise RecipeError(
            "[privacy] does not protect the scores of the global model, which is tested on the clients' own test rows, "
            'because the data has no test set. Set [data] test_share, or accept it: unprotected = ["statistic"]',
            ("privacy", "unprotected"),
        )


def privacy_after(guarantee: Guarantee | None, round: int) -> dict[str, Any]:
    """The entry `privacy` of a round: epsilon after it, in total and by block and kind; empty without [privacy]."""
    return {} if guarantee is None else {"privacy": guarantee.after(round)}


def privacy_facts(guarantee: Guarantee | None, rounds: int) -> dict[str, Any]:
    """The entry `privacy` of result.json after some rounds; empty without [privacy]."""
    return {} if guarantee is None else {"privacy": guarantee.facts(rounds)}


def _by_task(fields: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Return task -> fields, from names `task.field`."""
    found: dict[str, tuple[str, ...]] = {}
    for name in fields:
        task, _, field = name.rpartition(".")
        found[task] = (*found.get(task, ()), field)
    return found


def _spares(method: Any) -> bool:
    """Return whether the selector reads no field of the replies, so that fields for the log can be withheld."""
    selector = getattr(method, "selector", None)
    return not isinstance(selector, Selector) or type(selector).learn is Selector.learn


def _accounting(recipe: Recipe, spec: Privacy, fed: Federation | None) -> Accounting:
    """Return what the accountant has to know about the run. `fed` is needed only for `amplification`."""
    method: Any = recipe.algorithm
    if spec.unit == "example":
        return Accounting(spec.accountant, spec.delta, uses=method.train.epochs + getattr(method, "private_epochs", 0))
    cohort = None
    if spec.amplification:
        assert fed is not None, "noise at the server is counted at the server"
        cohort = (method.selector.needed(fed), len(fed.clients.eligible))
    return Accounting(spec.accountant, spec.delta, swing=2.0 if cohort or not spec.central else 1.0, cohort=cohort)


def _noise_and_rounds(recipe: Recipe, spec: Privacy, accounting: Accounting) -> tuple[float, int]:
    """Return the noise multiplier, and the number of rounds that fit the budget."""
    if spec.noise_multiplier is None:
        assert spec.epsilon is not None, "the section has an epsilon or a noise multiplier"
        return accounting.noise_multiplier(spec.epsilon, recipe.rounds), recipe.rounds
    if spec.epsilon is None:
        return spec.noise_multiplier, recipe.rounds
    rounds = accounting.rounds(spec.noise_multiplier, spec.epsilon, recipe.rounds)
    if recipe.rounds and not rounds:
        raise RecipeError(
            f"[privacy] epsilon = {spec.epsilon:g}: with noise_multiplier = {spec.noise_multiplier:g} one round spends "
            f"{accounting.epsilon(spec.noise_multiplier, 1):.3f}. Raise epsilon or noise_multiplier, or leave out "
            "noise_multiplier, so that it is found for the epsilon",
            ("privacy", "epsilon"),
        )
    return spec.noise_multiplier, rounds


def _denominators(recipe: Recipe, fed: Federation) -> dict[str, float]:
    """Return, for each block, the expected number of cohort members that hold it, and at least 1.

    The number follows from the client registry alone, never from the replies.
    """
    selector: Any = getattr(recipe.algorithm, "selector", None)
    clients, num = fed.clients, len(fed.clients.eligible)
    share = selector.needed(fed) / num if isinstance(selector, Selector) and num else 1.0
    counts = clients.holds[clients.num_rows > 0].sum(0).tolist()
    holders = dict(zip(clients.modalities, counts, strict=True)) | {SHARED: num}
    return {block: max(share * count, 1.0) for block, count in holders.items() if count}


def _refuse_delta(spec: Privacy, fed: Federation) -> None:
    """Refuse a delta with which publishing the data of one random client or row would count as private."""
    units = len(fed.clients.eligible) if spec.unit == "client" else int(fed.clients.num_rows.sum())
    if units and spec.delta * units >= 1:
        what = "clients with training rows" if spec.unit == "client" else "training rows of all clients together"
        raise RecipeError(
            f"[privacy] delta = {spec.delta:g}: must be below 1 / {units:,}, as there are {units:,} {what}",
            ("privacy", "delta"),
        )


def _refuse(recipe: Recipe, spec: Privacy, fed: Federation, engine: Engine) -> None:
    """Refuse a method with which the mechanism does not hold, or else the model and the section; with all reasons."""
    reasons = [*_faults_of_method(recipe, spec)]
    if not reasons:  # other options would not help a method that cannot honour the unit at all
        reasons += _faults_of_model(engine.model, engine.initial)
        of_mean = spec.unit == "client"
        reasons += _faults_of_mean(recipe, spec) if of_mean else _faults_of_rows(recipe, engine.model, fed, engine)
    if reasons:
        raise RecipeError(f'[privacy] unit = "{spec.unit}" cannot be honoured: ' + "; ".join(reasons), ("privacy",))


def _faults_of_method(recipe: Recipe, spec: Privacy) -> Iterator[str]:
    method = type(recipe.algorithm)
    if not method.honours(spec.unit):
        name = name_of(recipe.algorithm, ALGORITHMS)
        own = "" if name in ALGORITHMS else ". If your class keeps the rule of `protects`, declare `protects` in it"
        able = methods_that_honour(spec.unit)
        yield f"algorithm '{name}': {method.dishonour(spec.unit)}{own}. Methods that can: {able}"


def _faults_of_model(model: Model, initial: Tree) -> Iterator[str]:
    if buffers := [name for name in initial if name not in model.trainable(initial)]:
        yield (
            f"the model has buffers that follow the rows of a batch, such as {buffers[0]} (BatchNorm). Use layers "
            "without them, such as GroupNorm or LayerNorm"
        )


def _faults_of_mean(recipe: Recipe, spec: Privacy) -> Iterator[str]:
    """Yield why a client could change the server's mean by more than the clip norm."""
    method: Any = recipe.algorithm
    if not isinstance(method, Averaging):
        return
    selector = method.selector
    if method.aggregation != "uniform":
        yield 'weights by rows give some clients more influence: set [algorithm] aggregation = "uniform"'
    if method.server.aggregate != "mean":
        yield f'[server] aggregate = "{method.server.aggregate}" has no bounded sensitivity: use "mean"'
    if type(selector).weigh is not Selector.weigh:
        yield f"[selection] {type(selector).__name__} sets the weights of the mean"
    if spec.amplification and (type(selector) is not Uniform or selector.overselect is not None):
        yield "amplification needs the selector uniform without overselect, because other cohorts depend on the data"
    if spec.amplification and (method.private or method.fine_tune or type(method).local is not Algorithm.local):
        yield "amplification needs clients without a state of their own, which would tell later who was in a cohort"


def _share_rows(fed: Federation, engine: Engine) -> bool:
    """Return whether several clients hold the same rows. The server of a deployment knows only of silos."""
    if engine.deployed:
        return fed.clients.silo is not None
    rows = engine.population.train.rows
    return len(rows) > 0 and int(torch.bincount(rows).max()) > 1


def _faults_of_rows(recipe: Recipe, model: Model, fed: Federation, engine: Engine) -> Iterator[str]:
    """Yield why a row could be used more often than counted, or in a gradient that is no mean over rows."""
    train, objective = recipe.algorithm.train, task_of(recipe)
    if _share_rows(fed, engine):
        yield "several clients hold the same rows, as in silos, and epsilon counts the uses of a row by one client"
    if mixes := objective.mixes_rows:
        yield f"[task] {objective.NAME}: {mixes}"
    if train.steps is not None:
        yield "[train] steps: clients would pass over their rows a different number of times. Give epochs"
    if model.recomputes:
        yield "gradient checkpointing computes layers again, which the gradients of single rows do not allow"
    if train.accumulate > 1:
        yield "[train] accumulate: set accumulate = 1"
