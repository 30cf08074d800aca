"""OpenMP threads: idle ones end before worker processes start, and the server starts none for small replies."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from polyfed.core.system import openmp
from polyfed.core.system.openmp import THREAD_BYTES, end_idle_threads, threads_worth, using_threads
from polyfed.engines import in_process
from polyfed.engines.workers.shared_memory import Arena, copied
from polyfed.experiment.recipes.recipe import EngineSpec
from polyfed.experiment.results.updates import ClientUpdates
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.aggregation import ServerOptimiser
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
            torch.ones(1, 4) @ large.view(4, -1)  # MKL has a limit of its own
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
def test_a_thread_of_the_user_that_starts_meanwhile_keeps_its_number() -> None:
    found: list[int] = []
    before = torch.get_num_threads()
    with using_threads(3), threads_worth(0):
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert found == [before]


@needs_openmp
def test_matrix_products_use_the_number_of_threads() -> None:
    x = torch.rand(512, 512)
    with using_threads(3):
        end_idle_threads()
        before = threads()
        with using_threads(1):
            expected = x @ x
        assert len(threads() - before) < 2
        torch.testing.assert_close(x @ x, expected)
        assert len(threads() - before) >= 2
    end_idle_threads()


@pytest.mark.parametrize("num", [0, 1, 3])
def test_a_changed_number_of_threads_comes_back(num: int) -> None:
    before = torch.get_num_threads()
    with suppress(KeyError), using_threads(num):
        torch.set_num_threads(5)
        raise KeyError
    assert torch.get_num_threads() == before
    torch.set_num_threads(before)  # for threads that other tests start


@pytest.fixture
def no_openmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An OpenMP library without the functions that polyfed calls."""
    openmp._setters.cache_clear()
    monkeypatch.setattr(openmp, "_function", lambda name: None)
    yield
    openmp._setters.cache_clear()


@pytest.mark.usefixtures("no_openmp")
def test_without_a_function_for_one_python_thread_the_number_still_changes() -> None:
    before = torch.get_num_threads()
    assert openmp._setters() == (torch.set_num_threads,)
    with using_threads(3):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before


@needs_openmp
@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
def test_a_server_with_workers_starts_no_threads_for_small_replies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "UNIT_FLOPS", 1.0)
    wide = {"a": {"kind": "mlp", "hidden": [4096]}, "b": {"kind": "mlp", "hidden": [4096]}}  # PyTorch would use threads
    server = ServerOptimiser(optimiser="avgm")
    made = recipe(algorithm("fedavg", server=server), EngineSpec(name=kind, workers=2), wide)  # type: ignore[arg-type]
    parts = assemble(made)
    try:
        state = through(parts, 1)  # forks the workers
        with using_threads(3), parts.fed.watched(ClientUpdates().watch):
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


@pytest.mark.usefixtures("no_openmp")
def test_without_the_functions_the_number_of_threads_has_no_limit() -> None:
    end_idle_threads()
    with using_threads(3), threads_worth(0):
        assert torch.get_num_threads() == 3
    assert torch.ones(3).sum() == 3
