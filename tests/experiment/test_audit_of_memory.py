"""`audit` of a run whose data was in memory: it needs the data again, and says so without it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyfed
from polyfed.cli import main
from polyfed.core.errors import DataError, RecipeError
from polyfed.experiment.leakage import audit
from refusals import refuses


def test_a_run_with_data_in_memory_is_audited_with_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    label = np.arange(60) % 3
    given: dict[str, Any] = {"data": {"audio": draw.normal(size=(60, 4)) + label[:, None]}, "labels": label}
    who = np.arange(60) % 4
    polyfed.run(**given, clients=who, rounds=1, out=tmp_path / "run")
    found = audit(tmp_path / "run", **given, natural_clients=who, rounds=1)
    assert found.clients == 4
    with refuses(DataError, "of the run"):
        audit(tmp_path / "run", data=given["data"], labels=label[::-1].copy(), natural_clients=who)
    with refuses(RecipeError, "without data"):
        audit(tmp_path / "run", labels=label)
    with pytest.raises(SystemExit) as end:
        main(["audit", str(tmp_path / "run")])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "the data of this run was in memory" in told
    assert "audit(folder, data=..., labels=...)" in told
