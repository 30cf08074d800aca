"""Example-level privacy: the gradient of each row is clipped as in an independent loop, with noise, on both engines."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.privacy_noise import Clip
from polyfed.core.tree import Tree, block_of
from polyfed.experiment.running.assembly import assemble
from polyfed.training import SingleClientData, StackedClientData
from polyfed.training.optimisers import Train
from polyfed.training.per_sample import PerSample
from refusals import refuses
from stacks import stack_of
from world import algorithm, recipe

BLOCKS = ("a", "b", "shared")


class Dropping(nn.Module):
    """An encoder with dropout."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(shape[0], 9), nn.Tanh(), nn.Dropout(0.4), nn.Linear(9, embedding))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


DROPPING = {m: {"kind": "test_per_sample:Dropping"} for m in "ab"}


class World:
    """Clients with both modalities, as single datasets and as a stack."""

    def __init__(self, encoders: Any = None) -> None:
        self.parts = assemble(recipe(algorithm("fedavg"), encoders=encoders))
        engine = self.parts.engine
        self.clients = [k for k in range(6) if engine.registry.owned(k) == ("a", "b")]
        self.context, self.round = engine.context(self.clients[0]), 1
        self.keys = tuple(keys.key(1, "client", k, 1) for k in self.clients)

    def one(self, place: int, privacy: PerSample | None) -> SingleClientData:
        engine, context = self.parts.engine, self.context
        rows, key = engine.rows(self.clients[place]), self.keys[place]
        return SingleClientData(
            engine.columns, rows, context.modalities, context.model, key, self.round, 3, privacy=privacy
        )

    def loss(self, w: Tree, batch: Batch) -> Tensor:
        return self.context.loss(w, batch)

    def trained(self, place: int, privacy: PerSample, train: Train) -> Tree:
        return self.one(place, privacy).minimise(self.loss, self.context.initial, train=train).params

    def stack(self, privacy: PerSample, train: Train) -> Tree:
        engine, context = self.parts.engine, self.context
        rows = stack_of([engine.rows(k) for k in self.clients])

        def run(lane: Tensor) -> Tree:
            data = StackedClientData(
                engine.columns, rows, self.keys, lane, context.modalities, context.model, 1, 3, privacy=privacy
            )
            return data.minimise(self.loss, context.initial, train=train).params

        found: Tree = vmap(run)(torch.arange(len(self.clients)))
        return found


@pytest.mark.parametrize("by_block", [False, True], ids=["joint", "per-block"])
def test_one_step_equals_a_loop_over_rows_with_plain_autograd(by_block: bool) -> None:
    world, train = World(), Train(lr=0.1, batch_size=16, steps=1)
    clip = Clip.of(0.4, BLOCKS, by_block=by_block)
    batch = world.one(0, None).batch(train, 1)
    start = {n: v.clone().requires_grad_() for n, v in world.context.initial.items()}
    total = {n: torch.zeros_like(v) for n, v in start.items()}
    factors = []
    for i in range(16):
        x = {m: v[i : i + 1] for m, v in batch.x.items()}
        loss = world.loss(start, Batch(x, batch.y[i : i + 1], batch.rows[i : i + 1], key=1))
        grads = dict(zip(start, torch.autograd.grad(loss, list(start.values())), strict=True))
        for group in BLOCKS if by_block else (None,):
            own = [n for n in grads if group in (None, block_of(n))]
            norm = math.sqrt(sum(float(grads[n].double().square().sum()) for n in own))
            factors.append(min(1.0, (0.4 / math.sqrt(3) if by_block else 0.4) / norm))
            for n in own:
                total[n] += factors[-1] * grads[n]
    assert min(factors) < 1, "the limit must matter"
    after = world.trained(0, PerSample(clip, 1e-7), train)
    for n, value in start.items():
        torch.testing.assert_close(after[n], (value - 0.1 * total[n] / 16).detach(), atol=1e-6, rtol=1e-5)


def test_without_a_limit_and_noise_it_is_plain_training() -> None:
    world, train = World(), Train(lr=0.1, batch_size=11, epochs=1)  # 66 rows are six full batches
    wide = PerSample(Clip(1e9), 1e-6)
    plain = world.one(0, None)
    rows = torch.arange(22)
    one, other = (
        SingleClientData(plain.columns, plain.index[rows], plain.modalities, plain.model, plain.key, 1, 3, privacy=p)
        .minimise(world.loss, world.context.initial, train=train)
        .params
        for p in (None, wide)
    )
    for n in one:
        torch.testing.assert_close(one[n], other[n], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("encoders", [None, DROPPING], ids=["plain", "dropout"])
def test_a_stack_of_unequal_clients_equals_single_clients(encoders: Any) -> None:
    world, train = World(encoders), Train(lr=0.1, batch_size=16, epochs=2, momentum=0.5)
    privacy = PerSample(Clip.of(0.5, BLOCKS, by_block=True), 0.3)
    stack = world.stack(privacy, train)
    for place in range(len(world.clients)):
        alone = world.trained(place, privacy, train)
        for n, value in alone.items():
            torch.testing.assert_close(stack[n][place], value, atol=1e-5, rtol=1e-4)


def test_the_noise_of_a_step_on_ten_thousand_draws() -> None:
    train, privacy = Train(lr=1.0, batch_size=16, steps=1), PerSample(Clip(1e-6), 0.8)
    drawn = []
    world = World()
    for round in range(1, 60):
        world.round, world.keys = round, (keys.key(1, "client", 0, round),) * len(world.clients)
        after = world.trained(0, privacy, train)
        drawn += [(world.context.initial[n] - after[n]).flatten() for n in after]
    noise = torch.cat(drawn).double()[:10_000]
    assert len(noise) == 10_000
    assert abs(float(noise.mean())) < 4 * 0.05 / 100
    assert float(noise.std()) == pytest.approx(0.8 / 16, rel=4 / math.sqrt(20_000))


def test_noise_of_the_system_differs_from_call_to_call() -> None:
    world, train = World(), Train(lr=0.1, batch_size=16, steps=2)
    first, again = (world.trained(0, PerSample(Clip(0.5), 0.3), train) for _ in range(2))
    secure = world.trained(0, PerSample(Clip(0.5), 0.3, secure=True), train)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not any(torch.equal(first[n], secure[n]) for n in first)


def test_what_would_get_around_the_noise_is_refused() -> None:
    world, privacy = World(), PerSample(Clip(0.5), 0.3)
    data, start = world.one(0, privacy), world.context.initial
    with refuses(RecipeError, "privacy.unit: only in `minimise`"):
        data.fold(lambda carry, batch: carry, 0)
    with refuses(RecipeError, "privacy.unit: only in `minimise`"):
        data.batch(Train(), 1)
    with refuses(RecipeError, "privacy.unit: only in `minimise`"):
        data.at(torch.arange(3)).collect(lambda batch: dict(batch.x))
    with refuses(RecipeError, "privacy.unit: have no noise"):
        data.minimise(lambda w, batch: (world.loss(w, batch), batch.y.sum()), start, train=Train(steps=1))
    with refuses(RecipeError, "privacy.unit: each term's gradient"):
        data.minimise(lambda w, batch: {"x": world.loss(w, batch)}, start, train=Train(steps=1), split=True)
    with refuses(RecipeError, "privacy.unit: accumulate > 1"):
        data.minimise(world.loss, start, train=Train(steps=1, accumulate=2))
