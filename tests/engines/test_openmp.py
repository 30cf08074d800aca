"""Idle OpenMP threads end before worker processes start, and later operations are as before."""

import os
from pathlib import Path

import pytest
import torch

from polyfed.engines import openmp
from polyfed.engines.in_process import using_threads
from polyfed.engines.openmp import end_idle_threads

TASKS = Path("/proc/self/task")


@pytest.mark.skipif(not TASKS.exists() or openmp._pause() is None, reason="needs Linux and OpenMP 5.0")
def test_waiting_threads_end_and_operations_start_new_ones() -> None:
    x = torch.linspace(0, 1, 2**20)
    with using_threads(3):
        end_idle_threads()
        few = len(os.listdir(TASKS))
        wanted = x * x + x
        assert len(os.listdir(TASKS)) == few + 2
        end_idle_threads()
        assert len(os.listdir(TASKS)) == few
        assert torch.equal(x * x + x, wanted)
        assert len(os.listdir(TASKS)) == few + 2


def test_without_the_function_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_pause", lambda: None)
    end_idle_threads()
    assert torch.ones(3).sum() == 3
