"""Studies that search the values which the options declare, and choices at the edge of a range."""

import json
from pathlib import Path
from typing import Any

import pytest
from study_world import HerePool, refused, table

from polyfed.core.option_checks import search_ranges
from polyfed.experiment.study import scheduler
from polyfed.experiment.study.default_ranges import default_space, edge_notes
from polyfed.experiment.study.plan import planned
from polyfed.report.comparison.compare import compare
from polyfed.training.optimisers import Train

LR = {"train.lr": list(search_ranges(Train)["lr"].values)}
DEFAULT = {"trials": 2, "seeds": [9], "sampler": "random", "batch": 2, "ranges": "default"}


def test_a_method_searches_what_its_options_declare() -> None:
    assert default_space("fedavg", {}) == LR
    mu = {"algorithm.mu": [0.0, 0.001, 0.01, 0.1, 1.0]}
    assert default_space("fedprox", {}) == LR | mu
    assert default_space("mine", {"algorithm": {"name": "fedprox"}}) == LR | mu
    assert default_space("fedprox", {"train.lr": 0.1, "train.epochs": 2}) == mu
    assert default_space("fedprox", {"train": {"lr": 0.1}}) == mu
    assert default_space("mine", {}) == LR  # the study says that there is no such algorithm


def test_an_option_without_effect_is_not_searched() -> None:
    assert "server.momentum" not in default_space("fedavg", {})
    found = default_space("fedavgm", {"algorithm.name": "fedavg", "server": {"optimiser": "avgm"}})
    assert found.keys() == {"train.lr", "server.lr", "server.momentum"}
    found = default_space("fedadam", {"algorithm.name": "fedavg", "server.optimiser": "adam"})
    assert found.keys() == {"train.lr", "server.lr", "server.tau"}
    assert "algorithm.dominance_threshold" not in default_space("cmsfed", {})
    threshold = default_space("cmsfed", {"algorithm.ratio_rule": "threshold"})
    assert "algorithm.dominance_threshold" in threshold
    assert "algorithm.dominance_quantile" not in threshold
    paper = default_space("cmsfed", {"algorithm.preset": "paper"})
    assert "algorithm.dominance_threshold" in paper
    assert "algorithm.feature_norm" not in paper  # the preset says it


def test_a_study_searches_the_default_ranges(tmp_path: Path) -> None:
    methods = {
        "fedavg": {},
        "fedprox": {"search": {"algorithm.mu": [0.5, 0.7]}},
        "feddyn": {"set": {"algorithm.alpha": 0.1}},
        "control": {
            "set": {"algorithm": {"name": "feddyn", "alpha": 0.1, "placebo": "random"}},
            "settings_of": "feddyn",
        },
    }
    _, cells = planned(table(tmp_path, methods=methods, search=DEFAULT | {"keys": {"train.batch_size": [8, 16]}}))
    batch = {"train.batch_size": [8, 16]}
    assert {cell.method: dict(cell.space) for cell in cells} == {
        "fedavg": LR | batch,
        "fedprox": LR | batch | {"algorithm.mu": [0.5, 0.7]},
        "feddyn": LR | batch,
        "control": LR | batch,
    }
    again = refused(table(tmp_path, methods=methods, search=DEFAULT | {"ranges": "wide"}))
    assert "default" in again


@pytest.mark.parametrize(
    ("space", "chosen", "word"),
    [
        ([0.001, 0.01, 0.1], 0.1, "largest"),
        ([0.001, 0.01, 0.1], 0.001, "smallest"),
        ([0.001, 0.01, 0.1], 0.01, None),
        ([0.0, 0.01, 0.1], 0.0, None),  # no learning rate is below 0
        ([0.01, 0.1], 0.1, None),  # both values are edges
        ({"low": 0.001, "high": 1.0, "scale": "log"}, 0.9, "largest"),
        ({"low": 0.001, "high": 1.0, "scale": "log"}, 0.5, None),
        ({"low": 0.0, "high": 1.0}, 0.99, "largest"),
        ({"low": 0.1, "high": 0.5, "step": 0.2}, 0.5, "largest"),
    ],
)
def test_a_choice_at_an_edge_is_noted(space: Any, chosen: float, word: str | None) -> None:
    found = list(edge_notes({"train.lr": space}, {"train.lr": chosen}, {}))
    assert len(found) == (word is not None)
    assert all(f"chose train.lr = {chosen:g}, the {word} value of its range" in text for text in found)


def test_an_edge_of_what_is_allowed_needs_no_note() -> None:
    space = {"algorithm.dominance_quantile": [0.0, 0.25, 0.5], "algorithm.modality_selection": [True, False]}
    low = {"algorithm.dominance_quantile": 0.0, "algorithm.modality_selection": True}
    assert list(edge_notes(space, low, {"algorithm": {"name": "cmsfed"}})) == []
    high = {"algorithm.dominance_quantile": 0.5}
    assert len(list(edge_notes(space, high, {"algorithm": {"name": "cmsfed"}}))) == 1
    assert list(edge_notes({"train.epochs": [1, 2, 3]}, {"train.epochs": 1}, {})) != []  # 0 is allowed
    assert (
        list(edge_notes({"algorithm.every": [2, 3, 4]}, {"algorithm.every": 2}, {"algorithm": {"name": "fedfomo"}}))
        == []
    )
    assert (
        list(edge_notes({"algorithm.own": [1, 2, 3]}, {"algorithm.own": 3}, {"algorithm": {"name": "strange"}})) != []
    )


def test_the_note_is_in_the_study_on_its_page_and_in_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = [1e-6, 1e-5, 1.0]
    study = table(
        tmp_path,
        methods={"fedavg": {}},
        search={"trials": 3, "seeds": [9], "sampler": "grid", "keys": {"train.lr": rates}},
    )
    monkeypatch.setattr(scheduler, "Pool", HerePool)
    seen: list[Any] = []
    scheduler.sweep(study, tmp_path / "out", listeners=[lambda event, board: seen.append(board)])
    ((text, places),) = [note for note in seen[-1].notes() if "range" in note[0]]
    assert text == (
        "the search chose train.lr = 1, the largest value of its range, so a larger one may be better: widen the range"
    )
    assert places == ["fedavg in recipe"]
    assert text in (tmp_path / "out" / "index.html").read_text()
    runs = json.loads((tmp_path / "out" / "study.json").read_text())["runs"]
    assert {tuple(run["edges"]) for run in runs if not run["tuning"]} == {(text,)}
    assert any(text in warning for warning in compare([tmp_path / "out"]).warnings)
