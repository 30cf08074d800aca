"""The releases of Flower that are supported: that of constraints.txt, and one that `make check-flower` lays over it."""

import os
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("flwr", reason="the extra polyfed[flower] is not installed")
import flwr

ROOT = Path(__file__).resolve().parents[2]


def pinned() -> str:
    (found,) = re.findall(r"^flwr==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(found)


def other() -> str:
    (found,) = re.findall(r"^FLOWER \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return str(found)


def test_the_range_of_the_extra_is_what_is_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("flower", "dev"):
        (wanted,) = [found for found in map(Requirement, extras[extra]) if found.name == "flwr"]
        minors = [f"1.{minor}.0" for minor in range(100) if f"1.{minor}.0" in wanted.specifier]
        assert sorted(minors) == sorted({pinned(), other()})


def test_the_release_that_was_asked_for_is_the_one_that_runs() -> None:
    release = os.environ.get("FLOWER_RELEASE")
    if release is None:
        pytest.skip("`make check-flower` asks for a release")
    assert version("flwr") == release
    assert f"flower-{release}" in flwr.__file__
