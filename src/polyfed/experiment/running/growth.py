"""Whether a deployed run may go on with more clients than it began with.

A new client is where a client is that no earlier round has drawn: it gets the global model and begins its own state at
its first request. That is sound if nothing that the server keeps or has promised depends on the clients of the rounds
before. Whatever else a run has, is refused.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.algorithms import NAMED
from polyfed.core.errors import RecipeError
from polyfed.core.registry import name_of
from polyfed.core.system.files import EGRESS
from polyfed.core.system.json_and_toml import parse_json
from polyfed.experiment.results.records import Records
from polyfed.experiment.running.assembly import Assembly
from polyfed.experiment.running.run_state import KNOWN
from polyfed.federation.client_registry import ClientRegistry

OF_MODEL = ("params", "moments", "memory", "train_loss")
"""The fields of a state that are about the model. `memory` is the selector's, and has to be empty."""


def known_clients(content: Mapping[str, Any]) -> Tensor:
    """Return which clients the run of a checkpoint has had so far, bool; none if an old release did not note them."""
    facts = content.get("federation", {})
    known: Tensor | None = facts.get(KNOWN)
    return facts.get("num_rows", torch.zeros(0)) > 0 if known is None else known


def with_present(known: Tensor, clients: ClientRegistry) -> Tensor:
    """Return which clients a run has had so far if these take part now."""
    result = torch.zeros(max(len(known), len(clients)), dtype=torch.bool)
    result[: len(known)] = known.cpu()
    result[: len(clients)] |= clients.num_rows.cpu() > 0
    return result


def new_clients(assembly: Assembly, content: Mapping[str, Any], records: Records) -> list[int]:
    """Return the clients that the run has not had so far, whatever their numbers: a number may have been left out.

    Args:
        assembly: the run, with the clients that have enrolled now.
        content: the checkpoint.
        records: the folder of the run.

    Raises:
        RecipeError: there are such clients, and something of the run depends on the clients of its first round.
    """
    known = known_clients(content)
    if not known.any():
        return []
    before = set(known.nonzero().flatten().tolist())
    result = [client for client in assembly.fed.clients.eligible if client not in before]
    if result and (why := next(_reasons(assembly, content["state"], records), "")):
        raise RecipeError(
            f"cannot resume: client {result[0]} is new, and this run has had {len(before)} clients: {why}. Go on with "
            "the [clients] num of before, or with its device stopped; or start a run with it in another folder",
            ("clients", "num"),
        )
    return result


def _reasons(assembly: Assembly, state: Any, records: Records) -> Iterator[str]:
    """Yield why a run cannot take new clients."""
    recipe, method = assembly.recipe, assembly.recipe.algorithm
    if assembly.guarantee is not None:
        yield "[privacy] has counted epsilon for a cohort drawn from the clients of the first round"
    if method.secure_aggregation is not None:
        yield "[secure_aggregation] hides a client in a sum, and sums with and without it tell them apart"
    if recipe.clients.partition == "silos":
        yield "[clients] partition = 'silos' fixes the devices of each silo"
    if recipe.attack is not None:
        yield "[attack] has chosen its clients among those of the first round"
    if recipe.network is not None:
        yield "[network] has measured or drawn links for the clients of the first round"
    if any(assembly.population.told or ()):
        yield "[data.columns] has agreed on words and means with the clients of the first round"
    name = f"[algorithm] name = '{name_of(method, NAMED)}'"
    if own := [field.name for field in dataclasses.fields(state) if field.name not in OF_MODEL]:
        yield f"{name} keeps more than the model between rounds ({', '.join(own)}), over the clients of the first round"
    if getattr(state, "memory", None):
        yield "[selection] remembers the clients of the first round"
    if _has_set_up(records):
        yield f"{name} has asked all clients before the first round"


def _has_set_up(records: Records) -> bool:
    """Return whether clients have got or sent anything before the first round."""
    path = records.folder / EGRESS
    with path.open("rb") as file:
        first = file.readline()
    return bool(first) and parse_json(first)["round"] == 0
