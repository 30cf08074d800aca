"""Checks that the LoRA ranks of the clients and the aggregation of adapters fit the rest of the recipe."""

from typing import Any

from polyfed.algorithms import NAMED
from polyfed.algorithms.averaging import Averaging
from polyfed.core.errors import RecipeError
from polyfed.core.registry import name_of
from polyfed.core.tree import block_of, blocks, select
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.federation.adapters import RULES
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.client_ranks import ClientRanks
from polyfed.model import Model
from polyfed.model.encoders.lora import pairs
from polyfed.selection import Uniform

_TEMPLATE = ("model_spec", "round", "update", "local", "outgoing", "direction", "reply", "merge", "own_params")
"""Hooks of `Averaging`. An algorithm that overrides one of them computes with whole parameters."""

_COMBINING = ("round", "merge")
"""Hooks of `Averaging` that combine the replies according to the rule of `[server] aggregate`."""

_NEEDS_ADAPTERS = (
    "the model has no LoRA adapters that train. Give an encoder of kind 'hf' the option lora, e.g. lora = { r = 8, "
    "target_modules = ['query', 'value'] }, or remove this"
)


def client_ranks(recipe: Recipe, model: Model, num_clients: int | None) -> ClientRanks:
    """Return the ranks of the clients.

    Args:
        num_clients: number of clients, or None on a device that checks a recipe and does not know this number.

    Raises:
        RecipeError: the ranks, or the aggregation of adapters, do not fit the model or another section.
    """
    server, ranks = getattr(recipe.algorithm, "server", ServerOptimiser()), recipe.clients.ranks
    template = model.template
    adapters = pairs(template)
    way = server.aggregate
    if way in RULES and (why := _unfit_way(recipe, server, bool(adapters))):
        raise RecipeError(f"[server] aggregate = '{way}': {why}", ("server", "aggregate"))
    if getattr(recipe.algorithm, "repair", 0.0) and (why := _unfit_repair(recipe, bool(adapters))):
        raise RecipeError(f"[algorithm] repair: {why}", ("algorithm", "repair"))
    if ranks is None:
        return ClientRanks()
    why = _unfit(recipe, model, way) or _unfit_values(ranks, [len(template[a]) for a, _ in adapters], num_clients)
    if why:
        raise RecipeError(f"[clients] ranks = {ranks}: {why}", ("clients", "ranks"))
    return ClientRanks(tuple(ranks), template)


def _unfit_way(recipe: Recipe, server: ServerOptimiser, has_adapters: bool) -> str:
    """Return why the server cannot use the rule for adapters that `[server] aggregate` names, or "" if it can."""
    method = recipe.algorithm
    if not has_adapters:
        return _NEEDS_ADAPTERS
    if any(getattr(type(method), hook, None) is not getattr(Averaging, hook) for hook in _COMBINING):
        name = name_of(method, NAMED)
        return f"algorithm '{name}' combines replies in its own way. Take fedavg or fedprox, or aggregate = 'mean'"
    if server.aggregate == "flexlora" and (server.optimiser != "none" or server.lr != 1.0):
        return (
            "it replaces the adapters by the factors of a matrix in every round, so a step from the old factors has no "
            "meaning. Remove optimiser and lr, or take 'hetlora' or 'fedilora'"
        )
    return ""


def _unfit_repair(recipe: Recipe, has_adapters: bool) -> str:
    """Return why clients cannot repair adapters after local training, or "" if they can."""
    if not has_adapters:
        return _NEEDS_ADAPTERS
    if getattr(type(recipe.algorithm), "update", None) is not Averaging.update:
        name = name_of(recipe.algorithm, NAMED)
        return f"algorithm '{name}' trains in its own way. Take fedavg or fedprox, or remove repair"
    return ""


def _unfit_values(ranks: list[int], model_ranks: list[int], num_clients: int | None) -> str:
    """Return why the ranks do not fit the adapters or the number of clients, or "" if they fit."""
    if not model_ranks:
        return _NEEDS_ADAPTERS
    largest = max(model_ranks)
    if max(ranks) > largest:
        return f"the largest adapter has r = {largest}. Raise r in the option lora, or lower the ranks"
    if max(ranks) < largest:
        return f"no client would train the ranks above {max(ranks)} of the adapters. Set r = {max(ranks)} in lora"
    if num_clients is not None and len(ranks) > num_clients:
        return f"there are {num_clients} clients, so only the first {num_clients} entries count. Remove the others"
    return ""


def _unfit(recipe: Recipe, model: Model, way: str) -> str:
    """Return why the rest of the recipe does not allow clients with different LoRA ranks, or "" if it allows them."""
    method = recipe.algorithm
    kind = type(method)
    name = name_of(method, NAMED)
    if not isinstance(method, Averaging):
        return f"algorithm '{name}' does not average parameters. Take one that does, such as fedavg, or remove ranks"
    if replaced := [hook for hook in _TEMPLATE if getattr(kind, hook) is not getattr(Averaging, hook)]:
        return (
            f"algorithm '{name}' replaces {replaced[0]} of the averaging template, and computes there with parameters "
            "that all clients must have in the same shape. Take fedavg or fedprox, or remove ranks"
        )
    if way != "mean" and way not in RULES:
        return f"[server] aggregate = '{way}' compares whole replies. Use 'mean', 'hetlora', 'flexlora' or 'fedilora'"
    if type(method.selector) is not Uniform:
        return "the selector compares the updates of clients, whose shapes then differ. Remove [selection]"
    if kept := {block_of(a) for a, _ in pairs(method.private_names(model))}:
        return f"[algorithm] private keeps the adapters of '{min(kept)}' at the clients. Remove the block, or ranks"
    if recipe.privacy is not None or method.secure_aggregation is not None:
        return "[privacy] and [secure_aggregation] need replies of the same shape. Remove them, or ranks"
    if method.fine_tune:
        return "fine_tune makes whole models of the clients' own. Remove fine_tune, or ranks"
    if recipe.attack is not None and recipe.attack.name == "alie":
        return "[attack] 'alie' averages the updates of attackers, whose shapes then differ. Take another attack"
    return ""


def rank_facts(ranks: ClientRanks) -> dict[str, Any]:
    """Return the entry `ranks` of run.json; empty without ranks.

    For each rank, the entry holds the size in bytes of each block of a client with this rank.
    """
    if not ranks.ranks:
        return {}
    result: dict[str, dict[str, int]] = {}
    for rank in sorted({*ranks.ranks}, reverse=True):
        shapes = ranks.shapes_at(rank)
        tree = {
            name: value[tuple(map(slice, shapes[name]))] if name in shapes else value
            for name, value in ranks.template.items()
        }
        result[str(rank)] = {
            block: sum(v.numel() * v.element_size() for v in select(tree, [block]).values()) for block in blocks(tree)
        }
    return {"ranks": result}
