"""Secure aggregation over five devices, two of which are killed in the middle of a round. Slow; `make check-all`."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import world
from engines.federations import PATIENCE, Federation, recipe_for, rows
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import assemble

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

FIVE = """
[evaluate]
personal = false
[secure_aggregation]
threshold = 0.6
"""

KILLING = """
import json, os, pathlib, signal
from polyfed.federation.secure_aggregation.server import SecureSum
step, groups = SecureSum._step, json.loads(pathlib.Path({victims!r}).read_text())
def killing(self, task, *rest, **options):
    for group in groups.pop(task.__name__, []):
        os.killpg(group, signal.SIGKILL)
    return step(self, task, *rest, **options)
SecureSum._step = killing
"""
"""In the process of the run: it kills devices, with their processes, directly before it sends a task."""


def five(folder: Path) -> Path:
    """The demonstration's recipe with five clients, under secure aggregation."""
    path = recipe_for("fedavg", folder, rounds=1, more="away_seconds = 2.0")
    text = path.read_text().replace(f"away_seconds = {PATIENCE}\n", "").replace("num = 3", "num = 5")
    text = text.replace('[["gray", "color"], ["gray"], ["color"]]', '[["gray", "color"]]')
    path.write_text(text.replace("[deployment]", f"{FIVE}[deployment]"))
    return path


def reference(recipe: Path) -> tuple[str, list[dict[str, Any]]]:
    """The final state of one process in which the same replies get lost, and the masked rows of its ledger."""
    parts = assemble(load_recipe(recipe, ["engine.name=sequential"]))
    world.losing(parts, "update", 1)
    world.losing(parts, "unmask", 3)
    state = world.through(parts, 1)
    return checkpoint.digest(state), [row for row in parts.ledger.rows() if row.get("masked")]


def test_the_sum_survives_devices_that_are_killed_before_and_after_their_masked_reply(tmp_path: Path) -> None:
    recipe = five(tmp_path)
    with Federation(recipe, tmp_path / "fed") as federation:
        federation.start()
        pids = {name: federation.processes[name].pid for name in ("device-1", "device-3")}
        victims = tmp_path / "victims.json"
        victims.write_text(json.dumps({"update": [pids["device-1"]], "unmask": [pids["device-3"]]}))
        federation.run(changed=KILLING.format(victims=str(victims))).wait(PATIENCE * 2)
        told = federation.log("run")
        out = federation.out
        assert (out / "result.json").exists(), told[-3000:]
        assert federation.processes["device-1"].poll() == federation.processes["device-3"].poll() == -9
    result = json.loads((out / "result.json").read_text())
    line = json.loads((out / "rounds.jsonl").read_text().splitlines()[0])
    state, masked = reference(recipe)
    assert result["state_sha256"] == state, "the sum of clients 0, 2, 3 and 4, whatever the masks were"
    assert {int(client) for client in line["missing"]} >= {1}
    got = [row for row in rows(out / "egress.jsonl") if row.get("masked")]
    assert {row["client"] for row in got} == {0, 2, 3, 4}, "the reply of client 3 arrived before it died"
    plain = [{key: value for key, value in row.items() if key != "run"} for row in masked if row["client"] != 1]
    assert got == plain
