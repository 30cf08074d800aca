import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # `world` and `oracles` are the tests' own modules
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest tests/laws --own module:Class`: the laws on an algorithm of one's own (docs/own-method.md)."""
    parser.addoption("--own", metavar="module:Class", help="an algorithm of your own that must keep the laws")
    parser.addoption("--own-recipe", metavar="FILE", help="a recipe with the options and the policy of --own")


def pytest_configure(config: pytest.Config) -> None:
    """Give `--own` a row among the laws' before they are collected."""
    recipe = config.getoption("--own-recipe")
    if recipe and not config.getoption("--own"):
        raise pytest.UsageError("--own-recipe needs --own module:Class, the algorithm that it is for")
    if path := config.getoption("--own"):
        from laws.own import row_from
        from laws.rows import ROWS, Row
        from polyfed.algorithms import ALGORITHMS
        from polyfed.algorithms.base import Algorithm
        from polyfed.core.registry import find

        sys.path.insert(0, os.getcwd())
        cls = find(path, {}, Algorithm)
        ALGORITHMS["own"], ROWS["own"] = cls, row_from(cls, Path(recipe)) if recipe else ROWS.get("own", Row())


SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    """Real data beside the repository; tests that need it skip, saying so, where it is not."""
    if not SHARED.is_dir():
        pytest.skip(f"real data is not there: {SHARED}")
    return SHARED
