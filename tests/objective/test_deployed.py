"""Tasks on clients in other processes: equal parameters, what devices tell about their labels, what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from made import KINDS, made_recipe

import world
from engines.direct import hub_of, joined, played
from polyfed.core.errors import DataError
from polyfed.deploy.app_folder import write_nodes
from polyfed.deploy.device.configuration import NodeConfig
from polyfed.deploy.device.data import population_on
from polyfed.deploy.server.enrolment import Admission
from polyfed.engines.protocol import Enrolment, Facts
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.running.events import Emitter
from polyfed.objective import Classification
from refusals import refuses
from world import furthest


@pytest.mark.parametrize(("kind", "guessed"), [("regression", True), ("multi-label", False), ("retrieval", False)])
def test_clients_behind_the_wire_give_the_same(kind: str, guessed: bool, tmp_path: Path) -> None:
    made = replace(made_recipe(kind, engine="flower"), rounds=2)
    made = replace(made, task=None) if guessed else made
    one, state_one, _ = world.played(replace(made, engine=EngineSpec(name="sequential")))
    parts = joined(made, hub_of(made, tmp_path))
    state, _ = played(made, parts)
    assert furthest(state_one.params, state.params) <= 1e-6
    here, there = (part.algorithm.evaluate(s, part.fed) for part, s in ((one, state_one), (parts, state)))
    assert here.metrics["personal"] == pytest.approx(there.metrics["personal"], abs=1e-6)


def told(client: int, size: int) -> Enrolment:
    return Enrolment(client, 20, ("a",), None, True, {"a": (5,)}, size)


def test_a_device_with_another_number_of_targets_is_left_out() -> None:
    made = replace(made_recipe("regression"), data=Missing())
    found = Admission.of(made, [told(0, 3), told(1, 3), told(2, 2)], 3, Emitter())
    assert found.num_classes == 3
    assert found.left_out == {
        2: "it has labels of 2 targets a row, there are 3 by most clients; [deployment] classes decides"
    }
    assert tuple(found.population(Emitter()).columns.label.shape) == (1, 3)
    classes = replace(made, task=None)
    assert not Admission.of(classes, [told(0, 3), told(1, 3), told(2, 2)], 3, Emitter()).left_out


class Missing:
    """The server has no data."""

    def load(self) -> None:
        raise DataError("no data here")


def test_a_device_reads_targets_for_its_task_only(tmp_path: Path) -> None:
    made = made_recipe("regression")
    place = write_nodes(made, tmp_path)[0]
    node = NodeConfig(data=str(place / "data.npz"), client=0, modalities="a,b", policy=str(place / "policy.toml"))
    population = population_on(node, made, None)
    assert tuple(population.columns.label.shape[1:]) == (3,)
    shapes = {name: column.shape for name, column in population.columns.modalities.items()}
    with refuses(DataError, "federation has 2"):
        population_on(node, made, Facts(shapes, 2))
    with refuses(DataError, "needs one class"):
        population_on(node, replace(made, task=Classification()), None)
    assert KINDS["regression"].label_shape(3) == (3,)
