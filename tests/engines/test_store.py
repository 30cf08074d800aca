"""What a device keeps of its local states: enough to do again what a server can still ask, and no more."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from polyfed.core.errors import BadReply, CheckpointError
from polyfed.core.tree import Tree
from polyfed.deploy.device.memory.local_states import begin, check_fresh, keep, state_before
from polyfed.deploy.device.memory.store import ADDED, STORE, VERSION, ClientStore, DeviceStore
from polyfed.engines.protocol import RequestId
from refusals import refuses
from world import kept_states


@contextmanager
def alone(folder: Path) -> Iterator[ClientStore]:
    with DeviceStore(folder).alone("run", 3) as own:
        assert own is not None
        yield own


def work(folder: Path, session: int, round: int, request: int, kept: int = 0) -> float:
    """A request that adds 1 to what is kept; what it began with."""
    request_id = RequestId("run", session, round, request, client=3)
    with alone(folder) as own:
        with own.transaction() as memory:
            check_fresh(memory, request_id)
            found = state_before(memory, request_id)
            begin(memory, request_id)
        before = 0.0 if found is None else float(found[0]["n"])
        with own.transaction() as memory:
            keep(memory, request_id, {"n": torch.tensor(before + 1)}, ("a",), kept)
    return before


def places(folder: Path) -> list[tuple[int, int]]:
    """The places of the states, of which each has its file and no other file is left."""
    found = [*kept_states(folder, "run", 3)]
    names = {path.name for path in (folder / "run" / "client-3").iterdir()}
    assert names == {f"state-{round:06d}-{request:03d}.safetensors" for round, request in found}
    return found


def test_a_round_of_many_asks_leaves_two_states(tmp_path: Path) -> None:
    for request in range(9):
        assert work(tmp_path, 0, 1, request) == request
    assert places(tmp_path) == [(1, 7), (1, 8)]
    assert work(tmp_path, 0, 1, 8) == 8.0, "the newest request can be repeated"


def test_a_server_can_go_back_to_the_end_of_any_round_that_is_not_settled(tmp_path: Path) -> None:
    for round in (1, 2, 3, 4):
        for request in (0, 1, 2):
            work(tmp_path, 0, round, request, kept=1)
    assert places(tmp_path) == [(1, 2), (2, 2), (3, 2), (4, 1), (4, 2)]
    assert work(tmp_path, 1, 3, 0) == 6.0, "as round 2 left it"
    assert [place[0] for place in places(tmp_path)] == [1, 2, 3]


def test_of_settled_rounds_only_the_last_state_is_left(tmp_path: Path) -> None:
    for round in (1, 2, 3):
        work(tmp_path, 0, round, 0, kept=round - 1)
    assert places(tmp_path) == [(2, 0), (3, 0)]
    with refuses(BadReply, "forgotten"):
        work(tmp_path, 1, 2, 0)


SHARED = torch.arange(6.0)
AWKWARD: dict[str, Tree] = {
    "nothing": {},
    "shapes": {"scalar": torch.tensor(3), "empty": torch.zeros(0, 4), "half": torch.ones(2, dtype=torch.bfloat16)},
    "views": {"c": SHARED[::2], "a": SHARED.view(2, 3).T, "b": SHARED},
    "names": {"a.b/c": torch.ones(1, dtype=torch.bool), "\u00fc \U0001f600": torch.ones(1, dtype=torch.uint8)},
}


@pytest.mark.parametrize("name", AWKWARD)
def test_a_state_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    request_id = RequestId("run", 0, 1, 0, client=3)
    with alone(tmp_path) as own:
        with own.transaction() as memory:
            begin(memory, request_id)
            keep(memory, request_id, AWKWARD[name], ("a", "b"), 0)
        with own.transaction() as memory:
            found = state_before(memory, RequestId("run", 0, 2, 0, client=3))
    assert found is not None
    assert found[1] == ("a", "b")
    assert [*found[0]] == [*AWKWARD[name]], "in the same order"
    assert all(torch.equal(found[0][key], value) for key, value in AWKWARD[name].items())


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _linked(path: Path) -> None:
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.parametrize("damage", [_cut, _flipped, _linked, Path.unlink])
def test_a_damaged_state_is_no_beginning(damage: Callable[[Path], None], tmp_path: Path) -> None:
    work(tmp_path, 0, 1, 0)
    (path,) = tmp_path.rglob("state-*")
    damage(path)
    with refuses(CheckpointError, "restore"):
        work(tmp_path, 0, 2, 0)


def test_what_a_dead_process_has_left_is_swept_and_what_a_row_names_stays(tmp_path: Path) -> None:
    work(tmp_path, 0, 1, 0)
    folder = tmp_path / "run" / "client-3"
    for name in ("state-000009-000.safetensors", "reply-000001-000.bin", ".state-000002-000.safetensors.draft"):
        (folder / name).write_text("half")
    (folder / "egress.jsonl").write_text("a row\n")
    assert work(tmp_path, 0, 2, 0) == 1.0
    assert {path.name for path in folder.iterdir()} == {
        "egress.jsonl",
        "state-000001-000.safetensors",
        "state-000002-000.safetensors",
    }


def test_a_transaction_that_fails_leaves_neither_rows_nor_files(tmp_path: Path) -> None:
    work(tmp_path, 0, 1, 0)
    request_id = RequestId("run", 0, 2, 0, client=3)

    def fail() -> None:
        with alone(tmp_path) as own, own.transaction() as memory:
            keep(memory, request_id, {"n": torch.tensor(7.0)}, ("a",), 0)
            raise OSError(28, "No space left on device")

    with refuses(OSError, "No space"):
        fail()
    assert places(tmp_path) == [(1, 0)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_ends_with_a_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with refuses(CheckpointError, "cannot be used"):
        work(tmp_path, 0, 1, 0)


def test_only_the_devices_user_reads_the_store(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        work(tmp_path / "state", 0, 1, 0)
    finally:
        os.umask(before)
    found = [tmp_path / "state", *(tmp_path / "state").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o600}


BUSY = """
import sys
from pathlib import Path
from engines.test_store import work
folder, round = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while True:
    round += 1
    assert work(folder, 0, round, 0, kept=round - 3) == round - 1, round
"""
"""A device that works through the rounds of a run without an end; its state is the number of its round."""


@pytest.mark.parametrize("attempt", range(3))
def test_a_device_that_is_killed_at_any_moment_goes_on_where_it_was(attempt: int, tmp_path: Path) -> None:
    """The newest state always belongs to a round that was whole, and the next process finds it."""
    round = 0
    for pause in (0.05, 0.11, 0.17):
        words = [sys.executable, "-c", BUSY, str(tmp_path), str(round)]
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(pause + 0.013 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        states = kept_states(tmp_path, "run", 3)
        newest = max(states, default=(round, 0))[0]
        assert newest >= round
        assert all(float(state["n"]) == place[0] for place, state in states.items())
        round = newest
    assert work(tmp_path, 1, round + 1, 0) == round
    assert (tmp_path / STORE).exists()


def test_two_processes_do_not_work_on_one_client_at_once(tmp_path: Path) -> None:
    store = DeviceStore(tmp_path)
    with alone(tmp_path), store.alone("run", 3, wait=False) as other, store.alone("run", 4, wait=False) as free:
        assert other is None
        assert free is not None


def changed(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / STORE)) as rows:
        for statement in statements:
            rows.execute(statement)
        rows.commit()


def test_a_store_of_an_older_release_gets_the_tables_that_it_lacks_and_forgets_nothing(tmp_path: Path) -> None:
    work(tmp_path, 0, 1, 0)
    changed(tmp_path, *(f"DROP TABLE {table}" for table in ADDED[1]), "PRAGMA user_version = 0")
    assert work(tmp_path, 0, 1, 1) == 1.0
    assert places(tmp_path) == [(1, 0), (1, 1)]


@pytest.mark.parametrize(("version", "table"), [(0, "journals"), (1, "journals"), (1, "ended")])
def test_a_table_that_its_release_had_is_never_made_again(version: int, table: str, tmp_path: Path) -> None:
    """Its counts would begin from zero."""
    work(tmp_path, 0, 1, 0)
    changed(tmp_path, f"DROP TABLE {table}", f"PRAGMA user_version = {version}")
    with refuses(CheckpointError, "no such table"):
        work(tmp_path, 0, 1, 1)


def test_a_store_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    work(tmp_path, 0, 1, 0)
    changed(tmp_path, f"PRAGMA user_version = {VERSION + 1}")
    with refuses(CheckpointError, "newer release"):
        work(tmp_path, 0, 1, 1)
    with closing(sqlite3.connect(tmp_path / STORE)) as rows:
        assert rows.execute("PRAGMA user_version").fetchone() == (VERSION + 1,)
