"""The sections of a recipe that say how a run is executed and when it ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from polyfed.core.errors import RecipeError, require
from polyfed.core.option_checks import AT_LEAST_ONE, EVERY, FRACTION, NOT_NEGATIVE, POSITIVE, between, check_ranges

APART = ("flower", "devices")
"""The engines whose clients are in processes of their own or on devices."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The [engine] section.

    Attributes:
        name: `vectorised`, `sequential` or `flower`; in a deployment, `polyfed submit` sets `devices`.
        device: `cpu`, `cuda`, or `auto` (CUDA if the machine has it, else the CPU).
        cluster: `ray` trains the clients on a Ray cluster (docs/cluster.md), with the same results; `workers` is then
            the number of actors, 0 for one on each core. Empty: this machine alone.
        address: (`cluster` only) HOST:PORT of the cluster's head, else the variable RAY_ADDRESS, else this machine,
            which starts a cluster unless it has one.
        shared_folder: (`cluster` only) a folder that all nodes read. The command writes the data there, and workers map
            it into memory, instead of sending it to each node (docs/cluster.md).
        workers: number of processes that train clients (Linux only). On a CPU, 0 means one for each core (fewer if
            `threads` is above 1), at most 64, and the result does not depend on the number. On a GPU, 0 or 1 trains in
            this process; with more, each worker trains on one GPU, which several may share, and the last bits depend on
            the number, unless `stack` is set and all GPUs are of the same kind.
        threads: number of threads of PyTorch on the CPU, in each process. 0 is one, or PyTorch's default for large
            operations that worker processes cannot share (docs/performance.md).
        stack: largest number of clients in one stack of the vectorised engine. With 0 it follows from a memory budget,
            and on a CPU clients with large 2-d convolutions, which are slower in a stack, run one by one.
        replay: whether the vectorised engine records, rewrites and replays a training step on a CPU, which is faster;
            the last bits may differ. A loss of yours may then read only its arguments (parameters and batch) and the
            variables that it closes over.
        min_replies: least number of replies, of all clients if fewer are asked; with fewer, the run ends with exit code
            4.
        outlier_factor: the server drops a reply whose update is more than this many times as large as the replies'
            median (docs/robustness.md); 0 drops none.
        combine: `nodes` sums replies that are only averaged where their clients ran, so that workers send sums and not
            each reply; sums are rounded differently (docs/cluster.md).
        debug: whether an exception in a client ends the run, with client, round, task and shapes, instead of leaving
            the client out of the round.
    """

    name: Literal["vectorised", "sequential", "flower", "devices"] = "vectorised"
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    cluster: Literal["", "ray"] = ""
    address: str = ""
    shared_folder: str = ""
    workers: Annotated[int, between(0, 1024)] = 0
    threads: Annotated[int, between(0, 1024)] = 0
    stack: Annotated[int, NOT_NEGATIVE] = 0
    replay: bool = True
    min_replies: Annotated[int, NOT_NEGATIVE] = 1
    outlier_factor: Annotated[float, NOT_NEGATIVE] = 100.0
    combine: Literal["server", "nodes"] = "server"
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

    @property
    def apart(self) -> bool:
        """Whether clients are in processes of their own or on devices, and keep their local state there."""
        return self.name in APART

    def _check_cluster(self) -> None:
        faults = {
            "name = 'flower': Flower has its own nodes. Use 'vectorised' or 'sequential'": self.apart,
            "debug = true, which raises a client's exception in this process. Remove one of them": self.debug,
            "device = 'auto', and its nodes may differ. Use 'cpu' or 'cuda'": self.device == "auto",
            "device = 'cuda' without `stack`: this machine cannot see how many clients fit a GPU. Set the largest "
            "number of clients in a stack": self.device == "cuda" and not self.stack and self.name == "vectorised",
        }
        for name in ("address", "shared_folder"):
            if getattr(self, name) and not self.cluster:
                raise RecipeError(f"[engine] {name} needs cluster = 'ray'", ("engine", name))
        found = [text for text, wrong in faults.items() if wrong and self.cluster]
        if found:
            raise RecipeError(f"[engine] cluster = 'ray' with {'; and with '.join(found)}", ("engine", "cluster"))


LONGEST_PURPOSE = 200
"""Largest number of characters of `[deployment] purpose`, which a device keeps for each run."""


@dataclass(frozen=True, kw_only=True)
class DeploymentSpec:
    """The [deployment] section: how the server of a deployment, or of the engine `flower`, deals with the devices.

    Attributes:
        purpose: what the run is for, as devices name it in [purposes] of their policies, which can refuse others.
        nodes: the number of clients to wait for before the first round of a deployment; 0 means
            [clients] num.
        min_nodes: if fewer clients have connected after `enrol_seconds`, the run ends before its first round with exit
            code 4; 0 means all `nodes`. A client that contradicts the others (another sample shape, too many classes)
            is left out and does not count.
        enrol_seconds: how many seconds the server waits for clients before the first round, at most until all
            registered devices have answered; with `on_refusal = "drop"` only until all `nodes` have enrolled or
            refused, and `min_nodes` enrolled.
        classes: the number of classes; a client with other labels is left out. With 0 it is the smallest for which all
            labels of the server's own rows, and those of more than half of the clients, are valid. Set it if some
            clients lack classes.
        shapes: modality -> shape of its samples, as in `{ image = [1, 28, 28] }`; a client with another is left out.
            Otherwise it is that of the server's own rows, or else that which more than half of the clients with this
            modality report.
        rows_cap: limit on the number of rows that a client reports, a weight that the server cannot check, as a
            multiple of the median over all clients. Larger numbers are reduced to it; 0 removes it.
        reply_seconds: how many seconds a client has for its reply; a later one is ignored. After a miss, the server
            waits for this client in its next 2 requests at most 1.1 times as long as the others took; each further miss
            in a row doubles the number of these requests, up to 64.
        close_at: share of the asked clients whose replies close a request. Below 1, the result depends on which clients
            are fast.
        away_seconds: how many seconds, within `reply_seconds`, the server waits for a client to come back whose node
            signed off or went offline. It waits so once, not again in later requests while the client stays away.
        on_refusal: if a client's policy refuses a reply, `stop` ends the run (exit code 3) and `drop`
            leaves the client out of the request.
        relay: `edge` lets messages within a silo pass through the edge of the silo, a process of its own; `server-sees`
            through the server, which can read them; `refused` refuses algorithms that send such messages.
        message_megabytes: largest message that the server sends or reads, in units of 2**20 bytes. Devices have their
            own limit, `message_megabytes` of their file.
        client_cpus: number of CPUs for each client in a simulation, which limits how many run at the same time.
    """

    purpose: str = ""
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
    relay: Literal["refused", "edge", "server-sees"] = "refused"
    message_megabytes: Annotated[int, POSITIVE] = 512
    client_cpus: Annotated[float, POSITIVE] = 1.0

    def __post_init__(self) -> None:
        """Check types and ranges of the options."""
        check_ranges("[deployment]", self)
        fits = self.purpose.isprintable() and len(self.purpose) <= LONGEST_PURPOSE
        require(fits, "deployment.purpose", self.purpose, f"at most {LONGEST_PURPOSE} printable characters")


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """The [checkpoint] section.

    Attributes:
        every: rounds between two checkpoints; 0 writes one only after the last round, which always has one.
        updates: whether the run keeps every client's update of every round, a model's size each, for `polyfed
            contribution`.
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
        metric: the validation metric that chooses the best round, such as `validation.loss` (the server's rows) or
            `personal_validation.weighted` (the clients' own). Empty: the task's metric on the server's validation rows.
        patience: the run ends after this number of evaluations in a row without an improvement; None does not end it.
        min_delta: an improvement must be larger than this.
        max_seconds: the run ends after the round in which its time, with resumed parts, reaches this number.
        max_bytes: the run ends after the round in which the bytes sent both ways reach this number.
        max_epsilon: the run ends before the round that would raise the epsilon of [privacy] above this number.
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
