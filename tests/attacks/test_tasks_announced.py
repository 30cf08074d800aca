"""Tasks and fields that `polyfed check` does not announce: nothing of them leaves a client."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from attacks.smuggling import ENGINES, EVERYTHING, TRAIN, announced, hiding, places, refused, under, up, update_with
from laws.test_laws import world
from polyfed.algorithms.averaging import Averaging, State
from polyfed.algorithms.base import Broadcast
from polyfed.algorithms.knowledge.creamfl import PublicSetWanted
from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.request import Request
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.deploy.app_folder import device_tables, write_nodes
from polyfed.deploy.device.configuration import NodeConfig, policy_on
from polyfed.deploy.device.data import population_on
from polyfed.deploy.device.recipe_check import inspect
from polyfed.deploy.handlers import runtime_of
from polyfed.engines.protocol import Facts
from polyfed.evaluation.scores import Evaluation, ModelToEvaluate
from polyfed.experiment.checks.check import check, plan
from polyfed.experiment.running.assembly import assemble, population_of
from polyfed.selection import Uniform
from polyfed.training.prototypes import Encoders
from refusals import refuses
from world import recipe, through


@message
class Sketch(Message):
    """Numbers."""

    sketch: Tensor = carries("statistic", shape=(None,))


class Sketching:
    """A task to mix in."""

    @task()
    def draw(self, context: Any, data: Any, local: Tree, got: Broadcast) -> tuple[Sketch, Tree]:
        """Many numbers."""
        return Sketch(data.num_rows + torch.zeros(2000)), local

    @task(scope="silo")
    def draw_inside(self, context: Any, data: Any, local: Tree, got: Broadcast) -> tuple[Sketch, Tree]:
        """Many numbers, for the silo's edge."""
        return Sketch(data.num_rows + torch.zeros(2000)), local


def update(self: Any, context: Any, data: Any, local: Tree, got: Broadcast) -> tuple[Sketch, Tree]:
    """Many numbers, from a function that is named as another task."""
    return Sketch(data.num_rows + torch.zeros(2000)), local


@dataclass(frozen=True, kw_only=True)
class Mixed(Sketching, Averaging):
    """Asks for tasks of a mixin."""

    asked: str = "draw"

    drawn = Sketching.draw
    renamed = task()(update)

    def round(self, state: Any, fed: Any) -> Any:
        fed.ask(getattr(self, self.asked), list(fed.clients.eligible), Broadcast(state.params))
        return state


@dataclass(frozen=True, kw_only=True)
class Choosy(Sketching, Uniform):
    """A selector that asks for a task of its own."""

    def choose(self, memory: Any, params: Tree, fed: Any) -> Any:
        fed.ask(self.draw, list(fed.clients.eligible), Broadcast(params))
        return super().choose(memory, params, fed)


@pytest.mark.parametrize(
    ("method", "place", "name"),
    [
        (Mixed(), "server", "draw"),
        (Mixed(asked="drawn"), "server", "draw"),
        (Mixed(asked="renamed"), "server", "renamed"),
        (Mixed(asked="draw_inside"), "silo", "draw_inside"),
        (Averaging(selector=Choosy(participation=2)), "server", "selector.draw"),
    ],
    ids=["mixin", "two names", "another name", "silo", "selector"],
)
def test_tasks_from_elsewhere_are_announced(method: Averaging, place: str, name: str) -> None:
    made = recipe(replace(method, train=TRAIN))
    announced(made, ("sketch", "statistic", "shared", place))
    assert name in {row.task for row in check(made).planned}


@dataclass(frozen=True, kw_only=True)
class Growing(Averaging):
    """Gets a task when the run has begun."""

    def round(self, state: Any, fed: Any) -> Any:
        type(self).late = Sketching.draw  # type: ignore[attr-defined]
        try:
            fed.ask(self.late, list(fed.clients.eligible), Broadcast(state.params))  # type: ignore[attr-defined]
        finally:
            del type(self).late  # type: ignore[attr-defined]
        return state


def test_a_task_that_comes_later_lets_nothing_out() -> None:
    refused(recipe(Growing(train=TRAIN)), "answer task late")


@dataclass(frozen=True, kw_only=True)
class Straying(Averaging):
    """Asks for what is no task of its own."""

    how: str = "unmarked"

    def unmarked(self, context: Any, data: Any, local: Tree, got: Broadcast) -> tuple[Sketch, Tree]:
        return Sketch(torch.zeros(2000)), local

    def round(self, state: Any, fed: Any) -> Any:
        asked = {"unmarked": self.unmarked, "other": Mixed(train=TRAIN).draw, "parent": super().update}[self.how]
        fed.ask(asked, list(fed.clients.eligible), Broadcast(state.params))
        return state

    @task()
    def update(self, context: Any, data: Any, local: Tree, got: Broadcast) -> tuple[Sketch, Tree]:
        """Another one than the parent's."""
        return Sketch(torch.zeros(2)), local


@pytest.mark.parametrize("how", ["unmarked", "other", "parent"])
def test_only_tasks_of_the_algorithm_are_asked(how: str) -> None:
    refused(recipe(Straying(train=TRAIN, how=how)), "task of Straying", RecipeError)


# what the method says it does not ask or send


@dataclass(frozen=True, kw_only=True)
class Examining(Averaging):
    """Asks clients for what only the server's own rows, or nobody, is asked for."""

    asked: str = "score"

    def round(self, state: State, fed: Any) -> Any:
        names = {name for name in state.params if ".encoder." in name}
        send = {
            "score": ModelToEvaluate(state.params, {}, {}),
            "class_means": Encoders({name: state.params[name] for name in names}),
        }.get(self.asked, Broadcast(state.params))
        fed.ask(getattr(self, self.asked), list(fed.clients.eligible), send)
        return state


@pytest.mark.parametrize("asked", ["score", "score_own", "class_means"])
def test_a_task_that_is_not_announced_lets_nothing_out(asked: str) -> None:
    made = recipe(Examining(train=TRAIN, asked=asked, evaluation=Evaluation(personal=False)), egress=EVERYTHING)
    made = replace(made, clients=replace(made.clients, personal_test=0.3))
    refused(made, f"to task {asked}")


def test_a_client_does_not_hand_over_what_only_the_servers_rows_are_asked_for() -> None:
    parts = assemble(replace(world("creamfl"), egress=EVERYTHING))
    request = Request(parts.algorithm.publish, "publish", 1, 1, 0, 1)  # type: ignore[attr-defined]
    with refuses(EgressError, "raw of a"):
        parts.engine.answer(request, [0], PublicSetWanted())
    assert parts.ledger.bytes_up == 0


def test_what_will_send_denies_does_not_leave() -> None:
    def denies(self: Any, task: str, field: str, block: str, policy: Any) -> bool:
        return field != "extra"

    method = hiding(update_with("predictions", blocks=("shared",)), under("shared"), will_send=denies)
    assert not [row for row in plan(assemble(recipe(method, egress=EVERYTHING))) if row.field == "extra"]
    refused(recipe(method, egress=EVERYTHING), "as Smuggler.will_send says")
    refused(recipe(method), "predictions of shared")


@dataclass(frozen=True, kw_only=True)
class Patient(Averaging):
    """Behaves in the first round, so also while it is rehearsed."""

    replies: ClassVar[type[Message]] = update_with("predictions")

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Any, Tree]:
        extra = {"shared": torch.zeros(3)} if data.round > 1 else {}
        return self.replies(fit.params, fit.loss, data.num_rows, extra), local  # type: ignore[call-arg]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_no_rehearsal_sees_is_refused_when_it_comes(engine: Any) -> None:
    made = recipe(Patient(train=TRAIN), engine, egress=EVERYTHING)
    assert not check(made).refused
    parts = assemble(made)
    through(parts, 1)
    before = parts.ledger.bytes_up
    with refuses(EgressError, "holds 'shared'"):
        through(parts, 3)
    assert places(row for row in up(parts) if row["verdict"] == "allowed") <= places(check(made).planned)
    assert {row["field"] for row in up(parts) if row["verdict"] == "allowed"} == {"params", "loss", "num_rows"}
    assert parts.ledger.bytes_up >= before


# a device


@pytest.mark.parametrize("name", ["fedavg", "hfm", "vfl"])
def test_a_device_is_told_what_its_own_gate_goes_by(name: str, tmp_path: Path) -> None:
    made = world(name)
    population = population_of(made)
    for client, table in enumerate(device_tables(made, write_nodes(made, tmp_path))):
        table |= {"relay": "server-sees"}
        node = NodeConfig(**table)
        inspection = inspect(made, " ".join(f"{key}={json.dumps(value)}" for key, value in table.items()))
        shapes = {modality: column.shape for modality, column in population.columns.modalities.items()}
        facts = Facts(shapes, population.columns.num_classes)
        policy = policy_on(node, made, node.held)
        held = population_on(node, made, facts)
        engine = runtime_of(made, held, facts, policy, node.folder, relay=True).engine
        gate = engine.announcement(engine.registry.owned(client)).rows.values()
        told = {(row.task, row.field, row.block, row.allowed, row.fix) for row in inspection.planned}
        assert told == {(row.task, row.field, row.block, row.allowed, row.fix) for row in gate}
