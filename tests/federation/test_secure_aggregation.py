"""Secure aggregation: sums equal plain ones, survive drop-outs, and a client refuses what would reveal its reply."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import polyfed
import world
from polyfed.algorithms.averaging import Update
from polyfed.cli import main
from polyfed.core.errors import RecipeError, TooFewReplies
from polyfed.core.masked import masked_class
from polyfed.core.messages import Message, tensors
from polyfed.core.request import Request, Send
from polyfed.core.tree import SHARED, Tree, block_of, under
from polyfed.data import ClientsSpec
from polyfed.deploy.device.recipe_check import inspect
from polyfed.engines import in_process
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import Recipe, load_recipe, parse_recipe
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.attack import Attack
from polyfed.federation.replies import Answer, Replies, stacked
from polyfed.federation.secure_aggregation import messages as sent
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.federation.secure_aggregation.state import SECRETS, Refusal, cohort_in, seeds_of
from polyfed.federation.secure_aggregation.sums import SummedReplies
from polyfed.privacy import masks
from polyfed.privacy.fixed_point import Scale
from polyfed.selection import Uniform
from refusals import refuses

TEN = ClientsSpec(partition="dirichlet", num=10, alpha=5.0, holdings=[["a", "b"], ["a"], ["a", "b"], ["b"]])


def secured(made: Recipe, **options: Any) -> Recipe:
    return replace(made, algorithm=replace(made.algorithm, secure_aggregation=SecureAggregation(**options)))


def small(name: str = "fedavg", engine: str = "sequential", **options: Any) -> Recipe:
    everyone = Uniform(participation=1.0)
    return world.recipe(world.algorithm(name, selector=everyone, **options), engine, clients=TEN, rounds=1)


def updates(parts: Assembly, clients: Sequence[int] = range(10)) -> Replies:
    """The replies of these clients in round 1, or their sum."""
    parts.fed.begin(1)
    method: Any = parts.algorithm
    return parts.fed.ask(
        method.update, list(clients), method.outgoing(method.init(parts.fed, parts.initial), [], parts.fed)
    )


def furthest(summed: Replies, single: Replies, weights: dict[int, float], name: str = "params") -> float:
    """The largest difference of a mean, in units of the rounding error that the module `fixed_point` states.

    `weights` are those of the cohort that shared keys, which may be more clients than those in the sum.
    """
    assert isinstance(summed, SummedReplies)
    ours, plain = summed.mean(name, weights), single.mean(name, weights)
    assert ours.keys() == plain.keys()
    assert {key: value.dtype for key, value in ours.items()} == {key: value.dtype for key, value in plain.items()}
    scale = Scale.fitting(32, 64.0, (int(sum(weights.values())) - 1).bit_length())
    worst = 0.0
    for key, value in ours.items():
        inside = [client for client in single if key in getattr(single[client], name)]
        step = scale.error(len(inside)) / sum(weights[client] for client in inside)
        rounding = 4 * torch.finfo(value.dtype).eps * float(plain[key].abs().max())  # of the plain mean in float32
        worst = max(worst, float((value - plain[key]).abs().max()) / (step + rounding))
    return worst


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("aggregation", ["weighted", "uniform"])
def test_the_mean_of_the_masked_replies_equals_the_plain_one_to_the_stated_error(engine: str, aggregation: str) -> None:
    made = small(engine=engine, aggregation=aggregation)
    plain, secure = assemble(made), assemble(secured(made))
    single, summed = updates(plain), updates(secure)
    weights = dict(plain.algorithm.weights(single, plain.fed))  # type: ignore[attr-defined]
    assert list(summed) == list(single) == list(range(10))
    assert furthest(summed, single, weights) <= 1.0
    rows = plain.fed.clients.rows_of(single)
    assert summed.mean_number("loss", rows) == pytest.approx(single.mean_number("loss", rows), abs=1e-6)
    assert float(summed.total("num_rows")) == sum(rows.values()), "whole numbers are exact"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {"private": ("b",)}),
        ("fedprox", {"mu": 0.1}),
        ("scaffold", {}),
        ("moon", {"projection": 8}),
        ("fedpmr", {}),
        ("fedogm", {"scale_params": "all_weights"}),
        ("fedmsplit", {"mode": "block_mean"}),
        ("feddyn", {"alpha": 0.1}),
        ("fednova", {}),
        ("ditto", {}),
        ("apfl", {}),
        ("pfedme", {"lam": 5.0}),
        ("fedrep", {"private_epochs": 1}),
        ("lg-fedavg", {}),
        ("fedavg-ft", {}),
    ],
)
def test_every_method_that_reads_only_means_trains_the_same_model(name: str, options: dict[str, Any]) -> None:
    made = small(name, "vectorised", **options)
    _, plain, _ = world.played(made)
    _, secure, _ = world.played(secured(made))
    assert world.furthest(plain.params, secure.params) < 1e-4
    assert secure.train_loss == pytest.approx(plain.train_loss, rel=1e-5)


@pytest.mark.parametrize("step", ["share", "deliver", "update", "unmask"])
def test_the_sum_survives_that_three_of_ten_clients_drop_out(step: str) -> None:
    made = small()
    plain, secure = assemble(made), assemble(secured(made))
    lost = world.losing(secure, step, 1, 4, 8)
    summed = updates(secure)
    assert lost == [1, 4, 8]
    counted = [c for c in range(10) if c not in lost] if step != "unmask" else list(range(10))
    single = updates(plain, counted)
    assert list(summed) == counted, "a client whose masked reply arrived is in the sum"
    assert furthest(summed, single, dict(plain.fed.clients.rows_of(range(10)))) <= 1.0
    assert sorted(summed.missing) == [c for c in range(10) if c not in counted]


def test_the_sum_survives_drop_outs_in_two_steps_at_once() -> None:
    made = small()
    plain, secure = assemble(made), assemble(secured(made, threshold=0.55))
    world.losing(secure, "update", 0, 5)
    world.losing(secure, "unmask", 7)
    summed, counted = updates(secure), [1, 2, 3, 4, 6, 7, 8, 9]
    assert furthest(summed, updates(plain, counted), dict(plain.fed.clients.rows_of(range(10)))) <= 1.0


@pytest.mark.parametrize("step", ["advertise", "update", "unmask"])
def test_with_too_few_clients_left_nothing_is_summed(step: str) -> None:
    secure = assemble(secured(replace(small(), engine=replace(small().engine, min_replies=2))))
    world.losing(secure, step, *range(8) if step == "advertise" else range(5))
    told: list[str] = []
    secure.fed.emit = lambda name, **facts: told.append(facts.get("text", ""))
    with refuses(TooFewReplies, "lost"):
        updates(secure)
    assert any("secure aggregation was given up" in text for text in told)


def test_a_block_of_too_few_clients_of_the_cohort_is_left_out() -> None:
    secure, few = assemble(secured(small())), [0, 1, 2, 4, 5]
    holders = [c for c in few if "b" in secure.fed.clients.owned(c)]
    assert len(holders) == 3
    whole = updates(secure, few)
    assert {block_of(name) for name in whole.mean("params", secure.fed.clients.rows_of(whole))} == {"a", "b", SHARED}
    secure = assemble(secured(small(), min_clients=4))
    rest = updates(secure, few)
    assert {block_of(name) for name in rest.mean("params", secure.fed.clients.rows_of(rest))} == {"a", SHARED}
    sizes = {(row["field"], row["block"]) for row in secure.ledger.rows() if row["message"] == "MaskedUpdate"}
    assert ("params", "b") not in sizes, "the clients do not even send it"


def test_clients_that_drop_outs_leave_alone_with_a_block_are_left_out() -> None:
    clients = replace(TEN, holdings=[["a"], ["a"], ["a", "b"]])
    secure = assemble(secured(replace(small(), clients=clients)))
    assert [c for c in range(10) if "b" in secure.fed.clients.owned(c)] == [2, 5, 8]
    world.losing(secure, "update", 8)
    summed = updates(secure)
    assert list(summed) == [0, 1, 3, 4, 6, 7, 9]
    assert {block_of(name) for name in summed.mean("params", secure.fed.clients.rows_of(summed))} == {"a", SHARED}


def test_a_method_cannot_read_single_replies_of_a_sum() -> None:
    summed = updates(assemble(secured(small())))
    for read in (lambda: summed[0], lambda: summed.numbers("loss"), lambda: dict(summed.items())):
        with refuses(RecipeError, "method reads"):
            read()
    with refuses(RecipeError, "multiply"):
        summed.mean("params", {client: 1.0 for client in summed})


def test_two_runs_draw_the_same_secrets_in_a_simulation_and_a_device_draws_new_ones() -> None:
    def advertised(parts: Assembly) -> list[bytes]:
        parts.fed.begin(1)
        replies = parts.fed.ask(parts.algorithm.secure_aggregation.advertise, [0, 1], sent.Opening(torch.tensor(0)))  # type: ignore[union-attr]
        return [reply.keys.numpy().tobytes() for reply in replies.values()]

    first, again, device = (advertised(world.on_device(secured(small()), on_device=on)) for on in (False, False, True))
    assert first == again
    assert len({*first, *device}) == 4


# what crosses


def captured(parts: Assembly) -> list[tuple[str, int, Message]]:
    """Every reply that reaches the server, as (task, client, reply)."""
    found: list[tuple[str, int, Message]] = []
    answer = parts.engine.answer

    def watched(request: Request, clients: Sequence[int], send: Send) -> Answer:
        got = answer(request, clients, send)
        found.extend((request.name, c, reply) for part in got.parts for c, reply in Replies([part]).items())
        return got

    parts.engine.answer = watched  # type: ignore[method-assign]
    return found


def flat(reply: Message, *, first: str = "") -> Tensor:
    return torch.cat([v.flatten().double() for name, _, v in tensors(reply) if name == first or not first])


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_nothing_that_reaches_the_server_is_an_update(engine: str) -> None:
    made = replace(small(engine=engine), model=replace(small().model, embedding=64))
    plain, secure = assemble(made), assemble(secured(made))
    seen = captured(secure)
    single = updates(plain)
    updates(secure)
    assert {name for name, _, _ in seen} == {
        "update",
        *(f"secure_aggregation.{step}" for step in ("advertise", "share", "deliver", "unmask")),
    }
    for name, client, reply in seen:
        assert all(not value.is_floating_point() for *_, value in tensors(reply)), "only integers cross"
        if name != "update":
            continue
        assert type(reply) is masked_class(type(single[client]))
        hidden, open_ = flat(reply, first="params"), flat(single[client], first="params")
        num = len(open_)
        assert num > 1000
        correlation = float(torch.corrcoef(torch.stack([hidden, open_]))[0, 1])
        assert abs(correlation) < 4 / num**0.5, "four standard deviations of the correlation of independent numbers"
        chi_square(hidden)


def chi_square(values: Tensor) -> None:
    """The 256 values of each byte are equally frequent: chi-square with 255 degrees of freedom, 5 deviations."""
    bytes_ = np.frombuffer(values.to(torch.int32).numpy().tobytes(), np.uint8)
    expected = len(bytes_) / 256
    statistic = float(((np.bincount(bytes_, minlength=256) - expected) ** 2 / expected).sum())
    assert abs(statistic - 255) < 5 * (2 * 255) ** 0.5


def test_a_mask_hides_a_reply_of_zeros_as_well_as_any_other() -> None:
    """Without masks, the integers of a reply of zeros are zeros; with them, they pass the same test of uniformity."""
    cohort = Cohorted(4)
    cohort.deliver()
    reply = cohort.masked(0, {"a.w": torch.zeros(20_000)})
    chi_square(reply.params["a.w"])
    plain = torch.zeros(20_000)
    with pytest.raises(AssertionError):
        chi_square(plain)


def test_the_masks_of_all_clients_together_are_the_self_masks() -> None:
    """Pairwise masks cancel: the sum minus the self-masks is the sum of the replies."""
    cohort = Cohorted(5)
    cohort.deliver()
    values = [{"a.w": torch.full((3,), float(place))} for place in range(5)]
    total = sum(cohort.masked(place, tree).params["a.w"].numpy().view(np.uint32) for place, tree in enumerate(values))
    own = masks.mask(cohort.self_key(0, "a"), 3, 0)[0].copy()
    for place in range(1, 5):
        own += masks.mask(cohort.self_key(place, "a"), 3, 0)[0]
    scale = cohort.options.scale(masked_class(cohort.update).declared["params"], 7)
    assert scale.real(total - own).tolist() == [10 * sum(range(5))] * 3


# what a client refuses


@dataclass
class Cohorted:
    """Clients of a cohort in the hands of a server that may do as it likes; every client has block `a`."""

    num: int
    options: SecureAggregation = field(default_factory=SecureAggregation)
    states: list[Tree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.update = Update
        self.context: Any = SimpleNamespace(on_device=False, blocks=frozenset({"a", SHARED}))
        self.datas: list[Any] = [SimpleNamespace(key=100 + place) for place in range(self.num)]
        answers = [self.run("advertise", place, sent.Opening(torch.tensor(0)), {}) for place in range(self.num)]
        self.states = [state for _, state in answers]
        everyone = torch.ones(self.num, dtype=torch.bool)
        keys = torch.stack([reply.keys for reply, _ in answers])
        self.roster = sent.Roster(keys, {"a": everyone, SHARED: everyone})

    def run(self, task: str, place: int, got: Message, local: Tree | None = None) -> tuple[Any, Tree]:
        state = self.states[place] if local is None else local
        reply, after = getattr(self.options, task)(self.context, self.datas[place], state, got)
        return reply, after

    def divide(self) -> Tensor:
        answers = [self.run("share", place, self.roster) for place in range(self.num)]
        self.states = [state for _, state in answers]
        return torch.stack([reply.sealed for reply, _ in answers])

    def delivery(self, sealed: Tensor, place: int, bits: int = 7) -> sent.Delivery:
        everyone = torch.ones(self.num, dtype=torch.bool)
        return sent.Delivery(everyone, sealed[:, place].contiguous(), torch.tensor(bits))

    def deliver(self) -> None:
        sealed = self.divide()
        self.states = [self.run("deliver", place, self.delivery(sealed, place))[1] for place in range(self.num)]

    def masked(self, place: int, params: Tree, rows: int = 10, loss: float = 1.0) -> Any:
        reply = self.update(params, torch.tensor(loss), torch.tensor(rows))
        hidden, self.states[place] = self.options.mask(reply, lambda f: reply.declared[f].weight, self.states[place])
        return hidden

    def self_key(self, place: int, block: str) -> bytes:
        state = under(SECRETS, self.states[place])
        return cohort_in(state).self_key(seeds_of(state)[2], block)

    def unmasking(self, dropped: Sequence[int] = (), survivors: Sequence[int] | None = None) -> sent.Unmasking:
        lost = torch.zeros(self.num, dtype=torch.bool)
        lost[list(dropped)] = True
        left = ~lost
        if survivors is not None:
            left = torch.zeros(self.num, dtype=torch.bool)
            left[list(survivors)] = True
        return sent.Unmasking(left, lost)


@pytest.fixture
def ready() -> Cohorted:
    """Five clients that have sent a masked reply."""
    cohort = Cohorted(5)
    cohort.deliver()
    for place in range(5):
        cohort.masked(place, {"a.w": torch.ones(3)})
    return cohort


def test_a_server_that_asks_for_both_shares_of_one_client_is_refused(ready: Cohorted) -> None:
    with refuses(Refusal, "reveal its reply"):
        ready.run("unmask", 0, ready.unmasking(dropped=[3], survivors=[0, 1, 2, 3, 4]))


def test_no_answer_holds_both_shares_of_a_client(ready: Cohorted) -> None:
    reply, after = ready.run("unmask", 0, ready.unmasking(dropped=[3]))
    assert [bool(row.any()) for row in reply.of_keys] == [False, False, False, True, False]
    assert [bool(row.any()) for row in reply.of_self_masks] == [True, True, True, False, True]
    assert not [name for name in after if name.startswith(SECRETS)], "the secrets are gone"


def test_a_client_does_not_unmask_twice(ready: Cohorted) -> None:
    _, after = ready.run("unmask", 0, ready.unmasking(dropped=[3]))
    with refuses(Refusal, "keys serve once"):
        ready.run("unmask", 0, ready.unmasking(dropped=[4]), after)


def test_a_client_does_not_mask_two_replies_with_the_same_keys(ready: Cohorted) -> None:
    with refuses(Refusal, "keys serve once"):
        ready.masked(0, {"a.w": torch.zeros(3)})


@pytest.mark.parametrize(
    ("dropped", "survivors", "reason"),
    [
        ([], [0, 1, 2], "fit the clients"),
        ([1], [2, 3, 4], "fit the clients"),
        ([0], [1, 2, 3, 4], "fit the clients"),
        ([2, 3, 4], [0, 1], "3 are needed"),
    ],
)
def test_a_client_refuses_lists_that_leave_clients_out(
    ready: Cohorted, dropped: list[int], survivors: list[int], reason: str
) -> None:
    with refuses(Refusal, reason):
        ready.run("unmask", 0, ready.unmasking(dropped, survivors))


def test_a_client_refuses_to_unmask_a_block_of_which_too_few_are_left() -> None:
    cohort = Cohorted(6)
    cohort.roster.members["b"] = torch.tensor([False, False, False, True, True, True])
    cohort.deliver()
    for place in range(6):
        cohort.masked(place, {"a.w": torch.ones(3)})
    with refuses(Refusal, "clients left"):
        cohort.run("unmask", 0, cohort.unmasking(dropped=[5]))


def test_a_client_refuses_a_list_of_keys_that_endangers_it() -> None:
    def changed(cohort: Cohorted, keys: Tensor, **members: Tensor) -> sent.Roster:
        everyone = torch.ones(len(keys), dtype=torch.bool)
        return sent.Roster(keys, {"a": everyone, SHARED: everyone} | members)

    cohort = Cohorted(5)
    keys = cohort.roster.keys
    twice = keys.clone()
    twice[4] = keys[3]
    half = keys.clone()
    half[4, 1] = keys[3, 0]
    without = keys.clone()
    without[0] = torch.arange(64, dtype=torch.uint8).view(2, 32)
    cases = [
        (changed(cohort, twice), "a key twice"),
        (changed(cohort, half), "a key twice"),
        (changed(cohort, keys[:2]), "has 2 clients"),
        (changed(cohort, without), "keys of this"),
        (changed(cohort, keys, a=torch.tensor([False, True, True, True, True])), "lacks block 'a'"),
        (changed(cohort, keys, a=torch.ones(4, dtype=torch.bool)), "cannot be read"),
        (changed(cohort, keys.float()), "cannot be read"),
    ]
    for roster, reason in cases:
        with refuses(Refusal, reason):
            cohort.run("share", 0, roster)


def test_a_client_refuses_shares_that_were_changed_or_are_for_others() -> None:
    cohort = Cohorted(5)
    sealed = cohort.divide()
    for place in (0, 47):
        bad = sealed.clone()
        bad[2, 0, place] ^= 1
        with refuses(Refusal, "client and request"):
            cohort.run("deliver", 0, cohort.delivery(bad, 0))
    with refuses(Refusal, "client and request"):
        cohort.run("deliver", 1, sent.Delivery(*vars(cohort.delivery(sealed, 0)).values()))
    few = cohort.delivery(sealed, 0)
    few.senders[2:] = False
    with refuses(Refusal, "sent shares"):
        cohort.run("deliver", 0, few)


def test_a_client_refuses_a_key_that_is_no_key() -> None:
    """A point of small order would make the shared secret known to everyone (RFC 7748, Section 6.1)."""
    cohort = Cohorted(5)
    for which in (0, 1):
        cohort = Cohorted(5)
        cohort.roster.keys[4, which] = 0
        with refuses(Refusal, "small order"):
            cohort.run("share", 0, cohort.roster)


@pytest.mark.parametrize("which", [0, 1])
def test_a_client_refuses_the_second_encoding_of_a_key(which: int) -> None:
    """A server could list one key twice in this way. The two masks that a client shares with it would cancel."""
    cohort = Cohorted(5)
    keys = cohort.roster.keys
    twin = bytearray(keys[3, which].cpu().numpy().tobytes())
    twin[31] |= 128
    seed = bytes(masks.SEED)
    assert masks.agreed(seed, bytes(twin)) == masks.agreed(seed, keys[3, which].cpu().numpy().tobytes())
    keys[4, which] = torch.tensor(list(twin), dtype=torch.uint8)
    with refuses(Refusal, "unusual"):
        cohort.run("share", 0, cohort.roster)


@pytest.mark.parametrize("number", [2**255 - 19 + 9, 2**255 + 9, 2**256 - 1])
def test_only_numbers_below_the_prime_are_keys(number: int) -> None:
    """Nine is the base point."""
    assert masks.is_usable((9).to_bytes(32, "little"))
    assert not masks.is_usable(number.to_bytes(32, "little"))


SMALL_ORDER = [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18]
"""Points of Curve25519 of order 2 and 4, two of them in encodings that no honest client uses."""


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("point", SMALL_ORDER)
def test_a_client_with_a_key_of_small_order_is_dropped_and_the_others_stay(which: int, point: int) -> None:
    """The other clients would all refuse the list of keys, so one device would end the run of all others."""
    parts = assemble(secured(small()))
    bad = torch.tensor(list(point.to_bytes(32, "little")), dtype=torch.uint8)

    def with_bad(reply: Any) -> Any:
        return replace(reply, keys=torch.stack([bad if place == which else reply.keys[place] for place in (0, 1)]))

    changing(parts, 4, with_bad, "advertise")
    summed = updates(parts)
    assert list(summed) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert "sent a public key of small order" in summed.missing[4]


def test_a_client_refuses_steps_out_of_order() -> None:
    cohort = Cohorted(5)
    with refuses(Refusal, "after step 1"):
        cohort.run("unmask", 0, cohort.unmasking())
    with refuses(Refusal, "after step 0"):
        cohort.run("share", 0, cohort.roster, {})
    with refuses(Refusal, "after step 1"):
        cohort.masked(0, {"a.w": torch.ones(3)})


@pytest.mark.parametrize(
    ("params", "rows", "loss", "reason"),
    [
        ({"a.w": torch.tensor([1.0, -64.5])}, 10, 1.0, "value beyond"),
        ({"a.w": torch.tensor([float("nan")])}, 10, 1.0, "value beyond"),
        ({"a.w": torch.tensor([float("inf")])}, 10, 1.0, "value beyond"),
        ({"a.w": torch.ones(1)}, 129, 1.0, "num_rows"),
        ({"a.w": torch.ones(1)}, 10, 2.0**31, "loss holds"),
        ({"a.w": torch.ones(1, dtype=torch.int64)}, 10, 1.0, "holds integers"),
    ],
)
def test_a_client_that_would_overflow_refuses(params: Tree, rows: int, loss: float, reason: str) -> None:
    cohort = Cohorted(4)
    cohort.deliver()
    with refuses(Refusal, reason):
        cohort.masked(0, params, rows, loss)


def test_a_value_out_of_range_costs_one_client_not_the_round() -> None:
    secure = assemble(secured(small(), range=64.0))
    method: Any = secure.algorithm
    state = method.init(secure.fed, {name: value * 1.0 for name, value in secure.initial.items()})
    secure.fed.begin(1)
    wild = replace(state, params={**state.params, SHARED + ".bias": state.params[SHARED + ".bias"] + 1e4})
    sends = {client: method.outgoing(wild if client == 3 else state, [], secure.fed) for client in range(10)}
    summed = secure.fed.ask(method.update, list(range(10)), sends)
    assert 3 not in summed
    assert len(summed) == 9
    assert "can be summed" in summed.missing[3]


def test_a_client_that_reveals_a_wrong_share_cannot_put_garbage_into_the_model() -> None:
    secure = assemble(secured(small(), threshold=1.0))
    answer = secure.engine.answer

    def lying(request: Request, clients: Sequence[int], send: Send) -> Answer:
        got = answer(request, clients, send)
        if request.name.endswith("unmask"):
            for part in got.parts:
                for value in (v for *_, v in tensors(part.message)):
                    value[0] ^= 1
        return got

    secure.engine.answer = lying  # type: ignore[method-assign]
    with refuses(TooFewReplies, "out of range"):
        updates(secure)


def changing(parts: Assembly, client: int, change: Callable[[Any], Any], task: str = "update") -> None:
    """Have one client send another reply to a task than the honest one."""
    answer = parts.engine.answer

    def hostile(request: Request, clients: Sequence[int], send: Send) -> Answer:
        got = answer(request, clients, send)
        if not request.name.endswith(task):
            return got
        replies = {c: reply for part in got.parts for c, reply in Replies([part]).items()}
        replies[client] = change(replies[client])
        return Answer.of(stacked(replies), got.missing)

    parts.engine.answer = hostile  # type: ignore[method-assign]


@pytest.mark.parametrize("liar", [0, 4])
@pytest.mark.parametrize(
    "change", [lambda tree: {}, lambda tree: {name: v for name, v in tree.items() if block_of(name) != "a"}]
)
def test_a_client_that_sends_another_form_is_dropped_and_the_others_stay(liar: int, change: Any) -> None:
    """Also if it is the client with the lowest number, whose reply the server reads first."""
    secure = assemble(secured(small()))
    changing(secure, liar, lambda reply: replace(reply, params=change(reply.params)))
    summed = updates(secure)
    assert list(summed) == [client for client in range(10) if client != liar]
    assert "another form than the other clients" in summed.missing[liar]


def test_a_client_that_lies_about_its_rows_does_not_end_the_run() -> None:
    secure = assemble(secured(replace(small(), engine=EngineSpec(min_replies=0))))
    changing(secure, 3, lambda reply: replace(reply, num_rows=reply.num_rows + 2**28))  # one more row
    summed = updates(secure)
    assert not summed
    assert re.search(
        r"given up: the clients' weights \(num_rows\) add up to (\d+), and those of the client", summed.missing[0]
    )
    secure.fed.clients = replace(secure.fed.clients, limited=frozenset({3}))
    with refuses(RecipeError, "deployment.rows_cap: rows_cap limits") as error:
        updates(secure)
    assert error.value.key == ("deployment", "rows_cap")


# which recipes are refused


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (small(server=ServerOptimiser(aggregate="krum")), "secure_aggregation: compares single"),
        (small("fedmsplit"), "secure_aggregation: models"),
        (small("fedproto"), "secure_aggregation: Learned.params"),
        (world.recipe(world.algorithm("fedamp"), clients=TEN), "secure_aggregation: reads"),
        (world.recipe(world.algorithm("fedfomo"), clients=TEN), "secure_aggregation: reads"),
        (world.recipe(world.algorithm("cmsfed", dominance_threshold=1.0), clients=TEN), "secure_aggregation: reads"),
        (world.recipe(world.algorithm("pfmml"), clients=TEN), "secure_aggregation: reads"),
        (world.recipe(world.algorithm("splitfed"), clients=TEN), "secure_aggregation: reads"),
    ],
)
def test_a_method_that_needs_single_replies_is_refused(made: Recipe, reason: str) -> None:
    with refuses(RecipeError, reason):
        assemble(secured(made))


def test_too_few_clients_of_a_modality_are_refused() -> None:
    with refuses(RecipeError, "secure_aggregation.min_clients: modality"):
        assemble(secured(small(), min_clients=8))


def test_a_cohort_that_is_smaller_than_a_sum_is_refused_before_the_run() -> None:
    selector = Uniform(participation=5)
    made = world.recipe(world.algorithm("fedavg", selector=selector), clients=TEN)
    with refuses(RecipeError, "secure_aggregation.min_clients: round asks") as error:
        check(secured(made, min_clients=6))
    assert error.value.key == ("secure_aggregation", "min_clients")
    assert check(secured(made, min_clients=5)).refused == ()


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    made = replace(secured(small("scaffold", "vectorised")), rounds=2)

    def stop(event: str, **facts: Any) -> None:
        if event == "round-finished" and facts["row"]["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        polyfed.run(made, tmp_path / "stopped", listeners=[stop])
    resumed = polyfed.run(made, tmp_path / "stopped", resume=True).result
    whole = polyfed.run(made, tmp_path / "whole").result
    assert resumed["state_sha256"] == whole["state_sha256"]
    assert resumed["bytes_up"] == whole["bytes_up"]
    texts = [(tmp_path / name / "egress.jsonl").read_text() for name in ("stopped", "whole")]
    ledgers = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert [{**row, "run": ""} for row in ledgers[0]] == [{**row, "run": ""} for row in ledgers[1]]
    assert {row["message"] for row in ledgers[0] if row.get("masked")} == {"MaskedControlledUpdate"}


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="worker processes need Linux")
def test_worker_processes_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "UNIT_FLOPS", 1.0)  # so that every request is worth sharing
    sums = []
    for workers in (1, 2):
        parts = assemble(secured(replace(small(), engine=EngineSpec(name="vectorised", workers=workers, stack=2))))
        summed = updates(parts)
        sums.append(summed.mean("params", parts.fed.clients.rows_of(summed)))
        pool = parts.engine.pool  # type: ignore[attr-defined]
        assert (pool is None) == (workers == 1)
        assert pool is None or pool.returned >= 10, "the workers did the work of five requests"
        parts.engine.close()
    assert world.same(*sums)


def test_the_check_says_what_is_masked(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(TEXT)
    planned = check(path).planned
    masked = {(row.field, row.block) for row in planned if row.masked}
    assert {("params", "a"), ("params", "b"), ("params", SHARED), ("loss", SHARED), ("sums", SHARED)} <= masked
    open_ = {row.message for row in planned if not row.masked}
    assert open_ == {"PublicKeys", "EncryptedShares", "RevealedShares"}, "nothing else crosses without a mask"
    with refuses(SystemExit, "0"):
        main(["check", str(path)])
    told = capsys.readouterr().out
    assert "parameters, masked" in told
    assert "the server reads only sums over the clients" in told
    flat = " ".join(told.split())
    assert (
        "parameters and statistics may leave, masked: the server reads only sums; "
        "not masked: PublicKeys, EncryptedShares, RevealedShares" in flat
    )


def test_a_device_with_its_own_rows_can_check_what_is_masked(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(40, 6)).astype(np.float32)
    np.savez(tmp_path / "own.npz", a=rows, label=np.arange(40) % 4)
    (tmp_path / "policy.toml").write_text('[egress.a]\nserver = ["parameters"]\n')
    data = {"name": "npz", "path": str(tmp_path / "own.npz"), "label": "label"}
    encoders = {"a": {"kind": "mlp", "hidden": [8]}}
    table = {"data": data, "model": {"encoders": encoders}, "algorithm": {"name": "fedavg"}, "secure_aggregation": {}}
    made = parse_recipe(table)
    told = {"data": tmp_path / "own.npz", "modalities": "a", "policy": tmp_path / "policy.toml"}
    found = inspect(made, " ".join([*(f'{key}="{value}"' for key, value in told.items()), "client=3"]))
    assert {row.field for row in found.planned if row.masked} >= {"params", "loss", "num_rows"}


TEXT = """
rounds = 1
[data]
name = "toy"
rows = 240
[clients]
num = 5
holdings = [["a", "b"], ["a", "b"], ["a"]]
personal_test = 0.2
[algorithm]
name = "fedavg"
[secure_aggregation]
bits = 64
"""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("threshold = 0.5", "secure_aggregation.threshold: most 1"),
        ("threshold = 11", "secure_aggregation.threshold: clients"),
        ("min_clients = 1", "secure_aggregation.min_clients: 2 or more"),
        ("bits = 16", "secure_aggregation.bits: 32 or 64"),
        ("clip = 3.0", "secure_aggregation.clip: option"),
    ],
)
def test_options_out_of_range_are_refused(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(TEXT.replace("bits = 64", line))
    with refuses(RecipeError, reason):
        load_recipe(path)


def test_attacks_on_replies_are_refused_and_on_data_are_not() -> None:
    with refuses(RecipeError, "attack.name: changes single"):
        assemble(replace(secured(small()), attack=Attack(name="sign-flip")))
    assert len(updates(assemble(replace(secured(small()), attack=Attack(name="label-flip"))))) == 10


def test_without_the_libraries_the_text_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "Crypto.Protocol.SecretSharing", None)
    with refuses(RecipeError, "Crypto.Protocol.SecretSharing"):
        SecureAggregation()


# the parts


def test_a_scale_never_wraps_and_keeps_its_stated_error() -> None:
    generator = np.random.default_rng(3)
    weights = generator.integers(1, 400, 7)
    for bits in (32, 64):
        scale = Scale.fitting(bits, 5.0, int(weights.sum() - 1).bit_length())
        values = generator.uniform(-5, 5, (7, 999)).astype(np.float32)
        values[:, 0], values[:, 1] = 5.0, -5.0
        total = sum(scale.integers(row, weight, "x") for row, weight in zip(values, weights, strict=True))
        exact = (values.astype(np.float64) * weights[:, None]).sum(0)
        assert np.abs(scale.real(np.asarray(total)) - exact).max() <= scale.error(7) + 1e-12 * np.abs(exact).max()
    with refuses(ValueError, "32 bits"):
        Scale.fitting(32, 2.0**20, 14)


def test_any_threshold_of_the_shares_gives_the_seed_and_fewer_do_not() -> None:
    seed = bytes(range(16))
    shares = masks.split(seed, 3, 6)
    for places in ([0, 1, 2], [5, 3, 1], [2, 4, 5]):
        assert masks.combined([(place, shares[place]) for place in places]) == seed
    assert masks.combined([(0, shares[0]), (1, shares[1])]) != seed


def test_the_keystream_is_that_of_rfc_8439() -> None:
    """The first block of the keystream of a zero key, zero nonce and counter 0 (RFC 8439, Appendix A.1, vector 1)."""
    assert masks.keystream(bytes(32), 16).hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_both_sides_agree_on_a_secret_and_nobody_else_does() -> None:
    one, two, three = (bytes([i]) * 16 for i in range(3))
    assert masks.agreed(one, masks.public_key(two)) == masks.agreed(two, masks.public_key(one))
    assert masks.agreed(one, masks.public_key(two)) != masks.agreed(three, masks.public_key(two))
