"""`polyfed sweep` as typed: the live table, lines, JSON, exit codes."""

import io
import json

import pytest
import tomli_w
from rich.console import Console
from study_world import HerePool, table

from polyfed.cli import main
from polyfed.cli.sweep_progress import SweepProgress
from polyfed.experiment.study.board import Board, Entry
from polyfed.experiment.study.plan import Cell


def typed(capsys, monkeypatch, folder, study, *words):
    monkeypatch.setattr("polyfed.experiment.study.scheduler.Pool", HerePool)
    (folder / "study.toml").write_text(tomli_w.dumps(study))
    with pytest.raises(SystemExit) as end:
        main(["sweep", str(folder / "study.toml"), "--out", str(folder / "out"), *words])
    told = capsys.readouterr()
    return end.value.code, told.out, told.err


def test_the_verb_prints_the_table_and_says_where_the_page_is(tmp_path, capsys, monkeypatch):
    code, out, err = typed(capsys, monkeypatch, tmp_path, table(tmp_path))
    assert code == 0
    assert "fedprox" in out
    assert "±" in out
    assert "index.html" in out
    assert "4/4 runs, finished: fedprox in recipe, reported seed 2" in err
    code, out, _ = typed(capsys, monkeypatch, tmp_path, table(tmp_path), "--json")
    assert [(row["method"], row["seed"], row["state"]) for row in json.loads(out)][-1] == ("fedprox", 2, "finished")


def test_a_failed_run_ends_with_4_and_a_wrong_study_with_2(tmp_path, capsys, monkeypatch):
    code, _, err = typed(capsys, monkeypatch, tmp_path, table(tmp_path, seeds=[1], methods={"creamfl": {}}))
    assert code == 4
    assert "failed: creamfl in recipe, reported seed 1: EgressError" in err
    code, _, err = typed(capsys, monkeypatch, tmp_path, table(tmp_path, seeds=[]))
    assert code == 2
    assert "study.toml: seeds [] must be a list of values" in err


def test_the_live_table_shows_what_goes_on(tmp_path):
    cells = [Cell(method, "digits", {}, {}, {}) for method in ("fedavg", "moon")]
    board = Board(tmp_path, cells, {"digits": ["global.accuracy"]})
    done, going, left = (Entry(f"run-{n}", {}, cells[n > 1], n, {}, tuning=False) for n in (0, 1, 2))
    board.entries = {entry.name: entry for entry in (done, going, left)}
    board.reported = {0: [done, going], 1: [left]}
    done.state, done.result = "finished", {"metrics": {"global": {"accuracy": 0.5}}}
    going.state, going.round, going.rounds = "running", 3, 9
    left.why = "a run needs about 2.0 GB of memory, and 1.0 GB are free"
    text = io.StringIO()
    progress = SweepProgress(Console(file=text, width=100), clock=lambda: 0.0)
    progress("sweep-started", board)
    progress.console.print(progress.panel())
    shown = text.getvalue()
    assert "1/3 runs" in shown
    assert "fedavg in digits, seed 1: round 3/9" in shown
    assert "waiting: a run needs about 2.0 GB" in shown
    assert "50.0 (n=1 of 2)" in shown
    assert "0 of 1" in shown
