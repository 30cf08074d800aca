"""A run of any method that goes on with a further client gives what it should, or is refused with the reason.

A new client is where one is that no earlier round has drawn. So the run is compared with one that has had the client
from the beginning and did not draw it: the server's state, those of the clients, the rounds, the ledger.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laws.rows import ROWS
from polyfed.algorithms import ALGORITHMS
from polyfed.core.errors import RecipeError
from polyfed.core.system.files import EGRESS
from polyfed.core.tree import Tree
from polyfed.data import Population, Shards
from polyfed.data.column_fitting import Told
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.results.records import Records
from polyfed.experiment.running.assembly import population_of
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.loop import execute
from polyfed.experiment.running.run_state import load_content
from polyfed.federation.attack import Attack
from polyfed.federation.federation import Federation
from polyfed.federation.links.network import Network
from polyfed.laws.federation import Trial
from polyfed.selection import Uniform
from refusals import refuses

GROWS = {
    *("apfl", "ditto", "fedavg", "fedavg-ft", "fedbn", "fedmac", "fedogm", "fedpmr", "fedprox", "fedrep"),
    *("lg-fedavg", "local", "moon", "pfedme", "pfedmma"),
}
"""Methods that take new clients. All others refuse."""

SILOS = {"hfl", "hfm", "vfl"}
"""Methods that refuse for their silos. The others keep more than the model."""


def recipe(name: str, rounds: int) -> Recipe:
    return replace(Trial(ALGORITHMS[name], ROWS[name]).recipe(), rounds=rounds)


def first(population: Population, count: int) -> Population:
    """The clients below a number."""

    def cut(shards: Shards | None) -> Shards | None:
        return None if shards is None else Shards(shards.offsets[: count + 1], shards.rows[: shards.offsets[count]])

    train = cut(population.train)
    assert train is not None
    silo = None if population.silo is None else population.silo[:count]
    own = {"test": cut(population.test), "own_validation": cut(population.own_validation)}
    return replace(population, train=train, holds=population.holds[:count], silo=silo, **own)


class Growing:
    """Runs of one method in which the last client comes in round 2.

    Args:
        change: changes the recipe, which else is that of the laws.
    """

    def __init__(
        self, name: str, folder: Path, patch: pytest.MonkeyPatch, change: Callable[[Recipe], Recipe] = lambda one: one
    ) -> None:
        self.folder, self.recipe = folder, lambda rounds: change(recipe(name, rounds))
        self.all = population_of(self.recipe(1))
        self.last = last = self.all.num_clients - 1

        def choose(self: Uniform, memory: Any, params: Tree, fed: Federation) -> tuple[list[int], Any]:
            return [client for client in fed.clients.eligible if client < last or fed.round > 1], memory

        patch.setattr(Uniform, "choose", choose)

    def begun(self) -> None:
        """Round 1 without the last client."""
        self.run("run", 1, first(self.all, self.last))

    def run(self, name: str, rounds: int, population: Population) -> None:
        execute(self.recipe(rounds), Records(self.folder / name, resume=True), Emitter([]), population=population)

    def left(self, name: str) -> dict[str, Any]:
        """What a run leaves, without what depends on the moment."""
        records = Records(self.folder / name, resume=True)
        made = load_content(records.checkpoints, self.recipe(2).algorithm, torch.device("cpu"))
        assert made is not None
        ledger = [json.loads(line) | {"run": ""} for line in (self.folder / name / EGRESS).read_text().splitlines()]
        ledger = [row for row in ledger if (row["round"], row["client"]) != (1, self.last)]  # scored, but not drawn
        rounds = [json.loads(line) for line in (self.folder / name / "rounds.jsonl").read_text().splitlines()]
        told = [
            {key: row[key] for key in ("cohort", "bytes_up", "bytes_down", "train_loss", "norms")} for row in rounds
        ]
        return {"state": made[1]["state"], "locals": made[1]["locals"], "ledger": ledger, "rounds": told}


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if is_dataclass(one):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.filterwarnings("ignore:.*measures nothing")
@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_method_grows_as_if_the_client_had_not_been_drawn_or_says_why_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Growing(name, tmp_path, monkeypatch)
    runs.begun()
    if name not in GROWS:
        before = {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}
        with refuses(RecipeError, f"clients.num: {'silos' if name in SILOS else 'keeps more'}"):
            runs.run("run", 2, runs.all)
        assert {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")} == before
        runs.run("run", 2, first(runs.all, runs.last))  # without the client it goes on
        return
    runs.run("run", 2, runs.all)
    for rounds in (1, 2):
        runs.run("whole", rounds, runs.all)
    grown, whole = runs.left("run"), runs.left("whole")
    assert [runs.last in row["cohort"] for row in grown["rounds"]] == [False, True]
    for part in grown:
        assert same(grown[part], whole[part]), part


def attacked(made: Recipe) -> Recipe:
    return replace(made, attack=Attack(name="sign-flip", clients=(0,)))


def linked(made: Recipe) -> Recipe:
    return replace(made, network=Network(bandwidth_hz=1e6, compute_flops_per_s=1e9))


@pytest.mark.parametrize(("change", "noun"), [(attacked, "[attack]"), (linked, "[network]")])
def test_what_was_drawn_over_the_first_clients_refuses(
    change: Callable[[Recipe], Recipe], noun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Growing("fedavg", tmp_path, monkeypatch, change)
    runs.begun()
    with refuses(RecipeError, f"clients.num: {noun}"):
        runs.run("run", 2, runs.all)


def test_words_of_columns_and_a_set_up_with_all_clients_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Growing("fedavg", tmp_path, monkeypatch)
    runs.begun()
    told = ({"a": {"job": Told()}}, *[{}] * runs.last)
    with refuses(RecipeError, "clients.num: [data.columns]"):
        runs.run("run", 2, replace(runs.all, told=told))
    path = tmp_path / "run" / EGRESS
    path.write_text(path.read_text().replace('"round":1', '"round":0', 1).replace('"round": 1', '"round": 0', 1))
    with refuses(RecipeError, "clients.num: before the"):
        runs.run("run", 2, runs.all)
