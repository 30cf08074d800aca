"""How many clients share a stack: for the models of the benchmark, and for an engine whose steps become programs."""

import math
from typing import Any

import pytest

from polyfed.core.messages import Message
from polyfed.core.request import Request
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.engines import Vectorised, stack_size
from polyfed.engines.stack_size import clients_of_a_stack
from polyfed.experiment.assembly import assemble
from polyfed.experiment.recipe import EngineSpec
from polyfed.training.optimisers import Train
from world import algorithm, recipe

SIZES = {
    "small": ({"num": 50, "step": 1.27e6, "steps": 6, "weights": 53_276}, 50, 50),
    "food": ({"num": 20, "step": 2.8e7, "steps": 18, "weights": 1_167_764}, 10, 5),
    "a wide model": ({"num": 50, "step": 4.39e7, "steps": 6, "weights": 1_835_036}, 9, 3),
    "batches of 64 rows": ({"num": 20, "step": 1.12e8, "steps": 5, "weights": 1_167_764}, 10, 10),
    "convolutions over time": ({"num": 10, "step": 6.27e8, "steps": 4, "weights": 1_213_976}, 5, 5),
    "2-d convolutions": ({"num": 6, "step": 4.46e9, "steps": 2, "weights": 837_704}, 1, 1),
    "a client without a parameter": ({"num": 9, "step": 0.0, "steps": 3, "weights": 0}, 9, 9),
}
"""Name -> facts, clients in a stack if the cache does not count, clients in a stack if it does."""


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("cached", [False, True])
def test_the_size_of_a_stack(name: str, cached: bool) -> None:
    facts, without, within = SIZES[name]
    work = facts["num"] * facts["steps"] * facts["step"]
    found = clients_of_a_stack(
        int(facts["num"]), work=work, step=facts["step"], weights=int(facts["weights"]), cached=cached
    )
    assert found == (within if cached else without)


@pytest.mark.parametrize("num", [1, 2, 7, 20, 199])
def test_no_client_is_left_out_and_a_cached_stack_fits_or_has_enough_work(num: int) -> None:
    for weights in (10**3, 10**5, 10**6, 10**7, 10**9):
        step = 6.0 * weights
        size = clients_of_a_stack(num, work=num * step, step=step, weights=weights, cached=True)
        assert 1 <= size <= num
        enough = math.ceil(stack_size.CACHED_STEP / step)
        assert size * weights <= stack_size.CACHE_BYTES or size <= max(enough, 2)


@pytest.mark.parametrize(("least", "size"), [(10.0, 6), (2.5, 3), (0.5, 1)])
def test_clients_with_heavy_steps_are_divided_into_small_stacks(least: float, size: int) -> None:
    """Six clients are fewer than `LEAST_STACK`, but a stack needs only so many clients that its steps are heavy."""
    step = stack_size.LEAST_STEP / least
    assert clients_of_a_stack(6, work=60 * step, step=step, weights=8, cached=True) == size


def units(number: int, **options: Any) -> list[int]:
    """The numbers of clients in the stacks of a round. Each client has both modalities, and five steps in an epoch."""
    train = Train(lr=0.1, batch_size=4, **options)
    clients = ClientsSpec(partition="iid", num=6)
    data = Toy(rows=150, classes=3, shapes={"a": (4,), "b": (3,)}, test_share=0.2)
    made = recipe(algorithm("fedavg", train=train), EngineSpec(name="vectorised"), data=data, clients=clients)
    engine = assemble(made).engine
    assert isinstance(engine, Vectorised)
    request = Request(task=engine.algorithm.update, name="update", round=number, rounds=50, number=0, seed=1)
    return [len(unit) for unit in engine.units(request, range(6), Message())]


def test_the_cache_counts_only_where_programs_run_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_size, "CACHE_BYTES", 1.0)
    monkeypatch.setattr(stack_size, "OPERATIONS_PER_BYTE", 1e9)
    monkeypatch.setattr(stack_size, "CACHED_STEP", 1.0)
    assert units(1) == [6]  # five steps: programs run them from round 9 on
    assert units(50) == [2, 2, 2]
    assert units(50, precision="bf16") == [6]
    assert units(1, epochs=4) == [2, 2, 2]
