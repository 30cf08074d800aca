"""The results of a study travel in one file: whoever has the file goes on without repeating a run."""

import gzip
import json
from pathlib import Path

import pytest
from study_world import HerePool, table

import polyfed
from polyfed.core.errors import DataError
from polyfed.experiment.study import known_results, scheduler
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
