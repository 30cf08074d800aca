"""Releases of polyfed for tests of upgrades: wheels from this clone's history, each process with an environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RELEASES = {"0.1.0": "e0e05a1791d8a173cedd138308f6deca3ff1b454", "0.2.0": "", "0.3.0": ""}
"""The number under which a commit is released. The first is the oldest that has jobs, renewed certificates and signed
receipts, with another wire format and fewer options; no commit is the working tree."""

OF_A_RELEASE = ("src/polyfed", "docs", "recipes", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
"""What the wheel of the working tree is made of."""


def pip(*words: str | Path) -> None:
    """Call pip, and fail with what it says."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = (sys.executable, "-m", "pip", *words)
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, env=kept, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Releases:
    """The wheels, and environments that have one of them and take all other packages from that of the tests.

    Args:
        folder: a folder for both.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def wheel(self, number: str) -> Path:
        """Build the wheel of a release, unless that was done."""
        place, source = self.folder / f"wheel-{number}", self.folder / f"source-{number}"
        if not place.exists():
            self._source(RELEASES[number], source)
            project = source / "pyproject.toml"
            head, _, rest = project.read_text().partition('\nversion = "')
            project.write_text(f'{head}\nversion = "{number}{rest[rest.index(chr(34)) :]}')
            pip("wheel", "--no-deps", "--wheel-dir", place, source)
            shutil.rmtree(source)
        (built,) = place.glob("*.whl")
        return built

    def python(self, name: str) -> Path:
        """Return the Python of an environment."""
        return self.folder / f"of-{name}" / "bin" / "python"

    def install(self, name: str, number: str) -> None:
        """Install a release into an environment, in place of the one that it has."""
        python = self.python(name)
        if not python.exists():
            home = python.parents[1]
            venv.create(home)
            packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))
            (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip("--python", python, "install", "--upgrade", "--no-deps", "--no-index", self.wheel(number))
        told = [
            python,
            "-P",
            "-c",
            "import polyfed, importlib.metadata as m; print(polyfed.__file__, m.version('polyfed'))",
        ]
        said = subprocess.run(told, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": ""})
        where, _, found = said.stdout.strip().rpartition(" ")
        assert found == number
        assert Path(where).is_relative_to(python.parents[1]), "not the code of the tests"

    def _source(self, commit: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        if not commit:
            for name in OF_A_RELEASE:
                path = ROOT / name
                if path.is_dir():
                    shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(path, folder / name)
            return
        packed = subprocess.run(["git", "-C", ROOT, "archive", commit], capture_output=True, check=False)
        if packed.returncode:
            pytest.skip(f"this clone lacks the history: {packed.stderr.decode().strip()}")
        subprocess.run(["tar", "x", "-C", folder], input=packed.stdout, check=True)
