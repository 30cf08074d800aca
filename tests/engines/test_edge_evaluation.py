"""An evaluation job for silos with edges: the scores of one process, and only sums and counts leave a silo."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.edge_devices import EdgeDevices
from engines.test_edges import EDGES, ended, expect_no_embedding_or_id, forwarded, heard, said_and_written
from engines.test_own_modes import SILOS
from polyfed.algorithms.evaluate import Evaluate
from polyfed.algorithms.hfm.silo_evaluation import EvaluateSilos
from polyfed.cli import main
from polyfed.core.errors import RecipeError
from polyfed.deploy.app_folder import write_job
from polyfed.deploy.server.queued_run import run_here
from polyfed.experiment.evaluate import job_of
from polyfed.report import reconcile
from refusals import refuses

TESTED = EDGES.replace("silos = 2", "silos = 2\npersonal_test = 0.3")
SHOWN = "\n[limits]\nmin_group = 1\n"


def scored(federation: EdgeDevices, name: str, **more: Any) -> dict[str, Any]:
    """What `polyfed evaluate --app` and `polyfed submit` do. Return the evaluation."""
    job = job_of(federation.app / "run", federation.recipe, for_devices=True, **more)
    out = run_here(write_job(job, federation.folder / name), federation.credentials, {})
    result: dict[str, Any] = json.loads((out / "result.json").read_text())["evaluation"]
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeDevices]:
    with ended(tmp_path_factory.mktemp("trained"), TESTED) as federation:
        yield federation


def limit(federation: EdgeDevices, text: str) -> Iterator[None]:
    """The owners of all devices add to their policies, for a while."""
    files = [Path(one["config"]["policy"]) for told in federation.devices for one in told["devices"]]
    before = {file: file.read_text() for file in files}
    for file in files:
        file.write_text(before[file] + text)
    yield
    for file in files:
        file.write_text(before[file])


@pytest.fixture
def shown(trained: EdgeDevices) -> Iterator[None]:
    yield from limit(trained, SHOWN)


def test_silos_score_a_model_as_one_process_does_and_only_sums_leave_them(trained: EdgeDevices, shown: None) -> None:
    with heard(trained) as (server, *edges):
        found = scored(trained, "job")
    job = job_of(trained.app / "run", trained.recipe, for_devices=True)
    polyfed.run(job, trained.folder / "one", engine="sequential")
    one = json.loads((trained.folder / "one" / "result.json").read_text())["evaluation"]
    assert found == one
    assert [site["rows"] for site in found["sites"].values()] == [14, 14]
    assert found["pooled"]["rows"] == 28
    assert 0 < found["pooled"]["metrics"]["accuracy"]["value"] < 1

    replies = forwarded(server)
    assert [reply["message"] for reply in replies] == ["SiteScores"] * 2, "one report of each silo"
    assert {kind for reply in replies for kind in reply["kinds"].values()} == {"statistic"}
    out = trained.folder / "job" / "run"
    written = said_and_written(server, out)
    expect_no_embedding_or_id(written, edges)
    for place in trained.places:
        with np.load(place / "data.npz") as arrays:
            test = arrays["label"][arrays["split"] == 1]
        assert len(test) == 14
        assert not any(test.astype(kind).tobytes() in written for kind in (np.int64, np.int32, np.uint8, np.float32))
    assert not reconcile(out, [trained.state(0), trained.state(1)]).findings


def test_a_device_hides_classes_with_few_rows_unless_its_owner_says_otherwise(trained: EdgeDevices) -> None:
    found = scored(trained, "hidden")
    assert found["pooled"]["hidden"]
    assert all(count == 0 or count >= 10 for site in found["sites"].values() for count in site["support"])


def test_the_job_needs_rows_to_score(trained: EdgeDevices) -> None:
    with refuses(RecipeError, "clients.personal_test: validation rows"):
        scored(trained, "none", rows="validation")


def test_the_command_writes_a_job_for_silos(trained: EdgeDevices, tmp_path: Path, capsys: Any) -> None:
    words = ["evaluate", str(trained.app / "run"), "--recipe", str(trained.recipe), "--app", str(tmp_path / "job")]
    with pytest.raises(SystemExit) as end:
        main(words)
    assert not end.value.code, capsys.readouterr().err
    assert 'name = "evaluate-silos"' in (tmp_path / "job" / "recipe.toml").read_text()
    with pytest.raises(SystemExit) as end:
        main([*words[:2], str(trained.app / "run"), *words[2:-1], str(tmp_path / "two")])
    assert end.value.code == 2
    assert "a job of its own" in capsys.readouterr().err


def test_a_job_keeps_what_says_which_samples_count_and_other_methods_keep_their_job(tmp_path: Path) -> None:
    for relay, text in (("edge", EDGES), ("server-sees", SILOS.replace("rounds = 2", "rounds = 1"))):
        folder = tmp_path / relay
        folder.mkdir()
        (folder / "recipe.toml").write_text(text.replace('"hfm"', '"hfm"\noverlap = "common"'))
        polyfed.run(folder / "recipe.toml", folder / "run", engine="sequential")
        method = job_of(folder / "run", folder / "recipe.toml", for_devices=True).algorithm
        assert isinstance(method, EvaluateSilos)
        assert (method.overlap, method.rows) == ("common", "test")
    plain = EDGES.replace('"hfm"\nexchanges = 1', '"fedavg"').replace('relay = "edge"\n', "")
    (tmp_path / "recipe.toml").write_text(plain)
    assert type(job_of(tmp_path / "edge" / "run", tmp_path / "recipe.toml", for_devices=True).algorithm) is Evaluate
    (tmp_path / "recipe.toml").write_text(EDGES.replace('"hfm"', '"vfl"').replace('relay = "edge"\n', ""))
    with refuses(RecipeError, "polyfed predict"):
        job_of(tmp_path / "edge" / "run", tmp_path / "recipe.toml", for_devices=True)
