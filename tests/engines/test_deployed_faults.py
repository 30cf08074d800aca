"""What the two sides of the wire do with a bad message, a bad client and an interrupted run; no processes needed."""

import json
import resource
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import world
from engines.direct import Hub, HubTransport, hub_of, joined, played
from engines.misdeeds import boxed, counting, not_a_number, renamed, reshaped, with_header
from polyfed.core.errors import EgressError, RecipeError, TooFewReplies
from polyfed.deploy.device.agent import LOST
from polyfed.deploy.device.memory.store import Memory
from polyfed.deploy.device.runtime import book
from polyfed.deploy.handlers import Simulated
from polyfed.engines.protocol import FAILED, RequestId, reason
from polyfed.engines.remote import Remote
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.settings import DeploymentSpec, EngineSpec
from polyfed.experiment.running import checkpoint
from polyfed.federation.wire.wire_format import Packet
from polyfed.selection import Uniform
from polyfed.transport.queue import Waiting
from refusals import refuses

VICTIM = 2


def recipe(name: str = "fedavg", rounds: int = 2, min_replies: int = 1, **deployment: Any) -> Recipe:
    """All six clients in every round, so that the victim is always asked."""
    options = {"selector": Uniform(participation=1.0)}
    made = world.recipe(world.algorithm(name, **options), rounds=rounds)
    return replace(
        made, engine=EngineSpec(name="flower", min_replies=min_replies), deployment=DeploymentSpec(**deployment)
    )


def hurt(change: Callable[[Packet, Packet], Packet]) -> Callable[[Any], Any]:
    """A handler whose victim answers `change(ask, reply)` in every second round."""

    def wrap(handler: Any) -> Any:
        def answer(packet: Packet, config: Mapping[str, Any]) -> Packet:
            reply: Packet = handler(packet, config)
            request_id = packet.header.get("request_id")
            victim = request_id is not None and request_id["client"] == VICTIM and request_id["round"] == 2
            return change(packet, reply) if victim else reply

        return answer

    return wrap


BAD = {
    "NaN": (not_a_number, "is not finite"),
    "wrong shape": (reshaped, "expected torch.float32"),
    "no number": (boxed, "loss has the shape (1, 1), expected one number"),
    "negative rows": (counting(-200), "num_rows must be 0 or more"),
    "unknown name": (renamed, "the model does not have"),
    "too large": (lambda request, reply: Packet(reply.header, bytes(3 * 2**20)), "is too large"),
    "too short": (lambda request, reply: Packet(reply.header, reply.body[:-8]), "runs past the end"),
    "replayed": (
        lambda request, reply: with_header(reply, request_id=reply.header["request_id"] | {"round": 1}),
        "another question",
    ),
    "another client's": (
        lambda request, reply: with_header(reply, request_id=reply.header["request_id"] | {"client": 0}),
        "another question",
    ),
    "no header": (lambda request, reply: Packet({}), "no request id"),
    "other kinds": (lambda request, reply: with_header(reply, kinds={"params": "statistic"}), "declares other kinds"),
    "another message": (lambda request, reply: with_header(reply, message="OwnScore"), "expected Update"),
    "many tensors": (
        lambda request, reply: with_header(reply, tensors=[["params", f"a.{n}", "bool", [0]] for n in range(39_990)]),
        "too many tensors: 39990, allowed are ",
    ),
    "a crash": (lambda request, reply: 1 // 0, "was killed twice"),
}


@pytest.mark.parametrize("rows", [10**9, 1])
def test_a_client_weighs_what_it_enrolled_with_whatever_it_says_later(rows: int, tmp_path: Path) -> None:
    made = recipe()
    honest = joined(made, hub_of(made, tmp_path / "honest"))
    lying = joined(made, hub_of(made, tmp_path / "lying", hurt(counting(rows))))
    theirs, ours = played(made, honest)[0], played(made, lying)[0]
    assert all(torch.equal(ours.params[name], theirs.params[name]) for name in theirs.params)


class Crashing(Hub):
    """What a device answers if the process of a task dies twice; see `tests/attacks/test_lost_tasks.py`."""

    def answer(self, found: Waiting) -> Packet:
        try:
            return super().answer(found)
        except ArithmeticError:
            return reason(FAILED, RequestId.read(self.packet(found).header), f"client {VICTIM}: {LOST}")


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_reply_is_dropped_with_a_reason_and_the_round_goes_on(fault: str, tmp_path: Path) -> None:
    change, words = BAD[fault]
    made = recipe(message_megabytes=1)
    parts = joined(made, Crashing(hurt(change)(Simulated(made, tmp_path / "hurt")), 6))
    told: dict[int, str] = {}
    parts.fed.emit = lambda event, **facts: told.update({facts["client"]: facts["reason"]})
    state, _ = played(made, parts)
    assert list(told) == [VICTIM]
    assert words in told[VICTIM]
    rounds = {(row["round"], row["client"]) for row in parts.ledger.rows() if row["destination"] == "server"}
    unusable = fault in (
        "NaN",
        "wrong shape",
        "no number",
        "negative rows",
        "unknown name",
    )  # well-formed on the wire, so it did cross
    assert ((2, VICTIM) in rounds) == unusable
    assert all(bool(value.isfinite().all()) for value in state.params.values())


def test_a_client_that_is_dropped_leaves_the_others_as_if_it_had_not_been_asked(tmp_path: Path) -> None:
    made = recipe()
    silent = joined(made, hub_of(made, tmp_path / "a", hurt(lambda request, reply: Packet({}))))
    absent = joined(made, hub_of(made, tmp_path / "b", hurt(lambda request, reply: not_a_number(request, reply))))
    assert checkpoint.digest(played(made, silent)[0]) == checkpoint.digest(played(made, absent)[0])


def refusing(handler: Simulated) -> Simulated:
    """The victim's own policy keeps modality `b` at home."""
    own = handler.recipe.egress | {"b": {"server": []}, "shared": {"server": ["parameters", "statistic"]}}
    strict = replace(handler, recipe=replace(handler.recipe, egress=own), token=handler.token + "strict")

    def answer(packet: Packet, config: Mapping[str, Any]) -> Packet:
        return (strict if config["partition-id"] == VICTIM else handler)(packet, config)

    return answer  # type: ignore[return-value]


def test_a_clients_own_policy_refuses_and_no_byte_of_the_reply_leaves(tmp_path: Path) -> None:
    made = recipe(on_refusal="drop")
    seen: list[Packet] = []

    def wrap(handler: Any) -> Any:
        inner = refusing(handler)

        def answer(packet: Packet, config: Mapping[str, Any]) -> Packet:
            reply = inner(packet, config)
            if config["partition-id"] == VICTIM and "request_id" in packet.header:
                seen.append(reply)
            return reply

        return answer

    parts = joined(made, hub_of(made, tmp_path, wrap))
    told: dict[int, str] = {}
    parts.fed.emit = lambda event, **facts: told.update({facts["client"]: facts["reason"]})
    played(made, parts)
    assert seen
    assert all(reply.header["verdict"] == "refused" and reply.body == b"" for reply in seen)
    assert f"client {VICTIM} refused to send Update.params: parameters of b" in told[VICTIM]
    assert "[egress.b] server = " in told[VICTIM], "the line that would allow it"
    own = tmp_path / "run" / f"client-{VICTIM}" / "egress.jsonl"
    verdicts = {(r["destination"], r["verdict"]) for r in map(json.loads, own.read_text().splitlines())}
    assert verdicts == {("client", "allowed"), ("server", "refused")}
    assert not any(r["client"] == VICTIM and r["destination"] == "server" for r in parts.ledger.rows())


def test_a_refusal_ends_the_run_with_the_clients_words_where_the_recipe_says_stop(tmp_path: Path) -> None:
    made = recipe(on_refusal="stop")
    parts = joined(made, hub_of(made, tmp_path, refusing))
    with refuses(EgressError, "refused to send") as caught:
        played(made, parts)
    assert caught.value.exit_code == 3


def test_too_few_replies_end_the_run(tmp_path: Path) -> None:
    made = recipe(min_replies=6)
    parts = joined(made, hub_of(made, tmp_path, hurt(lambda request, reply: Packet({}))))
    with refuses(TooFewReplies, "5 of 6"):
        played(made, parts)


def test_messages_within_a_silo_are_refused_unless_recipe_and_client_let_the_server_see_them(tmp_path: Path) -> None:
    from engines.test_behind_the_wire import small

    made = small("vfl")
    with refuses(RecipeError, "deployment.relay: refused"):
        replace(made, deployment=replace(made.deployment, relay="refused"))
    local = replace(made.engine, name="sequential")
    secret = replace(made, engine=local, deployment=replace(made.deployment, relay="refused"))
    # the server's recipe says so, the clients' own does not
    parts = joined(made, hub_of(secret, tmp_path))
    with refuses(EgressError, "for the silo"):
        played(made, parts)
    # nor does it help to call the reply one for the server: what a task is for, its own code says

    def relabelled(handler: Any) -> Any:
        return lambda packet, *rest: handler(Packet(packet.header | {"scope": "server"}, packet.body), *rest)

    with refuses(EgressError, "for the silo"):
        played(made, joined(made, hub_of(secret, tmp_path / "relabelled", relabelled)))


def test_a_server_that_died_after_clients_had_answered_gets_the_same_answers_again(tmp_path: Path) -> None:
    made = recipe("scaffold", rounds=3)  # clients keep control variates: doing a round twice must not count twice
    whole, _ = played(made, joined(made, hub_of(made, tmp_path / "whole")))
    hub = hub_of(made, tmp_path / "hurt")
    first = joined(made, hub)
    half, _ = played(replace(made, rounds=1), replace_rounds(first, made))
    first.fed.begin(2)
    made.algorithm.round(half, first.fed)  # everybody answered round 2; then the server was gone
    again = joined(made, hub)
    assert isinstance(again.engine, Remote)
    again.engine.terms = replace(again.engine.terms, session=again.engine.terms.session + 10**6)
    again.engine.saved(1)
    state = half
    for round in (2, 3):
        again.fed.begin(round)
        state = made.algorithm.round(state, again.fed)
    assert checkpoint.digest(state) == checkpoint.digest(whole)


def replace_rounds(parts: Any, made: Recipe) -> Any:
    parts.fed.rounds = made.rounds
    return parts


class Noting(Hub):
    """Notes the requests that it carries, with their bodies."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sent: list[tuple[Packet, int]] = []

    def packet(self, found: Waiting) -> Packet:
        packet = super().packet(found)
        if "request_id" in packet.header:
            self.sent.append((packet, self.names.index(found.device)))
        return packet

    def again(self, place: int) -> Packet:
        """The answer of the device if a request is delivered once more."""
        packet, number = self.sent[place]
        return self.handler(packet, {"partition-id": number})


def test_an_old_ask_is_stale_at_the_client_and_changes_nothing_there(tmp_path: Path) -> None:
    made = recipe("scaffold")
    hub = Noting(Simulated(made, tmp_path), 6)
    played(made, joined(made, hub))
    places = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("state-*"))
    reply = hub.again(0)
    assert reply.header["verdict"] == "failed"
    assert "stale" in reply.header["reason"]
    assert places == sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("state-*"))


def test_an_ask_delivered_twice_is_answered_twice_the_same(tmp_path: Path) -> None:
    made = recipe("scaffold", rounds=1)
    hub = Noting(Simulated(made, tmp_path), 6)
    played(made, joined(made, hub))
    first, second = (hub.again(-1) for _ in range(2))
    assert first == second


def test_a_full_disk_at_a_client_drops_it_and_spoils_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    made = recipe("scaffold", rounds=3)
    parts = joined(made, hub_of(made, tmp_path))
    told: list[tuple[int, str]] = []
    parts.fed.emit = lambda event, **facts: told.append((facts["round"], facts["reason"]))
    write = Memory.write

    def full(memory: Memory, kind: str, place: tuple[int, int], content: bytes) -> str:
        if place[0] == 2 and memory.client == VICTIM:
            raise OSError(28, "No space left on device")
        return write(memory, kind, place, content)

    monkeypatch.setattr(Memory, "write", full)
    played(made, parts)
    assert [round for round, _ in told] == [2]
    assert "No space left on device" in told[0][1]
    kept = world.kept_states(tmp_path, "run", VICTIM)
    assert [*kept][-2:] == [(1, 0), (3, 0)], "round 3 went on from the state of round 1"


def test_half_a_row_never_stays_in_a_clients_ledger(tmp_path: Path) -> None:
    path = tmp_path / "egress.jsonl"
    book(path, ["first"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # stands for a disk on which only a part finds room
    try:
        with refuses(OSError, "too large"):
            book(path, ["second", "x" * 8192])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    book(path, ["third"])
    assert path.read_text() == "first\nthird\n"


@pytest.mark.filterwarnings("ignore:.*gave no usable reply in any round")
@pytest.mark.filterwarnings("ignore:no client has training rows")
def test_a_client_that_changes_its_modalities_is_left_out(tmp_path: Path) -> None:
    made = recipe()
    other = replace(made, clients=replace(made.clients, holdings=[["a"]]))

    def wrap(handler: Any) -> Any:
        changed = Simulated(other, tmp_path)

        def answer(packet: Packet, config: Mapping[str, Any]) -> Packet:
            request_id = packet.header.get("request_id", {"round": 0, "client": None})
            moved = request_id["round"] == 2 and request_id["client"] == VICTIM
            return (changed if moved else handler)(packet, config)

        return answer

    parts = joined(made, hub_of(made, tmp_path, wrap))
    told: dict[int, str] = {}
    parts.fed.emit = lambda event, **facts: told.update({facts["client"]: facts["reason"]})
    played(made, parts)
    assert told == {
        VICTIM: f"the message is for modalities ['a', 'b'], client {VICTIM} has ['a'] now; start the server again"
    }


def test_two_nodes_with_one_number_are_told_apart(tmp_path: Path) -> None:
    made = recipe()

    def wrap(handler: Any) -> Any:
        return lambda packet, config: handler(packet, dict(config) | {"partition-id": config["partition-id"] // 2})

    answers = HubTransport(hub_of(made, tmp_path, wrap)).enrol(6, 5)
    verdicts = [answer.header["verdict"] for answer in answers]
    assert verdicts.count("enrolled") == 3
    assert verdicts.count("failed") == 3


class Slow(Hub):
    """One device never answers a request."""

    def next_for(self, name: str) -> Waiting | None:
        found = super().next_for(name)
        asked = found is not None and "request_id" in found.header
        return None if asked and name == self.names[VICTIM] else found


def test_a_straggler_is_cut_at_the_deadline(tmp_path: Path) -> None:
    made = recipe(rounds=1, reply_seconds=3.0)
    parts = joined(made, Slow(Simulated(made, tmp_path), 6))
    told: dict[int, str] = {}
    parts.fed.emit = lambda event, **facts: told.update({facts["client"]: facts["reason"]})
    played(made, parts)
    assert told == {VICTIM: "late: no answer within 3 seconds"}


class Leaving(Hub):
    """A device is gone when it is asked for the first time, and back a moment later."""

    gone = 0

    def work(self) -> None:
        asked = self.queue.next_for(self.names[VICTIM])
        self.absent = set()
        if asked is not None and "request_id" in asked.header and not self.gone:
            self.gone, self.absent = 1, {self.names[VICTIM]}
        super().work()


def test_a_request_waits_for_a_device_that_is_gone_for_a_moment(tmp_path: Path) -> None:
    made = recipe("scaffold")
    whole, rows = played(made, joined(made, hub_of(made, tmp_path / "whole")))
    hub = Leaving(Simulated(made, tmp_path / "leaving"), 6)
    state, again = played(made, joined(made, hub))
    assert hub.gone == 1
    assert checkpoint.digest(state) == checkpoint.digest(whole)
    assert rows == again


def test_bytes_on_the_wire_are_the_ledgers_and_a_header(tmp_path: Path) -> None:
    made = recipe()
    hub = hub_of(made, tmp_path)
    parts = joined(made, hub)
    before = hub.bytes_up
    played(made, parts)
    booked = parts.ledger.bytes_up
    messages = 6 * made.rounds
    assert booked < hub.bytes_up - before < booked + 2500 * messages
