"""The table of conflicts: each row has a recipe that triggers it, with its key and no other one."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch

import polyfed
from polyfed.core.errors import RecipeError
from polyfed.data.columns import Column, Columns
from polyfed.experiment.recipes.conflicts import every_row, refuse_conflicts
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.privacy.differential.section import Privacy
from polyfed.selection import Uniform
from world import algorithm, recipe

CLIENT, EXAMPLE, SECURE = '[privacy] unit = "client"', '[privacy] unit = "example"', "[secure_aggregation]"


def of(method: str, /, **changes: Mapping[str, Any]) -> Callable[[], Recipe]:
    """A recipe of a method, with sections or keys of [algorithm] in addition."""
    own = dict(changes.pop("algorithm", {}))
    table = {"data": {"name": "toy"}, "algorithm": {"name": method} | own, **changes}
    return lambda: parse_recipe(table)


def private(method: str = "fedavg", unit: str = "client", /, **changes: Any) -> Callable[[], Recipe]:
    """A recipe of a method under [privacy], whose other options fit it."""
    spec = {"unit": unit, "delta": 1e-5, "noise_multiplier": 1.0} | dict(changes.pop("privacy", {}))
    uniform = {"aggregation": "uniform"} if unit == "client" else {}
    return of(method, privacy=spec, algorithm=uniform | dict(changes.pop("algorithm", {})), **changes)


@dataclass(frozen=True, kw_only=True)
class Weighing(Uniform):
    """A selector with weights of its own."""

    def weigh(self, memory: Any, weights: Any) -> Any:
        return weights


@dataclass(frozen=True, kw_only=True)
class Learning(Uniform):
    """A selector that gets the replies of single clients."""

    def learn(self, memory: Any, params: Any, replies: Any, fed: Any) -> Any:
        return memory


def selecting(selector: Uniform) -> Callable[[], Recipe]:
    spec = Privacy(unit="client", delta=1e-5, noise_multiplier=1.0)
    return lambda: recipe(algorithm("fedavg", aggregation="uniform", selector=selector), privacy=spec)


def combined(engine: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> Callable[[], Recipe]:
    """A recipe of fedavg whose replies are summed where the clients run."""
    return of("fedavg", engine={"combine": "nodes", **engine}, **changes)


LATE = "[clients] overselect or [network] deadline_s"
MEASURED = "[network] channel = 'measured'"
AMPLIFIED = {"amplification": True}
INT8 = {"compress": "int8"}
CASES: list[tuple[tuple[str, str, str], Callable[[], Recipe]]] = [
    (("", "task.name", ""), of("fedproto", task={"name": "regression"})),
    (("", "model.absent", ""), of("fedavg", model={"absent": "prototypes"})),
    (("", "model.absent", ""), of("local", model={"absent": "input"})),
    (("", "train.modality_dropout", ""), of("creamfl", train={"modality_dropout": 0.2})),
    (
        ("", "train.modality_dropout", "[task] name = 'retrieval'"),
        of("fedavg", task={"name": "retrieval"}, train={"modality_dropout": 0.2}),
    ),
    (("", "selection.name", ""), of("local", selection={"name": "pow-d"})),
    (("", "server", ""), of("fedmsplit", algorithm={"mode": "personal"}, server={"lr": 0.5})),
    (("", "clients.overselect", ""), of("fedamp", clients={"overselect": 1.5}, network={})),
    (("", "clients.overselect", "a simulation without [network]"), of("fedavg", clients={"overselect": 1.5})),
    (("", "network", "[engine] name = 'flower', or a deployment"), of("fedavg", engine={"name": "flower"}, network={})),
    (("", "network.channel", "a simulation"), of("pfmml", network={"channel": "measured"})),
    (("", "network.channel", ""), of("fedavg", engine={"name": "devices"}, network={"channel": "measured"})),
    (
        ("", "network.deadline_s", MEASURED),
        of("pfmml", engine={"name": "devices"}, network={"channel": "measured", "deadline_s": 1.0}),
    ),
    (("", "wire.compress", "[wire] down = 'none'"), of("fedavg", wire={})),
    (("", "wire", "a section [privacy]"), private(wire=INT8)),
    (("", "wire", SECURE), of("fedavg", secure_aggregation={}, wire=INT8)),
    (("", "wire", ""), of("feddyn", wire=INT8)),
    (("", "wire", ""), of("creamfl", wire=INT8)),
    (("", "deployment.relay", ""), of("hfm", engine={"name": "flower"})),
    (("", "deployment.relay", ""), of("fedavg", engine={"name": "devices"}, deployment={"relay": "edge"})),
    (
        ("", "deployment.relay", "[engine] name = 'flower'"),
        of("hfm", engine={"name": "flower"}, deployment={"relay": "edge"}),
    ),
    (("", "stop.max_epsilon", "a recipe without [privacy]"), of("fedavg", stop={"max_epsilon": 1.0})),
    (("", "stop.patience", "[evaluate] every = 0"), of("fedavg", stop={"patience": 2}, evaluate={"every": 0})),
    (("", "evaluate.unimodal", ""), of("fedamp", evaluate={"unimodal": "prototype"})),
    (
        ("", "evaluate.unimodal", "a [task] other than classification"),
        of("fedavg", task={"name": "regression"}, evaluate={"unimodal": "prototype"}),
    ),
    (
        ("", "evaluate.subsets", "[task] name = 'retrieval'"),
        of("fedavg", task={"name": "retrieval"}, evaluate={"subsets": "all"}),
    ),
    (
        ("", "evaluate.conformal", "a [task] other than classification and regression"),
        of("fedavg", task={"name": "multi-label"}, evaluate={"conformal": "split"}),
    ),
    (
        ("", "evaluate.conformal", "[task] name = 'regression'"),
        of("fedavg", task={"name": "regression"}, evaluate={"conformal": "class"}),
    ),
    (
        ("", "evaluate.conformal_groups", SECURE),
        of("fedavg", evaluate={"conformal": "split", "conformal_groups": "modalities"}, secure_aggregation={}),
    ),
    (
        ("", "evaluate.shrinkage", "a [task] other than classification"),
        of("fedavg", task={"name": "regression"}, evaluate={"conformal": "split", "shrinkage": True}),
    ),
    (("", "attack", "a deployment"), of("fedavg", attack={"name": "label-flip"})),
    (("", "attack.name", ""), of("evaluate", attack={"name": "scaling"})),
    (("", "attack.name", SECURE), of("fedavg", attack={"name": "scaling"}, secure_aggregation={})),
    (("", "secure_aggregation", ""), of("fedavg", server={"aggregate": "median"}, secure_aggregation={})),
    (("", "privacy.amplification", SECURE), private(privacy=AMPLIFIED, secure_aggregation={})),
    (("", "privacy.clip", SECURE), private(privacy={"clip": "adaptive"}, secure_aggregation={})),
    (
        ("", "algorithm.aggregation", "[secure_aggregation] and [privacy]"),
        private("fedavg", "example", secure_aggregation={}),
    ),
    (("", "engine.combine", "clients that run in processes of their own"), combined(engine={"name": "flower"})),
    (("", "engine.combine", ""), combined(server={"aggregate": "median"})),
    (("", "engine.combine", SECURE), combined(secure_aggregation={})),
    (("", "engine.combine", "[attack]"), combined(attack={"name": "scaling"})),
    (("", "engine.combine", CLIENT), private(engine={"combine": "nodes"})),
    (("", "engine.combine", LATE), combined(network={"deadline_s": 5.0})),
    (("", "engine.combine", "[clients] ranks"), combined(clients={"ranks": [2]})),
    (("", "engine.combine", "[checkpoint] updates"), combined(checkpoint={"updates": True})),
    (("", "privacy.unit", ""), private("fedamp", "example")),
    (("", "privacy.amplification", "a deployment"), private(privacy=AMPLIFIED)),
    (("", "algorithm.aggregation", CLIENT), private(algorithm={"aggregation": "weighted"})),
    (("", "server.aggregate", CLIENT), private(server={"aggregate": "median"})),
    (("", "selection.name", CLIENT), selecting(Weighing(participation=2))),
    (("", "selection.name", CLIENT), selecting(Learning(participation=2))),
    (
        ("", "privacy.amplification", "[selection] other than uniform, or [clients] overselect"),
        private(privacy=AMPLIFIED, clients={"overselect": 1.5}, network={}),
    ),
    (
        ("", "privacy.amplification", "clients with a state of their own"),
        private(privacy=AMPLIFIED, algorithm={"fine_tune": 1}),
    ),
    (("", "task.name", EXAMPLE), private("fedavg", "example", task={"name": "retrieval"})),
    (("", "train.steps", EXAMPLE), private("fedavg", "example", train={"steps": 3})),
    (("", "train.accumulate", EXAMPLE), private("fedavg", "example", train={"accumulate": 2})),
    (
        ("", "evaluate.unimodal", "[algorithm] private"),
        of("fedavg", algorithm={"private": ["head"]}, evaluate={"unimodal": "prototype"}),
    ),
    (("scaffold", "train.optimiser", ""), of("scaffold", train={"optimiser": "adam"})),
    (("scaffold", "train.momentum", ""), of("scaffold", train={"momentum": 0.9})),
    (("scaffold", "train.clip_norm", ""), of("scaffold", train={"clip_norm": 1.0})),
    (("feddyn", "server.optimiser", ""), of("feddyn", server={"optimiser": "adam"})),
    (("feddyn", "server.lr", ""), of("feddyn", server={"lr": 0.5})),
    (("fednova", "train.optimiser", ""), of("fednova", train={"optimiser": "adam"})),
    (("fednova", "train.nesterov", ""), of("fednova", train={"momentum": 0.9, "nesterov": True})),
    (("fednova", "train.momentum", "[algorithm] mu"), of("fednova", algorithm={"mu": 0.1}, train={"momentum": 0.9})),
    (("fednova", "algorithm.mu", "[train] lr"), of("fednova", algorithm={"mu": 10.0}, train={"lr": 0.5})),
    (("fedbuff", "selection.name", ""), of("fedbuff", selection={"name": "pow-d"})),
    (("fedbuff", "clients.overselect", ""), of("fedbuff", clients={"overselect": 0.5}, network={})),
    (("fedbuff", "network.deadline_s", ""), of("fedbuff", network={"deadline_s": 5.0})),
    (("fedbuff", "checkpoint.updates", ""), of("fedbuff", checkpoint={"updates": True})),
    (
        ("fedbuff", "algorithm.buffer", "[clients] participation"),
        of("fedbuff", algorithm={"buffer": 3}, clients={"participation": 2}),
    ),
    (("pfedme", "train.accumulate", ""), of("pfedme", train={"accumulate": 2})),
    (("cmsfed", "selection.name", "[algorithm] modality_selection"), of("cmsfed", selection={"name": "pow-d"})),
    (
        ("cmsfed", "server.aggregate", '[algorithm] client_weights = "clusters"'),
        of("cmsfed", algorithm={"client_weights": "clusters"}, server={"aggregate": "median"}),
    ),
    (("cmsfed", "algorithm.gradient_split", CLIENT), private("cmsfed", algorithm={"gradient_split": "delta"})),
    (
        ("cmsfed", "algorithm.client_weights", CLIENT),
        private("cmsfed", algorithm={"gradient_split": "exact", "client_weights": "clusters"}),
    ),
    (
        ("cmsfed", "privacy.amplification", ""),
        private("cmsfed", privacy=AMPLIFIED, algorithm={"gradient_split": "exact"}),
    ),
    (
        ("partialfl", "algorithm.probe", "a [task] other than classification"),
        of("partialfl", task={"name": "regression"}, algorithm={"probe": True}),
    ),
    (
        ("partialfl", "algorithm.same_class_negatives", "a [task] other than classification"),
        of("partialfl", task={"name": "regression"}, algorithm={"same_class_negatives": False}),
    ),
    (("centralized", "train.steps", ""), of("centralized", train={"steps": 3})),
    (("split-learning", "train.clip_norm", ""), of("split-learning", train={"clip_norm": 1.0})),
    (("split-learning", "train.steps", ""), of("splitfed", train={"steps": 3})),
    (("split-learning", "train.accumulate", ""), of("split-learning", train={"accumulate": 2})),
    (("hfm", "evaluate.clients", ""), of("hfm", evaluate={"clients": 2})),
    (("hfm", "train.epochs", ""), of("hfm", train={"epochs": 2})),
    (("hfm", "train.steps", ""), of("vfl", train={"steps": 3})),
    (("fedcouncil", "evaluate.conformal", ""), of("fedcouncil", evaluate={"conformal": "split"})),
    (("evaluate", "secure_aggregation", ""), of("evaluate", secure_aggregation={})),
]


@pytest.mark.parametrize(("row", "make"), CASES, ids=[f"{row[0]}:{row[1]}:{row[2]}" for row, _ in CASES])
def test_each_row_has_a_recipe_with_its_key(row: tuple[str, str, str], make: Callable[[], Recipe]) -> None:
    with pytest.raises(RecipeError) as caught:
        refuse_conflicts(make(), deployed=True)  # a conflict of a simulation ends `make`
    fault = caught.value
    assert not fault.several, str(fault)
    assert fault.key == tuple(row[1].split("."))
    assert f"cannot go with {row[2] or '[algorithm] name ='}" in str(fault)


def test_each_row_has_a_case() -> None:
    rows = [(owner, ".".join(row.key), row.beside) for owner, row in every_row()]
    assert Counter(rows) == Counter(row for row, _ in CASES)


def test_a_recipe_with_several_conflicts_tells_all_of_them() -> None:
    with pytest.raises(RecipeError) as caught:
        of("scaffold", train={"momentum": 0.9, "clip_norm": 1.0}, stop={"max_epsilon": 1.0}, evaluate={"every": 1})()
    assert {fault.key for fault in caught.value.several} == {
        ("train", "momentum"),
        ("train", "clip_norm"),
        ("stop", "max_epsilon"),
    }


class Targets:
    """Rows of two modalities whose labels are real numbers."""

    def load(self) -> Columns:
        y = torch.linspace(0.0, 1.0, 60)
        x = {"a": Column(torch.ones(60, 16)), "b": Column(torch.ones(60, 24))}
        return Columns("targets", x, y, 1, (torch.arange(60) % 5 == 4).to(torch.int8) * 2, torch.arange(60))


def test_a_guessed_task_is_compared_with_the_table_too() -> None:
    made = recipe(algorithm("fedproto"), data=Targets())
    with pytest.raises(RecipeError) as caught:
        assemble(made)
    assert caught.value.key == ("task", "name")


def test_polyfed_check_takes_a_recipe_whose_clients_are_late() -> None:
    """The dry run of `polyfed check` has no simulated time, and so no clients that are too slow."""
    made = of("fedavg", clients={"overselect": 1.5, "num": 4, "participation": 2}, network={})()
    assert polyfed.check(made).exit_code == 0
