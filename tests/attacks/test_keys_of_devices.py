"""Files in the folder of keys that are none, or change while the server reads them, stop nobody and let nobody in."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from polyfed.deploy.credentials import write_credentials
from polyfed.transport.logins import Keys, PrivateKey


def test_a_faulty_file_stops_nobody_and_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_credentials(tmp_path, 1)
    first = PrivateKey(folder / "node-0.key").fingerprint
    (folder / "a-half.pub").write_text("ecdsa-sha2-nistp384 AAAA")  # as during a copy
    (folder / "b-loop.pub").symlink_to(folder / "b-loop.pub")
    (folder / "c-noise.pub").write_bytes(bytes(range(256)))
    (folder / "d.pub").mkdir()
    keys = Keys(folder)
    keys.look()
    assert set(keys.known) == {first}
    said = capsys.readouterr().err
    assert all(name in said for name in ("a-half.pub", "c-noise.pub"))
    (folder / "b-loop.pub").unlink()
    keys.look()
    assert "a-half.pub" not in capsys.readouterr().err, "it is reported once"
    shutil.copy(folder / "node-0.pub", folder / "a-half.pub")
    write_credentials(folder, 2)
    keys.look()
    assert set(keys.known) == {first, PrivateKey(folder / "node-1.key").fingerprint}
