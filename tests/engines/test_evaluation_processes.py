"""Evaluation, subsets and conformal counts on three real device processes. Slow; `make check-all`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.devices import RECIPE
from engines.federations import PATIENCE, Federation, outcome, reference
from polyfed.deploy.app_folder import write_job
from polyfed.experiment.evaluate import job_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MORE = """
reply_seconds = 400
away_seconds = 400
[evaluate]
every = 0
subsets = "all"
conformal = "split"
conformal_groups = "client"
shrinkage = true
"""

CAPTURE = """
from polyfed.engines import queued
read = queued.unframed
def kept(content):
    with open(PLACE, "ab") as file:
        file.write(content)
    return read(content)
queued.unframed = kept
"""
"""Everything that reaches the process of the run, before polyfed reads it."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: Any) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation")
    text = RECIPE.replace('holdings = [["a", "b"], ["a"], ["b"]]', "validation = 0.25").replace(
        '"scaffold"', '"fedavg"'
    )
    (folder / "own.toml").write_text(text.replace("enrol_seconds = 2.0", "") + MORE)
    with Federation(folder / "own.toml", folder / "fed") as started:
        for place in started.nodes:
            path = place / "policy.toml"
            path.write_text(path.read_text() + "[limits]\nmin_group = 1\n")
        started.start()
        yield started


def test_three_device_processes_score_subsets_and_count_like_the_sequential_engine(
    federation: Federation, tmp_path: Path
) -> None:
    recipe = federation.folder.parent / "own.toml"
    federation.run().wait(PATIENCE)
    assert outcome(federation.out) == reference(recipe, federation.folder.parent / "model")
    here, there = (
        json.loads((folder / "result.json").read_text())
        for folder in (federation.folder.parent / "model", federation.out)
    )
    assert here["metrics"]["personal"] == there["metrics"]["personal"]
    assert any(name.startswith("subset.") for name in there["metrics"]["personal"])
    assert here["conformal"] == there["conformal"]
    assert {"*", "0", "1", "2"} == set(there["conformal"]["counts"]) == set(there["conformal"]["sizes"])
    sets = [polyfed.load_run(federation.out).models.conformal, polyfed.load_run(federation.folder.parent / "model")]
    assert sets[0] is not None


def test_a_job_on_three_device_processes_equals_the_pooled_file_and_sends_no_row_score_or_label(
    federation: Federation, tmp_path: Path
) -> None:
    model, recipe = tmp_path / "model", federation.folder.parent / "own.toml"
    polyfed.run(recipe, model, engine="sequential")
    app = write_job(job_of(model, None), tmp_path / "job")
    federation.run(app, changed=CAPTURE.replace("PLACE", repr(str(tmp_path / "captured")))).wait(PATIENCE)
    told = json.loads((app / "run" / "result.json").read_text())["evaluation"]
    parts = [dict(np.load(place / "data.npz")) for place in federation.nodes]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    rows["id"] = np.arange(len(rows["label"]))
    rows["client"] = np.repeat(np.arange(len(parts)), [len(part["label"]) for part in parts])
    np.savez(tmp_path / "pooled.npz", **rows)
    text = recipe.read_text().replace(
        'name = "toy"\nrows = 240\nclasses = 4', 'name = "npz"\npath = "x"\nmodalities = ["a", "b"]'
    )
    (tmp_path / "npz.toml").write_text(text)
    here = polyfed.evaluate(model, recipe=tmp_path / "npz.toml", data=tmp_path / "pooled.npz").content
    assert set(told["sites"]) == {"0", "1", "2"}
    assert told["pooled"]["support"] == here["pooled"]["support"]
    for name, one in here["pooled"]["metrics"].items():
        for key, value in one.items():
            assert told["pooled"]["metrics"][name][key] == pytest.approx(value, rel=1e-9, abs=1e-9), (name, key)
    captured = (tmp_path / "captured").read_bytes()
    assert captured.count(b"SiteScores") + captured.count(b"verdict") > 0, "the capture holds headers"
    assert len(captured) > 3 * 512 * 8, "and histograms"
    tested = rows["split"] == 1
    logits = polyfed.load_run(model).predict({m: rows[m] for m in ("a", "b")}).numpy()
    for values in (rows["a"], rows["b"], logits):
        flat = values[tested].reshape(int(tested.sum()), -1).astype(np.float32)
        for row in flat:
            # whole rows, and each number that is not as common as 0 or 1
            assert row.tobytes() not in captured
            assert row.astype(np.float64).tobytes() not in captured
    for number in np.unique(logits[tested].astype(np.float32)):
        assert number.tobytes() not in captured
        assert np.float64(number).tobytes() not in captured
    for part in parts:
        own = part["label"][part["split"] == 1]
        for kind in (np.int64, np.int32, np.uint8, np.float32, np.float64):
            assert own.astype(kind).tobytes() not in captured
