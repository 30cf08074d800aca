"""The results of a study travel in one file: whoever has the file goes on without repeating a run."""

import gzip
import json
from pathlib import Path

import pytest
from study_world import HerePool, Message, table

import polyfed
from polyfed.core.errors import DataError, RecipeError
from polyfed.experiment.study import known_results, scheduler
from polyfed.experiment.study.board import DIVERGED, Board
from polyfed.report.comparison.compare import POOLED_SCORE, compare
from polyfed.report.reading import history
from polyfed.report.reading.run_folder import Folder
from refusals import refuses

SCORE = "metrics.global.accuracy"
SEARCH = {"trials": 2, "seeds": [11], "sampler": "lines", "keys": {"train.lr": [0.01, 0.1]}}


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """Sweeps carry out their runs in this process. The names of the runs that were carried out."""
    started: list[str] = []

    class Counted(HerePool):
        def start(self, job, recipe, folder, until=0):
            started.append(job)
            super().start(job, recipe, folder, until)

    monkeypatch.setattr(scheduler, "Pool", Counted)
    return started


def without_times(frame):
    kept = [c for c in frame.columns if "seconds" not in c and c != "folder"]
    return frame[[c for c in kept if not c.startswith("metrics.") or c == SCORE]]


def test_another_machine_goes_on_with_the_results_of_the_file(tmp_path, runs):
    study = table(tmp_path, search=SEARCH, set={"rounds": 4, "evaluate": {"every": 2}})
    file = tmp_path / "known.jsonl.gz"
    first = polyfed.sweep(study, tmp_path / "one", jobs=1, known=file)
    assert len(runs) == 8
    del runs[:]
    second = polyfed.sweep(study, tmp_path / "two", jobs=1, known=file)
    assert runs == []
    common = without_times(second).columns
    assert without_times(second).equals(first[common])
    before = file.read_bytes()
    more = polyfed.sweep(study | {"seeds": [1, 2, 3]}, tmp_path / "three", jobs=1, known=file)
    assert len(runs) == 2, "one run of each method with the new seed"
    assert more[SCORE].notna().all()
    assert len(known_results.read_known(file)) == 10
    assert file.read_bytes() != before
    kept, whole = (history.read(Folder(Path(frame["folder"][0]))) for frame in (second, first))
    assert kept.rounds == [2, 4]
    assert sum(kept.columns["bytes_up"]) == sum(whole.columns["bytes_up"]) > 0
    assert kept.columns["global.accuracy"] == whole.columns["global.accuracy"][1::2]


def test_a_run_that_diverged_is_known_too(tmp_path, runs):
    study = table(tmp_path, search=SEARCH | {"keys": {"train.lr": [0.01, 1e30]}}, methods={"fedavg": {}})
    file = tmp_path / "known.jsonl.gz"
    polyfed.sweep(study, tmp_path / "one", jobs=1, known=file)
    assert any("failure" in row for row in known_results.read_known(file).values())
    del runs[:]
    polyfed.sweep(study, tmp_path / "two", jobs=1, known=file)
    assert runs == []


class Late(HerePool):
    """Training with the learning rates that lead after the first rung diverges after it."""

    rates = (0.5,)

    def start(self, job, recipe, folder, until=0):
        if recipe["train"]["lr"] in self.rates and recipe["seed"] == 11 and until != 1:
            self.messages.append(Message(job, "done", {"code": DIVERGED, "why": "diverged"}))
        else:
            super().start(job, recipe, folder, until)


@pytest.mark.parametrize("over", [1, 2])
@pytest.mark.parametrize("diverges", [False, True])
def test_a_search_that_stops_trials_early_reads_the_same_scores_again(tmp_path, monkeypatch, diverges, over):
    """In the same folder, and from the file: those at the rungs, not those that the trials had at their ends."""
    read, score_at = [], Board.score_at

    def noted(board, entry, rung, metrics, last):
        assert last == over
        read.append((entry.name, rung, score_at(board, entry, rung, metrics, last)))
        return read[-1][-1]

    monkeypatch.setattr(scheduler, "Pool", Late if diverges else HerePool)
    monkeypatch.setattr(Board, "score_at", noted)
    search = SEARCH | {"sampler": "grid", "trials": 4, "batch": 4, "prune": "halving", "reduction": 2}
    search |= {"keys": {"train.lr": [0.01, 0.05, 0.1, 0.5]}, "score_over": over}
    study = table(tmp_path, search=search, methods={"fedavg": {}}, set={"rounds": 4}, seeds=[1])
    scores, chosen = [], set()
    for out in ("one", "one", "two"):
        chosen.add(polyfed.sweep(study, tmp_path / out, jobs=1, known=tmp_path / "known.gz")["train.lr"][0])
        scores.append(read[:])
        del read[:]
    assert scores[1] == scores[0], "the same folder"
    assert scores[2] == scores[0], "the file"
    assert len(chosen) == 1
    assert any(score is None for *_, score in scores[0]) == diverges
    rungs = {(name, rung): score for name, rung, score in scores[0]}
    assert any(len({score for (own, _), score in rungs.items() if own == name}) > 1 for name, _ in rungs)


def test_the_score_of_a_trial_is_the_mean_of_its_last_evaluations(tmp_path, runs):
    """Also of the trials that come from the file, and of those that a search without it left in the file."""
    read, boards = {}, []
    study = table(tmp_path, methods={"fedavg": {}}, set={"rounds": 4}, seeds=[1])
    for over, out in ((1, "one"), (3, "two"), (3, "three")):
        search = SEARCH | {"sampler": "grid", "score_over": over}
        listeners = [lambda event, board: boards.append(board)]
        known = tmp_path / "known.gz"
        polyfed.sweep(study | {"search": search}, tmp_path / out, jobs=1, known=known, listeners=listeners)
        read[out] = [score for _, score in boards[-1].searches[0].trials]
    curves = []
    for trial in boards[-1].entries.values():
        if trial.tuning:
            rows = (tmp_path / "two" / "runs" / trial.name / "rounds.jsonl").read_text().splitlines()
            curves.append([json.loads(row)["metrics"]["global"]["accuracy"] for row in rows])
    assert all(len(curve) == 4 for curve in curves)
    assert read["one"] == [curve[-1] for curve in curves]
    assert read["two"] == [pytest.approx(sum(curve[1:]) / 3, abs=1e-12) for curve in curves] != read["one"]
    assert read["three"] == read["two"]
    assert len(runs) == 3 + 2, "the second search runs the trials again, because the file has only their last scores"


@pytest.mark.parametrize(
    ("changes", "evaluate", "cure"),
    [
        ({}, 2, "evaluate.every = 1"),
        ({}, 0, "evaluate.every = 1"),
        ({"prune": "halving", "least_rounds": 2, "batch": 4}, 1, "least_rounds"),
    ],
)
def test_a_mean_of_more_evaluations_than_a_trial_has_is_refused(tmp_path, changes, evaluate, cure):
    search = SEARCH | {"sampler": "grid", "score_over": 3} | changes
    study = table(tmp_path, search=search, methods={"fedavg": {}}, set={"rounds": 4, "evaluate.every": evaluate})
    with refuses(RecipeError, "score_over") as error:
        polyfed.sweep(study, tmp_path / "out", jobs=1)
    assert cure in str(error.value)


def test_if_all_that_went_on_diverge_the_best_of_those_that_stopped_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "Pool", Late)
    monkeypatch.setattr(Late, "rates", (0.1, 0.5))
    search = SEARCH | {"sampler": "grid", "trials": 4, "batch": 4, "prune": "halving", "reduction": 2}
    search["keys"] = {"train.lr": [0.01, 0.05, 0.1, 0.5]}
    study = table(tmp_path, search=search, methods={"fedavg": {}}, set={"rounds": 4}, seeds=[1])
    for out in ("one", "one", "two"):
        frame = polyfed.sweep(study, tmp_path / out, jobs=1, known=tmp_path / "known.gz")
        assert list(frame["train.lr"]) == [0.05], "the best of those that stopped at the first rung"
        assert list(frame["rounds"]) == [4]


def test_folds_from_the_file_are_pooled_as_those_that_were_run(tmp_path, runs):
    data = {"data": {"name": "objective.made:Made"}, "clients.partition": "by-client", "clients.folds": 2}
    study = table(tmp_path, methods={"fedavg": {}}, seeds=[1], set=data, unset=["clients.num"], metric="global.mae")
    study["grid"] = {"clients.fold": [1, 2]}
    for out in ("one", "two"):
        polyfed.sweep(study, tmp_path / out, jobs=1, known=tmp_path / "known.gz")
    assert len(runs) == 2
    first, second = (compare([tmp_path / out]).groups[0].cells for out in ("one", "two"))
    assert second[POOLED_SCORE] == first[POOLED_SCORE]


def test_a_file_without_the_scores_at_the_rungs_does_not_serve_a_search_that_reads_them(tmp_path, runs):
    search = SEARCH | {"sampler": "grid", "batch": 2, "prune": "halving", "reduction": 2}
    study = table(tmp_path, search=search, methods={"fedavg": {}}, set={"rounds": 2}, seeds=[1])
    file = tmp_path / "known.gz"
    first = polyfed.sweep(study, tmp_path / "one", jobs=1, known=file)
    lines = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    for line in lines:
        line.pop("evaluated") if line["tuning"] else None
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    del runs[:]
    second = polyfed.sweep(study, tmp_path / "two", jobs=1, known=file)
    assert len(set(runs)) == 2, "the trials, and not the reported run"
    assert first["train.lr"][0] == second["train.lr"][0]


def test_results_of_other_code_are_marked_and_other_recipes_are_run(tmp_path, runs, monkeypatch):
    study = table(tmp_path, methods={"fedavg": {}})
    file = tmp_path / "known.jsonl.gz"
    monkeypatch.setattr(scheduler, "code_digest", lambda: "0" * 64)
    polyfed.sweep(study, tmp_path / "one", jobs=1, known=file)
    monkeypatch.undo()
    monkeypatch.setattr(scheduler, "Pool", HerePool)
    polyfed.sweep(study, tmp_path / "two", jobs=1, known=file)
    page = (tmp_path / "two" / "index.html").read_text()
    assert "other code of polyfed, of digest 000000000000" in page
    assert "other code" not in (tmp_path / "one" / "index.html").read_text()
    rows = known_results.read_known(file)
    assert {row["code"] for row in rows.values()} == {"0" * 12}, "the file still says who computed them"
    del runs[:]
    polyfed.sweep(study | {"set": {"rounds": 3}}, tmp_path / "three", jobs=1, known=file)
    assert len(known_results.read_known(file)) == 4, "another recipe has other names"


def test_equal_results_give_equal_bytes_and_a_damaged_file_is_refused(tmp_path, runs):
    study = table(tmp_path, methods={"fedavg": {}})
    file = tmp_path / "known.jsonl.gz"
    polyfed.sweep(study, tmp_path / "one", jobs=1, known=file)
    once = file.read_bytes()
    assert known_results.write_known(tmp_path / "one", file) == 2
    assert file.read_bytes() == once
    lines = [json.loads(line) for line in gzip.decompress(once).splitlines()]
    broken = [once[:40], b"{}", gzip.compress(b'{"run": 1}\n')]
    broken += [gzip.compress(json.dumps(lines[0] | {"result": {"bytes_up": -1}}).encode())]
    for content in broken:
        file.write_bytes(content)
        with refuses(DataError, "results"):
            polyfed.sweep(study, tmp_path / "two", jobs=1, known=file)
    assert not (tmp_path / "two").exists()


def test_a_file_of_a_stranger_without_scores_or_end_is_refused(tmp_path, monkeypatch):
    """No run that did not end enters a study, and no file takes all memory."""
    file, place = tmp_path / "known.jsonl.gz", {"scenario": "toy", "method": "fedavg", "seed": 1, "tuning": False}
    row = {"run": "fedavg-1", "chosen": {}, "code": "", **place}
    scored = row | {"result": {"metrics": {"global": {"accuracy": 0.5}}}}
    flipped = bytearray(gzip.compress(json.dumps(scored).encode()))
    flipped[12] ^= 0xFF
    cases = [row, row | {"result": {}}, row | {"failure": {}}]
    for content in [bytes(flipped), *(gzip.compress(json.dumps(case).encode()) for case in cases)]:
        file.write_bytes(content)
        with refuses(DataError, "results"):
            known_results.read_known(file)
    file.write_bytes(gzip.compress(json.dumps(scored).encode()))
    assert list(known_results.read_known(file)) == ["fedavg-1"]
    monkeypatch.setattr(known_results, "LARGEST", 100)
    with refuses(DataError, "unpacks"):
        known_results.read_known(file)
