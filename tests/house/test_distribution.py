"""What `pip install polyfed` brings: every package that the source imports, and nothing else."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "polyfed"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

NOT_INSTALLED = {"mlflow": "mlflow-skinny", "wandb": "wandb", "opentelemetry": "opentelemetry-sdk"}
"""Distributions of modules that the development environment does without, or of which many share a name."""

FLOWER = SOURCE / "engines" / "flower"


def declared(extra: str | None = None) -> set[str]:
    """The distributions that a plain install brings, or that an extra adds."""
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(line).name) for line in lines}


EXTRAS = {extra: declared(extra) for extra in PROJECT["optional-dependencies"] if extra != "dev"}


def modules_of(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports, by a statement or by name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.Call(
                func=ast.Name("import_module") | ast.Attribute(attr="import_module"), args=[ast.Constant(name)]
            ):
                yield name


def imported(folder: Path) -> dict[str, set[str]]:
    """Each distribution that the files of a folder import, with these files."""
    owners, found = packages_distributions() | {name: [to] for name, to in NOT_INSTALLED.items()}, {}
    for path in folder.rglob("*.py"):
        for module in modules_of(ast.parse(path.read_text(encoding="utf-8"))):
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "polyfed":
                name = canonicalize_name(owners.get(top, [top])[0])
                found.setdefault(name, set()).add(str(path.relative_to(SOURCE)))
    return found


def test_every_import_is_declared() -> None:
    found = imported(SOURCE)
    assert {"torch", "scikit-learn", "pillow", "peft", "mlflow-skinny"} <= set(found)
    undeclared = {name: files for name, files in found.items() if name not in declared().union(*EXTRAS.values())}
    assert not undeclared


def test_a_plain_install_brings_only_what_is_imported() -> None:
    assert declared() <= set(imported(SOURCE))


def test_the_extra_of_flower_brings_what_its_engine_imports() -> None:
    assert set(imported(FLOWER)) <= declared() | EXTRAS["flower"]


RECIPE = ROOT / "recipes" / "cmsfed-cg-digits.toml"

WITHOUT_EXTRAS = """
import sys

class Absent:
    def find_spec(self, name, *others):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from polyfed.cli import main
main({words})
"""


@pytest.mark.parametrize("words", [["--version"], ["recipes"], ["check", str(RECIPE)]], ids=lambda words: words[0])
def test_a_plain_install_runs_without_the_packages_of_extras(words: list[str], tmp_path: Path) -> None:
    extras = set().union(*EXTRAS.values()) - declared()
    absent = {
        module for module, names in packages_distributions().items() if {*map(canonicalize_name, names)} <= extras
    }
    assert {"cryptography", "optuna", "starlette"} <= absent
    script = WITHOUT_EXTRAS.format(absent=absent, words=words)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_development_environment_has_every_extra(extra: str) -> None:
    (own,) = [Requirement(line) for line in PROJECT["optional-dependencies"]["dev"] if line.startswith("polyfed[")]
    assert (extra in own.extras) != (extra in {"mlflow", "wandb"})  # these two: make check-trackers
