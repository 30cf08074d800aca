"""Worker processes: the result does not depend on their number, and a worker that dies ends no run."""

import errno
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared_work import played
from torch import Tensor

import polyfed
from laws.rows import ROWS
from laws.test_laws import world
from polyfed.algorithms import Averaging
from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.system.openmp import using_threads
from polyfed.engines import in_process
from polyfed.engines.base import ClientExchange
from polyfed.engines.workers import pool
from polyfed.engines.workers.shared_memory import Arena, copied
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.engine_choice import workers_of
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running import machine
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.links.network import Network
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from refusals import refuses
from world import AWKWARD, algorithm, recipe, through

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="worker processes need Linux"),
    pytest.mark.usefixtures("everything_is_worth_sharing"),
]

ROOT = Path(__file__).resolve().parents[2]


def engine(name: str, workers: int, **options: Any) -> EngineSpec:
    return EngineSpec(name=name, workers=workers, **options)  # type: ignore[arg-type]


def used(parts: Any) -> int:
    """How many jobs worker processes have returned."""
    return int(parts.engine.pool.returned)


@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_number_of_workers_changes_no_bit(name: str, kind: str) -> None:
    made = replace(world(name, kind, AWKWARD), rounds=2)
    one, state, ledger = played(replace(made, engine=engine(kind, 1)))
    for num in (2, 3) if name == "fedavg" else (2,):
        parts, again, rows = played(replace(made, engine=engine(kind, num)))
        assert used(parts) or name in ("centralized", "vfl", "split-learning"), "nothing was shared out"
        assert rows == ledger
        assert parts.engine.locals.keys() == one.engine.locals.keys()
        for client, tree in parts.engine.locals.items():
            assert same_bits(tree, one.engine.locals[client])
        assert same_bits(getattr(again, "params", {}), getattr(state, "params", {}))
        assert getattr(again, "train_loss", None) == getattr(state, "train_loss", None)


def test_holes_and_dropped_modalities_do_not_depend_on_workers() -> None:
    made = replace(world("fedavg", "vectorised", AWKWARD), rounds=2)
    clients = replace(made.clients, missing_rows={"a": 0.4, "b": 0.3})
    method = replace(made.algorithm, train=replace(made.algorithm.train, modality_dropout=0.3))
    made = replace(made, clients=clients, algorithm=method)
    one, two = (played(replace(made, engine=engine("vectorised", num))) for num in (1, 2))
    assert used(two[0]), "nothing was shared out"
    assert not one[0].population.columns.present["a"].all()
    assert same_bits(one[1].params, two[1].params)
    assert one[2] == two[2]


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def test_simulated_time_and_metrics_do_not_depend_on_workers() -> None:
    made = recipe(algorithm("fedavg"), network=Network(deadline_s=0.01, latency_s=0.001, stragglers=0.5))
    runs = [polyfed.run(replace(made, engine=engine("vectorised", num))) for num in (1, 2)]
    facts = [{k: v for k, v in run.result.items() if not k.startswith("seconds")} for run in runs]
    assert facts[0] == facts[1]
    assert facts[0]["simulated_seconds"] > 0


def test_a_run_resumes_with_another_number_of_workers(tmp_path: Path) -> None:
    made = recipe(algorithm("scaffold"), rounds=4)
    whole = polyfed.run(replace(made, engine=engine("vectorised", 1)))
    first = replace(made, engine=engine("vectorised", 2), rounds=2)
    polyfed.run(first, out=tmp_path / "run")
    rest = polyfed.run(replace(made, engine=engine("vectorised", 3)), out=tmp_path / "run", resume=True)
    assert rest.result["state_sha256"] == whole.result["state_sha256"]


@dataclass(frozen=True, kw_only=True)
class Deadly(Averaging):
    """FedAvg whose client 2 kills the process that trains it, until a file with `deaths` lines exists."""

    file: str = ""
    deaths: int = 1

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        path = Path(self.file)
        died = len(path.read_text().splitlines()) if path.exists() else 0
        if int(data.num_rows) == self.victim_rows and died < self.deaths:
            path.write_text("died\n" * (died + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reply(context, data, fit, got, local)

    victim_rows: int = 0


def deadly(tmp_path: Path, deaths: int) -> Recipe:
    made = recipe(algorithm("fedavg"), engine=engine("sequential", 2))
    rows = assemble(made).fed.clients.num_rows
    method = Deadly(train=made.algorithm.train, file=str(tmp_path / "deaths"), deaths=deaths, victim_rows=int(rows[2]))
    assert (rows == rows[2]).sum() == 1
    return replace(made, algorithm=method)


def test_the_clients_of_a_worker_that_dies_are_run_again(tmp_path: Path) -> None:
    survived = polyfed.run(deadly(tmp_path / "none", 0))
    notes: list[Any] = []
    run = polyfed.run(
        deadly(tmp_path, 1), listeners=[lambda event, **facts: notes.append(facts) if event == "note" else None]
    )
    assert (tmp_path / "deaths").read_text() == "died\n"
    assert run.result["state_sha256"] == survived.result["state_sha256"]
    assert any("SIGKILL" in note["text"] for note in notes)


def test_clients_that_kill_every_worker_are_missing_with_the_reason(tmp_path: Path) -> None:
    run = polyfed.run(deadly(tmp_path, 2))
    missing = run.rounds[0]["missing"]
    assert "SIGKILL, 2 times" in missing["2"]
    assert run.rounds[1]["missing"] == {}


class Ahead(pool._Worker):
    """A worker that never waits for the server. Client 2 ends it, and its later jobs have no result either."""

    ahead = True

    def __init__(self, log: list[tuple[str, Any]]) -> None:
        super().__init__()
        self.log, self.lost = log, list[Any]()

    def give(self, job: Any) -> None:
        self.log.append(("gave", job))
        self.pending = job
        if self.lost or job == [[2]]:
            self.lost.append(job)

    def take(self, pending: Any) -> Any:
        self.log.append(("took", pending))
        return None if pending in self.lost else (pending, None)

    def ready(self, workers: list[Any], *, wait: bool) -> list[Any]:
        return workers

    def end(self) -> str:
        return "it was lost"

    def close(self) -> None: ...


@pytest.mark.parametrize("num", [1, 2])
def test_a_worker_gets_its_next_job_before_its_result_is_read_and_its_end_costs_that_job_no_try(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, Any]] = []
    there: Any = object.__new__(pool.Workers)
    there.started, there.engine = [Ahead(log) for _ in range(num)], SimpleNamespace(emit=lambda *_, **__: None)
    monkeypatch.setattr(pool.Workers, "start", lambda self, num: self.started.extend([Ahead(log)] * (not self.started)))
    monkeypatch.setattr(pool.Workers, "_job", lambda self, worker, request, units, *_: units)
    merged: list[int] = []
    monkeypatch.setattr(pool.Workers, "_merge", lambda self, request, worker, done, *_: merged.append(done[0][0]))
    answer, sums = there._collect(None, {number: [[number]] for number in range(7)}, None, None)
    assert sorted(merged) == [0, 1, 3, 4, 5, 6]
    assert sums == {}
    assert answer.missing == {2: "it was lost, 2 times; lack of memory is the usual cause"}
    assert [what for what, _ in log[: 2 * num + 1]] == ["gave"] * 2 * num + ["took"]


def test_a_refusal_in_a_worker_ends_the_run() -> None:
    made = recipe(algorithm("fedavg"), engine=engine("sequential", 2), egress={"a": {"server": ["statistic"]}})
    with refuses(EgressError, "parameters of a"):
        played(made)


@dataclass(frozen=True, kw_only=True)
class Failing(Averaging):
    """FedAvg whose loss raises."""

    def loss(self, context: Any, w: Any, batch: Any, got: Any, local: Any) -> Any:
        if context.modalities == ("b",):
            raise ValueError("no model for b alone")
        return super().loss(context, w, batch, got, local)


@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
@pytest.mark.filterwarnings("ignore:.*gave no usable reply in any round")
def test_a_client_that_fails_in_a_worker_is_missing_with_the_reason(kind: str) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    made = recipe(Failing(train=Train(lr=0.1, batch_size=16)), engine=engine(kind, 2))
    run = polyfed.run(made, listeners=[lambda event, **facts: events.append((event, facts))])
    assert run.rounds[0]["missing"] == {"3": "ValueError: no model for b alone"}
    assert any(name == "client-failed" and facts["client"] == 3 for name, facts in events)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"debug": True}, "engine.workers: in this process"), ({"device": "cuda"}, "engine.device: CUDA device")],
)
def test_workers_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with refuses(RecipeError, words):
        assemble(recipe(algorithm("fedavg"), engine=engine("vectorised", 2, **options)))


def test_no_process_is_started_for_small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "UNIT_FLOPS", 1e12)
    parts = assemble(recipe(algorithm("fedavg"), engine=engine("sequential", 2)))
    through(parts, 1)
    assert parts.engine.pool.started == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["sequential", "vectorised"])
def test_requests_are_shared_after_two_slow_ones_and_no_bit_changes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "UNIT_FLOPS", 1e12)
    monkeypatch.setattr(in_process, "SLOW", 1e-9)
    made = world("fedavg", kind, AWKWARD)
    jobs = []
    for rounds in (2, 4):
        parts, state, rows = played(replace(made, rounds=rounds, engine=engine(kind, 2)))
        jobs.append(used(parts))
        monkeypatch.setattr(in_process, "SLOW", math.inf)
        here, again, ledger = played(replace(made, rounds=rounds, engine=engine(kind, 2)))
        monkeypatch.setattr(in_process, "SLOW", 1e-9)
        assert not used(here)
        assert rows == ledger
        assert same_bits(state.params, again.params)
    assert jobs[0] == 0
    assert jobs[1] >= 2


@pytest.mark.parametrize(
    ("flops", "slow", "expected"), [(1e12, False, 1), (1.0, False, 3), (1.0, True, 1)], ids=["fine", "coarse", "much"]
)
def test_the_threads_of_a_request_depend_on_its_work_alone(
    flops: float, slow: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_process, "THREADED_STEP", flops)
    monkeypatch.setattr(in_process, "UNIT_FLOPS", 1.0 if slow else 1e12)
    monkeypatch.setattr(in_process, "SLOW", math.inf)
    found: list[int] = []
    before = ClientExchange.run

    def noted(self: ClientExchange) -> Any:
        found.append(torch.get_num_threads())
        return before(self)

    monkeypatch.setattr(ClientExchange, "run", noted)
    with using_threads(3):
        played(recipe(algorithm("fedavg"), engine=engine("sequential", 1)))
    assert set(found) == {expected}


def test_a_small_evaluation_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[float, int] = {}
    made = recipe(algorithm("fedavg", evaluation=Evaluation(every=1)), engine=engine("vectorised", 1))
    parts = assemble(made)
    state = through(parts, 1)
    before = ClientExchange.run

    def noted(self: ClientExchange) -> Any:
        found[in_process.THREADED_STEP] = torch.get_num_threads()
        return before(self)

    monkeypatch.setattr(ClientExchange, "run", noted)
    for flops in (3e7, 1.0):
        monkeypatch.setattr(in_process, "THREADED_STEP", flops)
        with using_threads(3):
            parts.algorithm.evaluate(state, parts.fed)
    assert found == {3e7: 1, 1.0: 3}


ENDLESS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits that it is ignored
import polyfed
from polyfed.engines import in_process
in_process.UNIT_FLOPS = 1.0
from polyfed.experiment.recipes.recipe import EngineSpec
from world import algorithm, recipe
made = recipe(algorithm("fedavg"), engine=EngineSpec(name="sequential", workers=2), rounds=100_000)
polyfed.run(made, listeners=[lambda event, **facts: print(event, flush=True)])
"""


READING = """
import sys, threading, time
threading.Thread(target=sys.stdin.readline, daemon=True).start()
time.sleep(0.2)  # until the thread waits in the call, with the lock of sys.stdin
import polyfed
from polyfed.engines import in_process
in_process.UNIT_FLOPS = 1.0
from polyfed.experiment.recipes.recipe import EngineSpec
from world import algorithm, recipe
polyfed.run(recipe(algorithm("fedavg"), engine=EngineSpec(name="sequential", workers=2), rounds=1))
print("done", sys.stdin is not None, flush=True)
"""


def test_workers_start_although_a_thread_reads_standard_input() -> None:
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    process = subprocess.Popen(
        [sys.executable, "-c", READING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        start_new_session=True,
    )
    assert process.stdout is not None
    end = threading.Timer(60.0, os.killpg, (process.pid, signal.SIGKILL))  # its workers hold its output open too
    end.start()
    try:
        assert process.stdout.readline() == "done True\n", "a worker waits for the lock of sys.stdin"
    finally:
        end.cancel()
        process.kill()
        process.communicate()


def test_the_default_number_of_workers_is_the_share_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(algorithm("fedavg"))
    for share, cores in (("1", 1), ("3", 3), ("", 8), ("many", 8), ("0", 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.setattr(machine, "CGROUP", Path("/nowhere"))
        monkeypatch.setenv("POLYFED_CORES", share)
        assert workers_of(made) == cores, share


@pytest.fixture
def endless() -> Iterator[subprocess.Popen[str]]:
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("round-finished"):
            break
    yield process
    process.kill()
    process.communicate()


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_the_run(endless: subprocess.Popen[str], end: signal.Signals) -> None:
    workers = children(endless.pid)
    assert len(workers) == 2
    endless.send_signal(end)
    endless.wait(30)
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker process is still there"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_a_copy_has_the_same_values_in_other_memory(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.arange(1, math.prod(shape) + 1) % 7).to(dtype).reshape(shape)
    for given in (tensor, tensor.reshape(1, -1).expand(2, -1).T):  # the second one is not contiguous
        copy = copied(given)
        assert copy.dtype == dtype
        assert copy.is_contiguous()
        assert torch.equal(copy, given)
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_an_arena_grows_and_keeps_what_is_the_same_tensor_one() -> None:
    arena = Arena()
    big = torch.arange(2_000_000, dtype=torch.float64)
    given = [big.view(1000, 2000).t(), torch.tensor(True), torch.zeros(0, 3), torch.tensor(1.5), big]
    places = arena.write([*given, given[0]])
    found = arena.read(places)
    assert all(torch.equal(a, b) for a, b in zip(given, found, strict=False))
    assert found[-1] is found[0]
    arena.write([torch.ones(3)])
    assert float(given[3]) == 1.5
    arena.close()


def test_a_forked_process_does_not_end_the_workers_of_its_parent() -> None:
    """A worker inherits the pools of earlier runs, and Python deletes them there as soon as it collects garbage."""
    parts = assemble(replace(world("fedavg"), engine=engine("sequential", 2)))
    through(parts, 1)
    pool = parts.engine.pool
    assert pool.started
    child = os.fork()
    if not child:
        pool._close()
        os._exit(0)
    os.waitpid(child, 0)
    try:
        time.sleep(0.1)
        assert all(worker.process.is_alive() for worker in pool.started)
    finally:
        parts.engine.close()
    assert not pool.started


def test_a_daemon_has_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a process of a `multiprocessing.Pool`: Python lets it start no process."""
    monkeypatch.setattr("polyfed.experiment.recipes.engine_choice.machine.cores", lambda: 8)
    assert workers_of(recipe(algorithm("fedavg"))) == 8
    monkeypatch.setattr(
        "polyfed.experiment.recipes.engine_choice.current_process", lambda: SimpleNamespace(daemon=True)
    )
    assert workers_of(recipe(algorithm("fedavg"))) == 1
    with refuses(RecipeError, "engine.workers: daemon"):
        workers_of(recipe(algorithm("fedavg"), EngineSpec(workers=2)))


def test_the_default_number_of_workers_is_at_most_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.experiment.recipes.engine_choice.machine.cores", lambda: 192)
    assert workers_of(recipe(algorithm("fedavg"))) == 64
    assert workers_of(recipe(algorithm("fedavg"), EngineSpec(workers=100))) == 100


def test_only_as_many_workers_start_as_there_is_work_for() -> None:
    parts = assemble(recipe(algorithm("fedavg", selector=Uniform(participation=3)), EngineSpec(workers=50)))
    through(parts, 2)
    pool = parts.engine.pool  # type: ignore[attr-defined]
    assert 1 < len(pool.started) <= 3
    parts.engine.close()


def test_a_worker_that_cannot_start_is_a_fault_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    parts = assemble(recipe(algorithm("fedavg"), EngineSpec(workers=2)))
    monkeypatch.setattr("polyfed.engines.workers.shared_memory.os.memfd_create", refused)
    with refuses(RecipeError, "engine.workers: files"):
        through(parts, 1)
