"""The arrays of a device's data that a recipe may use as labels, sample ids, split or class names.

The recipe comes from the server, but the arrays belong to the device. Labels have policy rows of their own. So if a
recipe could name any array as the labels, it could let a modality leave that the policy keeps on the device.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from polyfed.core.errors import NotAllowed
from polyfed.core.messages import LABELS
from polyfed.core.registry import check_array
from polyfed.core.tree import SHARED
from polyfed.data.sources.own.npz import ROWS, Npz
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.privacy.egress.policy import EVERY

ELSEWHERE = Npz(path="", standardise=False)
"""The data source that replaces a recipe's [data] on a device, because the device has its own rows."""

ROLES = ("label", "ids", "split", "class_names")
"""The keys of [data] that name an array which a device reads."""


def standard(role: str) -> str:
    """Return the name that an array with this role has, unless a recipe's [data] gives another name."""
    name: str = getattr(ELSEWHERE, role)
    return name


def named_arrays(recipe: Recipe) -> dict[str, str]:
    """Return role -> array, for the roles of `ROLES` to which the recipe's [data] gives an array."""
    if not isinstance(recipe.data, Npz):
        return {}
    named = {role: getattr(recipe.data, role) for role in ROLES}
    return {role: name for role, name in named.items() if name and (role, name) != ("ids", ROWS)}


def array_names(recipe: Recipe) -> dict[str, str]:
    """Return role -> array, for all of `ROLES`: the name in the recipe's [data], or the standard name."""
    return {role: standard(role) for role in ROLES} | named_arrays(recipe)


def joined_arrays(recipe: Recipe) -> list[tuple[str, str]]:
    """Return (modality, array) for each array that a recipe joins to a modality."""
    if not isinstance(recipe.data, Npz) or not isinstance(recipe.data.modalities, Mapping):
        return []
    groups = recipe.data.modalities.items()
    return [(name, array) for name, group in groups for array in ([group] if isinstance(group, str) else group)]


def check_arrays(recipe: Recipe, protected: Iterable[str]) -> None:
    """Refuse arrays that the recipe may not use on this device.

    Call this function inside `registry.only(node.rules.allowance)`.

    Args:
        protected: the modalities of the device, and the names of the rows of its policy.

    Raises:
        NotAllowed: an array is a modality or has a policy row of its own, or its name is not the standard name and the
            owner has not allowed it.
    """
    modalities = {*protected, *recipe.model.modalities} - {SHARED, LABELS, EVERY}
    method: Any = recipe.algorithm
    for name in getattr(method, "groups", {}):
        if (
            any(name in (modality, f"{modality}_present") for modality in modalities)
            or name == array_names(recipe)["ids"]
        ):
            raise NotAllowed(
                f"[algorithm] groups: '{name}' is a modality, an array with a policy row of its own, or the sample "
                "ids. No policy file can allow that",
                ("algorithm", "groups"),
            )
        check_array("groups", name, "[algorithm] groups")
    for modality, name in joined_arrays(recipe):
        others = {*modalities, *array_names(recipe).values(), Npz.client, Npz.person}
        if name != modality and name in others:
            raise NotAllowed(
                f"[data] modalities {modality}: '{name}' is another modality, or an array with another meaning. No "
                "policy file can allow that. Name other arrays"
            )
        if name != modality:
            check_array("columns", name, f"[data] modalities {modality}")
    for role, name in named_arrays(recipe).items():
        if any(name in (modality, f"{modality}_present") for modality in modalities):
            raise NotAllowed(
                f"[data] {role} = '{name}' names a modality, or an array with a policy row of its own. No policy file "
                "can allow that. Name another array, or remove the key",
                ("data", role),
            )
        if name != standard(role):
            check_array(role, name)
