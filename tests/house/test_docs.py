"""The site of the documentation builds strictly and opens without the internet; what is broken in a page fails it."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]

HOME = """# Home

See [a page](docs/page.md#a-part), [the package][own.double] and [the code](src/own/__init__.py).

The mean is $\\frac{1}{n}\\sum_i x_i$.

![A picture](docs/picture.svg)
"""
PACKAGE = '''"""A package."""


def double(x: int) -> int:
    """Twice a number.

    >>> double(2)
    4

    Args:
        x: the number.
    """
    return 2 * x
'''


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "docs" / "make_site.py"), "--root", str(root), "--build", str(folder)]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkout with two pages and a package of its own, and polyfed's settings."""
    for name, text in {
        "README.md": HOME,
        "docs/page.md": "# Page\n\n## A part\n\n[Home](../README.md)\n",
        "docs/picture.svg": "<svg/>",
        "docs/.nav.yml": "nav: [index.md, page.md, api]\n",
        "src/own/__init__.py": PACKAGE,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    settings = (ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(settings.replace("src/polyfed", "src/own"))
    shutil.copytree(ROOT / "docs" / "assets", tmp_path / "docs" / "assets")
    shutil.copy(ROOT / "docs" / "doctests.py", tmp_path / "docs")
    return tmp_path


def test_the_site_builds(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index", "glossary", "algorithms/fedavg", "tutorials/first_run", "files/examples/study.py"):
        assert (tmp_path / "site" / f"{page}.html").exists()
    assert len(list((tmp_path / "site" / "api").rglob("*.html"))) > 100


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {citation[name] == project[name] for name in ("version", "license")} == {True}


def test_pages_link_to_pages_to_code_and_to_the_api(small: Path) -> None:
    done = build(small, small / "build")
    assert done.returncode == 0, done.stdout + done.stderr
    home = (small / "build" / "site" / "index.html").read_text()
    for target in ("page.html#a-part", "api/own/index.html#own.double", "files/src/own/__init__.py.html"):
        assert f'href="{target}"' in home
    assert re.search(r"<math>.*<mfrac>.*</math>", home, re.DOTALL), "a formula is MathML"
    code = re.sub(r"<[^>]*>", "", (small / "build" / "site" / "api" / "own" / "index.html").read_text())
    assert re.search(r"&gt;&gt;&gt; double\(2\)\s*4", code), "a doctest keeps its lines"


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ("[gone](gone.md)", "page does not exist"),
        ("[gone](../gone.py)", r"page.html: links to ../gone.py, which does not exist"),
        ("[gone](page.md#gone)", "anchor does not exist"),
        ("[gone][own.gone]", "unresolved autoref"),
        ("::: own.gone", "own.gone"),
        ("![gone](gone.png)", r"page.html: links to gone.png, which does not exist"),
        ('<img src="https://example.org/a.png">', r"page.html: loads https://example.org/a.png"),
        (r"$\frack{1}{2}$", "page.html: a formula cannot be read: .*frack"),
    ],
)
def test_what_is_broken_fails_the_build(small: Path, added: str, words: str) -> None:
    with (small / "docs" / "page.md").open("a") as page:
        page.write(f"\n{added}\n")
    done = build(small, small / "build")
    assert done.returncode == 1
    assert re.search(words, done.stdout), done.stdout + done.stderr


def test_a_docstring_that_names_no_argument_of_its_function_fails_the_build(small: Path) -> None:
    (small / "src" / "own" / "__init__.py").write_text(PACKAGE.replace("x: the number", "gone: the number"))
    done = build(small, small / "build")
    assert done.returncode == 1
    assert "'gone' does not appear in the function signature" in done.stdout


def test_a_page_that_the_navigation_lacks_fails_the_build(small: Path) -> None:
    (small / "docs" / "lost.md").write_text("# Lost\n")
    done = build(small, small / "build")
    assert done.returncode == 1
    assert "lost.md: stands nowhere in the navigation" in done.stdout


TESTS = ROOT / "tests"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
SENTENCE = r"test_\w+_\w+_\w+_\w+"
"""The name of a test. Shorter ones are options and columns of data."""


def names_in(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE))


def test_every_test_that_a_page_names_exists() -> None:
    everywhere = set().union(*(names_in(path) for path in TESTS.rglob("test_*.py")))
    missing = list[str]()
    named = 0
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(f"`({SENTENCE})`", text):
            named += 1
            missing += [] if name in everywhere else [f"{page.name}: {name}"]
        for path in re.findall(r"`(tests/[\w./]+)`", text):
            named += 1
            missing += [] if "NAME" in path or (ROOT / path).exists() else [f"{page.name}: {path}"]
        for names, path in re.findall(r"((?:`test_\w+`(?:,? and |, )?)+) in\s+`(tests/[\w./]+\.py)`", text):
            gone = {*re.findall(r"test_\w+", names)} - names_in(ROOT / path)
            missing += [f"{page.name}: {path} has no {name}" for name in sorted(gone)]
    assert named > 100
    assert not missing, "\n".join(missing)


CELL = re.compile(r"((?:`[^`]*`|\\\||[^|`])*)\|")
"""A cell of a table. A bar within code, or behind a backslash, ends none."""


def claims_of(page: str) -> list[list[str]]:
    """The cells of each row of the table of claims."""
    section = page.partition("## What is enforced")[2].partition("\n## ")[0]
    rows = [line.strip() for line in section.splitlines() if line.lstrip().startswith("|")]
    cells = [[cell.strip() for cell in CELL.findall(row[1:])] for row in rows]
    return [row for row in cells if row[0] != "claim" and not set("".join(row)) <= set("-: ")]


NEVER = re.compile(r"mark\.(skip(?!if)|xfail)|mark\.skipif\((True|1)\b|parametrize\((?:.*, )?(\[\]|\(\))\)")
"""Decorators under which a test never runs, or may fail."""


def checks_something(one: ast.FunctionDef) -> bool:
    """Whether a function asserts something that is not constant, before it returns or skips without a condition."""
    for statement in one.body:
        if isinstance(statement, ast.Return) or re.match(r"pytest\.(skip|xfail)\(", ast.unparse(statement)):
            return False
        for node in ast.walk(statement):
            if isinstance(node, ast.Assert) and any(isinstance(n, ast.Name) for n in ast.walk(node.test)):
                return True
            if isinstance(node, ast.Call) and re.search(r"\b(raises|refuses|fail)$", ast.unparse(node.func)):
                return True
    return False


def idle_tests(path: Path, names: set[str], text: str = "") -> set[str]:
    """Those of the named tests that never run or check nothing; for a whole file, its tests if all of them are idle."""
    module = ast.parse(text or path.read_text())
    of_file = {one.name: one for one in module.body if isinstance(one, ast.FunctionDef)}
    called = {
        name: {node.func.id for node in ast.walk(one) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        for name, one in of_file.items()
    }
    skipped = any(isinstance(one, ast.Assign) and NEVER.search(ast.unparse(one)) for one in module.body)
    checks = {name for name, one in of_file.items() if checks_something(one)}
    runs = {name for name, one in of_file.items() if not any(NEVER.search(ast.unparse(d)) for d in one.decorator_list)}
    fine = set() if skipped else {name for name in runs if name in checks or checks & called[name]}
    every = {name for name in of_file if name.startswith("test_")}
    return names - fine if names else every if not every & fine else set()


def faults_of_claims(page: str) -> list[str]:
    """What is wrong with the table of claims: a row of another form, or one that no test shows."""
    faults = list[str]()
    for row in claims_of(page):
        claim = row[0][:60]
        if len(row) != 3 or not all(row):
            faults.append(f"{claim}: has {len(row)} cells")
            continue
        paths = [ROOT / path for path in re.findall(r"`(tests/[\w./]+\.py)`", row[2])]
        named = set(re.findall(r"`(test_\w+)`", row[2]))
        held = {path: names_in(path) & named for path in paths if path.exists() and path.name.startswith("test_")}
        if not held or len(held) < len(set(paths)) or named - set().union(*held.values()):
            faults.append(f"{claim}: names no tests, or tests that its files do not hold")
        for path, names in held.items():
            faults += [f"{claim}: {path.name}, {name} runs never or checks nothing" for name in idle_tests(path, names)]
    return faults


def test_every_claim_of_the_threat_model_names_tests_that_run_and_check_something() -> None:
    page = (ROOT / "docs" / "threat-model.md").read_text()
    assert len(claims_of(page)) > 40
    assert not (faults := faults_of_claims(page)), "\n".join(faults)


@pytest.mark.parametrize(
    "row",
    [
        "| A claim | a reason | trust us |",
        "| A claim | a reason |",
        "| A claim | a reason | `tests/house/test_docs.py` | more |",
        "| A claim | | `tests/house/test_docs.py` |",
        "|A claim|a reason|nothing|",
        "  | A claim | a `|` in code | nothing |",
        "| A claim | a reason | `tests/leaky.py` |",
        "| A claim | a reason | `tests/gone/test_gone.py` |",
        "| A claim | a reason | `test_of_somewhere_else` in `tests/house/test_docs.py` |",
    ],
)
def test_a_claim_without_a_test_is_found(row: str) -> None:
    page = (ROOT / "docs" / "threat-model.md").read_text()
    last = page.index("\n\n## What is not defended")
    assert len(faults_of_claims(page[:last] + "\n" + row + page[last:])) == 1


@pytest.mark.parametrize(
    "test",
    [
        "def test_a(): pass",
        "def test_a(): assert True",
        "def test_a(): assert 1 == 1",
        "@pytest.mark.skip\ndef test_a(): assert f()",
        "@pytest.mark.skipif(True, reason='')\ndef test_a(): assert f()",
        "@pytest.mark.xfail(strict=False)\ndef test_a(): assert f()",
        "@pytest.mark.parametrize('x', [])\ndef test_a(x): assert x",
        "def test_a():\n    pytest.skip('later')\n    assert f()",
        "def test_a():\n    return\n    assert f()",
        "pytestmark = pytest.mark.skip('all')\ndef test_a(): assert f()",
        "def helper(): assert f()\ndef test_a(): 'names helper only'",
    ],
)
def test_a_test_that_shows_nothing_is_found(test: str) -> None:
    assert idle_tests(ROOT, {"test_a"}, test) == {"test_a"}
    shown = "def helper(x): assert x\n@pytest.mark.parametrize('x', [1])\ndef test_a(x): helper(x)"
    assert not idle_tests(ROOT, {"test_a"}, shown)
    refused = "def test_a():\n    with refuses(ValueError, 'noun'):\n        f()"
    assert not idle_tests(ROOT, {"test_a"}, refused), "tests.refusals.refuses asserts too"


def test_the_results_count_the_steps_and_commands_of_the_tutorial() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    steps = len(re.findall(r"^\*\*\d+\. ", page, re.MULTILINE))
    blocks = re.findall(r"^```\n# (server|every device)\b[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    count = {who: sum(text.count("polyfed ") for owner, text in blocks if owner == who) for who, _ in blocks}
    said = f"{steps} steps; {count['server']} commands at the server, {count['every device']} at each device"
    assert said in (ROOT / "docs" / "results" / "deployments.md").read_text()
