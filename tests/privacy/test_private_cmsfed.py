"""CMSFed under [privacy]: every block is divided by the number of clients that were asked to train it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from laws.rows import PROTOTYPES
from polyfed.algorithms.cmsfed.cmsfed import Report
from polyfed.algorithms.cmsfed.selection import Choice
from polyfed.core.messages import map_fields
from polyfed.core.tree import SHARED, Tree, block_of, select
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies, ReplyStack, stacked
from polyfed.privacy.differential.section import Privacy
from world import algorithm, furthest, played, recipe, same, through

OPTIONS: dict[str, Any] = {"aggregation": "uniform", "gradient_split": "exact", "dominance_threshold": 1.0}
OPEN = ("gradients", "prototypes", "statistic")


def private(noise: float, clip: float = 1.0, **options: Any) -> Any:
    spec = Privacy(unit="client", delta=0.01, noise_multiplier=noise, clip_norm=clip, unprotected=OPEN)
    return recipe(algorithm("cmsfed", **(OPTIONS | options)), "vectorised", rounds=2, privacy=spec, egress=PROTOTYPES)


@pytest.mark.parametrize("options", [{}, {"classifier_average": "cohort"}, {"modality_selection": False}])
def test_without_clipping_and_almost_without_noise_it_is_cmsfed(options: dict[str, Any]) -> None:
    plain = played(recipe(algorithm("cmsfed", **(OPTIONS | options)), "vectorised", rounds=2, egress=PROTOTYPES))[1]
    close = played(private(1e-8, 100.0, **options))[1]
    assert close.choice == plain.choice
    assert furthest(plain.params, close.params) < 1e-4


@pytest.mark.parametrize("average", ["trained", "cohort"])
def test_a_block_is_divided_by_the_clients_that_were_asked_and_not_by_those_that_replied(average: str) -> None:
    parts = assemble(private(1e-8, 100.0, classifier_average=average))
    state = through(parts, 1)
    weak = state.choice.weak
    counts = state.choice.trained(parts.fed.clients.modalities)
    strong = next(m for m in parts.fed.clients.modalities if m != weak)
    assert counts == {
        weak: len(state.choice.train_all) + len(state.choice.train_weak),
        strong: counts[strong],
        SHARED: len(state.choice.picked),
    }
    replies = asked(parts.fed, parts.algorithm, state)
    lost = min(state.choice.train_all)
    every, fewer = merged(parts, state, replies), merged(parts, state, without(replies, lost))
    own = replies[lost].params
    for name, value in own.items():
        expected = every[name] - (value - state.params[name]) / divisor(parts, state, name)
        torch.testing.assert_close(fewer[name], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("average", ["trained", "cohort"])
@pytest.mark.parametrize(("scale", "blocks"), [(1.0, ("a", "b", SHARED)), (1e4, ("a",)), (1.0, ("b", SHARED))])
def test_a_hostile_reply_changes_the_sum_by_at_most_the_clip_norm(
    scale: float, blocks: tuple[str, ...], average: str
) -> None:
    """The reply may also lack blocks that the client was asked to train, or hold blocks that it was not."""
    parts = assemble(private(0.7, 0.3, classifier_average=average))
    state = through(parts, 1)
    replies = asked(parts.fed, parts.algorithm, state)
    for client in sorted(state.choice.picked):
        lie = {name: value + scale for name, value in select(state.params, blocks).items()}
        liar = replaced(replies, client, lie)
        with_lie, without_it = merged(parts, state, liar), merged(parts, state, without(replies, client))
        apart = [(with_lie[n] - without_it[n]).flatten() * divisor(parts, state, n) for n in with_lie]
        assert float(torch.cat(apart).norm()) <= 0.3 * (1 + 1e-3)


def test_the_server_reads_single_gradients_and_never_single_parameters() -> None:
    """The server makes the same choices if every client sends other parameters but the same gradients."""
    parts = assemble(private(1e-8, 100.0))
    state = through(parts, 1)
    replies = asked(parts.fed, parts.algorithm, state)
    other = replies
    for client in state.choice.picked:
        other = changed(other, client, lambda name, value: torch.randn_like(value))
    method: Any = parts.algorithm
    one = method.learned(state, state.params, replies, parts.fed)
    two = method.learned(state, state.params, other, parts.fed)
    assert torch.equal(one.gradients.distance, two.gradients.distance)
    assert all(torch.equal(one.encoders[m].distance, two.encoders[m].distance) for m in one.encoders)
    assert method.choose(one, parts.fed)[0] == method.choose(two, parts.fed)[0]


def test_the_counts_of_a_choice_follow_from_it_alone() -> None:
    choice = Choice("b", [3, 1], {0: "b", 4: "a", 5: "b"})
    assert choice.trained(("a", "b")) == {"a": 3, "b": 4, SHARED: 5}
    assert Choice("b", [], {0: "b"}).trained(("a", "b")) == {"b": 1, SHARED: 1}


def test_a_block_that_no_client_trains_stays_the_same() -> None:
    parts = assemble(private(0.7))
    state = through(parts, 1)
    alone = state.with_(choice=Choice("b", [], dict.fromkeys(sorted(state.choice.picked), "b")))
    after = merged(parts, alone, asked(parts.fed, parts.algorithm, alone))
    assert same(select(after, ["a"]), select(state.params, ["a"]))
    assert not same(select(after, ["b"]), select(state.params, ["b"]))


def asked(fed: Federation, method: Any, state: Any) -> Replies:
    """The replies of the round's clients to the model of this state."""
    replies: Replies = method.train_chosen(state, fed)
    return replies


def merged(parts: Any, state: Any, replies: Replies) -> Tree:
    params: Tree = parts.algorithm.merge(state, replies, parts.fed).params
    return params


def divisor(parts: Any, state: Any, name: str) -> int:
    """The number of clients over which a tensor is averaged."""
    modalities, model = parts.fed.clients.modalities, parts.fed.context.model
    counts: dict[str, int] = state.choice.trained(modalities)
    of_classifier = name in {n for m in modalities for n in model.head_slice(m)}
    return counts[SHARED if of_classifier and parts.algorithm.classifier_average == "cohort" else block_of(name)]


def without(replies: Replies, client: int) -> Replies:
    return Replies([kept for part in replies.parts if (kept := part.without([client])) is not None])


def changed(replies: Replies, client: int, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Replies:
    """The replies, in which one client sends other parameters."""
    return replaced(replies, client, {name: change(name, value) for name, value in replies[client].params.items()})


def replaced(replies: Replies, client: int, params: Tree) -> Replies:
    """The replies, in which one client sends these parameters."""
    lie: Report = map_fields(replies[client], lambda field, value: params if field == "params" else value)
    parts: list[ReplyStack] = [*without(replies, client).parts, *stacked({client: lie})]
    return Replies(parts)
