"""Simulated attacks: who attacks, what they send, and that a robust rule withstands what the mean does not."""

from typing import Any

import pytest
import torch

import polyfed
from polyfed.core.errors import PolyfedWarning, RecipeError
from polyfed.core.request import Request
from polyfed.data import ClientsSpec
from polyfed.experiment.assembly import assemble, population_of
from polyfed.experiment.recipe import Recipe, parse_recipe
from polyfed.federation.attack import Attack
from polyfed.selection import Uniform
from polyfed.training.optimisers import ServerOptimiser, Train
from world import algorithm, played, recipe, same


def attacked(attack: Attack | None, engine: str = "sequential", **changes: Any) -> Recipe:
    return recipe(algorithm("fedavg"), engine, attack=attack, **changes)


def seen(made: Recipe) -> tuple[Any, dict[int, Any], dict[int, Any]]:
    """The assembly, and each client's reply in round 1 before and after the attack."""
    parts = assemble(made)
    before: dict[int, Any] = {}
    answer = parts.fed.engine.answer

    def watched(request: Request, clients: Any, send: Any) -> Any:
        got = answer(request, clients, send)
        for part in got.parts:
            for i, client in enumerate(part.clients):
                before[client] = {n: v[i].clone() for n, v in part.message.params.items()}  # type: ignore[attr-defined]
        return got

    parts.fed.engine.answer = watched  # type: ignore[method-assign]
    fed, method = parts.fed, parts.algorithm
    fed.begin(1)
    state = method.init(fed, parts.initial)
    replies = fed.ask(method.update, [0, 2, 4], method.outgoing(state, [0, 2, 4], fed))  # type: ignore[attr-defined]
    return parts, before, {client: reply.params for client, reply in replies.items()}


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(("name", "factor"), [("scaling", 3.0), ("sign-flip", -3.0)])
def test_only_the_update_of_an_attacker_is_multiplied(name: Any, factor: float, engine: str) -> None:
    parts, before, after = seen(attacked(Attack(name=name, clients=(2,), scale=3.0), engine))
    for client in (0, 4):
        assert same(before[client], after[client])
    for key, start in parts.initial.items():
        if key in after[2]:
            torch.testing.assert_close(after[2][key], start + factor * (before[2][key] - start))


def test_a_little_is_enough_follows_the_paper() -> None:
    _, before, after = seen(attacked(Attack(name="alie", clients=(0, 2))))
    # n = 3 replies, m = 2 attackers: s = 3 // 2 + 1 - 2 = 0, share (3 - 2 - 0) / (3 - 2) = 1, cut off at 0.999
    z = 3.090232
    for key in before[4]:
        pair = torch.stack([before[0][key], before[2][key]])
        expected = pair.mean(0) - z * pair.std(0, correction=0)
        torch.testing.assert_close(after[0][key], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(after[2][key], after[0][key])
    assert same(before[4], after[4])


def test_label_flip_changes_the_training_labels_of_attackers_only() -> None:
    honest = population_of(attacked(None))
    lied = population_of(attacked(Attack(name="label-flip", clients=(1, 3))))
    own = torch.cat([honest.train[1], honest.train[3]])
    others = torch.ones(len(honest.columns), dtype=torch.bool)
    others[own] = False
    assert torch.equal(lied.columns.label[own], honest.columns.num_classes - 1 - honest.columns.label[own])
    assert torch.equal(lied.columns.label[others], honest.columns.label[others])


def test_attackers_are_drawn_from_the_seed() -> None:
    attack = Attack(name="sign-flip", share=0.3)
    assert len(attack.attackers(10, 1)) == 3
    assert attack.attackers(10, 1) == attack.attackers(10, 1)
    assert len({attack.attackers(1000, seed) for seed in range(5)}) == 5


def test_an_attack_of_nobody_changes_nothing() -> None:
    plain, none = played(attacked(None)), played(attacked(Attack(name="sign-flip", share=0.0)))
    assert same(plain[1].params, none[1].params)


def test_rules_withstand_what_ruins_the_mean() -> None:
    def accuracy(attack: Attack | None, aggregate: Any) -> float:
        train, server = Train(lr=0.3, batch_size=8, epochs=5), ServerOptimiser(aggregate=aggregate)
        method = algorithm("fedavg", train=train, server=server, aggregation="uniform", selector=Uniform())
        run = polyfed.run(recipe(method, "vectorised", attack=attack, clients=ClientsSpec(num=10), rounds=8))
        return float(run.result["metrics"]["global"]["accuracy"])

    attack = Attack(name="sign-flip", share=0.2, scale=4.0)
    ruined = accuracy(attack, "mean")
    assert ruined < accuracy(None, "mean") - 0.2
    for rule in ("median", "trimmed-mean", "multi-krum", "geometric-median", "norm-clip"):
        assert accuracy(attack, rule) > ruined + 0.2, rule


def test_the_section_of_a_recipe_and_its_mistakes() -> None:
    table = attacked(Attack(name="scaling", scale=5.0)).table()
    assert table["attack"] == {"name": "scaling", "share": 0.2, "clients": [], "scale": 5.0}
    assert parse_recipe(table).attack == Attack(name="scaling", scale=5.0)
    with pytest.raises(RecipeError, match=r"\[attack\] clients = 9: clients have the numbers 0 to 5"):
        played(attacked(Attack(name="scaling", clients=(9,))))
    with pytest.raises(RecipeError, match="share = 2"):
        parse_recipe(table | {"attack": {"name": "alie", "share": 2.0}})
    with pytest.warns(PolyfedWarning, match="scale has no effect"):
        parse_recipe(table | {"attack": {"name": "alie", "scale": 2.0}})
