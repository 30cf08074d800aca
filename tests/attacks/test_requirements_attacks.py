"""Further attacks on the section [require]: the recipe's [data], local state, a damaged count, and the clip norm."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from attacks.test_requirements import EPSILON, EXAMPLE, LOCAL, NOISE, SPEND, Hostile, device, left, text
from polyfed.core.errors import CheckpointError, EgressError, RecipeError
from polyfed.core.privacy_noise import LEAST_CLIP, MOST_CLIP
from polyfed.deploy.device.memory.privacy_budget import spend
from polyfed.deploy.device.memory.store import STORE, TABLES, DeviceStore
from polyfed.engines.protocol import REFUSED, REPLY
from polyfed.privacy.differential.adaptive_clipping import AdaptiveClipping
from polyfed.privacy.egress.requirements import Release, Requirements
from refusals import refuses

ROWS = 'max_epsilon = 50.0\ndelta = 1e-3\nunit = "example"'
TOY = 'name = "toy"\nrows = 240\nclasses = 4'
ONE = Release("client", 2.0, 1)


def spend_one(required: Requirements, folder: Path) -> None:
    with DeviceStore(folder).transaction("run", 0) as memory:
        spend(memory, required, ONE)


def of_file(recipe: str, option: str) -> str:
    """A recipe whose [data] gives an option for the file of each device."""
    return recipe.replace(TOY, f'name = "npz"\npath = "x.npz"\nmodalities = ["a", "b"]\n{option}')


def private(sections: str) -> str:
    """A recipe whose clients keep the block `a` in their local state."""
    return text(sections).replace('aggregation = "uniform"', 'aggregation = "uniform"\nprivate = ["a"]')


def test_a_recipe_cannot_mix_rows_before_the_noise(tmp_path: Path) -> None:
    """The means of `standardise` depend on all rows. So one row would change the clipped gradients of all others."""
    server = Hostile(device(tmp_path, ROWS, text(EXAMPLE + NOISE)))
    server.sends(of_file(text(EXAMPLE + NOISE), "standardise = true"))
    answer = server.ask()
    assert answer.header["verdict"] == REFUSED
    assert "[data] standardise computes means over all rows" in str(answer.header["reason"])
    assert not left(server.devices)


def test_standardised_rows_are_fine_if_the_noise_protects_the_whole_device(tmp_path: Path) -> None:
    server = Hostile(device(tmp_path, EPSILON, text(LOCAL + NOISE)))
    server.sends(of_file(text(LOCAL + NOISE), "standardise = true"))
    assert server.ask().header["verdict"] == REPLY


@pytest.mark.parametrize(("require", "sections"), [(EPSILON, LOCAL + NOISE), (ROWS, EXAMPLE + NOISE)])
def test_a_recipe_cannot_count_the_rows_of_a_class(require: str, sections: str, tmp_path: Path) -> None:
    """With the labels as split codes, the number of training rows would be the number of rows of class 0."""
    server = Hostile(device(tmp_path, require, text(sections)))
    server.sends(of_file(text(sections), 'split = "label"'))
    answer = server.enrol()
    assert answer.header["verdict"] == REFUSED
    assert "[data] split = 'label'" in str(answer.header["reason"])
    assert "rows" not in answer.header


def test_local_state_without_noise_does_not_leave_through_noise_for_single_rows(tmp_path: Path) -> None:
    """The server changes the recipe within a run. The private block was trained without noise under the first one."""
    server = Hostile(device(tmp_path, ROWS, private(LOCAL + NOISE)))
    server.params = {name: value for name, value in server.params.items() if not name.startswith("a.")}
    assert server.ask().header["verdict"] == REPLY
    server.sends(private(EXAMPLE + NOISE))
    answer = server.ask(round=2)
    assert answer.header["verdict"] == REFUSED
    assert "trained without noise for single rows. Begin a new run" in str(answer.header["reason"])
    assert [server.ask(run="new", round=round).header["verdict"] for round in (1, 2)] == [REPLY] * 2


def test_local_state_from_before_the_section_does_not_leave_either(tmp_path: Path) -> None:
    devices = device(tmp_path, ROWS, private(EXAMPLE + NOISE))
    policy = devices.places[1] / "policy.toml"
    demand = policy.read_text()
    policy.write_text(demand.replace(ROWS, ""))
    server = Hostile(devices)
    server.params = {name: value for name, value in server.params.items() if not name.startswith("a.")}
    server.sends(private(""))
    assert server.ask().header["verdict"] == REPLY
    policy.write_text(demand)
    server.sends(private(EXAMPLE + NOISE))
    assert server.ask(round=2).header["verdict"] == REFUSED


@pytest.mark.parametrize(
    "entry",
    [
        "'client', 9e999, 5",
        "'client', -2.0, 5",
        "'client', 0.0, 5",
        "'client', 'x', 1",
        "'row', 2.0, 1",
        "'client', 2.0, -5",
        "'client', 2.0, 1.9",
        "'client', 2.0, 'true'",
    ],
)
def test_a_count_that_cannot_be_right_is_damage(entry: str, tmp_path: Path) -> None:
    """The library takes noise of NaN for epsilon 0, so the budget would never end."""
    spend_one(Requirements(max_epsilon=9.0, delta=1e-3), tmp_path)
    with closing(sqlite3.connect(tmp_path / STORE, isolation_level=None)) as rows:
        rows.execute("PRAGMA ignore_check_constraints = ON")
        rows.execute(f"INSERT OR REPLACE INTO spent VALUES ({entry})")
    before = (tmp_path / STORE).read_bytes()
    with refuses(CheckpointError, "is damaged"):
        spend_one(Requirements(max_epsilon=9.0, delta=1e-3), tmp_path)
    assert (tmp_path / STORE).read_bytes() == before


def test_replies_at_the_same_time_do_not_exceed_the_budget(tmp_path: Path) -> None:
    required, allowed = Requirements(max_epsilon=SPEND + 1e-6, delta=1e-3), []

    def ask() -> None:
        try:
            spend_one(required, tmp_path)
        except EgressError:
            return
        allowed.append(1)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(allowed) == 2


def test_nobody_drives_the_adaptive_clip_norm_to_zero_or_infinity() -> None:
    """A clip norm of 0 ends the training for ever, and a clip norm of infinity makes the model infinite."""
    rule = AdaptiveClipping.of(0.5, 1e300, None, 10.0)
    assert rule.after(1.0, -5.0, 10.0) == MOST_CLIP
    assert rule.after(1.0, 5.0, 10.0) == LEAST_CLIP
    slow, norm = AdaptiveClipping.of(0.5, 0.2, None, 10.0), 1.0
    for _ in range(1000):
        norm = slow.after(norm, 5.0, 10.0)
    assert norm == LEAST_CLIP


def test_a_tiny_noise_of_the_count_is_refused() -> None:
    with refuses(RecipeError, "privacy.count_noise: must be"):
        AdaptiveClipping.of(0.5, 0.2, 1e-200, 10.0).update_noise(1.0)


def test_a_stale_request_spends_nothing(tmp_path: Path) -> None:
    """It gets no reply. A server, or whoever repeats its old packets, would use up the budget and the requests."""
    limits = "max_epsilon = 50.0\ndelta = 1e-3\n[limits]\nmax_requests = 100\n"
    server = Hostile(device(tmp_path, limits, text(LOCAL + NOISE, rounds=9)))
    assert server.ask(round=2).header["verdict"] == REPLY
    state = server.devices.places[1] / "polyfed-state"
    before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    assert {"device.sqlite3", "egress.jsonl", "audit.jsonl"} <= {path.name for path in before}
    with closing(sqlite3.connect(state / STORE)) as rows:
        counts = {table: rows.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES}
    assert [counts[table] for table in ("requests", "releases", "spent")] == [1, 1, 1]
    for _ in range(3):
        answer = server.ask(round=1)
        assert answer.header["verdict"] == "failed"
        assert "the message is stale" in str(answer.header["reason"])
    assert {path: path.read_bytes() for path in state.rglob("*") if path.is_file()} == before
