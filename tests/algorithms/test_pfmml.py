"""Personalised multimodal learning: the invariants of docs/algorithms/pfmml.md, by loops over devices and autograd."""

import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracles import pfmml as oracle
from polyfed.algorithms.base import Broadcast
from polyfed.algorithms.personal.blocks import Layout, layouts
from polyfed.algorithms.pfmml import Pfmml
from polyfed.algorithms.pfmml.coefficients import Step, aggregate, learned, own_coefficients
from polyfed.algorithms.pfmml.scheduling import scheduled
from polyfed.core.errors import RecipeError
from polyfed.core.tree import block_of
from polyfed.data import ClientsSpec, populate
from polyfed.data.sources import Toy
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.federation.links.network import Network
from polyfed.federation.replies import Answer
from polyfed.model import build_model
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from refusals import refuses
from scripted import PARAMS, scripted
from world import AWKWARD, algorithm, furthest, played, recipe, same

MIXED = [[1, 1], [1, 0], [0, 1], [1, 1], [1, 0], [0, 1], [1, 1], [1, 0], [1, 1]]
OWNERS = {"a": [k for k, has in enumerate(MIXED) if has[0]], "b": [k for k, has in enumerate(MIXED) if has[1]]}
OWNERS["shared"] = list(range(9))
BITS = {"a": 6 * 32.0, "b": 5 * 32.0, "shared": 4 * 32.0}


def paper(**options: Any) -> Any:
    """The method with the paper's values where `options` names no others."""
    return algorithm("pfmml", **(Pfmml.presets["paper"] | options))


def rounds(fed: Any, method: Any, number: int) -> Any:
    """States after each round."""
    state = method.init(fed, PARAMS)
    for round in range(1, number + 1):
        fed.begin(round)
        fed.engine.sent.clear()
        state = method.round(state, fed)
        yield state


@pytest.mark.parametrize("linear", [None, 3.0], ids=["ratio", "linear"])
@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("max_age", [0, 4])
def test_server_equals_a_loop_over_devices(linear: float | None, count: int, max_age: int) -> None:
    network = Network(bandwidth_hz=2e3, compute_flops_per_s=1e8)  # slow: bits and work must matter to the scores
    rule = {"rule": "ratio"} if linear is None else {"rule": "linear", "price_per_second": linear}
    method = paper(uploads=count, max_age=max_age, coefficient_lr=0.05, **rule)
    fed, script = scripted(method, MIXED, network, seed=5)
    by_hand = oracle.Server(9, OWNERS, BITS, count, 0.05, max_age, linear)
    flops = np.array([sum({"a": 1e5, "b": 3e5}[m] for m, has in zip("ab", row, strict=True) if has) for row in MIXED])
    compute = 3 * 2 * 10 * np.arange(1, 10) * (flops + 1e4) / 1e8  # two epochs of 10, 20, ... rows
    for state in rounds(fed, method, 12):
        links = fed.clock.links.rates(fed.round)
        expected = by_hand.schedule(links.up_bps.numpy(), links.down_bps.numpy(), compute)
        assert {b: set(script.sent.get(b, {})) for b in OWNERS} == expected
        for block, entry in state.blocks.items():
            copies = by_hand.mix(block, script.sent[block])
            np.testing.assert_allclose(entry.logits.numpy(), by_hand.xi[block], atol=1e-5)
            np.testing.assert_array_equal(entry.ages.numpy()[OWNERS[block]], by_hand.age[block][OWNERS[block]])
            for k, copy in copies.items():
                np.testing.assert_allclose(entry.copy_of(k).numpy(), copy, atol=1e-5)


def unreached(script: Any, lost: set[tuple[int, int]]) -> None:
    """Makes installs fail, by (round, device)."""
    answer = script.answer

    def partly(request: Any, clients: Any, send: Any) -> Answer:
        gone = {k: "unreached" for k in clients if request.name == "install" and (request.round, k) in lost}
        got = answer(request, [k for k in clients if k not in gone], send)
        return Answer(got.parts, got.missing | gone)

    script.answer = partly


@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_copy_that_got_lost_is_sent_again_and_teaches_nothing_meanwhile(count: int) -> None:
    draw = np.random.default_rng(7)
    lost = {(t, k) for t in range(1, 15) for k in range(9) if draw.random() < 0.4}
    network = Network(bandwidth_hz=2e3, compute_flops_per_s=1e8)
    method = paper(uploads=count, max_age=4, coefficient_lr=0.05)
    fed, script = scripted(method, MIXED, network, seed=5)
    unreached(script, lost)
    by_hand = oracle.Server(9, OWNERS, BITS, count, 0.05, 4)
    due: dict[str, dict[int, np.ndarray]] = {block: {} for block in OWNERS}
    flops = np.array([sum({"a": 1e5, "b": 3e5}[m] for m, has in zip("ab", row, strict=True) if has) for row in MIXED])
    compute = 3 * 2 * 10 * np.arange(1, 10) * (flops + 1e4) / 1e8
    late = 0
    for state in rounds(fed, method, 14):
        reached = {k for k in range(9) if (fed.round, k) not in lost}
        arrived = {k: {block: copies[k] for block, copies in due.items() if k in copies} for k in reached}
        assert script.got.keys() == {k for k, copies in arrived.items() if copies}
        for k, got in script.got.items():
            assert {block_of(name) for name in got} == set(arrived[k])
            for name, value in got.items():
                np.testing.assert_allclose(value.numpy().ravel(), arrived[k][block_of(name)], atol=1e-5)
        script.got.clear()
        by_hand.arriving = {block: set(copies) for block, copies in due.items()}
        links = fed.clock.links.rates(fed.round)
        expected = by_hand.schedule(links.up_bps.numpy(), links.down_bps.numpy(), compute)
        assert {block: set(script.sent.get(block, {})) for block in OWNERS} == expected
        for block, entry in state.blocks.items():
            for k in (due[block].keys() - reached) & script.sent[block].keys():
                by_hand.kept[block].pop(k)  # no record, no lesson; the copy made now leaves a new one
            due[block] = {k: copy for k, copy in due[block].items() if k not in reached}
            late += len(due[block].keys() - script.sent[block].keys())
            due[block] |= by_hand.mix(block, script.sent[block])
            np.testing.assert_allclose(entry.logits.numpy(), by_hand.xi[block], atol=1e-5)
    assert count == 9 or late, "every lost copy was overtaken by a newer one: nothing was sent again"


def test_a_lost_copy_leaves_the_coefficients_of_its_device_alone() -> None:
    for learn in ("after", "before"):
        method = paper(uploads=1.0, coefficient_lr=0.1, learn=learn)
        fed, script = scripted(method, [[1, 1]] * 4)
        unreached(script, {(2, 1)})
        first, second, third = rounds(fed, method, 3)
        for block in OWNERS:
            one, two, three = (state.blocks[block].logits for state in (first, second, third))
            moved = (two != one).any(1).tolist()
            assert moved == [True, False, True, True]
            assert bool((three != two).any(1).all())


def test_coefficients_are_distributions_over_those_that_uploaded() -> None:
    method = paper(uploads=4, coefficient_lr=0.1)
    fed, _ = scripted(method, MIXED)
    for state in rounds(fed, method, 6):
        for entry in state.blocks.values():
            record = entry.records[fed.round]
            assert record.mix.shape == (len(record.members), len(record.members))
            assert bool((record.mix >= 0).all())
            torch.testing.assert_close(record.mix.sum(1), torch.ones(len(record.members)).double())
            assert record.members.tolist() == entry.sent.nonzero().flatten().tolist()


def test_logits_of_a_row_sum_to_one_for_ever() -> None:
    method = paper(uploads=4, coefficient_lr=0.1)
    fed, _ = scripted(method, MIXED)
    *_, last = rounds(fed, method, 15)
    for entry in last.blocks.values():
        torch.testing.assert_close(entry.logits.sum(1), torch.ones(9).double(), atol=1e-4, rtol=0)
        assert float(entry.logits.std()) > 1e-3, "nothing was learned"


@pytest.mark.parametrize("seed", range(4))
def test_closed_form_is_the_gradient(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    size, members = 7, torch.tensor([0, 2, 3, 6])
    logits = torch.randn(size, size, generator=draw, dtype=torch.float64, requires_grad=True)
    uploads = torch.randn(4, 11, generator=draw, dtype=torch.float64)
    record = aggregate(logits.detach(), members, uploads)
    later = torch.randn(4, 11, generator=draw, dtype=torch.float64)
    built = torch.zeros(size, dtype=torch.int64)
    built[members] = 1
    after = learned(logits.detach(), built, {1: record}, (members, later), 11, Step(1.0))
    copies = torch.softmax(logits[members][:, members], 1) @ uploads
    drift = later - record.copies  # the direction v: minus the gradient with respect to the copy
    (gradient,) = torch.autograd.grad((copies * drift).sum(), logits)
    torch.testing.assert_close(after - logits.detach(), gradient)


def test_without_learning_everybody_gets_the_plain_mean() -> None:
    method = paper(uploads=6, coefficient_lr=0.0)
    fed, script = scripted(method, [[1, 1]] * 6)
    for state in rounds(fed, method, 3):
        for block, entry in state.blocks.items():
            mean = np.mean([script.sent[block][k] for k in range(6)], 0)
            for k in range(6):
                np.testing.assert_allclose(entry.copy_of(k).numpy(), mean, atol=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_one_upload_without_ages_is_local_training_bit_for_bit(engine: str) -> None:
    train = Train(lr=0.01, batch_size=16, optimiser="adam")
    alone = algorithm("local", train=train, selector=Uniform(participation=1.0))
    ours = paper(train=train, uploads=1, max_age=0)
    plain, _, _ = played(recipe(alone, engine, AWKWARD))
    parts, _, _ = played(recipe(ours, engine, AWKWARD))
    for client, tree in plain.engine.locals.items():
        assert same(tree, parts.engine.locals[client])


def test_twins_keep_equal_coefficients_for_each_other() -> None:
    method = paper(uploads=4, coefficient_lr=0.1)
    fed, script = scripted(method, [[1, 1]] * 4)
    practise = script.practise

    def same_noise(k: int, got: Any) -> Any:
        script.draw = np.random.default_rng((fed.round, 0 if k in (1, 2) else k))  # 1 and 2 see the same data
        return practise(k, got)

    script.practise = same_noise  # type: ignore[method-assign]
    *_, last = rounds(fed, method, 8)
    for entry in last.blocks.values():
        xi = entry.logits
        torch.testing.assert_close(xi[1, 2], xi[2, 1])
        torch.testing.assert_close(xi[1, 1], xi[2, 2])
        torch.testing.assert_close(xi[1, [0, 3]], xi[2, [0, 3]])


@pytest.mark.parametrize("rule", ["ratio", "linear"])
def test_fast_links_order_by_benefit_alone(rule: str) -> None:
    near = Network(channel="fixed", rate_up_bps=1e15, rate_down_bps=1e15, compute_flops_per_s=1e18)
    timed = paper(uploads=3, coefficient_lr=0.1, rule=rule, price_per_second=0.0)
    untimed = paper(uploads=3, coefficient_lr=0.1)
    fed, script = scripted(timed, MIXED, near if rule == "linear" else None)
    other, plain = scripted(untimed, MIXED)
    for _ in zip(rounds(fed, timed, 8), rounds(other, untimed, 8), strict=True):
        assert {b: set(s) for b, s in script.sent.items()} == {b: set(s) for b, s in plain.sent.items()}


def test_equal_work_and_fast_links_make_the_ratio_order_by_benefit() -> None:
    near = Network(channel="fixed", rate_up_bps=1e15, rate_down_bps=1e15)
    method = paper(uploads=2, coefficient_lr=0.1)
    fed, script = scripted(method, [[1, 1]] * 6, near)
    fed.clients = replace(fed.clients, num_rows=torch.full((6,), 10))
    before = method.init(fed, PARAMS)
    for state in rounds(fed, method, 8):
        for block, entry in before.blocks.items():
            benefit = 1 - torch.softmax(entry.logits, 1).diagonal()
            sent = torch.tensor([k in script.sent[block] for k in range(6)])
            assert int(sent.sum()) == 2
            assert float(benefit[sent].min()) > float(benefit[~sent].max()) - 1e-6  # ties fall as they may
        before = state


def test_no_block_waits_longer_than_the_oldest_age() -> None:
    method = paper(uploads=0, max_age=3)
    fed, script = scripted(method, MIXED)
    for state in rounds(fed, method, 9):
        assert all(int(entry.ages.max()) < 3 for entry in state.blocks.values())
        expected = {b: set(o) for b, o in OWNERS.items()} if fed.round % 3 == 0 else {}
        assert {b: set(s) for b, s in script.sent.items()} == expected


def test_fewer_owners_than_uploads_all_send_and_a_block_without_owner_is_skipped() -> None:
    method = paper(uploads=5)
    fed, script = scripted(method, [[1, 0], [1, 0], [1, 0]])
    for state in rounds(fed, method, 3):
        assert {b: set(s) for b, s in script.sent.items()} == {"a": {0, 1, 2}, "shared": {0, 1, 2}}
        assert not state.blocks["b"].records


def test_a_tie_goes_to_the_lowest_number_and_schedules_nest_when_all_scores_tie() -> None:
    scores, able = torch.ones(6).double(), torch.tensor([True, False, True, True, True, True])
    chosen = [scheduled(scores, able, torch.zeros(6, dtype=torch.int64), n, 0) for n in range(6)]
    assert [c.nonzero().flatten().tolist() for c in chosen[1:4]] == [[0], [0, 2], [0, 2, 3]]
    seconds = []
    for count in (2, 4, 6):
        method = paper(uploads=count, coefficient_lr=0.0, max_age=0, rule="linear", price_per_second=0.0)
        parts, state, _ = played(recipe(method, clients=ClientsSpec(partition="iid", num=6), network=Network()))
        parts.fed.begin(4)
        method.round(state, parts.fed)
        seconds.append(method.simulated_seconds(method.round(state, parts.fed), parts.fed.clock.finish()))
    assert seconds == sorted(seconds)


def test_devices_that_lack_a_block_never_see_or_send_it() -> None:
    parts, _, ledger = played(recipe(paper(uploads=1.0), "vectorised"))
    owned = {k: {*parts.fed.clients[k].modalities, "shared"} for k in parts.fed.clients}
    assert ledger
    assert all(row["block"] in owned[row["client"]] for row in ledger)
    up = [row for row in ledger if row["destination"] == "server" and row["kind"] == "parameters"]
    assert {row["message"] for row in up} == {"Blocks"}
    assert {row["kind"] for row in ledger} == {"parameters", "statistic"}


def test_bytes_are_the_scheduled_blocks() -> None:
    parts, state, ledger = played(recipe(paper(uploads=2, max_age=0), rounds=1))
    sizes = {b: sum(v.numel() * 4 for n, v in parts.initial.items() if n.startswith(f"{b}.")) for b in state.blocks}
    up = sum(row["bytes"] for row in ledger if row["kind"] == "parameters" and row["destination"] == "server")
    assert up == 2 * sum(sizes.values())
    assert not [row for row in ledger if row["kind"] == "parameters" and row["destination"] == "client"]


def test_time_of_a_round_is_the_longest_chain_of_those_that_upload() -> None:
    network = Network(bandwidth_hz=1e4, compute_flops_per_s=1e7)
    parts, state, ledger = played(recipe(paper(uploads=2), network=network))
    assert parts.fed.clock is not None
    up_bps, down_bps = (r.tolist() for r in vars(parts.fed.clock.links.rates(3)).values())
    seconds = {}
    for k in parts.fed.clients:
        mine = [row for row in ledger if row["client"] == k and row["round"] == 3]
        work = sum(parts.fed.context.model.flops(b) for b in (*parts.fed.clients[k].modalities, "shared"))
        seconds[k] = 3 * 2 * int(parts.fed.clients.num_rows[k]) * work / 1e7
        for row in mine:
            seconds[k] += 8 * row["bytes"] / (up_bps if row["destination"] == "server" else down_bps)[k]
    sending = {k for entry in state.blocks.values() for k in entry.sent.nonzero().flatten().tolist()}
    found = parts.algorithm.simulated_seconds(state, parts.fed.clock.finish())
    assert found == pytest.approx(max(seconds[k] for k in sending), rel=1e-9)
    assert sending < set(parts.fed.clients)


def test_own_model_is_judged_with_what_arrives_and_as_trained() -> None:
    clients = ClientsSpec(partition="classes-per-client", num=6, classes_per_client=2, personal_test=0.3)
    parts, state, _ = played(recipe(paper(uploads=6), clients=clients))
    measured = parts.algorithm.evaluate(state, parts.fed)
    assert set(measured.metrics) == {"personal", "trained"}
    assert len(measured.personal) == 6
    arriving = state.deliveries.messages(layouts(parts.fed, state.params))
    parts.fed.ask(parts.algorithm.install, list(arriving), arriving)
    sent = {client: Broadcast(copies.params) for client, copies in arriving.items()}
    installed = parts.algorithm.evaluate_personally(parts.fed, sent)
    assert installed[1] == measured.personal
    assert furthest(parts.engine.locals[0], {**parts.engine.locals[0], **arriving[0].params}) == 0.0


@pytest.mark.parametrize(
    ("options", "same_as_default"),
    [
        ({"grad_sign": 1}, False),
        ({"scale": "per-step"}, False),
        ({"record": "previous-round"}, False),
        ({"learn": "before"}, False),
        ({"softmax_over": "owners"}, True),
    ],
)
def test_switches_change_what_they_should(options: dict[str, Any], same_as_default: bool) -> None:
    def logits(**more: Any) -> torch.Tensor:
        method = paper(uploads=3, coefficient_lr=0.05, max_age=4, **more)
        fed, _ = scripted(method, [[1, 1]] * 7, seed=2)
        *_, last = rounds(fed, method, 9)
        return last.blocks["a"].logits

    default, changed = logits(), logits(**options)
    assert bool(torch.isfinite(changed).all())
    assert torch.equal(default, changed) == same_as_default


def test_the_literal_sign_makes_own_coefficients_fall_where_ours_rise() -> None:
    own = {}
    for sign in (-1, 1):
        method = paper(uploads=1.0, grad_sign=sign, coefficient_lr=0.02)
        clients = ClientsSpec(partition="classes-per-client", num=6, classes_per_client=2)
        _, state, _ = played(recipe(method, "vectorised", clients=clients, rounds=6))
        own[sign] = float(own_coefficients(state.blocks["a"].logits, torch.ones(6, dtype=torch.bool)).mean())
    assert own[1] < 1 / 6 < own[-1]


def test_per_size_learns_a_small_block_as_if_it_were_the_largest() -> None:
    def first_change(**options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        method = paper(uploads=1.0, **options)
        fed, _ = scripted(method, [[1, 1]] * 5, seed=2)
        *_, last = rounds(fed, method, 2)
        return fed, {block: entry.logits - 1 / 5 for block, entry in last.blocks.items()}

    fed, raw = first_change()
    _, per_size = first_change(scale="per-size")
    sizes = {block: layout.num_trainable for block, layout in layouts(fed, fed.template).items()}
    largest = max(sizes.values())
    assert len(set(sizes.values())) > 1, "blocks of one size would prove nothing"
    for block, size in sizes.items():
        assert bool((raw[block] != 0).any())
        torch.testing.assert_close(per_size[block], raw[block] * largest / size)


@pytest.mark.parametrize("options", [{"uploads": -1}, {"uploads": 0.0}, {"uploads": 1.5}, {"max_age": -1}])
def test_meaningless_numbers_are_refused(options: dict[str, Any]) -> None:
    with refuses(RecipeError, f"algorithm.{next(iter(options))}: must be"):
        paper(**options)


def test_the_holdings_of_the_page_part_modality_sets_from_main_classes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms" / "pfmml.md").read_text()
    written = tomllib.loads(page.split("```toml\n")[1].split("```")[0])["holdings"]
    ours = load_recipe(Path(__file__).parents[2] / "recipes" / "pfmml-ucihar.toml").clients.holdings
    assert ours is not None
    sets: dict[str, list[list[frozenset[str]]]] = {}
    for name, holdings in (("page", written), ("recipe", ours)):
        clients = ClientsSpec(partition="main-class", num=18, main_share=0.5, holdings=holdings)
        data = Toy(rows=1500, classes=6, shapes={"acc": (3,), "gyro": (3,), "total_acc": (3,)})
        dealt = populate(data.load(), clients, 1)
        main = dealt.train.counts(dealt.columns.label, 6).argmax(1).tolist()
        assert main == [k % 6 for k in range(18)]
        sets[name] = [[frozenset(dealt.modalities(k)) for k in range(18) if main[k] == c] for c in range(6)]
    every = {name: Counter(s for of_class in groups for s in of_class) for name, groups in sets.items()}
    assert every["page"] == every["recipe"]
    assert all(sorted(map(len, of_class)) == [1, 2, 3] for of_class in sets["page"])
    assert all(len(frozenset.union(*[s for s in of_class if len(s) < 3])) == 3 for of_class in sets["page"])
    assert all(len(set(map(len, of_class))) == 1 for of_class in sets["recipe"]), "no longer confounded: see the page"


def test_blocks_of_the_crema_d_recipe_have_the_papers_sizes() -> None:
    spec = load_recipe(Path(__file__).parents[2] / "recipes" / "pfmml-crema-d.toml").model
    model = build_model(spec, {"audio": (1, 257, 188), "visual": (3, 224, 224)}, 6)
    layouts = {b: Layout.of(b, model.template, model) for b in ("audio", "visual", "shared")}
    sizes = {block: layout.num_trainable for block, layout in layouts.items()}
    assert sizes == {"audio": 11_170_240 + 524_288, "visual": 11_176_512 + 524_288, "shared": 7_174}


def normalised(options: dict[str, float]) -> Any:
    """Logits of block `a` after one update, for uploads and drifts that the options scale."""
    rng = np.random.default_rng(4)
    size, numbers = 5, int(options.get("numbers", 40))
    base = torch.from_numpy(rng.normal(size=(size, 40)))
    uploads = base.repeat(1, numbers // 40) * options.get("uploads", 1.0)
    logits = torch.full((size, size), 1 / size, dtype=torch.float64)
    record = aggregate(logits, torch.arange(size), uploads)
    drift = torch.from_numpy(rng.normal(size=(size, 40))).repeat(1, numbers // 40) * options.get("drift", 1.0)
    now = (torch.arange(size), record.copies + drift)
    built = torch.ones(size, dtype=torch.int64)
    return learned(logits, built, {1: record}, now, numbers, Step(1.0, 1, None, True)) - logits


def test_normalised_learning_depends_on_directions_alone() -> None:
    plain = normalised({})
    for options in ({"drift": 1e-4}, {"uploads": 100.0}, {"numbers": 400}):
        torch.testing.assert_close(normalised(options), plain, rtol=1e-4, atol=1e-6)
    assert float(plain.abs().max()) <= 2.0
    torch.testing.assert_close(plain.sum(1), torch.zeros(5, dtype=torch.float64), atol=1e-9, rtol=0)


def test_normalised_learning_equals_the_formula() -> None:
    rng = np.random.default_rng(1)
    size = 4
    uploads = torch.from_numpy(rng.normal(size=(size, 9)))
    logits = torch.from_numpy(rng.normal(size=(size, size)))
    record = aggregate(logits, torch.arange(size), uploads)
    now = torch.from_numpy(rng.normal(size=(size, 9)))
    ours = learned(logits, torch.ones(size).long(), {1: record}, (torch.arange(size), now), 9, Step(0.7, 1, None, True))
    for k in range(size):
        copy = record.mix[k] @ uploads
        drift = now[k] - copy
        longest = max(float((w - copy).norm()) for w in uploads)
        parts = torch.stack([(w - copy) @ drift / (drift.norm() * longest) for w in uploads])
        torch.testing.assert_close(ours[k] - logits[k], 0.7 * (parts - parts.mean()), rtol=1e-6, atol=1e-9)


def test_equal_uploads_and_no_drift_teach_nothing() -> None:
    uploads = torch.ones(3, 5, dtype=torch.float64)
    logits = torch.zeros(3, 3, dtype=torch.float64)
    record = aggregate(logits, torch.arange(3), uploads)
    after = learned(logits, torch.ones(3).long(), {1: record}, (torch.arange(3), uploads), 5, Step(1.0, 1, None, True))
    assert torch.equal(after, logits)


def test_coefficients_that_do_not_move_are_told() -> None:
    method = paper()
    rows = [{"own_coefficient.a": 0.2, "own_coefficient.b": 0.2}, {"own_coefficient.a": 0.2, "own_coefficient.b": 0.6}]
    assert "coefficients of a have not moved" in method.concerns(rows)[0]
    assert paper(coefficient_lr=0.0).concerns(rows) == []
    assert paper(placebo="uniform").concerns(rows) == []
