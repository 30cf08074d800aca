"""The sections of a recipe that say how a run is executed, not what it learns: [engine] and [checkpoint]."""

from dataclasses import dataclass
from typing import Annotated, Literal

from polyfed.core.schema import EVERY, NOT_NEGATIVE, POSITIVE, between, check_ranges


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The [engine] section.

    Attributes:
        name: `vectorised`, `sequential` or `flower`.
        device: `cpu`, `cuda`, or `auto` (CUDA when there is one).
        threads: the number of threads PyTorch uses on the CPU; 0 keeps PyTorch's default. Small models run fastest
            with 1, because threads spend more time waiting for each other than they save, above all on a busy machine.
        stack: the largest number of clients in one stack of the vectorised engine; 0 chooses it by a memory budget,
            and on a CPU does not stack models with 2-d convolutions, which run slower when stacked.
        replay: whether the vectorised engine may record a training step and replay it, which is faster and gives the
            same bits. Switch it off for a loss of your own that is not a function of its batch alone.
        min_replies: if fewer clients reply in a round, the run ends with exit code 4; if fewer clients are asked, all
            must reply.
        debug: raise a client's exception instead of leaving the client out, with client, round, task and shapes.
        nodes: flower: the number of clients to wait for before the first round of a deployment; 0 means [clients] num.
        min_nodes: flower: if fewer clients have connected after `enrol_seconds`, the run ends before its first round
            with exit code 4; 0 means all `nodes`.
        enrol_seconds: flower: how long to wait for clients before the first round, in seconds.
        reply_seconds: flower: how long a client may take to reply, in seconds; a later reply is ignored.
        on_refusal: flower: if a client's policy refuses a reply, `stop` ends the run (exit code 3) and `drop` leaves
            the client out of the request.
        relay: flower: `server-sees` lets messages between clients of a silo pass through the server, which can read
            them; `refused` refuses algorithms that send such messages.
        message_megabytes: flower: the largest message that is read, in units of 2**20 bytes.
        client_cpus: flower: CPUs per client in a simulation; as many clients run at a time as fit on the machine.
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
    reply_seconds: Annotated[float, POSITIVE] = 600.0
    on_refusal: Literal["stop", "drop"] = "stop"
    relay: Literal["refused", "server-sees"] = "refused"
    message_megabytes: Annotated[int, POSITIVE] = 512
    client_cpus: Annotated[float, POSITIVE] = 1.0

    def __post_init__(self) -> None:
        """Check types and ranges of the options."""
        check_ranges("[engine]", self)


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """The [checkpoint] section.

    Attributes:
        every: write a checkpoint after every so many rounds, and always after the last one; 0 means only the last.
    """

    every: Annotated[int, EVERY] = 1

    def __post_init__(self) -> None:
        """Check types and ranges of the options."""
        check_ranges("[checkpoint]", self)

    def due(self, round: int, rounds: int) -> bool:
        """Whether a checkpoint is written after this round of `rounds`."""
        return round == rounds or (self.every > 0 and round % self.every == 0)
