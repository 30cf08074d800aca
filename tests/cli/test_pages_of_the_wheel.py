"""`polyfed docs`, and the pages that messages name."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from polyfed.core.system.files import shipped

ROOT = Path(__file__).parents[2]


def test_pages_are_listed_and_printed(polyfed_command):
    code, out, _ = polyfed_command("docs", "--json")
    listed = {row["name"]: row["about"] for row in json.loads(out)}
    assert code == 0
    assert listed["algorithms/cmsfed"] == "CMSFed"
    code, out, _ = polyfed_command("docs", "docs/data.md")
    assert (code, out) == (0, (ROOT / "docs" / "data.md").read_text())


def test_a_page_that_does_not_exist_suggests_one(polyfed_command):
    code, _, err = polyfed_command("docs", "treat-model")
    assert code == 2
    assert "did you mean 'threat-model'?" in err


def texts(path: Path) -> Iterator[str]:
    """The strings of a file that users can see: all but docstrings."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def test_messages_name_pages_that_a_user_without_a_clone_can_read():
    shown = [(path, text) for path in (ROOT / "src").rglob("*.py") for text in texts(path)]
    assert [f"{path.name}: {text}" for path, text in shown if re.search(r"docs/[\w-]+\.md", text)] == []
    named = [found for _, text in shown for found in re.findall(r"polyfed docs ([a-z/-]+)", text)]
    assert len(named) > 3
    assert [page for page in named if not (shipped("docs") / f"{page}.md").is_file()] == []
