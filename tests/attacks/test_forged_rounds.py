"""A server that asks for a round which the recipe lacks, so that the learning rate follows no checked option."""

from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from attacks.test_limits import device
from attacks.test_requirements import Hostile, left, text
from polyfed.algorithms.base import Broadcast
from polyfed.algorithms.personal.fedamp import FedAmp
from polyfed.core.tree import digest
from polyfed.engines.protocol import FAILED, REPLY, Facts, RequestId, versions
from polyfed.experiment.checks.limit_checks import unfit_options
from polyfed.federation.wire.wire_format import Packet, encode
from polyfed.privacy.egress.limits import Limits
from world import recipe

FALLING = text("", 'steps = 3\nlr_end = 0.0\nlr_schedule = "linear"').replace('"fedavg"', '"fedprox"\nmu = 0.9')
"""At the rates of the recipe's own rounds, no step undoes more than a tenth of the earlier steps."""


def ask(server: Hostile, round: int, rounds: int) -> Packet:
    columns = server.parts.population.columns
    shapes = {name: column.shape for name, column in columns.modalities.items()}
    facts = Facts(shapes, columns.num_classes, digest(server.parts.model.unsent))
    about = {"task": "update", "seed": 0, "rounds": rounds, "turn": 0, "modalities": list(server.owned), "kept": 0}
    header = RequestId("run", 1, round, 0, 1).header(want="ask", facts=asdict(facts), **versions(), **about)
    sent = encode(Broadcast(server.params))
    return server.devices(Packet(header | sent.header, sent.body), {"partition-id": 1})


@pytest.mark.parametrize(("round", "rounds"), [(150, 2), (3, 2), (150, 200), (2, 3), (1, 0), (1, -10)])
def test_a_round_that_the_recipe_lacks_is_not_trained(round: int, rounds: int, tmp_path: Path) -> None:
    """Round 150 of 2 has the rate -14.8: the last step decides alone, although `lr * mu` of the recipe is small."""
    server = Hostile(device(tmp_path, "min_steps = 3", FALLING))
    reply = ask(server, round, rounds)
    assert reply.header["verdict"] == FAILED
    read = "the message is not a request that can be read"
    told = f"is for round {round} of {rounds}, but the recipe on the device has 2 rounds" if rounds >= 0 else read
    assert told in str(reply.header["reason"])
    assert not left(server.devices)


def test_every_round_of_the_recipe_is_trained(tmp_path: Path) -> None:
    server = Hostile(device(tmp_path, "min_steps = 3", FALLING))
    assert [ask(server, round, 2).header["verdict"] for round in (1, 2)] == [REPLY, REPLY]


def test_an_alpha_that_has_decayed_to_zero_pulls_without_bound() -> None:
    made = recipe(FedAmp(alpha_decay=0.1, alpha_every=1), rounds=400)
    assert any("lr * lam / alpha = inf" in why for why in unfit_options(Limits(min_steps=2), made))
    assert not list(unfit_options(Limits(), made))
