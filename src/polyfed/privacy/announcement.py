"""Everything that a client's replies can hold, with the policy's verdict: one list for `polyfed check` and the gate.

The list follows from what each task's message declares, the blocks that the client has, and the algorithm's options.
`polyfed check` prints the list; `EgressGate.release` lets a part of a reply out only if the list contains it and the
policy allows it. So nothing leaves that `check` did not announce.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.messages import LABELS, MODALITIES, OF_THE_MODEL, READ, Crossing, Declared, Message, tensors
from polyfed.core.tree import SHARED, block_of
from polyfed.model import Model
from polyfed.privacy.policy import Policy, refusal


class Asking(Protocol):
    """What an announcement needs to know about an algorithm; see `polyfed.algorithms.Algorithm`."""

    def will_ask(self, task: str, *, tested: bool) -> bool:
        """Whether clients can be asked for a task."""

    def will_send(self, task: str, field: str, block: str, policy: Policy) -> bool:
        """Whether a field of a task's reply can hold anything of a block."""

    def private_names(self, model: Model) -> frozenset[str]:
        """The parameters and buffers of the model that clients keep."""


@dataclass(frozen=True)
class PrivateNames:
    """The parameters and buffers of the model that clients keep.

    Attributes:
        names: their names.
        blocks: the blocks that are private as a whole.
    """

    names: frozenset[str] = frozenset()
    blocks: frozenset[str] = frozenset()

    @classmethod
    def of(cls, method: Asking, model: Model) -> "PrivateNames":
        """The private names of a method, and the blocks of the model that hold no others."""
        names = method.private_names(model)
        rest = {block_of(name) for name in model.names(model.modalities) if name not in names}
        return cls(names, frozenset(map(block_of, names)) - rest)


@dataclass(frozen=True)
class Holder:
    """The client and the federation that the words in a tree's `blocks` refer to.

    Attributes:
        own: the modalities of the client.
        everyone: the modalities of the federation.
        read: the modalities that the model reads.
    """

    own: tuple[str, ...]
    everyone: tuple[str, ...]
    read: tuple[str, ...]

    def names(self, said: Declared) -> tuple[str, ...]:
        """The names that tensors of a tree may have; for parameters and gradients, the blocks they may belong to.

        The result is empty for a field that is a single tensor, because such a tensor has no name.
        """
        held = self.everyone if said.whole else self.own
        words = {MODALITIES: held, READ: tuple(m for m in held if m in self.read)}
        return tuple(dict.fromkeys(name for word in said.blocks or () for name in words.get(word, (word,))))

    def blocks(self, said: Declared) -> tuple[str, ...]:
        """The blocks to which the policy and the ledger assign the parts of a field."""
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
        allowed: whether the policy lets the part go to its destination.
        fix: the policy line that would allow the part; empty if it is allowed.
        tells: what the part reveals beyond what its kind suggests; usually empty.
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


@dataclass(frozen=True)
class Announcement:
    """Everything that the replies of one client, or of several with the same modalities and policy, can hold.

    Attributes:
        algorithm: the method, whose options decide which tasks are asked and which fields are sent.
        answers: for each task name, the message class of its reply and the destination.
        holder: the modalities of the client and of the federation.
        policy: the policy of the client.
        tested: whether any client has test rows of its own.
        private: what the client keeps, whatever its policy allows.
    """

    algorithm: Asking
    answers: Mapping[str, tuple[type[Message], str]]
    holder: Holder
    policy: Policy
    tested: bool
    private: PrivateNames = PrivateNames()

    @cached_property
    def rows(self) -> dict[tuple[str, str, str], Announced]:
        """The parts that can leave, by (task, field, block).

        Raises:
            RecipeError: a field is declared for a modality that the federation does not have.
        """
        found: dict[tuple[str, str, str], Announced] = {}
        for task, (reply, destination) in self.answers.items():
            for field, said in reply.declared.items():
                self._check_owner(f"{reply.__name__}.{field}", said)
                for block in self.holder.blocks(said):
                    kept = said.kind in OF_THE_MODEL and block in self.private.blocks
                    if not kept and self._will_leave(task, field, block):
                        found[task, field, block] = self._row(task, reply, field, block, destination)
        return found

    @cached_property
    def names(self) -> dict[tuple[str, str], frozenset[str]]:
        """The names that a field's tree may have, by (task, field)."""
        return {
            (task, field): frozenset(self.holder.names(said))
            for task, (reply, _) in self.answers.items()
            for field, said in reply.declared.items()
        }

    def answer_refusal(self, task: str, reply: type[Message], destination: str, client: int) -> str:
        """Why a reply of this type may not leave, whatever it holds; empty if it is the type that the task declares.

        The text leaves the device, so it does not repeat an undeclared type's name: a task could write rows into it.
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
        """Why a reply may not leave because it holds private parameters; empty if it holds none."""
        for field, name, _ in tensors(reply) if self.private.names else ():
            if reply.kinds[field] in OF_THE_MODEL and name in self.private.names:
                return (
                    f"client {client} refused to send {type(reply).__name__}.{field}: it holds '{name}', which "
                    f"[algorithm] private keeps at the client. Remove the block from private, or do not send it"
                )
        return ""

    def announces(self, task: str, part: Crossing) -> bool:
        """Whether the list has this part of a reply, allowed or not."""
        return not self.strange(task, part) and (task, part.field, part.block) in self.rows

    def strange(self, task: str, part: Crossing) -> frozenset[str]:
        """The names in a part of a reply that the reply's message does not declare."""
        return part.names - self.names[task, part.field]

    def refusal(self, task: str, part: Crossing, client: int) -> str:
        """Why a part of a reply may not leave; empty if it may.

        The text leaves the device, so it repeats no undeclared name: a task could write rows into such a name.
        """
        reply, destination = self.answers[task]
        where = f"client {client} refused to send {reply.__name__}.{part.field}"
        if strange := self.strange(task, part):
            return f"{where}: {self._undeclared(task, part, strange)}"
        if not self.policy.allows(part.kind, part.block, destination):
            return refusal(part, destination, self.policy, client, reply.__name__)
        if (task, part.field, part.block) in self.rows:
            return ""
        hook = "will_send" if self.algorithm.will_ask(task, tested=self.tested) else "will_ask"
        return (
            f"{where}: `polyfed check` does not announce {part.kind} of {part.block} in a reply to task {task}, as "
            f"{type(self.algorithm).__name__}.{hook} says that it is not sent. Correct that method, or do not send it"
        )

    def _undeclared(self, task: str, part: Crossing, strange: frozenset[str]) -> str:
        """The text of a refusal for names that a message does not declare, with the way to declare them."""
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
        return Announced(task, reply.__name__, field, said.kind, block, destination, allowed, fix, said.tells)

    def _check_owner(self, where: str, said: Declared) -> None:
        known = (*self.holder.everyone, SHARED, LABELS)
        if said.of is not None and said.of not in known:
            raise RecipeError(f"{where}: of = '{said.of}' is no modality here; {did_you_mean(said.of, known)}")
