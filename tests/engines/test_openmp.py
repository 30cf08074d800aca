"""Idle OpenMP threads end before worker processes start, and copies for the workers start no new ones."""

import os
from pathlib import Path

import pytest
import torch

from polyfed.engines import openmp
from polyfed.engines.in_process import using_threads
from polyfed.engines.openmp import end_idle_threads
from polyfed.engines.shared_memory import Arena, copied

TASKS = Path("/proc/self/task")

needs_openmp = pytest.mark.skipif(
    not TASKS.exists() or openmp._pause() is None, reason="needs Linux and OpenMP 5.0, to count the threads"
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


def test_without_the_function_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_pause", lambda: None)
    end_idle_threads()
    assert torch.ones(3).sum() == 3
