"""Facts about rounds and runs: what the ledger shows, the times, the logged numbers and tables, and the versions."""

import math
import platform
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from polyfed.core.errors import PolyfedWarning, RecipeError, counted
from polyfed.federation.clock import LATE
from polyfed.privacy.egress.ledger import TO_CLIENT, Entry


def facts_of_round(round: int, entries: Sequence[Entry]) -> dict[str, Any]:
    """The facts about a round that follow from the ledger: cohort, trainers of each block, bytes up and down."""
    asked: set[int] = set()
    trained: dict[str, set[int]] = {}
    up = down = 0
    for entry in entries:
        if entry.destination == TO_CLIENT:
            asked.update(entry.clients)
            down += entry.bytes
            continue
        up += entry.bytes
        for crossing in entry.crossings:
            if (
                crossing.kind == "parameters" and entry.destination == "server"
            ):  # parameters that stay in a silo will be sent again by its edge
                trained.setdefault(crossing.block, set()).update(entry.clients)
    return {
        "round": round,
        "cohort": sorted(asked),
        "trained": {block: sorted(trained[block]) for block in sorted(trained)},  # entries come in no fixed order
        "bytes_up": up,
        "bytes_down": down,
    }


def seconds_of(rounds: Sequence[float]) -> dict[str, float]:
    """The times of result.json, in seconds: the first round, which also warms up, and the median of the others.

    Args:
        rounds: the time of each round. If there is only one round, its time is also the median.
    """
    if not rounds:
        return {"seconds_per_round": 0.0}
    return {"seconds_per_round": statistics.median(rounds[1:] or rounds), "seconds_first_round": rounds[0]}


def check_tables(tables: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Return the tables that an algorithm logs, after checking that all rows of a table have the same length.

    Raises:
        RecipeError: two rows of a table have different lengths.
    """
    for name, rows in tables.items():
        if len({len(row) for row in rows}) > 1:
            raise RecipeError(
                f"observe_tables: the rows of '{name}' have {[len(row) for row in rows]} entries; make them equal"
            )
    return tables


def means_of(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each logged number over the rounds that logged it."""
    result: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            result.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in result.items()}


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    names = ("polyfed", "torch", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def untrained(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence if no parameter changed in any round, although clients trained; otherwise nothing.

    Args:
        rounds: the rows of rounds.jsonl.
    """
    # those of the clients decide where a method has them, because a mean of equal models differs by rounding
    norms = [norm for row in rounds for norm in (row["norms"]["clients"] or row["norms"]["model"]).values()]
    if not norms or any(norms) or not any(row["cohort"] for row in rounds):
        return []
    return [
        f"no parameter of the model changed in {counted(len(rounds), 'round', 'rounds')}, so nothing was learnt: every "
        "training step was left out, or had no effect. See [train] lr and its schedule, batch_size, [limits] and the "
        "rows of the clients"
    ]


FEWEST_ROUNDS = 8
"""With fewer rounds, `still_falls` says nothing."""

TREND, FALL = 2.576, 0.05
"""The quantile of the normal distribution, and the least fall relative to the last losses, of `still_falls` (ours)."""


def still_falls(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the fall of the training loss in the last half of the rounds, if more rounds would teach the model more.

    The loss must fall by Mann and Kendall's test for a trend (one-sided, 0.5 %), so that noise alone seems to fall in
    one of 200 runs, and by `FALL`. The loss on validation rows, or else on test rows, must not rise meanwhile: it must
    fall from the first to the last third of its values, and be lowest in the last one.

    Args:
        rounds: the rows of rounds.jsonl.
    """
    last = rounds[-max(FEWEST_ROUNDS, (len(rounds) + 1) // 2) :]
    losses = [row["train_loss"] for row in last]
    if len(last) < FEWEST_ROUNDS or any(loss is None or not math.isfinite(loss) for loss in losses):
        return None
    n = len(losses)
    signs = [
        (later > sooner) - (later < sooner) for place, sooner in enumerate(losses) for later in losses[place + 1 :]
    ]
    if sum(signs) + 1 > -TREND * math.sqrt(n * (n - 1) * (2 * n + 5) / 18):
        return None
    first, end = _ends(losses)
    if first - end < FALL * abs(end):
        return None
    for group in ("validation", "personal_validation", "global"):
        told = [row["metrics"][group]["loss"] for row in last if "loss" in row.get("metrics", {}).get(group, {})]
        if len(told) > 1:
            before, after = _ends(told)
            rises = after > before or min(told) < min(told[-max(1, len(told) // 3) :])
            return None if rises else {"first": first, "last": end, "rounds": n}
    return {"first": first, "last": end, "rounds": n}


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and of the last third of these values."""
    third = max(1, len(values) // 3)
    return statistics.fmean(values[:third]), statistics.fmean(values[-third:])


def warn_silent(rounds: Sequence[Mapping[str, Any]]) -> None:
    """Warn, after training, about clients whose replies were missing in every round in which they were asked.

    The function does not warn about clients whose replies were only late, because the recipe wants this: its [network]
    or `overselect` drops late replies.

    Args:
        rounds: the rows of rounds.jsonl.
    """
    asked = {client for row in rounds for client in row["cohort"]}
    answered = {client for row in rounds for client in row["cohort"] if str(client) not in row["missing"]}
    reasons = {int(client): why for row in reversed(rounds) for client, why in row["missing"].items()}
    silent = [client for client in sorted(asked - answered) if not reasons[client].startswith(LATE)]
    if not silent:
        return
    warnings.warn(
        f"{len(silent)} of {len(asked)} clients gave no usable reply in any round, so nothing was learnt from their "
        f"data. Client {silent[0]}: {reasons[silent[0]]}",
        PolyfedWarning,
        stacklevel=2,
    )
