"""Captures the messages of a run's clients as the server receives them, by running the recipe again in a simulation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.core.messages import LABELS, OF_THE_MODEL, Message, cut, map_tensors, tensors
from polyfed.core.request import Send
from polyfed.core.system.openmp import using_threads
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.data import Population
from polyfed.data.token_ids import whole_numbers
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.replies import Replies
from polyfed.model import ENCODERS
from polyfed.privacy.egress.ledger import TO_CLIENT


@dataclass(frozen=True)
class CapturedReply:
    """One reply of one client, and the facts that its receiver knows.

    Attributes:
        round: the round; 0 is the set-up.
        client: the number of the client.
        seen_by: the destination of the reply: `server` or `silo`.
        sent: the message that the client had received.
        message: the reply.
        known: the client's parameters as the receivers knew them before the reply. Each parameter has the value that
            was last sent to the client or returned by it.
    """

    round: int
    client: int
    seen_by: str
    sent: Message
    message: Message
    known: Tree

    def tree(self, kind: str) -> Tree:
        """Return the tensors of the reply's trees of this kind, by name.

        A masked reply holds integers instead of floating-point numbers. The attacker reads the integers as numbers in
        [-1, 1].
        """
        result = tree_of(self.message, kind)
        for name in masked_names(result, self.known):
            result[name] = (result[name].double() / torch.iinfo(result[name].dtype).max).to(self.known[name].dtype)
        return result

    def update(self, kind: str) -> Tree:
        """Return the client's gradient as the reply reveals it: a gradient, or the known parameters minus the new ones.

        Args:
            kind: `gradients` or `parameters`.
        """
        values = self.tree(kind)
        if kind == "gradients":
            return values
        both = {name: value for name, value in values.items() if name in self.known and value.is_floating_point()}
        return {name: self.known[name] - value for name, value in both.items()}

    def parts(self, kind: str) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the tensors of a kind other than parameters and gradients, as (field, block, tensor)."""
        for name, key, value in tensors(self.message):
            if self.message.kinds[name] == kind and kind not in OF_THE_MODEL:
                yield name, LABELS if kind == "labels" else key or self.message.owners[name] or SHARED, value


@dataclass
class Capture:
    """The replies of some clients in the first rounds of a run.

    Attributes:
        assembly: the parts of the run.
        limit: the largest number of clients whose replies are kept.
        replies: the replies, in the order in which they arrived.
        model: the last model that the server sent to every asked client. Empty if there was no such model.
        trained: the clients that had already trained, which means that they had returned parameters before the server
            sent the model of the attribute `model`.
    """

    assembly: Assembly
    limit: int
    replies: list[CapturedReply] = field(default_factory=list)
    model: Tree = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    _known: dict[int, Tree] = field(default_factory=dict)
    _returned: set[int] = field(default_factory=set)

    @cached_property
    def num_ids(self) -> Mapping[str, int]:
        """The number of ids of each modality that the model reads as token ids."""
        spec, columns = self.assembly.recipe.model, self.population.columns.modalities
        known = {name for name, encoder in spec.encoders.items() if isinstance(encoder, tuple(ENCODERS.values()))}
        # the user's own code may look whole numbers up, so they count as ids there
        other = {name: column for name, column in columns.items() if name not in known and whole_numbers(column)}
        return {n: int(c.values.max()) + 1 for n, c in other.items()} | spec.num_ids(self.assembly.model.shapes)

    @property
    def population(self) -> Population:
        """The clients and their rows."""
        return self.assembly.population

    def rows(self, client: int) -> Tensor:
        """The training rows of a client, int64 (n,)."""
        return self.population.train[client]

    def labels(self, rows: Tensor) -> Tensor:
        """The labels of rows, int64 (n,)."""
        return self.population.columns.label[rows]

    def samples(self, modality: str, rows: Tensor) -> Tensor:
        """The samples of rows as the model receives them, flattened: float32 (n, F)."""
        return self.population.columns.modalities[modality].take(rows).flatten(1)

    @property
    def owners(self) -> dict[int, int] | None:
        """Map each client to its silo, or return None if there are no silos. The devices of a silo share their rows."""
        silo = self.population.silo
        return None if silo is None else dict(enumerate(silo.tolist()))

    def watch(self, send: Send, replies: Replies) -> None:
        """Keep the replies to one request; see `Federation.watched`."""
        fed, seen_by = self.assembly.fed, self._destination()
        if isinstance(send, Message) and (model := tree_of(send, "parameters")):
            self.model, self.trained = {name: value.clone() for name, value in model.items()}, set(self._returned)
        for client in replies:
            if client < 0 or (client not in self._known and len(self._known) >= self.limit):
                continue
            context = self.assembly.engine.context(client)
            sent = cut(send if isinstance(send, Message) else send[client], context.blocks)
            sent, message = (map_tensors(msg, lambda value: value.detach().clone()) for msg in (sent, replies[client]))
            known = self._known.get(client, dict(context.initial)) | tree_of(sent, "parameters")
            self.replies.append(CapturedReply(fed.round, client, seen_by, sent, message, known))
            returned = tree_of(message, "parameters")
            self._returned |= {client} if returned else set()
            hidden = masked_names(returned, known)
            self._known[client] = known | {name: value for name, value in returned.items() if name not in hidden}

    def _destination(self) -> str:
        """Return the destination of the replies to the last request, according to the ledger."""
        fed = self.assembly.fed
        for entry in reversed(self.assembly.ledger.entries):
            if (entry.round, entry.request) == (fed.round, fed.asked - 1) and entry.destination != TO_CLIENT:
                return entry.destination
        return "server"


def tree_of(msg: Message, kind: str) -> Tree:
    """Return the tensors of a message's trees of this kind, by name.

    If two fields hold a tensor of the same name, the tensor of the first field is returned.
    """
    result: Tree = {}
    for name, key, value in tensors(msg):
        if key is not None and msg.kinds[name] == kind:
            result.setdefault(key, value)
    return result


def masked_names(values: Tree, known: Tree) -> set[str]:
    """Return the names of the tensors that hold integers in `values`, but floating-point numbers in `known`."""
    shared = {name for name in values if name in known and known[name].is_floating_point()}
    return {name for name in shared if not values[name].is_floating_point()}


def blocks_of(tree: Mapping[str, Tensor]) -> dict[str, Tree]:
    """The tensors of a tree of parameters or gradients, by block."""
    result: dict[str, Tree] = {}
    for name, value in tree.items():
        result.setdefault(block_of(name), {})[name] = value
    return result


def capture(recipe: Recipe, rounds: int, limit: int, sha256: str | None = None) -> Capture:
    """Run the first rounds of a recipe in a simulation, and keep the replies of its clients.

    The captured replies are the replies that the server uses, after clipping and noise at the client and after
    simulated attacks.

    Args:
        recipe: the recipe. A recipe with an engine whose clients are apart runs on `sequential`, which gives the same
            replies.
        rounds: the number of rounds, at most the rounds of the recipe.
        limit: the largest number of clients whose replies are kept.
        sha256: the fingerprint of the data; None accepts any data.

    Raises:
        DataError: the fingerprint of the data is not `sha256`.
    """
    engine = replace(recipe.engine, workers=1, device="cpu", combine="server")
    recipe = replace(recipe, engine=replace(engine, name="sequential") if engine.apart else engine)
    with using_threads(recipe.engine.threads):
        assembly = assemble(recipe)
        try:
            if sha256 is not None and sha256 != assembly.population.columns.fingerprint():
                raise DataError(
                    "the data is not that of the run: its labels, splits or features have changed. Restore the data, "
                    "or run the recipe again in another folder"
                )
            return _captured(assembly, rounds, limit)
        finally:
            assembly.engine.close()


def _captured(assembly: Assembly, rounds: int, limit: int) -> Capture:
    fed, algorithm = assembly.fed, assembly.algorithm
    result = Capture(assembly, limit)
    with fed.watched(result.watch):
        state = assembly.start()
        last = min(rounds, assembly.recipe.rounds)
        for round in range(1, last + 1):
            assembly.ledger.drain()
            fed.begin(round)
            state = algorithm.round(state, fed)
            if round == last or algorithm.evaluation.due(round, assembly.recipe.rounds):
                algorithm.evaluate(state, fed)
    return result
