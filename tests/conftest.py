import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # `world` and `oracles` are the tests' own modules

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def power() -> Iterator[None]:
    """The power does not fail during tests, so none of them waits until the disk has what the system has."""
    off = patch("polyfed.deploy.device.memory.store.DURABLE", "PRAGMA synchronous = OFF")
    with patch("os.fsync", lambda number: None), off:
        yield


SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    """Real data beside the repository; tests that need it skip, saying so, where it is not."""
    if not SHARED.is_dir():
        pytest.skip(f"real data is not there: {SHARED}")
    return SHARED
