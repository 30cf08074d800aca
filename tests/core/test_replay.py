"""Steps that are written down and replayed are the steps themselves, bit for bit, or are not replayed."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from laws.rows import ROWS
from laws.test_laws import world
from polyfed import checkpoint, keys
from polyfed.batch import Batch
from polyfed.data.sources import Toy
from polyfed.model import ModelSpec, build_model
from polyfed.optim import Train
from polyfed.recipe import EngineSpec
from polyfed.tree import Tree
from polyfed.view import Fit, StackedView, replay
from polyfed.view.stacked import Rows
from polyfed.view.text import Ref, Writer
from world import AWKWARD, PLAIN, played

NEVER = ("centralized", "split-learning", "splitfed")
"""Methods that train one client, or one batch in an ask."""
COLUMNS = Toy(rows=400, classes=3).load()
MODEL = build_model(ModelSpec(embedding=4, encoders=PLAIN), {"a": (16,), "b": (24,)}, 3)
EQUAL, UNEQUAL = (60, 60, 60), (61, 33, 60)
Loss = Callable[[Tree, Batch], Any]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps are written down wherever one is left to replay; the list fills with how many a replay took."""
    taken: list[int] = []
    original = replay._replayed

    def spied(steps: Any, *rest: Any) -> Any:
        taken.append(len(steps))
        return original(steps, *rest)

    monkeypatch.setattr(replay, "_replayed", spied)
    monkeypatch.setattr(replay.Habit, "pays", lambda habit, left: habit.vain < replay.PATIENCE and left > 1)
    replay._habit.cache_clear()
    return taken


def trained(
    loss: Loss, counts: tuple[int, ...] = EQUAL, *, replays: bool = True, train: Train | None = None, **options: Any
) -> Fit:
    """The stack of clients after a local training from one initial model."""
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows = Rows.pad([torch.arange(int(starts[k]), int(starts[k + 1])) for k in range(len(counts))])
    client_keys = tuple(keys.key("client", k) for k in range(len(counts)))
    first = MODEL.init(keys.key(1, "init"))
    fits: list[Fit] = []

    def task(lane: Tensor) -> tuple[Tree, Tensor, Tree]:
        view = StackedView(COLUMNS, rows, client_keys, lane, ("a", "b"), MODEL, 1, 1, replays=replays)
        fit = view.minimise(loss, first, train=train or Train(lr=0.1, batch_size=8, epochs=2), **options)
        fits.append(fit)
        return fit.params, fit.loss, fit.carry

    params, value, carry = vmap(task)(torch.arange(len(counts)))
    return replace(fits[0], params=params, loss=value, carry=carry)


def plain(w: Tree, batch: Batch) -> Tensor:
    return torch.nn.functional.cross_entropy(MODEL.logits(w, batch), batch.y)


def equal(one: Fit, other: Fit) -> bool:
    return all(torch.equal(one.params[n], other.params[n]) for n in one.params) and torch.equal(one.loss, other.loss)


@pytest.mark.parametrize("encoders", [PLAIN, AWKWARD], ids=["plain", "batchnorm+dropout"])
@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_replayed_run_of_every_algorithm_is_the_plain_one_bit_for_bit(
    name: str, encoders: Any, replayed: list[int]
) -> None:
    made = world(name, "vectorised", encoders)
    longer = {"q": 5} if name in ("hfm", "vfl") else {"train": replace(made.algorithm.train, epochs=5)}
    made = replace(made, algorithm=replace(made.algorithm, **longer))
    _, state, ledger = played(made)
    steps = sum(replayed)
    assert (steps > 0) == (name not in NEVER), "replays fewer or more than it should"
    _, other, other_ledger = played(replace(made, engine=EngineSpec(name="vectorised", replay=False)))
    assert sum(replayed) == steps, "replay = false replays"
    assert checkpoint.digest(state) == checkpoint.digest(other)
    assert ledger == other_ledger


@pytest.mark.parametrize("counts", [EQUAL, UNEQUAL])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_optimisers_and_unequal_clients(counts: tuple[int, ...], optimiser: Any, replayed: list[int]) -> None:
    train = Train(optimiser=optimiser, lr=0.01, batch_size=8, epochs=3)
    fit = trained(plain, counts, train=train)
    assert sum(replayed) >= 8
    assert equal(fit, trained(plain, counts, train=train, replays=False))


def test_every_step_is_taken_once(replayed: list[int]) -> None:
    seen: list[int] = []

    def counting(grads: Tree, w: Tree, aux: Any, carry: Tree) -> tuple[Tree, Tree]:
        seen.append(1)
        return grads, {"steps": carry["steps"] + 1}

    fit = trained(plain, direction=counting, carry={"steps": torch.zeros(())})
    assert fit.carry["steps"].tolist() == [16.0] * 3
    assert len(seen) + sum(replayed) == 16
    assert len(seen) < 16


def test_a_loss_that_counts_its_calls_is_not_replayed(replayed: list[int]) -> None:
    def counting() -> Loss:
        calls = iter(range(1000))
        return lambda w, batch: plain(w, batch) * (1 + 0.1 * next(calls))

    fit = trained(counting())
    assert not replayed
    assert equal(fit, trained(counting(), replays=False))


def test_a_loss_that_takes_another_tensor_each_time_is_not_replayed(replayed: list[int]) -> None:
    def masked() -> Loss:
        masks = iter(torch.rand(1000, 3))
        return lambda w, batch: (MODEL.logits(w, batch) * next(masks)).square().sum()

    torch.manual_seed(0)
    fit = trained(masked())
    assert not replayed
    torch.manual_seed(0)
    assert equal(fit, trained(masked(), replays=False))


def test_numbers_made_anew_in_every_step_do_not_hinder(replayed: list[int]) -> None:
    def scaled(w: Tree, batch: Batch) -> Tensor:
        return plain(w, batch) / torch.tensor(7.0)

    fit = trained(scaled)
    assert replayed
    assert equal(fit, trained(scaled, replays=False))


def test_one_and_one_point_zero_are_different_programs(replayed: list[int]) -> None:
    """1 == 1.0 == True in Python, and programs are kept by what they say."""
    results = [trained(lambda w, batch, by=by: plain(w, batch) + (batch.y * by).sum() / 7) for by in (1, True, 1.0)]
    assert sum(replayed) == 3 * 12
    programs = [
        trained(lambda w, batch, by=by: plain(w, batch) + (batch.y * by).sum() / 7, replays=False)
        for by in (1, True, 1.0)
    ]
    assert all(equal(one, other) for one, other in zip(results, programs, strict=True))


def test_a_loss_that_is_one_number_for_all_clients(replayed: list[int]) -> None:
    fit = trained(lambda w, batch: torch.zeros(()))
    assert equal(fit, trained(lambda w, batch: torch.zeros(()), replays=False))


def test_nothing_that_a_loss_closes_over_outlives_the_training(replayed: list[int]) -> None:
    def train() -> "weakref.ref[Tensor]":
        anchor = torch.ones(3)
        trained(lambda w, batch: (MODEL.logits(w, batch) - anchor).square().sum())
        return weakref.ref(anchor)

    gone = train()
    assert replayed
    gc.collect()
    assert gone() is None


def test_looks_at_the_same_numbers_are_left_out() -> None:
    x = torch.arange(6.0).view(2, 3)
    with Writer([x]) as writer:
        y = x.transpose(0, 1).expand(3, 2).transpose(0, 1)
        out = y * 2.0
    assert [call.op for call in writer.text.calls] == [
        torch.ops.aten.transpose.int,
        torch.ops.aten.mul.Tensor,
    ]
    assert writer.text.calls[-1].args[0] == Ref(0)
    assert torch.equal(out, x * 2)


def test_a_step_is_written_down_only_where_that_pays() -> None:
    habit = replay.Habit()
    assert not habit.pays(1000), "before a plain step was timed"
    habit.plain = 2.0
    assert habit.pays(replay.TRIAL + 1)
    assert not habit.pays(replay.TRIAL)
    habit.written, habit.replayed = 8.0, 1.0
    assert habit.pays(14)
    assert not habit.pays(13), "six seconds are lost by writing, twelve are won back"
    habit.replayed = 2.5
    assert not habit.pays(1000)


def test_a_habit_gives_up_on_steps_that_never_read_the_same() -> None:
    habit = replay.Habit(plain=2.0)
    texts = []
    for by in range(replay.PATIENCE + 1):
        with Writer([x := torch.ones(2)]) as writer:
            x * by
        texts.append(writer.text)
    for draft, text in pairwise(texts):
        assert habit.pays(100)
        assert habit.program(text, draft) is None
    assert not habit.pays(100)


def test_a_step_after_which_the_state_has_another_form_is_not_replayed() -> None:
    texts = []
    for _ in range(2):
        with Writer([x := torch.ones(2)]) as writer:
            x * 2
        texts.append(writer.text)
        writer.text.before, writer.text.after = ("form",), ("other form", "value")
    assert texts[1].repeats(texts[0])
    assert replay.Habit(plain=2.0).program(texts[1], texts[0]) is None
    for text in texts:
        text.after = ("form", "value")
    assert replay.Habit(plain=2.0).program(texts[1], texts[0]) is not None


def test_the_next_training_trusts_what_this_one_has_read_twice(replayed: list[int]) -> None:
    def loss(w: Tree, batch: Batch) -> Tensor:
        return plain(w, batch)

    trained(loss)
    first = sum(replayed)
    trained(loss)
    assert sum(replayed) - first > first, "a kind of step is written down once less"
