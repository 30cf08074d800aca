"""The announcement: a list of everything that a client's replies can hold, and whether the policy allows each part.

polyfed computes the list from the declarations of each task's message, the blocks of the client and the algorithm's
options. `polyfed check` prints the list. `EgressGate.release` lets a part of a reply leave only if the list contains
the part and the policy allows it. So only parts that `check` has announced can leave.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.messages import LABELS, MODALITIES, OF_THE_MODEL, READ, Crossing, Declared, Message, tensors
from polyfed.core.tasks import answers_of
from polyfed.core.tree import SHARED, block_of
from polyfed.model import Model
from polyfed.objective import Objective
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.privacy.egress.mixing import Trained, mixing
from polyfed.privacy.egress.policy import Policy, refusal
from polyfed.privacy.egress.requirements import NO_REQUIREMENTS, Requirements


class Asking(Trained, Protocol):
    """The part of `polyfed.algorithms.Algorithm` that an announcement uses."""

    def will_ask(self, task: str, *, tested: bool) -> bool:
        """Return whether the server may send this task to clients in the run.

        Args:
            task: the task's name.
            tested: whether some clients have their own test rows.
        """

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Return whether a field of a task's reply can contain data of a block."""

    def private_names(self, model: Model) -> frozenset[str]:
        """Return the names of the parameters and buffers that clients keep and never send."""


@dataclass(frozen=True)
class PrivateNames:
    """The parameters and buffers of the model that clients keep and never send.

    Attributes:
        names: the names of these parameters and buffers.
        blocks: the blocks in which every parameter and buffer is private.
    """

    names: frozenset[str] = frozenset()
    blocks: frozenset[str] = frozenset()

    @classmethod
    def of(cls, method: Asking, model: Model) -> "PrivateNames":
        """Return the private names of a method, and the blocks of the model that hold only private names."""
        names = method.private_names(model)
        rest = {block_of(name) for name in model.names(model.modalities) if name not in names}
        return cls(names, frozenset(map(block_of, names)) - rest)


@dataclass(frozen=True)
class Holder:
    """Translates words in a declaration's `blocks`, such as `MODALITIES`, into the modalities of a client.

    Attributes:
        own: the modalities of the client.
        everyone: the modalities of the federation.
        read: the modalities that the model reads.
    """

    own: tuple[str, ...]
    everyone: tuple[str, ...]
    read: tuple[str, ...]

    def names(self, said: Declared) -> tuple[str, ...]:
        """Return the names that tensors of a tree may have. For parameters and gradients, return the allowed blocks.

        If the field holds a single tensor instead of a tree, the result is empty. A single tensor has no name.
        """
        held = self.everyone if said.whole else self.own
        words = {MODALITIES: held, READ: tuple(m for m in held if m in self.read)}
        return tuple(dict.fromkeys(name for word in said.blocks or () for name in words.get(word, (word,))))

    def blocks(self, said: Declared) -> tuple[str, ...]:
        """Return the blocks to which the policy and the ledger assign the parts of a field."""
        if said.kind == "labels":
            return (LABELS,)
        return (said.of or SHARED,) if said.bare else self.names(said)


@dataclass(frozen=True)
class Announced:
    """One part that a reply to a task can hold.

    Attributes:
        task: name of the task.
        message: name of the reply's message class.
        field: name of the message's field.
        kind: kind of data that the field carries.
        block: a modality, `shared` or `labels`.
        destination: `server` or `silo`.
        allowed: whether the policy allows the part to go to its destination.
        fix: the line of the policy file that would allow the part; empty if it is allowed.
        tells: what the part reveals besides the data that its kind names, in words. Empty for most parts.
        masked: whether the part is masked, so that the server reads only its sum over several clients.
        random: whether the part holds only random numbers that depend on no data.
    """

    task: str
    message: str
    field: str
    kind: str
    block: str
    destination: str
    allowed: bool
    fix: str
    tells: str
    masked: bool = False
    random: bool = False


@dataclass(frozen=True)
class Announcement:
    """Everything that a client's replies can hold. Clients with the same modalities and policy share an announcement.

    Attributes:
        algorithm: the method. Its options decide which tasks the clients run and which fields they send.
        answers: for each task name, the message class and the destination of the reply.
        holder: the modalities of the client and of the federation.
        policy: the policy of the client.
        tested: whether any client has test rows of its own.
        private: the parameters and buffers that the client never sends, even if its policy allows them.
        required: the protection that the device demands.
        mechanism: the mechanism of [privacy] on this client, or None.
    """

    algorithm: Asking
    answers: Mapping[str, tuple[type[Message], str]]
    holder: Holder
    policy: Policy
    tested: bool
    private: PrivateNames = PrivateNames()
    required: Requirements = NO_REQUIREMENTS
    mechanism: Mechanism | None = None

    @cached_property
    def rows(self) -> dict[tuple[str, str, str], Announced]:
        """The parts that the client's replies can hold, by (task, field, block).

        Raises:
            RecipeError: a field is declared for a modality that the federation does not have.
        """
        result: dict[tuple[str, str, str], Announced] = {}
        for task, (reply, destination) in self.answers.items():
            for field, said in reply.declared.items():
                self._check_owner(f"{reply.__name__}.{field}", said)
                for block in self.holder.blocks(said):
                    kept = said.kind in OF_THE_MODEL and block in self.private.blocks
                    if not kept and self._will_leave(task, field, block):
                        result[task, field, block] = self._row(task, reply, field, block, destination)
        return result

    @cached_property
    def names(self) -> dict[tuple[str, str], frozenset[str]]:
        """The names that a field's tree may have, by (task, field)."""
        return {
            (task, field): frozenset(self.holder.names(said))
            for task, (reply, _) in self.answers.items()
            for field, said in reply.declared.items()
        }

    def answer_refusal(self, task: str, reply: type[Message], destination: str, client: int) -> str:
        """Return why a reply of this type may not leave. The text is empty if the task declares this type.

        The text leaves the device. It does not repeat the name of an undeclared type, because a task could hide data
        in such a name.
        """
        if task not in self.answers:
            return (
                f"client {client} refused to answer task {task}, which the algorithm did not have when the run began: "
                "`polyfed check` announces nothing of it. Write the task into the class"
            )
        declared, announced = self.answers[task]
        if reply is declared and destination == announced:
            return ""
        return (
            f"client {client} refused to send its reply to task {task}: the task declares the message "
            f"{declared.__name__} to the {announced}, `polyfed check` announces nothing else, and this is another "
            f"(a subclass is another one). Return {declared.__name__}, or declare what is returned: in the task's "
            "annotation, or in `replies` of the class where the annotation is Message"
        )

    def private_refusal(self, reply: Message, client: int) -> str:
        """Return the error message if a reply holds private parameters, or an empty text if it holds none."""
        for field, name, _ in tensors(reply) if self.private.names else ():
            if reply.kinds[field] in OF_THE_MODEL and name in self.private.names:
                return (
                    f"client {client} refused to send {type(reply).__name__}.{field}: it holds '{name}', which "
                    f"[algorithm] private keeps at the client. Remove the block from private, or do not send it"
                )
        return ""

    def announces(self, task: str, part: Crossing) -> bool:
        """Return whether the announcement contains this part of a reply. The policy may still refuse the part."""
        return not self.strange(task, part) and (task, part.field, part.block) in self.rows

    def strange(self, task: str, part: Crossing) -> frozenset[str]:
        """Return the undeclared names in a part of a reply: those that the reply's message class does not allow."""
        return part.names - self.names[task, part.field]

    def refusal(self, task: str, part: Crossing, client: int) -> str:
        """Return why a part of a reply may not leave. The text is empty if the part may leave.

        The text leaves the device. It repeats no undeclared name, because a task could hide data in such a name.
        """
        reply, destination = self.answers[task]
        where = f"client {client} refused to send {reply.__name__}.{part.field}"
        if strange := self.strange(task, part):
            return f"{where}: {self._undeclared(task, part, strange)}"
        if not self.policy.allows(part.kind, part.block, destination):
            return refusal(part, destination, self.policy, client, reply.__name__)
        if (task, part.field, part.block) in self.rows:
            return self._unprotected(where, task, part)
        hook = "will_send" if self.algorithm.will_ask(task, tested=self.tested) else "will_ask"
        return (
            f"{where}: `polyfed check` does not announce {part.kind} of {part.block} in a reply to task {task}, as "
            f"{type(self.algorithm).__name__}.{hook} says that it is not sent. Correct that method, or do not send it"
        )

    def _unprotected(self, where: str, task: str, part: Crossing) -> str:
        """Return the error message if a part lacks the protection that the device demands, or else an empty text."""
        said = self.answers[task][0].declared[part.field]
        why = self.required.lack(task, part.field, said, self.mechanism)
        if not why:
            return ""
        return f"{where} ({said.kind}): {why}. It would leave if the policy file said: {self.required.fix(said)}"

    def _undeclared(self, task: str, part: Crossing, strange: frozenset[str]) -> str:
        """Return the text of a refusal for undeclared names. The text explains how to declare them."""
        reply, destination = self.answers[task]
        said = reply.declared[part.field]
        of_the_model = part.kind in OF_THE_MODEL
        known = sorted(strange & ({SHARED} if of_the_model else {SHARED, LABELS}))
        if not known:
            allowed = ", ".join(self.holder.names(said)) or "(none)"
            own = not said.whole and {MODALITIES, READ} & {*(said.blocks or ())}
            more = "; with whole=True those of the whole federation" if own else ""
            what = "parameters of a block" if of_the_model else "a name"
            return f"it holds {what} that it does not declare. Allowed for this client: {allowed}{more}"
        words = ", ".join(f'"{word}"' for word in (*(said.blocks or ()), *known))
        block = LABELS if part.kind == "labels" else known[0]
        also = ""
        if not self.policy.allows(part.kind, block, destination):
            also = f", and the client's policy: {self.policy.fix((part.kind,), block, destination)}"
        return (
            f"it holds '{known[0]}', which it does not declare. It would leave if the field said: "
            f'carries("{part.kind}", blocks=({words})){also}'
        )

    def _will_leave(self, task: str, field: str, block: str) -> bool:
        asked = self.algorithm.will_ask(task, tested=self.tested)
        return asked and self.algorithm.will_send(task, field, block, self.policy)

    def _row(self, task: str, reply: type[Message], field: str, block: str, destination: str) -> Announced:
        said = reply.declared[field]
        allowed = self.policy.allows(said.kind, block, destination)
        fix = "" if allowed else self.policy.fix((said.kind,), block, destination)
        if allowed and self.required.lack(task, field, said, self.mechanism):
            allowed, fix = False, self.required.fix(said)
        about = said.tells, said.masked, said.random
        return Announced(task, reply.__name__, field, said.kind, block, destination, allowed, fix, *about)

    def _check_owner(self, where: str, said: Declared) -> None:
        known = (*self.holder.everyone, SHARED, LABELS)
        if said.of is not None and said.of not in known:
            raise RecipeError(f"{where}: of = '{said.of}' is no modality here; {did_you_mean(said.of, known)}")


@dataclass(frozen=True)
class Announcer:
    """Makes the announcements of a run, one for all clients with the same modalities.

    Attributes:
        algorithm: the method.
        model: the model.
        objective: what the model learns to predict.
        policy: the egress policy of the run, or of the device.
        tested: whether any client has test rows of its own.
        required: the protection that the device demands.
        mechanism: the mechanism of [privacy] on the clients, or None.
    """

    algorithm: Asking
    model: Model
    objective: Objective
    policy: Policy
    tested: bool
    required: Requirements = NO_REQUIREMENTS
    mechanism: Mechanism | None = None

    def __post_init__(self) -> None:
        _ = self.answers  # now, because a task that the class gets in a round was announced to nobody

    @cached_property
    def _made(self) -> dict[tuple[str, ...], Announcement]:
        return {}

    @cached_property
    def answers(self) -> dict[str, tuple[type[Message], str]]:
        """The replies of the method's tasks. A task that the class gets later is missing, so the gate refuses it."""
        return answers_of(self.algorithm)

    def with_model(self, policy: Policy) -> Policy:
        """Return a policy with what the model of this run can reveal; see `Policy.for_model`."""
        return policy.for_model(
            self.model.modalities, lambda own: mixing(self.algorithm, self.objective, self.model, own, self.mechanism)
        )

    def of(self, modalities: tuple[str, ...]) -> Announcement:
        """Return the announcement for clients with these modalities: everything that their replies can hold."""
        if modalities not in self._made:
            holder = Holder(modalities, tuple(self.model.shapes), self.model.modalities)
            policy = self.with_model(self.policy.for_client(modalities))
            parts = policy, self.tested, PrivateNames.of(self.algorithm, self.model)
            demand = self.required, self.mechanism
            self._made[modalities] = Announcement(self.algorithm, self.answers, holder, *parts, *demand)
        return self._made[modalities]
