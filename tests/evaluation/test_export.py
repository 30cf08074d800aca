"""`Run.export`, `load_model` and `load_run`: the models of a run, later and without it."""

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed
from ended_runs import CASES, Gappy, ended, made, samples
from polyfed.core.errors import CheckpointError, DataError, RecipeError
from polyfed.data.sources import Toy
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.recipes.settings import DeploymentSpec, EngineSpec
from polyfed.experiment.results.records import Records
from polyfed.experiment.running.assembly import assemble, population_of
from polyfed.experiment.running.checkpoint import sha256_of
from polyfed.experiment.running.events import Emitter
from refusals import refuses
from world import PLAIN, algorithm, recipe, same


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_predicts_the_same_bit_for_bit(case: str, engine: str, tmp_path: Path) -> None:
    run, parts = ended(case, engine)
    folder = run.export(tmp_path / "model")
    assert folder == (tmp_path / "model").resolve()
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "no draft is left"
    back = polyfed.load_model(folder, imports=["polyfed.laws.federation.*", "world.*"])
    x = samples(parts.population.columns, parts.population.test_rows)
    assert dict(back.clients) == dict(run.models.clients)
    for client in parts.fed.clients:
        assert torch.equal(back.predict(x, client=client), run.predict(x, client=client))
    assert list(back.personal) == list(run.personal)
    assert all(same(back.personal[client], tree) for client, tree in run.personal.items())
    assert repr(back) == repr(run.models)
    if run.models.shared is None:
        with refuses(RecipeError, "no global model"):
            back.predict(x)
        return
    assert torch.equal(back.predict(x), run.predict(x))
    assert same(back.params, run.params)


def test_the_description_of_a_saved_model(tmp_path: Path) -> None:
    made = recipe(algorithm("fedavg"), data=Gappy(rows=330, classes=4, seed=3), rounds=1)
    said = json.loads((polyfed.run(made).export(tmp_path / "m") / "model.json").read_text())
    assert said["polyfed"] == polyfed.__version__
    assert said["algorithm"] == "fedavg"
    assert said["model"]["encoders"]["a"] == {"kind": "mlp", "hidden": [12]}
    assert said["shapes"] == {"a": [16], "b": [24]}
    assert (said["classes"], said["class_names"]) == (4, ["k", "l", "m", "n"])
    held = {k: group["modalities"] for group in said["clients"] for k in group["clients"]}
    parts = assemble(made)
    assert held == {client: list(parts.fed.clients.owned(client)) for client in parts.fed.clients}
    assert polyfed.load_model(tmp_path / "m").class_names == ("k", "l", "m", "n")


class Scaled(nn.Module):
    """An encoder of one's own with options."""

    def __init__(self, shape: tuple[int, ...], embedding: int, scale: float, sizes: Any = (4,)) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(shape[0], sizes[0]), nn.Linear(sizes[0], embedding))
        self.scale = float(scale)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x * self.scale)
        return out


def scaled(scale: Any) -> Any:
    return {m: {"kind": "test_export:Scaled", "scale": scale, "sizes": [5]} for m in "ab"}


def test_an_encoder_of_ones_own_is_written_with_its_options(tmp_path: Path) -> None:
    made = recipe(algorithm("fedavg"), encoders=scaled(2.0), rounds=1)
    assert parse_recipe(made.table()).model == made.model
    run = polyfed.run(made)
    x = {"a": torch.ones(2, 16), "b": torch.ones(2, 24)}
    assert torch.equal(
        polyfed.load_model(run.export(tmp_path / "m"), imports=["test_export:Scaled"]).predict(x), run.predict(x)
    )


def test_an_encoder_whose_options_are_no_json_is_refused(tmp_path: Path) -> None:
    run = polyfed.run(recipe(algorithm("fedavg"), encoders=scaled(torch.tensor(2.0)), rounds=1))
    with refuses(RecipeError, "describe"):
        run.export(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_all_files_of_a_saved_model_may_be_read_by_the_same_people(tmp_path: Path) -> None:
    run, _ = ended("fedavg", "sequential")
    files = [*run.export(tmp_path / "model").iterdir()]
    assert len({path.stat().st_mode for path in files}) == 1
    assert {"model.json", "global.safetensors"} <= {path.name for path in files}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run, _ = ended("fedavg")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    assert (
        polyfed.load_model(run.export(tmp_path / "empty"), imports=["polyfed.laws.federation.*", "world.*"]).algorithm
        == "fedavg"
    )
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("full", "file", "empty"):
        with refuses(RecipeError, "empty folder"):
            run.export(tmp_path / name)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_disk_that_fills_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = ended("creamfl")
    written: list[Path] = []

    def full(tree: Any, path: Path) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        path.write_bytes(b"x")

    monkeypatch.setattr("polyfed.experiment.results.saved_model.save_file", full)
    with refuses(DataError, "model could"):
        run.export(tmp_path / "deep" / "model")
    assert written
    assert not list((tmp_path / "deep").iterdir())


def damages(folder: Path) -> Iterator[Path]:
    """One damage after the other, each undone."""
    for name in ("global.safetensors", "client-000002.safetensors"):
        path = folder / name
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        yield path
        path.unlink()
        yield path
        path.write_bytes(before)
    path = folder / "model.json"
    before_text = path.read_text()
    for change in ("{", "[]", before_text.replace('"format": 1', '"format": 2'), before_text.replace('"reads"', '"r"')):
        path.write_text(change)
        yield path
    path.write_text(before_text.replace('"embedding": 6', '"embedding": 7'))
    yield folder / "global.safetensors"
    path.write_text(before_text)


def test_a_damaged_model_is_not_read(tmp_path: Path) -> None:
    run, _ = ended("creamfl")
    folder = run.export(tmp_path / "model")
    with refuses(DataError, "saved model"):
        polyfed.load_model(tmp_path)
    count = 0
    for path in damages(folder):
        with refuses(DataError, path.name if path.name != "model.json" else "model"):
            polyfed.load_model(folder, imports=["polyfed.laws.federation.*", "world.*"]).personal[2]
        count += 1
    assert count == 9
    assert same(
        polyfed.load_model(folder, imports=["polyfed.laws.federation.*", "world.*"]).personal[2], run.personal[2]
    )


def test_nothing_of_a_saved_model_is_unpickled(tmp_path: Path) -> None:
    run, _ = ended("fedavg")
    folder = run.export(tmp_path / "model")
    path = folder / "global.safetensors"
    path.write_bytes(pickle.dumps({"a": 1}))
    said = json.loads((folder / "model.json").read_text())
    said["sha256"] = {"global.safetensors": sha256_of(path)}
    (folder / "model.json").write_text(json.dumps(said))
    with refuses(DataError, "global.safetensors is damaged"):
        polyfed.load_model(folder, imports=["polyfed.laws.federation.*", "world.*"])


# later, and elsewhere


@pytest.mark.parametrize(
    "case",
    ["fedavg", "pfmml", "vfl", "creamfl", "fedgkt", "fedmsplit", "fedproto original", "partialfl", "hfl", "local"],
)
def test_a_run_is_loaded_from_its_folder_without_its_data(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, parts = polyfed.run(made(case), tmp_path / "run"), assemble(made(case))
    x = samples(parts.population.columns, parts.population.test_rows)
    monkeypatch.setattr(Toy, "load", lambda _: pytest.fail("the data was loaded"))
    back = polyfed.load_run(tmp_path / "run")
    assert back.result["state_sha256"] == run.result["state_sha256"]
    assert back.result["metrics"] == run.result["metrics"]
    assert [row["round"] for row in back.rounds] == [1, 2]
    assert dict(back.models.clients) == dict(run.models.clients)
    for client in back.models.clients:
        assert torch.equal(back.predict(x, client=client), run.predict(x, client=client))
    assert list(back.personal) == list(run.personal)
    if run.models.shared is not None:
        assert same(back.params, run.params)
    assert repr(
        polyfed.load_model(back.export(tmp_path / "model"), imports=["polyfed.laws.federation.*", "world.*"])
    ) == repr(run.models)


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with refuses(RecipeError, "finished run"):
        polyfed.load_run(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    polyfed.run(recipe(algorithm("fedavg"), rounds=1), tmp_path / "run")
    (tmp_path / "run" / "result.json").rename(tmp_path / "result.json")
    with refuses(RecipeError, "finished run"):
        polyfed.load_run(tmp_path / "run")
    (tmp_path / "result.json").rename(tmp_path / "run" / "result.json")
    (tmp_path / "run" / "checkpoint" / "latest.json").unlink()
    with refuses(CheckpointError, "loaded"):
        polyfed.load_run(tmp_path / "run")


def deployed(case: str, folder: Path) -> polyfed.Run:
    """A run whose clients are behind the wire."""
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from engines.direct import HubTransport, hub_of
    from polyfed.deploy.server.server import engine_by
    from polyfed.experiment.running.loop import execute

    recipe = replace(
        made(case, encoders=PLAIN), engine=EngineSpec(name="flower"), deployment=DeploymentSpec(relay="server-sees")
    )
    hub = hub_of(recipe, folder / "nodes")
    transport = HubTransport(hub)
    assert len(transport.enrol(hub.clients, 30)) == hub.clients
    records = Records(folder / "run", resume=False)
    return execute(recipe, records, Emitter([]), population=population_of(recipe), engine=engine_by(transport, recipe))


@pytest.mark.parametrize("case", ["pfmml", "vfl", "creamfl"])
def test_models_of_deployed_clients_are_said_to_be_with_them(case: str, tmp_path: Path) -> None:
    run = deployed(case, tmp_path)
    x = {"a": torch.zeros(2, 16), "b": torch.zeros(2, 24)}
    later = polyfed.load_run(tmp_path / "run")
    found: list[Any] = [run, later]
    if case == "creamfl":
        assert same(later.params, run.params)
        found.append(
            polyfed.load_model(run.export(tmp_path / "model"), imports=["polyfed.laws.federation.*", "world.*"])
        )
        assert all(torch.equal(one.predict(x), run.predict(x)) for one in found)
    else:
        with refuses(RecipeError, "keep these models"):
            run.export(tmp_path / "model")
    for one in found:
        with refuses(RecipeError, "keep these models"):
            one.personal  # noqa: B018
        with refuses(RecipeError, "keep these models"):
            one.predict(x, client=0)


@pytest.mark.parametrize("case", ["fedavg", "fedmsplit"])
def test_models_that_the_server_of_a_deployment_holds_are_there(case: str, tmp_path: Path) -> None:
    run, (alone, parts) = deployed(case, tmp_path), (polyfed.run(made(case, "sequential", PLAIN)), assemble(made(case)))
    x = samples(parts.population.columns, parts.population.test_rows)
    assert len(run.personal) == len(alone.personal)
    for client in parts.fed.clients:
        assert torch.equal(run.predict(x, client=client), alone.predict(x, client=client))
    assert torch.equal(polyfed.load_run(tmp_path / "run").predict(x), alone.predict(x))
