"""Replies that are not what they should be: what a message must not be, and what the server does with such a reply.

A reply that breaks its declaration is dropped with a reason, and any other does no harm. The tests of a device under a
hostile server use the same list of corruptions.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import PolyfedError
from polyfed.core.masked import LONG
from polyfed.core.messages import LABELS, OF_THE_MODEL, Declared, Message, map_tensors
from polyfed.core.request import Request, Send
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.engines.sequential import Sequential
from polyfed.engines.workers.process import Unit
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.experiment.running.events import Emitter
from polyfed.federation.replies import Answer, Replies, ReplyStack, stacked
from polyfed.laws.federation import through
from polyfed.selection import Uniform

BAD = 2
"""The client whose replies are bent; in most federations it has both modalities."""

Change = Callable[[Any], Any]


def entries(change: Callable[[Tensor], Tensor]) -> Change:
    """Return a change of every tensor of a field."""
    return lambda v: change(v) if isinstance(v, Tensor) else {name: change(t) for name, t in v.items()}


def floats(change: Callable[[Tensor], Tensor]) -> Change:
    """Return a change of every tensor of a field that has floating-point numbers."""
    return entries(lambda t: change(t) if t.is_floating_point() else t)


def tree(change: Callable[[Tree], Tree]) -> Change:
    """Return a change of a field that is a tree and not empty."""
    return lambda v: v if isinstance(v, Tensor) or not v else change(v)


def without_a_block(value: Tree) -> Tree:
    """Return a tree without the block of its first tensor."""
    return {name: t for name, t in value.items() if block_of(name) != block_of(next(iter(value)))}


def lacking(value: Tree) -> Tree:
    """Return a tree without one tensor of a block that has others."""
    blocks = [block_of(name) for name in value]
    places = [i for i, block in enumerate(blocks) if blocks.count(block) > 1]
    return {name: t for i, (name, t) in enumerate(value.items()) if not places or i != places[-1]}


def negative_variances(value: Tree) -> Tree:
    """Return a tree whose BatchNorms have negative variances."""
    return {name: -t - 1 if name.endswith("running_var") else t for name, t in value.items()}


CORRUPT: dict[str, Change] = {
    "an extra axis": entries(lambda t: t.unsqueeze(0)),
    "a row for each sample": floats(lambda t: t.expand(5, *t.shape).clone()),
    "another shape": entries(lambda t: torch.cat([t, t], -1) if t.dim() and t.numel() else t),
    "float64": floats(Tensor.double),
    "float32": entries(lambda t: t if t.is_floating_point() else t.float()),
    "float16": floats(Tensor.half),
    "bfloat16": floats(Tensor.bfloat16),
    "int64": entries(lambda t: t.to(torch.int64)),
    "int32": entries(lambda t: t.to(torch.int32)),
    "truth values": entries(Tensor.bool),
    "NaN": floats(lambda t: t * torch.nan),
    "infinity": floats(lambda t: t + torch.inf),
    "one infinity": floats(lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 0, -torch.inf, t)),
    "an extra name": tree(lambda v: v | {"stranger": next(iter(v.values()))}),
    "an extra name in a block": tree(lambda v: v | {f"{next(iter(v))}.stranger": next(iter(v.values()))}),
}

TYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool, "uint8": torch.uint8, "": torch.float32}


def corruptions(said: Declared, *, received: bool, whole: bool = False) -> dict[str, Change]:
    """Return the corruptions that a field must not have.

    Args:
        said: the declaration of the field.
        received: whether a device receives it; else the server does.
        whole: whether a device must receive every block that it has. A reply may lack blocks.
    """
    result = dict(CORRUPT)
    if said.kind == "raw":  # the samples of some modalities are whole numbers
        del result["int64"]
    if said.dtype == "sums":
        del result["float64"]
    if said.masked:  # looks random, so it has no range
        for word in ("int64", *(("int32",) if said.kind != LONG else ())):
            del result[word]
    if not received and said.rows is not None and said.shape in ((), ("label",)):
        del result["another shape"]  # rows beyond their number are padding, which the server leaves out
    if said.kind in OF_THE_MODEL and (whole or not said.partial):
        result["a missing name"] = tree(lacking)
        result["another missing name"] = tree(
            lambda v: {n: t for n, t in v.items() if not n.endswith("encoder.0.bias")}
        )
    if said.kind == "parameters" and not said.masked:
        result["negative variances"] = tree(negative_variances)
    if whole and not said.bare:
        result |= {"a missing block": without_a_block, "no block": lambda value: {}}
    return result | _out_of_range(said, received)


def _out_of_range(said: Declared, received: bool) -> dict[str, Change]:
    numbers = (("a number below its range", -1), ("a number above its range", 2**62))
    if said.kind in ("labels", "ids"):
        wrong = [] if said.kind == "ids" and not received else numbers  # the server does not know who has which ids
    else:
        within, kind = said.within, TYPES.get(said.dtype, torch.float64)
        outside = within and not said.masked
        wrong = [pair for pair in numbers if outside and not bool(within.holds(torch.tensor(pair[1], dtype=kind)))]  # type: ignore[union-attr]
    return {word: entries(lambda t, number=number: torch.full_like(t, number)) for word, number in wrong}  # type: ignore[misc]


def unlike(one: Any, other: Any) -> bool:
    """Whether two fields differ in form or in a number."""
    if isinstance(one, Tensor):
        return one.dtype != other.dtype or one.shape != other.shape or bool(one.numel() and (one != other).any())
    return list(one) != list(other) or any(unlike(one[name], other[name]) for name in one)


def everybody(made: Recipe) -> Recipe:
    """Return the recipe with all clients in every cohort."""
    if not hasattr(made.algorithm, "selector"):
        return made
    return replace(made, algorithm=replace(made.algorithm, selector=Uniform(participation=1.0)))  # type: ignore[call-arg]


BENT: dict[str, Change] = {
    "without its first tensor": lambda v: v if isinstance(v, Tensor) else {n: v[n] for n in list(v)[1:]},
    "without its last tensor": lambda v: v if isinstance(v, Tensor) else {n: v[n] for n in list(v)[:-1]},
    "empty": lambda v: v if isinstance(v, Tensor) else {},
    "narrower": entries(lambda t: t[..., :-1] if t.dim() else t),
    "longer": entries(lambda t: torch.cat([t, t[:1]]) if t.dim() else t),
    "flat": entries(lambda t: t.reshape(-1)),
    "one number": entries(lambda t: t.reshape(-1)[0] if t.numel() else t),
    "zero": entries(torch.zeros_like),
    "negative": entries(lambda t: -t.abs() - 1 if t.dtype != torch.bool else ~t),
    "huge": entries(lambda t: t + 1e30 if t.is_floating_point() else t),
    "with a name of no modality": lambda v: v if isinstance(v, Tensor) else v | {SHARED: next(iter(v.values()))},
    "with labels' name": lambda v: v if isinstance(v, Tensor) else v | {LABELS: next(iter(v.values()))},
}
"""Changes that do not always make a reply unusable, or not in every field."""


@dataclass
class Outcome:
    """Who was left out of a run.

    Attributes:
        reasons: task -> why the reply of the bad client was dropped.
        others: other clients that were left out, each with task and reason.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    others: dict[int, str] = field(default_factory=dict)


Seen = Callable[[Request, Send, Answer], Answer]
"""What happens to an answer on its way to the server."""


class Watched(Sequential):
    """An engine whose answers pass through a function before the server has them.

    Args:
        seen: gets the request, what was sent and the answer, and returns the answer that the server gets.
        before: the first answers of an equal run, which are not computed again.
        parts: what every engine gets.
        options: what every engine gets by name.
    """

    def __init__(self, seen: Seen, before: Sequence["Answered"], *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._seen, self._before = seen, list(before)

    @override
    def answer(
        self, request: Request, clients: Sequence[int], send: Send, units: Sequence[Unit] | None = None
    ) -> Answer:
        if not self._before:
            return self._seen(request, send, super().answer(request, clients, send, units))
        answered = self._before.pop(0)
        assert answered.task == request.name
        self.keep(answered.locals)
        return self._seen(request, send, answered.copy())


@dataclass(frozen=True)
class Answered:
    """A request that clients have answered.

    Attributes:
        task: the task.
        answer: the answer.
        locals: the local states afterwards.
    """

    task: str
    answer: Answer
    locals: Mapping[int, Tree]

    def copy(self) -> Answer:
        """Return the answer with tensors that the server may change."""
        parts = [ReplyStack(part.clients, map_tensors(part.message, torch.clone)) for part in self.answer.parts]
        return replace(self.answer, parts=parts)


def bent(answer: Answer, bend: Callable[[Message], Message]) -> Answer:
    """Return the answer with the reply of one client changed."""
    singly = dict[int, Message]()
    for part in answer.parts:
        for at, client in enumerate(part.clients):
            one = map_tensors(part.message, lambda t, at=at: t[at])
            singly[client] = bend(one) if client == BAD else one
    return replace(answer, parts=list(stacked(singly)))  # what is not told apart by its form shares a stack


def run(made: Recipe, bend: Callable[[str, Message], Message], before: Sequence[Answered]) -> Outcome:
    """Run two rounds and an evaluation, in which one client's replies go through `bend`.

    Args:
        made: the recipe.
        bend: changes the replies.
        before: the first answers, up to the first that `bend` changes.
    """
    result = Outcome()

    def listen(event: str, **facts: Any) -> None:
        if event == "client-missing" and facts["client"] != BAD:
            result.others[facts["client"]] = f"{facts['task']}: {facts['reason']}"
        elif event == "client-missing":
            result.reasons.setdefault(facts["task"], facts["reason"])

    def seen(request: Request, send: Send, answer: Answer) -> Answer:
        return bent(answer, partial(bend, request.name))

    parts = assemble(made, emit=Emitter([listen]), engine=partial(Watched, seen, before))
    parts.algorithm.evaluate(through(parts, 2), parts.fed)
    return result


def briefly(made: Recipe) -> Recipe:
    """Return the recipe with the fewest local steps: only what the server does with replies is tried here."""
    made = replace(made, clients=replace(made.clients, personal_test=0.2))
    train = getattr(made.algorithm, "train", None)
    if train is None:
        return made
    return replace(made, algorithm=replace(made.algorithm, train=replace(train, batch_size=64, epochs=1)))


def place_of(error: Exception) -> str:
    """Return the file and the line that raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename.rpartition('polyfed/')[-1]}:{last.lineno}"


@dataclass(frozen=True)
class Bend:
    """A change of one field of the replies to one task.

    Attributes:
        task: the task.
        name: the field.
        how: the change in words.
        change: the change.
        refused: whether a reply that is changed so must be dropped.
    """

    task: str
    name: str
    how: str
    change: Change
    refused: bool

    def __call__(self, asked: str, msg: Message) -> Message:
        """Return the reply, changed if it replies to the task and has the field."""
        value = getattr(msg, self.name, None)
        bends = asked == self.task and (isinstance(value, Tensor) or value)
        return replace(msg, **{self.name: self.change(value)}) if bends else msg  # type: ignore[type-var]


def bends(task: str, msg: Message) -> list[Bend]:
    """Return the changes of a reply that make it another."""
    result = []
    for name, said in msg.declared.items():
        value = getattr(msg, name)
        if isinstance(value, Tensor) or value:
            refused = corruptions(said, received=False)
            changes = {how: change for how, change in (BENT | refused).items() if unlike(value, change(value))}
            result += [Bend(task, name, how, change, how in refused) for how, change in changes.items()]
    return result


def sorted_out(made: Recipe) -> tuple[list[Bend], list[Bend], list[Answered]]:
    """Try all changes at the first reply to each task.

    Returns:
        The changes after which the server drops this reply as it must, and no other; all the rest; and the answers.
    """
    dropped, others, tried, answers = list[Bend](), list[Bend](), set[str](), list[Answered]()

    def drops(bend: Bend, request: Request, send: Send, answer: Answer) -> bool:
        try:
            missing = parts.fed.usable(request, bent(answer, partial(bend, request.name)), send)[1]
        except Exception:  # a whole run shows it
            return False
        return missing.keys() - answer.missing == {BAD} and (not bend.refused or bend.name in missing[BAD])

    def seen(request: Request, send: Send, answer: Answer) -> Answer:
        found = Replies(answer.parts)
        if request.name not in tried and BAD in found:
            tried.add(request.name)
            for bend in bends(request.name, found[BAD]):
                (dropped if drops(bend, request, send, answer) else others).append(bend)
        kept = {client: dict(local) for client, local in parts.engine.locals.items()}
        answers.append(Answered(request.name, answer, kept))
        return answers[-1].copy()

    parts = assemble(made, engine=partial(Watched, seen, ()))
    parts.algorithm.evaluate(through(parts, 2), parts.fed)
    assert tried, "the client was never asked"
    return dropped, others, answers


def fault(made: Recipe, bend: Bend, answers: Sequence[Answered]) -> str:
    """Return what the server does wrong in a run in which a field is changed, given the answers without the change."""
    first = next(place for place, answered in enumerate(answers) if answered.task == bend.task)
    try:
        result = run(made, bend, answers[: first + 1])
    except PolyfedError as error:
        return f"the run ends: {error!s:.150}" if bend.refused else ""
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.90} at {place_of(error)}"
    if result.others:
        return f"others are lost: {result.others}"
    if bend.refused and bend.name not in result.reasons.get(bend.task, ""):
        return f"it is not refused by the name of the field, but: {result.reasons}"
    return ""


def faults(made: Recipe) -> list[str]:
    """Bend every field that a client sends, in every way, and return what the server then does wrong.

    A method sees that a reply is missing, never why. One run for each task therefore shows that it goes on without
    such a reply, and only changes that the server lets pass, or handles otherwise, have runs of their own.
    """
    made = briefly(everybody(made))
    dropped, others, answers = sorted_out(made)
    first = {bend.task: bend for bend in reversed(dropped)}
    wrong = []
    for bend in (*first.values(), *others):
        words = fault(made, bend, answers)
        if words and not (bend.how == "huge" and words.startswith("others")):
            # a form says nothing of how large numbers are, and silos compute on them
            wrong.append(f"{bend.task}.{bend.name} {bend.how}: {words}")
    return wrong
