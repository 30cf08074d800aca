"""The wheel in an empty environment, with the newest and with the oldest allowed packages: `make check-wheel`.

PyTorch is not installed again. The environment links to the PyTorch that runs the tests.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]

FROM_THIS_MACHINE = ("torch", "triton", "nvidia", "cuda")
"""PyTorch and the packages that only its builds for GPUs need, by the beginning of their names."""

SHORT = ("--set", "rounds=2", "--set", "clients.num=4", "--set", "clients.participation=2")


def lower_bounds() -> list[str]:
    """The oldest allowed release of every dependency except PyTorch, as a constraints file of pip."""
    wanted = [Requirement(line) for line in DEPENDENCIES]
    bounds = {one.name: [s.version for s in one.specifier if s.operator == ">="] for one in wanted}
    assert all(len(versions) == 1 for versions in bounds.values()), "every dependency states its oldest release"
    return [f"{name}=={version}" for name, (version,) in bounds.items() if name != "torch"]


def pip(*words: str | Path) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and an empty folder in which its commands run."""

    home: Path

    @property
    def folder(self) -> Path:
        return self.home / "empty"

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    def link_torch(self) -> None:
        """Make PyTorch a part of the environment, so that pip neither installs nor upgrades it."""
        packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(self.home)}))
        owned = ["torch", *(Requirement(line).name for line in distribution("torch").requires or [])]
        for name in owned:
            if name.startswith(FROM_THIS_MACHINE):
                files = distribution(name).files or []
                for top in {path.parts[0] for path in files if path.parts[0] not in ("..", "__pycache__")}:
                    target = packages / top
                    if not target.exists():
                        target.symlink_to(Path(distribution(name).locate_file(top)))

    def polyfed(self, *words: str) -> tuple[int, str, str]:
        """What the command `polyfed` does with these words; see `run`."""
        return self.run(self.home / "bin" / "polyfed", *words)

    def run(self, *words: str | Path) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a command."""
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            words,
            cwd=self.folder, env=outside | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this clone."""
    place = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", place, ROOT)
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module", params=["newest", "oldest"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """The wheel in an empty environment."""
    if request.param == "oldest" and sys.version_info[:2] != (3, 11):
        pytest.skip("the oldest releases of the packages have wheels for Python 3.11 only")
    place = tmp_path_factory.mktemp(request.param)
    environment = Environment(place / "environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment.home], check=True)
    environment.folder.mkdir()
    environment.link_torch()
    constraints = place / "constraints.txt"
    constraints.write_text("\n".join(lower_bounds() if request.param == "oldest" else []))
    pip("--python", environment.python, "install", "--quiet", "--constraint", constraints, wheel)
    pip("--python", environment.python, "check")
    return environment


def test_the_version_is_that_of_the_project(installed: Environment) -> None:
    assert installed.polyfed("--version")[:2] == (0, distribution("polyfed").version + "\n")


def test_an_argument_that_does_not_exist_is_a_sentence(installed: Environment) -> None:
    code, out, err = installed.polyfed("run", "--nope")
    assert (code, out) == (2, "")
    assert re.search(r"No such option:? '?--nope", err)  # the words are typer's
    code, out, _ = installed.polyfed("run", "--nope", "--json")
    assert (code, json.loads(out)["error"]["exit_code"]) == (2, 2)


def test_a_recipe_that_does_not_exist_is_a_sentence(installed: Environment) -> None:
    code, out, err = installed.polyfed("run", "nowhere.toml", "--json")
    error = json.loads(out)["error"]
    assert (error["exit_code"], error["kind"]) == (code, "RecipeError")
    assert err == f"polyfed: {error['message']}\n"
    assert "nowhere.toml" in err


def test_the_demo_runs_on_the_recipes_of_the_wheel(installed: Environment) -> None:
    code, out, err = installed.polyfed("demo", *SHORT)
    assert (code, out.splitlines()[-1]) == (0, "picture in runs/demo/compare.html"), err
    for page in ("compare.html", "fedavg/report.html", "cmsfed/report.html"):
        text = (installed.folder / "runs" / "demo" / page).read_text().rstrip()
        assert text.endswith("</html>")


def test_a_recipe_of_the_wheel_is_copied_and_checked(installed: Environment) -> None:
    names = [row["name"] for row in json.loads(installed.polyfed("recipes", "--json")[1])]
    assert names == sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
    assert installed.polyfed("recipes", "fedprox-cg-digits", "--copy")[0] == 0
    assert installed.polyfed("check", "fedprox-cg-digits.toml")[0] == 0


def test_the_laws_try_a_method_of_the_users_own(installed: Environment) -> None:
    (installed.folder / "mine.py").write_text(
        "from polyfed.algorithms import Averaging\n\n\nclass Own(Averaging):\n    '''FedAvg by another name.'''\n"
    )
    few = ("--law", "engines", "--law", "learns")
    done = installed.run(installed.python, "-m", "polyfed.laws", "mine:Own", *few)
    assert (done[0], done[1].splitlines()[-1]) == (0, "mine:Own: 2 laws kept, 0 broken, 0 skipped"), done[2]


def test_the_wheel_holds_the_documentation(installed: Environment) -> None:
    code, out, _ = installed.polyfed("docs", "--json")
    assert code == 0
    assert {row["name"] for row in json.loads(out)} == {
        str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")
    }
    assert installed.polyfed("docs", "threat-model")[1].startswith("# ")
