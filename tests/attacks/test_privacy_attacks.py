"""Attacks on [privacy] and [secure_aggregation]: promises of the two sections that an attacker can break."""

import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import world
from federation.test_secure_aggregation import captured, secured, small, updates
from polyfed.algorithms.averaging import Update
from polyfed.algorithms.base import Broadcast
from polyfed.core import privacy_noise
from polyfed.core.errors import CheckpointError, EgressError, RecipeError
from polyfed.core.privacy_noise import Clip
from polyfed.core.request import Request
from polyfed.core.system.files import read_notes
from polyfed.core.tree import digest, nested
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.deploy.device.memory.repeated_requests import admit_secrets
from polyfed.deploy.device.memory.store import DeviceStore
from polyfed.deploy.handlers import runtime_of
from polyfed.engines import Sequential
from polyfed.engines.protocol import REPLY, Facts, RequestId, versions
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.settings import CheckpointSpec
from polyfed.experiment.results.records import Records
from polyfed.experiment.running.assembly import assemble
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.loop import execute
from polyfed.federation.private_mean import PrivateMean
from polyfed.federation.replies import Replies, ReplyStack
from polyfed.federation.secure_aggregation.state import SECRETS
from polyfed.federation.wire.wire_format import Packet, decode, encode
from polyfed.privacy.differential.accounting import Accounting
from polyfed.privacy.differential.guarantee import Guarantee
from polyfed.privacy.differential.mechanism import Mechanism
from privacy.test_private_runs import private
from refusals import refuses

# differential privacy

BLOCKS = tuple(f"m{i}" for i in range(100))


def test_the_epsilon_of_one_block_holds_when_the_blocks_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per-block clipping. In round 2, ten clients copy into block m0 what round 1 told about all other blocks.

    Whoever sees only m0 then knows what the whole model told, and the epsilon of m0 alone is far smaller. In a real
    model, the gradient of one block depends on all others in the same way.
    """
    draws = torch.Generator().manual_seed(1)
    monkeypatch.setattr(
        privacy_noise,
        "discrete_gaussian",
        lambda base, name, shape, on: privacy_noise.STEPS * torch.randn(shape, generator=draws),
    )
    trials, copying = 60, 10
    made = private("central", clip="per-block", delta=1e-3, noise_multiplier=0.2)
    clip = Clip.of(1.0, BLOCKS, by_block=True)
    limit, ones = clip.limit("m0"), dict.fromkeys(BLOCKS, 1.0)
    mechanism = Mechanism("client", True, clip, 0.2, {"update": ("params",)}, {}, ones)
    assert made.privacy is not None
    guarantee = Guarantee(made.privacy, Accounting("rdp", 1e-3), mechanism, [], 2, 2)

    def merged(sent: Any, changes: Any) -> Any:
        trained = {f"{block}.w": sent[f"{block}.w"] + change for block, change in changes.items()}
        none = torch.zeros(copying)
        part = ReplyStack(tuple(range(copying)), Update(trained, none, none))
        return PrivateMean(mechanism, 0).of(Replies([part]), "params", sent)

    def told(inside: bool) -> bool:
        sent = {f"{block}.w": torch.zeros(1) for block in BLOCKS}
        changes = {block: torch.zeros(copying, 1) for block in BLOCKS}
        if inside:
            for change in changes.values():
                change[0] = limit
        sent = merged(sent, changes)
        others = sum(float(sent[f"{block}.w"]) for block in BLOCKS[1:]) / math.sqrt(99)
        copies = {block: torch.zeros(copying, 1) for block in BLOCKS}
        copies["m0"][1:] = limit if others > 0.5 * limit * math.sqrt(99) else -limit
        return float(merged(sent, copies)["m0.w"]) > 0

    wrong = sum(not told(inside=True) for _ in range(trials)) + sum(told(inside=False) for _ in range(trials))
    rate = (wrong + 4) / (2 * trials)  # a cautious upper bound
    shown = math.log((1 - rate - 1e-3) / rate)
    assert shown <= guarantee.epsilon(2, "m0"), "an attack that sees m0 alone does better than its epsilon allows"


def test_a_row_that_several_clients_hold_is_counted_for_each_of_them() -> None:
    """The devices of a silo hold the same rows, so every row is used by four clients in every round."""
    silos = ClientsSpec(partition="silos", silos=3, holdings=[["a"], ["b"], ["a", "b"], ["a"]])
    try:
        parts = assemble(private("example", delta=1e-4, clients=silos, rounds=1))
    except RecipeError:
        return
    holders = sum(0 in rows.tolist() for rows in parts.population.train)
    assert holders == 4
    assert parts.guarantee is not None
    epochs = parts.algorithm.train.epochs
    assert parts.guarantee.epsilon(1) >= Accounting("rdp", 1e-4, uses=epochs * holders).epsilon(0.9, 1)


def test_a_device_with_local_noise_answers_no_more_often_than_epsilon_counts(tmp_path: Path) -> None:
    """The recipe has one round. The server asks sixty times, and the mean of the answers has an eighth of the noise."""
    parts = assemble(private("local", rounds=1, noise_multiplier=2.0))
    columns, owned = parts.population.columns, parts.fed.clients.owned(0)
    facts = Facts({n: c.shape for n, c in columns.modalities.items()}, columns.num_classes, digest(parts.model.frozen))
    device = runtime_of(parts.recipe, parts.population, facts, parts.policy, tmp_path, relay=False)
    params = {n: v for n, v in parts.initial.items() if n.partition(".")[0] in (*owned, "shared")}
    sent = encode(Broadcast(params))

    def asked(round: int, number: int) -> Packet:
        about = {"task": "update", "seed": 0, "rounds": 1, "turn": 0, "modalities": list(owned), "kept": 0}
        header = RequestId("run", 1, round, number, 0).header(want="ask", facts=asdict(facts), **versions(), **about)
        return device.answer(Packet(header | sent.header, sent.body), 0)

    answers = [asked(1, number) for number in range(60)]
    assert asked(2, 0).header["verdict"] != REPLY, "the recipe has one round"
    fine = [decode(a, Update, limit=2**24).params for a in answers if a.header["verdict"] == REPLY]
    mean = torch.cat([torch.stack([one[n] - params[n] for one in fine]).mean(0).flatten() for n in params])
    assert float(mean.std()) > 0.5 * 2.0 * 0.5, "averaging the answers removes the noise"


def test_a_deployed_run_that_repeats_rounds_counts_them(tmp_path: Path) -> None:
    """A server stops after round 2 of 3 without a checkpoint. The resumed run draws new noise for rounds 1 and 2.

    Five noisy means were released, and result.json states the epsilon of three.
    """
    made = private("central", rounds=3, checkpoint=CheckpointSpec(every=3))

    def stop(event: str, **facts: Any) -> None:
        if event == "round-started" and facts["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(made, Records(tmp_path / "run", resume=False), Emitter([stop]), deployed=True)
    done = execute(made, Records(tmp_path / "run", resume=True), Emitter([]), deployed=True)
    accounting = Accounting("rdp", 0.01)
    assert done.result["privacy"]["epsilon"] >= accounting.epsilon(0.7, 5)


def test_a_deployed_run_that_is_interrupted_in_its_first_round_counts_this_round_twice(tmp_path: Path) -> None:
    """The server dies after it has sent the requests of round 1, so that no row of the round is in the folder."""
    made, accounting = private("central", rounds=2), Accounting("rdp", 0.01)

    def dying(*args: Any, **options: Any) -> Any:
        engine = Sequential(*args, **options)
        answer = engine.answer

        def sent(request: Any, clients: Any, send: Any) -> Any:
            answer(request, clients, send)
            raise KeyboardInterrupt

        engine.answer = sent
        return engine

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            execute(made, Records(tmp_path / "run", resume=True), Emitter([]), engine=dying, deployed=True)
    done = execute(made, Records(tmp_path / "run", resume=True), Emitter([]), deployed=True)
    assert done.result["privacy"]["epsilon"] == accounting.epsilon(0.7, 4)
    again = execute(made, Records(tmp_path / "run", resume=True), Emitter([]), deployed=True)
    assert again.result["privacy"]["epsilon"] == accounting.epsilon(0.7, 4), "no round was interrupted this time"


def test_a_damaged_count_of_repeated_rounds_is_named_and_not_taken_for_none(tmp_path: Path) -> None:
    path = tmp_path / "repeated-rounds.json"
    for text in ("{", "[]", '{"rounds": "many"}', '{"rounds": null}'):
        path.write_text(text)
        with refuses(CheckpointError, "repeated-rounds.json is damaged"):
            read_notes(path, int)
    path.write_text('{"rounds": 2}')
    assert read_notes(path, int) == {"rounds": 2}


def test_amplification_needs_clients_without_memory() -> None:
    """A client with a local state shows later whether it was in an earlier cohort, so this cohort is no secret.

    With two clients and cohorts of one, the client of round 2 tells who took part in round 1.
    """
    made = private("central", amplification=True)
    memory = world.algorithm("moon", aggregation="uniform")
    with refuses(RecipeError, "privacy.amplification: later"):
        assemble(replace(made, algorithm=memory))


def test_scores_on_the_own_test_rows_of_clients_are_named_as_unprotected() -> None:
    """Without a global test set, the server tests on the clients' own test rows, and result.json has the scores."""
    clients = ClientsSpec(partition="iid", num=6, personal_test=0.3)
    data = Toy(rows=330, classes=4, seed=3, test_share=0.0)
    quiet = {"evaluation": Evaluation(every=1, personal=False)}
    try:
        parts = assemble(private("central", data=data, clients=clients, options=quiet))
    except RecipeError:
        return
    own = parts.population.test
    assert own is not None
    assert not set(parts.population.test_rows.tolist()) & set(own.rows.tolist())


def test_private_blocks_train_under_clipping_by_block() -> None:
    """Clients clip their private blocks too, and these have no limit: every client that has one fails in each round."""
    parts = assemble(private("example", clip="per-block", rounds=1, options={"private": ("a",)}))
    failed: list[str] = []
    parts.engine.emit = lambda event, **facts: failed.append(facts["reason"]) if event == "client-failed" else None
    world.through(parts, 1)
    assert not failed


# secure aggregation


def test_two_requests_of_a_round_have_different_masks_in_a_simulation_too() -> None:
    """The seeds follow from the round, not from the request. Equal masks cancel in the difference of two replies."""
    parts = assemble(secured(small()))
    seen, method = captured(parts), parts.algorithm
    updates(parts)
    state: Any = method.init(parts.fed, parts.initial)
    parts.fed.ask(method.update, list(range(10)), Broadcast(state.params))  # type: ignore[attr-defined]
    keys = [reply.keys for task, client, reply in seen if task.endswith("advertise") and client == 0]  # type: ignore[attr-defined]
    assert len(keys) == 2
    assert not torch.equal(*keys)


def test_a_repeated_round_does_not_tell_the_update_of_the_client_that_was_lost(tmp_path: Path) -> None:
    """A server resumes and repeats a round after it has read its sum; another client is lost this time.

    All other clients would send the same update as before, so the difference of the two sums would be the update of the
    lost client. So a device does not begin a request again for which it has revealed shares.
    """
    secure = assemble(secured(small())).algorithm.secure_aggregation
    assert secure is not None

    def use(step: str, round: int, number: int, secrets: int | None) -> None:
        request = Request(getattr(secure, step), f"secure_aggregation.{step}", round, 100, number, 0, 0)
        local = {} if secrets is None else nested(SECRETS, {"seeds": torch.tensor([secrets])})
        with DeviceStore(tmp_path).transaction("run", 0) as memory:
            admit_secrets(memory, request, local, Packet({}))

    use("advertise", 1, 0, None)
    use("unmask", 1, 4, 7)
    use("advertise", 1, 5, None)  # the next request of the round
    use("advertise", 2, 0, None)
    for number in (0, 4):
        with refuses(EgressError, "revealed"):
            use("advertise", 1, number, None)


def test_a_device_remembers_all_secrets_that_it_can_still_be_asked_for(tmp_path: Path) -> None:
    """A server keeps a masked state as the last one of a round, lets the device use other secrets, and comes back.

    The store of used secrets forgets the oldest, so the device gives the second kind of share.
    """
    parts = assemble(secured(small()))
    secure = parts.algorithm.secure_aggregation
    assert secure is not None
    request = Request(secure.unmask, "secure_aggregation.unmask", 2, 100, 0, 0, 0)

    def use(secret: int, body: bytes) -> None:
        with DeviceStore(tmp_path).transaction("run", 0) as memory:
            admit_secrets(memory, request, nested(SECRETS, {"seeds": torch.tensor([secret])}), Packet({}, body))

    use(0, b"survivors: everyone")
    with pytest.raises(EgressError):
        use(0, b"dropped: client 3")
    for other in range(1, 300):
        use(other, b"")
    with pytest.raises(EgressError):
        use(0, b"dropped: client 3")


def test_the_reason_of_a_refusal_holds_no_value_of_the_client() -> None:
    """A client whose value is beyond `range` names the largest value, and the reason goes to the server unmasked."""
    parts = assemble(secured(small(), range=0.25))
    parts.fed.min_replies = 0
    reasons = " ".join(updates(parts).missing.values())
    assert "Refusal" in reasons
    assert not re.search(r"holds -?\d", reasons), reasons[:100]
