"""The sections of a recipe that say how it is run, not what is learnt: [engine] and [checkpoint]."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from polyfed.core.schema import EVERY, FRACTION, NOT_NEGATIVE, POSITIVE, between, check_ranges


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The [engine] section.

    Attributes:
        name: `vectorised`, `sequential` or `flower`.
        device: `cpu`, `cuda`, or `auto` (CUDA when there is one).
        threads: of PyTorch on the CPU; 0 leaves its default. Small models run best with 1: threads that wait for
            each other cost more than they give, many times more on a machine that has other work.
        stack: most clients in one stack of the vectorised engine; 0 lets a memory budget decide, and on a CPU does
            not stack models with 2-d convolutions, which are slower so.
        replay: the vectorised engine may write a training step down and replay it: the same bits, sooner. Switch it
            off for a loss of your own that is not a function of its batch alone.
        min_replies: a round in which fewer clients answer ends the run (exit code 4); all, where fewer are asked.
        debug: let a client's exception through, with client, round, task and shapes.
        nodes: flower: clients to wait for before the first round of a deployment; 0 means [clients] num.
        min_nodes: flower: fewer of them by then end the run before its first round (exit code 4); 0 means all.
            A client that contradicts the others (another sample shape, too many classes) is left out, so a run that
            may go on without it needs a `min_nodes`.
        enrol_seconds: flower: how long to wait for them.
        classes: flower: number of classes of a deployment; a client with larger labels is left out. 0 takes the
            smallest number that holds the labels of more than half of the clients, or that of the server's own rows
            if it is larger. Set it where clients lack classes.
        shapes: flower: modality -> shape of its samples, as in `{ image = [1, 28, 28] }`; a client with another
            shape is left out. For a modality that is not listed, the server's own rows decide, or more than half of
            the clients that have it.
        rows_cap: flower: the rows that a client reports count at most so many times the median of all clients,
            since rows are weights and cannot be checked; 0 removes the limit.
        reply_seconds: flower: how long a client may take for a request; a later client is left out of it. A client
            that missed a deadline is asked again, but for the next 2, then 4, ..., 64 requests it is waited for only
            a tenth longer than the others took.
        close_at: flower: a request is closed as soon as this share of the clients asked has replied. Below 1 the
            result depends on which clients are fast; raise [clients] participation to ask more clients than needed.
        away_seconds: flower: how long the server waits for a client whose node signed off or is offline to come
            back, within `reply_seconds`.
        on_refusal: flower: a client whose policy refuses ends the run (exit code 3), or is left out of the ask.
        relay: flower: `server-sees` says that messages between clients of a silo pass through the server, which
            sees them; otherwise algorithms that send any are refused.
        message_megabytes: flower: largest message that is read, in 2**20 bytes.
        client_cpus: flower: CPUs of a client in a simulation; as many clients run at a time as fit the machine.
    """

    name: Literal["vectorised", "sequential", "flower"] = "vectorised"
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    threads: Annotated[int, between(0, 1024)] = 0
    stack: Annotated[int, NOT_NEGATIVE] = 0
    replay: bool = True
    min_replies: Annotated[int, NOT_NEGATIVE] = 1
    debug: bool = False
    nodes: Annotated[int, NOT_NEGATIVE] = 0
    min_nodes: Annotated[int, NOT_NEGATIVE] = 0
    enrol_seconds: Annotated[float, POSITIVE] = 120.0
    classes: Annotated[int, NOT_NEGATIVE] = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rows_cap: Annotated[float, NOT_NEGATIVE] = 10.0
    reply_seconds: Annotated[float, POSITIVE] = 600.0
    close_at: Annotated[float, FRACTION] = 1.0
    away_seconds: Annotated[float, NOT_NEGATIVE] = 30.0
    on_refusal: Literal["stop", "drop"] = "stop"
    relay: Literal["refused", "server-sees"] = "refused"
    message_megabytes: Annotated[int, POSITIVE] = 512
    client_cpus: Annotated[float, POSITIVE] = 1.0

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        check_ranges("[engine]", self)


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """The [checkpoint] section.

    Attributes:
        every: rounds between checkpoints; the last round is always kept; 0 means only the last.
    """

    every: Annotated[int, EVERY] = 1

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        check_ranges("[checkpoint]", self)

    def due(self, round: int, rounds: int) -> bool:
        """Whether this round is kept."""
        return round == rounds or (self.every > 0 and round % self.every == 0)
