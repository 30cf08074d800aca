"""How clients are divided into stacks, for the models of the benchmark and with programs."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from polyfed.core.messages import Message
from polyfed.core.request import Request
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.engines import Vectorised, stack_division
from polyfed.engines.stack_division import num_stacks, stack_bytes
from polyfed.engines.workers.pool import Workers
from polyfed.experiment.recipes.recipe import EngineSpec
from polyfed.experiment.running.assembly import assemble
from polyfed.training.optimisers import Train
from world import algorithm, recipe

SIZES = {
    "small": ((50, 1.27e6, 6, 53_276), [50], [50]),
    "food": ((20, 2.8e7, 18, 1_167_764), [10, 10], [5, 5, 5, 5]),
    "a wide model": ((50, 4.39e7, 6, 1_835_036), [9, 9, 8, 8, 8, 8], [3] * 14 + [2] * 4),
    "batches of 64 rows": ((20, 1.12e8, 5, 1_167_764), [10, 10], [10, 10]),
    "convolutions over time": ((10, 6.27e8, 4, 1_213_976), [5, 5], [5, 5]),
    "2-d convolutions": ((6, 4.46e9, 2, 837_704), [1] * 6, [1] * 6),
    "a client without a parameter": ((9, 0.0, 3, 0), [9], [9]),
}
"""Name -> facts, sizes of the stacks if the cache does not count, sizes of the stacks if it does."""


def sizes(num: int, **facts: Any) -> list[int]:
    return [len(part) for part in np.array_split(range(num), num_stacks(num, **facts))]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("cached", [False, True])
def test_the_sizes_of_the_stacks(name: str, cached: bool) -> None:
    (num, step, steps, weights), without, within = SIZES[name]
    found = sizes(num, work=num * steps * step, step=step, weights=weights, cached=cached)
    assert found == (within if cached else without)


@pytest.mark.parametrize("num", [1, 2, 7, 20, 199])
def test_the_stacks_fit_the_cache_or_have_enough_work(num: int) -> None:
    for weights in (10**3, 10**5, 10**6, 10**7, 10**9):
        step = 6.0 * weights
        found = sizes(num, work=num * step, step=step, weights=weights, cached=True)
        enough = max(math.ceil(stack_division.CACHED_STEP / step), 3 if num % 2 else 2)
        assert max(found) * weights <= stack_division.CACHE_BYTES or max(found) <= enough
        assert min(found) > 1 or num == 1 or step > stack_division.LEAST_STEP


@pytest.mark.parametrize(("least", "stacks"), [(10.0, 1), (2.5, 2), (0.5, 6)])
def test_clients_with_heavy_steps_are_divided_into_small_stacks(least: float, stacks: int) -> None:
    """Six clients are fewer than `LEAST_STACK`, but a stack needs only so many clients that its steps are heavy."""
    step = stack_division.LEAST_STEP / least
    assert num_stacks(6, work=60 * step, step=step, weights=8, cached=True) == stacks


def units(number: int, gpus: int = 0, **options: Any) -> list[int]:
    """The numbers of clients in the stacks of a round. Each client has both modalities, and five steps in an epoch."""
    train = Train(lr=0.1, batch_size=4, **options)
    clients = ClientsSpec(partition="iid", num=6)
    data = Toy(rows=150, classes=3, shapes={"a": (4,), "b": (3,)}, test_share=0.2)
    made = recipe(algorithm("fedavg", train=train), EngineSpec(name="vectorised"), data=data, clients=clients)
    engine = assemble(made).engine
    assert isinstance(engine, Vectorised)
    if gpus:  # only `units` uses them here
        engine.gpus = tuple(torch.device("cuda", number) for number in range(gpus))
        engine.pool = None if gpus == 1 else Workers(engine, gpus, devices=engine.gpus)
    request = Request(task=engine.algorithm.update, name="update", round=number, rounds=50, number=0, seed=1)
    found = list(engine.units(request, range(6), Message()))
    assert sorted(client for unit in found for client in unit) == [*range(6)]
    return [len(unit) for unit in found]


def test_the_cache_counts_only_where_programs_run_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_division, "CACHE_BYTES", 1.0)
    monkeypatch.setattr(stack_division, "OPERATIONS_PER_BYTE", 1e9)
    monkeypatch.setattr(stack_division, "CACHED_STEP", 1.0)
    assert units(1) == [6]  # five steps: programs run them from round 9 on
    assert units(50) == [2, 2, 2]
    assert units(50, precision="bf16") == [6]
    assert units(1, epochs=4) == [2, 2, 2]


def test_only_the_number_and_the_memory_of_gpus_divide_similar_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_division, "STACK_FLOPS", 1.0)
    monkeypatch.setattr(stack_division, "LEAST_STACK", 2)
    assert units(1) == [2, 2, 2]
    monkeypatch.setattr(stack_division, "total_bytes", lambda device: 2**37)
    assert stack_bytes(torch.device("cuda")) == 2**35
    assert stack_bytes(torch.device("cpu")) == stack_division.STACK_BYTES
    assert units(1, gpus=1) == [6]
    assert units(1, gpus=2) == [3, 3]  # a stack for each worker process
    assert units(1, gpus=8) == [1] * 6
    monkeypatch.setattr(stack_division, "total_bytes", lambda device: 1)
    assert units(1, gpus=1) == [1] * 6
