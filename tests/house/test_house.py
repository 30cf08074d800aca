"""Decisions as tests: layers, abstract-or-final, sizes, one place for Flower, a page and a recipe per algorithm."""

import ast
import inspect
import re
import runpy
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.averaging.buffered import Buffered
from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.hfm.silo_exchange import Vertical
from polyfed.core.errors import ModelError, RecipeError
from polyfed.experiment.recipes.from_data import DataOptions
from polyfed.experiment.recipes.overrides import apply
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.recipes.sections import SECTIONS
from refusals import refuses

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "polyfed"
FILES = sorted(SOURCE.rglob("*.py"))

ROOMS = [
    "core",
    "model",
    "data",
    "training",
    "objective",
    "privacy",
    "federation",
    "evaluation",
    "selection",
    "algorithms",
    "transport",
    "engines",
    "report",
    "experiment",
    "deploy",
    "recommendation",
    "start",
    "laws",
    "cli",
]
"""The rooms of the package, lowest first: a file imports from its own room and from lower ones."""

DOORS = {"__init__", "__main__"}
"""What stands at the top of the package and is no room."""

NEVER = {("engines", "algorithms")}
"""An engine runs any method, so it knows none."""

MOST_SIDE_BY_SIDE = 16
"""Files in one folder among which a reader finds theirs at a glance; more of them answer more than one question."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


@cache
def imported(path: Path) -> set[str]:
    """Modules of polyfed that a file imports, wherever in the file and for whatever, types included."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "polyfed":
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in whole}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "polyfed"}
    return found


def test_the_top_of_the_package_is_read_at_one_glance() -> None:
    names = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p.is_dir() and p.name != "__pycache__")} - DOORS
    assert names == set(ROOMS), "a room has no place in ROOMS and in docs/architecture.md"


def test_a_folder_answers_one_question() -> None:
    files = Counter(path.parent for path in FILES if path.stem not in DOORS)
    wide = {str(folder): count for folder, count in files.items() if count > MOST_SIDE_BY_SIDE}
    assert not wide, "files side by side: which questions do they answer?"


def passed_on(path: Path) -> set[str]:
    """Names that a file passes on though another one defines them."""
    tree = tree_of(path)
    defined, passed = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            passed |= {alias.name for alias in node.names if alias.asname == alias.name}
            defined |= {alias.asname or alias.name for alias in node.names}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            passed |= set(ast.literal_eval(statement.value)) & defined
    return passed


def test_a_name_has_one_home() -> None:
    """Only the door of a package, its `__init__`, passes on names that other files define."""
    found = {str(path): names for path in FILES if path.stem not in DOORS and (names := passed_on(path))}
    assert not found, "import these names from where they are defined"


def wrong_imports(path: Path) -> Iterator[str]:
    own = room(path)
    for module in sorted(imported(path)):
        if module not in MODULES:
            yield f"{path}: {module} does not exist"
        elif module == "polyfed":
            yield f"{path} imports the package's own front door"
        elif ROOMS.index(module.split(".")[1]) > ROOMS.index(own):
            yield f"{path} imports {module} from a higher room"
        elif (own, module.split(".")[1]) in NEVER:
            yield f"{own} imports {module}: {path}"


def test_imports_go_down() -> None:
    assert [fault for path in FILES if room(path) not in DOORS for fault in wrong_imports(path)] == []


def test_no_files_import_each_other_in_circles() -> None:
    """A package's `__init__` counts as a file; what a file imports for its types counts too."""
    edges = {name: imported(path) - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_algorithms_are_final_and_two_deep(name: str) -> None:
    cls = ALGORITHMS[name]
    assert not inspect.isabstract(cls)
    assert cls.__mro__[1] in (Algorithm, Averaging, Buffered, Vertical), f"{cls.__name__} inherits from a final class"
    ours = [child for child in cls.__subclasses__() if child.__module__.startswith("polyfed.")]  # tests may have theirs
    assert not ours, f"{cls.__name__} is final"


class Names:
    """What the names in a file of polyfed stand for: `module.Name` of the file that defines it."""

    def __init__(self, module: str) -> None:
        self.tree = ast.parse(MODULES[module].read_text())
        self.classes = [node for node in self.tree.body if isinstance(node, ast.ClassDef)]
        self.known = {node.name: f"{module}.{node.name}" for node in self.classes}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "polyfed":
                self.known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def of(self, node: ast.AST) -> str:
        if isinstance(node, ast.Subscript):
            return self.of(node.value)
        if isinstance(node, ast.Attribute):
            return f"{self.of(node.value)}.{node.attr}"
        return self.known.get(node.id, "") if isinstance(node, ast.Name) else ""


def only_subclass(files: dict[str, Names]) -> dict[str, str]:
    """Each class that has one subclass and no other user, with this subclass."""

    def home(name: str) -> str:
        """Where a name is defined that a package's `__init__` passes on."""
        module, _, last = name.rpartition(".")
        further = files[module].known.get(last, name) if module in files else name
        return name if further == name else home(further)

    below: dict[str, list[str]] = {}
    used = set()
    for module, names in files.items():
        if module in {name_of(path) for path in FILES if path.stem in DOORS}:
            continue  # a door passes names on and uses none
        bases = set()
        own = {
            inner: node.name for node in names.tree.body if isinstance(node, ast.ClassDef) for inner in ast.walk(node)
        }
        for node in ast.walk(names.tree):
            if isinstance(node, ast.ClassDef):
                bases |= {inner for base in node.bases for inner in ast.walk(base)}
                for base in node.bases:
                    below.setdefault(home(names.of(base)), []).append(f"{module}.{node.name}")
        used |= {
            home(names.of(node))
            for node in ast.walk(names.tree)
            if isinstance(node, ast.Name | ast.Attribute)
            and node not in bases
            and names.of(node) != f"{module}.{own.get(node)}"
        }
    defined = {f"{module}.{node.name}" for module, names in files.items() for node in names.classes}
    return {base: children[0] for base, children in below.items() if base in defined - used and len(children) == 1}


def test_no_base_class_exists_for_the_sake_of_size() -> None:
    """A class that one other class extends, and that no other code names, is a part of this class."""
    parts = only_subclass({module: Names(module) for module in MODULES})
    told = [f"{child} is the only user of {base}: join them" for base, child in sorted(parts.items())]
    assert not parts, "; ".join(told)


FILLER = set(re.findall(r"\w+", "a all an and are any each for in is its of that the their this to with"))
"""Words that say nothing about an argument."""


def test_docstrings_tell_what_signatures_do_not() -> None:
    """An override says only what its base does not; an argument's line says more than the argument's name."""
    found = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            arguments = arguments_of(ast.get_docstring(node) or "")
            if arguments and any(ast.unparse(part) == "override" for part in node.decorator_list):
                found.append(f"{path}:{node.lineno} {node.name}: the base class tells the arguments")
            found += [
                f"{path}:{node.lineno} {node.name}: '{name}: {text}' repeats the name"
                for name, text in arguments.items()
                if not words_of(text) - words_of(name) - FILLER
            ]
    assert not found


def arguments_of(docstring: str) -> dict[str, str]:
    """Return the lines below `Args:`, by argument."""
    _, _, section = docstring.partition("Args:\n")
    entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:^ {8}.*\n?)*)", section.split("\n\n")[0], re.MULTILINE)
    return dict(entries)


def words_of(text: str) -> set[str]:
    """Return the words of a text, singular and in lower case."""
    return {word.removesuffix("s") for word in re.findall("[a-z]+", text.lower())}


def test_functions_stay_short() -> None:
    long = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno
                long += [f"{path}:{node.lineno} {node.name} has {lines} lines"] * (lines > 60)
    assert not long


OURS = {"algorithm", "assembly", "clock", "engine", "fed", "federation", "gate", "ledger", "parts", "policy", "recipe"}
"""Names under which the objects of a run go from hand to hand: those of `Assembly`, and the `Assembly` itself."""


def test_nobody_sets_attributes_of_a_run_from_outside() -> None:
    """What the objects of a run need is given when they are made, and only their own methods change it."""
    found = []
    for path in FILES:
        for target in (target for node in ast.walk(tree_of(path)) for target in targets_of(node)):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value).rpartition(".")[2] in OURS:
                found.append(f"{path}:{target.lineno} sets {ast.unparse(target)} from outside")
    assert not found


def targets_of(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to, with the parts of tuples."""
    if isinstance(node, ast.Assign):
        found = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    else:
        return []
    return [part for target in found for part in (target.elts if isinstance(target, ast.Tuple) else [target])]


def test_flower_and_ray_are_imported_in_one_place_each() -> None:
    for path in FILES:
        names = {a.name for n in ast.walk(tree_of(path)) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in ast.walk(tree_of(path)) if isinstance(n, ast.ImportFrom)}
        roots, place = {name.split(".")[0] for name in names}, path.relative_to(SOURCE).as_posix()
        assert "flwr" not in roots or "flower" in place, f"{path} imports Flower"
        assert "ray" not in roots or "flower" in place or place == "engines/workers/cluster.py", f"{path} imports Ray"


def test_nothing_unpickles() -> None:
    for path in FILES:
        for node in ast.walk(tree_of(path)):
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
    tree = ast.parse((SOURCE / "algorithms" / "averaging" / "fedprox.py").read_text())
    (cls,) = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    code = [n for n in ast.walk(cls) if isinstance(n, ast.stmt) and not isinstance(n, ast.Expr)]
    assert len(code) <= 6, "class, field, def, and two statements"


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_every_section_has_its_place_in_files_overrides_options_and_docs(name: str) -> None:
    section, reference = SECTIONS[name], (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    home = Recipe if not section.of_algorithm else Averaging
    assert section.field in {f.name for f in fields(home)}
    assert name in DataOptions.__annotations__ or name in ("data", "engine"), "those two are arguments of polyfed.run"
    assert f"## [{name}]\n" in reference or f"`[{name}] name`" in reference or f"`[{name}.*]`" in reference
    table: dict[str, Any] = {}
    apply(table, f"{name}.key=1")
    assert table == {name: {"key": 1}}
    with refuses(RecipeError, f"{name}: [{name}]"):
        parse_recipe({name: 1})


def test_tests_name_errors_by_key_and_noun() -> None:
    """A test that pins a sentence fails when somebody improves it; `refuses` and `warned` take none."""
    found = [
        f"{path}:{node.lineno}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("pytest.raises", "pytest.warns")
        and any(keyword.arg == "match" for keyword in node.keywords)
        and path.name != "refusals.py"
    ]
    assert not found, "write refuses(RecipeError, 'train.lr: finite') or warned('no effect'), of tests/refusals.py"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (RecipeError, "train.lr: above"),
        (RecipeError, "train.mu: finite"),
        (RecipeError, "finite"),
        (RecipeError, "must be finite here"),
        (ModelError, "train.lr: finite"),
    ],
)
def test_refuses_fails_for_another_error(kind: type[Exception], said: str) -> None:
    error = RecipeError("[train] lr = inf: must be finite", ("train", "lr"))
    with refuses(RecipeError, "train.lr: finite"):
        raise error
    with pytest.raises((AssertionError, RecipeError)), refuses(kind, said):
        raise error


def test_the_reference_of_recipes_is_current() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["reference"]()
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == written, "run `make docs`"
