"""Columns of image files and texts: the same samples in every form and for new rows, and nothing outside the folder."""

import io
import json
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset

import polyfed
from polyfed.cli import main
from polyfed.core.errors import DataError, RecipeError
from polyfed.data.column_fitting import as_tables, features_of, told_shape
from polyfed.data.column_rules import ColumnRule, rules_of
from polyfed.data.columns import Column
from polyfed.data.media.clip import Clip
from polyfed.data.reading.values import laid_out
from polyfed.data.sources.own.table_files import Table
from polyfed.data.whole_columns import MOST_PIXELS, read_cells, token_ids
from polyfed.deploy.device.configuration import NodeConfig
from polyfed.deploy.device.data import population_on
from polyfed.engines.protocol import Facts
from polyfed.experiment.evaluate import evaluate
from polyfed.experiment.recipes.defaults import encoder_for, guesses_of, kind_of
from polyfed.experiment.recipes.first_recipe import affordable
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.assembly import population_of
from refusals import refuses, warned

pillow = pytest.importorskip("PIL.Image", reason="the extra polyfed[image] is not installed")

ROWS, SIDE = 24, 6
DRAW = np.random.default_rng(3)
LABEL = np.arange(ROWS) % 2
WHO = np.array(["ana", "ben"])[np.arange(ROWS) // 2 % 2]
SPLIT = np.where(np.arange(ROWS) % 6 < 2, "test", "train")
PIXELS = (
    DRAW.integers(0, 200, (ROWS, SIDE, SIDE, 3)).astype(np.uint8) + (50 * LABEL).astype(np.uint8)[:, None, None, None]
)
TEXTS = [("a happy dog " if y else "One SAD cat, ") + f"no. {row}" for row, y in enumerate(LABEL)]
TEXTS[4] = TEXTS[7] = ""
RULES: dict[str, Any] = {
    "path": {"kind": "image", "size": SIDE},
    "caption": {"kind": "words", "buckets": 50, "length": 5},
}
ENCODERS = {"path": {"kind": "mlp", "hidden": [4]}}
OPTIONS: dict[str, Any] = {
    "columns": RULES,
    "modalities": {"path": "path", "caption": "caption"},
    "rounds": 1,
    "seed": 4,
}
OPTIONS |= {"model": {"embedding": 4, "encoders": ENCODERS}}
NAMED = {"clients": "client", "split": "split"}


def photos(folder: Path) -> list[str]:
    """Write the images, and return their paths from the folder."""
    (folder / "photos").mkdir()
    names = [f"photos/{row}.png" for row in range(ROWS)]
    for name, pixels in zip(names, PIXELS, strict=True):
        pillow.fromarray(pixels).save(folder / name)
    return names


def frame(paths: Any) -> pd.DataFrame:
    return pd.DataFrame({"path": paths, "caption": TEXTS, "label": LABEL, "client": WHO, "split": SPLIT})


class Samples(Dataset[dict[str, Any]]):
    """The rows as a dataset that holds pictures of Pillow."""

    def __init__(self, paths: list[str]) -> None:
        self.table = frame(paths)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        return dict(self.table.iloc[row]) | {"path": pillow.fromarray(PIXELS[row])}


def forms(folder: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    names = photos(folder)
    full = [str(folder / name) for name in names]
    facts = {"labels": LABEL, "clients": WHO, "split": SPLIT}
    yield "pictures", {"path": [pillow.fromarray(p) for p in PIXELS], "caption": TEXTS}, facts
    yield "arrays", {"path": PIXELS, "caption": np.array(TEXTS)}, facts
    yield "frame", frame(full), NAMED
    yield "bytes", frame([(folder / name).read_bytes() for name in names]), NAMED
    yield "dataset", Samples(full), NAMED
    np.savez(folder / "mine.npz", path=names, caption=TEXTS, label=LABEL, client=WHO, split=SPLIT)
    frame(names).to_csv(folder / "mine.csv", index=False)
    frame(names).to_json(folder / "mine.jsonl", orient="records", lines=True)
    for suffix in ("npz", "csv", "jsonl"):
        yield suffix, folder / f"mine.{suffix}", NAMED


def test_every_form_gives_the_same_samples(tmp_path: Path) -> None:
    digests = {}
    for name, data, more in forms(tmp_path):
        columns = population_of(polyfed.make_recipe(data, **(OPTIONS | more))).columns
        image, caption = columns.modalities["path"], columns.modalities["caption"]
        np.testing.assert_array_equal(image.values, PIXELS.transpose(0, 3, 1, 2), err_msg=name)
        assert float(image.take(torch.tensor([0])).max()) <= 1.0
        assert (~columns.present["caption"]).nonzero()[:, 0].tolist() == [4, 7], name
        assert tuple(caption.shape) == (5,)
        digests[name] = columns.modalities["caption"].values.tolist()
    assert all(held == digests["frame"] for held in digests.values())


def test_new_rows_are_read_by_the_rule_from_a_run_a_folder_an_export_and_a_file(tmp_path: Path, capsys: Any) -> None:
    names = photos(tmp_path)
    frame(names).to_csv(tmp_path / "mine.csv", index=False)
    run = polyfed.run(data=tmp_path / "mine.csv", out=tmp_path / "run", **OPTIONS, **NAMED)
    assert run.models.spec.encoders["caption"].vocabulary == 51
    full = [str(tmp_path / name) for name in names]
    x = {"path": full, "caption": [text or None for text in TEXTS]}
    found = run.predict(x)
    right = (found.argmax(1) == torch.from_numpy(LABEL))[torch.from_numpy(SPLIT == "test")].float().mean()
    assert float(right) == pytest.approx(run.result["metrics"]["global"]["accuracy"])
    assert run.used(x)["caption"].tolist() == [bool(text) for text in TEXTS]
    run.export(tmp_path / "model")
    for models in (polyfed.load_run(tmp_path / "run"), polyfed.load_model(tmp_path / "model")):
        assert torch.equal(models.predict(x), found)
        assert torch.equal(models.predict({"path": PIXELS, "caption": TEXTS}), found)
        assert torch.equal(models.predict({"path": list(map(pillow.fromarray, PIXELS)), "caption": TEXTS}), found)
    (tmp_path / "new").mkdir()
    (tmp_path / "photos").rename(tmp_path / "new" / "photos")
    frame(names).drop(columns="label").to_csv(tmp_path / "new" / "rows.csv", index=False)
    lacks = warned("2 rows")
    with lacks, refuses(SystemExit, "0"):
        main(["predict", str(tmp_path / "model"), str(tmp_path / "new" / "rows.csv"), "--json"])
    answers = json.loads(capsys.readouterr().out)
    assert [row["prediction"] for row in answers] == found.argmax(1).tolist()


def test_a_device_reads_its_own_files_as_a_simulation_does(tmp_path: Path) -> None:
    names = photos(tmp_path)
    np.savez(tmp_path / "mine.npz", path=names, caption=TEXTS, label=LABEL, split=SPLIT)
    recipe = polyfed.make_recipe(tmp_path / "mine.npz", **(OPTIONS | {"split": "split"}))
    simulated = population_of(recipe).columns
    node = NodeConfig(data=str(tmp_path / "mine.npz"), client=0, modalities="path,caption")
    own = population_on(node, recipe, None)
    facts = Facts({"path": (3, SIDE, SIDE), "caption": (5,)}, 2, columns=as_tables(features_of(own.columns)))
    for columns in (own.columns, population_on(node, recipe, facts).columns):
        for name, column in simulated.modalities.items():
            assert torch.equal(columns.modalities[name].take(torch.arange(ROWS)), column.take(torch.arange(ROWS)))
            assert told_shape(columns.modalities[name]) == facts.shapes[name]
        assert torch.equal(columns.present["caption"], simulated.present["caption"])


def test_an_evaluation_reads_new_rows_by_the_same_rule_or_refuses(tmp_path: Path) -> None:
    frame(photos(tmp_path)).to_csv(tmp_path / "mine.csv", index=False)
    run = polyfed.run(data=tmp_path / "mine.csv", out=tmp_path / "run", **OPTIONS, **NAMED)
    scored = evaluate(tmp_path / "run", data=tmp_path / "mine.csv").content["pooled"]["metrics"]
    assert scored["accuracy"]["value"] == pytest.approx(run.result["metrics"]["global"]["accuracy"])
    other = tmp_path / "other.toml"
    other.write_text((tmp_path / "run" / "recipe.toml").read_text().replace("buckets = 50", "buckets = 40"))
    with refuses(DataError, "another rule"):
        evaluate(tmp_path / "run", recipe=other, data=tmp_path / "mine.csv")


def test_ids_are_the_same_on_every_machine_and_words_are_told_apart() -> None:
    assert token_ids("Ein Fuchs läuft", 4096, 4).tolist() == token_ids("ein FUCHS, la\u0308uft!", 4096, 4).tolist()
    ids = token_ids("red fox red", 2**20, 4)
    assert ids[0] == ids[2] != ids[1]
    assert ids[3] == 0
    assert min(token_ids(f"word{n}", 2, 1)[0] for n in range(20)) == 1
    assert token_ids(" ... ", 4096, 3).tolist() == [0, 0, 0]


IMAGE = ColumnRule(kind="image", size=4)


def claimed(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to have these sides."""
    stream = io.BytesIO()
    pillow.new("L", (1, 1)).save(stream, "PNG")
    whole = bytearray(stream.getvalue())
    whole[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    whole[29:33] = zlib.crc32(bytes(whole[12:29])).to_bytes(4, "big")
    return bytes(whole)


@pytest.mark.parametrize("sides", [(MOST_PIXELS, 2), (60_000, 60_000)])
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(sides: tuple[int, int]) -> None:
    with refuses(DataError, "make it smaller"):
        read_cells(IMAGE, [claimed(*sides)], "x")


def test_paths_stay_inside_the_folder_of_the_data_file(tmp_path: Path) -> None:
    inside = tmp_path / "data"
    inside.mkdir()
    secret = tmp_path / "secret.png"
    pillow.fromarray(PIXELS[0]).save(secret)
    (inside / "link.png").symlink_to(secret)
    (inside / "deep").symlink_to(tmp_path)
    for path in ("../secret.png", str(secret), "link.png", "deep/secret.png", "..\\secret.png"):
        with refuses(DataError, "outside"):
            read_cells(IMAGE, [path], "x", inside)
    pillow.fromarray(PIXELS[0]).save(inside / "own.png")
    found, there = read_cells(IMAGE, ["own.png", str(inside / "own.png"), None, ""], "x", inside)
    assert there.tolist() == [True, True, False, False]
    assert found.shape == (4, 3, 4, 4)


def load_table(path: Path) -> None:
    Table(path=str(path), modalities={"path": "path"}, columns={"path": "image"}, test_share=0.0).load()


def test_cells_that_are_no_image_or_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(claimed(1, 1)[:40])
    (tmp_path / "page.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    for cell, says in (
        ("gone.png", "is no file"),
        ("cut.png", "; row 2"),
        ("page.eps", "cannot identify"),
        (3, "an image"),
        (np.zeros((2, 2, 3)), "uint8"),
        (pillow.new("F", (2, 2)), "floats"),
    ):
        with refuses(DataError, says):
            read_cells(IMAGE, [None, cell, cell], "x", tmp_path)
    with refuses(DataError, "5 more rows"):
        read_cells(IMAGE, [3] * 25, "x", tmp_path)
    (tmp_path / "mine.csv").write_text("path,label\ngone.png,1\n,0\nlost.png,0\nlast.png,1\n")
    with pytest.raises(DataError) as refused:
        load_table(tmp_path / "mine.csv")
    for place in ("row 0 (line 2): 'gone.png'", "row 2 (line 4): 'lost.png'", "row 3 (line 5): 'last.png'"):
        assert place in str(refused.value)
    with refuses(DataError, "holds a list"):
        read_cells(ColumnRule(kind="words"), [["a"]], "x")
    deep = pillow.fromarray(np.full((4, 4), 65_535, np.uint16))
    assert read_cells(IMAGE, [deep], "x")[0].min() == 255  # 16 bits, which Pillow would cut off


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"kind": "image", "size": 5000}, "data.columns.path.size: must be"),
        ({"kind": "words", "buckets": 1}, "data.columns.path.buckets: must be"),
        ({"kind": "image", "length": 3}, "length has no"),
        ({"kind": "words", "size": 3}, "size has no"),
    ],
)
def test_rules_out_of_range_are_refused(rule: dict[str, Any], says: str) -> None:
    with refuses(RecipeError, says):
        rules_of("[data.columns]", {"path": rule})


def test_a_column_of_images_is_a_modality_alone(tmp_path: Path) -> None:
    held = frame(photos(tmp_path))
    held["more"] = DRAW.normal(size=ROWS)
    with refuses(DataError, "of its own"):
        polyfed.make_recipe(held, columns={"path": "image"}, modalities={"a": ["path", "more"]})


def test_init_proposes_the_rules_as_a_command_that_works(tmp_path: Path, capsys: Any) -> None:
    held = frame(photos(tmp_path)).rename(columns={"client": "who"}).drop(columns="split")
    table, out = tmp_path / "photos.csv", tmp_path / "recipe.toml"
    held.to_csv(table, index=False)

    def said(*words: Any) -> str:
        with pytest.raises(SystemExit):
            main(["init", *map(str, words), "--out", str(out)])
        return " ".join(capsys.readouterr())

    asked = f"To read path as images and caption as texts, write polyfed init {table} --out {out} --column path=image"
    first = said(table)
    assert asked + " --column caption=words. If who names the client of a row, add --client who" in first
    assert f"polyfed init {table}" in said(tmp_path)
    said(table, "--column", "path=image", "--column", "caption=words", "--client", "who")
    made = load_recipe(out)
    assert {name: spec.kind for name, spec in made.model.encoders.items()} == {
        "path": "resnet18",
        "caption": "token-transformer",
    }
    out.unlink()
    assert "holds image files and no table. Write" in said(tmp_path / "photos")
    np.savez(tmp_path / "a.npz", image=PIXELS, caption=TEXTS, who=WHO, label=LABEL)
    told = said(tmp_path / "a.npz")
    assert "--column caption=words. If who names the client of a row, add --client who" in told


def test_predict_turns_images_as_the_data_were_turned_and_knows_a_single_one() -> None:
    run = polyfed.run(
        data={"image": PIXELS}, labels=LABEL, rounds=1, clients=2, model={"encoders": {"image": ENCODERS["path"]}}
    )
    found = run.predict({"image": PIXELS})
    assert torch.equal(found, run.predict({"image": PIXELS.transpose(0, 3, 1, 2)}))
    with refuses(RecipeError, "single sample"):
        run.predict({"image": PIXELS[0].transpose(2, 0, 1)})


def test_a_path_in_a_data_set_of_the_library_says_how_it_becomes_an_image() -> None:
    with refuses(DataError, "holds the text"):
        Clip("'d', row 0, path", held=lambda: "a.png").stream()
    assert (
        kind_of(laid_out(torch.from_numpy(PIXELS), None, "x")) == f"images (3, {SIDE}, {SIDE}), turned from (H, W, C)"
    )


def test_rows_of_padding_are_told_at_the_door_and_by_predict() -> None:
    ids = DRAW.integers(1, 9, (60, 4))
    ids[:5] = 0
    data = {"text": ids, "a": DRAW.normal(size=(60, 2))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = polyfed.run(data=data, labels=np.arange(60) % 2, clients=2, rounds=1)
        made = polyfed.make_recipe(data, labels=np.arange(60) % 2, clients=2)
    (told,) = [note for note in guesses_of(made, made.data.load()) if "only padding" in note]
    assert told.startswith("5 rows hold only padding in 'text'")
    with warned("rows hold"):
        run.predict(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.predict(data, present={"text": ids.any(1)})


def test_a_dataset_of_texts_says_which_rule_reads_them() -> None:
    class Texts(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, row: int) -> Any:
            return {"caption": f"a fox runs {row}", "label": row % 2}

    with refuses(DataError, "columns={'caption'"):
        polyfed.make_recipe(Texts())


def test_the_first_recipe_takes_an_encoder_of_images_that_trains_in_seconds() -> None:
    few, many = Column(torch.zeros(30, 3, 32, 32)), Column(torch.zeros(1, 3, 32, 32).expand(9000, -1, -1, -1))
    spec = encoder_for("image", few, 64)
    kept, cost = affordable(few, spec)
    assert kept == spec
    assert 'about 1 s a round on one CPU core, stem = "imagenet" a sixth of it' in cost
    faster, cost = affordable(many, spec)
    assert faster.stem == "imagenet"
    assert 'stem = "cifar" takes about 27 s a round' in cost
