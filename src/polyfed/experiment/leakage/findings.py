"""The result of an attack: how much the messages improve the attacker's guesses, with a confidence interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from polyfed.core import keys

Status = Literal["measured", "did not cross", "not in the audited rounds", "no attack"]

LEVEL = 0.95
"""The level of every confidence interval."""

RESAMPLES = 2000
"""The number of bootstrap samples for an interval (Efron and Tibshirani, 1993, Section 13.3, advise at least 1000)."""

FEWEST = 3
"""The smallest number of clients over which the bootstrap resamples."""


@dataclass(frozen=True)
class Target:
    """What an attack reads.

    Attributes:
        attack: the name of the attack.
        kind: the kind of the message's field.
        block: the modality that the field belongs to, or `shared` or `labels`; `all` if the attack reads every block.
        seen_by: the receiver of the field: `server`, `silo`, or `client` for messages of the server to clients.
        field: message and field, such as `Update.params`. Empty if the attack reads several fields together.
    """

    attack: str
    kind: str
    block: str
    seen_by: str = "server"
    field: str = ""


@dataclass(frozen=True)
class Tally:
    """The guesses of an attacker about one client.

    Attributes:
        value: for each guess, its quality from 0 (wrong) to 1 (right), float64 (n,).
        guess: the quality that each guess is compared with, float64 (n,). It is the expected quality of the best guess
            of somebody who has not seen the message.
    """

    value: NDArray[np.float64]
    guess: NDArray[np.float64]

    @classmethod
    def of(cls, value: Any, guess: Any) -> "Tally":
        """Make a tally from anything that NumPy can convert. `guess` may be one number for all guesses."""
        own = np.atleast_1d(np.asarray(value, np.float64))
        return cls(own, np.broadcast_to(np.asarray(guess, np.float64), own.shape))


@dataclass(frozen=True)
class Finding:
    """The result of one attack on one kind of data, such as gradients, of one block.

    Attributes:
        attack, kind, block, seen_by, field: the target of the attack, see `Target`.
        status: `measured`, or why there are no numbers.
        method: how the attacker guesses, in a few words.
        value: mean quality of the attacker's guesses, from 0 to 1.
        guess: mean quality of the best guesses of somebody who has not seen the messages.
        advantage: `value - guess`.
        low, high: the 95 % interval of the advantage.
        clients: number of clients that were attacked.
        guesses: number of guesses.
        raw: mean quality of the same attack on the rows themselves instead of their embeddings. Only attacks on
            embeddings have this number.
        remark: a fact that a reader must know about this finding.
    """

    attack: str
    kind: str
    block: str
    seen_by: str
    field: str
    status: Status
    method: str = ""
    value: float | None = None
    guess: float | None = None
    advantage: float | None = None
    low: float | None = None
    high: float | None = None
    clients: int = 0
    guesses: int = 0
    raw: float | None = None
    remark: str = ""

    @property
    def significant(self) -> bool:
        """Whether the whole interval lies above 0."""
        return self.low is not None and self.low > 0


def measured(
    target: Target,
    method: str,
    tallies: Mapping[int, Tally],
    *,
    raw: float | None = None,
    remark: str = "",
    empty: str = "the attack found nothing to read",
    owners: Mapping[int, int] | None = None,
) -> Finding:
    """Combine the tallies of an attack into a finding.

    Args:
        target: what the attack reads.
        method: how the attacker guesses.
        tallies: client -> its guesses.
        raw: see `Finding`.
        remark: see `Finding`.
        empty: the remark if there are no guesses.
        owners: client -> the group of clients with the same rows, such as its silo. None if every client has its own
            rows.

    Returns:
        The finding. Its status is `no attack` if there are no guesses.
    """
    place = vars(target)
    kept = {client: tally for client, tally in sorted(tallies.items()) if len(tally.value)}
    if not kept:
        return Finding(**place, status="no attack", method=method, remark=empty)
    groups: dict[int, list[Tally]] = {}
    for client, tally in kept.items():
        groups.setdefault(client if owners is None else owners[client], []).append(tally)
    result = [
        Tally(*(np.concatenate([getattr(tally, name) for tally in group]) for name in ("value", "guess")))
        for group in groups.values()
    ]
    value, guess = (float(np.concatenate([getattr(t, name) for t in result]).mean()) for name in ("value", "guess"))
    low, high = interval(result)
    return Finding(
        **place,
        status="measured",
        method=method,
        value=value,
        guess=guess,
        advantage=value - guess,
        low=low,
        high=high,
        clients=len(kept),
        guesses=sum(len(tally.value) for tally in result),
        raw=raw,
        remark=remark,
    )


def interval(tallies: Sequence[Tally]) -> tuple[float, float]:
    """Return the 95 % interval of the advantage.

    If there are at least three clients, the interval is a percentile bootstrap that resamples clients, because guesses
    about one client depend on each other. Clients with the same rows count as one client.

    If there are fewer clients, or if all clients have the same mean advantage, the interval is computed from single
    guesses. It is the exact binomial interval (Clopper and Pearson, 1934) if each guess is either right or wrong.
    Otherwise, it is a bootstrap that resamples guesses.

    Args:
        tallies: at least one tally with at least one guess.
    """
    value, guess = (np.concatenate([getattr(tally, name) for tally in tallies]) for name in ("value", "guess"))
    gains = np.array([(tally.value - tally.guess).sum() for tally in tallies])
    sizes = np.array([len(tally.value) for tally in tallies], np.float64)
    if len(tallies) >= FEWEST and np.ptp(gains / sizes) > 0:
        return _bootstrap(gains, sizes)
    if np.isin(value, (0.0, 1.0)).all():
        exact = stats.binomtest(int(value.sum()), len(value)).proportion_ci(LEVEL, "exact")
        return float(exact.low - guess.mean()), float(exact.high - guess.mean())
    return _bootstrap(value - guess, np.ones(len(value)))


def _bootstrap(gains: NDArray[np.float64], sizes: NDArray[np.float64]) -> tuple[float, float]:
    """The percentile interval of sum(gains) / sum(sizes). Each gain is drawn together with its size."""
    draws = keys.generator(keys.key("bootstrap")).integers(0, len(gains), (RESAMPLES, len(gains)))
    means = gains[draws].sum(1) / sizes[draws].sum(1)
    low, high = np.quantile(means.clip(-1.0, 1.0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
