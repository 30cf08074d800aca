"""A run on a GPU asks PyTorch for deterministic algorithms. `tests/engines/test_cuda.py` shows the effect on a GPU."""

import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.deterministic

from polyfed.engines import Sequential
from polyfed.engines.machine.gpu import WORKSPACE, deterministic
from polyfed.engines.workers import process as worker_process
from polyfed.experiment.recipes import engine_choice
from polyfed.start import run
from world import algorithm, recipe

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # monkeypatch removes what the code under test sets
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def settings() -> tuple[int, bool, bool]:
    fill, benchmark = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    return torch.get_deterministic_debug_mode(), fill, benchmark


def test_the_settings_apply_inside_the_block_only() -> None:
    before = settings()
    with deterministic(GPU):
        assert settings() == (1, False, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == WORKSPACE
    assert settings() == before
    with suppress(KeyError), deterministic(GPU):
        raise KeyError
    assert settings() == before


def test_a_run_on_a_cpu_changes_no_setting() -> None:
    before = settings()
    with deterministic(CPU):
        assert settings() == before
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_stricter_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.set_deterministic_debug_mode(2)
    try:
        with deterministic(GPU):
            assert settings()[0] == 2
        assert settings()[0] == 2
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.set_deterministic_debug_mode(0)


def test_a_whole_run_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run computes on the CPU, but its settings are those of a GPU."""
    monkeypatch.setattr(engine_choice, "device_of", lambda recipe: GPU)
    modes: list[int] = []
    run(recipe(algorithm("fedavg"), rounds=1), listeners=[lambda event, **facts: modes.append(settings()[0])])
    assert set(modes) == {1}
    assert settings()[0] == 0


def test_worker_processes_are_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []

    def recv() -> None:
        modes.append(settings()[0])
        raise EOFError

    monkeypatch.setattr(worker_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker_process, "own_streams", lambda: None)
    engine: Any = SimpleNamespace(pool=None, ledger=SimpleNamespace(drain=list))
    engine.in_worker = lambda *_, **__: engine
    memory: Any = (None, None, None)
    worker_process.serve(engine, SimpleNamespace(recv=recv), (), memory, 0, GPU)  # type: ignore[arg-type]
    assert modes == [1]


def test_a_device_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from engines.devices import Devices
    from polyfed.deploy.device import runtime as client_runtime

    modes: list[int] = []
    alone = Sequential.alone

    def watched(self: Sequential, *args: Any) -> Any:
        modes.append(settings()[0])
        return alone(self, *args)

    monkeypatch.setattr(Sequential, "alone", watched)
    monkeypatch.setattr(client_runtime, "deterministic", lambda device: deterministic(GPU))
    Devices(tmp_path).serve(tmp_path / "run")
    assert set(modes) == {1}
