"""What a task may keep, send and raise on both engines, and the errors for what it may not."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from polyfed.algorithms.averaging import Averaging, Update
from polyfed.core.errors import EgressError, RecipeError, TooFewReplies
from polyfed.core.messages import Message, carries, message
from polyfed.core.tree import Tree
from polyfed.data import ClientsSpec
from polyfed.experiment.running.assembly import assemble
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, furthest, played, recipe

TRAIN = Train(lr=0.1, batch_size=16)


@dataclass(frozen=True, kw_only=True)
class Counting(Averaging):
    """Remembers how often it took part, without a word in `local`."""

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Update, Tree]:
        return Update(fit.params, fit.loss, data.num_rows), {"n": local.get("n", torch.zeros(())) + 1}


@dataclass(frozen=True, kw_only=True)
class Hoarding(Averaging):
    """Keeps the logits of all of its rows where it had a vector before."""

    def local(self, context: Any, key: int) -> Tree:
        return {"z": torch.zeros(3)}

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Update, Tree]:
        logits = data.collect(lambda batch: {"z": context.model.logits(fit.params, batch)})
        return Update(fit.params, fit.loss, data.num_rows), logits


def test_clients_that_keep_something_and_clients_that_do_not_yet_meet_in_a_round() -> None:
    counted = []
    for engine in ("sequential", "vectorised"):
        method = Counting(train=TRAIN, selector=Uniform(participation=3))
        parts, _, _ = played(recipe(method, engine, rounds=6, clients=ClientsSpec(partition="iid", num=6)))
        counted.append({client: float(tree["n"]) for client, tree in parts.engine.locals.items()})
    assert counted[0] == counted[1]
    assert sum(counted[0].values()) == 18
    assert len(set(counted[0].values())) > 1, "some took part more often than others"


def test_an_entry_per_row_is_not_kept_with_the_padding_of_a_stack() -> None:
    parts, _, _ = played(recipe(Hoarding(train=TRAIN), "sequential", rounds=1))
    assert all(len(tree["z"]) == parts.fed.clients[c].num_rows for c, tree in parts.engine.locals.items())
    with refuses(RecipeError, "Algorithm.local"):
        played(recipe(Hoarding(train=TRAIN), "vectorised", rounds=1))


@pytest.mark.parametrize("name", ["fedavg-ft", "ditto", "apfl", "pfedme", "moon"])
def test_a_layer_with_as_many_units_as_a_client_has_rows_is_kept(name: str) -> None:
    clients = ClientsSpec(partition="dirichlet", num=4, alpha=1.0, personal_test=0.2)
    plain = recipe(algorithm(name, train=TRAIN, selector=Uniform()), clients=clients)
    rows = int(assemble(plain).fed.clients.num_rows.max())
    encoders = {m: {"kind": "mlp", "hidden": [rows]} for m in "ab"}
    ended = []
    for engine in ("sequential", "vectorised"):
        parts, state, _ = played(recipe(plain.algorithm, engine, encoders, clients=clients, rounds=2))
        parts.fed.begin(parts.fed.rounds)
        parts.algorithm.evaluate(state, parts.fed)
        ended.append(parts.engine.locals)
    assert ended[0].keys() == ended[1].keys()
    assert all(furthest(tree, ended[1][client]) < 1e-4 for client, tree in ended[0].items())


@message
class Rows(Message):
    """Something for every row, without a word of that."""

    z: Tree = carries("embeddings", shape=(None, "classes"), blocks=("shared",))


@dataclass(frozen=True, kw_only=True)
class Padding(Averaging):
    """Sends the logits of all of its rows."""

    replies: ClassVar[type[Message]] = Rows

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Message, Tree]:
        return Rows(data.collect(lambda batch: {"shared": context.model.logits(fit.params, batch)})), local


def test_an_entry_per_row_is_not_sent_with_the_padding_of_a_stack() -> None:
    policy = {"shared": {"server": ["embeddings", "parameters"]}}
    with refuses(RecipeError, "z.shared"):
        played(recipe(Padding(train=TRAIN), "vectorised", rounds=1, egress=policy))


@dataclass(frozen=True, kw_only=True)
class Numbering(Averaging):
    """Keeps what is no tensor."""

    kept: str = "n"

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Message, Any]:
        return Update(fit.params, fit.loss, data.num_rows), {"n": 3} if self.kept else None


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(("kept", "words"), [("n", "int"), ("", "NoneType")])
def test_local_state_of_anything_but_tensors_is_refused(engine: str, kept: str, words: str) -> None:
    with refuses(RecipeError, words):
        played(recipe(Numbering(train=TRAIN, kept=kept), engine, rounds=1))


@dataclass(frozen=True, kw_only=True)
class Pretending(Averaging):
    """Raises what only the gate may raise; its words would leave a device."""

    def loss(self, context: Any, w: Tree, batch: Any, got: Any, local: Tree) -> Any:
        raise EgressError(f"labels: {batch.y}")


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_task_that_raises_a_refusal_of_its_own_has_failed(engine: str) -> None:
    with refuses(TooFewReplies, "EgressError"):
        played(recipe(Pretending(train=TRAIN), engine, rounds=1))


@dataclass(frozen=True, kw_only=True)
class Constant(Averaging):
    """Has a loss in which no parameter occurs."""

    def loss(self, context: Any, w: Tree, batch: Any, got: Any, local: Tree) -> Any:
        return batch.mean(batch.y.to(torch.float32))


def test_a_loss_without_parameters_moves_nothing_on_both_engines() -> None:
    one, many = (played(recipe(Constant(train=TRAIN), engine, rounds=1)) for engine in ("sequential", "vectorised"))
    assert one[1].train_loss == pytest.approx(many[1].train_loss)
    for parts, state, _ in (one, many):
        assert furthest(state.params, parts.initial) < 1e-6
