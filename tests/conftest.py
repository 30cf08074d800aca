import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # `world` and `oracles` are the tests' own modules
torch.set_num_threads(1)


SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def shared_data() -> Path:
    """Real data beside the repository; tests that need it skip, saying so, where it is not."""
    if not SHARED.is_dir():
        pytest.skip(f"real data is not there: {SHARED}")
    return SHARED
