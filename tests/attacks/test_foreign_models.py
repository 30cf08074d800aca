"""A saved model from somebody else: a damaged or hostile folder or file ends in words, and never in another model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import polyfed
from polyfed.core.errors import DataError, PolyfedError
from polyfed.core.tree import Tree
from polyfed.selection import Uniform
from refusals import refuses
from world import algorithm, recipe


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in the folder `run`, and its model in the folder `model`."""
    folder = tmp_path_factory.mktemp("source")
    made = recipe(algorithm("fedavg", selector=Uniform(participation=1.0)), rounds=1)
    polyfed.run(made, folder / "run").export(folder / "model")
    return folder


def evaluated(source: Path, model: Path) -> Any:
    return polyfed.evaluate(model, recipe=source / "run").content


TEXTS = ["", "{", "[]", "null", '"x"', "\x00\x01", "[" * 10_000, '{"shapes": ' + "9" * 5000 + "}", "{}"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_description_that_is_none_is_named_as_damaged(text: str, source: Path, tmp_path: Path) -> None:
    shutil.copytree(source / "model", tmp_path / "model")
    (tmp_path / "model" / "model.json").write_text(text)
    for use in (lambda: evaluated(source, tmp_path / "model"), lambda: polyfed.load_model(tmp_path / "model")):
        with refuses(DataError, "model"):
            use()


KEYS = ("format", "model", "shapes", "reads", "classes", "class_names", "task", "clients", "scaling", "conformal")
KEYS += ("columns", "sha256", "predictor", "own_models", "key")
EVALUATED = ("shapes", "class_names", "scaling", "columns", "conformal")
"""What an evaluation reads, so that each wrong value is evaluated; of the other keys, every third one is."""

VALUES: list[Any] = [
    None,
    "x",
    [],
    {},
    5,
    -1,
    1e300,
    float("nan"),
    ["x", "x"],
    [["a"]],
    {"a": None},
    {"z": {"shift": [0]}},
]


@pytest.mark.parametrize("key", KEYS)
def test_every_wrong_value_of_a_description_ends_in_words_or_changes_nothing(
    key: str, source: Path, tmp_path: Path
) -> None:
    honest = json.loads((source / "model" / "model.json").read_text())
    shutil.copytree(source / "model", tmp_path / "model")
    score, params = evaluated(source, source / "model"), polyfed.load_model(source / "model").shared
    assert params is not None
    for place, value in enumerate(VALUES, KEYS.index(key)):
        (tmp_path / "model" / "model.json").write_text(json.dumps(honest | {key: value}))
        if key in EVALUATED or place % 9 == 0:
            try:
                found = evaluated(source, tmp_path / "model")
            except PolyfedError:
                found = score
            assert found["pooled"]["metrics"] == score["pooled"]["metrics"] or (key, value) in UNSCALED, (key, value)
        try:
            loaded = polyfed.load_model(tmp_path / "model").shared
        except PolyfedError:
            loaded = params
        assert loaded is None or all(torch.equal(loaded[name], params[name]) for name in params), (key, value)


UNSCALED: list[Any] = [("scaling", None), ("scaling", {}), ("scaling", [])]
"""What says that the model was trained on samples that nobody scaled."""

TREES: dict[str, Callable[[Tree], Tree]] = {
    "no parameters": lambda tree: {},
    "complex numbers": lambda tree: {n: torch.complex(v, v) for n, v in tree.items()},
    "truth values": lambda tree: {n: v > 0 for n, v in tree.items()},
    "NaN": lambda tree: {n: v * torch.nan for n, v in tree.items()},
    "too large for float32": lambda tree: {n: (v.double() + 1) * 1e300 for n, v in tree.items()},
    "a stranger": lambda tree: tree | {"stranger.weight": torch.zeros(2)},
    "one missing": lambda tree: {n: tree[n] for n in list(tree)[1:]},
    "other shapes": lambda tree: {n: v[None] for n, v in tree.items()},
}


@pytest.mark.parametrize("change", TREES)
def test_a_file_that_holds_another_model_is_not_taken_for_one(change: str, source: Path, tmp_path: Path) -> None:
    tree = load_file(source / "model" / "global.safetensors")
    save_file(TREES[change](tree), tmp_path / "m.safetensors")
    where = "" if change in ("complex numbers", "truth values") else "model.init: "
    with refuses(PolyfedError, f"{where}m.safetensors"):
        evaluated(source, tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", b"\x80\x04N.", (2**60).to_bytes(8, "little") + b"{}", (9).to_bytes(8, "little") + b'{"a":1}  '],
    ids=range(5),
)
def test_a_file_of_another_form_is_no_model(content: bytes, source: Path, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with refuses(DataError, "m.safetensors"):
        evaluated(source, tmp_path / "m.safetensors")
