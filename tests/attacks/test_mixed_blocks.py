"""Rows of a modality that may not leave are read off the parameters of another modality's block."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.smuggling import ENGINES, up
from attacks.test_shared_block import exposed, heard
from own_models import Product, Whole
from polyfed.algorithms.moon import Moon, contrast
from polyfed.cli import main
from polyfed.core.errors import EgressError
from polyfed.core.tree import Tree, block_of
from polyfed.data.sources import Toy
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.model import Model, ModelSpec, build_model
from polyfed.model.fusion import Concat
from polyfed.objective import Retrieval
from polyfed.privacy.egress.policy import Policy

pytestmark = pytest.mark.filterwarnings("ignore:.*measures nothing")

IDENTITY = {"kind": "attacks.test_shared_block:Identity"}
ONLY_B: dict[str, dict[str, list[str]]] = {
    "a": {"server": []},
    "b": {"server": ["parameters"]},
    "shared": {"server": ["statistic"]},
}
"""Nothing of modality `a` may reach the server, and of the shared layers only numbers such as the loss."""


A, B = (torch.linspace(-1, 1, 12).sin().reshape(3, 4), torch.linspace(0, 2, 8).cos().reshape(2, 4))
"""Features of modalities a and b."""


def gated(egress: Any, engine: str = "sequential", fusion: str = "gated", encoder: Any = IDENTITY) -> Recipe:
    model = ModelSpec(embedding=8, fusion=fusion, encoders={"a": encoder, "b": encoder})
    data = Toy(rows=150, classes=3, shapes={"a": (8,), "b": (8,)}, snr={})
    made = exposed("fedavg", egress, engine, model=model, data=data)
    return replace(made, algorithm=replace(made.algorithm, private=("a", "shared")))


def stolen(parts: Assembly) -> tuple[int, set[str]]:
    """How many rows of `a` the server computes from block b after one step, and the blocks that it received.

    The server sends a block b of zeros. The logits are then the head's bias, so the error of the joint representation
    is known up to the label, and the gradient of b's bias is this error times the gate.
    """
    for name in ("b.fusion.weight", "b.fusion.bias"):
        parts.initial[name] = torch.zeros_like(parts.initial[name])
    seen, found = heard(parts), 0
    for client, after in seen.items():
        own = parts.engine.columns.modalities["a"].values[parts.population.train[client]]
        gradient = -after["b.fusion.bias"].double() / 0.5
        found += any(torch.isclose(own.double(), row, atol=1e-2).all(1).any() for row in _rows(parts.initial, gradient))
    return found, {block_of(name) for after in seen.values() for name in after}


def _rows(initial: Tree, gradient: Tensor) -> list[Tensor]:
    w = {name: value.double() for name, value in initial.items()}
    head = w["shared.head.0.weight"]
    error = torch.softmax(w["shared.head.0.bias"], 0) - torch.eye(3, dtype=torch.float64)
    gates = [gradient / (head.T @ error[label]) for label in range(3)]
    return [
        torch.linalg.solve(w["a.fusion.weight"], torch.logit(gate) - w["a.fusion.bias"])
        for gate in gates
        if ((gate > 0) & (gate < 1)).all()
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_of_a_gate_do_not_leave_with_the_block_that_it_gates(engine: str) -> None:
    parts = assemble(gated(ONLY_B, engine))
    with pytest.raises(EgressError, match=r"parameters of b may not go to the server \(the model mixes the modalities"):
        stolen(parts)
    assert parts.ledger.bytes_up == 0
    assert {row["verdict"] for row in up(parts)} == {"refused"}


def test_the_gated_block_does_hold_them_once_the_owner_lets_shared_layers_go() -> None:
    found, blocks = stolen(assemble(gated(ONLY_B | {"shared": {"server": ["parameters", "statistic"]}})))
    assert blocks == {"b"}, "nothing of a, and no shared parameters"
    assert found == 30


def test_check_names_the_reason_and_the_row_that_decides(tmp_path: Path, capsys: Any) -> None:
    checked = check(gated(ONLY_B))
    assert {row.block for row in checked.refused} == {"b"}
    assert checked.fixes == ('[egress.shared] server = ["parameters", "statistic"]',)
    assert "the parameters of 'b' can reveal the other modalities" in checked.why[0]
    assert checked.facts["egress"]["b"]["server"] == [], "and the table of what may leave says so"
    (tmp_path / "policy.toml").write_text(
        '[egress.a]\nserver = []\n[egress.b]\nserver = ["parameters"]\n[egress.shared]\nserver = ["statistic"]\n'
    )
    (tmp_path / "made.toml").write_text(
        'rounds = 1\n[data]\nname = "toy"\nrows = 60\n[clients]\nnum = 3\n[model]\nembedding = 4\nfusion = "gated"\n'
        '[model.encoders]\na = { kind = "mlp" }\nb = { kind = "mlp" }\n[algorithm]\nname = "fedavg"\n'
        'private = ["a", "shared"]\n'
    )
    with pytest.raises(SystemExit) as stop:
        main(("check", str(tmp_path / "made.toml"), "--node", str(tmp_path / "policy.toml")))
    assert stop.value.code == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert "the model mixes the modalities" in shown
    assert 'would be allowed by [egress.shared] server = ["parameters", "statistic"]' in shown


@pytest.mark.parametrize("fusion", ["concat", "sum"])
def test_fusions_that_only_add_need_no_second_permission(fusion: str) -> None:
    assert check(gated(ONLY_B, fusion=fusion, encoder={"kind": "mlp"})).refused == ()


def test_a_loss_that_compares_modalities_mixes_them_whatever_the_fusion() -> None:
    made = replace(gated(ONLY_B, fusion="concat"), task=Retrieval(dimension=4))
    made = replace(made, algorithm=replace(made.algorithm, train=replace(made.algorithm.train, batch_size=2)))
    assert {row.block for row in check(made).refused} == {"b"}


def test_a_method_that_compares_all_modalities_together_mixes_them_whatever_the_fusion() -> None:
    """MOON's cosine of the concatenated features has a gradient for b that depends on the features of a."""
    slopes = []
    for of_a in (1.0, 3.0):
        b = torch.ones(1, 4, requires_grad=True)
        own, received, last = (torch.cat([of_a * a, z], 1) for a, z in ((A[:1], b), (A[1:2], B[:1]), (A[2:], B[1:])))
        slopes.append(torch.autograd.grad(contrast(own, received, last, 0.5).sum(), b)[0])
    assert not torch.allclose(*slopes, atol=1e-3)
    made = gated(ONLY_B, fusion="concat", encoder={"kind": "mlp"})
    told = made.algorithm
    for per_modality in (False, True):
        moon = Moon(
            train=told.train,
            selector=told.selector,  # type: ignore[attr-defined]
            private=("a", "shared"),
            projection=0,
            per_modality=per_modality,
        )
        blocks = {row.block for row in check(replace(made, algorithm=moon)).refused}
        assert blocks == (set() if per_modality else {"b"})


def test_both_rows_are_named_if_both_are_missing_and_an_owner_of_one_modality_needs_only_one() -> None:
    policy = Policy.parse(ONLY_B | {"b": {"server": []}}, ["a", "b"]).for_model(["a", "b"], mixes=True)
    two = '[egress.b] server = ["parameters"] and [egress.shared] server = ["parameters", "statistic"]'
    assert policy.fix(("parameters",), "b", "server") == two
    alone = Policy.parse(ONLY_B, ["a", "b"]).for_client(["b"]).for_model(["a", "b"], mixes=True)
    assert alone.allows("parameters", "b", "server"), "there is no other modality in its gradients"
    assert Policy().for_model(["a", "b"], mixes=True).allows("gradients", "b", "server"), "by default, all may leave"


class Careless(Concat):
    """Inherits from a fusion that only adds, and multiplies."""

    def joint(self, parts: Any, z: Any, present: Any) -> Tensor:
        total = super().joint(parts, z, present)
        return total * z["a"].sum(1, keepdim=True) if "a" in z else total


SPECS: dict[str, ModelSpec] = {
    **{f: ModelSpec(embedding=5, fusion=f, head=(4,)) for f in ("concat", "sum", "gated")},
    "concat without a head": ModelSpec(embedding=5, fusion="concat"),
    "own": ModelSpec(embedding=5, fusion=Product),  # type: ignore[arg-type]
    "inherited": ModelSpec(embedding=5, fusion=Careless, head=(4,)),  # type: ignore[arg-type]
    "attention": ModelSpec(embedding=5, fusion="attention", attention_hidden=4, attention_heads=2),
}


def _slopes(model: Model, of_a: float) -> list[Tensor]:
    """Derivative of a fixed weighting of the joint representation by the parameters of block b."""
    w = model.init(3)
    own = {name: w[name].requires_grad_() for name in model.trainable(w) if block_of(name) == "b"}
    batch = model.zero_batch(2, ["a", "b"])
    generator = torch.Generator().manual_seed(7)
    for name, scale in (("a", of_a), ("b", 1.0)):
        batch.x[name].copy_(scale * torch.randn(batch.x[name].shape, generator=generator))
    joint = model.joint(w, model.features(w, batch), batch)
    weights = torch.linspace(-1, 1, joint.shape[1])
    return list(torch.autograd.grad((joint * weights).sum(), list(own.values()), allow_unused=True))


@pytest.mark.parametrize("name", SPECS)
def test_a_fusion_that_says_it_does_not_mix_has_gradients_of_b_without_features_of_a(name: str) -> None:
    kind = {"kind": "conv-gru"} if name == "attention" else {"kind": "mlp"}
    shapes = {m: (16, 6) if name == "attention" else (6,) for m in "ab"}
    spec = replace(SPECS[name], encoders={"a": kind, "b": kind})
    model = build_model(spec, shapes, 3)
    before, after = _slopes(model, 1.0), _slopes(model, 3.0)
    same = all(x is y is None or torch.allclose(x, y, atol=1e-6) for x, y in zip(before, after, strict=True))
    assert same is not model.mixes
    assert spec.mixes is model.mixes


def test_a_whole_module_mixes_unless_its_class_says_otherwise() -> None:
    class Apart(Whole):
        mixes = False

    class Heir(Apart):
        pass

    made = {
        cls: ModelSpec(module=cls, blocks={"a": ("net_a",), "b": ("net_b", "bias_b")}) for cls in (Whole, Apart, Heir)
    }
    shapes = {"a": (5,), "b": (4,)}
    built = {cls: build_model(spec, shapes, 3).mixes for cls, spec in made.items()}
    assert built == {cls: spec.mixes for cls, spec in made.items()} == {Whole: True, Apart: False, Heir: True}
