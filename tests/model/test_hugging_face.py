"""The encoder `hf` against the library itself, on a tiny backbone written to disk."""

import sys
from pathlib import Path

import pytest
import torch
from torch.func import vmap

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import tiny_models
import transformers
from transformers import AutoModel

from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError
from polyfed.model import ModelSpec, build_model
from refusals import refuses

IDS = torch.tensor([[2, 5, 6, 3, 0, 0], [2, 8, 9, 10, 11, 3]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "text": tiny_models.text_model(root / "text"),
        "patches": tiny_models.patch_model(root / "patches"),
        "conv": tiny_models.image_model(root / "conv"),
    }


@pytest.fixture
def model(folders):
    def make(name, shape, frozen=True, fusion="concat"):
        entry = {"kind": "hf", "path": str(folders[name]), "frozen": frozen}
        return build_model(ModelSpec(embedding=8, fusion=fusion, encoders={"x": entry}), {"x": shape}, 3)

    return make


def batch(x, key=None):
    return Batch(x={"x": x.float()}, y=torch.zeros(len(x), dtype=torch.int64), rows=torch.arange(len(x)), key=key)


def feature(model, w, states):
    return states @ w["x.encoder.1.weight"].T + w["x.encoder.1.bias"]


@pytest.mark.parametrize("frozen", [True, False])
def test_text_is_the_masked_mean_of_the_last_layer(frozen, model, folders):
    built = model("text", (6,), frozen)
    w = built.init(1)
    theirs = AutoModel.from_pretrained(folders["text"]).eval()
    with torch.no_grad():
        states = theirs(input_ids=IDS, attention_mask=(IDS != 0).long()).last_hidden_state
        mean = torch.stack([states[0, :4].mean(0), states[1].mean(0)])
        torch.testing.assert_close(built.features(w, batch(IDS))["x"], feature(built, w, mean), atol=1e-5, rtol=1e-4)


def test_loading_draws_no_progress_bar_and_leaves_the_setting_alone(model, capfd):
    logging = transformers.utils.logging
    logging.enable_progress_bar()
    model("text", (6,))
    assert "Loading weights" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()


def test_images_are_pooled_or_averaged_over_patches(model, folders):
    x = torch.rand(2, 3, 32, 32)
    for name in ("patches", "conv"):
        built = model(name, (3, 32, 32))
        w = built.init(1)
        theirs = AutoModel.from_pretrained(folders[name]).eval()
        with torch.no_grad():
            output = theirs(pixel_values=x)
            pooled = output.pooler_output if name == "conv" else output.last_hidden_state.mean(1)
            found = built.features(w, batch(x, key=1))["x"]  # training, too, must leave a frozen norm alone
        torch.testing.assert_close(found, feature(built, w, pooled), atol=1e-5, rtol=1e-4)


def test_a_frozen_backbone_is_in_no_tree_and_a_trained_one_in_the_block_of_its_modality(model, folders):
    frozen, trained = model("text", (6,)), model("text", (6,), frozen=False)
    assert [name for name in frozen.names(["x"]) if "backbone" in name] == []
    saved = AutoModel.from_pretrained(folders["text"])
    kept = {n.split("backbone.")[1]: v for n, v in frozen.frozen.items()}
    assert all(torch.equal(p, kept[n]) for n, p in saved.named_parameters() if not n.startswith("pooler"))
    inner = {n.split("backbone.")[1]: v for n, v in trained.init(5).items() if "backbone" in n}
    expected = {n: p for n, p in saved.named_parameters() if not n.startswith("pooler")}
    assert inner.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(inner[name], value.detach())


@pytest.mark.parametrize(("name", "frozen"), [("text", False), ("patches", False), ("conv", True)])
def test_it_runs_stacked_as_it_runs_alone(name, frozen, model):
    shape = (6,) if name == "text" else (3, 32, 32)
    built = model(name, shape, frozen)
    trees = [built.trainable(built.init(seed)) for seed in (1, 2)]
    x = IDS if name == "text" else torch.rand(2, *shape)

    def loss(w):
        return built.logits(w, batch(x, key=3)).square().mean()

    stacked = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
    together = vmap(torch.func.grad(loss))(stacked)
    for row, tree in enumerate(trees):
        alone = torch.func.grad(loss)(tree)
        for key, value in alone.items():
            torch.testing.assert_close(together[key][row], value, atol=1e-5, rtol=1e-4)


def test_attention_fusion_gets_one_embedding_a_token(model):
    built = model("text", (6,), fusion="attention")
    assert built.features(built.init(1), batch(IDS))["x"].shape == (2, 6, 8)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("text", (65,), "64 tokens"),
        ("text", (3, 32, 32), "cannot read images"),
        ("patches", (6,), "read token"),
        ("patches", (1, 32, 32), "log-mel"),
        ("patches", (3, 16, 16), "Input"),
    ],
)
def test_samples_that_a_backbone_cannot_read_are_refused(name, shape, words, model):
    with refuses(ModelError, words):
        model(name, shape)


def test_a_missing_model_is_named_with_the_command_that_fetches_it(tmp_path):
    entry = {"kind": "hf", "path": str(tmp_path / "none")}
    with refuses(ModelError, "hf download"):
        build_model(ModelSpec(encoders={"x": entry}), {"x": (6,)}, 3)
