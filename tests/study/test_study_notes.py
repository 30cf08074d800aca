"""What a study tells about its methods: shared runs, parts without effect, warnings, and why it is incomplete."""

import json

import pytest
import tomli_w
from study_world import HerePool, table

import polyfed
from polyfed.cli import main
from polyfed.experiment.study import plan

PARTICIPATION = "participation = 2 has no effect beside algorithm 'pfmml', which asks every client in every round"
STILL = "have not moved in 2 rounds, so every device gets nearly the plain mean there"


def typed(capsys, monkeypatch, *words):
    monkeypatch.setattr("polyfed.experiment.study.scheduler.Pool", HerePool)
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    told = capsys.readouterr()
    return end.value.code, told.out, told.err


def swept(capsys, monkeypatch, folder, study):
    (folder / "study.toml").write_text(tomli_w.dumps(study))
    return typed(capsys, monkeypatch, "sweep", folder / "study.toml", "--out", folder / "out")


def own_models(folder):
    """PFMML with learned coefficients that stay as they are, and FedAvg."""
    changes = {"clients.participation": 2, "clients.personal_test": 0.3, "clients.validation": 0.0}
    changes["egress"] = {"*": {"server": ["parameters", "statistic"]}}
    methods = {"pfmml": {"set": {"algorithm.coefficient_lr": 1e-9}}, "fedavg": {}}
    return table(folder, metric="personal.mean", set=changes, methods=methods)


def test_methods_with_the_same_settings_keep_their_names(tmp_path, capsys, monkeypatch):
    methods = {"a": {"set": {"algorithm.name": "fedavg"}}, "b": {"set": {"algorithm.name": "fedavg"}}}
    code, _, err = swept(capsys, monkeypatch, tmp_path, table(tmp_path, methods=methods))
    told = "these have the same settings, so they share their runs"
    assert code == 0
    assert f"note: a in recipe, b in recipe: {told}" in err
    page = (tmp_path / "out" / "index.html").read_text()
    assert f"a in recipe, b in recipe: {told}" in page
    assert page.count('<th scope="row">a</th>') == page.count('<th scope="row">b</th>') == 3, "a result and two runs"
    comparison = polyfed.compare([tmp_path / "out", *(tmp_path / "out" / "runs").iterdir()])
    assert [(group.method, len(group.folders)) for group in comparison.groups] == [("a", 2), ("b", 2)]
    assert comparison.warnings == (f"a and b: {told}",)


def test_notes_of_runs_reach_the_study_once_for_each_method(tmp_path, capsys, monkeypatch):
    code, _, err = swept(capsys, monkeypatch, tmp_path, own_models(tmp_path))
    assert code == 0
    page = (tmp_path / "out" / "index.html").read_text()
    _, compared, _ = typed(capsys, monkeypatch, "compare", tmp_path / "out")
    for text in (PARTICIPATION, STILL):
        assert err.count(text) == page.count(text.replace("'", "&#39;")) == compared.count(text) == 1, text
    assert "note: pfmml in recipe: the coefficients of a, b, shared" in err
    _, _, again = swept(capsys, monkeypatch, tmp_path, own_models(tmp_path))
    assert PARTICIPATION in again, "the warnings of finished runs stay"


def test_notes_say_how_many_runs_they_concern(tmp_path, capsys, monkeypatch):
    swept(capsys, monkeypatch, tmp_path, own_models(tmp_path))
    runs = json.loads((tmp_path / "out" / "study.json").read_text())["runs"]
    path = tmp_path / "out" / runs[0]["folder"] / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"concerns": []}))
    (note,) = [w for w in polyfed.compare([tmp_path / "out"]).warnings if STILL in w]
    assert note.startswith("pfmml: the coefficients of a, b, shared ")
    assert note.endswith("(1 of 2 runs)")


def test_a_study_whose_runs_lack_the_metric_ends_with_4_and_the_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan, "measured_by", lambda *_: None)  # as if the metrics were not known before the run
    missing = table(tmp_path, metric="global.pearson", methods={"fedavg": {}})
    code, _, err = swept(capsys, monkeypatch, tmp_path, missing)
    assert code == 4
    assert "incomplete: fedavg-toy-s1-" in err
    assert ": finished without global.pearson, only global.accuracy" in err
    search = {"trials": 1, "seeds": [9], "keys": {"train.lr": [0.1]}}
    code, _, err = swept(capsys, monkeypatch, tmp_path, missing | {"search": search})
    assert code == 4
    assert "incomplete: fedavg in recipe: its search stopped, because its runs have no metric global.pearson" in err
