"""A device whose reply holds no rows is left out with a reason, and the run of the other devices goes on."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from algorithms.silo_world import OPEN, Silos
from algorithms.test_hfm import method
from algorithms.test_partialfl import partial
from algorithms.test_split import split
from polyfed.core.messages import Message, map_fields, map_tensors, trimmed
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.replies import Answer, Replies, stacked
from polyfed.privacy.egress.policy import Policy
from polyfed.selection import Uniform
from world import through

HOSTILE = 0


def without_rows(reply: Message) -> Any:
    """The reply, cut to no rows."""
    counts = {*reply.counts.values()}

    def emptied(name: str, value: Any) -> Any:
        if name in counts:
            return torch.zeros_like(value)
        if name not in reply.counts:
            return value
        return {key: part[:0] for key, part in value.items()} if isinstance(value, dict) else value[:0]

    return map_fields(reply, emptied)


def bent(fed: Any) -> dict[int, set[str]]:
    """Have the hostile device reply without rows; the reasons of those that are missing, by client."""
    answer, missing = fed.engine.answer, dict[int, set[str]]()

    def hostile(request: Any, clients: Any, send: Any) -> Answer:
        got = answer(request, clients, send)
        replies = {client: map_tensors(trimmed(reply), torch.clone) for client, reply in Replies(got.parts).items()}
        if HOSTILE in replies:
            replies[HOSTILE] = without_rows(replies[HOSTILE])
        return Answer.of(stacked(replies), got.missing)

    fed.engine.answer = hostile
    fed.emit = lambda event, **facts: missing.setdefault(facts.get("client", -1), set()).add(str(facts.get("reason")))
    return missing


@pytest.mark.parametrize("u", [False, True], ids=["plain", "u-shaped"])
@pytest.mark.parametrize("name", ["split-learning", "splitfed"])
def test_activations_without_rows(name: str, u: bool) -> None:
    parts = assemble(split(name, u=u, options={"selector": Uniform(participation=1.0)}))
    missing = bent(parts.fed)
    after = through(parts, 2)
    assert missing == {HOSTILE: {"sent no rows"}}
    assert any(not torch.equal(after.params[n], v) for n, v in parts.initial.items()), "the others trained the model"


def test_a_deposit_without_rows() -> None:
    parts = assemble(partial())
    missing = bent(parts.fed)
    state = through(parts, 2)
    assert "deposited modalities without rows" in missing[HOSTILE]
    assert HOSTILE not in state.deposits
    assert state.deposits, "the others have deposited theirs"


@pytest.mark.parametrize("overlap", ["exact", "common", "all"])
@pytest.mark.parametrize("name", ["hfm", "vfl"])
def test_a_device_of_a_silo_without_ids(name: str, overlap: str) -> None:
    world = Silos([40, 23], [(["a"], ["b"])] * 2)
    policy = OPEN if name == "hfm" else Policy.parse(OPEN_TO_ALL, ("a", "b"))
    algorithm = method(name, overlap=overlap)
    fed, _ = world.federation(algorithm, policy=policy)
    missing = bent(fed)
    fed.begin(0)
    state = algorithm.init(fed, world.initial)
    fed.begin(1)
    state = algorithm.round(state, fed)
    assert "sent no sample ids" in missing[HOSTILE]
    assert [client for edge in state.edges.values() for client in edge.ids] == [1, 2, 3]
    assert 0 < state.train_loss < math.inf, "the other silo trained"


def test_a_device_of_a_silo_without_test_rows_costs_its_own_silo_the_score() -> None:
    world = Silos([40, 23], [(["a"], ["b"])] * 2)
    world.population = replace(world.population, test=world.population.train)
    algorithm = method(evaluation=Evaluation(every=1))
    fed, _ = world.federation(algorithm)
    fed.begin(0)
    state = algorithm.init(fed, world.initial)
    missing = bent(fed)
    assert set(algorithm.evaluate(state, fed).personal) == {2}
    assert "sent no sample ids" in missing[HOSTILE]


OPEN_TO_ALL = {
    block: {
        "server": ["parameters", "embeddings", "statistic", "ids"],
        "silo": ["parameters", "embeddings", "ids", "statistic"],
    }
    for block in ("a", "b", "shared")
}
