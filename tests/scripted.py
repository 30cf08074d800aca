"""A federation whose devices are a script: blocks of random numbers that drift, no data, no model, no training."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.local import Done
from polyfed.algorithms.personal.blocks import Blocks, Installed
from polyfed.core.messages import Message
from polyfed.core.request import Request, Send
from polyfed.core.tree import SHARED, block_of
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.clock import Clock
from polyfed.federation.federation import Federation
from polyfed.federation.links.network import Network
from polyfed.federation.replies import Answer, ReplyStack
from polyfed.objective import CLASSES
from polyfed.privacy.egress.ledger import Ledger

PARAMS = {"a.w": torch.zeros(2, 3), "b.w": torch.zeros(5), "shared.w": torch.zeros(4)}


class Script:
    """An engine: `models[k]` holds a device's blocks; training adds noise of its own to them."""

    name = "script"

    def __init__(self, holds: Tensor, seed: int, size: float = 1.0) -> None:
        self.holds, self.draw, self.size = holds, np.random.default_rng(seed), size
        start = {n: torch.tensor(self.draw.normal(size=tuple(v.shape))).float() for n, v in PARAMS.items()}
        self.models = [{n: v for n, v in start.items() if self.has(k, block_of(n))} for k in range(len(holds))]
        self.sent: dict[str, dict[int, np.ndarray]] = {}
        self.got: dict[int, dict[str, Tensor]] = {}

    def has(self, k: int, block: str) -> bool:
        return block == SHARED or bool(self.holds[k, ["a", "b"].index(block)])

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        run: Any = getattr(self, request.name)
        return Answer([run(k, send if isinstance(send, Message) else send[k]) for k in clients], {})

    def install(self, k: int, got: Any) -> ReplyStack:
        self.models[k] = {**self.models[k], **got.params}
        self.got[k] = got.params
        return ReplyStack((k,), Installed())

    def practise(self, k: int, got: Any) -> ReplyStack:
        for n, v in self.models[k].items():
            self.models[k][n] = v + torch.tensor(self.draw.normal(size=tuple(v.shape)) * self.size).float()
        return ReplyStack((k,), Done(torch.tensor([1.0]), torch.tensor([10])))

    train_own = practise

    def upload(self, k: int, got: Any) -> ReplyStack:
        wanted = {block_of(n) for n in got.blocks}
        params = {n: v.unsqueeze(0) for n, v in self.models[k].items() if block_of(n) in wanted}
        for n, v in params.items():
            self.sent.setdefault(block_of(n), {})[k] = v.double().numpy().ravel()
        return ReplyStack((k,), Blocks(params))


def scripted(
    method: Algorithm, holds: list[list[int]], network: Network | None = None, seed: int = 0, size: float = 1.0
) -> tuple[Federation, Script]:
    """A federation over modalities `a` and `b`; row counts are 10, 20, 30, ..."""
    table = torch.tensor(holds, dtype=torch.bool)
    script = Script(table, seed, size)
    flops = {"a": 1e5, "b": 3e5, SHARED: 1e4}
    model = SimpleNamespace(is_buffer=lambda name: False, has_batchnorm=False, flops=flops.__getitem__)
    registry = ClientRegistry(("a", "b"), 10 * torch.arange(1, len(holds) + 1), table)
    clock = None
    if network is not None:
        clock = Clock(network.links(len(holds), seed), Ledger("r"))
    context = SimpleNamespace(model=model, objective=CLASSES, num_classes=2)
    return Federation(registry, script, method, context, PARAMS, seed, 50, clock=clock), script
