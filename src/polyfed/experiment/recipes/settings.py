"""The sections of a recipe that say how a run is executed and when it ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from polyfed.core.errors import RecipeError
from polyfed.core.schema import AT_LEAST_ONE, EVERY, FRACTION, NOT_NEGATIVE, POSITIVE, between, check_ranges


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The [engine] section.

    Attributes:
        name: `vectorised`, `sequential` or `flower`.
        device: `cpu`, `cuda`, or `auto` (CUDA if the machine has it, else the CPU).
        cluster: `ray` trains the clients on the nodes of a Ray cluster (docs/cluster.md), with the results of one
            machine. `workers` is then the number of actors; 0 means one for each core of the cluster. Empty: this
            machine alone.
        address: (`cluster` only) HOST:PORT of the cluster's head. If it is empty, the variable RAY_ADDRESS says it; if
            that is empty too, this machine starts a cluster, unless it already has one.
        workers: the number of processes that train clients. On a CPU, 0 means one process for each core (fewer if
            `threads` is above 1), at most 64. This process runs small requests alone, and the result does not depend on
            the number. On a GPU, 0 or 1 means that this process trains on one GPU. With 2 or more, each worker process
            trains on one GPU, several may share a GPU, and this process stays on the CPU. The last bits of the result
            then depend on the number, unless `stack` is set and all GPUs are of the same kind. Worker processes need
            Linux.
        threads: the number of threads that PyTorch uses on the CPU, in this process and in each worker process. With 0,
            polyfed uses one thread, or PyTorch's default number for large operations that worker processes cannot
            share (docs/performance.md). On small operations, several threads lose more time by waiting than they save,
            above all on a busy machine.
        stack: the largest number of clients in one stack of the vectorised engine. 0 means that the engine chooses the
            number by a memory budget. With 0 on a CPU, clients run one by one if their model has large 2-d
            convolutions, because such a model is slower in a stack.
        replay: whether the vectorised engine records a training step, rewrites it and replays it, which is faster.
            Results may differ in their last bits. With `replay`, a loss that you wrote may read only its two arguments
            (parameters and batch) and the variables that it closes over. Switch `replay` off if your loss reads other
            values.
        min_replies: if fewer clients reply in a round, the run ends with exit code 4. If fewer clients are asked, all
            of them must reply.
        outlier_factor: the server drops a reply whose update is more than this many times as large as the median update
            of the replies (docs/robustness.md); 0 keeps replies of any size. Raise it if honest clients are dropped.
        debug: whether an exception in a client ends the run, with an error that names client, round, task and shapes.
            Otherwise, the run continues, and the round leaves this client out.
    """

    name: Literal["vectorised", "sequential", "flower"] = "vectorised"
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    cluster: Literal["", "ray"] = ""
    address: str = ""
    workers: Annotated[int, between(0, 1024)] = 0
    threads: Annotated[int, between(0, 1024)] = 0
    stack: Annotated[int, NOT_NEGATIVE] = 0
    replay: bool = True
    min_replies: Annotated[int, NOT_NEGATIVE] = 1
    outlier_factor: Annotated[float, NOT_NEGATIVE] = 100.0
    debug: bool = False

    def __post_init__(self) -> None:
        """Check types and ranges of the options.

        Raises:
            RecipeError: an option has a wrong type or value.
        """
        check_ranges("[engine]", self)
        if 0 < self.outlier_factor < 1:
            raise RecipeError(
                f"[engine] outlier_factor = {self.outlier_factor:g} would drop every second reply. "
                "Allowed: 1 or more, or 0 to keep replies of any size",
                ("engine", "outlier_factor"),
            )
        self._check_cluster()

    def _check_cluster(self) -> None:
        faults = {
            "name = 'flower': Flower has its own nodes. Use 'vectorised' or 'sequential'": self.name == "flower",
            "debug = true, which raises a client's exception in this process. Remove one of them": self.debug,
            "device = 'auto', and its nodes may differ. Use 'cpu' or 'cuda'": self.device == "auto",
            "device = 'cuda' without `stack`: this machine cannot see how many clients fit a GPU. Set the largest "
            "number of clients in a stack": self.device == "cuda" and not self.stack and self.name == "vectorised",
        }
        if self.address and not self.cluster:
            raise RecipeError("[engine] address needs cluster = 'ray'", ("engine", "address"))
        found = [text for text, wrong in faults.items() if wrong and self.cluster]
        if found:
            raise RecipeError(f"[engine] cluster = 'ray' with {'; and with '.join(found)}", ("engine", "cluster"))


@dataclass(frozen=True, kw_only=True)
class DeploymentSpec:
    """The [deployment] section: how the server of the engine `flower` deals with the devices.

    Attributes:
        nodes: the number of clients to wait for before the first round of a deployment; 0 means
            [clients] num.
        min_nodes: if fewer clients have connected after `enrol_seconds`, the run ends before its first
            round with exit code 4; 0 means all `nodes`. A client that contradicts the others (another sample shape, too
            many classes) is left out. Set `min_nodes` if the run may go on without such a client.
        enrol_seconds: how many seconds the server waits for clients before the first round. If
            `on_refusal` is `drop`, the wait ends earlier when all `nodes` have enrolled or refused, and `min_nodes`
            have enrolled.
        classes: the number of classes of a deployment. Valid labels are smaller than this number; a
            client with other labels is left out. With 0, the server chooses the smallest number of classes that meets
            two conditions: all labels of the server's own rows are valid, and more than half of the clients have only
            valid labels. Set the number if some clients lack classes.
        shapes: modality -> shape of its samples, as in `{ image = [1, 28, 28] }`; a client with another
            shape is left out. A modality that is not listed has the shape of the server's own rows. If the server has
            no rows, such a modality has the shape that more than half of the clients with this modality report.
        rows_cap: the limit on the number of rows that a client reports, as a multiple of the median
            over all clients. The server reduces larger numbers to the limit, because the numbers are weights and the
            server cannot check them; 0 removes the limit.
        reply_seconds: how many seconds a client has for its reply. The server ignores a later reply. A
            client that missed a deadline still receives later requests. In its next 2 requests, however, the server
            waits for this client at most 1.1 times as long as the other clients took. Each further miss in a row
            doubles the number of these requests, up to 64.
        close_at: the server closes a request as soon as this share of the asked clients has replied. If
            the share is below 1, the result depends on which clients are fast. Use [clients] overselect to ask more
            clients than needed.
        away_seconds: how many seconds the server waits for a client to come back after its node signed
            off or went offline. The wait never exceeds `reply_seconds`.
        on_refusal: if a client's policy refuses a reply, `stop` ends the run (exit code 3) and `drop`
            leaves the client out of the request.
        relay: `server-sees` lets messages between clients of a silo pass through the server, which can
            read them; `refused` refuses algorithms that send such messages.
        message_megabytes: the largest message that the server sends or reads, in units of 2**20 bytes.
            Each device has its own limit, which `polyfed supernode --message-megabytes` sets.
        client_cpus: the number of CPUs for each client in a simulation. The more CPUs a client gets,
            the fewer clients run at the same time on the machine.
    """

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
        """Check types and ranges of the options."""
        check_ranges("[deployment]", self)


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """The [checkpoint] section.

    Attributes:
        every: number of rounds from one checkpoint to the next; 0 means no checkpoints before the last round. The last
            round always has a checkpoint.
        updates: whether the run keeps the update of every client in every round, for `polyfed contribution`. They take
            a model's size for each client of a round.
    """

    every: Annotated[int, EVERY] = 1
    updates: bool = False

    def __post_init__(self) -> None:
        """Check types and ranges of the options."""
        check_ranges("[checkpoint]", self)

    def due(self, round: int, rounds: int) -> bool:
        """Whether a checkpoint is written after this round of `rounds`."""
        return round == rounds or (self.every > 0 and round % self.every == 0)


OWN_VALIDATION = "personal_validation"
"""The group of metrics on the clients' own validation rows."""

CHOOSING = ("validation", OWN_VALIDATION)
"""The groups of metrics that may choose a round or end a run. Test rows never do."""


@dataclass(frozen=True, kw_only=True)
class StopSpec:
    """The [stop] section: which round is the best one, and what ends a run before its last round.

    Attributes:
        metric: the validation metric that chooses the best round, such as `validation.loss` (on the server's validation
            rows) or `personal_validation.weighted` (on the clients' own validation rows: in a deployment, rows of split
            2 of each device). If it is empty, this is the task's metric on the server's validation rows, such as
            `validation.macro_f1`.
        patience: the run ends after this number of evaluations in a row without an improvement of `metric`. If None,
            no metric ends the run.
        min_delta: an improvement must be larger than this.
        max_seconds: the run ends after the round in which its time reaches this number of seconds, resumed parts
            included.
        max_bytes: the run ends after the round in which the bytes sent up and down, evaluations included, reach this
            number.
        max_epsilon: the run ends before the first round that would raise the epsilon of [privacy] above this number.
    """

    metric: str = ""
    patience: Annotated[int | None, AT_LEAST_ONE] = None
    min_delta: Annotated[float, NOT_NEGATIVE] = 0.0
    max_seconds: Annotated[float | None, POSITIVE] = None
    max_bytes: Annotated[int | None, AT_LEAST_ONE] = None
    max_epsilon: Annotated[float | None, POSITIVE] = None

    def __post_init__(self) -> None:
        """Check types and ranges of the options.

        Raises:
            RecipeError: an option is out of range, or `metric` does not come from validation rows.
        """
        check_ranges("[stop]", self)
        group, _, name = self.metric.partition(".")
        if self.metric and (group not in CHOOSING or not name):
            raise RecipeError(
                f"[stop] metric = '{self.metric}': must come from validation rows, because test rows may not choose a "
                "round: validation.NAME (the server's rows) or personal_validation.NAME (the clients' own rows), as in "
                '"validation.loss" or "personal_validation.weighted"',
                ("stop", "metric"),
            )

    @property
    def idle(self) -> dict[str, str]:
        """Return the options that have no effect, each with the setting that makes it ineffective."""
        return {} if self.patience is not None else {"min_delta": "no patience"}

    @property
    def of_clients(self) -> bool:
        """Whether the metric comes from the clients' own validation rows."""
        return self.metric.startswith(f"{OWN_VALIDATION}.")
