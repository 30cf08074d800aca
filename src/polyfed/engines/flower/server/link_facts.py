"""Facts from a SuperLink's database: the number of SuperNodes, and the ids and statuses of runs."""

import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from alembic.util.exc import CommandError
from flwr.supercore.constant import NodeStatus

from polyfed.core.errors import RecipeError
from polyfed.engines.flower.server.device_keys import PEM, fingerprint

LATEST = 10
"""Most runs in the list, which begins with the latest run."""


def link_facts(state: Any) -> dict[str, Any]:
    """Return facts about the SuperNodes and the latest runs.

    Args:
        state: the SuperLink's state.

    Returns:
        A table with three entries. `nodes` holds the numbers of `registered` and `online` SuperNodes, `away` holds the
        fingerprints of the keys of registered SuperNodes that are not online, and `runs` holds the `id` and `status` of
        each run.
    """
    nodes = [node for node in state.get_node_info() if node.status != NodeStatus.UNREGISTERED]
    online = sum(node.status == NodeStatus.ONLINE for node in nodes)
    absent = [bytes(node.public_key) for node in nodes if node.status != NodeStatus.ONLINE]
    away = sorted(fingerprint(key) for key in absent if key.startswith(PEM))
    runs = state.get_run_info(order_by="pending_at", ascending=False, limit=LATEST)
    told = [
        {"id": str(run.run_id), "status": ":".join(filter(None, (run.status.status, run.status.sub_status)))}
        for run in runs
    ]
    return {"nodes": {"registered": len(nodes), "online": online}, "away": away, "runs": told}


def shrink(path: str) -> None:
    """Give the free pages of a SuperLink's database back to the disk, if they are more than half of it.

    Flower deletes the messages of ended runs, but the file keeps its size. Call this before the SuperLink starts. If
    the disk has no room for a second copy, or the file is damaged, it stays as it is.
    """
    with suppress(sqlite3.Error), closing(sqlite3.connect(path, isolation_level=None)) as rows:
        (free,), (pages,) = (rows.execute(f"PRAGMA {name}").fetchone() for name in ("freelist_count", "page_count"))
        if 2 * free > pages:
            rows.execute("VACUUM")
            rows.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@contextmanager
def database_of_this_release(path: str) -> Iterator[None]:
    """Check, during the first use of a SuperLink's database, that this release of Flower can use it.

    Flower upgrades an older database automatically.

    Args:
        path: the file of the database.

    Raises:
        RecipeError: a newer release of Flower has written the database.
    """
    try:
        with warnings.catch_warnings():  # about Flower's use of Alembic, which an operator cannot change
            warnings.filterwarnings("ignore", "No path_separator found", DeprecationWarning)
            yield
    except CommandError as error:
        raise RecipeError(
            f"{path} was written by another release of Flower ({error}). Move it elsewhere and start again: the "
            "devices' keys are registered anew, and `polyfed submit` goes on from the run's last checkpoint"
        ) from None
