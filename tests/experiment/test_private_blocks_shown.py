"""A run with private blocks shows what its models reach, and says for whom they are."""

from pathlib import Path

import numpy as np
import pytest

import polyfed
from polyfed.cli.printing.tables import result_table
from polyfed.core.errors import RecipeError
from polyfed.data.population.splits import drawn_note
from polyfed.report.text_layout import text_of
from refusals import refuses


def test_a_run_with_private_blocks_shows_intervals_subsets_and_sets(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = 240
    label = np.arange(rows) % 2
    x = {name: (draw.normal(size=(rows, 3)) + label[:, None]).astype("float32") for name in "ab"}
    x["a"][::5] = np.nan
    options = {
        "labels": label,
        "clients": {"num": 2, "partition": "iid", "personal_test": 0.3, "personal_validation": 0.3},
        "test_share": 0.0,
        "algorithm": {"name": "fedavg", "private": ["a"]},
        "model": {"embedding": 4, "encoders": {name: {"kind": "mlp", "hidden": [4]} for name in "ab"}},
        "egress": {"a": {"server": []}, "shared": {"server": ["parameters", "statistic"]}},
        "evaluate": {"subsets": "all", "conformal": "split"},
        "rounds": 1,
    }
    run = polyfed.run(data=x, out=tmp_path / "run", **options)
    sets, own = run.result["sets"], run.result["intervals"]["personal"]
    assert sets["rows"] == own["mean"]["rows"]
    assert 0.7 < sets["holds"] <= 1.0
    shown = " ".join(text_of(result_table(run.result, tmp_path / "run")).split())
    assert f"{own['mean']['rows']} rows of 2 clients" in shown
    assert (
        f"- of the worst client {100 * run.result['metrics']['personal']['worst']:.1f} % ({own['worst']['rows']} rows"
        in shown
    )
    for line in ("personal accuracy from a + b", "worst subset", "own test rows", "--client NAME --coverage 0.9"):
        assert line in shown
    with refuses(RecipeError, "--client 0"):
        run.predict(x)


@pytest.mark.parametrize(("share", "says"), [(0.0, "all rows are training rows"), (0.25, "a share of 0.25")])
def test_a_share_of_nothing_is_not_drawn(share: float, says: str) -> None:
    assert says in drawn_note(share)
