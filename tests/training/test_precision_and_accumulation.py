"""`[train] precision` and `accumulate`: what they change, what they leave alone, and both engines."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from polyfed.core.errors import RecipeError
from polyfed.engines import Vectorised
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.training.optimisers import Train
from refusals import refuses
from world import AWKWARD, PLAIN, algorithm, furthest, played, recipe, through

NORMS = {m: {"kind": "test_precision_and_accumulation:Normed"} for m in PLAIN}
SERIES = {"a": {"kind": "test_precision_and_accumulation:Recurrent"}, "b": {"kind": "mlp", "hidden": [10]}}


class Normed(torch.nn.Module):
    """Layer, group and RMS norms, attention, and convolutions."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(shape[0], 16)
        self.norms = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.RMSNorm(16))
        self.convolutions = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 1), torch.nn.GroupNorm(2, 4), torch.nn.ReLU())
        self.last = torch.nn.Linear(16, embedding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.norms(self.first(x)).view(len(x), 1, 4, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        out: torch.Tensor = self.last(self.convolutions(mixed[:, 0]).flatten(1))
        return out


class Recurrent(torch.nn.Module):
    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(4, 6, batch_first=True)
        self.lstm = torch.nn.LSTM(6, embedding, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lstm(self.gru(x.view(len(x), -1, 4))[0])[0][:, -1]
        return out


def made(train: dict[str, Any], engine: str = "sequential", encoders: Any = PLAIN, name: str = "fedavg") -> Recipe:
    return recipe(algorithm(name, train=Train(**{"lr": 0.1, "batch_size": 16, "epochs": 2} | train)), engine, encoders)


def test_accumulation_gives_the_step_of_the_whole_batch() -> None:
    whole = played(made({}))[1].params
    for parts in (2, 3, 16):
        assert furthest(whole, played(made({"accumulate": parts}))[1].params) < 1e-5


@pytest.mark.parametrize(
    "train",
    [{"accumulate": 3}, {"precision": "bf16"}, {"accumulate": 2, "precision": "bf16"}],
    ids=["acc", "bf16", "both"],
)
@pytest.mark.parametrize("encoders", [AWKWARD, NORMS, SERIES], ids=["norm+dropout", "other norms", "recurrent"])
def test_engines_agree(train: dict[str, Any], encoders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looped: list[str] = []
    monkeypatch.setattr(Vectorised, "looped", lambda _, request, reason: looped.append(reason))
    one, many = (
        played(replace(made(train, engine, encoders), rounds=2))[1].params for engine in ("sequential", "vectorised")
    )
    assert not looped
    # bfloat16 has 8 bits of mantissa, and a stack rounds its sums in another order
    lower = 0.1 if encoders is NORMS else 0.05  # a stack computes attention in bfloat16, one client in float32
    assert furthest(one, many) < (lower if "precision" in train else 1e-4)
    assert all(value.dtype == torch.float32 for value in (*one.values(), *many.values()))


def test_lower_precision_is_used_in_training_only() -> None:
    exact, state_exact, _ = played(made({}))
    _, state, _ = played(made({"precision": "bf16"}))
    moved = furthest(state_exact.params, exact.initial)
    assert 0 < furthest(state.params, state_exact.params) < moved / 3
    seen: list[tuple[bool, torch.dtype]] = []
    parts = assemble(made({"precision": "bf16"}))
    encoder = parts.model._encoders["a"]

    def noted(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = encoder(x)
        seen.append((torch.is_grad_enabled(), out.dtype))
        return out

    parts.model._encoders["a"] = noted
    after = through(parts, 1)
    parts.algorithm.evaluate(after, parts.fed)
    assert set(seen) == {(True, torch.bfloat16), (False, torch.float32)}


def test_a_loss_in_float32() -> None:
    parts = assemble(made({"precision": "bf16"}))
    with parts.model.computing("bf16"):
        batch = parts.model.zero_batch(4, parts.model.modalities)
        assert parts.model.logits(parts.initial, batch).dtype == torch.float32
        assert all(z.dtype == torch.float32 for z in parts.model.features(parts.initial, batch).values())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cmsfed", {}, "train.accumulate: numbers"),
        ("fedogm", {"scale_params": "all_weights"}, "train.accumulate: numbers"),
    ],
)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_methods_that_need_the_whole_batch_refuse_accumulation(
    name: str, options: dict[str, Any], words: str, engine: str
) -> None:
    from laws.rows import ROWS

    method = algorithm(name, train=Train(batch_size=16, accumulate=2), **options)
    with refuses(RecipeError, words):
        played(recipe(method, engine, egress=ROWS[name].egress))


@pytest.mark.parametrize("train", [{"batch_size": 0, "accumulate": 2}, {"batch_size": 2, "accumulate": 4}])
def test_parts_that_cannot_be_cut_are_refused(train: dict[str, int]) -> None:
    with refuses(RecipeError, "train.accumulate: batch_size"):
        Train(**train)  # type: ignore[arg-type]


def test_an_unknown_precision_is_refused() -> None:
    with refuses(RecipeError, "train.precision: float32"):
        Train(precision="fp8")  # type: ignore[arg-type]
