"""Clients in other processes protect their replies as clients in this process do."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import world
from engines.direct import hub_of, joined, played
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.running import checkpoint
from privacy.test_private_runs import private


@pytest.mark.parametrize("kind", ["local", "example"])
def test_a_simulation_on_flower_equals_the_sequential_engine_bit_for_bit(kind: str, tmp_path: Path) -> None:
    made = private(kind, EngineSpec(name="flower"), epsilon=500.0, noise_multiplier=None, rounds=2)
    one, state_one, ledger_one = world.played(replace(made, engine=replace(made.engine, name="sequential")))
    parts = joined(made, hub_of(made, tmp_path))
    state, ledger = played(made, parts)
    assert checkpoint.digest(state_one) == checkpoint.digest(state)
    assert ledger == ledger_one
    assert parts.guarantee is not None
    assert one.guarantee is not None
    assert parts.guarantee.facts(2) == one.guarantee.facts(2)
