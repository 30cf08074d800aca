"""A hospital predicts for its own samples with its edge and devices, and nothing leaves the silo."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.edge_devices import EdgeDevices, edge_devices
from engines.test_edges import CANARY, EDGES, TWICE, ended, heard
from polyfed.cli import main
from polyfed.core.errors import DataError, RecipeError, TooFewReplies, TransportError
from polyfed.core.system.files import AUDIT
from polyfed.deploy import predict_at_edge
from polyfed.deploy.local_federation import LocalFederation
from polyfed.deploy.server.queued_run import run_here
from refusals import refuses

SILO = 1


def edge_of(federation: EdgeDevices) -> Path:
    return federation.folder / f"edge-{SILO}" / "edge.toml"


def arrays_of(place: Path) -> dict[str, Any]:
    with np.load(place / "data.npz") as arrays:
        return dict(arrays)


def expected(run: Path, places: list[Path]) -> dict[int, list[float]]:
    """The answers of `Run.predict` for the pooled samples of the silo: sample id -> logits."""
    loaded, held = polyfed.load_run(run), [arrays_of(place) for place in places]
    first = held[0]
    order = {int(one): n for n, one in enumerate(held[1]["id"])}
    rows = [n for n, one in enumerate(first["id"]) if int(one) in order]
    others = [order[int(first["id"][n])] for n in rows]
    x = {}
    for arrays, at in ((held[0], rows), (held[1], others)):
        x |= {name: arrays[name][at] for name in ("a", "b") if name in arrays}
    found = loaded.predict(x)
    return {int(first["id"][n]): one for n, one in zip(rows, found.tolist(), strict=True)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeDevices]:
    with ended(tmp_path_factory.mktemp("trained"), TWICE) as federation:
        yield federation


def model_of(federation: EdgeDevices) -> Path:
    return federation.app / "run"


def test_the_silo_gets_the_answers_of_one_process_and_the_server_hears_nothing(trained: EdgeDevices) -> None:
    kept = {path: path.read_bytes() for path in model_of(trained).rglob("*") if path.is_file()}
    with heard(trained) as (server, *edges):
        found = predict_at_edge(edge_of(trained), model_of(trained))
    assert (server, edges[0]) == ([], []), "neither the server nor another silo hears anything"
    assert edges[SILO], "the edge heard its devices"
    assert kept == {path: path.read_bytes() for path in model_of(trained).rglob("*") if path.is_file()}
    answers = expected(model_of(trained), trained.places[2 * SILO : 2 * SILO + 2])
    assert sorted(found["id"]) == sorted(answers), "all samples, whether they train or not"
    assert {*found["used"]} == {"a+b"}
    columns = [found[name] for name in found if name.startswith("probability.")]
    told = dict(zip(found["id"], zip(*columns, strict=True), strict=True))
    for one, logits in answers.items():
        assert told[one] == pytest.approx(torch.tensor(logits).softmax(0).tolist(), abs=1e-5)


def test_what_passed_is_in_the_logs_of_edge_and_devices_under_the_run_of_the_prediction(trained: EdgeDevices) -> None:
    def logged(folder: Path) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (folder / AUDIT).read_text().splitlines()]
        return [row for row in rows if str(row.get("run", "")).startswith("predict-") and "verdict" in row]

    states = [Path(one["config"]["state"]) for one in trained.devices[SILO]["devices"]]
    before = [len(logged(folder)) for folder in (trained.state(SILO), *states)]
    predict_at_edge(edge_of(trained), model_of(trained))
    for folder, count in zip((trained.state(SILO), *states), before, strict=True):
        rows = logged(folder)[count:]
        assert {row["destination"] for row in rows} == {"client", "silo"}, "nothing was for the server"
        assert {row["kind"] for row in rows if row["destination"] == "silo"} == {"embeddings", "ids", "statistic"}


def test_only_wanted_samples_are_embedded_and_unknown_ones_refused(
    trained: EdgeDevices, tmp_path: Path, capsys: Any
) -> None:
    ids = arrays_of(trained.places[2 * SILO])["id"].tolist()
    (tmp_path / "ids.txt").write_text(f"{ids[3]}\n\n{ids[40]}\n")
    out = tmp_path / "silo.csv"
    words = ["predict", str(model_of(trained)), str(edge_of(trained)), "--only", str(tmp_path / "ids.txt")]
    with pytest.raises(SystemExit) as end:
        main([*words, "--out", str(out)])
    assert not end.value.code, capsys.readouterr().err
    assert sorted(pd.read_csv(out)["id"]) == sorted([ids[3], ids[40]])
    (tmp_path / "ids.txt").write_text(f"{ids[3]}\nnobody\n")
    with refuses(DataError, "nobody"):
        predict_at_edge(edge_of(trained), model_of(trained), tmp_path / "ids.txt")
    for text in ("", f"{ids[3]}\n{ids[3]}\n"):
        (tmp_path / "ids.txt").write_text(text)
        with refuses(DataError, "ids.txt"):
            predict_at_edge(edge_of(trained), model_of(trained), tmp_path / "ids.txt")
    with pytest.raises(SystemExit) as end:
        main([*words, "--coverage", "0.9"])
    assert (end.value.code, "--coverage" in capsys.readouterr().err) == (2, True)


def test_a_model_that_does_not_fit_is_refused(trained: EdgeDevices, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a.layers.0.weight": torch.zeros(3, 3)}, tmp_path / "other.safetensors")
    with refuses(RecipeError, "model.init: fit"):
        predict_at_edge(edge_of(trained), tmp_path / "other.safetensors")
    with refuses(RecipeError, "model.init: nowhere"):
        predict_at_edge(edge_of(trained), tmp_path / "nowhere")


def test_an_edge_that_knows_no_run_or_is_not_running_says_so(tmp_path: Path) -> None:
    with edge_devices(tmp_path, EDGES) as federation, refuses(RecipeError, "no run yet"):
        predict_at_edge(edge_of(federation), tmp_path)
    with refuses(TransportError, "polyfed edge"):
        predict_at_edge(edge_of(federation), tmp_path)


def test_without_one_of_its_devices_a_silo_gets_no_answer(tmp_path: Path) -> None:
    """A missing device must not look as if all samples lacked its modality."""
    text = EDGES.replace("enrol_seconds = 120.0", "enrol_seconds = 4.0")
    with edge_devices(tmp_path, text) as federation:
        federation.run()
        model, edge = model_of(federation), edge_of(federation)
        Path(federation.devices[SILO]["devices"][0]["config"]["data"]).unlink()
        with refuses(TooFewReplies, "2 devices"):
            predict_at_edge(edge, model)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_real_processes_predict_after_their_run(tmp_path: Path) -> None:
    patient = EDGES.replace("enrol_seconds = 120.0", "enrol_seconds = 900.0")  # a busy machine starts processes slowly
    (tmp_path / "recipe.toml").write_text(patient)
    with LocalFederation(tmp_path / "recipe.toml", tmp_path / "fed") as federation:
        federation.start()
        out = run_here(federation.app, federation.credentials, {})
        edge = tmp_path / "fed" / "edges" / str(SILO) / "edge.toml"
        found = predict_at_edge(edge, out)
        places = [Path(table["data"]).parent for table in federation.tables if table["silo"] == SILO]
        answers = expected(out, places)
    assert sorted(found["id"]) == sorted(answers)
    assert min(found["id"]) < CANARY
