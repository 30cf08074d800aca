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
