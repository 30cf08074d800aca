"""Names that a user gives never mean two things: they are refused, or differ from the words beside them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyfed
from polyfed.core.errors import ModelError
from polyfed.core.tree import SHARED
from polyfed.evaluation.conformal import EVERYBODY
from polyfed.evaluation.subsets import NOTHING, patterns_of, subsets_of, summary
from polyfed.experiment.leakage.membership import ALL
from polyfed.model.build import build_model
from polyfed.model.spec import ModelSpec
from polyfed.privacy.egress.policy import EVERY
from polyfed.report.pages.evaluation import tables
from polyfed.report.pages.privacy import chart
from polyfed.report.reading.history import History
from refusals import refuses

MANY = tuple("abcdef")
SIZES = [
    name.partition(".")[2] for name in summary("all", MANY, dict.fromkeys(subsets_of("all", MANY), 0.5), rising=True)
]
BESIDE = [SHARED, "labels", EVERY, EVERYBODY, ALL, NOTHING, *patterns_of(MANY), *filter(None, SIZES)]
"""Words that stand in tables and keys where the name of a modality may stand."""


@pytest.mark.parametrize("word", sorted(set(BESIDE)))
def test_a_word_that_stands_beside_modalities_is_the_name_of_none(word: str) -> None:
    build_model(spec("total", "all"), {"total": (2,), "all": (2,)}, 2)
    with refuses(ModelError, "name of a"):
        build_model(spec("a", word), {"a": (2,), word: (2,)}, 2)


def spec(*names: str) -> ModelSpec:
    return ModelSpec(embedding=2, encoders={name: {"kind": "mlp", "hidden": [2]} for name in names})


def test_the_chart_of_epsilon_tells_the_total_from_a_modality_of_this_name() -> None:
    columns: Any = {"epsilon": [1.0, 2.0], "epsilon.total": [0.5, 1.0], "epsilon.all": [0.4, 0.9]}
    past = History(None, rounds=[1, 2], columns=columns)  # type: ignore[arg-type]
    (drawn,) = chart(past, ["total", "all"])
    labels = [series.label for series in drawn.series]
    assert len({*labels, "total", "all"}) == len(labels) == 3


def test_sites_with_any_name_stand_beside_all_rows(tmp_path: Path) -> None:
    draw, rows = np.random.default_rng(0), 60
    label = np.arange(rows) % 2
    names = np.array(["all", "pooled", "server", "1"])[np.arange(rows) // 2 % 4]
    data: dict[str, Any] = {"all": draw.normal(size=(rows, 2)) + label[:, None], "total": draw.normal(size=(rows, 2))}
    np.savez(tmp_path / "d.npz", **data, label=label, client=names)
    options: dict[str, Any] = {"clients": {"personal_test": 0.4}, "model": {"embedding": 2}, "rounds": 1, "seed": 1}
    polyfed.run(polyfed.make_recipe(tmp_path / "d.npz", **options), tmp_path / "run")
    found = polyfed.evaluate(tmp_path / "run")
    assert len(found.content["sites"]) == 4
    lines = [(line["site"], line["group"], line["metric"]) for line in found.lines()]
    assert len(set(lines)) == len(lines)
    for title, heads, shown in tables(found.content):
        if title.startswith(("By site", "Rows of each")):
            sites = heads[1:] if title.startswith("Rows") else [line[0] for line in shown]
            assert len(set(sites)) == len(sites) == 5
