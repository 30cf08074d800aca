"""Derives clipping, noise and the guarantee of a run from [privacy]. Refuses recipes that cannot follow [privacy]."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from polyfed.core.errors import RecipeError
from polyfed.core.privacy_noise import Clip
from polyfed.core.tree import SHARED, Tree, block_of, blocks
from polyfed.data import Population
from polyfed.experiment.checks.privacy_support import (
    faults_of_model,
    faults_of_rows,
    refuse,
    share_rows,
    withheld_of,
)
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.federation.client_registry import ClientRegistry, registry_of
from polyfed.federation.private_mean import CLIP_NORM
from polyfed.model import Model
from polyfed.privacy.differential.accounting import Accounting
from polyfed.privacy.differential.adaptive_clipping import AdaptiveClipping
from polyfed.privacy.differential.guarantee import UNPROTECTED, Guarantee, in_words, states_of
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.privacy.differential.section import Privacy
from polyfed.privacy.egress.announcement import Announcer
from polyfed.selection import Selector


def guarantee_of(
    recipe: Recipe,
    population: Population,
    announcer: Announcer,
    initial: Tree,
    *,
    deployed: bool = False,
    one_device: bool = False,
) -> Guarantee | None:
    """Return the guarantee of a run, or None if the recipe has no section [privacy].

    Args:
        recipe: the recipe, with its task.
        population: the clients.
        announcer: what replies can hold, before anything is protected.
        initial: the model's initial parameters.
        deployed: whether this is the server of a deployment, where noise comes from the operating system.
        one_device: whether a single device checks the recipe. Its registry holds no other client. The denominators,
            adaptive clipping and the check of delta depend on the other clients, so a device leaves them out.

    Raises:
        RecipeError: the recipe cannot honour the section, or clients would send data that the section neither protects
            nor names in `unprotected`.
    """
    spec = recipe.privacy
    if spec is None:
        return None
    model, clients = announcer.model, registry_of(population)
    shared = share_rows(clients, population, deployed=deployed or one_device)
    rows = faults_of_rows(model, shared=shared) if spec.unit == "example" else ()
    refuse(spec, [*faults_of_model(model, initial), *rows])
    _refuse_own_test_rows(recipe, spec, population)
    accounting = accounting_of(recipe, spec, clients)
    noise, rounds = noise_and_rounds(recipe, spec, accounting)
    mechanism = mechanism_of(recipe, model, initial, noise, secure=deployed)
    if not one_device:
        _refuse_delta(spec, clients)
        mechanism = _of_server(recipe, spec, mechanism, clients)
        _refuse_coarse_grid(recipe, mechanism, initial)
    parts = states_of(announcer.of(clients.modalities).rows, mechanism)
    open_parts = [part for part, state in parts if state == UNPROTECTED and part.kind not in spec.unprotected]
    if open_parts:
        kinds = ", ".join(f'"{kind}"' for kind in dict.fromkeys([*spec.unprotected, *(p.kind for p in open_parts)]))
        raise RecipeError(
            f"[privacy] does not protect what this recipe lets cross: {in_words(open_parts)}. Change the recipe so "
            f"that these parts do not cross, or accept that they cross unprotected: unprotected = [{kinds}]",
            ("privacy", "unprotected"),
        )
    outside = tuple(_not_covered(recipe, population))
    noise_norm = None if one_device else _noise_norm(mechanism, initial)
    return Guarantee(spec, accounting, mechanism, parts, rounds, recipe.rounds, outside, noise_norm)


def _not_covered(recipe: Recipe, population: Population) -> Iterator[str]:
    """Yield phrases that name data which epsilon does not cover.

    Epsilon covers only the replies of clients. The named data depends on the clients' rows as well, but is not part of
    a reply.
    """
    if population.columns.standardise:
        yield "the means and deviations of [data] standardise, which are computed from all rows before the run"
    clients = recipe.clients
    if (clients.validation or clients.validation_clients) and len(population.validation_rows):
        option = "validation" if clients.validation else "validation_clients"
        yield f"{len(population.validation_rows):,} rows of [clients] {option}, which the server of a simulation gets"
    yield "the client registry (the modalities and the number of rows of each client), and which clients took part"


def _noise_norm(mechanism: Mechanism, initial: Tree) -> float | None:
    """Return the norm of the noise in the mean of the updates, as a multiple of the clip norm."""
    if mechanism.unit != "client":
        return None
    total = 0.0
    for name, value in initial.items():
        if expected := mechanism.denominators.get(block_of(name), 0.0):
            copies = 1.0 if mechanism.central else expected  # each client adds noise of its own
            total += value.numel() * copies / expected**2
    return mechanism.update_noise * math.sqrt(total)


def _of_server(recipe: Recipe, spec: Privacy, mechanism: Mechanism, clients: ClientRegistry) -> Mechanism:
    """Return the server's mechanism: the clients' mechanism, with the denominators and adaptive clipping added.

    Raises:
        RecipeError: `count_noise` is too large for the cohort, or too small for the noise multiplier. In adaptive
            clipping, the server counts the updates whose norm is below the clip norm, and adds noise to this count.
            `count_noise` is the standard deviation of this noise.
    """
    if spec.unit == "client":
        mechanism = replace(mechanism, denominators=_denominators(recipe, clients))
    if not spec.adaptive:
        return mechanism
    options = spec.clip_quantile, spec.clip_lr, spec.count_noise
    rule = AdaptiveClipping.of(*options, mechanism.denominators[SHARED])
    if mechanism.noise_multiplier < (least := rule.least_noise):
        raise RecipeError(
            f"[privacy] noise_multiplier = {mechanism.noise_multiplier:g}: must be at least {least:.1g} with "
            f"count_noise = {rule.count_noise:g}, because a float64 number cannot tell apart the noise of the updates "
            "with and without the count. Raise noise_multiplier, or lower count_noise",
            ("privacy", "noise_multiplier"),
        )
    return replace(mechanism, adaptive=rule)


def mechanism_of(recipe: Recipe, model: Model, initial: Tree, noise: float | None, *, secure: bool) -> Mechanism:
    """Return the mechanism that a client uses. It lacks the denominators, which only the server needs.

    Args:
        model: the model of the federation.
        initial: the initial parameters, for the blocks of the model.
        noise: the noise multiplier. With None, it follows from the recipe alone.
        secure: whether noise comes from the operating system's generator.
    """
    spec, method = recipe.privacy, recipe.algorithm
    assert spec is not None, "only a recipe with [privacy] has a mechanism"
    releases = None
    if not spec.central:
        found, releases = noise_and_rounds(recipe, spec, accounting_of(recipe, spec, None))
        noise = found if noise is None else noise
    elif noise is None:
        noise = 0.0  # the server adds the noise
    kept = method.private_names(model)
    own = blocks(name for name in initial if spec.unit == "example" or name not in kept)
    return Mechanism(
        unit=spec.unit,
        central=spec.central,
        clip=Clip.of(spec.clip_norm, own, by_block=spec.clip == "per-block"),
        noise_multiplier=noise,
        protected=_by_task(method.honours(spec.unit)),
        withheld=_by_task(withheld_of(method, spec.unprotected)),
        secure=secure,
        clients_clip=not spec.adaptive,
        releases=releases,
    )


def _refuse_own_test_rows(recipe: Recipe, spec: Privacy, population: Population) -> None:
    """Refuse to test the global model on the clients' own test rows, unless `unprotected` contains "statistic".

    The server tests on these rows if the data has no test set. [privacy] does not protect the scores.

    Raises:
        RecipeError: the server would test on the clients' own test rows, and `unprotected` does not allow it.
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


def privacy_after(guarantee: Guarantee | None, round: int, state: Any) -> dict[str, Any]:
    """Return the entry `privacy` of a round: the epsilon that all rounds up to this one have spent.

    The entry gives the total epsilon, and the epsilon of each block of the model for each kind of data. Under adaptive
    clipping, it also contains the clip norm of the next round. Without a [privacy] section, the entry is empty.
    """
    if guarantee is None:
        return {}
    moments = getattr(state, "moments", {})
    norm = {CLIP_NORM: float(moments[CLIP_NORM][CLIP_NORM])} if CLIP_NORM in moments else {}
    return {"privacy": guarantee.after(round) | norm}


def privacy_facts(guarantee: Guarantee | None, rounds: int) -> dict[str, Any]:
    """The entry `privacy` of result.json after some rounds; empty without [privacy]."""
    return {} if guarantee is None else {"privacy": guarantee.facts(rounds)}


def _by_task(fields: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Return task -> fields, from names `task.field`."""
    result: dict[str, tuple[str, ...]] = {}
    for name in fields:
        task, _, field = name.rpartition(".")
        result[task] = (*result.get(task, ()), field)
    return result


def accounting_of(recipe: Recipe, spec: Privacy, clients: ClientRegistry | None) -> Accounting:
    """Return what the accountant has to know about the run. `clients` is needed only for `amplification`."""
    method: Any = recipe.algorithm
    if spec.unit == "example":
        return Accounting(spec.accountant, spec.delta, uses=method.train.epochs + getattr(method, "private_epochs", 0))
    cohort = None
    if spec.amplification:
        assert clients is not None, "noise at the server is counted at the server"
        cohort = (method.selector.needed(clients), len(clients.eligible))
    return Accounting(spec.accountant, spec.delta, swing=2.0 if cohort or not spec.central else 1.0, cohort=cohort)


def noise_and_rounds(recipe: Recipe, spec: Privacy, accounting: Accounting) -> tuple[float, int]:
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


def _denominators(recipe: Recipe, clients: ClientRegistry) -> dict[str, float]:
    """Return the denominator of each block: the expected number of clients in a cohort that hold the block.

    A denominator is at least 1. It depends on the client registry and the selector, never on the replies.
    """
    selector: Any = getattr(recipe.algorithm, "selector", None)
    num = len(clients.eligible)
    share = selector.needed(clients) / num if isinstance(selector, Selector) and num else 1.0
    counts = clients.holds[clients.num_rows > 0].sum(0).tolist()
    holders = dict(zip(clients.modalities, counts, strict=True)) | {SHARED: num}
    return {block: max(share * count, 1.0) for block, count in holders.items() if count}


def _refuse_delta(spec: Privacy, clients: ClientRegistry) -> None:
    """Refuse a delta that is not below 1 / (number of clients or rows).

    With a larger delta, a run that publishes all data of one random client or row would count as private.
    """
    units = len(clients.eligible) if spec.unit == "client" else int(clients.num_rows.sum())
    if units and spec.delta * units >= 1:
        what = "clients with training rows" if spec.unit == "client" else "training rows of all clients together"
        raise RecipeError(
            f"[privacy] delta = {spec.delta:g}: must be below 1 / {units:,}, as there are {units:,} {what}",
            ("privacy", "delta"),
        )


def _refuse_coarse_grid(recipe: Recipe, mechanism: Mechanism, initial: Tree) -> None:
    """Refuse secure aggregation with so much noise that the server's rounding of a sum outweighs a client's update.

    Raises:
        RecipeError: the noise would have to more than double to cover the rounding.
    """
    secure: Any = recipe.algorithm.secure_aggregation
    share = mechanism.grid_share(sum(value.numel() for value in initial.values()))
    if secure is not None and mechanism.central and share > 0.5:
        raise RecipeError(
            f"[privacy] noise_multiplier = {mechanism.noise_multiplier:g}: must be at most "
            f"{mechanism.noise_multiplier / (2 * share):.3g} with [secure_aggregation] and this model, because the "
            "server rounds the sum to the grid of the noise. Lower noise_multiplier, or remove [secure_aggregation]",
            ("privacy", "noise_multiplier"),
        )
