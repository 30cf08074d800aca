"""What `mixing` says of models that users write and of built-in encoders: they keep modalities apart, or the reason."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import tiny_models

from own_models import Product, Whole
from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.averaging.fedavg import FedAvg
from polyfed.model import Fusion, Model, ModelSpec, build_model
from polyfed.model.fusion import Concat
from polyfed.objective import Classification, Retrieval
from polyfed.privacy.egress.mixing import Mixing, mixing

VECTORS = {"a": (5,), "b": (5,)}
MLP = {m: {"kind": "mlp", "hidden": [6]} for m in "ab"}
BOTH = frozenset("ab")


def said(model: Model, method: Any = None) -> Mixing:
    return mixing(method or FedAvg(), Classification(), model, ("a", "b"))


def built(fusion: Any, encoders: Any = MLP, shapes: Any = VECTORS, **options: Any) -> Model:
    return build_model(ModelSpec(embedding=5, fusion=fusion, encoders=encoders, **options), shapes, 3)


def whole(module: Any, blocks: Any = None) -> Model:
    return build_model(ModelSpec(module=module, blocks=blocks or {"a": ("net_a",), "b": ("net_b",)}), VECTORS, 3)


class Own(Concat):
    """Adds one term for each modality, like its parent."""


class Careless(Concat):
    """Inherits from a fusion that only adds, and multiplies."""

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        total = super().joint(parts, z, present)
        return total * z["a"].sum(1, keepdim=True) if "a" in z else total


class Normed(Concat):
    """A norm over the rows after the sum: its statistics hold all modalities."""

    def __init__(self, embedding: int, head: tuple[int, ...], classes: int, dropout: float) -> None:
        super().__init__(embedding, (), classes, dropout)
        self.norm = nn.BatchNorm1d(classes)

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        out: Tensor = self.norm(super().joint(parts, z, present))
        return out


class Shared(Fusion):
    """One map for all modalities: their terms are added, but the map is trained on all of them."""

    def __init__(self, embedding: int, head: tuple[int, ...], classes: int, dropout: float) -> None:
        super().__init__(embedding, (), classes, dropout)
        self.layer, self.head = nn.Linear(embedding, classes), nn.Sequential()

    @staticmethod
    def part(embedding: int, width: int) -> None:
        return None

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        found = [
            torch.where(present[m].unsqueeze(1), self.layer(v), 0.0) if m in present else self.layer(v)
            for m, v in z.items()
        ]
        return torch.stack(found).sum(0)


class Backward(torch.autograd.Function):
    """The identity, whose gradient is scaled by a tensor that the forward pass has kept."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0].sum(), None

    generate_vmap_rule = True


class Secret(Concat):
    """The forward pass adds. The backward pass multiplies by the other modality."""

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        if len(z) < 2:
            return super().joint(parts, z, present)
        return super().joint(parts, {"a": z["a"], "b": Backward.apply(z["b"], z["a"].detach())}, present)


class Hooked(Concat):
    """A hook multiplies the gradient by the other modality."""

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        if len(z) > 1 and z["b"].requires_grad:
            z["b"].register_hook(lambda grad: grad * z["a"].detach().mean())
        return super().joint(parts, z, present)


class Remembers(Concat):
    """A value of the last batch reaches the other block in the next batch."""

    def __init__(self, embedding: int, head: tuple[int, ...], classes: int, dropout: float) -> None:
        super().__init__(embedding, (), classes, dropout)
        self.register_buffer("seen", torch.ones(()))

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        if len(z) < 2:
            return super().joint(parts, z, present)
        total = super().joint(parts, {"a": z["a"], "b": z["b"] * self.seen.clone()}, present)
        if self.training:
            self.seen.copy_(z["a"].detach().mean())
        return total


class Caches(Concat):
    """Keeps features of the last batch in an attribute that is not in the state of the module."""

    last: Tensor | float = 0.0

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        if len(z) < 2:
            return super().joint(parts, z, present)
        before, self.last = self.last, z["a"].detach().mean()
        return super().joint(parts, {"a": z["a"], "b": z["b"] * (1 + before)}, present)


class Branches(Concat):
    """Python code decides by a value. The operations that follow are not the same for all values."""

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        if len(z) > 1 and float(z["a"].detach().sum()) > 1e9:
            return super().joint(parts, {**z, "b": 2 * z["b"]}, present)
        return super().joint(parts, z, present)


class OutsideTorch(Concat):
    """NumPy computes a factor."""

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        factor = 1.0 + 0.0 * float(np.abs(next(iter(z.values())).detach().numpy()).sum())
        return super().joint(parts, z, present) * factor


@pytest.mark.parametrize("fusion", [Careless, Normed, Shared, Secret, Hooked, Remembers, Product])
def test_a_fusion_of_a_user_that_lets_modalities_meet_is_found(fusion: Any) -> None:
    found = said(built(fusion))
    assert "b" in found.blocks
    assert "depends on '" in found.why
    assert "a model avoids this if its outputs are a sum of one term for each modality" in found.why


def test_a_fusion_of_a_user_that_only_adds_needs_no_declaration() -> None:
    assert said(built(Own)) == Mixing()


@pytest.mark.parametrize("fusion", [Branches, OutsideTorch])
def test_operations_that_cannot_be_recorded_count_as_mixing(fusion: Any) -> None:
    found = said(built(fusion))
    assert found.blocks == BOTH
    assert "polyfed cannot record its operations, as it raises " in found.why
    assert "\n" not in found.why


class Apart(nn.Module):
    """Two nets whose outputs are added."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], outputs: int) -> None:
        super().__init__()
        self.net_a, self.net_b = (self.net(shapes[m][0], outputs) for m in "ab")

    def net(self, width: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs))

    def forward(self, x: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> Tensor:
        a, b = (net(x[m]) * present[m].unsqueeze(1) for m, net in (("a", self.net_a), ("b", self.net_b)))
        return self.mixed(a, b)

    def mixed(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Tied(Apart):
    """The first layer of both nets is the same, so it belongs to `shared`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], outputs: int) -> None:
        super().__init__(shapes, outputs)
        self.first = nn.Linear(5, 5)

    def forward(self, x: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> Tensor:
        return super().forward({m: self.first(value) for m, value in x.items()}, present)


class Multiplies(Apart):
    def mixed(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b + a * b


def test_a_whole_module_is_examined_and_not_asked() -> None:
    assert said(whole(Apart)) == Mixing()
    for module in (Multiplies, Tied):
        found = said(whole(module))
        assert found.blocks == BOTH
        assert "a module avoids this if its outputs are a sum" in found.why
    assert said(whole(Whole, {"a": ("net_a",), "b": ("net_b", "bias_b")})).blocks == BOTH


def test_a_fusion_that_keeps_tensors_of_a_batch_mixes_and_works_afterwards() -> None:
    model = built(Caches)
    assert "b" in said(model).blocks
    batch = model.zero_batch(4, ["a", "b"])
    assert type(model.logits(model.init(0), batch)) is Tensor


def test_a_line_in_a_class_decides_nothing() -> None:
    class Liar(Multiplies):
        mixes = False
        mixing = ""

    assert said(whole(Liar)).blocks == BOTH


SEQUENCES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "transformer": ((6, 4), {"kind": "transformer", "heads": 1}),
    "token-transformer": ((6,), {"kind": "token-transformer", "vocabulary": 20, "heads": 1}),
    "conv-gru": ((16, 4), {"kind": "conv-gru"}),
    "cnn4": ((3, 32, 32), {"kind": "cnn4"}),
}


@pytest.mark.parametrize("kind", SEQUENCES)
def test_built_in_encoders_are_recorded(kind: str) -> None:
    shape, entry = SEQUENCES[kind]
    parts: dict[str, Any] = {"encoders": dict.fromkeys("ab", entry), "shapes": dict.fromkeys("ab", shape)}
    assert said(built("concat", **parts)) == Mixing()
    assert said(built("concat", **parts, head=(4,))).blocks == BOTH


@pytest.mark.parametrize("options", [{}, {"frozen": False}, {"frozen": False, "checkpointing": True}, {"lora": {}}])
def test_backbones_of_hugging_face_are_recorded(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra polyfed[hf] is not installed")
    if "lora" in options:
        pytest.importorskip("peft", reason="the extra polyfed[lora] is not installed")
        options = {"lora": {"r": 2, "alpha": 4.0, "target_modules": ["query", "value"]}}
    entry = {"kind": "hf", "path": str(tiny_models.text_model(tmp_path / "text")), **options}
    parts: dict[str, Any] = {"encoders": dict.fromkeys("ab", entry), "shapes": dict.fromkeys("ab", (6,))}
    assert said(built("concat", **parts)) == Mixing()
    assert said(built("sum", **parts)).blocks == BOTH


def test_the_model_is_the_same_after_it_was_examined() -> None:
    model = built(Remembers)
    w = model.init(3)
    batch = model.zero_batch(4, ["a", "b"])
    before = model.logits(w, batch)
    said(model)
    assert torch.equal(model.logits(w, batch), before)
    assert all(torch.equal(value, w[name]) for name, value in model.init(3).items())


class Silent(Averaging):
    """A method of a user that says nothing."""


class Heir(FedAvg):
    """What its parent says does not count, because it can change the loss."""


class Says(FedAvg):
    mixing = ""


def test_a_method_of_a_user_says_that_it_keeps_modalities_apart() -> None:
    model = built("concat")
    for method in (Silent, Heir):
        found = said(model, method())
        assert found.blocks == BOTH
        assert f'the method {method.__name__} does not say that it keeps them apart; `mixing = ""`' in found.why
    assert said(model, Says()) == Mixing()


def test_a_task_that_compares_modalities_mixes_them() -> None:
    found = mixing(FedAvg(), Retrieval(dimension=4), built("concat"), ("a", "b"))
    assert found.blocks == BOTH
    assert "'retrieval' compares their embeddings" in found.why
