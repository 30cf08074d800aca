"""Runs on a real GPU agree with runs on the CPU. A machine without CUDA skips this file.

`test_device.py` covers what needs no GPU: that no tensor of the CPU meets a tensor of the device. With
`POLYFED_PRETEND_GPU` in the environment, the CPU is the GPU, to test these tests; see benchmarks/gpu.py.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from laws.rows import ROWS
from laws.test_laws import NAMES, params, world
from polyfed.core.tree import Tree
from polyfed.data import Column, Columns
from polyfed.data.sources import Toy
from polyfed.engines.machine.gpu import free_bytes, with_rows
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.start import run
from polyfed.training.optimisers import Train
from world import AWKWARD, PLAIN, furthest, played

PRETEND = "POLYFED_PRETEND_GPU" in os.environ
GPU: Any = "cpu" if PRETEND else "cuda"
real = pytest.mark.skipif(PRETEND, reason="the CPU that pretends to be a GPU has no memory of its own")

LAX = 10.0
"""A GPU sums in another order than a CPU, so the tolerance is this many times the tolerance between two engines."""

ENCODERS = {"a": {"kind": "mlp", "hidden": [16]}, "b": {"kind": "mlp", "hidden": [16]}}

if not PRETEND and not torch.cuda.is_available():
    pytest.skip("PyTorch finds no GPU on this machine", allow_module_level=True)


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Convolutions in float32 instead of TF32, which PyTorch uses by default and which keeps ten bits of a number."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def there(made: Recipe) -> Recipe:
    return replace(made, engine=replace(made.engine, device=GPU, debug=True))


def on_cpu(tree: Tree) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in tree.items()}


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("encoders", [PLAIN, AWKWARD], ids=["plain", "batchnorm+dropout"])
@pytest.mark.parametrize("name", NAMES)
def test_a_method_trains_the_same_models_on_a_gpu(name: str, encoders: Any, engine: str) -> None:
    made = replace(world(name, engine, encoders), rounds=2)
    here, state_here, ledger_here = played(made)
    gpu, state_gpu, ledger_gpu = played(there(made))
    tolerance = LAX * ROWS[name].tolerance
    assert furthest(params(state_here), on_cpu(params(state_gpu))) < tolerance
    for client, tree in here.engine.locals.items():
        assert furthest(tree, on_cpu(gpu.engine.locals[client])) < 10 * tolerance, f"local state of client {client}"
    assert ledger_here == ledger_gpu


def many_steps(**options: Any) -> Recipe:
    """FedAvg with enough steps in a round for programs on a CPU (`training/programs/replay.py`)."""
    train = Train(lr=0.05, batch_size=4, epochs=8, **options)
    made = world("fedavg", "vectorised", ENCODERS, train=train)
    return there(replace(made, rounds=2))


def model_of(made: Recipe) -> dict[str, torch.Tensor]:
    return on_cpu(params(played(made)[1]))


@real
def test_a_stack_that_does_not_fit_the_gpu_runs_one_by_one_and_says_how_to_limit_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = many_steps()
    whole = model_of(replace(made, engine=replace(made.engine, stack=1)))
    monkeypatch.setattr("polyfed.engines.vectorised.vmap", lambda *_, **__: torch.empty(2**50, device=GPU))
    said: list[str] = []
    monkeypatch.setattr("polyfed.engines.vectorised.Vectorised.looped", lambda _, request, reason: said.append(reason))
    assert furthest(whole, model_of(replace(made, engine=replace(made.engine, debug=False)))) < 1e-6
    assert "[engine] stack = 1" in said[0]


WITH_WORKERS = """
import sys
from dataclasses import replace
import torch
from laws.test_laws import params, world
from world import played

made = replace(world(sys.argv[1], "vectorised"), rounds=2)
made = replace(made, engine=replace(made.engine, device="cuda", workers=2, stack=2))
parts, state, _ = played(made)
parts.engine.close()
assert parts.engine.pool.returned > 0
torch.save(params(state), sys.argv[2])
"""


@real
@pytest.mark.parametrize("name", ["fedavg", "partialfl", "cmsfed", "hfm", "pfmml"])
def test_worker_processes_on_gpus_give_the_models_of_one_process(name: str, tmp_path: Path) -> None:
    """In a new Python process, because this one uses CUDA, so that processes forked from it cannot."""
    made = replace(world(name, "vectorised"), rounds=2)
    one = model_of(replace(made, engine=replace(made.engine, device=GPU, stack=2)))
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", WITH_WORKERS, name, str(tmp_path / "many")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths})
    assert furthest(one, torch.load(tmp_path / "many")) < 1e-6


@real
def test_features_that_do_not_fit_the_gpu_give_the_same_model() -> None:
    made = many_steps()
    resident = model_of(made)
    with patch("polyfed.engines.machine.gpu.free_bytes", lambda device: 0.0):
        assert furthest(resident, model_of(made)) < 1e-6


@real
def test_rows_that_are_copied_before_each_task_give_the_same_model() -> None:
    made = many_steps()
    resident = model_of(made)
    with patch("polyfed.engines.base.placed", lambda columns, device, emit: columns.to(device, features=False)):
        assert furthest(resident, model_of(made)) < 1e-6


@real
def test_pinned_memory_is_not_used_again_before_its_copy_has_ended() -> None:
    """Seven pieces of 16 MiB, behind work that keeps the GPU busy."""
    values = torch.randn(28, 2**20)
    none = torch.zeros(28, dtype=torch.long)
    table = Columns("large", {"a": Column(values)}, none, 2, none.to(torch.int8), torch.arange(28))
    there, busy = table.to(GPU, features=False), torch.randn(4096, 4096, device=GPU)
    for _ in range(20):
        busy = busy @ busy / 4096
    near = with_rows(there, [torch.arange(28)], ["a"], torch.device(GPU))
    assert near.modalities["a"].values.device.type == "cuda"
    assert torch.equal(near.modalities["a"].take(torch.arange(28, device=GPU)).cpu(), values)


def test_bfloat16_on_a_gpu_stays_near_float32() -> None:
    exact, lower = model_of(many_steps()), model_of(many_steps(precision="bf16"))
    assert 0 < furthest(exact, lower) < 0.2


def test_a_run_that_began_on_the_cpu_continues_on_a_gpu(tmp_path: Path) -> None:
    made = replace(world("cmsfed", "vectorised", ENCODERS), engine=EngineSpec(name="vectorised"), rounds=3)
    with patch("polyfed.experiment.running.loop.write_report"):
        whole = run(made, tmp_path / "cpu")
        run(replace(made, rounds=1), tmp_path / "both")
        continued = run(there(made), tmp_path / "both", resume=True)
    assert continued.result["rounds"] == whole.result["rounds"]
    assert furthest(whole.params, on_cpu(continued.params)) < 1e-3


@pytest.mark.filterwarnings("ignore:.*measures nothing")  # the laws' clients have no test rows of their own
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", ["fedavg", "cmsfed", "hfm", "pfmml", "partialfl"])
def test_a_resumed_run_on_a_gpu_equals_the_uninterrupted_run(name: str, engine: str, tmp_path: Path) -> None:
    refuse_difference(there(world(name, engine, AWKWARD)), tmp_path)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_resumed_run_with_convolutions_on_a_gpu_equals_the_uninterrupted_run(engine: str, tmp_path: Path) -> None:
    """By default, cuDNN may compute the gradients of convolutions in an order that changes from call to call."""
    made = there(world("fedavg", engine, {"a": {"kind": "cnn4"}, "b": {"kind": "conv-gru"}}))
    refuse_difference(replace(made, data=Toy(rows=330, classes=4, shapes={"a": (1, 16, 16), "b": (32, 6)})), tmp_path)


def refuse_difference(made: Recipe, folder: Path) -> None:
    """Compare a run that was continued after its first round with an uninterrupted run, bit for bit."""
    made = replace(made, rounds=3)
    with patch("polyfed.experiment.running.loop.write_report"):
        whole = run(made, folder / "whole")
        run(replace(made, rounds=1), folder / "parts")
        continued = run(made, folder / "parts", resume=True)
    assert continued.result["state_sha256"] == whole.result["state_sha256"]


@real
def test_the_free_memory_of_a_gpu_is_less_than_its_memory() -> None:
    device = torch.device(GPU)
    assert 0 < free_bytes(device) <= torch.cuda.get_device_properties(device).total_memory
