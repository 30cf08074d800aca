"""The dry run: find how large replies will be by running a round of the algorithm on a few rows of a few clients.

A message declares kinds, not shapes, so its declaration does not say how many numbers a statistic holds; running the
tasks does. Clients of the same modalities and LoRA rank are of one kind, and a few of each kind run the tasks. The
others count as missing, which every algorithm must handle anyway. Devices of silos all run. Two passes with different
numbers of rows show which sizes grow with the rows. Nothing is sent.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from polyfed.core.errors import EgressError
from polyfed.core.messages import Message, crossings
from polyfed.core.request import Request, Send
from polyfed.core.tree import Tree
from polyfed.data import Population
from polyfed.engines import Sequential
from polyfed.engines.worker_process import Unit
from polyfed.experiment.assembly import Assembly, assemble
from polyfed.experiment.events import Emitter, Listener
from polyfed.experiment.recipe import Recipe
from polyfed.federation.context import ClientContext
from polyfed.federation.replies import Answer, stacked
from polyfed.privacy.gate import EgressGate

PASSES = (10, 20)
"""Rows of each client in the two passes: few, and divisible by ten, so that shares of tenths stay whole."""

STANDS_FOR = "another client stands for it"
"""The reason why a client is missing from a dry run."""

FEW = 6
"""Clients of a kind that run; several, because a reply may have an entry for every other client."""

LARGE = 2_000_000
"""Models with this many parameters or more run on one client of a kind only, because each client takes seconds."""

Place = tuple[str, str, str]
"""(task, field, block)"""

Kind = tuple[str, ...]
"""What clients of the same kind have in common."""


@dataclass(frozen=True)
class Size:
    """The size of one part of a reply in bytes: `fixed + per_row * rows`, for the rows that the reply covers."""

    fixed: int
    per_row: float = 0.0


@dataclass(frozen=True)
class ObservedPart:
    """The size of a part of one reply.

    Attributes:
        bytes: its size.
        counted: the number of rows that the message says it covers; None if it does not say.
        owned: the number of rows the client had in this pass.
    """

    bytes: int
    counted: int | None
    owned: int


@dataclass(frozen=True)
class RecordingGate(EgressGate):
    """A gate that records what would leave, including what the policy forbids, but nothing that is not announced."""

    seen: dict[tuple[Place, int], list[ObservedPart]] = field(default_factory=dict)
    owned: int = 0

    def release(self, request: Request, reply: Message, *, stacked: bool) -> Message:
        """Record the parts of one client's reply.

        Raises:
            EgressError: a part is not announced, so no policy could allow it.
        """
        if self.on_server:
            return reply
        self._refuse_another(request, reply, stacked)
        for part in crossings(reply):
            if not self.announcement.announces(request.name, part):
                raise EgressError(self.announcement.refusal(request.name, part, self.clients[0]))
            count = reply.counts.get(part.field)
            counted = None if count is None else int(getattr(reply, count))
            place = (request.name, part.field, part.block)
            self.seen.setdefault((place, self.clients[0]), []).append(ObservedPart(part.bytes, counted, self.owned))
        return reply


class DryRunEngine(Sequential):
    """An engine on which only a few clients of each kind run a request: those with the most rows.

    A client may be asked for a second task although another client ran the first one in its place; it then takes over
    the local state of its kind. `ranks` are the LoRA ranks of `[clients]`.
    """

    def __init__(self, *args: Any, ranks: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = ranks
        self.seen: dict[tuple[Place, int], list[ObservedPart]] = {}
        self.left_by: dict[Kind, Tree] = {}
        frozen = sum(value.numel() for value in self.model.frozen.values())
        self.few = FEW if self.model.num_parameters() + frozen < LARGE else 1
        secure = self.algorithm.secure_aggregation
        if secure is not None:  # fewer clients of a kind could not form a sum
            self.few = max(self.few, secure.min_clients)

    def node(self, clients: tuple[int, ...], context: ClientContext) -> EgressGate:
        """The gate of these clients, which records what leaves."""
        announcement = self.announcement(context.modalities)
        owned = self._num_rows(clients[0])
        blocks, on_server = context.blocks, context.evaluation_client
        return RecordingGate(clients, blocks, self.ledger, announcement, on_server, seen=self.seen, owned=owned)

    def answer(
        self, request: Request, clients: Sequence[int], send: Send, units: Sequence[Unit] | None = None
    ) -> Answer:
        """Run the task on the few clients that stand for the others of their kind."""
        assert units is None, "a dry run has no worker processes"
        missing: dict[int, str] = {}
        chosen: dict[int, Kind] = {}
        replies: dict[int, Message] = {}
        for kind, alike in itertools.groupby(sorted(clients, key=self._order), key=self._kind):
            chosen |= dict.fromkeys(itertools.islice(alike, self.few), kind)
        missing.update(dict.fromkeys(set(clients) - chosen.keys(), STANDS_FOR))
        for client, kind in sorted(chosen.items()):
            if client not in self.locals and kind in self.left_by:
                self.locals[client] = self.left_by[kind]
            reply = self.alone(request, client, send, missing)
            if client in self.locals:
                self.left_by[kind] = self.locals[client]
            if reply is not None:
                replies[client] = reply
        return Answer.of(stacked(replies), missing)

    def _order(self, client: int) -> tuple[Kind, int, int]:
        return self._kind(client), -self._num_rows(client), client

    def _num_rows(self, client: int) -> int:
        return 0 if client < 0 else int(self.registry.num_rows[client])

    def _kind(self, client: int) -> Kind:
        """The client's modalities and rank; a device of a silo and an evaluation client are each their own kind."""
        alone = client < 0 or self.registry.silo is not None
        rank = (str(self.ranks[client % len(self.ranks)]),) if self.ranks else ()
        return (str(client),) if alone else (*self.registry.owned(client), *rank)


def run_dry(recipe: Recipe, population: Population, listener: Listener) -> dict[Place, Size]:
    """Measure the parts of all replies in the first round, and in an evaluation after it.

    Args:
        recipe: the recipe.
        population: its clients.
        listener: called with the events of both passes, such as `client-failed`.
    """
    train = recipe.algorithm.train
    # no size depends on how long clients train, and 20,000 steps would take minutes
    short = replace(train, epochs=min(train.epochs, 1), steps=None if train.steps is None else min(train.steps, 2))
    brief = replace(recipe.algorithm, train=short)
    alone = replace(recipe, algorithm=brief, network=None, engine=replace(recipe.engine, min_replies=0))
    seen: dict[tuple[Place, int], list[ObservedPart]] = {}
    engine = partial(DryRunEngine, ranks=recipe.clients.ranks)
    for most in PASSES:
        parts = assemble(alone, emit=Emitter([listener]), population=_shortened(population, most), engine=engine)
        _run_round(parts)
        assert isinstance(parts.engine, DryRunEngine)
        for key, observed in parts.engine.seen.items():
            seen.setdefault(key, []).extend(observed)
    sizes: dict[Place, Size] = {}
    for (place, _), observed in seen.items():
        size = _size(observed)
        known = sizes.get(place, size)
        sizes[place] = Size(max(size.fixed, known.fixed), max(size.per_row, known.per_row))
    return sizes


def _run_round(parts: Assembly) -> None:
    """Run the start, the first round and an evaluation."""
    fed, algorithm = parts.fed, parts.algorithm
    fed.begin(0)
    state = algorithm.init(fed, parts.initial)
    fed.template = getattr(state, "params", parts.initial)
    fed.begin(1)
    state = algorithm.round(state, fed)
    fed.rounds = 1  # so that requests which are sent after the last round only are sent here as well
    algorithm.evaluate(state, fed)


def _shortened(population: Population, most: int) -> Population:
    """The same clients with their first `most` rows."""
    return replace(
        population,
        train=population.train.first(most),
        test=None if population.test is None else population.test.first(most),
        test_rows=population.test_rows[:most],
        validation_rows=population.validation_rows[:most],
    )


def _size(observed: Sequence[ObservedPart]) -> Size:
    """The size of one client's part of a reply, from all replies in which it was seen."""
    counted = [s for s in observed if s.counted]
    if counted:
        return Size(0, max(s.bytes / s.counted for s in counted if s.counted))
    largest: dict[int, int] = {}
    for s in observed:
        largest[s.owned] = max(s.bytes, largest.get(s.owned, 0))
    (few, less), (many, more) = min(largest.items()), max(largest.items())
    if more <= less:
        return Size(max(largest.values()))
    slope = (more - less) / (many - few)
    return Size(max(0, round(more - slope * many)), slope)
