"""Does a recipe have the protection that a device demands? The device computes the answer from the recipe alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from polyfed.core.privacy_noise import LEAST_CLIP, MOST_CLIP
from polyfed.core.tasks import answers_of
from polyfed.core.tree import Tree
from polyfed.data.sources.own.npz import Npz
from polyfed.evaluation.conformal import ScoreCounts, subsets_in
from polyfed.experiment.checks.privacy_support import (
    faults_of_model,
    faults_of_rows,
)
from polyfed.experiment.checks.protection import accounting_of, noise_and_rounds
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.column_statistics import fitted_columns, named
from polyfed.model import Model
from polyfed.privacy.differential.accounting import epsilon_of_all
from polyfed.privacy.differential.guarantee import number
from polyfed.privacy.differential.section import Privacy
from polyfed.privacy.egress.requirements import Release, Requirements


def unmet(required: Requirements, recipe: Recipe, *, shared: bool) -> Iterator[str]:
    """Find every protection that a device demands and a recipe lacks.

    Each result is a text that states the reason and then what to change in the recipe. The text does not end with a
    full stop, because a caller may join several texts into one message.

    Args:
        required: the section [require] of the device.
        shared: whether other devices hold the same rows, as in a silo.
    """
    if required.secure_aggregation:
        yield from _unmet_sums(required, recipe)
    if required.max_epsilon is not None:
        yield from _unmet_noise(required, recipe, shared=shared)
    protected = required.max_epsilon is not None or required.secure_aggregation
    if protected and "statistic" not in required.unprotected and (fitted := fitted_columns(recipe)):
        yield f"[require] of the device, and {named(fitted)}"
    demands = required.secure_aggregation or required.max_epsilon is not None
    if demands and "statistic" not in required.unprotected and (fitted := fitted_columns(recipe)):
        yield f"[require] of the device, and {named(fitted)}"


def unmet_by_model(required: Requirements, recipe: Recipe, model: Model, initial: Tree) -> Iterator[str]:
    """Yield each reason why the model of a recipe breaks the guarantee of [privacy], as a text like those of `unmet`.

    Args:
        required: the section [require] of the device.
        recipe: the recipe. The caller has already checked that `unmet` yields nothing for it.
        initial: the initial parameters.
    """
    if required.max_epsilon is None:
        return
    assert recipe.privacy is not None, "a recipe without [privacy] does not fulfil max_epsilon"
    yield from faults_of_model(model, initial)
    if recipe.privacy.unit == "example":
        yield from faults_of_rows(model, shared=False)


def release_of(required: Requirements, recipe: Recipe) -> Release | None:
    """Return the privacy cost of one protected reply to a task of this recipe.

    None if the device does not limit epsilon, or if the device adds no noise itself.
    """
    spec = recipe.privacy
    if required.max_epsilon is None or spec is None or spec.central:
        return None
    accounting = accounting_of(recipe, spec, None)
    noise, rounds = noise_and_rounds(recipe, spec, accounting)
    return Release(spec.unit, noise / accounting.swing, accounting.uses, max(rounds, 1))


def scores_of(required: Requirements, recipe: Recipe, rounds: int) -> Release | None:
    """Return the privacy cost of a score with noise, and how many the last `rounds` rounds of a recipe ask for.

    None if the device adds no noise to scores, or the recipe asks for none.
    """
    method = recipe.algorithm
    replies = [reply for name, (reply, _) in answers_of(method).items() if method.will_ask(name, tested=True)]
    which, modalities = method.evaluation.subsets, tuple(recipe.model.encoders)
    last = range(recipe.rounds - rounds + 1, recipe.rounds + 1)
    due = sum(method.evaluation.due(round, recipe.rounds) for round in last)
    result, uses = None, 0
    for reply in replies:
        if (release := required.score_release(reply, subsets_in(reply, which, modalities))) is not None:
            result, uses = (
                release,
                uses + release.uses * (1 if reply is ScoreCounts else due),
            )  # counts: once, at the end
    return None if result is None else replace(result, uses=uses, rounds=1)


def _unmet_sums(required: Requirements, recipe: Recipe) -> Iterator[str]:
    secure: Any = recipe.algorithm.secure_aggregation
    if secure is None:
        yield (
            "[require] secure_aggregation = true of the device, and the recipe has no section [secure_aggregation]. "
            "Add the section to the recipe"
        )
    elif required.min_clients is not None and secure.min_clients < required.min_clients:
        yield (
            f"[require] min_clients = {required.min_clients} of the device, and the recipe says [secure_aggregation] "
            f"min_clients = {secure.min_clients}. Raise the number in the recipe"
        )


def _unmet_noise(required: Requirements, recipe: Recipe, *, shared: bool) -> Iterator[str]:
    spec, where = recipe.privacy, f"[require] max_epsilon = {required.max_epsilon:g} of the device, and"
    if spec is None:
        yield f"{where} the recipe has no section [privacy]. Add the section to the recipe"
        return
    if spec.central:
        yield (
            f'{where} the recipe says [privacy] unit = "client" with noise_at = "server". A device cannot verify the '
            'noise of a server. Set noise_at = "client" or unit = "example" in the recipe'
        )
        return
    if required.unit == "client" and spec.unit == "example":
        yield (
            f'{where} its unit = "client" protects all data of the device, but the recipe says [privacy] '
            'unit = "example", which protects single rows. Change one of the two'
        )
        return
    if not LEAST_CLIP <= spec.clip_norm <= MOST_CLIP:
        yield (
            f"{where} the recipe says [privacy] clip_norm = {spec.clip_norm:g}, where rounding errors could exceed the "
            f"noise. Set clip_norm between {LEAST_CLIP:g} and {MOST_CLIP:g} in the recipe"
        )
    faults = [*_faults_of_sharing(spec, shared=shared), *_faults_of_data(recipe, spec)]
    yield from (f"{where} the recipe cannot honour [privacy]: {fault}" for fault in faults)
    if not faults:
        yield from _unmet_epsilon(required, recipe, spec)


def _faults_of_sharing(spec: Privacy, *, shared: bool) -> Iterator[str]:
    if shared and spec.unit == "example":
        yield "the devices of a silo hold the same rows, and epsilon counts the uses of a row by one device"


def _faults_of_data(recipe: Recipe, spec: Privacy) -> Iterator[str]:
    """Yield the options of [data] that would reveal more about the device's file than epsilon covers."""
    if not isinstance(recipe.data, Npz):
        return
    if spec.unit == "example" and recipe.data.standardise not in (False, "uneven", ()):
        yield (
            "[data] standardise computes means over all rows, so each row would change the features of all others. "
            "Standardise the file with public numbers, and set standardise = false"
        )
    if recipe.data.split != Npz.split:
        yield (
            f"[data] split = '{recipe.data.split}'. The enrolment tells the number of training rows, and with another "
            f"array than '{Npz.split}' it would tell how often a value occurs. Leave the option out"
        )


def _unmet_epsilon(required: Requirements, recipe: Recipe, spec: Privacy) -> Iterator[str]:
    assert required.max_epsilon is not None, "the caller has checked it"
    assert required.delta is not None, "max_epsilon has a delta"
    release = release_of(required, recipe)
    assert release is not None, "the clients add the noise"
    spent = epsilon_of_all({release.noise: release.uses * release.rounds}, required.delta)
    if spent > required.max_epsilon:
        yield (
            f"[require] max_epsilon = {required.max_epsilon:g} of the device at delta = {required.delta:g}, and the "
            f"{release.rounds} rounds of the recipe spend {number(spent)}. Lower [privacy] epsilon or the number of "
            f"rounds in the recipe, or raise max_epsilon in the device's policy file"
        )
