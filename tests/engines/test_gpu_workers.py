"""Worker processes that train on GPUs, while the server's process stays on the CPU; on a device that is not there."""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from elsewhere import DEVICE, elsewhere
from laws.rows import ROWS
from laws.test_laws import params, world
from polyfed.core.errors import RecipeError
from polyfed.engines import stack_division
from polyfed.engines.base import ClientExchange
from polyfed.engines.machine import gpu as machine_gpu
from polyfed.engines.vectorised import Vectorised
from polyfed.experiment.recipes.engine_choice import device_of, gpus_of, workers_of
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.start import run
from refusals import refuses
from sampled import in_turns
from world import AWKWARD, FROZEN, algorithm, played, recipe, same, through

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="worker processes need Linux")

CPU = torch.device("cpu")


def on_gpus(made: Recipe, workers: int = 2) -> Recipe:
    return replace(made, engine=replace(made.engine, workers=workers))


ENCODERS = {"batchnorm+dropout": AWKWARD, "frozen": FROZEN}


@pytest.mark.parametrize(
    ("name", "engine", "encoders"), in_turns(sorted(ROWS), ["sequential", "vectorised"], [*ENCODERS])
)
def test_several_gpus_give_the_bits_of_one(name: str, engine: str, encoders: str) -> None:
    made = replace(world(name, engine, ENCODERS[encoders]), rounds=2)
    made = replace(made, engine=replace(made.engine, stack=2))  # by default, every GPU gets a stack
    with elsewhere():
        one, state, ledger = played(made)
        first = {key: value.cpu() for key, value in params(state).items()}
        kept = {c: {key: value.cpu() for key, value in tree.items()} for c, tree in one.engine.locals.items()}
    with elsewhere(in_workers=True):
        many, other, other_ledger = played(on_gpus(made))
        many.engine.close()
    assert many.engine.pool.returned > 0  # type: ignore[attr-defined]
    assert same(first, params(other))
    assert ledger == other_ledger
    assert kept.keys() == many.engine.locals.keys()
    assert all(same(tree, many.engine.locals[client]) for client, tree in kept.items())


def test_the_server_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    server = os.getpid()
    trained = ClientExchange.run

    def spied(self: ClientExchange) -> Any:
        assert os.getpid() != server, "the server's process trained or evaluated a client"
        assert self.engine.device == DEVICE
        return trained(self)

    monkeypatch.setattr(ClientExchange, "run", spied)
    made = replace(recipe(algorithm("fedavg"), EngineSpec(name="vectorised", workers=2, stack=1)), rounds=2)
    with elsewhere(in_workers=True), patch("polyfed.experiment.running.loop.write_report"):
        finished = run(made)
    assert "macro_f1" in str(finished.result), finished.result
    assert {value.device for value in finished.params.values()} == {CPU}


def test_workers_take_the_gpus_in_turn_and_a_new_worker_that_of_a_dead_one() -> None:
    gpus = [torch.device("cuda", number) for number in (0, 1)]
    with elsewhere(in_workers=True):
        engine = assemble(recipe(algorithm("fedavg"), EngineSpec(workers=3))).engine
        pool = engine.pool  # type: ignore[attr-defined]
        pool.devices = gpus
        pool.start(3)
        assert [worker.device for worker in pool.started] == [gpus[0], gpus[1], gpus[0]]
        os.kill(pool.started[1].process.pid, signal.SIGKILL)
        pool._replace(pool.started[1], [[0]])
        assert [worker.device for worker in pool.started] == [gpus[0], gpus[1], gpus[0]]
        engine.close()


def full(device: torch.device) -> float:
    """Free memory: none on the GPUs."""
    return 0.0 if device == DEVICE else float("inf")


def test_workers_note_once_that_features_stay_in_main_memory() -> None:
    made = replace(recipe(algorithm("fedavg"), EngineSpec(workers=2)), rounds=2)
    texts: list[str] = []
    with elsewhere(in_workers=True), patch("polyfed.engines.machine.gpu.free_bytes", full):
        parts = assemble(made, emit=lambda name, **facts: texts.append(facts.get("text", "")))
        through(parts, made.rounds)
        parts.engine.close()
    assert sum("They therefore stay in main memory" in text for text in texts) == 1


def test_a_gpu_that_cannot_be_used_ends_the_run_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Vectorised, device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Vectorised, "move", failing)
    with elsewhere(in_workers=True), refuses(RuntimeError, "failing"):
        played(recipe(algorithm("fedavg"), EngineSpec(workers=2)))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def choice(**options: Any) -> tuple[str, int, list[str]]:
    """The server's device, the number of workers, and the workers' GPUs."""
    made = recipe(algorithm("fedavg"), EngineSpec(**options))
    return str(device_of(made)), workers_of(made), [str(gpu) for gpu in gpus_of(made)]


@pytest.mark.usefixtures("two_gpus")
def test_workers_use_all_gpus() -> None:
    assert choice(device="cuda", workers=2) == ("cpu", 2, ["cuda:0", "cuda:1"])
    assert choice(device="auto", workers=4) == ("cpu", 4, ["cuda:0", "cuda:1"])
    assert choice(device="cuda") == ("cuda", 1, [])
    assert choice(device="cuda", workers=1) == ("cuda", 1, [])
    assert choice(device="cpu", workers=2) == ("cpu", 2, [])


def test_without_gpus_auto_workers_use_the_cpu() -> None:
    assert choice(device="auto", workers=2) == ("cpu", 2, [])
    with refuses(RecipeError, "engine.device: PyTorch sees"):
        choice(device="cuda", workers=2)


@pytest.mark.usefixtures("two_gpus")
def test_a_process_that_uses_cuda_has_no_gpu_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with refuses(RecipeError, "engine.workers: forks"):
        choice(device="cuda", workers=2)


def test_the_memory_of_a_gpu_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answered(command: list[str], **options: Any) -> Any:
        asked.append(command[-1])
        return SimpleNamespace(stdout="1000\n")

    monkeypatch.setattr(machine_gpu.subprocess, "run", answered)
    gpu = torch.device("cuda", 7)  # `total_bytes` remembers its answers, so the tests share no GPU
    assert stack_division.stack_bytes(gpu) == stack_division.stack_bytes(gpu) == 1000 * stack_division.GPU_SHARE
    (code,) = asked
    assert "'cuda:7'" in code
