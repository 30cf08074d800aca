"""The devices of each silo, and the check that they hold the same samples."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from polyfed.core.errors import DataError, RecipeError, TooFewReplies
from polyfed.federation.client_registry import ClientRegistry

Overlap = Literal["exact", "common", "all"]
"""Which samples of a silo take part in training; see `Vertical`."""

SHOWN = 5
"""The largest number of ids that an error message lists. The message counts the remaining ids."""


def devices_of_silos(clients: ClientRegistry, overlap: Overlap = "exact") -> dict[int, list[int]]:
    """Return, for each silo, the devices that have rows, in ascending order. Silos without rows are left out.

    Args:
        clients: the client registry.
        overlap: the option `overlap` of `Vertical`. Under `exact`, only one device of a silo may hold a
            modality.

    Raises:
        RecipeError: the clients form no silos, or under `exact` two devices of one silo hold the same modality.
    """
    if clients.silo is None:
        raise RecipeError("the algorithm needs silos: [clients] partition = 'silos'", ("clients", "partition"))
    silos: dict[int, list[int]] = {}
    for client in clients.eligible:
        silos.setdefault(int(clients.silo[client]), []).append(client)
    for silo, members in silos.items():
        if overlap == "exact" and bool((clients.holds[members].sum(0) > 1).any()):
            raise RecipeError(
                f"silo {silo}: devices {', '.join(map(str, members))} hold a modality twice; in [clients] holdings "
                "every modality belongs to one device. If these devices hold different samples, set [algorithm] "
                "overlap = 'common' or 'all'",
                ("clients", "holdings"),
            )
    return dict(sorted(silos.items()))


def members_of(clients: ClientRegistry, client: int) -> list[int]:
    """Return the devices with rows in the silo of this device."""
    assert clients.silo is not None, "there is no run without silos"
    result: list[int] = ((clients.silo == clients.silo[client]) & (clients.num_rows > 0)).nonzero().flatten().tolist()
    return result


def check_aligned(silo: int, ids: Mapping[int, Tensor]) -> None:
    """Refuse devices that do not hold the same samples in the same order.

    Args:
        silo: the silo's number, for the error.
        ids: the sample ids of the rows of every device that answered, int64 (N_m,).

    Raises:
        TooFewReplies: no device answered.
        DataError: two devices differ; the message names the devices and the ids.
    """
    if not ids:
        raise TooFewReplies(f"silo {silo}: none of its devices sent its sample ids; see the events for the reasons")
    (first, wanted), *others = ids.items()
    for client, found in others:
        if torch.equal(found, wanted):
            continue
        who = f"silo {silo}: devices {first} and {client} are not aligned"
        missing, foreign = (_without(a, b) for a, b in ((wanted, found), (found, wanted)))
        if len(missing) or len(foreign):
            facts = f"only {first} has ids {_listed(missing)}, only {client} has ids {_listed(foreign)}"
        elif len(found) != len(wanted):
            facts = f"{len(wanted)} and {len(found)} rows of the same ids: some occur twice"
        else:
            row = int((found != wanted).nonzero()[0, 0])
            facts = f"the same ids in another order, first at row {row}: {int(wanted[row])} and {int(found[row])}"
        raise DataError(
            f"{who}: {facts}. Give all devices of a silo the same samples, sorted by id; or set "
            "[algorithm] overlap = 'common', which uses the samples that all hold, or 'all'"
        )


def _without(a: Tensor, b: Tensor) -> list[int]:
    result: list[int] = a[~torch.isin(a, b)].tolist()
    return result


def _listed(ids: list[int]) -> str:
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return (", ".join(map(str, ids[:SHOWN])) or "none") + more
