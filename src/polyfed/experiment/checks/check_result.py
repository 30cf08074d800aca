"""The result of a check: what the clients can send in a run of the recipe, and whether the policy allows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.errors import EgressError
from polyfed.experiment.recipes.recipe import Recipe


@dataclass(frozen=True)
class Planned:
    """One part of a message that a task can send: an `Announced` part, with its size.

    Attributes:
        task: the task that sends the message.
        message: the class of the message.
        field: the field of the message.
        kind: the kind of content, one of `KINDS`.
        block: the block of the model that the part belongs to.
        destination: where the part goes, one of `DESTINATIONS`.
        bytes: the size in one reply, as the dry run saw it. If the dry run did not send the part, parameters and
            gradients have the size of their block, and other kinds have None.
        allowed: whether the policy allows the part.
        fix: the line of a policy that would allow the part; empty if the part is allowed.
        bytes_per_row: the additional size for each row that the reply covers.
        in_dry_run: whether the dry run sent the part (`running/dry_run.py`). A part that depends on the state of the
            run or on the data may be sent later, or never.
        tells: what the part reveals in addition to what its kind says; empty for most parts.
        masked: whether the part is masked, so that the server reads only the sum over several clients.
        random: whether the part holds only random numbers, such as public keys, which do not depend on any data.
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
        facts: the clients, the bytes of each block, and the resolved policy, as in run.json.
        planned: all parts of messages that the tasks can send, allowed or not.
        remarks: why the dry run failed, if it did. Sizes may then be missing.
        failure_code: the exit code of a run that fails like the dry run, or 0 if the dry run did not fail.
        why: sentences that explain the refused parts. If the policy has no row for the block `shared`, its rows for the
            modalities also apply to `shared`. For a refused part of `shared`, a sentence then names the modality whose
            policy row refused it. Other sentences explain how a client can train a block without sending it.
        fixes: lines of a policy that would allow the refused parts.
        not_in_ledger: sentences about rows that the server of a simulation reads although no message carries them.
        private: block -> bytes of the parameters in this block that never leave a client, whatever the policy allows.
        guesses: sentences about guesses that polyfed made while it read the data, and about encoders that the recipe
            does not name.
        privacy: the entry `privacy` that result.json will have after the last round; None without the section
            [privacy].
        promises: sentences that state the guarantee of differential privacy.
        node_needs: sentences on what each node of the cluster needs; empty without `[engine] cluster`.
        links: sentences on the measured rates by which the server schedules; empty without them.
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
    node_needs: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    failure_code: int = 0

    @property
    def refused(self) -> tuple[Planned, ...]:
        """The parts that the policy forbids. If there are any, a run ends with exit code 3."""
        return tuple(row for row in self.planned if not row.allowed)

    @property
    def exit_code(self) -> int:
        """The exit code that a run would have: 3 if the policy forbids a part, or else `failure_code`."""
        return EgressError.exit_code if self.refused else self.failure_code
