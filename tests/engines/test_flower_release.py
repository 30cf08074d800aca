"""The releases of Flower that are supported: that of constraints.txt, and one that `make check-flower` lays over it."""

import os
import re
import sqlite3
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("flwr", reason="the extra polyfed[flower] is not installed")
import flwr

from engines.flower_users import uses_flower
from polyfed.core.errors import RecipeError
from polyfed.deploy import launch
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.processes import ServerPorts, free_ports

ROOT = Path(__file__).resolve().parents[2]


def pinned() -> str:
    (found,) = re.findall(r"^flwr==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(found)


def other() -> str:
    (found,) = re.findall(r"^FLOWER \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return str(found)


def test_the_range_of_the_extra_is_what_is_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("flower", "server", "device"):
        (wanted,) = [found for found in map(Requirement, extras[extra]) if found.name == "flwr"]
        minors = [f"1.{minor}.0" for minor in range(100) if f"1.{minor}.0" in wanted.specifier]
        assert sorted(minors) == sorted({pinned(), other()})


def test_the_release_that_was_asked_for_is_the_one_that_runs() -> None:
    release = os.environ.get("FLOWER_RELEASE")
    if release is None:
        pytest.skip("`make check-flower` asks for a release")
    assert version("flwr") == release
    assert f"flower-{release}" in flwr.__file__


def test_the_other_release_runs_every_test_that_depends_on_it_and_no_others() -> None:
    files = [path for folder in ("engines", "attacks") for path in (ROOT / "tests" / folder).glob("test_*.py")]
    chosen = {path for path in files if uses_flower(path)}
    for path in {path for path in files if "test_flower_" in path.name} - chosen:
        assert "pytestmark = [pytest.mark.slow" in path.read_text(), f"{path.name} runs on one release only"
    assert not {"test_device.py", "test_mixing_declared.py", "test_run_files.py"} & {path.name for path in chosen}


@pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Flower's configuration of Alembic
def test_a_database_of_a_newer_release_ends_the_command_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["polyfed"])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with sqlite3.connect(tmp_path / "link.db") as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        database.execute("INSERT INTO alembic_version VALUES ('of_tomorrow')")
    database.close()
    with pytest.raises(RecipeError, match=r"link\.db was written by another release of Flower .*Move it elsewhere"):
        launch.superlink(write_credentials(tmp_path, 1), ServerPorts("127.0.0.1", *free_ports(2)))
