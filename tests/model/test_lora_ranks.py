"""LoRA ranks of single clients: the aggregation of two papers, true ranks, bytes, both engines, refusals."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import tiny_models
from test_frozen import printed
from test_lora import Two

from laws.rows import ROWS
from laws.test_variants import recorded as honest_messages
from laws.test_variants import taken
from oracles import lora as oracle
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message, map_fields
from polyfed.core.tree import Tree, block_of, size_bytes
from polyfed.data import ClientsSpec
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation import adapters
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.attack import Attack
from polyfed.federation.replies import Replies
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.federation.wire.wire_format import encode
from polyfed.model import ModelSpec
from polyfed.model.encoders.lora import pairs
from polyfed.privacy.differential.section import Privacy
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, furthest, played, recipe, same, through

pytest.importorskip("peft", reason="the extra polyfed[lora] is not installed")
WAYS = ["mean", "hetlora", "flexlora", "fedilora"]
TEXT = {"r": 4, "alpha": 8.0, "target_modules": ["query", "value", "word_embeddings"]}
IMAGE = {"r": 3, "alpha": 6.0, "target_modules": ["q_proj", "v_proj", "patch_embedding"]}
SHAPES = {"a": (6,), "b": (3, 32, 32)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("backbones")
    return {
        m: str(getattr(tiny_models, make)(root / make)) for m, make in {"a": "text_model", "b": "two_towers"}.items()
    }


def made(
    folders: dict[str, str],
    way: str = "mean",
    ranks: list[int] | None = None,
    engine: str = "sequential",
    loras: tuple[dict[str, Any], dict[str, Any]] = (TEXT, IMAGE),
    method: str = "fedavg",
    **options: Any,
) -> Recipe:
    """Six clients of two modalities; client 3 lacks `b`. One encoder adapts an embedding, the other a convolution."""
    encoders = {m: {"kind": "hf", "path": folders[m], "lora": lora} for m, lora in zip("ab", loras, strict=True)}
    given = {"selector": Uniform(), "server": ServerOptimiser(aggregate=way)} | options  # type: ignore[arg-type]
    return recipe(
        algorithm(method, **given),
        EngineSpec(name=engine, debug=True, stack=8 if engine == "vectorised" else 0),  # type: ignore[arg-type]
        data=Two(SHAPES),
        model=ModelSpec(embedding=4, encoders=encoders),
        clients=ClientsSpec(
            partition="dirichlet", num=6, min_size=4, only={"a": [3]}, ranks=ranks, personal_test=0.2, validation=0.1
        ),
        rounds=3,
    )


MIXED = [4, 1, 2]


def recorded(parts: Assembly, rounds: int) -> tuple[list[dict[int, Tree]], list[Tree]]:
    """What the clients replied in each round, and the server's parameters before each round and at the end."""
    replied: list[dict[int, Tree]] = []
    states = [parts.initial]

    def watch(send: Any, replies: Replies) -> None:
        replied.append({client: {n: v.clone() for n, v in reply.params.items()} for client, reply in replies.items()})
        states.append(send.params)

    with parts.fed.watched(watch):
        end = through(parts, rounds)
    return replied, [*states[1:], end.params]


@pytest.mark.parametrize("way", WAYS)
def test_every_round_equals_the_papers_as_plain_loops(way: str, folders: dict[str, str]) -> None:
    parts = assemble(made(folders, way, MIXED))
    replied, states = recorded(parts, 3)
    rows = parts.fed.clients.rows_of(range(6))
    adapted = pairs(parts.initial)
    assert len(adapted) == 6
    for replies, after in zip(replied, states[1:], strict=True):
        for a, b in adapted:
            own = {c: tree for c, tree in replies.items() if a in tree}
            assert len(own) == (6 if a.startswith("a.") else 5)
            form = [(t[a].flatten(1).double().numpy(), t[b].flatten(1).double().numpy()) for t in own.values()]
            assert [len(x) for x, _ in form] == [min(MIXED[c % 3], len(after[a])) for c in own]
            counts, rank = [rows[c] for c in own], len(after[a])
            new_a, new_b = (after[name].flatten(1).double().numpy() for name in (a, b))
            if way == "flexlora":
                for r in range(1, rank + 1):  # what a client of every rank receives
                    best = oracle.flexlora(form, counts, r)
                    np.testing.assert_allclose(new_b[:, :r] @ new_a[:r], best, atol=1e-6 + 1e-5 * abs(best).max())
                continue
            if way == "fedilora":
                expected = oracle.fedilora(form, counts, rank)
            else:
                shares = [n / sum(counts) for n in counts]
                expected = oracle.hetlora(form, rank) if way == "hetlora" else oracle.zero_padded(form, shares, rank)
            for found, wanted in zip((new_a, new_b), expected, strict=True):
                np.testing.assert_allclose(found, wanted, atol=1e-6)
        mean = sum(rows[c] * tree["shared.bias"] for c, tree in replies.items()) / sum(rows.values())
        torch.testing.assert_close(after["shared.bias"], mean)


@pytest.mark.parametrize("way", WAYS)
def test_engines_agree_and_only_the_ranks_of_a_client_cross(way: str, folders: dict[str, str]) -> None:
    train = Train(lr=0.05, batch_size=8, epochs=2, momentum=0.9, clip_norm=1.0)
    told = [made(folders, way, MIXED, engine, method="fedprox", train=train) for engine in ("sequential", "vectorised")]
    (parts, one, ledger_one), (_, many, ledger_many) = (played(replace(each, rounds=2)) for each in told)
    assert furthest(one.params, many.params) < 1e-4
    assert ledger_one == ledger_many
    moved = [name for name in one.params if not torch.equal(one.params[name], parts.initial[name])]
    # the gradient of one A is too small for float32; the other rules dilute or factorise it, which moves it too
    still = [a for a, _ in pairs(one.params) if "0.attention.self.query" in a] if way == "fedilora" else []
    assert moved == [name for name in one.params if name not in still]
    for client in range(6):
        for block, width in (("a", 4), ("b", 3)):
            rank = min(MIXED[client % 3], width)
            full = [v for n, v in parts.initial.items() if block_of(n) == block and ".lora_" in n]
            rest = [v for n, v in parts.initial.items() if block_of(n) == block and ".lora_" not in n]
            adapter = sum(v.numel() for v in full) * rank // width
            sent = {
                (row["destination"], row["bytes"])
                for row in ledger_one
                if row["client"] == client and row["block"] == block and row["kind"] == "parameters"
            }
            wanted = 4 * adapter + 4 * sum(v.numel() for v in rest)
            held = block == "a" or client != 3
            assert {size for _, size in sent} == ({wanted} if held else set())


@pytest.mark.parametrize("ranks", [None, MIXED], ids=["uniform", "mixed"])
def test_the_body_of_a_packet_has_the_bytes_that_the_ledger_says(
    ranks: list[int] | None, folders: dict[str, str]
) -> None:
    """The body has four bytes for each number of the adapters and of the rest. The ledger books no header."""
    parts = assemble(made(folders, "hetlora", ranks))
    bodies: dict[int, int] = {}

    def watch(send: Any, replies: Replies) -> None:
        for client, reply in replies.items():
            packet = encode(reply)
            assert packet.header["message"] == "Update"
            bodies[client] = len(packet.body)

    with parts.fed.watched(watch):
        through(parts, 1)
    booked = dict.fromkeys(range(6), 0)
    for row in parts.ledger.rows():
        booked[row["client"]] += row["bytes"] if row["destination"] == "server" else 0
    assert bodies == booked


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_equal_ranks_are_todays_lora_bit_for_bit(engine: str, folders: dict[str, str]) -> None:
    _, plain, ledger = played(made(folders, engine=engine))
    _, equal, ledger_equal = played(made(folders, ranks=[4], engine=engine))
    assert checkpoint.digest(plain) == checkpoint.digest(equal)
    assert ledger == ledger_equal


def test_a_client_of_rank_two_trains_as_peft_does_at_rank_two(folders: dict[str, str]) -> None:
    """The factor alpha / r is the same for all clients, so the model of rank 2 needs half of alpha."""
    parts = assemble(made(folders, "mean", MIXED))
    small = assemble(made(folders, loras=({**TEXT, "r": 2, "alpha": 4.0}, {**IMAGE, "r": 2, "alpha": 4.0})))
    replied, _ = recorded(parts, 1)
    shapes = parts.fed.ranks.shapes(2)
    start = {n: v[tuple(map(slice, shapes[n]))].contiguous() if n in shapes else v for n, v in parts.initial.items()}
    small.initial = small.fed.template = start
    alone, _ = recorded(small, 1)
    assert same(replied[0][2], alone[0][2])


def test_ranks_that_no_client_of_a_round_has_stay_and_train_later(folders: dict[str, str]) -> None:
    for way in ("mean", "hetlora"):
        parts = assemble(made(folders, way, MIXED))
        fed = parts.fed
        fed.begin(1)
        method, first = parts.algorithm, parts.algorithm.init(fed, parts.initial)
        few = [1, 4]  # clients of rank 1
        replies = fed.ask(method.update, few, method.outgoing(first, few, fed))  # type: ignore[attr-defined]
        after = method.merge(first, replies, fed).params  # type: ignore[attr-defined]
        for a, b in pairs(parts.initial):
            assert torch.equal(after[a][1:], parts.initial[a][1:])
            assert torch.equal(after[b][:, 1:], parts.initial[b][:, 1:])
            assert not torch.equal(after[b][:, :1], parts.initial[b][:, :1])


def test_the_rules_where_nothing_has_been_learnt() -> None:
    a, b = torch.randn(2, 3, 5), torch.zeros(2, 4, 3)
    weights, before = torch.tensor([0.25, 0.75], dtype=torch.float64), torch.randn(3, 5)
    layer = adapters.Adapted(a, b, weights, torch.tensor([3, 3]), before)
    kept = before.clone()
    for rule in (adapters.hetlora, adapters.fedilora):
        mean, zero = rule(layer)
        torch.testing.assert_close(mean, 0.25 * a[0] + 0.75 * a[1])
        assert not zero.any()
    same_a, zero = adapters.flexlora(layer)
    assert torch.equal(same_a, kept)
    assert not zero.any()
    b[0, :, 0] = 1.0  # one product of rank one
    new_a, new_b = adapters.flexlora(layer)
    assert torch.equal(new_a[1:], kept[1:])
    assert not new_b[:, 1:].any()
    torch.testing.assert_close(new_b @ new_a, 0.25 * b[0] @ a[0])
    assert torch.equal(before, kept)


def test_flexlora_by_small_triangles_equals_the_whole_decomposition() -> None:
    generator = torch.Generator().manual_seed(1)
    ranks = [3, 1, 2]
    adapted = [
        (
            torch.randn(r, 40, generator=generator).double().numpy(),
            torch.randn(30, r, generator=generator).double().numpy(),
        )
        for r in ranks
    ]
    a, b = torch.zeros(3, 3, 40, dtype=torch.float64), torch.zeros(3, 30, 3, dtype=torch.float64)
    for client, (own_a, own_b) in enumerate(adapted):
        a[client, : ranks[client]], b[client, :, : ranks[client]] = torch.tensor(own_a), torch.tensor(own_b)
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    new_a, new_b = adapters.flexlora(adapters.Adapted(a, b, weights, torch.tensor(ranks), torch.zeros(3, 40)))
    for r in (1, 2, 3):
        np.testing.assert_allclose(new_b[:, :r] @ new_a[:r], oracle.flexlora(adapted, [5, 3, 2], r), atol=1e-10)


def repaired_parts(folders: dict[str, str], **options: Any) -> tuple[list[dict[int, Tree]], list[Tree]]:
    return recorded(assemble(made(folders, "fedilora", MIXED, **options)), 2)


def test_repair_pulls_back_the_matrix_that_turned_furthest(folders: dict[str, str]) -> None:
    far = Train(lr=0.5, epochs=2, batch_size=8)
    plain, states = repaired_parts(folders, train=far)
    edited, _ = repaired_parts(folders, train=far, repair=0.99999)
    counts = []
    for client, tree in plain[0].items():
        form = {a: tree[a].double().numpy() for a, _ in pairs(tree)}
        start = {a: states[0][a][: len(value)].double().numpy() for a, value in form.items()}
        wanted = oracle.repaired(form, start, 0.99999)
        changed = [name for name in tree if not torch.equal(tree[name], edited[0][client][name])]
        assert changed == [a for a, value in wanted.items() if value is not form[a]]
        counts.append(len(changed))
        for name in changed:
            np.testing.assert_allclose(edited[0][client][name], wanted[name], atol=1e-6)
    assert set(counts) <= {0, 1}
    assert sum(counts) > 3


def test_repair_is_the_same_on_both_engines_and_nothing_when_all_is_alike(folders: dict[str, str]) -> None:
    ends = [
        through(assemble(made(folders, "fedilora", MIXED, engine, repair=0.9999999)), 2).params
        for engine in ("sequential", "vectorised")
    ]
    assert furthest(*ends) < 1e-4
    alike = [through(assemble(made(folders, "mean", repair=repair)), 1).params for repair in (0.0, 1e-9)]
    assert same(*alike)


def test_repair_without_adapters_is_refused() -> None:
    with refuses(RecipeError, "algorithm.repair: LoRA adapters"):
        assemble(recipe(algorithm("fedavg", repair=0.95)))


def test_a_reply_of_another_rank_is_dropped_and_its_neighbours_are_not(folders: dict[str, str]) -> None:
    parts = assemble(made(folders, "hetlora", MIXED))
    answer, told = parts.fed.engine.answer, []

    def lying(request: Any, clients: Any, send: Any) -> Any:
        got = answer(request, clients, send)
        liar = next(p for p in got.parts if 1 in p.clients)
        honest = next(p for p in got.parts if 0 in p.clients)
        message: Message = map_fields(
            liar.at([liar.clients.index(1)]).message,
            lambda name, value: {n: v[:1] for n, v in honest.message.params.items()} if name == "params" else value,
        )
        forged = replace(liar.at([liar.clients.index(1)]), message=message)
        rest = [left for part in got.parts if (left := part.without({1}))]
        together = [part for part in rest if part is not honest]
        joint = replace(
            honest,
            clients=(*honest.clients, 1),
            message=map_fields(
                honest.message,
                lambda _, x, y: {n: torch.cat([x[n], y[n]]) for n in x} if isinstance(x, dict) else torch.cat([x, y]),
                forged.message,
            ),
        )
        return replace(got, parts=[joint, *together])

    parts.fed.engine.answer = lying  # type: ignore[method-assign]
    parts.fed.emit = lambda event, **facts: told.append((facts["client"], facts["reason"]))
    replied, _ = recorded(parts, 1)
    assert sorted(replied[0]) == [0, 2, 3, 4, 5]
    assert [client for client, _ in told] == [1]
    assert "expected torch.float32 (1, " in told[0][1]


def test_check_tells_the_bytes_of_each_rank(folders: dict[str, str]) -> None:
    ranks = [4, 2, 2, 2]
    told = replace(made(folders, "flexlora", ranks), rounds=1)
    found = check(told)
    assert found.remarks == ()
    parts = assemble(told)
    assert found.facts["ranks"].keys() == {str(rank) for rank in ranks}
    assert found.facts["ranks"]["4"]["a"] == size_bytes({n: v for n, v in parts.initial.items() if block_of(n) == "a"})
    _, _, ledger = played(told)
    for rank in {*ranks}:
        client = ranks.index(rank)
        sent = {
            row["block"]: row["bytes"]
            for row in ledger
            if row["client"] == client and row["kind"] == "parameters" and row["destination"] == "server"
        }
        sizes = found.facts["ranks"][str(rank)]
        assert {block: sizes[block] for block in sent} == sent
        assert f"parameters of a client of LoRA rank {rank}: a " in printed(found)
    planned = {row.block: row.bytes for row in found.planned if row.kind == "parameters" and row.task == "update"}
    assert planned == found.facts["ranks"]["4"]


def test_clients_evaluate_the_model_of_their_own_rank(folders: dict[str, str]) -> None:
    told = replace(made(folders, "flexlora", MIXED, evaluation=Evaluation(personal=True)), rounds=1)
    parts, state, before = played(told)
    measured = parts.algorithm.evaluate(state, parts.fed)
    assert measured.personal.keys() == {*range(6)}
    evaluated = [*parts.ledger.rows()][len(before) :]
    received = {row["client"]: row["bytes"] for row in evaluated if row["block"] == "a" and row["kind"] == "parameters"}
    sizes = check(told).facts["ranks"]
    assert received == {client: sizes[str(MIXED[client % 3])]["a"] for client in range(6)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": []}, "clients.ranks: least 1"),
        ({"ranks": [4, 0]}, "clients.ranks: allowed"),
        ({"ranks": [8, 2]}, "clients.ranks: largest adapter"),
        ({"ranks": [2, 1]}, "clients.ranks: client would train"),
        ({"ranks": [4] * 7}, "clients.ranks: entries count"),
        (
            {"ranks": MIXED, "way": "median"},
            "clients.ranks: compares whole",
        ),
        ({"ranks": MIXED, "method": "scaffold"}, "clients.ranks: averaging"),
        ({"method": "scaffold", "way": "hetlora"}, "server.aggregate: combines"),
        ({"way": "flexlora", "server": ServerOptimiser(aggregate="flexlora", lr=0.5)}, "server.aggregate: factors"),
        ({"ranks": MIXED, "private": ("a",)}, "clients.ranks: private keeps"),
        ({"ranks": MIXED, "fine_tune": 1}, "clients.ranks: fine_tune"),
    ],
)
def test_a_mistake_is_a_sentence_with_the_cure(changes: dict[str, Any], words: str, folders: dict[str, str]) -> None:
    with refuses(RecipeError, words):
        assemble(made(folders, **changes))


def test_a_device_that_checks_a_recipe_accepts_more_ranks_than_it_knows_clients(folders: dict[str, str]) -> None:
    assert assemble(made(folders, ranks=[4] * 7), one_device=True).fed.ranks.ranks == (4,) * 7


def test_ranks_without_adapters_and_other_conflicts_are_refused(folders: dict[str, str]) -> None:
    clients = ClientsSpec(num=6, ranks=[4])
    with refuses(RecipeError, "clients.ranks: LoRA adapters"):
        assemble(recipe(algorithm("fedavg"), clients=clients))
    with refuses(RecipeError, "server.aggregate: LoRA adapters"):
        assemble(recipe(algorithm("fedavg", server=ServerOptimiser(aggregate="flexlora"))))
    with refuses(RecipeError, "clients.ranks: average parameters"):
        assemble(recipe(algorithm("local"), clients=clients))
    secure = {"secure_aggregation": SecureAggregation()}
    for way, words in (
        ("mean", "clients.ranks: of the same"),
        ("hetlora", "secure_aggregation: single clients"),
    ):
        with refuses(RecipeError, words):
            assemble(made(folders, way, MIXED if way == "mean" else None, **secure))
    with refuses(RecipeError, "clients.ranks: need replies"):
        assemble(
            replace(
                made(folders, "mean", MIXED, aggregation="uniform"),
                privacy=Privacy(unit="client", delta=1e-3, noise_multiplier=1.0, unprotected=("statistic",)),
            )
        )
    with refuses(RecipeError, "clients.ranks: averages"):
        assemble(replace(made(folders, "mean", MIXED), attack=Attack(name="alie", share=0.5)))


def test_real_packets_give_the_same_run(folders: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from engines.direct import hub_of, joined
    from engines.direct import played as played_there

    here = replace(made(folders, "flexlora", MIXED), rounds=2)
    there = replace(here, engine=EngineSpec(name="flower"))
    _, state, ledger = played(here)
    other, ledger_there = played_there(there, joined(there, hub_of(there, tmp_path)))
    assert checkpoint.digest(state) == checkpoint.digest(other)
    assert ledger == ledger_there


def test_a_device_takes_adapters_of_its_own_rank_only(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from attacks.test_hostile_messages import Attack, deployed

    attack = Attack(deployed(made(folders, ranks=MIXED)), tmp_path, monkeypatch)
    of_field, whole = attack.of_field, assemble(attack.made).initial

    def resized(value: Tree) -> Tree:
        return {n: t if t.shape == whole[n].shape else whole[n] for n, t in value.items()}

    attack.of_field = (
        lambda said, all_blocks: (  # type: ignore[method-assign]
            of_field(said, all_blocks)
            | {"the ranks of the model": resized}
            | {"a smaller rank": lambda v: {n: t[:1] if ".lora_A" in n else t for n, t in v.items()}}
        )
    )
    attack.play()
    assert not attack.faults, "\n".join(attack.faults)
    assert not attack.lost
    assert {how for task, _, how in attack.tried if task == "update"} >= {"the ranks of the model", "a smaller rank"}


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_corrupt_messages_are_refused_under_ranks_of_clients(
    name: str, folders: dict[str, str], tmp_path: Path
) -> None:
    parts, seen = honest_messages(made(folders, ranks=MIXED, method=name, **ROWS[name].options))
    assert not (found := taken(parts, seen, tmp_path)), "\n".join(found)
