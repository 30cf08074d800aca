"""Decisions as tests: layers, abstract-or-final, sizes, one place for Flower, a page and a recipe per algorithm."""

import ast
import inspect
import runpy
from pathlib import Path

import pytest

import polyfed
from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.hfm import Vertical

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "polyfed"
FILES = sorted(SOURCE.rglob("*.py"))

LAYERS = [
    {"tree", "keys", "errors", "registry", "schema", "signals"},
    {"batch", "messages", "metrics", "losses", "optim", "prototypes", "facility"},
    {"policy", "ledger", "network", "model", "data", "wire"},
    {"ask", "replies", "forms", "federation", "node", "tasks", "view", "selection", "evaluation", "algorithm", "silos"},
    {"algorithms", "engines"},
    {
        "recipe",
        "assembly",
        "check",
        "rehearsal",
        "run",
        "records",
        "checkpoint",
        "events",
        "progress",
        "report",
        "settings",
        "overrides",
        "tracking",
        "lock",
        "outcome",
        "deploy",
    },
    {"cli", "__init__", "__main__"},
]
"""A module imports only lower layers and its own; `algorithms` and `engines` never each other."""

APART = ({"algorithms", "engines"},)


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Rooms of polyfed that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" if node.module == "polyfed" else node.module for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("polyfed.")}
    return found


def layer(name: str) -> int:
    places = [i for i, rooms in enumerate(LAYERS) if name in rooms]
    assert places, f"polyfed.{name} stands in no layer: give it a place in LAYERS and in docs/architecture.md"
    return places[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    own = room(path)
    for other in imported(path) - {own}:
        assert layer(other) <= layer(own), f"{own} imports {other} from a higher layer"
        for apart in APART:
            assert not {own, other} <= apart, f"{own} imports {other}"


def test_rooms_do_not_import_each_other_in_circles() -> None:
    edges: dict[str, set[str]] = {}
    for path in FILES:
        edges.setdefault(room(path), set()).update(imported(path) - {room(path)})
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for other in sorted(edges.get(name, ())):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_algorithms_are_final_and_two_deep(name: str) -> None:
    cls = ALGORITHMS[name]
    assert not inspect.isabstract(cls)
    assert cls.__mro__[1] in (Algorithm, Averaging, Vertical), f"{cls.__name__} inherits from a final class"
    ours = [child for child in cls.__subclasses__() if child.__module__.startswith("polyfed.")]  # tests may have theirs
    assert not ours, f"{cls.__name__} is final"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 320, f"{path.name} has {text.count(chr(10))} lines: is it two rooms?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno
            assert lines <= 60, f"{path.name}:{node.lineno} {node.name} has {lines} lines"


def test_flower_is_imported_in_one_place() -> None:
    for path in FILES:
        names = {a.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        if any(name.split(".")[0] in ("flwr", "ray") for name in names):
            assert "flower" in path.relative_to(SOURCE).as_posix(), f"{path} imports Flower"


def test_nothing_unpickles() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {"pickle", "dill", "joblib"} & {alias.name for alias in node.names}, path
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) != "torch.load", path
                loud = [k for k in node.keywords if k.arg == "allow_pickle"]
                assert all(isinstance(k.value, ast.Constant) and k.value.value is False for k in loud), path


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_has_a_page_and_a_recipe(name: str) -> None:
    assert (ROOT / "docs" / "algorithms" / f"{name}.md").exists(), f"docs/algorithms/{name}.md is missing"
    recipes = [polyfed.load_recipe(path) for path in sorted((ROOT / "recipes").glob(f"{name}-*.toml"))]
    assert any(type(recipe.algorithm) is ALGORITHMS[name] for recipe in recipes), (
        f"no recipes/{name}-*.toml runs {name}"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_every_recipe_is_valid(path: Path) -> None:
    assert polyfed.load_recipe(path).rounds > 0


def test_fedprox_is_a_few_lines_of_its_own() -> None:
    tree = ast.parse((SOURCE / "algorithms" / "fedprox.py").read_text())
    (cls,) = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    code = [n for n in ast.walk(cls) if isinstance(n, ast.stmt) and not isinstance(n, ast.Expr)]
    assert len(code) <= 6, "class, field, def, and two statements"


def test_the_reference_of_recipes_is_current() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["reference"]()
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == written, "run `make docs`"
