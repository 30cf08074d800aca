"""What a device keeps of its local state: enough to do again what a server can still ask, and no more."""

from pathlib import Path

import pytest
import torch

from polyfed.core.errors import BadReply
from polyfed.deploy.device.state_store import Store
from polyfed.engines.protocol import RequestId


def work(store: Store, session: int, round: int, request: int, kept: int = 0) -> float:
    """An ask that adds 1 to what is kept; what it began with."""
    request_id = RequestId("run", session, round, request, client=3)
    found = store.before(request_id)
    store.begin(request_id)
    before = 0.0 if found is None else float(found[0]["n"])
    store.keep(request_id, {"n": torch.tensor(before + 1)}, ("a",), kept)
    return before


def test_a_round_of_many_asks_leaves_two_states(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for request in range(9):
        assert work(store, 0, 1, request) == request
    assert store._places() == [(1, 7), (1, 8)]
    assert work(store, 0, 1, 8) == 8.0, "the newest ask can be repeated"


def test_a_server_can_go_back_to_the_end_of_any_round_that_is_not_settled(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round in (1, 2, 3, 4):
        for request in (0, 1, 2):
            work(store, 0, round, request, kept=1)
    assert store._places() == [(1, 2), (2, 2), (3, 2), (4, 1), (4, 2)]
    assert work(store, 1, 3, 0) == 6.0, "as round 2 left it"
    assert [place[0] for place in store._places()] == [1, 2, 3]


def test_of_settled_rounds_only_the_last_state_is_left(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round in (1, 2, 3):
        work(store, 0, round, 0, kept=round - 1)
    assert store._places() == [(2, 0), (3, 0)]
    with pytest.raises(BadReply, match="forgotten"):
        work(store, 1, 2, 0)
