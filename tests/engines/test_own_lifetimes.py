"""Beginning, interrupting and ending a federation of real processes. Slow; `make check-all`."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.federations import PATIENCE, Federation, recipe_for, reference, until
from polyfed.core.system.stop_signals import handling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Tests that a shell runs in the background ignore Ctrl-C, and would hand that down to what they start."""
    with handling(signal.default_int_handler, signal.SIGINT):
        yield


def command(recipe: Path, folder: Path, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    """`make federation`, for this recipe."""
    words = [sys.executable, "-m", "polyfed", "app", str(folder), "--recipe", str(recipe), "--local"]
    return subprocess.Popen(words, stdout=log, stderr=log)


def living(folder: Path) -> list[int]:
    """Processes that work in the folder of a federation."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (place / "cwd").readlink() == folder:
                found.append(int(place.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to see what is left over")
def test_one_command_goes_on_after_ctrl_c_and_has_nothing_to_do_at_the_end(tmp_path: Path) -> None:
    # so many rounds that the first call is still at work when the second has been refused
    recipe, folder = recipe_for("fedavg", tmp_path, rounds=14), tmp_path / "fed"
    text = lambda: (tmp_path / "log").read_text(errors="replace")  # noqa: E731
    with (tmp_path / "log").open("wb") as log:
        first = command(recipe, folder, log)
        until(lambda: "polyfed: waiting:" in text(), "the server to wait for clients")
        other = command(recipe, folder, log)
        assert other.wait(PATIENCE) == 2
        assert f"another call runs a federation here (process {first.pid})" in text()
        until(lambda: "polyfed: round 1:" in text(), "round 1")
        first.send_signal(signal.SIGINT)
        assert first.wait(PATIENCE) == 130
        assert living(folder) == []
        assert "resume with: polyfed app" in text()
        assert command(recipe, folder, log).wait(PATIENCE) == 0
        assert "resumed after round" in text()
        assert "polyfed: waiting: 0 of 3 enrolled" in text()
        assert living(folder) == []
        started = (folder / "server.log").stat().st_size
        assert command(recipe, folder, log).wait(PATIENCE) == 0
        assert (folder / "server.log").stat().st_size == started, "nothing was started"
    assert "is at its end: nothing to do" in text()
    assert text().count(f"picture in {folder}/app/run/report.html") == 2
    result = json.loads((folder / "app" / "run" / "result.json").read_text())
    assert result["state_sha256"] == reference(recipe, tmp_path / "one")[0]


def test_a_users_fault_is_the_last_word_and_the_device_says_why(tmp_path: Path) -> None:
    with Federation(recipe_for("fedavg", tmp_path), tmp_path / "fed") as federation:
        (federation.nodes[1] / "policy.toml").write_text("x =\n")
        federation.start()
        federation.run().wait(PATIENCE)
        told = federation.log("run").strip()
        assert told.splitlines()[-1].startswith("polyfed: 2 of 3 clients enrolled")
        assert "Traceback" not in told
        assert str(federation.nodes[1]) not in told, "the server hears no path of a device"
        assert f"policy {federation.nodes[1]}/policy.toml: Invalid value" in federation.log("device-1")
