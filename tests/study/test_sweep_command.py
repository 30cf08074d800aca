"""`polyfed sweep` as typed: the live table, lines, JSON, exit codes."""

import io
import json

import pytest
import tomli_w
from rich.console import Console
from study_world import HerePool, table

from polyfed.cli import main
from polyfed.cli.printing.sweep_progress import SweepProgress
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
    crowd = {"set": {"algorithm.name": "fedavg", "clients.num": 100_000}}  # more clients than rows
    methods = {"fedavg": {}, "crowd": crowd}
    code, out, err = typed(capsys, monkeypatch, tmp_path, table(tmp_path, seeds=[1], methods=methods))
    assert code == 4
    assert "failed: crowd in recipe, reported seed 1: " in err
    assert "not compared: crowd (" in out, "below the closing table"
    (absent,) = json.loads((tmp_path / "out" / "study.json").read_text())["not_compared"]
    assert (absent["method"], absent["missing"], absent["of"]) == ("crowd", 1, 1)
    assert absent["why"] in out
    code, _, err = typed(capsys, monkeypatch, tmp_path, table(tmp_path, seeds=[]))
    assert code == 2
    assert "study.toml: seeds [] must be a list of values" in err


def test_a_policy_that_forbids_a_method_is_refused_before_the_first_run(tmp_path, capsys, monkeypatch):
    study = table(tmp_path, seeds=[1], methods={"fedavg": {}, "fedproto": {}, "creamfl": {}})
    code, _, err = typed(capsys, monkeypatch, tmp_path, study)
    assert code == 2
    assert "2 problems" in err
    for method in ("fedproto", "creamfl"):
        assert f"  method '{method}' in scenario 'recipe': the policy forbids what this algorithm sends:\n    " in err
    assert "prototypes of a to the server: Learned.prototypes (task update)" in err
    assert '[egress."*"] server = ' in err
    assert not (tmp_path / "out").exists(), "no run has started"


def test_the_end_of_a_sweep_shows_the_whole_reason(tmp_path):
    cell = Cell("cmsfed", "digits", {}, {}, {})
    board = Board(tmp_path, [cell], {"digits": ["global.accuracy"]})
    lost = Entry("run-1", {}, cell, 1, {}, tuning=False, state="failed", code=3)
    lost.why = "EgressError: the policy forbids:\n  prototypes of audio"
    board.entries, board.reported = {"run-1": lost}, {0: [lost]}
    text = io.StringIO()
    progress = SweepProgress(Console(file=text, width=100), clock=lambda: 0.0)
    progress("sweep-started", board)
    progress("sweep-finished", board)
    assert "incomplete: run-1: EgressError: the policy forbids:\n  prototypes of audio" in text.getvalue()


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
