"""A single client and a stack take the same rows with the same dropout keys, whatever their numbers of rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.test_mapping import most_while
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.data.sources import Toy
from polyfed.model import ModelSpec, build_model
from polyfed.training import SingleClientData, StackedClientData
from polyfed.training.client_data import DROPOUT, stream_key
from polyfed.training.losses import cross_entropy
from polyfed.training.optimisers import Train
from polyfed.training.programs import replay as step_replay
from polyfed.training.step_plan import make_plan
from stacks import stack_of
from world import PLAIN

COLUMNS = Toy(rows=200, classes=3).load()
MODEL = build_model(ModelSpec(embedding=4, encoders=PLAIN), {"a": (16,), "b": (24,)}, 3)


def alone(rows: Tensor, key: int) -> SingleClientData:
    return SingleClientData(COLUMNS, rows, ("a", "b"), MODEL, key, 1, 1)


def stack(counts: list[int]) -> tuple[list[SingleClientData], list[Tensor], list[int]]:
    """The datasets of some clients, their rows and their keys."""
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows = [torch.arange(int(starts[k]), int(starts[k + 1])) for k in range(len(counts))]
    client_keys = [keys.key("client", k) for k in range(len(counts))]
    return [alone(own, key) for own, key in zip(rows, client_keys, strict=True)], rows, client_keys


def collected(counts: list[int], train: Train, stream: int = 0) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Rows of every step of every client: as each client takes them alone, and as the stack plans them."""
    singles, rows, client_keys = stack(counts)
    singly: list[list[list[int]]] = []
    for data in singles:
        steps: list[list[int]] = []

        def loss(w: Any, batch: Batch, steps: list[list[int]] = steps) -> Tensor:
            steps.append(batch.rows.tolist())
            return MODEL.logits(w, batch).sum() * 0.0

        data.minimise(loss, MODEL.init(0), train=train, stream=stream)
        singly.append(steps)
    plan = make_plan(client_keys, stack_of(rows), train, skip_single=False, stream=stream)
    stacked = [
        [plan.rows[k, t][plan.ok[k, t]].tolist() for t in range(plan.rows.shape[1]) if bool(plan.ok[k, t].any())]
        for k in range(len(counts))
    ]
    return singly, stacked


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 37), min_size=1, max_size=5),
    st.integers(0, 20),
    st.integers(0, 3),
    st.none() | st.integers(0, 9),
)
def test_both_machines_plan_the_same_steps(counts: list[int], size: int, epochs: int, steps: int | None) -> None:
    singly, stacked = collected(counts, Train(batch_size=size, epochs=epochs, steps=steps))
    assert singly == stacked


def test_the_plan_has_the_dropout_key_of_every_step() -> None:
    client_keys = [keys.key("client", k) for k in range(3)]
    rows = stack_of([torch.arange(9), torch.arange(9, 14), torch.arange(14, 23)])
    plan = make_plan(client_keys, rows, Train(batch_size=3, epochs=2), skip_single=False, stream=4)
    assert plan.key.shape == plan.alive.shape == (3, 6)
    for k, client in enumerate(client_keys):
        numbers = plan.number[k][plan.alive[k]].tolist()
        expected = [keys.fold_in(stream_key(client, DROPOUT, 4), number - 1) for number in numbers]
        assert plan.key[k][plan.alive[k]].tolist() == expected


def test_an_epoch_takes_every_row_once_and_epochs_differ() -> None:
    (steps,), _ = collected([23], Train(batch_size=5, epochs=2))
    first, second = ([row for step in steps[i : i + 5] for row in step] for i in (0, 5))
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second


def test_streams_differ() -> None:
    assert collected([23], Train(batch_size=5), 0)[0] != collected([23], Train(batch_size=5), 1)[0]


@pytest.mark.parametrize("counts", [[5, 5, 5], [3, 300 - 297, 9]])
def test_fold_sums_over_real_rows_only(counts: list[int]) -> None:
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows = [torch.arange(int(starts[k]), int(starts[k + 1])) for k in range(len(counts))]

    def step(total: Tensor, batch: Batch) -> Tensor:
        return total + batch.sum(batch.x["a"])

    def one(lane: Tensor) -> Tensor:
        view = StackedClientData(COLUMNS, stack_of(rows), (0,) * len(rows), lane, ("a", "b"), MODEL, 1, 1)
        out: Tensor = view.fold(step, torch.zeros(16), batch_size=4)
        return out

    many = torch.func.vmap(one)(torch.arange(len(rows)))
    for k, own in enumerate(rows):
        assert torch.allclose(many[k], COLUMNS.modalities["a"].take(own).sum(0), atol=1e-5)
        assert torch.allclose(alone(own, 0).fold(step, torch.zeros(16), batch_size=4), many[k], atol=1e-5)


def test_a_fold_stops_at_each_clients_last_row() -> None:
    """Whatever the step does with its carry: a maximum, a moving mean, a count of batches."""
    counts = [3, 11, 9]
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows = [torch.arange(int(starts[k]), int(starts[k + 1])) for k in range(len(counts))]
    first = {"most": torch.tensor(-9.0), "moving": torch.zeros(()), "batches": torch.zeros(())}

    def step(carry: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        mean = -batch.mean(batch.x["a"].square()).mean()
        return {
            "most": torch.maximum(carry["most"], mean),
            "moving": 0.9 * carry["moving"] + 0.1 * mean,
            "batches": carry["batches"] + 1,
        }

    def one(lane: Tensor) -> dict[str, Tensor]:
        view = StackedClientData(COLUMNS, stack_of(rows), (0,) * len(rows), lane, ("a", "b"), MODEL, 1, 1)
        out: dict[str, Tensor] = view.fold(step, first, batch_size=4)
        return out

    many = torch.func.vmap(one)(torch.arange(len(rows)))
    for k, own in enumerate(rows):
        single = alone(own, 0).fold(step, first, batch_size=4)
        assert all(torch.allclose(many[name][k], single[name], atol=1e-6) for name in first)


def test_only_chosen_blocks_are_trained() -> None:
    w = MODEL.init(0)
    fit = alone(torch.arange(40), 1).minimise(
        lambda p, b: torch.nn.functional.cross_entropy(MODEL.logits(p, b), b.y), w, train=Train(lr=0.1), only={"a"}
    )
    moved = {name.split(".")[0] for name in w if not torch.equal(w[name], fit.params[name])}
    assert moved == {"a"}


INITIAL = MODEL.init(0)


def both_ways(task: Callable[[Any], Tensor], counts: list[int], **options: Any) -> tuple[Tensor, Tensor]:
    """The results of a task for each client: alone, and in a stack."""
    singles, rows, client_keys = stack(counts)

    def one(lane: Tensor) -> Tensor:
        view = StackedClientData(COLUMNS, stack_of(rows), tuple(client_keys), lane, ("a", "b"), MODEL, 1, 1, **options)
        return task(view)

    return torch.stack([task(data) for data in singles]), torch.func.vmap(one)(torch.arange(len(counts)))


def error(w: Any, batch: Batch) -> Tensor:
    return cross_entropy(MODEL.logits(w, batch), batch)


def test_a_direction_may_contain_another_training() -> None:
    train = Train(lr=0.1, batch_size=8)

    def task(data: Any) -> Tensor:
        def direction(grads: Any, w: Any, aux: Any, kept: Any) -> Any:
            fit = data.minimise(error, dict(w), train=Train(lr=0.05, batch_size=4, steps=3), stream=2)
            moved = {name: value + (w[name] - fit.params[name]) for name, value in grads.items()}
            return moved, {"loss": kept["loss"] + fit.loss}

        start = {"loss": torch.zeros(())}
        fit = data.minimise(error, INITIAL, train=train, direction=direction, carry=start)
        return torch.cat([fit.params["shared.bias"], fit.carry["loss"].reshape(1)])

    singly, stacked = both_ways(task, [20, 33, 12])
    assert torch.allclose(singly, stacked, atol=1e-5)
    assert (singly[:, -1] > 0.1).all()
    plain, _ = both_ways(lambda data: data.minimise(error, INITIAL, train=train).params["shared.bias"], [20, 33, 12])
    assert not torch.allclose(plain, singly[:, :-1], atol=1e-3)


@pytest.mark.parametrize("what", ["the same tensor", "a part", "also read"])
@pytest.mark.parametrize("replays", [True, False])
def test_tensors_of_a_carry_share_no_memory(what: str, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_replay, "FEW", 2)

    def task(data: Any) -> Tensor:
        zero = data.num_rows * torch.zeros(3)
        start = {"a": zero, "b": {"the same tensor": zero, "a part": zero[1:], "also read": torch.zeros(1)}[what]}

        def direction(grads: Any, w: Any, aux: Any, kept: Any) -> Any:
            kept["a"].add_(1.0)
            extra = zero.sum() if what == "also read" else kept["b"].sum()
            return {name: value + extra for name, value in grads.items()}, kept

        fit = data.minimise(error, INITIAL, train=Train(lr=0.1, batch_size=8), direction=direction, carry=start)
        assert zero.shape == (3,)
        return torch.cat([fit.params["shared.bias"], fit.carry["a"], fit.carry["b"], zero])

    singly, stacked = both_ways(task, [24, 24, 24], replays=replays)
    assert torch.allclose(singly, stacked, atol=1e-5)
    assert (singly[:, 3] == 3).all()
    assert (singly[:, -3:] == 0).all()


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("counts", [[24, 24, 24], [20, 33, 12]])
def test_a_carry_of_parameters_keeps_their_numbers(
    counts: list[int], replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A carry with tensors of `params` holds their numbers before the last step, also after other clients trained."""
    monkeypatch.setattr(step_replay, "FEW", 2)
    name = "shared.bias"
    kept: list[Any] = []

    def task(data: Any) -> Tensor:
        def direction(grads: Any, w: Any, aux: Any, _: Any) -> Any:
            return grads, {"whole": w[name], "part": w[name][1:]}

        start = {"whole": torch.zeros(3), "part": torch.zeros(2)}
        fit = data.minimise(error, INITIAL, train=Train(lr=0.1, steps=3), direction=direction, carry=start)
        earlier = data.minimise(error, INITIAL, train=Train(lr=0.1, steps=2)).params[name]
        kept.append(fit.carry)
        return torch.cat([fit.carry["whole"], fit.carry["part"], earlier])

    singly, stacked = both_ways(task, counts, replays=replays)
    for carry, expected in zip(kept, singly, strict=False):  # the task of each client alone comes first
        assert torch.equal(carry["whole"], expected[:3]), "a later training changed the carry"
    for found in (singly, stacked):
        assert torch.allclose(found[:, :3], found[:, 5:], atol=1e-6)
        assert torch.allclose(found[:, 3:5], found[:, 6:], atol=1e-6)
    assert torch.allclose(singly, stacked, atol=1e-5)


def test_padding_repeats_a_row_of_the_client_itself() -> None:
    stacked = stack_of([torch.tensor([7, 5, 3, 6]), torch.tensor([9, 2]), torch.tensor([], dtype=torch.int64)])
    assert stacked.index.tolist() == [[7, 5, 3, 6], [9, 2, 9, 9], [0, 0, 0, 0]]
    assert stacked.counts == (4, 2, 0)
    assert stack_of([torch.tensor([], dtype=torch.int64)]).index.shape == (1, 0)
    plan = make_plan(
        [1, 2], stack_of([torch.arange(40, 49), torch.arange(60, 62)]), Train(batch_size=4), skip_single=False, stream=0
    )
    index = stack_of([torch.arange(40, 49), torch.arange(60, 62)]).index
    assert set(index[1, plan.rows[1].flatten()].tolist()) == {60, 61}


def test_training_takes_one_gradient_beside_the_model_and_no_gradient_beside_its_result() -> None:
    encoder = {"kind": "mlp", "hidden": [3200, 3200]}  # from 32 MB on, freed memory goes back
    model = build_model(ModelSpec(embedding=4, encoders={"a": encoder}), {"a": (16,)}, 3)
    start = model.init(0)
    data = SingleClientData(COLUMNS, torch.arange(8), ("a",), model, 1, 1, 1)
    size, train = sum(value.nbytes for value in start.values()), Train(steps=3, batch_size=4, lr=0.01)
    found: list[Any] = []

    def work() -> None:
        found.append(data.minimise(lambda w, batch: cross_entropy(model.logits(w, batch), batch), start, train=train))

    assert most_while(work) < 1.4 * size, "the model and what it starts from are there before"
