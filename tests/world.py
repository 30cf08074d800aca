"""A small federation for tests: unequal clients, a modality missing here and there, dropout and BatchNorm."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.base import Algorithm
from polyfed.core.request import Request, Send
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.deploy.device.local_states import places_of, state_before
from polyfed.deploy.device.store import DeviceStore
from polyfed.engines.protocol import RequestId
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.engine_choice import engine_of
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.replies import Answer
from polyfed.model import ModelSpec
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train

PLAIN = {"a": {"kind": "mlp", "hidden": [12]}, "b": {"kind": "mlp", "hidden": [10]}}


class NormAndDropout(nn.Module):
    """An encoder with BatchNorm and Dropout, in the words of plain PyTorch."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(shape[0], 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.25), nn.Linear(12, embedding)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


AWKWARD = {"a": {"kind": "world:NormAndDropout"}, "b": {"kind": "world:NormAndDropout"}}


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
    cls = ALGORITHMS[name]
    defaults: dict[str, Any] = {
        "train": Train(lr=0.1, batch_size=16, epochs=2),
        "evaluation": Evaluation(every=0),
    }
    if "selector" in cls.__dataclass_fields__:
        defaults["selector"] = Uniform(participation=4)
    return cls(**(defaults | options))


def recipe(method: Algorithm, engine: str | EngineSpec = "sequential", encoders: Any = None, **changes: Any) -> Recipe:
    """Six clients of 22 to 70 rows; a third of them lack modality `b`, half of the others keep both."""
    base = Recipe(
        data=Toy(rows=330, classes=4, seed=3),
        algorithm=method,
        model=ModelSpec(embedding=6, encoders=encoders or PLAIN),
        clients=ClientsSpec(partition="dirichlet", num=6, alpha=1.0, holdings=[["a", "b"], ["a"], ["a", "b"], ["b"]]),
        rounds=3,
        engine=EngineSpec(name=engine) if isinstance(engine, str) else engine,  # type: ignore[arg-type]
    )
    return replace(base, **changes)


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


def played(made: Recipe) -> tuple[Assembly, Any, list[dict[str, Any]]]:
    """All rounds of a recipe without files: its parts, the final state, the ledger's rows."""
    parts = assemble(made)
    return parts, through(parts, made.rounds), list(parts.ledger.rows())


def through(parts: Assembly, rounds: int) -> Any:
    """The state after these rounds."""
    fed, method = parts.fed, parts.algorithm
    state: Any = parts.start()
    for round in range(1, rounds + 1):
        fed.begin(round)
        state = method.round(state, fed)
    return state


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of two trees, relative to the largest entry of each tensor.

    A tensor below a thousandth of the tree's largest entry is measured against that thousandth: the bias before a
    BatchNorm has no gradient, and its entries are rounding.
    """
    assert a.keys() == b.keys()
    sizes = {n: float(v.abs().max()) for n, v in a.items() if v.numel()}
    floor = 1e-3 * max(sizes.values(), default=1.0) or 1.0
    return max((float((a[n] - b[n]).abs().max()) / max(size, floor) for n, size in sizes.items()), default=0.0)


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
