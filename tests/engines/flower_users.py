"""Which tests depend on the release of Flower; `make check-flower` runs these alone."""

import ast
from functools import cache
from pathlib import Path


def imports(path: Path) -> set[str]:
    """Modules that a file imports, and what it imports from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def of_flower(module: str) -> bool:
    return module.split(".")[0] == "flwr" or f"{module}.".startswith("polyfed.engines.flower.")


@cache
def uses_flower(path: Path) -> bool:
    """Whether a file imports Flower or polyfed's adapter, or names the engine that does.

    Tests of what stands behind the adapter, such as a device's limits, reach Flower through the helpers only, as the
    tests of the adapter do, and need no second run.
    """
    given = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.keyword))
    named = any(isinstance(value, ast.Constant) and value.value == "flower" for value in given)
    return named or any(map(of_flower, imports(path)))
