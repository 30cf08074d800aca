"""Base class of the engines that hold all clients in this process, with their data and local states."""

from collections.abc import Sequence
from typing import Any

from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message
from polyfed.core.request import Request, Send
from polyfed.core.tree import Tree
from polyfed.data import Population
from polyfed.engines.base import Engine, Method
from polyfed.model import Model


class InProcess(Engine):
    """Runs the clients of a population in this process. The arguments are those of `Engine`.

    Raises:
        RecipeError: some rows lack a modality that their client has, and the algorithm does not handle that.
    """

    def __init__(self, population: Population, model: Model, algorithm: Method, initial: Tree, **kwargs: Any) -> None:
        super().__init__(population, model, algorithm, initial, **kwargs)
        _refuse_missing_rows(population, algorithm)

    def received(self, request: Request, clients: Sequence[int], send: Send) -> dict[int, Any]:
        """Pass what is sent through the clients' gates, and return the message that each client receives.

        A message to all clients is cut and booked once for all clients with the same modalities.
        """
        if not isinstance(send, Message):
            nodes = {client: self.node((client,), self.context(client)) for client in clients}
            return {client: node.receive(request, self._to_device(send[client])) for client, node in nodes.items()}
        alike: dict[int, list[int]] = {}
        for client in clients:
            alike.setdefault(id(self.context(client)), []).append(client)
        found: dict[int, Any] = {}
        for group in alike.values():
            got = self.node(tuple(group), self.context(group[0])).receive(request, self._to_device(send))
            found |= dict.fromkeys(group, got)
        return {client: found[client] for client in clients}


def _refuse_missing_rows(population: Population, algorithm: Method) -> None:
    if algorithm.handles_missing_rows:
        return
    train, lacking = population.train, []
    for place, name in enumerate(population.columns.modalities):
        if name in population.columns.present:
            there = train.counts(population.columns.present[name].cpu().long(), 2)[:, 1]
            if bool((population.holds[:, place] & (there > 0) & (there < train.sizes)).any()):
                lacking.append(name)
    if lacking:
        raise RecipeError(
            f"data '{population.columns.name}': some rows of a client lack {', '.join(lacking)} "
            f"('{lacking[0]}_present'), and {type(algorithm).__name__} takes every row of a client for complete. Leave "
            "such rows out, or give them to clients of their own, which [clients] missing or holdings says lack it"
        )
