"""Check a recipe on a device before a run.

The result says which parts of replies the device would send or refuse, and whether the run would break the device's
limits.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polyfed.algorithms.evaluate import Evaluate
from polyfed.core.errors import DataError, EgressError, RecipeError
from polyfed.core.registry import check_array, check_import, check_model, only
from polyfed.data import Columns, Population
from polyfed.deploy.device.allowed_arrays import ELSEWHERE, check_arrays
from polyfed.deploy.device.configuration import (
    DevicePolicy,
    NodeConfig,
    check_held,
    node_from,
    policy_on,
    recipe_on,
    used_on,
)
from polyfed.deploy.device.data import population_on
from polyfed.deploy.device.memory.privacy_budget import refuse_spent
from polyfed.experiment.checks.check import plan
from polyfed.experiment.checks.check_result import Planned
from polyfed.experiment.checks.limit_checks import unfit_options
from polyfed.experiment.checks.requirement_checks import release_of, scores_of, unmet
from polyfed.experiment.recipes.defaults import with_encoders
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import assemble, population_of
from polyfed.privacy.egress.announcement import Holder
from polyfed.privacy.egress.mixing import Mixing
from polyfed.privacy.egress.policy import Policy, refuse_guarded
from polyfed.privacy.egress.requirements import Requirements


@dataclass(frozen=True)
class Inspection:
    """The result of `polyfed check --node`.

    Attributes:
        node: the device's configuration. It has no data if only a policy file was given.
        policy: the device's policy, made stricter by the recipe's policy.
        rows: numbers of training rows and of own test rows, or None without data.
        shapes: shape of a sample, by modality.
        num_classes: the largest label plus one, or the number of targets of a row.
        planned: the parts of replies that the recipe's tasks would send from this device, allowed or refused.
        breaches: sentences that say why the device would not run the recipe. Either training on this device would
            exceed one of `limits`, or the recipe lacks protection that the device demands.
        limits: the limits on this device. Each entry says where the limit comes from: the device or the recipe.
        required: the protection that the device demands.
        purposes: the purposes for which the device takes part, with their terms; empty if for any.
        unchecked: why the check does not know what the recipe would send; "" if it knows.
    """

    node: NodeConfig
    policy: Policy
    rows: tuple[int, int] | None
    shapes: dict[str, tuple[int, ...]]
    num_classes: int
    planned: tuple[Planned, ...]
    breaches: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    purposes: tuple[str, ...] = ()
    unchecked: str = ""

    @property
    def refused(self) -> tuple[Planned, ...]:
        """The parts of replies that this device would refuse to send."""
        return tuple(row for row in self.planned if not row.allowed)


def inspect(
    given: Recipe | str | Path,
    device: NodeConfig | str,
    overrides: Sequence[str] = (),
    *,
    loaded: Columns | None = None,
) -> Inspection:
    """Check a device's configuration, policy and data against a recipe, with the same rules as on the device.

    Without data of the device, the data of the recipe's [data] give the shapes of samples. Features that its source
    extracts are then written to a private temporary folder, and never to the recipe's `cache`.

    Args:
        given: the recipe of the run, or its path. If this is a path, `recipe_on` reads the file. As on a device, it
            leaves out the parts of the recipe that only the server uses.
        device: its configuration; or the path of a device's file (`device.toml`, or `device.toml#2` for client 2 of
            several devices), the path of a policy file, or pairs, as `data="mine.npz" client=0 modalities="a"`.
        overrides: values that replace options of the recipe, each as `section.key=value`. They have an effect only if
            `given` is a path.
        loaded: the data of the recipe's [data], if the caller has read them. A device with data ignores them.

    Raises:
        NotAllowed: the recipe names code that the device's owner has not allowed. The code was not imported.
        PolyfedError: the configuration, the policy, the data or the recipe is wrong.
    """
    node = device if isinstance(device, NodeConfig) else node_from(device) if "=" in device else _of_file(device)
    with only(node.rules.allowance):
        recipe = given if isinstance(given, Recipe) else recipe_on(node, Path(given), overrides)
        used = used_on(recipe)
        for path in used.imports:
            check_import(path)
        for path in used.models:
            check_model(path)
        if node.data:
            return _inspected(recipe, node, None)
        with TemporaryDirectory(prefix="polyfed-check-") as private:  # only this user can read the folder
            return _inspected(_cached_in(recipe, private), node, loaded)


def _cached_in(recipe: Recipe, folder: str) -> Recipe:
    """Return the recipe with another cache for the features of its data.

    The author of the recipe chose the data and the cache, so a check on a device must not write to that cache.
    """
    if not any(option.name == "cache" for option in fields(recipe.data)):
        return recipe
    return replace(recipe, data=replace(recipe.data, cache=folder))


def _inspected(recipe: Recipe, node: NodeConfig, loaded: Columns | None) -> Inspection:
    unread = ""
    if node.data:
        check_held(node, recipe)
        population: Population | None = population_on(node, recipe, None)
    else:
        recipe, population, unread = _of_the_recipe(recipe, node.rules, loaded)
        known = recipe.model.modalities if population is None else (*population.columns.modalities,)
        node = replace(node, modalities=",".join(known))
        check_arrays(recipe, (*node.held, *node.rules.egress))
    policy, required = policy_on(node, recipe, node.held), node.rules.required
    policy, planned, unchecked = _planned(recipe, node, policy, population, unread)
    limits, train = node.rules.limits.stricter(recipe.limits), recipe.algorithm.train
    purposes, evaluates = node.rules.purposes, isinstance(recipe.algorithm, Evaluate)
    why = purposes.refusal(recipe.deployment.purpose, datetime.now(UTC), evaluates)
    lacking = (*([why] if why else []), *unfit_options(limits, recipe), *_lacking(required, recipe, node))
    result: dict[str, Any] = {"limits": limits.sentences(), "required": required.sentences(), "unchecked": unchecked}
    result["purposes"] = purposes.sentences()
    if population is None or not node.data:
        breaches = (*limits.foreseen(train, recipe.rounds, None), *lacking)
        return Inspection(node, policy, None, {}, 0, planned, breaches, **result)
    own = population.test
    rows = (int(population.train.sizes[node.client]), 0 if own is None else int(own.sizes[node.client]))
    shapes = {name: column.shape for name, column in population.columns.modalities.items()}
    breaches = (*limits.foreseen(train, recipe.rounds, rows[0]), *lacking)
    return Inspection(node, policy, rows, shapes, population.columns.num_classes, planned, breaches, **result)


def _of_the_recipe(
    recipe: Recipe, rules: DevicePolicy, loaded: Columns | None
) -> tuple[Recipe, Population | None, str]:
    """Return the recipe with all of its encoders, its clients, and "", or the reason why its data cannot be read.

    A recipe need not name encoders. Only its data tell which modalities it has, and so what would leave a device.

    Raises:
        NotAllowed, EgressError: the data are a table, and the policy file forbids one of the columns that it reads.
    """
    if recipe.data == ELSEWHERE:
        return recipe, None, "the recipe's data source is code, which a device does not run"
    try:
        population = population_of(recipe, loaded)
        _check_columns(population.columns, rules)
        return with_encoders(recipe, population.columns), population, ""
    except DataError as error:
        return recipe, None, f"the recipe's data cannot be read here ({error})"


def _lacking(required: Requirements, recipe: Recipe, node: NodeConfig) -> Iterator[str]:
    """Yield a sentence for each protection that the device demands and the recipe lacks.

    If the recipe has all demanded protections, the function checks the privacy budget of the device. If this budget
    does not cover all rounds of the recipe, the function yields one sentence that says for how many it is enough. The
    function does not know how many rounds of the run are already done, so it counts all of them.
    """
    found = tuple(unmet(required, recipe, shared=node.silo >= 0))
    yield from found
    release = None if found else release_of(required, recipe)
    if node.data and release is not None:
        try:
            scores = scores_of(required, recipe, release.rounds)
            refuse_spent(required, release, node.folder, node.client, release.rounds, scores)
        except EgressError as error:
            yield str(error)


def _of_file(text: str) -> NodeConfig:
    """Return the configuration in a device's file, or one with only a policy.

    With a policy alone, the check assumes that the device has all modalities of the recipe.
    """
    whole = Path(text).is_file() or "#" not in text
    name, _, number = (text, "", "") if whole else text.rpartition("#")
    path = Path(name)
    if not path.is_file():
        raise RecipeError(
            f"--node '{text}' is neither the file of a device, nor a policy file, nor key=value pairs; see "
            "`polyfed docs deploy-reference`"
        )
    if not _has_devices(path):
        return NodeConfig(data="", client=0, modalities="", policy=text)
    from polyfed.deploy.device.device_file import device_file  # needs the extra polyfed[device]

    nodes = [NodeConfig(**one["config"]) for one in device_file(path)["devices"]]
    chosen = [node for node in nodes if str(node.client) == number] if number else nodes
    if len(chosen) != 1:
        known = ", ".join(f"{name}#{node.client}" for node in nodes)
        raise RecipeError(f"--node '{text}' must name one device: {known}")
    return chosen[0]


def _has_devices(path: Path) -> bool:
    try:
        return "device" in tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):  # the policy's own reader says what is wrong
        return False


def _check_columns(columns: Columns, rules: DevicePolicy) -> None:
    """Refuse columns of the recipe's data that the policy file forbids: by a row of their own, or in [allow] columns.

    A list in [allow] holds for tables too, whose columns a device would hold as arrays.
    """
    read = {use: group for use, group in columns.origin.items() if use}
    refuse_guarded(rules.egress, read, f"policy {rules.path}: [egress")
    for modality, group in columns.origin.items() if rules.allowance.columns else ():
        for column in group if modality in columns.modalities else ():
            if column != modality:
                check_array("columns", column, f"[data] modalities {modality}")


def _planned(
    recipe: Recipe, node: NodeConfig, policy: Policy, population: Population | None, unread: str
) -> tuple[Policy, tuple[Planned, ...], str]:
    """Return the policy, the parts of replies that tasks would send, and "".

    The policy is as strict as on a device during a run. If the shapes are not known, the model cannot be built. The
    policy then assumes that the model mixes modalities, and the function returns no parts, but the reason.

    Shapes come from the device's own rows or, without them, from the recipe's data. The sizes in bytes are those of a
    federation whose clients have only the modalities of this device.
    """
    everyone = recipe.model.modalities
    held = [name for name in node.held if name in everyone]  # a whole module names its modalities itself
    # the device builds its model with the recipe's policy
    told = Policy.parse(recipe.egress, everyone, guards=recipe.egress)
    mine = replace(recipe.untimed(), model=recipe.model.reading(held), egress=told.table(node.held))
    unbuilt = policy.for_model(
        node.held, lambda own: Mixing(frozenset(own), "the built model alone shows that it does not")
    )
    if population is None:
        return unbuilt, (), unread
    try:
        assembly = assemble(mine, population=population, one_device=True)
    except DataError as error:
        if node.data:
            raise
        return unbuilt, (), f"the recipe's data cannot be read here ({error})"
    holder = Holder(node.held, everyone, recipe.algorithm.model_spec(recipe.model, everyone, told)[1])
    policy = assembly.engine.announcer.with_model(policy)
    listed = replace(assembly.engine.announcement(node.held), holder=holder, policy=policy)
    listed = replace(listed, required=node.rules.required, mechanism=assembly.fed.privacy)
    found = list(plan(assembly, announcement=listed))
    relay = node.relays(recipe) or not node.data
    fix = f'relay = "{"edge" if recipe.deployment.relay == "edge" else "server-sees"}" in [[device]]'
    shown = (row if relay or row.destination != "silo" else replace(row, allowed=False, fix=fix) for row in found)
    return policy, tuple(shown), ""
