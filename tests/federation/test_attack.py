"""Simulated attacks: who attacks, what they send, and that a robust rule withstands what the mean does not."""

import math
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import polyfed
from laws.test_laws import world as law_world
from polyfed.algorithms.hfm.messages import Copy, Exchange
from polyfed.cli.printing.tables import result_table
from polyfed.core.errors import RecipeError
from polyfed.core.request import Request
from polyfed.data import ClientsSpec, Column
from polyfed.experiment.checks.idle_options import idle_options
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble, population_of
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.attack import Attack
from polyfed.federation.backdoor import Trigger
from polyfed.federation.replies import Answer, Replies, stacked
from polyfed.objective import MultiLabel, Regression, Retrieval
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from refusals import refuses, warned
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


def test_a_little_is_enough_in_any_field_of_parameters() -> None:
    """Copy.head, the reply of HFM's devices, holds parameters under another name than `params`. Counters stay."""
    draws = torch.Generator().manual_seed(1)
    trees = [{"shared.w": torch.randn(3, generator=draws), "shared.count": torch.tensor(client)} for client in range(4)]
    replies = {client: Copy(tree, torch.tensor(0.0), torch.tensor(0.0)) for client, tree in enumerate(trees)}
    honest = Answer.of(stacked(dict(replies)), {})
    got = Exchange({name: value * 0 for name, value in trees[0].items()}, {}, torch.zeros(0, dtype=torch.int64))
    found = Replies(Attack(name="alie", clients=(0, 1)).falsify(honest, got, (0, 1)).parts)
    lie = torch.stack([trees[0]["shared.w"], trees[1]["shared.w"]])
    z = 0.0  # n = 4 replies, m = 2 attackers: s = 4 // 2 + 1 - 2 = 1, share (4 - 2 - 1) / (4 - 2) = 0.5
    for client in (0, 1):
        expected = lie.mean(0) - z * lie.std(0, correction=0)
        torch.testing.assert_close(found[client].head["shared.w"], expected)
        assert int(found[client].head["shared.count"]) == client
    for client in (2, 3):
        assert same(dict(found[client].head), trees[client])


def test_a_little_is_enough_runs_with_a_method_whose_parameters_are_in_another_field() -> None:
    made = replace(law_world("hfm"), attack=Attack(name="alie", share=0.5), rounds=1)
    assert all(bool(value.isfinite().all()) for value in played(made)[1].params.values())


@pytest.mark.parametrize("task", [MultiLabel(), Regression(), Retrieval()], ids=lambda task: task.NAME)
def test_labels_that_are_no_classes_cannot_be_flipped(task: Any) -> None:
    honest = population_of(attacked(None))
    table = honest.columns
    if not isinstance(task, Retrieval):
        table = replace(table, label=torch.rand(len(table), 3).round(), num_classes=3)
    population = replace(honest, columns=task.prepared(table))
    with refuses(RecipeError, "attack.name: exchanges classes") as error:
        Attack(name="label-flip", clients=(1,)).poison(population, 1)
    assert error.value.key == ("attack", "name")


def test_a_share_of_no_client_and_a_single_client_that_hides_among_attackers() -> None:
    for num in (3, 6, 7, 40, 1000):
        attack = Attack(name="sign-flip", share=0.4 / num)
        with refuses(RecipeError, f"attack.share: of {num} clients") as error:
            attack.attackers(num, 1)
        cure = re.search(r"set share = ([0-9.e-]+), or", str(error.value))
        assert cure is not None
        assert len(Attack(name="sign-flip", share=float(cure[1])).attackers(num, 1)) == 1
    with refuses(RecipeError, "attack.share: 0 attackers"):
        assemble(attacked(Attack(name="scaling", share=0.05)))
    with warned("therefore"):
        assemble(attacked(Attack(name="alie", clients=(2,))))


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
    assert attack.attackers(10, 1) == {6, 7, 9}
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
    backdoor = {"modality": "", "target": 0, "poisoned": 0.3125, "trigger_size": 4}
    assert table["attack"] == {"name": "scaling", "share": 0.2, "clients": [], "scale": 5.0} | backdoor
    assert parse_recipe(table).attack == Attack(name="scaling", scale=5.0)
    with refuses(RecipeError, "attack.clients: numbers 0"):
        played(attacked(Attack(name="scaling", clients=(9,))))
    with refuses(RecipeError, "attack.share: must be"):
        parse_recipe(table | {"attack": {"name": "alie", "share": 2.0}})
    (text,) = idle_options(parse_recipe(table | {"attack": {"name": "alie", "scale": 2.0}}))
    assert text == "[attack] scale = 2.0 has no effect beside name = 'alie'"


def backdoored(aggregate: Any, seed: int = 1, **options: Any) -> Recipe:
    train, server = Train(lr=0.3, batch_size=8, epochs=5), ServerOptimiser(aggregate=aggregate)
    method = algorithm("fedavg", train=train, server=server, aggregation="uniform", selector=Uniform())
    attack = Attack(**({"name": "backdoor", "share": 0.2, "target": 1, "modality": "b"} | options))
    return recipe(method, "vectorised", attack=attack, clients=ClientsSpec(num=10), rounds=8, seed=seed)


def test_a_backdoor_changes_some_rows_of_attackers_only() -> None:
    made = backdoored("mean", poisoned=0.5)
    honest, lied = population_of(replace(made, attack=None)), population_of(made)
    changed = (honest.columns.modalities["b"].values != lied.columns.modalities["b"].values).any(-1)
    liars = made.attack.attackers(10, made.seed)  # type: ignore[union-attr]
    per_client = [(int(changed[rows].sum()), len(rows)) for rows in (lied.train[client] for client in range(10))]
    for client, (count, total) in enumerate(per_client):
        assert count == (round(0.5 * total) if client in liars else 0)
    assert int(changed.sum()) == sum(count for count, _ in per_client), "a test row was changed"
    assert bool((lied.columns.label[changed] == 1).all())
    assert torch.equal(lied.columns.label[~changed], honest.columns.label[~changed])
    trigger = lied.columns.modalities["b"].values[changed][:, -4:]
    assert bool((trigger == honest.columns.modalities["b"].take(honest.train.rows).max()).all())
    assert torch.equal(lied.columns.modalities["a"].values, honest.columns.modalities["a"].values)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_trigger_has_its_value_after_shift_and_scale_and_in_whole_numbers(indexed: bool) -> None:
    index = torch.tensor([0, 0, 1]) if indexed else None
    values = torch.zeros(2 if indexed else 3, 1, 2, 3, dtype=torch.uint8)
    column = Column(values, scale=torch.tensor(255.0), index=index)
    planted = Trigger("image", 2, 1.0).planted(column, torch.tensor([0]))
    expected = torch.tensor([[0.0, 0, 0], [0, 1, 1]])
    assert torch.equal(planted.take(torch.tensor([0, 1, 2]))[:, 0], torch.stack([expected, 0 * expected, 0 * expected]))
    shifted = Column(torch.zeros(1, 3), shift=torch.tensor([1.0, 2, 3]), scale=torch.tensor([2.0, 4, 5]))
    taken = Trigger("vector", 2, 7.0).stamped(shifted, torch.tensor([0])).take(torch.tensor([0]))
    torch.testing.assert_close(taken, torch.tensor([[-0.5, 7.0, 7.0]]))


def test_the_trigger_of_a_backdoor_turns_test_rows_and_a_robust_rule_stops_a_scaled_one() -> None:
    found = {rule: polyfed.run(backdoored(rule, scale=5.0)).result for rule in ("mean", "median")}
    mean, median = (found[rule]["backdoor"] for rule in found)
    assert (mean["target"], mean["modality"]) == (1, "b")
    assert mean["success"] > 0.8 > 0.3 > mean["without_trigger"]
    assert median["success"] < mean["success"] - 0.3
    assert found["mean"]["metrics"]["global"]["accuracy"] > 0.5, "a backdoor hides behind a useful model"
    assert "backdoor" not in polyfed.run(replace(backdoored("mean"), attack=None, rounds=1)).result


def test_a_backdoor_in_personal_models_is_measured_at_honest_clients(tmp_path: Path) -> None:
    method = algorithm("local", train=Train(lr=0.3, batch_size=8, epochs=5))
    attack = Attack(name="backdoor", clients=(0, 1), target=1, modality="b")
    run = polyfed.run(
        recipe(method, "vectorised", attack=attack, clients=ClientsSpec(num=4), rounds=2), out=tmp_path / "r"
    )
    assert run.result["backdoor"]["success"] < 0.6, "clients that never meet the attackers have no backdoor"
    page = (tmp_path / "r" / "report.html").read_text()
    assert "test rows that the trigger turns" in page
    assert run.result["attack"] == {"name": "backdoor", "clients": [0, 1]}
    assert "Simulated attack backdoor by 2 of 4 clients: 0, 1." in page
    screen = Console(file=StringIO(), width=120)
    screen.print(result_table(run.result))
    assert "backdoor to class 1" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_mistakes_of_a_backdoor() -> None:
    with refuses(RecipeError, "attack.modality: data"):
        population_of(backdoored("mean", modality="c"))
    with refuses(RecipeError, "attack.target: allowed"):
        population_of(backdoored("mean", target=9))
    entries = math.prod(population_of(backdoored("mean")).columns.modalities["b"].shape)
    population_of(backdoored("mean", modality="b", trigger_size=entries))
    with refuses(RecipeError, f"attack.trigger_size: has {entries} entries"):
        population_of(backdoored("mean", modality="b", trigger_size=entries + 1))
    made = parse_recipe(backdoored("mean").table() | {"attack": {"name": "alie", "trigger_size": 2}})
    assert [text.split(" has")[0] for text in idle_options(made)] == ["[attack] trigger_size = 2"]
