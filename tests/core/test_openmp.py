"""OpenMP threads: idle ones end before worker processes start, and the server starts none for small replies."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from polyfed.core import openmp
from polyfed.core.openmp import THREAD_BYTES, end_idle_threads, threads_worth
from polyfed.engines import in_process
from polyfed.engines.in_process import using_threads
from polyfed.engines.shared_memory import Arena, copied
from polyfed.experiment.assembly import assemble
from polyfed.experiment.recipe import EngineSpec
from polyfed.experiment.update_norms import ClientUpdates
from polyfed.training.optimisers import ServerOptimiser
from world import algorithm, recipe, through

TASKS = Path("/proc/self/task")

needs_openmp = pytest.mark.skipif(
    not TASKS.exists() or openmp._function("omp_pause_resource_all") is None,
    reason="needs Linux and OpenMP 5.0, to count the threads",
)


def threads() -> set[str]:
    return set(os.listdir(TASKS))


@needs_openmp
def test_waiting_threads_end_and_operations_start_new_ones() -> None:
    x = torch.linspace(0, 1, 2**20)
    with using_threads(3):
        end_idle_threads()
        for _ in range(2):
            before = threads()
            found = x * x + x
            new = threads() - before
            assert len(new) >= 2  # other tests may have threads that start or end meanwhile
            end_idle_threads()
            ended = time.monotonic() + 10  # a busy system removes an ended thread from /proc a little later
            while len(new & threads()) > len(new) - 2 and time.monotonic() < ended:
                time.sleep(0.01)
            assert len(new & threads()) <= len(new) - 2
    torch.testing.assert_close(found, x.double().square().add(x).float())


@needs_openmp
def test_copies_for_the_workers_start_no_threads() -> None:
    large = torch.arange(2**20, dtype=torch.float32)
    with using_threads(3):
        end_idle_threads()
        before = threads()
        (read,) = (arena := Arena()).read(arena.write([large]))
        copy = copied(read)
        assert len(threads() - before) < 2
        assert torch.equal(copy, large)


@needs_openmp
def test_operations_on_few_bytes_start_no_threads() -> None:
    large = torch.linspace(0, 1, 2**20)
    with using_threads(3):
        end_idle_threads()
        before = threads()
        with threads_worth(large.nbytes):
            found = large.sum()
        assert len(threads() - before) < 2
        torch.testing.assert_close(found, large.double().sum().float())
        end_idle_threads()
        before = threads()
        with threads_worth(100 * THREAD_BYTES):
            large.sum()
        assert len(threads() - before) >= 2


@needs_openmp
@pytest.mark.parametrize(("size", "allowed"), [(0, 1), (THREAD_BYTES - 1, 1), (THREAD_BYTES, 2), (9 * THREAD_BYTES, 3)])
def test_the_number_of_threads_follows_the_bytes_and_comes_back(size: int, allowed: int) -> None:
    with using_threads(3):
        with suppress(KeyError), threads_worth(size):
            assert torch.get_num_threads() == allowed
            with threads_worth(9 * THREAD_BYTES):  # an inner block does not raise the limit of the outer one
                assert torch.get_num_threads() == allowed
            raise KeyError
        assert torch.get_num_threads() == 3


@needs_openmp
def test_a_thread_of_the_user_that_starts_meanwhile_is_not_limited() -> None:
    found: list[int] = []
    with using_threads(3):
        with threads_worth(0):
            other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            other.start()
            other.join()
        assert found == [3]


@needs_openmp
@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
def test_a_server_with_workers_starts_no_threads_for_small_replies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "UNIT_FLOPS", 1.0)
    wide = {"a": {"kind": "mlp", "hidden": [4096]}, "b": {"kind": "mlp", "hidden": [4096]}}  # PyTorch would use threads
    server = ServerOptimiser(optimiser="avgm")
    made = recipe(algorithm("fedavg", server=server), EngineSpec(name=kind, workers=2), wide)  # type: ignore[arg-type]
    parts = assemble(made)
    parts.fed.watch = ClientUpdates().watch
    try:
        state = through(parts, 1)  # forks the workers
        with using_threads(3):
            end_idle_threads()
            before = threads()
            state = parts.algorithm.round(state, parts.fed)
            assert len(threads() - before) < 2
            monkeypatch.setattr(openmp, "THREAD_BYTES", 1)
            parts.algorithm.round(state, parts.fed)
            assert len(threads() - before) >= 2
        assert parts.engine.pool.returned
    finally:
        parts.engine.close()


def test_without_the_function_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_function", lambda name: None)
    end_idle_threads()
    with using_threads(3), threads_worth(0):
        assert torch.get_num_threads() == 3
    assert torch.ones(3).sum() == 3
