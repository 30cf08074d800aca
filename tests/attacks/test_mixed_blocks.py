"""Rows of a modality that may not leave are read off the parameters of another modality's block."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.smuggling import ENGINES, up
from attacks.test_shared_block import exposed, heard
from polyfed.algorithms.averaging.moon import Moon, contrast
from polyfed.cli import main
from polyfed.core.errors import EgressError
from polyfed.core.tree import Tree, block_of
from polyfed.data.sources import Toy
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.model import ModelSpec
from polyfed.objective import Retrieval
from polyfed.privacy.egress.mixing import Mixing
from polyfed.privacy.egress.policy import Policy
from refusals import refuses

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


def gated(
    egress: Any,
    engine: str = "sequential",
    fusion: str = "gated",
    encoder: Any = IDENTITY,
    head: tuple[int, ...] = (),
) -> Recipe:
    model = ModelSpec(embedding=8, fusion=fusion, head=head, encoders={"a": encoder, "b": encoder})
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
    with refuses(EgressError, "multiplies"):
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


def test_only_concat_without_hidden_layers_needs_no_second_permission() -> None:
    mlp = {"kind": "mlp"}
    assert check(gated(ONLY_B, fusion="concat", encoder=mlp)).refused == ()
    for made in (gated(ONLY_B, fusion="sum", encoder=mlp), gated(ONLY_B, fusion="concat", encoder=mlp, head=(8,))):
        checked = check(made)
        assert {row.block for row in checked.refused} == {"b"}
        assert "head = [] avoids this" in checked.why[0]


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
    asked: list[tuple[str, ...]] = []

    def mixes(own: Collection[str]) -> Mixing:
        asked.append(tuple(own))
        return Mixing(frozenset(own) if len(own) > 1 else frozenset(), "of the test")

    policy = Policy.parse(ONLY_B | {"b": {"server": []}}, ["a", "b"]).for_model(["a", "b"], mixes)
    two = '[egress.b] server = ["parameters"] and [egress.shared] server = ["parameters", "statistic"]'
    assert policy.fix(("parameters",), "b", "server") == two
    alone = Policy.parse(ONLY_B, ["a", "b"]).for_client(["b"]).for_model(["a", "b"], mixes)
    assert alone.allows("parameters", "b", "server"), "there is no other modality in its gradients"
    assert Policy().for_model(["a", "b"], mixes).allows("gradients", "b", "server"), "by default, all may leave"
    assert ("a", "b") in asked
    assert len(asked) <= 2, "the model is not examined if all may leave"
