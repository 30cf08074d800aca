"""`app --local` with a table of pictures and texts: its devices get arrays, and the server waits for all of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.direct import over
from polyfed.core.errors import RecipeError
from polyfed.deploy import write_app
from polyfed.deploy.app_folder import app_config
from polyfed.deploy.handlers import Deployed
from polyfed.deploy.local_federation import LocalFederation
from polyfed.deploy.server.server import finished, serve
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.loop import execute
from refusals import refuses

pillow = pytest.importorskip("PIL.Image", reason="the extra polyfed[image] is not installed")

RECIPE = """
seed = 3
rounds = 1
[data]
name = "table"
path = "PATH"
client = "who"
columns = { path = { kind = "image", size = 6 }, caption = { kind = "words", buckets = 20, length = 3 } }
modalities = { path = "path", caption = "caption" }
[clients]
partition = "by-client"
[model]
embedding = 4
[model.encoders]
path = { kind = "mlp", hidden = [4] }
caption = { kind = "token-transformer", vocabulary = 21, heads = 1 }
[train]
batch_size = 8
lr = 0.1
[algorithm]
name = "fedavg"
[deployment]
enrol_seconds = 2.0
"""


def album(folder: Path) -> Path:
    """Write a table of 24 pictures of three photographers, with captions, and the recipe for it."""
    draw = np.random.default_rng(0)
    names = [f"{row}.png" for row in range(24)]
    for name in names:
        pillow.fromarray(draw.integers(0, 255, (6, 6, 3)).astype(np.uint8)).save(folder / name)
    captions = ["" if row == 5 else f"a {'cat' if row % 2 else 'dog'} {row}" for row in range(24)]
    kinds = [("bed", "clock")[row % 2] for row in range(24)]
    facts = {"path": names, "caption": captions, "label": kinds, "who": ["ana", "bea", "cyd"] * 8}
    pd.DataFrame(facts).to_csv(folder / "album.csv", index=False)
    (folder / "recipe.toml").write_text(RECIPE.replace("PATH", str(folder / "album.csv")))
    return folder / "recipe.toml"


def test_pictures_and_texts_of_a_table_train_on_local_devices_as_in_a_simulation(tmp_path: Path) -> None:
    path = album(tmp_path)
    federation = LocalFederation(path, tmp_path / "fed")
    app = federation.app
    made = load_recipe(app / "recipe.toml")
    assert (made.deployment.nodes, made.data.class_names) == (3, ("bed", "clock"))
    with np.load(federation.nodes[0] / "data.npz") as held:
        assert held["path"].dtype == np.uint8
        assert held["path"].shape[1:] == (3, 6, 6)
        assert held["caption"].dtype == np.int64
    handler = Deployed(app / "recipe.toml")
    tables = [{key: value for key, value in table.items() if key != "key"} for table in federation.tables]

    def answer(packet: Any, config: Any) -> Any:
        return handler(packet, tables[config["partition-id"]])

    out = {"out": str(federation.out), "data": app_config(app)["data"]}
    serve(app / "recipe.toml", over(answer, 3), out, execute)
    deployed = json.loads((federation.out / "result.json").read_text())
    simulated = polyfed.run(load_recipe(path), out=tmp_path / "run").result
    for group in ("global", "unimodal"):
        assert deployed["metrics"].get(group) == pytest.approx(simulated["metrics"].get(group), abs=1e-5)
    assert deployed["clients"] == 3
    assert finished(load_recipe(path), federation.out)


def test_an_app_of_a_table_whose_classes_or_columns_devices_cannot_know_is_not_written(tmp_path: Path) -> None:
    path = album(tmp_path)
    with refuses(RecipeError, "data.class_names: clock"):
        write_app(path, tmp_path / "app")
    said: list[str] = []
    write_app(path, tmp_path / "app", said.append, ['data.class_names=["bed", "clock"]'])
    assert "the server waits for one" in said[0]
    one_hot = ['data.columns.who="one-hot"', 'data.modalities.who="who"', 'data.client=""', "clients.num=2"]
    with refuses(RecipeError, "data.columns: array"):
        write_app(path, tmp_path / "other", overrides=[*one_hot, 'clients.partition="iid"'])
    assert not (tmp_path / "other").exists()
