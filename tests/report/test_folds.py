"""Rounds to an accuracy and UAR over folds against scikit-learn's; and where the numbers come from."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, recall_score

from polyfed.cli import main
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.study.plan import Cell
from polyfed.experiment.study.results import fold_means
from polyfed.report import compare
from polyfed.report.comparison.compare import POOLED, REACHED
from polyfed.report.scores import Metric
from polyfed.start import run
from refusals import refuses
from world import algorithm, played, recipe

TRUTH = [0, 0, 0, 1, 1, 2]


def fold(made_run: Any, name: str, session: int, guesses: list[int] | None, seed: int = 1) -> Path:
    """A made-up run of a fold, its UAR and confusion matrix from these answers to `TRUTH`."""
    folder: Path = made_run(name, seed=seed)
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text.replace("[clients]", f"test_session = {session}\n\n[clients]"))
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    del rows[-1]["confusion"]
    if guesses is not None:
        result = json.loads((folder / "result.json").read_text())
        result["metrics"]["global"]["uar"] = recall_score(TRUTH, guesses, average="macro")
        (folder / "result.json").write_text(json.dumps(result))
        rows[-1]["confusion"] = confusion_matrix(TRUTH, guesses, labels=[0, 1, 2]).tolist()
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def cell_in_words(comparison: Any, name: str) -> str:
    column = next(c for c in comparison.columns if c.name == name)
    return comparison.cell(comparison.groups[0], column)


def test_folds_are_one_row_with_the_mean_and_the_pooled_uar(made_run: Any) -> None:
    answers = {1: {4: [0, 0, 0, 1, 0, 0], 5: [0, 1, 1, 1, 1, 2]}, 2: {4: [2, 2, 0, 1, 1, 2], 5: [0, 0, 0, 0, 0, 0]}}
    folders = [
        fold(made_run, f"{seed}-{session}", session, guesses, seed)
        for seed, folds in answers.items()
        for session, guesses in folds.items()
    ]
    comparison = compare(folders)
    (group,) = comparison.groups
    assert (group.name, group.num_folds, comparison.warnings) == ("fedavg, 2 folds", 2, ())
    each = [recall_score(TRUTH, guesses, average="macro") for folds in answers.values() for guesses in folds.values()]
    assert group.cells["metrics.global.uar"].mean == pytest.approx(statistics.mean(each))
    pooled = [recall_score(TRUTH * 2, folds[4] + folds[5], average="macro") for folds in answers.values()]
    assert group.cells[POOLED].mean == pytest.approx(statistics.mean(pooled))
    assert group.cells[POOLED].spread == pytest.approx(statistics.stdev(pooled))
    assert "n=" not in cell_in_words(comparison, POOLED)
    assert comparison.rows()[0]["folds"] == ["test_session=4", "test_session=5"] * 2


def test_a_seed_without_all_folds_is_not_pooled(made_run: Any) -> None:
    folders = [fold(made_run, f"a{s}", s, [0, 0, 0, 1, 0, 0]) for s in (4, 5)]
    folders.append(fold(made_run, "b4", 4, TRUTH, seed=2))
    comparison = compare(folders)
    assert comparison.groups[0].cells[POOLED].n == 1
    assert cell_in_words(comparison, POOLED).endswith("(n=1)")


def test_without_matrices_or_with_one_fold_nothing_is_pooled(made_run: Any) -> None:
    old = [fold(made_run, f"a{s}", s, None) for s in (4, 5)]
    assert POOLED not in compare(old).groups[0].cells
    (one,) = compare([fold(made_run, f"b{seed}", 4, TRUTH, seed) for seed in (1, 2)]).groups
    assert (one.name, POOLED in one.cells) == ("fedavg", False)


def test_the_same_fold_and_seed_twice_is_pointed_out(made_run: Any) -> None:
    folders = [fold(made_run, name, session, TRUTH) for name, session in (("a", 4), ("b", 4), ("c", 5))]
    (warning,) = compare(folders).warnings
    assert warning == "fedavg, 2 folds: seed 1 at test_session=4 occurs 2 times, the spread is too small"


def test_rounds_to_an_accuracy(made_run: Any) -> None:
    folders = [made_run("a", seed=1), made_run("b", seed=2)]
    curves = [[json.loads(line) for line in (f / "rounds.jsonl").read_text().splitlines()] for f in folders]
    first = [next(r["round"] for r in rows if r["metrics"]["global"]["accuracy"] >= 0.5) for rows in curves]
    comparison = compare(folders, reach=0.5)
    cell = comparison.groups[0].cells[REACHED]
    assert (cell.mean, cell.n) == (statistics.mean(first), 2)
    assert comparison.columns[-1].title == "rounds to 50 %"
    assert comparison.rows()[0][REACHED] == cell.mean


def test_runs_that_never_get_there_are_told_apart(made_run: Any) -> None:
    folders = [made_run("a", seed=1), made_run("b", seed=2)]
    best = [
        max(json.loads(line)["metrics"]["global"]["accuracy"] for line in (f / "rounds.jsonl").read_text().splitlines())
        for f in folders
    ]
    between = compare(folders, reach=sum(best) / 2)
    assert cell_in_words(between, REACHED).endswith("(n=1)")
    assert cell_in_words(compare(folders, reach=1.0), REACHED) == "–"
    assert all(column.name != REACHED for column in compare(folders).columns)


@pytest.mark.parametrize("reach", [0.0, -1.0, 50.0, float("nan")])
def test_a_reach_that_is_no_share_is_refused(made_run: Any, reach: float) -> None:
    with refuses(RecipeError, "--reach"):
        compare([made_run()], reach=reach)


def test_the_command_shows_it(made_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["compare", str(made_run()), "--reach", "0.5"])
    assert left.value.code == 0
    assert "rounds to 50 %" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fedavg", "local"])
def test_a_run_keeps_the_confusion_matrix_of_its_last_round(name: str, tmp_path: Path) -> None:
    made = recipe(algorithm(name, evaluation=Evaluation(every=1)))
    done = run(made, tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert ["confusion" in row for row in rows] == [False, False, True]
    parts, state, _ = played(made)
    columns, test = parts.population.columns, parts.population.test_rows
    expected = np.zeros((4, 4), dtype=int)
    models = [(columns.modalities, state.params)]
    if name == "local":  # one matrix a client, added up
        models = [(parts.population.modalities(k), parts.engine.locals[k]) for k in range(6)]
    for held, params in models:
        x = {m: columns.modalities[m].values[test].float() for m in held}
        batch = Batch(x=x, y=columns.label[test], rows=torch.arange(len(test)))
        with torch.no_grad():
            guess = parts.model.logits(params, batch).argmax(1)
        expected += confusion_matrix(columns.label[test], guess, labels=range(4))
    assert np.array_equal(rows[-1]["confusion"], expected)
    assert "confusion" not in done.result
    assert done.result["metrics"]["global"]["accuracy"] == pytest.approx(np.trace(expected) / expected.sum())


def test_a_run_resumed_at_its_end_still_has_it(tmp_path: Path) -> None:
    made = recipe(algorithm("fedavg"))
    run(made, tmp_path)
    (tmp_path / "result.json").unlink()
    before = (tmp_path / "rounds.jsonl").read_bytes()
    run(replace(made), tmp_path, resume=True)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before


def test_json_on_standard_output_is_the_file_even_where_numbers_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """rounds = 1
[data]
name = "toy"
rows = 80
[clients]
num = 2
[model.encoders]
a = { kind = "mlp", hidden = [4] }
b = { kind = "mlp", hidden = [4] }
[algorithm]
name = "fedavg"
"""
    (tmp_path / "r.toml").write_text(text)
    monkeypatch.setattr("polyfed.objective.class_metrics.uar", lambda matrix: float("nan"))
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "r.toml"), "--out", str(tmp_path / "out"), "--json"])
    out = capsys.readouterr().out
    assert out.rstrip("\n") == (tmp_path / "out" / "result.json").read_text().rstrip("\n")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(out, parse_constant=refuse)["metrics"]["global"]["uar"] is None


def test_the_page_of_a_study_has_the_mean_over_folds() -> None:
    cells = [Cell("fedavg", "base", {"clients.fold": fold}, {}, {}) for fold in (1, 2, 3)]
    cells.append(Cell("local", "base", {}, {}, {}))
    board: Any = SimpleNamespace(
        cells=cells,
        scores=[[0.7], [0.8], [0.9], [0.1]].__getitem__,
        metric=lambda number, entries: Metric("global.accuracy", lowest=False, share=True),
        reported={},
    )
    assert fold_means(board, ["base"]) == [("fedavg, mean of 3 folds", ["80.0 ± 10.0"])]
