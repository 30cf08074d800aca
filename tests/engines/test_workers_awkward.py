"""Worker processes and an algorithm whose code is awkward: it never matters whether a request was shared."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from polyfed.algorithms import Averaging
from polyfed.algorithms.averaging import Update
from polyfed.algorithms.base import Broadcast
from polyfed.core.errors import RecipeError
from polyfed.core.system import openmp
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.results.run_result import Run
from polyfed.experiment.running.assembly import assemble
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, recipe

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="worker processes need Linux"),
    pytest.mark.usefixtures("everything_is_worth_sharing"),
]

ROOT = Path(__file__).resolve().parents[2]
TRAIN = Train(lr=0.1, batch_size=16)


def both(made: Recipe, kind: str) -> tuple[Run, Run]:
    """Run a recipe with one process and with two workers."""
    one, two = (
        polyfed.run(replace(made, engine=EngineSpec(name=kind, workers=num)))  # type: ignore[arg-type]
        for num in (1, 2)
    )
    return one, two


@dataclass(frozen=True, kw_only=True)
class Strided(Averaging):
    """FedAvg whose messages, replies and local states are not contiguous, and whose sums run along other strides."""

    def outgoing(self, state: Any, cohort: Any, fed: Any) -> Broadcast:
        return Broadcast({name: strided(value) for name, value in state.params.items()})

    def local(self, context: Any, key: int) -> dict[str, Any]:
        return {"kept": torch.randn(301, 97, generator=torch.Generator().manual_seed(key % 2**31)).t()}

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        received = sum(value.sum() for value in got.params.values() if value.dim() == 2)
        moved = 1e-4 * received + 1e-4 * local["kept"].sum(1).sum()
        params = {name: strided(value + moved) for name, value in fit.params.items()}
        return Update(params, fit.loss, data.num_rows), {"kept": strided(local["kept"] * 1.01)}


def strided(value: torch.Tensor) -> torch.Tensor:
    return value.transpose(-2, -1).contiguous().transpose(-2, -1) if value.dim() > 1 else value


@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
def test_the_memory_layout_of_tensors_changes_no_bit(kind: str) -> None:
    wide = {"a": {"kind": "mlp", "hidden": [300]}, "b": {"kind": "mlp", "hidden": [300]}}
    made = recipe(Strided(train=Train(lr=0.01, batch_size=16)), encoders=wide, rounds=3)
    one, two = both(made, kind)
    assert one.result["state_sha256"] == two.result["state_sha256"]


@dataclass(frozen=True, kw_only=True)
class Threading(Averaging):
    """FedAvg whose clients change the number of threads of PyTorch."""

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        found = torch.get_num_threads()
        torch.set_num_threads(3)
        params = {name: value + 1e-3 * found for name, value in fit.params.items()}
        return Update(params, fit.loss, data.num_rows), local


@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
def test_a_client_that_changes_the_number_of_threads_changes_it_for_no_other_client(kind: str) -> None:
    before = torch.get_num_threads()
    one, two = both(recipe(Threading(train=TRAIN), rounds=3), kind)
    assert one.result["state_sha256"] == two.result["state_sha256"]
    assert torch.get_num_threads() == before


@dataclass(frozen=True, kw_only=True)
class Unprepared(Averaging):
    """FedAvg that cannot make the first local state of a client with one modality."""

    def local(self, context: Any, key: int) -> dict[str, Any]:
        if context.modalities == ("b",):
            raise ValueError("no state for b alone")
        return {}


@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
@pytest.mark.filterwarnings("ignore:.*gave no usable reply in any round")
def test_a_client_without_a_first_local_state_is_missing_with_the_reason(kind: str) -> None:
    runs = both(recipe(Unprepared(train=TRAIN)), kind)
    for run in runs:
        assert [row["missing"] for row in run.rounds] == [{"3": "ValueError: no state for b alone"}] * len(run.rounds)
    assert runs[0].result["state_sha256"] == runs[1].result["state_sha256"]


@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
def test_with_debug_the_exception_of_the_first_local_state_ends_the_run(kind: str) -> None:
    made = recipe(Unprepared(train=TRAIN), EngineSpec(name=kind, workers=1, debug=True))  # type: ignore[arg-type]
    with refuses(ValueError, "for b alone") as caught:
        polyfed.run(made)
    assert caught.value.__notes__ == ["in client 3, round 1, when its first local state was made"]


@dataclass(frozen=True, kw_only=True)
class Ending(Averaging):
    """FedAvg whose clients end the program."""

    how: str

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        raise ENDS[self.how]


class Cable(RecipeError):
    """An error that pickle cannot rebuild, because it needs two arguments."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


ENDS = {
    "exit": SystemExit(3),
    "exit with an object": SystemExit(threading.Lock()),
    "interrupt": KeyboardInterrupt(),
    "polyfed's error": RecipeError("wrong"),
    "own error": Cable("a knot", "the cable"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", ENDS)
def test_a_client_that_ends_the_program_ends_it(how: str, workers: int) -> None:
    made = recipe(Ending(train=TRAIN, how=how), EngineSpec(name="sequential", workers=workers))
    expected = ENDS[how]
    with pytest.raises(RecipeError if how == "own error" else type(expected)) as caught:
        polyfed.run(made)
    assert str(caught.value) == str(expected)


@dataclass(frozen=True, kw_only=True)
class Changing(Averaging):
    """FedAvg whose clients change what they received."""

    what: str

    def local(self, context: Any, key: int) -> dict[str, Any]:
        return {"count": torch.zeros(3)}

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        moved = sum(value.sum() for value in (*got.params.values(), *local.values()))
        update = Update({name: value + 1e-4 * moved for name, value in fit.params.items()}, fit.loss, data.num_rows)
        name = next(iter(got.params))
        match self.what:
            case "entry of local":
                local["count"] = local["count"] + 1
                local["new"] = local.pop("count") * 2 if "new" in local else torch.ones(2)
                local.setdefault("count", torch.zeros(3))
            case "entry of got":
                got.params[name] = got.params[name] * 2
            case "tensor of local":
                local["count"].add_(1)
            case "part of local":
                local["count"][0] = 5
            case "tensor of got":
                got.params[name].mul_(2)
            case "tensor of initial":
                context.initial[name].mul_(2)
            case "tensor, and ends":
                local["count"].add_(1)
                raise KeyboardInterrupt
            case "tensor, and fails":
                local["count"].add_(1)
                raise ValueError("lost")
        return update, local


@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
@pytest.mark.parametrize("what", ["entry of local", "entry of got"])
def test_a_task_may_change_its_dicts(what: str, kind: str) -> None:
    one, two = both(recipe(Changing(train=TRAIN, what=what), rounds=4), kind)
    assert one.result["state_sha256"] == two.result["state_sha256"]
    kept, plain = (polyfed.run(recipe(Changing(train=TRAIN, what=w), rounds=4)) for w in (what, ""))
    assert (kept.result["state_sha256"] == plain.result["state_sha256"]) is (what == "entry of got")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("tensor of local", "its local state"),
        ("part of local", "its local state"),
        ("tensor of got", "got.params"),
        ("tensor of initial", "context.initial"),
        ("tensor, and fails", "its local state"),
    ],
)
def test_a_task_that_changes_a_tensor_in_place_is_refused(what: str, where: str, kind: str, workers: int) -> None:
    made = recipe(Changing(train=TRAIN, what=what), EngineSpec(name=kind, workers=workers))  # type: ignore[arg-type]
    with refuses(RecipeError, where):
        polyfed.run(made)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_remains_what_it_is(workers: int) -> None:
    made = recipe(Changing(train=TRAIN, what="tensor, and ends"), EngineSpec(name="sequential", workers=workers))
    with pytest.raises(KeyboardInterrupt):
        polyfed.run(made)


@dataclass(frozen=True, kw_only=True)
class ServerInPlace(Averaging):
    """FedAvg whose server changes its model in place, and whose clients read the initial model."""

    def merge(self, state: Any, replies: Any, fed: Any) -> Any:
        for value in state.params.values():
            value.mul_(0.5)
        return super().merge(state, replies, fed)

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        params = {name: value + 0.1 * context.initial[name] for name, value in fit.params.items()}
        return Update(params, fit.loss, data.num_rows), local


def test_a_server_that_changes_its_model_in_place_does_not_change_the_initial_model() -> None:
    one, two = both(recipe(ServerInPlace(train=TRAIN), rounds=3), "sequential")
    assert one.result["state_sha256"] == two.result["state_sha256"]


def test_the_norms_of_a_round_do_not_depend_on_workers() -> None:
    """The order in which workers return their clients varies, so several runs are compared."""
    made = recipe(algorithm("fedavg"), rounds=4)
    one = polyfed.run(replace(made, engine=EngineSpec(name="sequential", workers=1)))
    for _ in range(5):
        two = polyfed.run(replace(made, engine=EngineSpec(name="sequential", workers=2)))
        assert [row["norms"] for row in two.rounds] == [row["norms"] for row in one.rounds]


THREADS = """
import os, signal, sys
from dataclasses import dataclass
import torch
torch.set_num_threads(2)
import polyfed
from polyfed.algorithms import Averaging
from polyfed.engines import in_process
from polyfed.engines.workers.pool import Workers
from polyfed.experiment.recipes.recipe import EngineSpec
from polyfed.training.optimisers import Train
from world import recipe
in_process.UNIT_FLOPS = 1.0
LARGE = torch.ones(2**20)

@dataclass(frozen=True, kw_only=True)
class Large(Averaging):
    "FedAvg with an operation of two threads in each client."
    def reply(self, *args):
        (LARGE * 2).sum()
        return super().reply(*args)

answer = Workers.answer
def dying(self, *args):
    (LARGE * 2).sum()  # starts the second thread of this process
    for worker in self.started[:1]:
        os.kill(worker.process.pid, signal.SIGKILL)
    return answer(self, *args)
Workers.answer = dying

made = recipe(Large(train=Train(lr=0.1, batch_size=16)), EngineSpec(name=sys.argv[1], workers=2, threads=2), rounds=3)
print("done", polyfed.run(made).result["rounds"], flush=True)
"""


@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
def test_workers_with_several_threads_wait_for_no_thread_that_they_lack(kind: str) -> None:
    """New workers start, in the first request and when one has died, although this process has idle threads."""
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    process = subprocess.Popen(
        [sys.executable, "-c", THREADS, kind],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        pytest.fail("a worker waits for a thread that it does not have")
    assert said == "done 3\n"


def test_workers_with_several_threads_are_refused_if_idle_threads_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_function", lambda name: None)
    with refuses(RecipeError, "engine.workers: threads"):
        assemble(recipe(algorithm("fedavg"), EngineSpec(name="sequential", workers=2, threads=2)))
    assemble(recipe(algorithm("fedavg"), EngineSpec(name="sequential", workers=2, threads=1))).engine.close()
