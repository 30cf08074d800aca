"""Steps that programs take are the direct steps up to rounding, and the same bits on every run, or they are direct."""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.func import grad, vmap

from laws.rows import ROWS
from laws.test_laws import params, world
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.data.sources import Toy
from polyfed.experiment.recipes.recipe import EngineSpec
from polyfed.experiment.running import checkpoint
from polyfed.federation.federation import Federation
from polyfed.model import ModelSpec, build_model
from polyfed.training import StackedClientData, TrainingResult
from polyfed.training.optimisers import Train
from polyfed.training.programs import replay
from polyfed.training.programs.memory import calls
from polyfed.training.programs.trace import Ref, Tracer
from stacks import stack_of, steps_of_programs
from world import AWKWARD, PLAIN, furthest, played

NEVER = ("centralized", "split-learning", "splitfed")
"""Methods that train one client, or one batch in an ask."""
COLUMNS = Toy(rows=400, classes=3).load()
MODEL = build_model(ModelSpec(embedding=4, encoders=PLAIN), {"a": (16,), "b": (24,)}, 3)
EQUAL, UNEQUAL = (60, 60, 60), (61, 33, 60)
Loss = Callable[[Tree, Batch], Any]


@pytest.fixture(autouse=True)
def short_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take the steps of short local trainings too, so that the tests need only a few steps."""
    monkeypatch.setattr(replay, "FEW", 2)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No program is known at first; the list fills with how many steps each call of a program took."""
    taken = steps_of_programs(monkeypatch)
    monkeypatch.setattr(replay, "_known", OrderedDict())
    return taken


def trained(
    loss: Loss,
    counts: tuple[int, ...] = EQUAL,
    *,
    replays: bool = True,
    train: Train | None = None,
    number: int = 1,
    **options: Any,
) -> TrainingResult:
    """The stack of clients after a local training from one initial model in round `number`."""
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows = stack_of([torch.arange(int(starts[k]), int(starts[k + 1])) for k in range(len(counts))])
    client_keys = tuple(keys.key("client", k) for k in range(len(counts)))
    first = MODEL.init(keys.key(1, "init"))
    fits: list[TrainingResult] = []

    def task(lane: Tensor) -> tuple[Tree, Tensor, Tree]:
        view = StackedClientData(COLUMNS, rows, client_keys, lane, ("a", "b"), MODEL, number, 9, replays=replays)
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


BOTH = [(name, AWKWARD) for name in sorted(ROWS)] + [
    (name, PLAIN) for name, row in sorted(ROWS.items()) if row.encoders or name in ("fedavg", "cmsfed", "hfm")
]
"""Every method with encoders whose programs hold those of plain ones; plain ones, or a method's own, with some."""


@pytest.mark.parametrize(("name", "encoders"), BOTH)
def test_every_algorithm_is_the_plain_one_up_to_rounding(name: str, encoders: Any, replayed: list[int]) -> None:
    made = replace(world(name, "vectorised", encoders), rounds=2)
    parts, state, ledger = played(made)
    steps = sum(replayed)
    assert (steps > 0) == (name not in NEVER), "replays fewer or more than it should"
    plain, other, other_ledger = played(replace(made, engine=EngineSpec(name="vectorised", replay=False)))
    assert sum(replayed) == steps, "replay = false replays"
    assert furthest(params(state), params(other)) < ROWS[name].tolerance
    for client, tree in parts.engine.locals.items():
        assert furthest(tree, plain.engine.locals[client]) < 10 * ROWS[name].tolerance
    assert ledger == other_ledger


def test_short_trainings_use_programs_after_as_many_rounds_as_pay_for_them(
    replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the limits as they are shipped
    short, once = Train(lr=0.1, batch_size=8, epochs=1), Train(lr=0.1, steps=16)  # 60 rows: 8 steps and 16 steps
    used = []
    for number in range(1, 9):
        replay._known.clear()
        before = replay._known.copy()
        trained(plain, train=short, number=number)
        used.append(replay._known != before)
    assert used == [False] * 5 + [True] * 3, "5 earlier rounds of 8 steps are 40 steps"
    replay._known.clear()
    trained(plain, train=once)
    assert replay._known, "16 steps use a program in the first round"
    replay._known.clear()
    trained(plain, train=replace(short, lr_schedule="cosine", lr_end=0.01), number=9)
    assert not replay._known, "a rate that changes in each round needs 32 steps"


@pytest.mark.parametrize("name", ["fedprox", "moon"])
def test_bits_do_not_depend_on_which_programs_are_known(
    name: str, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run knows no programs; a run that goes on knows those of its earlier rounds."""
    made = world(name, "vectorised")
    _, state, _ = played(made)
    _, again, _ = played(made)
    begin = Federation.begin
    monkeypatch.setattr(Federation, "begin", lambda fed, number: (replay._known.clear(), begin(fed, number))[1])
    _, forgetful, _ = played(made)
    assert len({checkpoint.digest(found) for found in (state, again, forgetful)}) == 1
    assert replayed


@pytest.mark.parametrize("counts", [EQUAL, UNEQUAL])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_optimisers_and_unequal_clients(counts: tuple[int, ...], optimiser: Any, replayed: list[int]) -> None:
    train = Train(optimiser=optimiser, lr=0.01, batch_size=8, epochs=3)
    fit = trained(plain, counts, train=train)
    assert sum(replayed) == 24
    assert close(fit, trained(plain, counts, train=train, replays=False))


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_a_bias_before_a_batch_norm_does_not_hinder(optimiser: Any, replayed: list[int]) -> None:
    """The gradient of the bias consists of rounding errors, and so do its moments, which begin at zero."""
    model = build_model(ModelSpec(embedding=4, encoders=AWKWARD), {"a": (16,), "b": (24,)}, 3)

    def loss(w: Tree, batch: Batch) -> Tensor:
        return batch.mean(torch.nn.functional.cross_entropy(model.logits(w, batch), batch.y, reduction="none"))

    momentum = 0.9 if optimiser == "sgd" else 0.0
    train = Train(optimiser=optimiser, momentum=momentum, lr=0.01, batch_size=8, epochs=2)
    rows = stack_of([torch.arange(48), torch.arange(48, 96)])
    first = model.init(keys.key(1, "init"))

    def task(lane: Tensor) -> Tensor:
        return (
            StackedClientData(COLUMNS, rows, (1, 2), lane, ("a", "b"), model, 1, 9)
            .minimise(loss, first, train=train, model=model)
            .loss
        )

    vmap(task)(torch.arange(2))
    assert sum(replayed) == 12, "all steps, from the first one on"


@pytest.mark.parametrize(("epochs", "steps"), [(0, 0), (1, 0), (2, 2), (3, 3)])
def test_a_training_of_two_steps_has_programs(epochs: int, steps: int, replayed: list[int]) -> None:
    train = Train(lr=0.1, batch_size=0, epochs=epochs)
    trained(plain, train=train)
    assert sum(replayed) == steps


def test_a_rate_that_changes_in_every_round_needs_a_long_training(replayed: list[int]) -> None:
    train = Train(lr=0.1, lr_end=0.01, lr_schedule="cosine", batch_size=8, epochs=3)
    trained(plain, train=train)
    assert not replayed
    trained(plain, train=replace(train, epochs=4))
    assert sum(replayed) == 32


def test_every_step_is_taken_once(replayed: list[int]) -> None:
    seen: list[int] = []

    def counting(grads: Tree, w: Tree, aux: Any, carry: Tree) -> tuple[Tree, Tree]:
        seen.append(1)
        return grads, {"steps": carry["steps"] + 1}

    fit = trained(plain, direction=counting, carry={"steps": torch.zeros(())})
    assert fit.carry["steps"].tolist() == [16.0] * 3
    assert sum(replayed) == 16
    assert len(seen) == 2 * 2, "two traces for each of two kinds of step"


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
    assert close(fit, trained(scaled, replays=False))


def test_one_and_one_point_zero_are_different_programs(replayed: list[int]) -> None:
    """1 == 1.0 == True in Python, and programs are kept by what they say."""
    results = [trained(lambda w, batch, by=by: plain(w, batch) + (batch.y * by).sum() / 7) for by in (1, True, 1.0)]
    assert sum(replayed) == 3 * 16
    programs = [
        trained(lambda w, batch, by=by: plain(w, batch) + (batch.y * by).sum() / 7, replays=False)
        for by in (1, True, 1.0)
    ]
    assert all(close(one, other) for one, other in zip(results, programs, strict=True))


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
    assert close(fit, trained(power, replays=False))


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


def _times_a_number(scale: Tensor) -> Loss:
    return lambda w, batch: plain(w, batch) * float(scale[0])


def _first_classes(scale: Tensor) -> Loss:
    return lambda w, batch: plain(w, batch) + MODEL.logits(w, batch)[:, : int(scale[0])].square().mean()


def _positive_classes(scale: Tensor) -> Loss:
    return lambda w, batch: plain(w, batch) + MODEL.logits(w, batch)[:, scale > 0].square().mean()


@pytest.mark.parametrize("make", [_times_a_number, _first_classes, _positive_classes])
def test_a_loss_that_reads_a_number_or_a_shape_from_a_tensor_is_not_replayed(
    make: Callable[[Tensor], Loss], replayed: list[int]
) -> None:
    """A program would keep the number of the first round: the next round has the same layouts and other entries."""
    for scale in (torch.tensor([1.0, -1.0, -1.0]), torch.tensor([3.0, 1.0, 1.0])):
        assert equal(trained(make(scale)), trained(make(scale), replays=False))
    assert not replayed


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


def test_a_loss_that_counts_in_a_global_list_has_no_program(replayed: list[int]) -> None:
    CALLS.clear()

    def counting(w: Tree, batch: Batch) -> Tensor:
        CALLS.append(1)
        return plain(w, batch) * len(CALLS)

    trained(counting)
    assert not replayed


CALLS: list[int] = []


def test_a_training_inside_another_transform_has_no_program(replayed: list[int]) -> None:
    """A gradient with respect to a number that the training does not read."""
    first, train = MODEL.init(keys.key(1, "init")), Train(lr=0.1, batch_size=8)
    rows = stack_of([torch.arange(24), torch.arange(24, 48)])

    def one(lane: Tensor, *, replays: bool) -> Tensor:
        view = StackedClientData(COLUMNS, rows, (1, 2), lane, ("a", "b"), MODEL, 1, 9, replays=replays)
        slope: Tensor = grad(lambda factor: factor * view.minimise(plain, first, train=train).loss)(torch.ones(()))
        return slope

    with_programs, direct = (vmap(partial(one, replays=replays))(torch.arange(2)) for replays in (True, False))
    assert not replayed
    assert torch.equal(with_programs, direct)
    assert (direct > 0).all()


@pytest.mark.parametrize("kind", ["iterator", "dataset", "generator", "numpy"])
def test_a_loss_over_an_object_that_cannot_be_compared_has_no_program(kind: str, replayed: list[int]) -> None:
    rows = stack_of([torch.arange(8)])
    held = {
        "iterator": iter([1.0]),
        "dataset": StackedClientData(COLUMNS, rows, (1,), torch.tensor(0), ("a", "b"), MODEL, 1, 1),
        "generator": torch.Generator(),
        "numpy": COLUMNS.label.numpy(),
    }[kind]
    fit = trained(lambda w, batch: plain(w, batch) if held is not None else 0.0)
    assert not replayed
    assert equal(fit, trained(plain, replays=False))


def test_equal_values_and_other_tensors_share_a_program(replayed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = replay.Replay._made
    monkeypatch.setattr(replay.Replay, "_made", lambda *args: (made.append(1), original(*args))[1])

    def near(anchor: Tensor, factor: float) -> Loss:
        return lambda w, batch: plain(w, batch) + factor * (w["shared.bias"] - anchor).square().sum()

    fits = [trained(near(torch.full((3,), x), 0.5)) for x in (1.0, 2.0)]
    assert len(made) == 2, "one for each kind of step"
    plains = [trained(near(torch.full((3,), x), 0.5), replays=False) for x in (1.0, 2.0)]
    assert all(map(close, fits, plains))
    trained(near(torch.ones(3), 0.25))
    assert len(made) == 4, "the factor is part of a program"


class Private:
    __slots__ = ("__factor",)

    def __init__(self, factor: float) -> None:
        self.__factor = factor

    def get(self) -> float:
        return self.__factor


class OneSlot:
    __slots__ = "factor"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def get(self) -> float:
        return self.factor


class Entries(list[float]):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def get(self) -> float:
        return self.factor


class Number(float):
    factor: float

    def get(self) -> float:
        return self.factor


class Table(dict[str, float]):
    factor: float

    def get(self) -> float:  # type: ignore[override]
        return self.factor


class Hidden(Entries):
    def __getattribute__(self, name: str) -> Any:
        return {} if name == "__dict__" else super().__getattribute__(name)


def held_by(kind: type, factor: float) -> Any:
    """An object that holds a factor outside of its entries."""
    if kind in (Number, Table):
        made = kind()
        made.factor = factor
        return made
    return kind(factor)


@pytest.mark.parametrize("kind", [Private, OneSlot, Entries, Number, Table, Hidden])
def test_another_value_in_an_object_is_another_program(kind: type, replayed: list[int]) -> None:
    def scaled(factor: float) -> Loss:
        holder = held_by(kind, factor)
        return lambda w, batch: plain(w, batch) * holder.get()

    for factor in (1.0, 0.25):
        replayed.clear()
        fit = trained(scaled(factor))
        assert replayed
        assert close(fit, trained(scaled(factor), replays=False))


def test_another_attribute_of_a_function_is_another_program(replayed: list[int]) -> None:
    def scaled(factor: float) -> Loss:
        def inner(value: Tensor) -> Tensor:
            return value * inner.factor  # type: ignore[attr-defined, no-any-return]

        inner.factor = factor  # type: ignore[attr-defined]
        return lambda w, batch: inner(plain(w, batch))

    for factor in (1.0, 0.25):
        assert close(trained(scaled(factor)), trained(scaled(factor), replays=False))
    assert replayed


def test_two_places_that_hold_one_tensor_in_the_first_round_only(replayed: list[int]) -> None:
    def between(a: Tensor, b: Tensor) -> Loss:
        return lambda w, batch: plain(w, batch) + (w["shared.bias"] - b).square().sum() + 0 * a.sum()

    one, two = torch.ones(3), torch.full((3,), 2.0)
    trained(between(one, one))
    assert close(trained(between(one, two)), trained(between(one, two), replays=False))


def test_a_trace_that_does_not_give_the_bits_of_its_step_is_not_used(
    replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "reproduces", lambda *args: False)
    assert equal(trained(plain), trained(plain, replays=False))
    assert not replayed


def test_a_rewritten_step_that_is_wrong_is_not_used(replayed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the rule is a ten-thousandth of the update."""

    def wrong(graph: fx.Graph, labels: Any) -> None:
        for node in calls(graph, torch.ops.aten.add_.Tensor):
            node.kwargs = {"alpha": node.kwargs["alpha"] * 1.0001}

    monkeypatch.setattr(replay, "rewrite", wrong)
    assert equal(trained(plain), trained(plain, replays=False))
    assert not replayed


def test_old_programs_are_dropped(replayed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "PROGRAMS", 2)
    for factor in (1.5, 2.5, 3.5):
        trained(lambda w, batch, factor=factor: factor * plain(w, batch))
    assert len(replay._known) == 2
    assert sum(replayed) == 3 * 16
