"""How large replies will be: one round of the algorithm's own code on a few rows of a few clients, nothing sent.

A message declares kinds, not shapes, so no declaration can tell how many numbers a statistic holds. The tasks can. Of
every kind of client, by what it holds, a few stand for all; the others count as absent, which an algorithm must bear
anyway (devices of silos all play). Two passes with different numbers of rows tell what grows with them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polyfed.core.errors import EgressError
from polyfed.core.messages import Message, crossings
from polyfed.core.request import Request, Send
from polyfed.core.tree import Tree
from polyfed.data import Population
from polyfed.engines import Sequential
from polyfed.experiment.assembly import Assembly, assemble
from polyfed.experiment.events import Emitter, Listener
from polyfed.experiment.recipe import Recipe
from polyfed.federation.context import ClientContext
from polyfed.federation.replies import Answer, stacked
from polyfed.privacy.gate import EgressGate

PASSES = (10, 20)
"""Rows of each client in the two passes: small, and whole under shares of tenths."""

STANDS_FOR = "another client stands for it"
"""Why a client is absent from a rehearsal."""

FEW = 6
"""Clients of a kind that play, so that a reply with an entry for every other client shows more than one."""

LARGE = 2_000_000
"""Parameters, frozen or not, from which on one client of a kind must do: each costs seconds."""

Place = tuple[str, str, str]
"""(task, field, block)"""

Kind = tuple[str, ...]
"""Clients of a kind stand for each other."""


@dataclass(frozen=True)
class Size:
    """Bytes of one part of a reply: `fixed + per_row * rows`, of the rows it speaks of."""

    fixed: int
    per_row: float = 0.0


@dataclass(frozen=True)
class ObservedPart:
    """A part of a reply as it was seen.

    Attributes:
        counted: rows that the message says it speaks of; None where it does not.
        owned: rows the client had in this pass.
    """

    bytes: int
    counted: int | None
    owned: int


@dataclass(frozen=True)
class RecordingGate(EgressGate):
    """A node whose gate notes what would leave: what the policy forbids too, but nothing that is not announced."""

    seen: dict[tuple[Place, int], list[ObservedPart]] = field(default_factory=dict)
    owned: int = 0

    def release(self, request: Request, reply: Message, *, stacked: bool) -> Message:
        """Note the parts of a reply of one client.

        Raises:
            EgressError: one is not announced, so that no policy would let it out.
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
    """An engine on which, of alike clients that are asked, the few with most rows answer.

    A client that is asked a second question without having had the first, because another stood for it, takes over
    the local state of its kind.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[tuple[Place, int], list[ObservedPart]] = {}
        self.left_by: dict[Kind, Tree] = {}
        frozen = sum(value.numel() for value in self.model.frozen.values())
        self.few = FEW if self.model.num_parameters() + frozen < LARGE else 1

    def node(self, clients: tuple[int, ...], context: ClientContext) -> EgressGate:
        """A gate that notes what leaves."""
        announcement = self.announcement(context.modalities)
        owned = self._num_rows(clients[0])
        blocks, on_server = context.blocks, context.evaluation_client
        return RecordingGate(clients, blocks, self.ledger, announcement, on_server, seen=self.seen, owned=owned)

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        """Run the task on the few of these clients that stand for the others."""
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
        """What it holds; devices of silos and evaluation_clients are each of their own kind."""
        alone = client < 0 or self.registry.silo is not None
        return (str(client),) if alone else self.registry.owned(client)


def run_dry(recipe: Recipe, population: Population, listener: Listener) -> dict[Place, Size]:
    """Sizes of what replies hold in the first round, and in an evaluation after it.

    Args:
        recipe: the recipe.
        population: its clients.
        listener: takes the events of both passes: `client-failed` above all.
    """
    train = recipe.algorithm.train
    # no size depends on how long clients train, and a rehearsal of 20,000 steps would take minutes
    short = replace(train, epochs=min(train.epochs, 1), steps=None if train.steps is None else min(train.steps, 2))
    brief = replace(recipe.algorithm, train=short)
    alone = replace(recipe, algorithm=brief, network=None, engine=replace(recipe.engine, min_replies=0))
    seen: dict[tuple[Place, int], list[ObservedPart]] = {}
    for most in PASSES:
        parts = assemble(alone, emit=Emitter([listener]), population=_shortened(population, most), engine=DryRunEngine)
        _play(parts)
        assert isinstance(parts.engine, DryRunEngine)
        for key, sightings in parts.engine.seen.items():
            seen.setdefault(key, []).extend(sightings)
    sizes: dict[Place, Size] = {}
    for (place, _), sightings in seen.items():
        size = _size(sightings)
        known = sizes.get(place, size)
        sizes[place] = Size(max(size.fixed, known.fixed), max(size.per_row, known.per_row))
    return sizes


def _play(parts: Assembly) -> None:
    fed, algorithm = parts.fed, parts.algorithm
    fed.begin(0)
    state = algorithm.init(fed, parts.initial)
    fed.template = getattr(state, "params", parts.initial)
    fed.begin(1)
    state = algorithm.round(state, fed)
    fed.rounds = 1  # what is asked after the last round only is asked here as well
    algorithm.evaluate(state, fed)


def _shortened(population: Population, most: int) -> Population:
    """The same clients, with their first few rows."""
    return replace(
        population,
        train=population.train.first(most),
        test=None if population.test is None else population.test.first(most),
        test_rows=population.test_rows[:most],
        validation_rows=population.validation_rows[:most],
    )


def _size(sightings: Sequence[ObservedPart]) -> Size:
    """One client's part of a reply, from all times it was seen."""
    counted = [s for s in sightings if s.counted]
    if counted:
        return Size(0, max(s.bytes / s.counted for s in counted if s.counted))
    largest: dict[int, int] = {}
    for s in sightings:
        largest[s.owned] = max(s.bytes, largest.get(s.owned, 0))
    (few, less), (many, more) = min(largest.items()), max(largest.items())
    if more <= less:
        return Size(max(largest.values()))
    slope = (more - less) / (many - few)
    return Size(max(0, round(more - slope * many)), slope)
