"""Tasks and servers whose code is awkward: a run gives the same model in one process and on workers, or is refused."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing
from torch.nn.functional import batch_norm

import polyfed
from engines.test_workers_awkward import TRAIN, both
from polyfed.algorithms import Averaging
from polyfed.algorithms.averaging import Update
from polyfed.algorithms.base import Broadcast
from polyfed.core.errors import RecipeError, TooFewReplies
from polyfed.core.messages import carries, message
from polyfed.core.tree import Tree, clone
from polyfed.experiment.recipes.recipe import EngineSpec
from refusals import refuses
from world import AWKWARD, recipe

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="worker processes need Linux"),
    pytest.mark.usefixtures("everything_is_worth_sharing"),
]

ENGINES = ["sequential", "vectorised"]


@dataclass(frozen=True, kw_only=True)
class Normalising(Averaging):
    """FedAvg whose clients compute a loss outside of the local training."""

    copies: bool

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        params = clone(got.params) if self.copies else got.params
        again = context.loss(params, data.batch(self.train, 1))
        return Update(fit.params, fit.loss + again, data.num_rows), local


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_that_changes_running_statistics_of_its_inputs_is_refused(kind: Any, workers: int) -> None:
    made = recipe(Normalising(train=TRAIN, copies=False), EngineSpec(name=kind, workers=workers), AWKWARD)
    with refuses(RecipeError, "got.params"):
        polyfed.run(made)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_task_may_change_running_statistics_of_a_copy(kind: Any) -> None:
    one, two = both(recipe(Normalising(train=TRAIN, copies=True), encoders=AWKWARD, rounds=3), kind)
    assert one.result["state_sha256"] == two.result["state_sha256"]


@dataclass(frozen=True, kw_only=True)
class OwnStatistics(Averaging):
    """FedAvg whose clients keep running statistics of a layer that the model does not have."""

    def local(self, context: Any, key: int) -> Tree:
        return {"own.running_mean": torch.zeros(3), "own.running_var": torch.ones(3)}

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        batch_norm(torch.eye(3), local["own.running_mean"], local["own.running_var"], training=True)
        return Update(fit.params, fit.loss, data.num_rows), local


@pytest.mark.parametrize("kind", ENGINES)
def test_a_task_that_changes_running_statistics_of_its_own_is_refused(kind: Any) -> None:
    with refuses(RecipeError, "clients may share"):
        polyfed.run(recipe(OwnStatistics(train=TRAIN), EngineSpec(name=kind, workers=1)))


@dataclass(frozen=True, kw_only=True)
class Backward(Averaging):
    """FedAvg whose clients compute a gradient with `backward`."""

    copies: bool

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        params = clone(got.params) if self.copies else got.params
        for value in params.values():
            value.requires_grad_()
        context.loss(params, data.batch(self.train, 1)).backward()
        moved = {name: value - 0.01 * params[name].grad for name, value in fit.params.items()}
        return Update(moved, fit.loss, data.num_rows), local


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_that_lets_pytorch_add_gradients_to_its_inputs_is_refused(workers: int) -> None:
    made = recipe(Backward(train=TRAIN, copies=False), EngineSpec(name="sequential", workers=workers))
    with refuses(RecipeError, "got.params"):
        polyfed.run(made)


def test_a_task_may_let_pytorch_add_gradients_to_a_copy() -> None:
    one, two = both(recipe(Backward(train=TRAIN, copies=True), rounds=3), "sequential")
    assert one.result["state_sha256"] == two.result["state_sha256"]


@dataclass(frozen=True, kw_only=True)
class Returning(Averaging):
    """FedAvg whose clients return tensors that they received, and whose server changes replies and model in place."""

    def local(self, context: Any, key: int) -> Tree:
        return {"kept": torch.ones(3)}

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        first, second, third, fourth = [*fit.params][:4]
        bias = fit.params[third].flatten()[: len(fit.params[fourth])]  # shares the memory of another parameter
        same = {first: got.params[first], second: context.initial[second], fourth: bias}
        return Update(fit.params | same, fit.loss, data.num_rows), {"kept": local["kept"], "sent": fit.params[third]}

    def merge(self, state: Any, replies: Any, fed: Any) -> Any:
        for value in state.params.values():
            value.mul_(0.5)
        for part in replies.parts:
            for value in part.message.params.values():
                value.add_(0.25)
        return super().merge(state, replies, fed)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_server_may_change_replies_and_its_model_in_place(kind: Any) -> None:
    one, two = both(recipe(Returning(train=TRAIN), rounds=3), kind)
    assert one.result["state_sha256"] == two.result["state_sha256"]


@dataclass(frozen=True, kw_only=True)
class Odd(Averaging):
    """FedAvg whose clients keep or send a tensor that cannot be stored."""

    what: str
    sent: bool

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        odd = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "without values": lambda: torch.ones(3, device="meta"),
        }[self.what]()
        params = fit.params | {"shared.odd": odd} if self.sent else fit.params
        return Update(params, fit.loss, data.num_rows), local if self.sent else {"odd": odd}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("what", ["sparse", "nested", "without values"])
def test_a_tensor_that_cannot_be_stored_is_refused(what: str, sent: bool, workers: int) -> None:
    made = recipe(Odd(train=TRAIN, what=what, sent=sent), EngineSpec(name="sequential", workers=workers))
    where = "Update.params holds a" if sent else "'odd' in the"
    with refuses(RecipeError, where):
        polyfed.run(made)


@dataclass(frozen=True, kw_only=True)
class OddStart(Averaging):
    """FedAvg whose clients start with a tensor that cannot be stored."""

    def local(self, context: Any, key: int) -> Tree:
        return {"odd": torch.eye(3).to_sparse()}


@pytest.mark.parametrize("kind", ENGINES)
def test_a_first_local_state_that_cannot_be_stored_is_refused(kind: Any) -> None:
    with refuses(RecipeError, "quantised"):
        polyfed.run(recipe(OddStart(train=TRAIN), EngineSpec(name=kind)))


@message
class More(Broadcast):
    """A broadcast with another field."""

    extra: torch.Tensor = carries("statistic")


@dataclass(frozen=True, kw_only=True)
class Subclassed(Averaging):
    """FedAvg whose server sends a subclass of the message that its task declares."""

    def outgoing(self, state: Any, cohort: Any, fed: Any) -> Broadcast:
        return More(state.params, torch.tensor(1.0))


@pytest.mark.parametrize("kind", ENGINES)
def test_a_message_of_another_class_than_the_task_declares_is_refused(kind: Any) -> None:
    with refuses(RecipeError, "receives Broadcast"):
        polyfed.run(recipe(Subclassed(train=TRAIN), EngineSpec(name=kind)))


@dataclass(frozen=True, kw_only=True)
class SparseServer(Averaging):
    """FedAvg whose server sends a sparse tensor."""

    def outgoing(self, state: Any, cohort: Any, fed: Any) -> Broadcast:
        return Broadcast(state.params | {"shared.odd": torch.eye(3).to_sparse()})


@pytest.mark.parametrize("kind", ENGINES)
def test_a_sparse_tensor_of_the_server_is_refused(kind: Any) -> None:
    with refuses(RecipeError, "Broadcast.params"):
        polyfed.run(recipe(SparseServer(train=TRAIN), EngineSpec(name=kind)))


@dataclass(frozen=True, kw_only=True)
class WithProcess(Averaging):
    """FedAvg whose clients start a process."""

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()
        return Update(fit.params, fit.loss, data.num_rows), local


@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_task_that_starts_a_process_needs_a_run_without_workers() -> None:
    """Python refuses it in a worker, because nobody would end the process together with the worker."""
    made = recipe(WithProcess(train=TRAIN), EngineSpec(name="sequential", workers=1), rounds=1)
    assert polyfed.run(made).rounds[0]["missing"] == {}
    with refuses(TooFewReplies, "children"):
        polyfed.run(replace(made, engine=replace(made.engine, workers=2)))


@dataclass(frozen=True, kw_only=True)
class Leaving(Averaging):
    """FedAvg whose first client leaves a process behind, and whose worker then dies."""

    flag: str

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        if not Path(self.flag).exists():
            Path(self.flag).touch()
            child = os.fork()
            if child == 0:
                time.sleep(600)
                os._exit(0)
            Path(self.flag).write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        return Update(fit.params, fit.loss, data.num_rows), local


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_process_that_a_dead_worker_left_behind_does_not_stop_the_run(tmp_path: Path) -> None:
    """The process holds the worker's end of the pipe open."""
    made = recipe(Leaving(train=TRAIN, flag=str(tmp_path / "flag")), EngineSpec(name="sequential", workers=2))
    try:
        assert polyfed.run(made).rounds[-1]["missing"] == {}
    finally:
        os.kill(int((tmp_path / "flag").read_text()), signal.SIGKILL)


PRINTING = """
import multiprocessing
from dataclasses import dataclass
import polyfed
from polyfed.algorithms import Averaging
from polyfed.engines import in_process
from polyfed.experiment.recipes.recipe import EngineSpec
from polyfed.training.optimisers import Train
from world import recipe

@dataclass(frozen=True, kw_only=True)
class Printing(Averaging):
    def reply(self, context, data, fit, got, local):
        print("client", int(data.num_rows))
        return super().reply(context, data, fit, got, local)

    def merge(self, state, replies, fed):
        for worker in multiprocessing.active_children():
            worker.kill()
        return super().merge(state, replies, fed)

in_process.UNIT_FLOPS = 1.0
engine = EngineSpec(name="sequential", workers={workers})
polyfed.run(recipe(Printing(train=Train(lr=0.1, batch_size=16)), engine, rounds=1))
"""


def test_the_output_of_tasks_on_workers_is_written(tmp_path: Path) -> None:
    """Also if the worker is killed before Python fills the buffer of the file."""
    printed, paths = [], os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    env = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": ""}
    for workers in (1, 2):
        with (tmp_path / "out").open("w") as out:
            command = [sys.executable, "-c", PRINTING.replace("{workers}", str(workers))]
            subprocess.run(command, check=True, stdout=out, env=env)
        printed.append(sorted((tmp_path / "out").read_text().splitlines()))
    assert printed[0] == printed[1]
    assert any(line.startswith("client") for line in printed[0])


@dataclass(frozen=True, kw_only=True)
class Untold(Averaging):
    """FedAvg whose first clients fail with an exception that has no text."""

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        if context.modalities == ("b",):
            raise Silent
        return Update(fit.params, fit.loss, data.num_rows), local


class Silent(Exception):
    """An exception whose text raises another one."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.filterwarnings("ignore:.*gave no usable reply in any round")
def test_an_exception_without_a_text_is_a_reason_too(kind: Any) -> None:
    for run in both(recipe(Untold(train=TRAIN), rounds=1), kind):
        assert run.rounds[0]["missing"] == {"3": "Silent, whose text cannot be shown"}


WRITING = """
import sys, threading
sys.stdout = open(1, "w", closefd=False)

def write():
    while True:
        sys.stdout.write("x" * 20000 + chr(10))
        sys.stdout.flush()

threading.Thread(target=write, daemon=True).start()
import polyfed
from polyfed.algorithms import Averaging
from polyfed.engines import in_process
from polyfed.experiment.recipes.recipe import EngineSpec
from polyfed.training.optimisers import Train
from world import recipe
in_process.UNIT_FLOPS = 1.0
for _ in range(5):
    engine = EngineSpec(name="sequential", workers=2)
    polyfed.run(recipe(Averaging(train=Train(lr=0.1, batch_size=16)), engine, rounds=2))
print("all runs have ended", file=sys.stderr, flush=True)
import os
os._exit(0)
"""


def test_a_worker_does_not_wait_for_a_thread_that_prints() -> None:
    """The thread holds the lock of the standard output during some forks, and does not exist in the workers."""
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    command, env = [sys.executable, "-c", WRITING], os.environ | {"PYTHONPATH": paths}
    ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120, env=env)
    assert "all runs have ended" in ran.stderr
