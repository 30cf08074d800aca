"""What a user is told besides epsilon: data that epsilon does not cover, the size of the noise, and simulations."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import polyfed
from polyfed.cli.printing.tables import result_table
from polyfed.data import ClientsSpec
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.private_mean import PrivateMean
from polyfed.federation.replies import Replies
from polyfed.privacy.differential.section import Privacy
from polyfed.report import write_report
from privacy.test_private_runs import CLIENT, EXAMPLE, private
from world import algorithm, recipe


def guarantee(made: Any) -> Any:
    found = assemble(made).guarantee
    assert found is not None
    return found


def printed(result: dict[str, Any]) -> str:
    """The table at the end of a run."""
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(result_table(result))
    return console.export_text()


def test_validation_rows_at_the_server_are_named() -> None:
    clients = ClientsSpec(partition="iid", num=6, validation=0.2)
    told = guarantee(private("central", clients=clients))
    (rows,) = [text for text in told.not_covered if "[clients] validation" in text]
    assert "48 rows" in rows  # a fifth of the 264 rows that are no test rows, rounded down at each client
    assert any(rows in sentence for sentence in told.sentences())
    assert not any("validation" in text for text in guarantee(private("central")).not_covered)


def test_means_that_were_computed_before_the_run_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", a=rng.normal(size=(60, 4)).astype("float32"), label=np.arange(60) % 3)
    table: dict[str, Any] = {
        "rounds": 1,
        "data": {
            "name": "npz",
            "path": str(tmp_path / "d.npz"),
            "modalities": ["a"],
            "standardise": True,
            "test_share": 0.2,
        },
        "clients": {"partition": "iid", "num": 4},
        "model": {"embedding": 4, "encoders": {"a": {"kind": "mlp", "hidden": [4]}}},
        "algorithm": {"name": "fedavg", "aggregation": "uniform"},
        "privacy": {"unit": "client", "delta": 0.01, "epsilon": 8.0},
    }
    checked = check(parse_recipe(table))
    assert any("[data] standardise" in sentence for sentence in checked.promises)
    assert checked.privacy is not None
    assert any("standardise" in text for text in checked.privacy["not_covered"])
    result = polyfed.run(parse_recipe(table), tmp_path / "run").result
    assert result["privacy"]["not_covered"] == checked.privacy["not_covered"]
    page = write_report(tmp_path / "run").read_text()
    assert "Epsilon does not cover: the means and deviations" in page
    assert "protects nobody" in page
    table["data"]["standardise"] = False
    assert not any("standardise" in sentence for sentence in check(parse_recipe(table)).promises)


@pytest.mark.parametrize("kind", ["central", "central-per-block"])
def test_the_norm_of_the_noise_is_that_of_drawn_noise(kind: str) -> None:
    parts = assemble(private(kind))
    assert parts.guarantee is not None
    drawn = []
    for key in range(40):
        found = PrivateMean(parts.guarantee.mechanism, key).of(Replies([]), "params", parts.initial)
        drawn.append(torch.cat([(found[n] - parts.initial[n]).flatten() for n in found]).norm())
    told = parts.guarantee.noise_norm
    assert told is not None
    assert float(torch.stack(drawn).mean()) / CLIENT["clip_norm"] == pytest.approx(told, rel=0.05)  # type: ignore[operator]


def test_noise_of_the_clients_is_larger_by_the_root_of_their_number() -> None:
    central, local = guarantee(private("central")), guarantee(private("local"))
    assert local.noise_norm > central.noise_norm * 1.5
    assert guarantee(recipe(algorithm("fedavg"), privacy=Privacy(**EXAMPLE))).noise_norm is None  # type: ignore[arg-type]


def test_a_partial_guarantee_is_marked_and_lists_each_part_once() -> None:
    made = private("client-scaffold", rounds=1)
    run = polyfed.run(made)
    listed = [tuple(part.values()) for part in run.result["privacy"]["unprotected"]]
    assert listed
    assert len(listed) == len({*listed})
    assert "of the protected parts only" in printed(run.result)
    assert "protected parts" not in printed(polyfed.run(private("central", rounds=1)).result)


def test_a_simulation_says_that_it_protects_nobody_and_a_deployment_does_not() -> None:
    told = guarantee(private("central"))
    assert any("protects nobody" in sentence for sentence in told.sentences())
    deployed = replace(told, mechanism=replace(told.mechanism, secure=True))
    assert not any("protects nobody" in sentence for sentence in deployed.sentences())
    assert told.facts(1)["simulated"]
    assert not deployed.facts(1)["simulated"]
