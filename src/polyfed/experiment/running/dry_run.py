"""The dry run: runs a round of the algorithm on a few rows of a few clients, to measure how large replies will be.

A message declares kinds but no shapes. The declaration therefore does not say how many numbers a statistic holds, so
the dry run executes the tasks. Clients with the same modalities and LoRA rank form a group, and a few clients of each
group run the tasks. All other clients count as missing, which every algorithm must handle anyway. If there are silos,
every device of every silo runs the tasks. Two passes with different numbers of rows show which sizes grow with the
number of rows. The dry run sends nothing.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from typing_extensions import override

from polyfed.algorithms.averaging import Averaging
from polyfed.core.errors import EgressError
from polyfed.core.messages import Crossing, Message, crossings
from polyfed.core.packing import Packings
from polyfed.core.request import Request, Send
from polyfed.core.system.openmp import using_threads
from polyfed.core.tree import Tree
from polyfed.data import Population
from polyfed.engines import Sequential
from polyfed.engines.workers.process import Unit
from polyfed.evaluation.scores import Measured
from polyfed.evaluation.subsets import names_of_parts
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.experiment.running.events import Emitter, Listener
from polyfed.experiment.running.run_state import checked_state
from polyfed.federation.context import ClientContext
from polyfed.federation.replies import Answer, stacked
from polyfed.privacy.egress.gate import EgressGate
from polyfed.privacy.egress.limits import NO_LIMITS

PASSES = (10, 20)
"""The numbers of rows of each client in the two passes. They are small, and divisible by ten so that a tenth of the
rows is a whole number."""

EVALUATED = 100
"""The number of rows on which `metrics_of` evaluates. On so many rows, nearly every metric of a task is defined."""

STANDS_FOR = "another client stands for it"
"""The reason why a client is missing from a dry run."""

FEW = 6
"""The number of clients of each group that run. It is above 1, because a reply may have an entry for every other
client."""

LARGE = 2_000_000
"""The number of parameters from which a model runs on only one client of each group, because each client takes
seconds."""

Place = tuple[str, str, str]
"""A part of a reply: (task, field, block)."""

Kind = tuple[str, ...]
"""The properties that the clients of a group have in common."""


@dataclass(frozen=True)
class Size:
    """The size in bytes of one part of a reply that covers `rows` rows: `fixed + per_row * rows`."""

    fixed: int
    per_row: float = 0.0


@dataclass(frozen=True)
class ObservedPart:
    """The size of a part of one reply.

    Attributes:
        bytes: the size of the part.
        counted: the number of rows that the message covers according to its own fields. None if the message has no such
            field.
        owned: the number of rows that the client had in this pass.
    """

    bytes: int
    counted: int | None
    owned: int


@dataclass(frozen=True)
class RecordingGate(EgressGate):
    """A gate that records announced parts of replies, even if the policy forbids them, and refuses all other parts."""

    seen: dict[tuple[Place, int], list[ObservedPart]] = field(default_factory=dict)
    owned: int = 0

    @override
    def _comes_back(self, request: Request, part: Crossing) -> bool:
        """Return whether the check refuses what would bring this part back, in this task or another.

        Its refusal says how the clients can keep the block, and a block that they keep does not come in either.
        """
        forbidden = {(row.kind, row.block) for row in self.announcement.rows.values() if not row.allowed}
        return (part.kind, part.block) in forbidden or super()._comes_back(request, part)

    @override
    def release(self, request: Request, reply: Message, *, stacked: bool, packings: Packings | None = None) -> Message:
        """Record the parts of one client's reply.

        Raises:
            EgressError: a part is not announced, so no policy could allow it.
        """
        if self.on_server:
            return reply
        self._refuse_another(request, reply, stacked)
        for part in crossings(reply, packings=packings):
            if not self.announcement.announces(request.name, part):
                raise EgressError(self.announcement.refusal(request.name, part, self.clients[0]))
            count = reply.counts.get(part.field)
            counted = None if count is None else int(getattr(reply, count))
            place = (request.name, part.field, part.block)
            self.seen.setdefault((place, self.clients[0]), []).append(ObservedPart(part.bytes, counted, self.owned))
        return reply


class DryRunEngine(Sequential):
    """An engine on which only a few clients of each group run a request, namely the clients with the most rows.

    Two tasks may run on different clients of the same group. The engine therefore stores, for each group, the newest
    local state of any client of the group. A client without a local state starts with this stored state. `ranks` are
    the LoRA ranks of `[clients]`.
    """

    def __init__(self, *args: Any, ranks: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = ranks
        self.seen: dict[tuple[Place, int], list[ObservedPart]] = {}
        self.left_by: dict[Kind, Tree] = {}
        frozen = sum(value.numel() for value in self.model.frozen.values())
        self.few = FEW if self.model.num_parameters() + frozen < LARGE else 1
        secure = self.algorithm.secure_aggregation
        if secure is not None:  # fewer clients of a group could not form a sum
            self.few = max(self.few, secure.min_clients)

    @override
    def node(self, clients: tuple[int, ...], context: ClientContext) -> EgressGate:
        announcement = self.announcement(context.modalities)
        owned = self._num_rows(clients[0])
        blocks, on_server = context.blocks, context.evaluation_client
        more: dict[str, Any] = {"seen": self.seen, "owned": owned, "rounds": self.rounds}
        return RecordingGate(clients, blocks, self.ledger, announcement, on_server, **more)

    @override
    def answer(
        self, request: Request, clients: Sequence[int], send: Send, units: Sequence[Unit] | None = None
    ) -> Answer:
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
        """Return the group of a client: its modalities and rank. A device or an evaluation client has its own group."""
        alone = client < 0 or self.registry.silo is not None
        rank = (str(self.ranks[client % len(self.ranks)]),) if self.ranks else ()
        return (str(client),) if alone else (*self.registry.owned(client), *rank)


def run_dry(recipe: Recipe, population: Population, listener: Listener) -> dict[Place, Size]:
    """Measure how large the parts of the replies are, in the first round and in an evaluation after it.

    Args:
        population: the clients of the run.
        listener: called with the events of both passes, such as `client-failed`.
    """
    seen: dict[tuple[Place, int], list[ObservedPart]] = {}
    for most in PASSES:
        parts = _dry_parts(recipe, population, most, Emitter([listener]))
        _evaluated(parts, rounds=1)
        assert isinstance(parts.engine, DryRunEngine)
        for key, observed in parts.engine.seen.items():
            seen.setdefault(key, []).extend(observed)
    sizes: dict[Place, Size] = {}
    for (place, _), observed in seen.items():
        size = _size(observed)
        known = sizes.get(place, size)
        sizes[place] = Size(max(size.fixed, known.fixed), max(size.per_row, known.per_row))
    return sizes


def metrics_of(recipe: Recipe, population: Population) -> dict[str, set[str]]:
    """Return group -> names of the metrics that a run will measure, without training.

    The untrained model is evaluated on at most `EVALUATED` rows of the server and of a few clients. A metric may be
    undefined on these rows. Such a metric is among the names only if it is one of the objective's `exact` metrics.
    """
    parts = _dry_parts(recipe, population, EVALUATED, Emitter())
    result = {group: set(values) for group, values in _evaluated(parts, rounds=0).metrics.items()}
    if "global" in result:
        result["global"] |= set(parts.fed.context.objective.exact)
        which, rows = recipe.algorithm.evaluation.subsets, population.test_rows
        result["global"] |= names_of_parts(which, parts.model.modalities, population.columns.present, rows)
    return result


def assembled_dry(recipe: Recipe, population: Population) -> Assembly:
    """Assemble a run on a few rows of each client. Its clients announce the same as those of the whole run."""
    return _dry_parts(recipe, population, PASSES[0], Emitter())


def _dry_parts(recipe: Recipe, population: Population, most: int, emit: Emitter) -> Assembly:
    """Assemble a run on the first `most` rows of each client and of the server, with very short training."""
    train = recipe.algorithm.train
    short = replace(train, epochs=min(train.epochs, 1), steps=None if train.steps is None else min(train.steps, 2))
    brief: Any = replace(recipe.algorithm, train=short)
    if isinstance(brief, Averaging):  # a robust rule could need more replies than the few of a dry run
        brief = replace(brief, server=replace(brief.server, aggregate="mean"))
    engine = replace(recipe.engine, min_replies=0, threads=1)
    alone = replace(recipe.untimed(), algorithm=brief, limits=NO_LIMITS, engine=engine)
    made = partial(DryRunEngine, ranks=recipe.clients.ranks)
    return assemble(alone, emit=emit, population=_shortened(population, most), engine=made)


@using_threads(1)
def _evaluated(parts: Assembly, rounds: int) -> Measured:
    """Run the initialisation, 0 or 1 rounds, and the evaluation after the last round, with what `predict_set` needs.

    Its operations are tiny, so several threads would wait for each other, seven times as long beside other work.
    """
    fed, algorithm = parts.fed, parts.algorithm
    state = parts.start()
    fed.begin(1)
    for _ in range(rounds):
        state = checked_state(algorithm, algorithm.round(state, fed))
    fed.begin(max(fed.rounds, 1))  # so that requests after the last round are sent here as well
    measured = algorithm.evaluate(state, fed)
    algorithm.calibrate(state, fed)
    return measured


def _shortened(population: Population, most: int) -> Population:
    """Return the same clients, but a client with more than `most` rows keeps only the first `most` of them."""
    return replace(
        population,
        train=population.train.first(most),
        test=None if population.test is None else population.test.first(most),
        own_validation=None if population.own_validation is None else population.own_validation.first(most),
        test_rows=population.test_rows[:most],
        validation_rows=population.validation_rows[:most],
    )


def _size(observed: Sequence[ObservedPart]) -> Size:
    """Return the size of one part of a client's reply, computed from all replies that contain this part."""
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
