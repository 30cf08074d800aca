"""Steps that programs take are the direct steps up to rounding, and the same bits on every run, or they are direct."""

import gc
import weakref
from collections import OrderedDict
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
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.data.sources import Toy
from polyfed.experiment import checkpoint
from polyfed.experiment.recipe import EngineSpec
from polyfed.model import ModelSpec, build_model
from polyfed.training import StackedClientData, TrainingResult
from polyfed.training import step_replay as replay
from polyfed.training.optimisers import Train
from polyfed.training.step_plan import Rows
from polyfed.training.step_program import Program
from polyfed.training.step_trace import Ref, Tracer
from world import AWKWARD, PLAIN, furthest, played

NEVER = ("centralized", "split-learning", "splitfed")
"""Methods that train one client, or one batch in an ask."""
COLUMNS = Toy(rows=400, classes=3).load()
MODEL = build_model(ModelSpec(embedding=4, encoders=PLAIN), {"a": (16,), "b": (24,)}, 3)
EQUAL, UNEQUAL = (60, 60, 60), (61, 33, 60)
Loss = Callable[[Tree, Batch], Any]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No program is known at first; the list fills with how many steps each call of a program took."""
    taken: list[int] = []
    original = Program.__call__

    def spied(self: Program, state: Any, columns: Any, steps: range, outside: Any) -> Any:
        taken.append(len(steps))
        return original(self, state, columns, steps, outside)

    monkeypatch.setattr(Program, "__call__", spied)
    monkeypatch.setattr(replay, "_known", OrderedDict())
    return taken


def trained(
    loss: Loss, counts: tuple[int, ...] = EQUAL, *, replays: bool = True, train: Train | None = None, **options: Any
) -> TrainingResult:
    """The stack of clients after a local training from one initial model."""
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows = Rows.pad([torch.arange(int(starts[k]), int(starts[k + 1])) for k in range(len(counts))])
    client_keys = tuple(keys.key("client", k) for k in range(len(counts)))
    first = MODEL.init(keys.key(1, "init"))
    fits: list[TrainingResult] = []

    def task(lane: Tensor) -> tuple[Tree, Tensor, Tree]:
        view = StackedClientData(COLUMNS, rows, client_keys, lane, ("a", "b"), MODEL, 1, 1, replays=replays)
        fit = view.minimise(loss, first, train=train or Train(lr=0.1, batch_size=8, epochs=2), **options)
        fits.append(fit)
        return fit.params, fit.loss, {name: torch.as_tensor(value) for name, value in fit.carry.items()}

    params, value, carry = vmap(task)(torch.arange(len(counts)))
    return replace(fits[0], params=params, loss=value, carry=carry)


def plain(w: Tree, batch: Batch) -> Tensor:
    return torch.nn.functional.cross_entropy(MODEL.logits(w, batch), batch.y)


def equal(one: TrainingResult, other: TrainingResult) -> bool:
    return all(torch.equal(one.params[n], other.params[n]) for n in one.params) and torch.equal(one.loss, other.loss)


def close(one: TrainingResult, other: TrainingResult) -> bool:
    assert torch.allclose(one.loss, other.loss, rtol=1e-5)
    return furthest(one.params, other.params) < 1e-5


@pytest.mark.parametrize("encoders", [PLAIN, AWKWARD], ids=["plain", "batchnorm+dropout"])
@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_replayed_run_of_every_algorithm_is_the_plain_one_bit_for_bit(
    name: str, encoders: Any, replayed: list[int]
) -> None:
    made = world(name, "vectorised", encoders)
    longer = {"local_rounds": 5} if name in ("hfm", "vfl") else {"train": replace(made.algorithm.train, epochs=5)}
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


def test_a_loss_of_complex_numbers(replayed: list[int]) -> None:
    """A conjugate is a view of the same memory, and not the same numbers; autograd makes some by itself."""

    def power(w: Tree, batch: Batch) -> Tensor:
        z = torch.fft.rfft(MODEL.logits(w, batch))
        power = (z * z.conj()).real.mean() + (z * z).abs().mean()
        return 0.1 * (power + torch.fft.irfft(z * w["shared.bias"][:2], n=3).square().mean())

    fit = trained(power)
    assert replayed
    assert bool(fit.loss.isfinite().all())
    assert equal(fit, trained(power, replays=False))


def test_a_direction_that_writes_into_a_tensor_of_its_own_is_not_replayed(replayed: list[int]) -> None:
    def slowing() -> Any:
        scale = torch.ones(())

        def direction(grads: Tree, w: Tree, aux: Any, carry: Tree) -> tuple[Tree, Tree]:
            scale.mul_(0.9)
            return {name: grad * scale for name, grad in grads.items()}, carry

        return direction

    fit = trained(plain, direction=slowing())
    assert not replayed
    assert equal(fit, trained(plain, direction=slowing(), replays=False))


def test_a_loss_that_turns_a_tensor_around_in_place_is_not_replayed(replayed: list[int]) -> None:
    def turned(w: Tree, batch: Batch) -> Tensor:
        x = MODEL.logits(w, batch)[:3]
        y = x.detach().clone()
        y.view(-1)
        y.t_()
        return (x * y.t()).square().mean() + (x * y).mean()

    fit = trained(turned)
    assert not replayed
    assert equal(fit, trained(turned, replays=False))


def test_a_carry_that_is_no_tensor_is_not_replayed(replayed: list[int]) -> None:
    def counting(grads: Tree, w: Tree, aux: Any, carry: Any) -> tuple[Tree, Any]:
        return grads, {"steps": carry["steps"] + 1}

    fit = trained(plain, direction=counting, carry={"steps": 0})  # type: ignore[dict-item]
    assert not replayed
    assert fit.carry["steps"].tolist() == [16] * 3


def test_views_of_the_same_numbers_are_left_out() -> None:
    x = torch.arange(6.0).view(2, 3)
    with Tracer([x]) as tracer:
        y = x.transpose(0, 1).expand(3, 2).transpose(0, 1)
        out = y * 2.0
    assert [call.op for call in tracer.trace.calls] == [
        torch.ops.aten.transpose.int,
        torch.ops.aten.mul.Tensor,
    ]
    assert tracer.trace.calls[-1].args[0] == Ref(0)
    assert torch.equal(out, x * 2)


def test_a_step_is_traced_only_where_that_pays() -> None:
    profile = replay.Profile()
    assert not profile.pays(1000), "before a plain step was timed"
    profile.plain = 2.0
    assert profile.pays(replay.TRIAL + 1)
    assert not profile.pays(replay.TRIAL)
    profile.traced, profile.replayed = 8.0, 1.0
    assert profile.pays(14)
    assert not profile.pays(13), "six seconds are lost by tracing, twelve are won back"
    profile.replayed = 2.5
    assert not profile.pays(1000)


def taken(by: float, **changes: Any) -> replay.Step:
    """A step that multiplies, traced."""
    with Tracer([x := torch.ones(2)]) as tracer:
        out = x * by
    tracer.trace.results = (tracer.slot(out),)
    tracer.trace.before, tracer.trace.after = ("layout",), ("layout", "value")
    for name, value in changes.items():
        setattr(tracer.trace, name, value)
    return replay.Step(None, out, tracer.trace, [torch.ones(2)], [out])


def test_steps_that_never_leave_the_same_trace_are_given_up() -> None:
    profile = replay.Profile(plain=2.0)
    for one, other in pairwise(taken(by) for by in range(replay.PATIENCE + 1)):
        assert profile.pays(100)
        assert profile.program(other, one.trace) is None
    assert not profile.pays(100)


def test_only_a_step_that_leaves_the_state_as_it_was_laid_out_is_replayed() -> None:
    assert replay.Profile().program(taken(2), taken(2).trace) is not None
    other = {"after": ("other layout", "value")}
    assert replay.Profile().program(taken(2, **other), taken(2, **other).trace) is None


def test_a_program_that_does_not_give_the_bits_of_its_own_step_is_not_used() -> None:
    """The last guard: against whatever a trace may come to miss."""
    step, before = taken(2), taken(2).trace
    for trace in (step.trace, before):
        trace.calls[0] = trace.calls[0]._replace(op=torch.ops.aten.add.Tensor)
    assert step.trace.repeats(before)
    profile = replay.Profile()
    assert profile.program(step, before) is None
    assert not profile.programs
    assert profile.misses == 1


def test_the_next_training_trusts_what_this_one_has_traced_twice(replayed: list[int]) -> None:
    def loss(w: Tree, batch: Batch) -> Tensor:
        return plain(w, batch)

    trained(loss)
    first = sum(replayed)
    trained(loss)
    assert sum(replayed) - first > first, "a kind of step is traced once less"
