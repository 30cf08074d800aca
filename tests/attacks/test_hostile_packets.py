"""Headers that cost their reader much, updates that ruin everybody's model, and what a device leaves on its disk."""

import json
import re
import stat
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import world
from engines.devices import Devices
from engines.direct import hub_of, joined, played
from polyfed.core.errors import BadReply, CheckpointError, Diverged
from polyfed.core.messages import map_tensors
from polyfed.core.system.files import read_notes
from polyfed.deploy.device.memory.local_states import KEPT_RUNS, KEPT_UNENDED, begin, end, keep, prune
from polyfed.deploy.device.memory.store import DeviceStore
from polyfed.deploy.faults import log
from polyfed.deploy.server.membership import MEMBERS, Membership
from polyfed.engines.protocol import Facts, RequestId
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.federation.wire.wire_format import Packet, framed, unframed
from polyfed.privacy.egress.audit_log.log import HEAD, head_of
from polyfed.selection import Uniform
from refusals import refuses

COSTLY = {
    "long": "[" + "0," * 2**22 + "0]",
    "many lists": '{"a":[' + "[]," * 200_000 + "[]]}",
    "many ends": "]" * 200_000,
    "deep": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "deep enough": '{"a":' * 9 + "1" + "}" * 9,
    "deep after a line break in a string": '{"b":"\n","a":' + '{"a":' * 9 + "1" + "}" * 10,
}
"""Headers beyond the bounds, which nobody parses."""

BROKEN = {
    "many digits": '{"a":' + "9" * 10_000 + "}",
    "no end of the string": '"' + '\\"' * (2**21 - 1),
    "no end after a backslash": '"' + "\\" * (2**22 - 2),
    "many quotes": '"' * (2**22 - 1),
}
"""Headers within the bounds that are no JSON. A quadratic search for strings would need hours for the second one."""


@pytest.mark.parametrize("kind", [*COSTLY, *BROKEN])
def test_a_header_beyond_the_bounds_is_not_parsed_and_no_header_is_costly_to_check(kind: str, monkeypatch: Any) -> None:
    header = (COSTLY | BROKEN)[kind].encode()
    content = len(header).to_bytes(4, "little") + header
    parsed, parse = list[str](), json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or parse(text))
    tracemalloc.start()
    found = unframed(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(found, str), "it is no packet"
    assert "too" in found or "deep" in found or "cannot be read" in found
    assert len(parsed) == (kind in BROKEN)
    assert peak < 2**25, "nothing of it was built"


def test_brackets_inside_of_text_are_no_nesting() -> None:
    header = {"reason": '[[[[[[[[[[["' + "{" * 20 + "\\"}
    assert unframed(framed(Packet(header))) == Packet(header)


def recipe(rounds: int = 3) -> Recipe:
    made = world.recipe(world.algorithm("fedavg", selector=Uniform(participation=1.0)), rounds=rounds)
    return replace(made, engine=EngineSpec(name="flower"))


HOSTILE = 2


def spoilt(parts: Any, change: Any) -> dict[int, str]:
    """Have the engine spoil the hostile client's first update; the reasons of those that are missing."""
    fed, missing = parts.fed, dict[int, str]()
    answer = fed.engine.answer

    def bent(request: Any, clients: Any, send: Any) -> Any:
        got = answer(request, clients, send)
        if request.round == 1:
            for place, part in enumerate(got.parts):
                if HOSTILE in part.clients:
                    got.parts[place] = replace(part, message=map_tensors(part.message, change))
        return got

    fed.engine.answer = bent
    fed.emit = lambda event, **facts: missing.update({facts["client"]: facts["reason"]})
    return missing


def test_clients_that_train_on_a_ruined_model_are_not_blamed(tmp_path: Path) -> None:
    made = recipe()
    parts = joined(made, hub_of(made, tmp_path))
    missing = spoilt(parts, lambda t: t * 1e36 if t.is_floating_point() and t.dim() > 1 else t)
    with pytest.raises(Diverged) as caught:
        played(made, parts)
    assert set(missing) == set(range(6))
    assert all("the model that it was sent already held values up to" in why for why in missing.values())
    assert all("merged from replies of clients 0, 1, 2, 3, 4, 5" in why for why in missing.values())
    assert "round 2" in str(caught.value)


def test_the_server_checks_its_own_model_after_a_merge_and_names_the_senders(tmp_path: Path) -> None:
    made = recipe()
    parts = joined(made, hub_of(made, tmp_path))
    missing = spoilt(parts, lambda t: t)
    method = made.algorithm
    merge = type(method).round

    def ruined(state: Any, fed: Any) -> Any:
        after = merge(method, state, fed)
        return replace(after, params={name: value * torch.inf for name, value in after.params.items()})

    fed = parts.fed
    fed.begin(0)
    state = method.init(fed, parts.initial)
    fed.begin(1)
    state = ruined(state, fed)
    fed.begin(2)
    with refuses(Diverged, "round 2"):
        method.round(state, fed)
    assert not missing, "no client was asked to train on it, and none is blamed"


def test_a_device_says_that_the_model_was_broken_before_it_came(tmp_path: Path) -> None:
    made, seen = recipe(1), list[str]()

    def wrap(handler: Any) -> Any:
        def answer(packet: Packet, config: Mapping[str, Any]) -> Packet:
            spoilt = Packet(packet.header, b"\xff" * len(packet.body)) if packet.body else packet
            reply: Packet = handler(spoilt, config)
            seen.append(str(reply.header.get("reason")))
            return reply

        return answer

    parts = joined(made, hub_of(made, tmp_path, wrap))
    with refuses(Exception, "clients answered"):
        played(made, parts)
    assert "holds NaN or infinity in params." in seen[-1]
    assert "the model was broken before it came" in seen[-1]


def work(store: DeviceStore, run: str, round: int, kept: int = 0, *, ends: bool = True) -> None:
    request_id = RequestId(run, 0, round, 0, client=3)
    with store.alone(run, 3) as own:
        assert own is not None
        with own.transaction() as memory:
            begin(memory, request_id)
        prune(store, run, 3)
        with own.transaction() as memory:
            keep(memory, request_id, {"n": torch.tensor(1.0)}, ("a",), kept)
        (own.folder / "egress.jsonl").write_text("row\n")
    if ends:
        end(store, run, 3)


def test_a_run_that_has_not_ended_goes_on_after_many_others_and_their_number_is_bounded(tmp_path: Path) -> None:
    """As a job that was paused, or in whose turn a device was away."""
    store = DeviceStore(tmp_path)
    work(store, "paused", 1, ends=False)
    for number in range(KEPT_RUNS + 2):
        work(store, f"other{number}", 1)
    work(store, "paused", 2)
    assert world.kept_states(tmp_path, "paused", 3)
    for number in range(KEPT_UNENDED + 2):
        work(store, f"endless{number}", 1, ends=False)
    left = [path.parents[1].name for path in tmp_path.rglob("state-*")]
    assert len(left) == KEPT_UNENDED + 1, "and the one that is at work"


def test_states_of_old_runs_are_deleted_and_their_ledgers_kept(tmp_path: Path) -> None:
    store, names = DeviceStore(tmp_path), [f"run{n}" for n in range(5)]
    for run in names:
        work(store, run, 1)
    assert [run for run in names if world.kept_states(tmp_path, run, 3)] == names[1:]
    work(store, "run4", 2)
    assert [run for run in names if world.kept_states(tmp_path, run, 3)] == names[2:]
    assert {path.parents[1].name for path in tmp_path.rglob("state-*")} == {*names[2:]}, "their files are gone, too"
    assert all((tmp_path / run / "client-3" / "egress.jsonl").read_text() == "row\n" for run in names)
    with refuses(BadReply, "deleted"):
        work(store, "run0", 2)


def test_numbers_of_a_request_that_no_file_can_hold_are_refused() -> None:
    """A device writes them to its store, which holds integers of 64 bits."""
    header = {"run": "run", "session": 1, "round": 1, "request": 0, "client": 0}
    for name in ("session", "round", "request", "client"):
        assert RequestId.read({"request_id": header | {name: 2**63 - 1}})
        for number in (2**63, 10**400, -1):
            with refuses(BadReply, "request id"):
                RequestId.read({"request_id": header | {name: number}})


def test_only_the_devices_user_can_read_its_state_folder_and_only_the_servers_its_logs(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    devices.serve(tmp_path / "run")
    for client in range(3):
        assert stat.S_IMODE(devices.places[client].stat().st_mode) == 0o700, "the copy of the data"
        state = devices.places[client] / "polyfed-state"
        found = [state, *state.rglob("*")]
        assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o700}
        assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o600}
    kept = [*(tmp_path / "run").glob("audit*"), tmp_path / "run" / ".clients.json"]
    assert len(kept) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


def test_a_servers_words_neither_begin_a_line_of_a_devices_log_nor_steer_its_terminal(
    tmp_path: Path, capfd: Any
) -> None:
    log("the message asks for the task 'x\npolyfed: all is well\x1b[2J\u202e'\r\nTraceback")
    told = capfd.readouterr().err
    assert re.fullmatch(r"[0-9T:.Z-]+ INFO polyfed: the message asks .*Traceback\n", told), "one line, with its time"
    assert "\x1b" not in told
    assert "\u202e" not in told


DEEP = "[" * 100_000


@pytest.mark.parametrize("where", [MEMBERS, HEAD, "notes.json"])
def test_state_that_is_nested_too_deeply_ends_with_a_sentence(where: str, tmp_path: Path) -> None:
    (tmp_path / where).write_text(DEEP)
    read = {
        MEMBERS: lambda: Membership(tmp_path),
        HEAD: lambda: head_of(tmp_path),
        "notes.json": lambda: read_notes(tmp_path / "notes.json", int),
    }[where]
    with refuses(CheckpointError, "nested"):
        read()


def test_only_the_devices_user_can_read_its_state(tmp_path: Path) -> None:
    made = replace(recipe(1), algorithm=world.algorithm("scaffold", selector=Uniform(participation=1.0)))
    played(made, joined(made, hub_of(made, tmp_path)))
    found = [*(tmp_path / "run").rglob("*")]
    assert any(path.suffix == ".safetensors" for path in found)
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o600}


HUGE = [{"a": [2**40]}, {"a": [2**12] * 3}, {"a": [1] * 9}, {"a": []}, {f"m{number}": [1] for number in range(1001)}]
MALFORMED = [{"a": 5}, {"a": None}, {"a": "12"}, {"a": [0]}, {"a": [True]}, {"a": {"x": 1}}]


@pytest.mark.parametrize("shapes", [*MALFORMED, *HUGE])
def test_facts_of_a_hostile_server_that_are_no_shapes_are_named_as_such(shapes: Any) -> None:
    with refuses(BadReply, "carries no facts"):
        Facts.read({"facts": {"shapes": shapes, "num_classes": 2, "frozen": "", "standardise": [], "columns": {}}})


@pytest.mark.parametrize("classes", [0, -1, 10**6, 10**9, 2.0, "2"])
def test_a_hostile_server_cannot_make_a_device_build_a_model_of_any_number_of_classes(classes: Any) -> None:
    facts = {"shapes": {"a": [3]}, "num_classes": 2, "frozen": "", "standardise": [], "columns": {}}
    assert Facts.read({"facts": facts}).num_classes == 2
    with refuses(BadReply, "carries no facts"):
        Facts.read({"facts": facts | {"num_classes": classes}})
