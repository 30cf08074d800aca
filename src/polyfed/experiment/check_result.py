"""The result of a check: what a recipe can let cross from its clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.experiment.recipe import Recipe


@dataclass(frozen=True)
class Planned:
    """One part of a message that a task can send: an `Announced` part, with its size.

    Attributes:
        task: the task that sends it.
        message: the class of the message.
        field: the field of the message.
        kind: the kind of content, one of `KINDS`.
        block: the block of the model it belongs to.
        destination: where it goes, one of `DESTINATIONS`.
        bytes: the size in one reply: as the dry run saw it, else the size of the block (parameters, gradients), else
            None.
        allowed: whether the policy allows it.
        fix: the line of a policy that would allow it; empty if it is allowed.
        bytes_per_row: the additional size for each row that the reply covers.
        in_dry_run: whether the dry run sent it (`polyfed.experiment.dry_run`). A part that depends on the state of the
            run or on the data may be sent later, or never.
        tells: what it reveals beyond what its kind says; empty for most.
        masked: whether it is masked, so that the server reads only its sum over several clients.
        random: whether it holds only random numbers that depend on no data, such as public keys.
    """

    task: str
    message: str
    field: str
    kind: str
    block: str
    destination: str
    bytes: int | None
    allowed: bool
    fix: str = ""
    bytes_per_row: float = 0.0
    in_dry_run: bool = False
    tells: str = ""
    masked: bool = False
    random: bool = False


@dataclass(frozen=True)
class CheckResult:
    """The facts that `polyfed check` finds. `Check` also shows them.

    Attributes:
        recipe: the recipe, with an encoder for every modality.
        facts: clients, blocks and their bytes, the resolved policy; as in run.json.
        planned: everything that can cross, allowed or not.
        remarks: why the dry run failed, if it did; sizes may then be missing.
        why: why `shared` may not send something that no row of its own forbids.
        fixes: lines of a policy that would allow what it forbids.
        not_in_ledger: what a simulation gives the server about clients' rows without a message.
        private: block -> bytes of its parameters that every client keeps, whatever the policy allows.
        guesses: sentences on what was guessed while the data was read, and on encoders that the recipe does not name.
        privacy: the entry `privacy` of result.json as it will be after the last round; None without [privacy].
        promises: the guarantee of differential privacy in sentences.
    """

    recipe: Recipe
    facts: dict[str, Any]
    planned: tuple[Planned, ...]
    remarks: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    not_in_ledger: tuple[str, ...] = ()
    private: Mapping[str, int] = field(default_factory=dict)
    guesses: tuple[str, ...] = ()
    privacy: dict[str, Any] | None = None
    promises: tuple[str, ...] = ()

    @property
    def refused(self) -> tuple[Planned, ...]:
        """The parts that the policy forbids; if there are any, a run ends with exit code 3."""
        return tuple(row for row in self.planned if not row.allowed)
