"""What README says of a system without `fork` and `fcntl`: simulations run there, and resume."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = f"""
import os, sys
import torch.multiprocessing  # asks for the system's name, which this test leaves alone

for name in ("fork", "memfd_create", "register_at_fork"):
    delattr(os, name)
sys.modules["fcntl"] = None  # an import of it is an ImportError
import polyfed

recipe = polyfed.load_recipe({str(ROOT / "recipes" / "fedavg-cg-digits.toml")!r}, ["rounds=2", "engine.name='ENGINE'"])
assert polyfed.check(recipe).exit_code == 0
done = polyfed.run(recipe, "run")
again = polyfed.run(recipe, "run", resume=True)
assert again.result["state_sha256"] == done.result["state_sha256"]
assert polyfed.compare(["run"]).rows()[0]["n"] == 1
print(len(done.rounds))
"""


def without(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=folder, capture_output=True, text=True)


def test_a_simulation_runs_without_fork_and_fcntl(tmp_path: Path) -> None:
    for engine in ("sequential", "vectorised"):
        folder = tmp_path / engine
        folder.mkdir()
        done = without(WITHOUT.replace("ENGINE", engine), folder)
        assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


REFUSED = [
    "device mine.toml",
    "device join TOKEN --data mine.npz",
    "edge mine.toml",
    "submit app",
    "server init new --host a",
]

COMMANDS = f"""
import io, sys
from contextlib import redirect_stderr
sys.modules["fcntl"] = None
from polyfed.cli import main

for words in {REFUSED!r}:
    with redirect_stderr(io.StringIO()) as said:
        try:
            main(words.split())
        except SystemExit as stop:
            print(stop.code, said.getvalue().strip())
import polyfed.experiment.certificate.verification
import polyfed.privacy.egress.audit_log.verification
import polyfed.recommendation
"""


def test_commands_of_servers_and_devices_say_that_they_need_linux(tmp_path: Path) -> None:
    done = without(COMMANDS, tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == len(REFUSED)
    assert all(line.startswith("2 polyfed: ") and "needs Linux, and this system has no fcntl" in line for line in told)
    assert not list(tmp_path.iterdir()), "nothing was written"
