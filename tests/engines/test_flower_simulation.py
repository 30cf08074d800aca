"""Simulations on Flower: its runtime on Ray (slow), and a grid in this process. `make check-flower` has another one.

What a run does with replies, late clients and errors is in `engines/patience.py`, and is tested on the own transport.
"""

import json
import os
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

pytest.importorskip("flwr", reason="the extra polyfed[flower] is not installed")

import flwr
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore import telemetry

import polyfed
import world
from engines.direct import through
from engines.federations import METHODS, recipe_for, reference, rows
from engines.flower_grid import DirectGrid
from engines.test_behind_the_wire import in_one_process, small
from engines.test_deployed_faults import VICTIM, hurt, recipe
from polyfed.deploy.handlers import Simulated
from polyfed.engines.flower import GridTransport, client_app
from polyfed.engines.flower.codec import HEADER, packet_of, records
from polyfed.experiment.running import checkpoint
from polyfed.federation.wire.wire_format import Packet

ROOT = Path(__file__).resolve().parents[2]


def pinned() -> str:
    (found,) = re.findall(r"^flwr==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(found)


def other() -> str:
    (found,) = re.findall(r"^FLOWER \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return str(found)


def test_the_range_of_the_extra_is_what_is_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = [found for found in map(Requirement, extras["flower"]) if found.name == "flwr"]
    minors = [f"1.{minor}.0" for minor in range(100) if f"1.{minor}.0" in wanted.specifier]
    assert sorted(minors) == sorted({pinned(), other()})


def test_the_release_that_was_asked_for_is_the_one_that_runs() -> None:
    release = os.environ.get("FLOWER_RELEASE")
    if release is None:
        pytest.skip("`make check-flower` asks for a release")
    assert version("flwr") == release
    assert f"flower-{release}" in flwr.__file__


def test_nothing_phones_home_unless_asked() -> None:
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == telemetry.FLWR_TELEMETRY_ENABLED == "0"
    assert os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # Ray's and Flower's own
@pytest.mark.parametrize("method", METHODS)
def test_ray_equals_sequential(method: str, tmp_path: Path) -> None:
    recipe = recipe_for(method, tmp_path)
    run = polyfed.run(recipe, tmp_path / "ray", engine="flower")
    state, ledger = reference(recipe, tmp_path / "one")
    assert run.result["state_sha256"] == state
    assert rows(tmp_path / "ray" / "egress.jsonl") == ledger


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "vfl"])
def test_clients_on_a_grid_equal_the_sequential_engine(name: str, tmp_path: Path) -> None:
    made = small(name)
    _, state_one, ledger_one = world.played(in_one_process(made))
    grid = DirectGrid(client_app(Simulated(made, tmp_path)), 6)
    state, ledger = through(made, GridTransport(grid), grid.clients)
    assert checkpoint.digest(state_one) == checkpoint.digest(state)
    assert ledger == ledger_one


class Troubled(DirectGrid):
    """A client that raises becomes an error of Flower's; a node is gone when it is asked first, and back at once."""

    lost: frozenset[str] = frozenset()

    def _called(self, message: Any) -> Any:
        kind = message.metadata.message_type
        if message.metadata.dst_node_id == VICTIM + 1 and kind not in self.lost:
            self.lost |= {kind}
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "node is gone"), reply_to=message)
        try:
            return super()._called(message)
        except ArithmeticError as error:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)


def test_a_lost_request_is_sent_again_and_a_client_that_raises_is_left_out(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("polyfed.engines.patience.LOOK_EVERY", 0.0)
    made, told = recipe("scaffold"), dict[int, str]()
    grid = Troubled(client_app(hurt(lambda request, reply: 1 // 0)(Simulated(made, tmp_path))), 6)  # type: ignore[arg-type,return-value]
    emit = lambda event, **facts: told.update({facts["client"]: facts["reason"]})  # noqa: E731
    through(made, GridTransport(grid), grid.clients, emit)
    assert grid.lost == {"query", "train"}, "a request to enrol, and a task"
    assert list(told) == [VICTIM], "in round 2, and not in round 1"
    assert told[VICTIM].startswith("Flower says: ")


def test_a_packet_travels_unchanged_and_records_that_hold_none_are_refused() -> None:
    packet = Packet({"want": "ask", "tensors": [["a", "b", "float32", [3]]]}, bytes(range(12)))
    assert packet_of(records(packet)) == packet
    for content in (RecordDict(), RecordDict({HEADER: ConfigRecord({"header": "[" * 100})})):
        assert isinstance(packet_of(content), str)
    assert json.loads(str(records(packet).config_records[HEADER]["header"])) == packet.header
