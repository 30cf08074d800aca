"""The small federation of the laws, for all tests, with further encoders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.base import Algorithm
from polyfed.core.request import Request, Send
from polyfed.deploy.device.memory.local_states import places_of, state_before
from polyfed.deploy.device.memory.store import DeviceStore
from polyfed.engines.protocol import RequestId
from polyfed.experiment.recipes.engine_choice import engine_of
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.replies import Answer
from polyfed.laws.federation import AWKWARD, PLAIN, NormAndDropout, furthest, method, played, through
from polyfed.laws.federation import federation as recipe

__all__ = ["AWKWARD", "PLAIN", "NormAndDropout", "furthest", "played", "recipe", "through"]


class LayerNormed(nn.Module):
    """An encoder whose norm is no BatchNorm."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(shape[0], 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, embedding)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


LAYERNORM = {"a": {"kind": "world:LayerNormed"}, "b": {"kind": "world:LayerNormed"}}


class FrozenBackbone(NormAndDropout):
    """All but the last layer is frozen; BatchNorm and dropout follow training, as in PyTorch."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__(shape, embedding)
        self.layers[:-1].requires_grad_(False)


class KeptBackbone(FrozenBackbone):
    """The same, and the frozen part stays in evaluation mode."""

    def train(self, mode: bool = True) -> "KeptBackbone":
        super().train(mode)
        self.layers[:-1].eval()
        return self


class FrozenWhole(nn.Module):
    """An encoder with nothing to train."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], embedding).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


FROZEN = {"a": {"kind": "world:FrozenBackbone"}, "b": {"kind": "world:KeptBackbone"}}
WHOLE = {"a": {"kind": "world:FrozenWhole"}, "b": {"kind": "world:FrozenBackbone"}}


def algorithm(name: str, **options: Any) -> Algorithm:
    """An algorithm by name; `selector` defaults to 4 clients a round, `train` to two epochs of SGD."""
    return method(ALGORITHMS[name], **options)


def on_device(made: Recipe, **terms: Any) -> Assembly:
    """The parts of a recipe, whose engine is under the terms of a device: `limits`, `required` or `on_device`."""
    build = engine_of(made)
    return assemble(made, engine=lambda *parts, **options: build(*parts, **{**options, **terms}))


def losing(parts: Assembly, task: str, *clients: int) -> list[int]:
    """Have some clients' replies to a task get lost on the way; the list fills with who was lost."""
    engine, lost = parts.fed.engine, list[int]()
    answer = engine.answer

    def faulty(request: Request, asked: Sequence[int], send: Send) -> Answer:
        got = answer(request, asked, send)
        gone = {client: "lost" for client in clients if client in asked and request.name.endswith(task)}
        lost.extend(gone)
        left = [kept for part in got.parts if (kept := part.without(gone)) is not None]
        return Answer(left, got.missing | gone)

    engine.answer = faulty  # type: ignore[method-assign]
    return lost


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two trees are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def kept_states(folder: Path, run: str, client: int) -> dict[tuple[int, int], dict[str, Tensor]]:
    """The local states that a device keeps of a client, by round and number of the request."""
    with DeviceStore(folder).transaction(run, client) as memory:
        found = {}
        for round, request in places_of(memory):
            state = state_before(memory, RequestId(run, 0, round, request + 1, client))
            assert state is not None
            found[round, request] = state[0]
    return found
