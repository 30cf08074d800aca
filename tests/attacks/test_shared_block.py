"""Rows of a modality that may not leave are read off the head's parameters, which belong to `shared`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks.smuggling import ENGINES, up
from polyfed.cli import main
from polyfed.core.errors import EgressError
from polyfed.core.tree import Tree
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.experiment.checks.check import check, refuse_forbidden
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.model import ModelSpec
from polyfed.privacy.egress.policy import Policy
from polyfed.selection import Uniform
from polyfed.start import run
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, recipe, through

CLIENTS = 30
SECRET: dict[str, dict[str, list[str]]] = {"a": {"server": []}}
"""Nothing of modality `a` may reach the server."""
WRITTEN = SECRET | {"shared": {"server": ["parameters", "statistic"]}}
"""The same, and the owner has written that the head may."""
FIX = '["parameters", "statistic"]'


class Identity(nn.Module):
    """An encoder that passes samples on as they are."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        assert shape == (embedding,)

    def forward(self, x: Tensor) -> Tensor:
        return x


def exposed(name: str, egress: Any, engine: str = "sequential", **changes: Any) -> Recipe:
    """One step of SGD on a batch of one row, and a head that reads the samples themselves."""
    options: dict[str, Any] = {"train": Train(lr=0.5, batch_size=1, steps=1)}
    options |= {"uploads": CLIENTS} if name == "pfmml" else {"selector": Uniform(participation=CLIENTS)}
    base = recipe(
        algorithm(name, **options),
        engine,
        data=Toy(rows=150, classes=3, shapes={"a": (8,)}, snr={}),
        model=ModelSpec(embedding=8, fusion="sum", encoders={"a": {"kind": "attacks.test_shared_block:Identity"}}),
        clients=ClientsSpec(partition="iid", num=CLIENTS),
        egress=egress,
        rounds=1,
    )
    return replace(base, **changes)


def heard(parts: Assembly) -> dict[int, Tree]:
    """Run one round. Return the parameters that the server received from each client."""
    seen: dict[int, Tree] = {}
    answer = parts.engine.answer

    def listening(*args: Any) -> Any:
        got = answer(*args)
        for part in got.parts:
            for place, client in enumerate(part.clients):
                if client >= 0 and hasattr(part.message, "params"):
                    seen[client] = {name: stack[place] for name, stack in part.message.params.items()}
        return got

    parts.engine.answer = listening  # type: ignore[method-assign]
    through(parts, 1)
    return seen


def recovered(parts: Assembly) -> int:
    """How many of the clients' rows a server reads off what the first step did to the head's weights."""
    found = 0
    for client, after in heard(parts).items():
        moved = {name: after[name] - parts.initial[name] for name in after}
        (weight,) = (change for change in moved.values() if change.dim() == 2)
        (bias,) = (change for change in moved.values() if change.dim() == 1)
        row = weight[bias.abs().argmax()] / bias[bias.abs().argmax()]
        own = parts.engine.columns.modalities["a"].values[parts.population.train[client]]
        found += bool(torch.isclose(own, row, atol=1e-3).all(1).any())
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedavg", "pfmml"])
def test_rows_of_a_forbidden_modality_do_not_leave_with_the_head(name: str, engine: str) -> None:
    made = exposed(name, SECRET, engine)
    with refuses(EgressError, FIX):
        refuse_forbidden(assemble(made))
    parts = assemble(made)
    with refuses(EgressError, "layers mix"):
        through(parts, 1)
    assert parts.ledger.bytes_up == 0
    assert {row["verdict"] for row in up(parts)} == {"refused"}


@pytest.mark.parametrize("name", ["fedavg", "pfmml"])
def test_the_head_does_hold_them_once_the_owner_lets_it_go(name: str) -> None:
    assert recovered(assemble(exposed(name, WRITTEN))) == CLIENTS


def test_check_says_why_and_which_row_decides(tmp_path: Path, capsys: Any) -> None:
    checked = check(exposed("fedavg", SECRET))
    assert {row.block for row in checked.refused} == {"shared"}
    assert checked.fixes == ('[egress.shared] server = ["parameters", "statistic"]',)
    why, cure = checked.why
    assert "[egress.a] server forbids it" in why
    assert "private" in cure, "how to train without sending it"
    assert check(exposed("fedavg", WRITTEN)).refused == ()
    assert check(exposed("fedavg", WRITTEN)).why == ()
    (tmp_path / "made.toml").write_text(
        'rounds = 1\n[data]\nname = "toy"\nrows = 60\n[clients]\nnum = 3\n[model]\nembedding = 4\n[model.encoders]\n'
        'a = { kind = "mlp" }\nb = { kind = "mlp" }\n[algorithm]\nname = "fedavg"\n'
        '[egress.a]\nserver = ["parameters"]\n'
    )
    with pytest.raises(SystemExit) as stop:
        main(("check", str(tmp_path / "made.toml")))
    assert stop.value.code == 3
    assert "since its layers mix them; [egress.a] server forbids it" in " ".join(capsys.readouterr().out.split())
    with refuses(EgressError, "layers mix"):
        run(exposed("fedavg", SECRET))


def test_a_client_is_bound_by_the_modalities_that_it_owns() -> None:
    clients = ClientsSpec(partition="iid", num=4, holdings=[["a", "b"], ["b"]])
    parts = assemble(recipe(algorithm("fedavg"), clients=clients, egress=SECRET))
    gates = {client: parts.engine.context(client).policy.kinds("shared", "server") for client in range(4)}
    both = {client for client in range(4) if "a" in parts.fed.clients.owned(client)}
    assert both
    assert both < set(gates)
    assert {client for client, kinds in gates.items() if not kinds} == both
    assert {kinds for client, kinds in gates.items() if client not in both} == {Policy().kinds("shared", "server")}
