"""Workers on the nodes of a Ray cluster: the results of one process, whatever the nodes do."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from shared_work import alone, played

import polyfed
from laws.test_laws import world
from polyfed.core.errors import RecipeError
from polyfed.core.tree import size_bytes
from polyfed.engines import in_process
from polyfed.engines.workers import cluster, node_arrays
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running.assembly import assemble
from refusals import refuses
from world import AWKWARD, algorithm, recipe, same, through

ray = pytest.importorskip("ray", reason="Ray is not installed")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("everything_is_worth_sharing"),
]  # Ray leaves sockets and files open

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes with one core each. This process is on the first one."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)
        patch.setenv("RAY_worker_niceness", "0")  # on a busy machine, workers of niceness 15 would not start in time
        made = cluster_utils.Cluster(initialize_head=True, head_node_args=NODE)
        made.add_node(**NODE)
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        yield made
        ray.shutdown()
        made.shutdown()


def on_ray(made: Recipe, workers: int = 0, **options: Any) -> Recipe:
    return replace(made, engine=EngineSpec(name=made.engine.name, cluster="ray", workers=workers, **options))


def expect_equal(one: tuple[Any, Any, Any], many: tuple[Any, Any, Any]) -> None:
    (here, state, ledger), (there, again, rows) = one, many
    assert rows == ledger
    assert there.engine.locals.keys() == here.engine.locals.keys()
    for client, tree in there.engine.locals.items():
        assert same(tree, here.engine.locals[client])
    assert same(getattr(again, "params", {}), getattr(state, "params", {}))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fedavg", "vectorised"),
        ("scaffold", "sequential"),
        *(pytest.param(name, "vectorised", marks=pytest.mark.slow) for name in ("cmsfed", "hfm", "pfmml", "scaffold")),
        *(pytest.param(name, "sequential", marks=pytest.mark.slow) for name in ("fedavg", "cmsfed", "hfm", "pfmml")),
    ],
)
def test_nodes_give_the_bits_of_one_process(nodes: Any, name: str, kind: str) -> None:
    made = replace(world(name, kind, AWKWARD), rounds=3)
    many = played(on_ray(made))
    assert many[0].engine.pool.num == 2
    assert many[0].engine.pool.returned > 0
    expect_equal(played(alone(made)), many)


def test_sums_of_nodes_have_the_bits_of_those_of_one_process(nodes: Any) -> None:
    made = replace(world("scaffold", "sequential", AWKWARD), rounds=2)
    many = played(on_ray(made, combine="nodes"))
    assert many[0].engine.pool.returned > 0
    one = played(replace(made, engine=EngineSpec(name="sequential", workers=1, combine="nodes")))
    expect_equal(one, many)


@pytest.mark.slow
def test_one_and_three_nodes_give_the_bits_of_one_process(nodes: Any) -> None:
    made = replace(world("scaffold", "sequential", AWKWARD), rounds=3)
    third = nodes.add_node(**NODE)
    try:
        one = played(alone(made))
        for num in (1, 3):
            many = played(on_ray(made, num))
            assert len({worker.node for worker in many[0].engine.pool.started}) == 0, "all workers have ended"
            assert many[0].engine.pool.num == num
            expect_equal(one, many)
    finally:
        nodes.remove_node(third)


def test_a_state_travels_to_a_worker_only_if_another_one_has_changed_it(nodes: Any) -> None:
    made = replace(world("scaffold", "sequential"), rounds=5)
    one, _, _ = played(on_ray(made, 1))
    states = [size_bytes(tree) for tree in one.engine.locals.values()]
    assert one.engine.pool.moved == sum(states), "each client's first state, once"
    two, _, _ = played(on_ray(made, 2))
    assert two.engine.pool.moved < 2 * sum(states)


def test_the_actors_of_a_node_share_large_columns_and_have_their_own_small_ones(nodes: Any) -> None:
    made = recipe(algorithm("fedavg"))
    engine = assemble(replace(made, data=replace(made.data, rows=40_000))).engine
    there = cluster.Cluster()
    there._ray = ray
    reference = there.share(engine)  # type: ignore[arg-type]
    first, second = ray.get(reference), ray.get(reference)
    assert first.locals == {}
    mine = engine.columns.modalities
    for name, column in mine.items():
        found = [one.columns.modalities[name].values for one in (first, second)]
        assert torch.equal(found[0], column.values)
        assert (found[0].data_ptr() == found[1].data_ptr()) == (column.values.nbytes >= node_arrays.LARGE)
    assert any(column.values.nbytes >= node_arrays.LARGE for column in mine.values())
    small = next(name for name, value in first.initial.items() if value.nbytes < node_arrays.LARGE)
    first.initial[small].add_(1)
    assert not torch.equal(first.initial[small], second.initial[small])
    assert torch.equal(second.initial[small], engine.initial[small])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fedavg", "vectorised"),
        *(pytest.param(name, "sequential", marks=pytest.mark.slow) for name in ("scaffold", "hfm")),
    ],
)
def test_data_in_a_folder_that_all_nodes_read_gives_the_bits_of_one_process(
    nodes: Any, name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(world(name, kind, AWKWARD), rounds=2)
    monkeypatch.setattr(node_arrays, "LARGE", 1)  # for this process, which writes the files
    monkeypatch.setattr(cluster, "STORE_SHARE", 1e-3)
    folder = tmp_path / "made" / "here"
    many = played(on_ray(made, shared_folder=str(folder)))
    assert many[0].engine.pool.returned > 0
    files = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(files) > 2
    assert all(file.endswith(".npy") for file in files), "no draft, no probe"
    one = played(alone(made))
    expect_equal(one, many)

    damaged, cut = sorted(folder.iterdir())[:2]
    content = [damaged.read_bytes(), cut.read_bytes()]
    damaged.write_bytes(content[0][:-1] + bytes([content[0][-1] ^ 1]))
    cut.write_bytes(content[1][:-1])
    expect_equal(one, played(on_ray(made, shared_folder=str(folder))))
    assert [damaged.read_bytes(), cut.read_bytes()] == content, "damaged files are written again"
    again = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {name for name in files if again[name] == files[name]} == files.keys() - {damaged.name, cut.name}


def test_actors_map_large_files_of_the_shared_folder_and_their_changes_stay_with_them(
    nodes: Any, tmp_path: Path
) -> None:
    made = recipe(algorithm("fedavg"))
    engine = assemble(replace(made, data=replace(made.data, rows=40_000))).engine
    there = cluster.Cluster(shared_folder=tmp_path)
    there._ray = ray
    reference = there.share(engine)  # type: ignore[arg-type]
    first, second = ray.get(reference), ray.get(reference)
    files = list(tmp_path.iterdir())
    maps = Path("/proc/self/maps").read_text()
    assert files
    assert all(str(path) in maps for path in files)
    for name, column in engine.columns.modalities.items():
        values = [one.columns.modalities[name].values for one in (first, second)]
        assert torch.equal(values[0], column.values)
        values[0].zero_()
        assert torch.equal(values[1], column.values)


@pytest.mark.parametrize("moment", [0.0, *(pytest.param(m, marks=pytest.mark.slow) for m in (0.5, 1.0, 1.7, 2.5))])
def test_a_worker_that_is_killed_costs_a_repeat_of_its_clients(nodes: Any, moment: float, tmp_path: Path) -> None:
    made = replace(recipe(algorithm("scaffold"), engine="sequential"), rounds=12)
    whole = polyfed.run(alone(made))
    notes: list[str] = []
    killed: list[bool] = []

    def kill() -> None:
        time.sleep(moment)
        killed.append(kill_one("ray::Actor"))

    killer = threading.Thread(target=kill)

    def listen(event: str, **facts: Any) -> None:
        if event == "note":
            notes.append(facts["text"])
        if event == "round-finished" and not killer.ident:
            killer.start()

    run = polyfed.run(on_ray(made), listeners=[listen])
    killer.join()
    assert run.result["state_sha256"] == whole.result["state_sha256"]
    if moment == 0.0:
        assert killed == [True]
        assert any("its worker on node" in note and "was lost" in note for note in notes)


def test_a_node_that_is_killed_costs_a_repeat_of_its_clients(nodes: Any) -> None:
    made = replace(recipe(algorithm("scaffold"), engine="sequential"), rounds=10)
    whole = polyfed.run(alone(made))
    third = nodes.add_node(**NODE)
    ended: list[int] = []

    def listen(event: str, **facts: Any) -> None:
        if event == "round-finished" and facts["row"]["round"] == 3:
            nodes.remove_node(third, allow_graceful=False)
            ended.append(3)

    run = polyfed.run(on_ray(made), listeners=[listen])
    assert ended == [3]
    assert run.result["state_sha256"] == whole.result["state_sha256"]
    assert all(row["missing"] == {} for row in run.rounds)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.0, 0.05, 0.2, 0.5])
def test_a_node_that_is_killed_within_a_round_of_sums_costs_a_repeat_of_its_clients(nodes: Any, moment: float) -> None:
    made = replace(recipe(algorithm("scaffold"), engine="sequential"), rounds=8)
    whole = polyfed.run(replace(made, engine=EngineSpec(name="sequential", workers=1, combine="nodes")))
    third = nodes.add_node(**NODE)
    nodes.wait_for_nodes()

    def kill() -> None:
        time.sleep(moment)
        nodes.remove_node(third, allow_graceful=False)  # signal 9 to the node's processes

    killer = threading.Thread(target=kill)

    def listen(event: str, **facts: Any) -> None:
        if event == "round-started" and facts["round"] == 4:
            killer.start()

    run = polyfed.run(on_ray(made, combine="nodes"), listeners=[listen])
    killer.join()
    assert third not in nodes.list_all_nodes()
    assert run.result["state_sha256"] == whole.result["state_sha256"]
    assert all(row["missing"] == {} for row in run.rounds)


@pytest.mark.slow
def test_a_node_that_joins_gets_workers(nodes: Any) -> None:
    made = on_ray(replace(recipe(algorithm("scaffold"), engine="sequential"), rounds=2))
    parts = assemble(made)
    try:
        through(parts, 1)
        before = parts.engine.pool.num  # type: ignore[attr-defined]
        third = nodes.add_node(**NODE)
        nodes.wait_for_nodes()
        through(parts, 1)
        assert parts.engine.pool.num == before + 1  # type: ignore[attr-defined]
        assert len(parts.engine.pool.started) == before + 1  # type: ignore[attr-defined]
    finally:
        parts.engine.close()
    nodes.remove_node(third)


def test_a_run_that_was_stopped_on_nodes_resumes_in_one_process(nodes: Any, tmp_path: Path) -> None:
    made = replace(recipe(algorithm("scaffold")), rounds=4)
    whole = polyfed.run(alone(made))
    polyfed.run(replace(on_ray(made), rounds=2), out=tmp_path / "run")
    rest = polyfed.run(alone(made), out=tmp_path / "run", resume=True)
    assert rest.result["state_sha256"] == whole.result["state_sha256"]


def test_nodes_that_cannot_do_their_part_are_named(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = on_ray(recipe(algorithm("fedavg")))
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "STORE_SHARE", 1e-6)
        with refuses(RecipeError, "engine.cluster: object store"):
            played(made)
    with monkeypatch.context() as patch:
        own = cluster.facts()
        asked = cluster.Cluster._ask
        patch.setattr(
            cluster.Cluster,
            "_ask",
            lambda *given: [found | {"torch": "2.6.0", "polyfed": ""} for found in asked(*given)],
        )
        with refuses(RecipeError, "engine.cluster: has torch 2.6.0") as refused:
            played(made)
        assert f"has polyfed not, and this machine {own['polyfed']}" in str(refused.value)
    with refuses(RecipeError, "engine.cluster: no node has"):
        played(on_ray(recipe(algorithm("fedavg")), device="cuda", stack=2))


def test_a_node_that_cannot_read_the_shared_folder_is_named_before_the_first_round(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, seen = os.getpid(), list[str]()
    asked = cluster._size_at
    monkeypatch.setattr(
        cluster, "_size_at", lambda path: asked(path) if os.getpid() == here else cluster.UNREADABLE, raising=True
    )
    made = on_ray(recipe(algorithm("fedavg")), shared_folder=str(tmp_path / "shared"))
    with refuses(RecipeError, "engine.cluster: cannot read") as refused:
        polyfed.run(made, tmp_path / "run", listeners=[lambda event, **_: seen.append(event)])
    address = nodes.head_node.node_ip_address
    assert f"node {address} cannot read [engine] shared_folder = '{tmp_path / 'shared'}'" in str(refused.value)
    assert "mount" in str(refused.value)
    assert "round-started" not in seen
    assert list((tmp_path / "shared").iterdir()) == []


def test_what_another_user_can_change_in_a_shared_folder_is_not_used(tmp_path: Path) -> None:
    """Neither a link nor a file of another user, though both hold the right bytes now; the folder is of this user."""
    shared, tensor = node_arrays.SharedFolder(tmp_path / "shared"), torch.arange(node_arrays.LARGE // 4)
    path = Path(str(shared.content_of(tensor)[0]))
    assert (tmp_path / "shared").stat().st_mode & 0o77 == 0
    path.rename(tmp_path / "elsewhere.npy")
    path.symlink_to(tmp_path / "elsewhere.npy")
    content = shared.content_of(tensor)
    assert not path.is_symlink()
    np.save(tmp_path / "elsewhere.npy", np.zeros(1))
    assert torch.equal(node_arrays.tensor_of(content), tensor)
    if os.geteuid() == 0:  # only root can give a file away
        os.chown(path, 65534, -1)
        shared.content_of(tensor)
        assert path.stat().st_uid == 0


def test_a_shared_folder_in_which_every_user_can_write_is_refused(tmp_path: Path) -> None:
    shared = node_arrays.SharedFolder(tmp_path)
    for mode in (0o777, 0o1777):
        tmp_path.chmod(mode)
        with refuses(RecipeError, "engine.shared_folder: every user"), shared.probe():
            pass
        with refuses(RecipeError, "engine.shared_folder: every user"):
            shared.content_of(torch.zeros(node_arrays.LARGE))
    tmp_path.chmod(0o775)
    with shared.probe() as path:
        assert path.is_file()


def test_a_shared_folder_that_cannot_be_written_is_refused(nodes: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(RecipeError, "engine.shared_folder: cannot write"):
        played(on_ray(recipe(algorithm("fedavg")), shared_folder=str(tmp_path / "file" / "shared")))


def test_nodes_are_checked_before_the_first_round_also_if_no_request_needs_them(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = on_ray(recipe(algorithm("fedavg")))
    monkeypatch.setattr(in_process, "UNIT_FLOPS", 1e12)  # every request stays in this process
    polyfed.run(made)
    seen: list[str] = []
    monkeypatch.setattr(cluster, "STORE_SHARE", 1e-6)
    with refuses(RecipeError, "engine.cluster: object store"):
        polyfed.run(made, tmp_path / "run", listeners=[lambda event, **_: seen.append(event)])
    assert "round-started" not in seen
    assert not (tmp_path / "run").exists()


def test_a_node_that_joins_is_checked_once_and_another_version_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    there, engine = cluster.Cluster(), assemble(recipe(algorithm("fedavg"))).engine
    own: dict[str, Any] = {"CPU": 1.0, "object_store_memory": 2.0**30}
    alive = [{"NodeID": name, "NodeManagerAddress": name, "Alive": True, "Resources": own} for name in ("one", "two")]
    there._ray = SimpleNamespace(nodes=lambda: alive, is_initialized=lambda: True)
    asked: list[list[str]] = []

    def ask(nodes: list[dict[str, Any]], *_: Any) -> list[Any]:
        asked.append([node["NodeID"] for node in nodes])
        return [cluster.facts() | ({"torch": "2.6.0"} if node["NodeID"] == "three" else {}) for node in nodes]

    monkeypatch.setattr(there, "_ask", ask)
    monkeypatch.setattr(there, "refuse_lost_head", lambda: None)
    for _ in range(2):
        there.check(engine, 1, torch.device("cpu"))  # type: ignore[arg-type]
    alive.append({**alive[0], "NodeID": "three", "NodeManagerAddress": "10.0.0.3"})
    with refuses(RecipeError, "engine.cluster: has torch 2.6.0") as refused:
        there.check(engine, 1, torch.device("cpu"))  # type: ignore[arg-type]
    assert "node 10.0.0.3" in str(refused.value)
    assert asked == [["one", "two"], ["three"]]


def test_a_cluster_without_a_free_core_ends_the_run(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        def here(self) -> int:
            return 1

    monkeypatch.setattr(cluster, "START_SECONDS", 3.0)
    busy = [ray.remote(num_cpus=1)(Busy).remote() for _ in range(2)]
    ray.get([one.here.remote() for one in busy])
    try:
        monkeypatch.setattr(cluster.Cluster, "_refuse_nodes", lambda *_: None)
        with refuses(RecipeError, "engine.cluster: worker could"):
            played(on_ray(recipe(algorithm("fedavg"))))
    finally:
        for one in busy:
            ray.kill(one)


def test_a_cluster_whose_nodes_are_all_too_small_ends_the_run_at_once(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.1)
    began = time.monotonic()
    with refuses(RecipeError, "engine.cluster: has 2 CPU"):
        played(on_ray(recipe(algorithm("fedavg")), threads=2))
    assert time.monotonic() - began < cluster.START_SECONDS / 2


STUDY = """seeds = [1, 2]
recipe = "recipe.toml"
set.rounds = 12

[methods.fedavg]
[methods.fedprox]

[search]
trials = 3
batch = 3
seeds = [11]
prune = "halving"
sampler = "random"
keys."train.lr" = { low = 0.01, high = 0.5, scale = "log" }
"""

RECIPE = """seed = 1
rounds = 4
data.name = "toy"
clients = { num = 4, validation = 0.25 }
model = { embedding = 4, encoders.a = { kind = "mlp", hidden = [4] }, encoders.b = { kind = "mlp", hidden = [4] } }
train = { lr = 0.05, batch_size = 16 }
algorithm.name = "fedavg"
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path / "study.toml"


def table_of(frame: Any) -> list[dict[str, Any]]:
    kept = [name for name in frame.columns if "seconds" not in name and name not in ("folder", "why")]
    return [{key: value for key, value in row.items() if value == value} for row in frame[kept].to_dict("records")]


def kill_one(name: str) -> bool:
    """Kill one of Ray's processes of this test. Those of other programs stay."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith(name):
                process.kill()
                return True
    return False


@pytest.mark.slow
def test_a_study_on_nodes_has_the_table_of_one_machine_also_after_kills(nodes: Any, study: Path) -> None:
    here = polyfed.sweep(study, study.parent / "here", jobs=1)
    killed: list[bool] = []

    def listen(event: str, board: Any) -> None:
        done = sum(entry.round for entry in board.entries.values())
        if len(killed) < 3 and done > 12 * (len(killed) + 1):
            killed.append(kill_one("ray::messages_of"))

    there = polyfed.sweep(study, study.parent / "there", ray="", listeners=[listen])
    assert any(killed)
    assert set(there["state"]) == {"finished"}
    assert table_of(there) == table_of(here)


def test_a_study_needs_a_folder_that_all_nodes_see(nodes: Any, study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_exists", lambda path: False)
    with refuses(RecipeError, "nodes share"):
        polyfed.sweep(study, study.parent / "there", ray="")


def test_a_head_that_has_ended_ends_the_run_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of Ray would wait for a minute, and then end this process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    there = cluster.Cluster()
    there._ray = SimpleNamespace(
        wait=lambda pending, **_: ([], pending),
        is_initialized=lambda: True,
    )
    there._ours, there._head = True, f"127.0.0.1:{port}"
    with refuses(RecipeError, f"engine.cluster: 127.0.0.1:{port}"):
        there.ended(["job"], wait=True)
    there.kill("actor")  # neither calls Ray
    there.close()
    assert there.lost


@pytest.mark.parametrize(("option", "noun"), [('device = "cuda"', "1 GPU"), ("threads = 3", "3 core")])
def test_a_study_whose_runs_fit_no_node_ends_within_seconds(
    nodes: Any, study: Path, monkeypatch: pytest.MonkeyPatch, option: str, noun: str
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.1)
    monkeypatch.setattr("polyfed.experiment.running.assembly.device_of", lambda recipe: torch.device("cpu"))
    path = study.parent / "recipe.toml"
    path.write_text(f"{path.read_text()}engine.{option}\n")
    began = time.monotonic()
    with refuses(RecipeError, noun) as refused:
        polyfed.sweep(study, study.parent / "there", ray="")
    assert "no node has this: " in str(refused.value)
    assert time.monotonic() - began < 30


@pytest.fixture
def table(study: Path) -> Path:
    """The data of a study with a single run."""
    draw, path = np.random.default_rng(1), study.parent / "data.npz"
    np.savez(path, a=draw.normal(size=(80, 3)), b=draw.normal(size=(80, 3)), label=np.arange(80) % 2)
    data = f'data = {{ name = "npz", path = "{path}", modalities = ["a", "b"], test_share = 0.2 }}'
    (study.parent / "recipe.toml").write_text(RECIPE.replace('data.name = "toy"', data))
    study.write_text('seeds = [1]\nrecipe = "recipe.toml"\n[methods.fedavg]\n')
    return path


@pytest.mark.parametrize(
    ("size", "words"), [(cluster.UNREADABLE, "data.path: cannot read"), (3, "data.path: 3 instead")]
)
def test_a_study_needs_data_that_all_nodes_read(
    nodes: Any, study: Path, table: Path, monkeypatch: pytest.MonkeyPatch, size: int, words: str
) -> None:
    here = os.getpid()
    monkeypatch.setattr(cluster, "_size_at", lambda path: 9 if os.getpid() == here else size)
    with refuses(RecipeError, words) as refused:
        polyfed.sweep(study, study.parent / "there", ray="")
    assert str(table) in str(refused.value)


def test_a_run_that_fails_on_a_node_names_the_node(nodes: Any, study: Path, table: Path) -> None:
    def listen(event: str, board: Any) -> None:
        if event == "sweep-started":
            table.unlink()

    frame = polyfed.sweep(study, study.parent / "there", ray="", listeners=[listen])
    assert frame["why"][0].startswith(f"on node {nodes.head_node.node_ip_address}: DataError")


def test_a_cluster_of_another_release_is_refused_with_both_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.40.0\nThis process:\n    Ray: 2.55.1"
        )

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with refuses(RecipeError, "2.40.0") as refused:
        cluster.Cluster().connect()
    assert "Ray: 2.55.1" in str(refused.value)


def test_a_machine_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refuses(RecipeError, "pip install 'polyfed[cluster]'"):
        played(on_ray(recipe(algorithm("fedavg"))))


def test_an_address_without_a_cluster_is_refused_within_seconds() -> None:
    if ray.is_initialized():
        ray.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    with refuses(RecipeError, f"127.0.0.1:{port} does not"):
        played(on_ray(recipe(algorithm("fedavg")), address=f"127.0.0.1:{port}"))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "flower"}, "engine.cluster: Flower"),
        ({"debug": True}, "engine.cluster: debug = true"),
        ({"device": "auto"}, "engine.cluster: device = 'auto'"),
        ({"device": "cuda"}, "engine.cluster: clients fit"),
        ({"device": "auto", "debug": True}, "engine.cluster: exception"),
    ],
)
def test_options_that_a_cluster_contradicts_are_refused(options: dict[str, Any], words: str) -> None:
    with refuses(RecipeError, words):
        EngineSpec(cluster="ray", **options)
    with refuses(RecipeError, "engine.address: address needs"):
        EngineSpec(address="head:6379")
    with refuses(RecipeError, "engine.shared_folder: shared_folder needs"):
        EngineSpec(shared_folder="shared")


def test_check_says_what_each_node_needs() -> None:
    made = replace(world("fedavg"), engine=EngineSpec(cluster="ray", threads=2))
    text = repr(check(made))
    assert "Each node of the cluster needs" in text
    assert "an object store of" in text
    assert "2 cores for each worker" in text
    assert "data and model take" in text
    assert check(world("fedavg")).node_needs == ()
    shared = check(replace(made, engine=replace(made.engine, shared_folder="some/folder")))
    assert any(f"read {Path.cwd()}/some/folder" in need for need in shared.node_needs)
    assert not any("data and model take" in need for need in shared.node_needs)
