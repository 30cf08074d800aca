"""LoRA on backbones of the real classes, tiny and written to disk: what trains, what crosses, both engines."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import tiny_models

import polyfed
from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError, NotAllowed
from polyfed.core.tree import block_of
from polyfed.data import ClientsSpec
from polyfed.data.columns import Column, Columns
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.model import ModelSpec, build_model
from polyfed.selection import Uniform
from refusals import refuses
from world import algorithm, furthest, played, recipe, same, through

pytest.importorskip("peft", reason="the extra polyfed[lora] is not installed")
LORA = {"r": 2, "alpha": 4.0, "target_modules": ["query", "value"]}
PROJECTIONS = {"r": 2, "target_modules": ["q_proj", "v_proj"], "dropout": 0.1}
KINDS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "bert": ("text_model", (6,), LORA),
    "vit": ("patch_model", (3, 32, 32), {"r": 2, "target_modules": ["q_proj", "v_proj"]}),
    "clip-text": ("two_towers", (6,), PROJECTIONS),
    "clip-image": ("two_towers", (3, 32, 32), PROJECTIONS),
    "whisper": ("sound_model", (8, 12), PROJECTIONS),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("backbones")
    return {make: str(getattr(tiny_models, make)(root / make)) for make in {kind[0] for kind in KINDS.values()}}


def entry(folders: dict[str, str], kind: str, **changes: Any) -> dict[str, Any]:
    make, _, lora = KINDS[kind]
    return {"kind": "hf", "path": folders[make], "lora": lora} | changes


def values(shape: tuple[int, ...], rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if len(shape) == 1:
        return torch.randint(4, 13, (rows, *shape), generator=generator).float()
    return torch.randn(rows, *shape, generator=generator)


class Two:
    """Two modalities by two backbones, 60 rows in three classes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def load(self) -> Columns:
        y = torch.arange(60) % 3
        x = {m: Column(values(shape, 60)) for m, shape in self.shapes.items()}
        split = torch.tensor([0] * 48 + [2] * 12, dtype=torch.int8)
        return Columns("two", x, y, 3, split, torch.arange(60))


def made(
    folders: dict[str, str], engine: str = "sequential", kinds: tuple[str, str] = ("bert", "vit"), **changes: Any
) -> Recipe:
    encoders = {m: entry(folders, kind, **changes) for m, kind in zip("ab", kinds, strict=True)}
    return recipe(
        algorithm("fedavg", selector=Uniform()),
        engine,
        data=Two({m: KINDS[kind][1] for m, kind in zip("ab", kinds, strict=True)}),
        model=ModelSpec(embedding=4, encoders=encoders),
        clients=ClientsSpec(partition="iid", num=3, holdings=[["a", "b"], ["a"]]),
        rounds=2,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_and_the_projection_are_in_the_tree(kind: str, folders: dict[str, str]) -> None:
    shape = KINDS[kind][1]
    model = build_model(ModelSpec(embedding=4, encoders={"x": entry(folders, kind)}), {"x": shape}, 3)
    names = [n for n in model.names(["x"]) if n.startswith("x.encoder.")]
    adapters = [n for n in names if ".lora_" in n]
    assert set(names) - set(adapters) == {"x.encoder.1.weight", "x.encoder.1.bias"}
    assert len(adapters) == 4  # A and B of two layers of the one block
    w = model.init(1)
    assert sum(w[n].numel() for n in adapters) == 2 * (2 * 16 + 16 * 2)
    bare = build_model(ModelSpec(embedding=4, encoders={"x": entry(folders, kind, lora=None)}), {"x": shape}, 3)
    batch = Batch({"x": values(shape, 2)}, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    own = {n: w[n] for n in bare.names(["x"])}
    with torch.no_grad():  # B starts at zero, so the first model is the frozen one
        torch.testing.assert_close(model.features(w, batch)["x"], bare.features(own, batch)["x"])
        moved = {n: v + 0.5 if ".lora_" in n else v for n, v in w.items()}
        assert not torch.allclose(model.features(moved, batch)["x"], bare.features(own, batch)["x"])


@pytest.mark.parametrize("kinds", [("bert", "vit"), ("clip-text", "clip-image"), ("whisper", "bert")])
def test_engines_agree_and_the_adapters_train(kinds: tuple[str, str], folders: dict[str, str]) -> None:
    _, state_one, ledger_one = played(made(folders, kinds=kinds))
    _, state_many, ledger_many = played(made(folders, "vectorised", kinds=kinds))
    assert furthest(state_one.params, state_many.params) < 1e-4
    assert ledger_one == ledger_many
    for name, value in state_one.params.items():
        if ".lora_B" in name:
            assert float(value.abs().max()) > 0


def test_the_bytes_are_those_of_the_adapters(folders: dict[str, str]) -> None:
    """Four bytes for each number of the adapters, the projection and the modality's part of the fusion, and no more."""
    parts, _, ledger = played(made(folders))
    for block in "ab":
        adapters = sum(v.numel() for n, v in parts.initial.items() if block_of(n) == block and ".lora_" in n)
        rest = sum(v.numel() for n, v in parts.initial.items() if block_of(n) == block and ".lora_" not in n)
        sent = {row["bytes"] for row in ledger if row["block"] == block and row["kind"] == "parameters"}
        assert sent == {4 * adapters + 4 * rest}
        assert adapters == 2 * (2 * 16 + 16 * 2)
        assert rest == (16 * 4 + 4) + 4 * 3


def test_a_run_exports_and_loads_its_adapters(folders: dict[str, str], tmp_path: Path) -> None:
    told = made(folders)
    assert parse_recipe({**told.table(), "data": {"name": "toy"}}).model == told.model
    parts = assemble(told)
    columns = parts.population.columns
    x = {m: column.values[:5] for m, column in columns.modalities.items()}
    run = polyfed.run(told)
    folder = run.export(tmp_path / "model")
    assert (folder / "global.safetensors").stat().st_size < 20_000
    with refuses(NotAllowed, "backbones="):
        polyfed.load_model(folder)
    back = polyfed.load_model(
        folder, backbones=[str(e["path"]) for e in (entry(folders, "bert"), entry(folders, "vit"))]
    )
    assert torch.equal(back.predict(x), run.predict(x))


def test_the_towers_of_clip_read_as_the_library_does(folders: dict[str, str]) -> None:
    from transformers import CLIPModel

    theirs = CLIPModel.from_pretrained(folders["two_towers"]).eval()
    shape = KINDS["clip-text"][1]
    model = build_model(ModelSpec(embedding=4, encoders={"x": entry(folders, "clip-text", lora=None)}), {"x": shape}, 3)
    w, ids = model.init(1), torch.tensor([[2, 5, 6, 3, 1, 1], [2, 8, 9, 10, 11, 3]])
    batch = Batch({"x": ids.float()}, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    with torch.no_grad():
        states = theirs.text_model(input_ids=ids, attention_mask=(ids != 1).long()).last_hidden_state
        mean = torch.stack([states[0, :4].mean(0), states[1].mean(0)])
        expected = mean @ w["x.encoder.1.weight"].T + w["x.encoder.1.bias"]
        torch.testing.assert_close(model.features(w, batch)["x"], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": {"target_modules": ["quary"]}}, "layer to adapt"),
        ({"lora": {"r": 0, "target_modules": ["query"]}}, "model.encoders.x: lora.r"),
        ({"lora": {"rank": 2, "target_modules": ["query"]}}, "model.encoders.x: option"),
        ({"lora": {"r": 2}}, "model.encoders.x: layers"),
        ({"lora": {"alpha": 0, "target_modules": ["query"]}}, "model.encoders.x: lora.alpha"),
        ({"lora": {"dropout": 1.0, "target_modules": ["query"]}}, "model.encoders.x: probability"),
        ({"lora": 4}, "model.encoders.x: give a table"),
        ({"frozen": False}, "model.encoders.x: remove frozen"),
    ],
)
def test_a_mistake_is_a_sentence_with_the_cure(changes: dict[str, Any], words: str, folders: dict[str, str]) -> None:
    with refuses(ModelError, words):
        build_model(ModelSpec(encoders={"x": entry(folders, "bert", **changes)}), {"x": (6,)}, 3)


def test_without_peft_the_text_names_the_extra(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with refuses(ModelError, "pip install 'polyfed[lora]'"):
        build_model(ModelSpec(encoders={"x": entry(folders, "bert")}), {"x": (6,)}, 3)


@pytest.mark.parametrize("frozen", [True, False], ids=["lora", "all"])
def test_checkpointing_changes_no_bit_and_keeps_fewer_activations(frozen: bool, folders: dict[str, str]) -> None:
    changes = {} if frozen else {"frozen": False, "lora": None}
    plain, less = (made(folders, **changes, checkpointing=on) for on in (False, True))
    looped: list[str] = []
    one, two = played(plain)[1], played(less)[1]
    parts = assemble(
        replace(less, engine=EngineSpec(name="vectorised")),
        emit=lambda e, **f: looped.append(f["reason"]) if e == "looped" else None,
    )  # type: ignore[arg-type]
    three = through(parts, 2)
    assert same(one.params, two.params)
    assert same(one.params, three.params)
    assert looped == ["gradient checkpointing computes layers again in the backward pass, which vmap cannot"]
    kept = []
    for told in (plain, less):
        parts, numbers = assemble(told), [0]

        def keep(value: Tensor, numbers: list[int] = numbers) -> Tensor:
            numbers[0] += value.numel()
            return value

        batch = replace(parts.model.zero_batch(4, ["a", "b"]), key=1)
        with parts.model.live(parts.initial) as w, torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            parts.model.logits(w, batch).sum().backward()
        kept.append(numbers[0])
    assert kept[1] < kept[0]


def test_a_backbone_without_repeated_layers_refuses_checkpointing(folders: dict[str, str], tmp_path: Path) -> None:
    path = str(tiny_models.image_model(tmp_path / "conv"))
    told = {"kind": "hf", "path": path, "checkpointing": True}
    with refuses(ModelError, "remove checkpointing"):
        build_model(ModelSpec(encoders={"x": told}), {"x": (3, 32, 32)}, 3)


def test_private_adapters_stay_at_the_client(folders: dict[str, str]) -> None:
    told = made(folders)
    told = replace(told, algorithm=algorithm("fedavg", private=("a",), selector=Uniform()))
    _, state, ledger = played(told)
    assert {block_of(n) for n in state.params} == {"b", "shared"}
    assert not [row for row in ledger if row["block"] == "a" and row["kind"] == "parameters"]
