"""MFedMC: against a bare loop with missing rows, its selections by hand, its bytes, its placebo, its refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from algorithms.test_blockwise import plainly
from oracles import blockwise
from oracles import mfedmc as oracle
from polyfed.algorithms.modalities.mfedmc import FUSION, FUSION_STREAM, Offer, scaled, shapley
from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.core.tree import under
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.replies import Replies, ReplyStack
from polyfed.selection import DivFl
from polyfed.training.client_data import ORDER
from polyfed.training.optimisers import Train
from refusals import refuses
from world import AWKWARD, algorithm, played, recipe

ENGINES = ["sequential", "vectorised"]
TRAIN = Train(lr=0.1, batch_size=16, epochs=2)


def method(**options: Any) -> Any:
    return algorithm("mfedmc", **({"train": TRAIN, "fusion_epochs": 1} | options))


def holed(engine: str, **options: Any) -> Any:
    """Six clients, of whom some lack a modality, and rows that lack one."""
    made = recipe(method(**options), engine)
    return replace(made, clients=replace(made.clients, missing_rows={"a": 0.2, "b": 0.4}))


def federation(
    parts: Assembly, ledger: list[dict[str, Any]], epochs_of: dict[int, int] | None = None, reply: str = "Offer"
) -> blockwise.Federation:
    """The clients for the oracle, with the rows of each step by random stream; `reply` names what a cohort sends."""
    epochs_of = epochs_of or {0: 2, FUSION_STREAM: 1}
    columns, clients = parts.population.columns, []
    for client in range(len(parts.population.train)):
        rows, held = parts.population.train[client], parts.fed.clients.owned(client)
        steps: dict[int, list[list[torch.Tensor]]] = {stream: [] for stream in epochs_of}
        for stream, epochs in epochs_of.items():
            for round in range(1, parts.recipe.rounds + 1):
                key = keys.fold_in(keys.fold_in(keys.key(parts.recipe.seed, "client", client, round), ORDER), stream)
                orders = [keys.permutation(keys.fold_in(key, epoch), len(rows)) for epoch in range(epochs)]
                steps[stream].append([part for order in orders for part in order.split(TRAIN.batch_size)])
        x = {m: columns.modalities[m].values[rows].float() for m in held}
        has = {m: present[rows] for m, present in columns.present.items() if m in held}
        clients.append(oracle.Client(x, columns.label[rows], steps, has))
    sent = {(r["round"], r["client"]) for r in ledger if r["destination"] == "server" and r["message"] == reply}
    cohorts = [sorted(k for r, k in sent if r == round) for round in range(1, parts.recipe.rounds + 1)]
    return blockwise.Federation(clients, cohorts, TRAIN.lr)  # type: ignore[arg-type]


def senders(ledger: list[dict[str, Any]], rounds: int) -> list[dict[str, list[int]]]:
    found: list[dict[str, list[int]]] = [{} for _ in range(rounds)]
    for row in ledger:
        if row["destination"] == "server" and row["message"] == "Upload":
            found[row["round"] - 1].setdefault(row["block"], []).append(row["client"])
    return [{m: sorted(one[m]) for m in sorted(one)} for one in found]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {"client_share": 0.3},
        {"client_share": 0.6, "impact": 1.0, "smallness": 0.0, "recency": 0.0},
        {"client_share": 1.0, "impact": 0.0, "smallness": 0.0, "recency": 1.0},
        {"client_share": 1.0, "uploads": 2},
    ],
    ids=str,
)
def test_three_rounds_equal_a_bare_loop_with_missing_rows(engine: str, options: dict[str, Any]) -> None:
    parts, state, ledger = played(holed(engine, **options))
    assert parts.population.columns.present, "some rows lack a modality"
    told = parts.algorithm
    chosen = oracle.Options(told.uploads, told.client_share, told.impact, told.smallness, told.recency, FUSION_STREAM)
    initial = plainly(assemble(parts.recipe).initial)
    common, fusion, log = oracle.mfedmc(federation(parts, ledger), initial, chosen)
    assert senders(ledger, 3) == log
    torch.testing.assert_close(plainly(state.params), common, rtol=1e-6, atol=1e-6)
    for client, local in parts.engine.locals.items():
        torch.testing.assert_close(plainly(under(FUSION, local)), fusion[client], rtol=1e-6, atol=1e-6)
    assert len({len(one) for round in log for one in round.values()}) > 1 or told.uploads == 2


def test_shapley_values_of_a_game_by_hand_and_their_axioms() -> None:
    worth = {"": 0.0, "a": 1.0, "b": 3.0, "c": 0.0, "ab": 6.0, "ac": 1.0, "bc": 3.0, "abc": 6.0}
    found = shapley("abc", lambda mask: torch.tensor(worth["".join(sorted(mask))]))
    assert {p: float(v) for p, v in found.items()} == pytest.approx({"a": 2.0, "b": 4.0, "c": 0.0})
    assert float(sum(found.values())) == pytest.approx(worth["abc"]), "efficiency"
    assert scaled(torch.tensor([2.0, 2.0])).tolist() == [0.0, 0.0]
    assert scaled(torch.tensor([1.0, 3.0, 2.0])).tolist() == [0.0, 1.0, 0.5]


def offers(losses: dict[int, dict[str, float]], offered: dict[int, str]) -> Replies:
    """Offers of two modalities, one stack for each client."""
    made = []
    for client, own in losses.items():
        flags = {m: torch.tensor([float(m in offered[client])]) for m in own}
        said = {m: torch.tensor([loss]) for m, loss in own.items()}
        made.append(ReplyStack((client,), Offer(flags, said, torch.zeros(1), torch.ones(1, dtype=torch.int64))))
    return Replies(made)


def test_the_server_takes_the_encoders_with_the_smallest_losses_among_those_offered() -> None:
    parts = assemble(recipe(method(client_share=0.5)))
    losses = {0: {"a": 3.0, "b": 0.1}, 1: {"a": 2.0, "b": 0.2}, 2: {"a": 1.0, "b": 0.3}, 4: {"a": 0.5, "b": 9.0}}
    given = offers(losses, {0: "a", 1: "a", 2: "a", 4: "b"})
    assert parts.algorithm.taken(given, parts.fed) == {1: ["a"], 2: ["a"], 4: ["b"]}, "two of four for each modality"
    one = replace(parts.algorithm, client_share=0.01)
    assert one.taken(given, parts.fed) == {2: ["a"], 4: ["b"]}, "at least one"
    random = replace(parts.algorithm, placebo="random-blocks")
    parts.fed.begin(1)
    drawn = random.taken(given, parts.fed)
    assert sum("a" in m for m in drawn.values()) == 2
    assert sum("b" in m for m in drawn.values()) == 1, "as many as the method, among those that were offered"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_sends_what_was_taken_and_nothing_else_and_the_placebo_costs_the_same(engine: str) -> None:
    sizes = {}
    for placebo in ("none", "random-blocks"):
        made = recipe(method(client_share=0.4, placebo=placebo), engine, AWKWARD)
        parts, state, ledger = played(made)
        rows = [r for r in ledger if r["destination"] == "server"]
        head = parts.algorithm.private_names(parts.fed.context.model)
        assert head
        assert not set(state.params) & head
        for round in range(1, 4):
            offered = sum(r["round"] == round and r["message"] == "Offer" and r["field"] == "losses" for r in rows)
            for m in ("a", "b"):
                came = [r for r in rows if r["round"] == round and r["message"] == "Upload" and r["block"] == m]
                assert len(came) <= max(1, -(-4 * offered // 10))
        assert {r["block"] for r in rows if r["kind"] == "parameters"} <= {"a", "b"}
        sizes[placebo] = sum(r["bytes"] for r in rows if r["kind"] == "statistic")
    assert sizes["none"] == sizes["random-blocks"]


def test_what_has_no_effect_or_cannot_be_is_refused() -> None:
    with refuses(RecipeError, "algorithm.client_share: must be"):
        method(client_share=0.0)
    with refuses(RecipeError, "algorithm.impact: priority"):
        method(impact=0.0, smallness=0.0, recency=0.0)
    with pytest.raises(RecipeError) as refused:
        recipe(method(selector=DivFl()))
    assert refused.value.key == ("selection", "name")
    parts = assemble(recipe(method(uploads=2)))
    assert set(parts.algorithm.idle_options(parts.fed)) >= {"impact", "smallness", "recency"}
