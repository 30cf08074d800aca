"""What `mixing` says of models and methods, compared with real training in which only one modality's samples change.

An objective whose loss is linear in the outputs fixes the error at the outputs. If a block still changes with the
samples of the other modality, the block reads them in another way than through the error.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.algorithms import ALGORITHMS
from polyfed.core.batch import Batch
from polyfed.core.tree import Tree, block_of
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.model import ModelSpec
from polyfed.model.fusion import FUSIONS
from polyfed.objective import Classification
from polyfed.privacy.differential.section import Privacy
from polyfed.privacy.egress.mixing import Mixing, mixing
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from sampled import in_turns, one_in
from world import algorithm, through

pytestmark = pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")


@dataclass(frozen=True, kw_only=True)
class Linear(Classification):
    """The loss of a row is a fixed combination of its outputs, so the error is the same for all samples."""

    def row_losses(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        weights = torch.linspace(-1, 1.5, outputs.shape[-1]).roll(1) + 0.3 * batch.y.unsqueeze(-1)
        return (outputs * weights).sum(-1), torch.ones_like(batch.y, dtype=outputs.dtype)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return batch.mean(self.row_losses(outputs, batch)[0])


class Normed(nn.Module):
    """An encoder with a norm over the rows, a norm over the features, and dropout."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, embedding),
            nn.LayerNorm(embedding),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


ENCODERS: dict[str, Any] = {
    "mlp": {"kind": "mlp", "hidden": [6]},
    "normed": {"kind": "attacks.test_mixing_declared:Normed"},
    "conv-gru": {"kind": "conv-gru"},
}
HEADS: tuple[tuple[int, ...], ...] = ((), (8,))
METHODS: dict[str, dict[str, Any]] = {name: {} for name in ALGORITHMS} | {
    "moon": {"per_modality": True},
    "fedamp": {"uploads": 1},
    "pfmml": {"uploads": 1},
    "pfedme": {"inner_lr": 0.005, "lam": 1.0},
}


def made(fusion: str, head: tuple[int, ...], encoder: str, method: str = "fedavg", **changes: Any) -> Recipe:
    """Two steps in each of two rounds of one client, whose parameters come back to it after the first round."""
    shape = (16, 4) if encoder == "conv-gru" else (5,)
    lr = 0.005 if fusion in ("controlled", "adapted") else 0.05  # their layers multiply, and the parameters are large
    train = changes.pop("train", Train(lr=lr, batch_size=8, epochs=0, steps=2))
    return Recipe(
        data=Toy(rows=40, classes=3, shapes={"a": shape, "b": shape}, snr={}),
        task=Linear(),
        algorithm=algorithm(method, train=train, **_everyone(method), **METHODS[method]),
        model=ModelSpec(
            embedding=5, fusion=fusion, head=head, dropout=0.1, encoders=dict.fromkeys("ab", ENCODERS[encoder]),
            attention_hidden=4, attention_heads=2,
        ),
        clients=ClientsSpec(partition="iid", num=1, personal_validation=0.25 if method == "fedcouncil" else 0.0),
        rounds=2,
        engine=EngineSpec(outlier_factor=0),
        **changes,
    )  # fmt: skip


def _everyone(method: str) -> dict[str, Any]:
    return {"selector": Uniform()} if "selector" in ALGORITHMS[method].__dataclass_fields__ else {}


def answer(parts: Assembly) -> Mixing:
    engine = parts.engine
    return mixing(parts.algorithm, engine.objective, engine.model, ("a", "b"), engine.privacy)


def blocks_sent(recipe: Recipe, draw: int, changed: str) -> dict[str, list[Tensor]]:
    """The tensors of each block that the client sends in all rounds, under parameters that a server could make.

    The samples of the modality `changed` are others than those of the data. Draw 0 keeps the model's own start.
    """
    parts = assemble(recipe)
    generator = torch.Generator().manual_seed(draw)
    for name, value in parts.initial.items():
        if draw and value.is_floating_point() and "running" not in name:
            value.copy_((0.3, 1.0)[draw % 2] * torch.randn(value.shape, generator=generator))
    parts.engine.initial.update({name: value.clone() for name, value in parts.initial.items()})
    parts.engine._contexts.clear()
    if changed:
        values = parts.engine.columns.modalities[changed].values
        values.copy_(4 * torch.randn(values.shape, generator=generator) - 1)
    found: dict[str, list[Tensor]] = {"a": [], "b": [], "shared": []}
    inner = parts.engine.answer

    def listening(*args: Any) -> Any:
        got = inner(*args)
        for part in got.parts:
            for tree in _trees(part.message):
                for name, value in sorted(tree.items()):
                    found.get(block_of(name), []).append(value.clone())
        return got

    parts.engine.answer = listening  # type: ignore[method-assign]
    through(parts, recipe.rounds)
    return found


def _trees(message: Any) -> Iterator[Tree]:
    for name in message.kinds:
        value = getattr(message, name)
        if isinstance(value, dict):
            yield value


def differ(recipe: Recipe, draws: range = range(4)) -> set[str]:
    """The blocks that change in at least one draw if only the samples of the other modality change."""
    found = set()
    for draw in draws:
        before = blocks_sent(recipe, draw, "")
        for block, other in (("a", "b"), ("b", "a")):
            after = blocks_sent(recipe, draw, other)
            assert before[block], "the client sent the block"
            assert any(map(torch.Tensor.any, before[block]))
            same = map(torch.equal, before[block], after[block])
            found |= set() if all(same) else {block}
    return found


CASES = [
    (fusion, head, encoder)
    for fusion in FUSIONS
    for head in HEADS
    for encoder in (("conv-gru",) if fusion == "attention" else ("mlp", "normed"))
]


@pytest.mark.parametrize(("fusion", "head", "encoder"), one_in(3, CASES))
def test_a_fusion_mixes_exactly_if_training_shows_it(fusion: str, head: tuple[int, ...], encoder: str) -> None:
    recipe = made(fusion, head, encoder)
    said = answer(assemble(recipe))
    assert said.blocks == differ(recipe)
    assert bool(said.why) is bool(said.blocks)
    assert (not said.blocks) is (fusion == "concat" and not head)


def test_one_modality_has_no_other_to_reveal() -> None:
    engine = assemble(made("gated", (8,), "mlp")).engine
    assert mixing(engine.algorithm, engine.objective, engine.model, ("b",)) == Mixing()


DECLARED = {
    "fedavg", "fedprox", "scaffold", "fedmsplit", "fedamp", "pfmml", "local", "moon", "feddyn", "fednova", "ditto",
    "fedbuff", "fedmchain", "apfl", "pfedme", "fedbn", "fedrep", "lg-fedavg", "fedavg-ft", "fedcouncil",
}  # fmt: skip


def test_these_methods_say_that_they_keep_modalities_apart_and_the_others_say_why_not() -> None:
    said = {name: cls(**METHODS[name]).mixing for name, cls in ALGORITHMS.items()}
    assert {name for name, why in said.items() if not why} == DECLARED
    assert all("mixing" in vars(cls) for cls in ALGORITHMS.values())


@pytest.mark.parametrize(("method", "encoder"), in_turns(sorted(DECLARED - {"local"}), ["normed", "mlp"]))
def test_a_method_that_keeps_modalities_apart_trains_each_block_without_the_other(method: str, encoder: str) -> None:
    if method == "fedbn" and encoder != "normed":
        pytest.skip("it refuses encoders without a norm")
    recipe = made("concat", (), encoder, method)
    assert answer(assemble(recipe)) == Mixing()
    assert differ(recipe, range(2)) == set()


@pytest.mark.parametrize(
    ("train", "privacy", "words"),
    [
        ({"clip_norm": 0.05}, None, "clip_norm = 0 avoids this"),
        ({}, {"clip": "joint"}, 'clip = "per-block" avoids this'),
        ({}, {"clip": "per-block"}, ""),
    ],
)
def test_a_common_norm_of_all_blocks_mixes_them(train: Any, privacy: Any, words: str) -> None:
    options = Train(lr=0.05, batch_size=8, **train)
    said = {"unit": "example", "noise_multiplier": 0.1, "clip_norm": 0.05, "delta": 1e-3, "unprotected": ("statistic",)}
    spec = None if privacy is None else Privacy(**said, **privacy)
    recipe = made("concat", (), "mlp", train=options, privacy=spec)
    found = answer(assemble(recipe))
    assert words in found.why
    assert found.blocks == differ(recipe) == ({"a", "b"} if words else set())
