"""A deployed run goes on with more clients than it began with where that is sound, and else says why not."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import RECIPE, Devices
from polyfed.core.errors import RecipeError, TooFewReplies
from polyfed.core.system.files import AUDIT, EGRESS
from polyfed.experiment.certificate import certify, verify_certificate
from polyfed.report import reconcile
from refusals import refuses

GROWS = ("fedavg", "fedprox", "ditto", "moon", "local")
"""Methods whose server keeps nothing of single clients."""

NOISY = """name = "fedavg"
aggregation = "uniform"
[privacy]
unit = "client"
noise_multiplier = 1.0
clip_norm = 1.0
delta = 1e-3
unprotected = ["statistic"]"""

REFUSED = {
    'name = "scaffold"': "control",
    'name = "feddyn"': "clients of the",
    'name = "fedbuff"': "clients of the",
    'name = "fedamp"': "clients of the",
    NOISY: "[privacy]",
    'name = "fedavg"\n[secure_aggregation]\nmin_clients = 2': "[secure_aggregation]",
    'name = "fedavg"\n[selection]\nname = "divfl"': "[selection]",
}
"""Recipes that cannot grow, and what the sentence names."""


def growing(folder: Path, algorithm: str) -> Devices:
    """Four devices, of which a recipe for three asks for the first three."""
    four = RECIPE.replace('name = "scaffold"', algorithm).replace("num = 3", "num = 4")
    return Devices(folder, four.replace(', ["b"]]', ', ["b"], ["a", "b"]]'))


def recipe_for(devices: Devices, num: int, rounds: int) -> None:
    path = devices.app / "recipe.toml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("rounds = ")]
    text = "\n".join([f"rounds = {rounds}", *lines, ""])
    for other in (3, 4):
        text = text.replace(f"num = {other}\n", f"num = {num}\n")
    path.write_text(text)


def grown(devices: Devices, out: Path) -> None:
    """Two rounds with three devices, and two more with four."""
    recipe_for(devices, 3, 2)
    devices.serve(out, devices.transport(3))
    recipe_for(devices, 4, 4)
    devices.serve(out)


@pytest.mark.parametrize("method", GROWS)
def test_a_run_goes_on_with_a_new_client_that_begins_as_one_of_round_1(method: str, tmp_path: Path) -> None:
    devices, out = growing(tmp_path, f'name = "{method}"'), tmp_path / "run"
    grown(devices, out)
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [3 in row["cohort"] for row in rounds] == [False, False, True, True]
    assert [len(row["cohort"]) for row in rounds] == [3, 3, 4, 4]
    assert not any(row["missing"] for row in rounds)
    assert json.loads((out / "run.json").read_text())["num_clients"] == 4
    ledger = [json.loads(line) for line in (out / EGRESS).read_text().splitlines()]
    assert min(row["round"] for row in ledger if row["client"] == 3) == 3
    told = [row for row in map(json.loads, (out / AUDIT).read_text().splitlines()) if row.get("event") == "new"]
    assert {(row["client"], row.get("why", "")) for row in told if "seal" not in row} == {
        (3, "takes part from round 3 on")
    }
    states = [place / "polyfed-state" for place in devices.places]
    assert reconcile(out, states).findings == ()
    path, content = certify(out)
    assert [one["client"] for one in content["clients"]] == [0, 1, 2, 3]
    assert not verify_certificate(path, run=out, logs=states).faults


def test_the_message_to_a_new_client_is_that_to_the_others(tmp_path: Path) -> None:
    devices, out = growing(tmp_path, 'name = "fedavg"'), tmp_path / "run"
    grown(devices, out)
    rows = [row for row in map(json.loads, (out / AUDIT).read_text().splitlines()) if row.get("round") == 3]
    sent = {
        (row["client"], row["block"]): row["sha256"]
        for row in rows
        if row.get("destination") == "client" and "sha256" in row
    }
    assert sent[3, "a"] == sent[1, "a"], "the global model"
    assert sent[3, "b"] == sent[2, "b"]


@pytest.mark.parametrize("algorithm", REFUSED)
def test_a_run_that_depends_on_its_first_clients_refuses_new_ones_and_goes_on_without(
    algorithm: str, tmp_path: Path
) -> None:
    devices, out = growing(tmp_path, algorithm), tmp_path / "run"
    recipe_for(devices, 3, 1)
    devices.serve(out, devices.transport(3))
    kept = {path.name: path.read_bytes() for path in out.glob("*.jsonl") if path.name != AUDIT}
    recipe_for(devices, 4, 2)
    with refuses(RecipeError, f"clients.num: {REFUSED[algorithm]}"):
        devices.serve(out)
    assert {path.name: path.read_bytes() for path in out.glob("*.jsonl") if path.name != AUDIT} == kept
    recipe_for(devices, 3, 2)
    assert devices.serve(out, devices.transport(3))["rounds"] == 2


def served(devices: Devices, out: Path, rounds: int, *absent: int) -> None:
    """Go on to so many rounds while some devices are away."""
    recipe_for(devices, 3, rounds)
    transport = devices.transport()
    transport.hub.absent = {transport.hub.names[device] for device in absent}
    devices.serve(out, transport)


def test_a_number_that_was_left_out_is_no_way_around_the_check(tmp_path: Path) -> None:
    """Without it, epsilon would be counted as if the cohorts so far had been drawn among the new client, too."""
    devices = Devices(tmp_path, RECIPE.replace('name = "scaffold"', NOISY).replace("enrol", "min_nodes = 2\nenrol"))
    served(devices, out := tmp_path / "run", 1, 1)
    with refuses(RecipeError, "clients.num: [privacy]"):
        served(devices, out, 2)
    served(devices, out, 2, 1)


@pytest.mark.parametrize("away", [1, 2])
def test_a_client_that_was_away_for_a_start_is_not_new(away: int, tmp_path: Path) -> None:
    """Else a device could keep a run from ending: it stays away once, and returns."""
    devices = Devices(tmp_path, RECIPE.replace("enrol", "min_nodes = 2\nenrol"))
    served(devices, out := tmp_path / "run", 1)
    served(devices, out, 2, away)
    served(devices, out, 3)
    assert [row.get("event") for row in map(json.loads, (out / AUDIT).read_text().splitlines())].count("new") == 0


def test_a_device_that_joins_meanwhile_takes_nobodys_place(tmp_path: Path, capsys: Any) -> None:
    """It may answer first when a killed run goes on, and SCAFFOLD cannot take it: before, the job failed."""
    devices, out = growing(tmp_path, 'name = "scaffold"'), tmp_path / "run"
    recipe_for(devices, 3, 1)
    devices.serve(out, devices.transport(3))
    recipe_for(devices, 3, 2)
    transport = devices.transport()
    late, found = transport.hub.names[1], transport.hub.online
    looks = iter([False] * 3)  # client 1 is the last to come
    transport.hub.online = lambda: [name for name in found() if name != late or next(looks, True)]
    assert devices.serve(out, transport)["rounds"] == 2
    assert "the run has its 3 clients, and client 3 is none of them" in refusals(out)[0]
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [row["cohort"] for row in rounds] == [[0, 1, 2]] * 2


def refusals(out: Path) -> list[str]:
    rows = map(json.loads, (out / AUDIT).read_text().splitlines())
    return [row["why"] for row in rows if row.get("event") == "refused" and "seal" not in row]


def test_the_place_of_a_revoked_device_is_free(tmp_path: Path) -> None:
    devices, out = growing(tmp_path, 'name = "fedavg"'), tmp_path / "run"
    recipe_for(devices, 3, 1)
    devices.serve(out, devices.transport(3))
    recipe_for(devices, 3, 2)
    transport = devices.transport()
    first, gone, *others = map(transport.device_of, transport.hub.names)
    transport.hub.absent = {transport.hub.names[1]}
    transport.registered = lambda: [first, gone, *others]
    with refuses(TooFewReplies, "none of them"):
        devices.serve(out, transport)
    transport = devices.transport()
    transport.hub.absent = {transport.hub.names[1]}
    transport.registered = lambda: [first, *others]
    assert devices.serve(out, transport)["rounds"] == 2


def test_num_may_not_fall(tmp_path: Path) -> None:
    devices, out = growing(tmp_path, 'name = "fedavg"'), tmp_path / "run"
    recipe_for(devices, 4, 1)
    devices.serve(out)
    recipe_for(devices, 3, 2)
    with refuses(RecipeError, "clients.num = 4"):
        devices.serve(out, devices.transport(3))


def test_a_simulation_does_not_grow(tmp_path: Path) -> None:
    import polyfed
    from polyfed.experiment.recipes.recipe import load_recipe

    path: Any = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace('name = "scaffold"', 'name = "fedavg"'))
    polyfed.run(load_recipe(path), tmp_path / "run")
    with refuses(RecipeError, "clients.num = 3"):
        polyfed.run(load_recipe(path, ["clients.num=4", "rounds=3"]), tmp_path / "run", resume=True)
