"""Workers on the nodes of a Ray cluster: the results of one process, whatever the nodes do."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laws.test_laws import world
from polyfed.engines import in_process, stack_division
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running.assembly import assemble
from world import AWKWARD, same, through

ray = pytest.importorskip("ray", reason="Ray is not installed")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray leaves open sockets and files

MIB = 2**20


@pytest.fixture(autouse=True)
def _everything_is_worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "UNIT_FLOPS", 1.0)
    monkeypatch.setattr(stack_division, "STACK_FLOPS", 1.0)
    monkeypatch.setattr(stack_division, "LEAST_STACK", 2)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes with one core each. This process is on the first one."""
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)
        args = {"num_cpus": 1, "object_store_memory": 80 * MIB}
        made = cluster_utils.Cluster(initialize_head=True, head_node_args=args)
        made.add_node(**args)
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        yield made
        ray.shutdown()
        made.shutdown()


def played(made: Recipe) -> tuple[Any, Any, list[dict[str, Any]]]:
    parts = assemble(made)
    try:
        return parts, through(parts, made.rounds), list(parts.ledger.rows())
    finally:
        parts.engine.close()


def on_ray(made: Recipe, workers: int = 0) -> Recipe:
    return replace(made, engine=replace(made.engine, cluster="ray", workers=workers))


@pytest.mark.parametrize("kind", ["vectorised", "sequential"])
@pytest.mark.parametrize("name", ["fedavg", "cmsfed", "hfm", "pfmml", "scaffold"])
def test_nodes_give_the_bits_of_one_process(nodes: Any, name: str, kind: str) -> None:
    made = replace(world(name, kind, AWKWARD), rounds=3)
    one, state, ledger = played(replace(made, engine=EngineSpec(name=kind, workers=1)))
    parts, again, rows = played(on_ray(made))
    assert parts.engine.pool.num == 2
    assert parts.engine.pool.returned > 0
    assert rows == ledger
    assert parts.engine.locals.keys() == one.engine.locals.keys()
    for client, tree in parts.engine.locals.items():
        assert same(tree, one.engine.locals[client])
    assert same(getattr(again, "params", {}), getattr(state, "params", {}))
