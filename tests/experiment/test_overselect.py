"""Over-selection: more clients are asked than needed, and the slowest are left out, in simulated and in real time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.core.errors import RecipeError
from polyfed.data import ClientsSpec
from polyfed.experiment.recipes.recipe import Recipe, load_recipe, parse_recipe
from polyfed.experiment.recipes.settings import DeploymentSpec, EngineSpec
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.attack import Attack
from polyfed.federation.links.network import Network
from polyfed.selection import Uniform
from refusals import refuses
from world import algorithm, recipe, through

NET = Network(bandwidth_hz=1e5, compute_flops_per_s=1e7)
NEEDED, ASKED = 4, 6


def timed(engine: str = "sequential", net: Network | None = NET, name: str = "fedavg", **spec: Any) -> Recipe:
    selector = Uniform(participation=NEEDED, overselect=0.5)
    clients = ClientsSpec(partition="iid", num=10, participation=NEEDED, overselect=0.5)
    made = recipe(algorithm(name, selector=selector), engine, clients=clients, network=net, rounds=2)
    return replace(made, engine=EngineSpec(name=engine, **spec))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_fastest_of_more_clients_are_merged_and_nobody_waits_for_the_others(engine: str, tmp_path: Path) -> None:
    run = polyfed.run(timed(engine), tmp_path / "run")
    for row in run.rounds:
        assert len(row["cohort"]) == ASKED
        assert len(row["missing"]) == ASKED - NEEDED
        assert all("the request was closed when 4 clients had replied" in why for why in row["missing"].values())
    parts = assemble(timed(engine))
    through(parts, 1)
    times, dropped = parts.fed.clock.times().by_client(), {int(client) for client in run.rounds[0]["missing"]}
    assert len(times) == NEEDED, "the time of a round does not hold the slowest"
    assert not dropped & times.keys()
    assert run.rounds[0]["simulated_seconds"] == pytest.approx(max(times.values()))


def test_engines_agree_and_without_it_more_time_passes(tmp_path: Path) -> None:
    one = polyfed.run(timed("sequential"), tmp_path / "one")
    two = polyfed.run(timed("vectorised"), tmp_path / "two")
    assert [row["missing"] for row in one.rounds] == [row["missing"] for row in two.rounds]
    assert one.result["simulated_seconds"] == pytest.approx(two.result["simulated_seconds"])
    made = timed()
    waiting = replace(made, clients=replace(made.clients, participation=ASKED, overselect=None))
    waiting = replace(waiting, algorithm=algorithm("fedavg", selector=Uniform(participation=ASKED)))
    whole = polyfed.run(waiting, tmp_path / "whole")
    assert whole.result["simulated_seconds"] > one.result["simulated_seconds"]


def test_min_replies_are_waited_for(tmp_path: Path) -> None:
    run = polyfed.run(timed(min_replies=5), tmp_path / "run")
    assert all(len(row["missing"]) == 1 for row in run.rounds)


def test_where_it_would_have_no_effect_it_is_refused() -> None:
    with refuses(RecipeError, "clients.overselect: slower"):
        timed(net=None)
    for name in ("cmsfed", "fedmsplit", "splitfed"):
        with refuses(RecipeError, f"clients.overselect: '{name}', because it"):
            timed(name=name)


def test_it_is_read_and_written_as_a_key_of_clients(tmp_path: Path) -> None:
    made = timed()
    table = made.table()
    assert table["clients"]["overselect"] == 0.5
    assert "overselect" not in table["selection"]
    again = parse_recipe(table)
    assert again.algorithm.selector == made.algorithm.selector  # type: ignore[attr-defined]
    plain = load_recipe(Path(__file__).parents[2] / "recipes" / "federation-demo.toml").table()
    assert "overselect" not in plain["clients"]
    with refuses(RecipeError, "clients.overselect: above 0"):
        parse_recipe(table | {"clients": table["clients"] | {"overselect": 0.0}})


@pytest.mark.parametrize(
    ("spec", "enough"), [({}, 4), ({"close_at": 0.5}, 3), ({"close_at": 0.9}, 4), ({"min_replies": 5}, 5)]
)
def test_on_flower_a_request_closes_at_the_replies_that_are_needed(
    spec: dict[str, Any], enough: int, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from engines.direct import hub_of, joined, played

    quorum = {"min_replies": spec.pop("min_replies", 1)}
    made = replace(timed("flower", None, **quorum), rounds=1, deployment=DeploymentSpec(**spec))
    parts = joined(made, hub_of(made, tmp_path))
    seen, exchange = [], parts.engine.transport.exchange  # type: ignore[attr-defined]

    def watched(packets: Any, patience: Any, sent: Any) -> Any:
        seen.append((len(packets), patience.enough))
        return exchange(packets, patience, sent)

    parts.engine.transport.exchange = watched  # type: ignore[attr-defined]
    played(made, parts)
    assert seen == [(ASKED, enough)]


def test_liars_who_answer_first_have_a_larger_share_of_the_replies_than_of_the_clients_that_were_asked(
    tmp_path: Path,
) -> None:
    """docs/robustness.md says so; `lying` has to be set for the replies, not for the clients."""
    calm = polyfed.run(timed(), tmp_path / "calm").rounds[0]
    first = sorted(set(calm["cohort"]) - {int(client) for client in calm["missing"]})
    lying = replace(timed(), attack=Attack(name="sign-flip", clients=tuple(first[:2])))
    row = polyfed.run(lying, tmp_path / "lying").rounds[0]
    counted = set(row["cohort"]) - {int(client) for client in row["missing"]}
    assert set(first[:2]) <= counted, "who answers first is never left out"
    assert 2 / len(counted) == pytest.approx(2 / len(row["cohort"]) * ASKED / NEEDED)
