"""The keys in the folder of credentials, and no others, are registered with the SuperLink."""

import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from polyfed.core.errors import RecipeError
from polyfed.engines.flower.server.device_keys import NewKeys, fingerprint, keep_registered, public_key
from polyfed.engines.flower.server.link_facts import link_facts, shrink


def linkstate(folder: Path) -> Any:
    """The state of a SuperLink that starts with the database in this folder."""
    database = str(folder / "link.db")
    return LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database)).state()


def made(folder: Path, name: str) -> Path:
    """Make a device's key and return the file of its public key."""
    words = ("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(folder / name))
    subprocess.run(words, check=True)
    return folder / f"{name}.pub"


def started(folder: Path) -> dict[str, Any]:
    """Start with the public keys in the folder, as the SuperLink does, and return its facts about nodes."""
    state = linkstate(folder)
    keep_registered(state, {public_key(path): path for path in sorted(folder.glob("*.pub"))})
    facts = link_facts(state)
    assert len(facts["away"]) == facts["nodes"]["registered"], "no device is connected here"
    nodes: dict[str, Any] = facts["nodes"]
    return nodes


@pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")  # Flower's use of Alembic
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_a_key_whose_file_is_gone_is_revoked_when_the_superlink_starts_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = made(tmp_path, "lost")
    made(tmp_path, "kept")
    assert started(tmp_path)["registered"] == 2
    key = public_key(lost)
    lost.rename(tmp_path / "lost.away")
    capsys.readouterr()
    assert started(tmp_path)["registered"] == 1
    state = linkstate(tmp_path)
    assert state.get_node_id_by_public_key(key) is None, "the SuperLink refuses calls with this key"
    assert f"the key {fingerprint(key)} is revoked" in capsys.readouterr().err
    assert started(tmp_path)["registered"] == 1
    assert "revoked" not in capsys.readouterr().err, "a revoked key is reported once"
    made(tmp_path, "new")
    assert started(tmp_path)["registered"] == 2
    (tmp_path / "lost.away").rename(lost)
    with pytest.raises(RecipeError, match=r"lost\.pub holds the key SHA256:\S+, which was revoked earlier"):
        started(tmp_path)


@pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_a_device_joins_while_the_superlink_runs_and_a_faulty_file_stops_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = made(tmp_path, "first")
    assert started(tmp_path)["registered"] == 1
    state, keys = linkstate(tmp_path), NewKeys(tmp_path)
    (tmp_path / "a-half.pub").write_text("ecdsa-sha2-nistp384 AAAA")  # as during a copy
    (tmp_path / "b-loop.pub").symlink_to(tmp_path / "b-loop.pub")
    joined = made(tmp_path, "joined")
    keys.register(state)
    assert state.get_node_id_by_public_key(public_key(joined)) is not None
    said = capsys.readouterr().err
    assert f"the key {fingerprint(public_key(joined))} of {joined} is registered" in said
    assert said.count("a key was not registered") == 2
    first.unlink()
    (tmp_path / "b-loop.pub").unlink()
    keys.register(state)
    assert link_facts(state)["nodes"]["registered"] == 2, "nobody is revoked by a file that is gone for a moment"
    assert not capsys.readouterr().err, "a faulty file is reported once"
    shutil.copy(joined, tmp_path / "a-half.pub")
    keys.register(state)
    assert link_facts(state)["nodes"]["registered"] == 2
    lost = public_key(joined)
    state.delete_node(next(n.owner_aid for n in state.get_node_info()), state.get_node_id_by_public_key(lost))
    shutil.copy(joined, tmp_path / "again.pub")
    keys.register(state)
    assert state.get_node_id_by_public_key(lost) is None, "a revoked key does not come back under another name"
    assert "which was revoked earlier" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")
def test_a_start_gives_the_space_of_deleted_messages_back_to_the_disk(tmp_path: Path) -> None:
    linkstate(tmp_path)
    path, sizes = tmp_path / "link.db", list[int]()
    for run in range(4):
        with closing(sqlite3.connect(path, isolation_level=None)) as rows:
            for number in range(8):
                rows.execute(
                    "INSERT INTO objects (object_id, content) VALUES (?, zeroblob(1000000))", (f"{run}-{number}",)
                )
            rows.execute("DELETE FROM objects")
            rows.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert path.stat().st_size > 8_000_000, "Flower leaves the file as large as it was"
        shrink(str(path))
        sizes.append(path.stat().st_size)
        assert linkstate(tmp_path).get_node_info() == []
    assert max(sizes) < 1_000_000
    assert len({*sizes}) == 1, "every run leaves it flat"


@pytest.mark.parametrize("content", [b"", b"no database at all" * 100])
def test_a_file_that_cannot_shrink_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "link.db").write_bytes(content)
    shrink(str(tmp_path / "link.db"))
    assert (tmp_path / "link.db").read_bytes() == content
