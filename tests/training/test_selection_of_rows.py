"""`ClientData.at` and `ClientData.ids`: some rows of a client in a given order, for a single client and for a stack."""

from typing import Any

import pytest
import torch
from torch.func import vmap

from polyfed.core import keys
from polyfed.data.sources import Toy
from polyfed.model import ModelSpec, build_model
from polyfed.training import SingleClientData, StackedClientData
from polyfed.training.losses import cross_entropy
from polyfed.training.optimisers import Train
from stacks import stack_of

COLUMNS = Toy(rows=60, classes=3, shapes={"a": (4,)}).load()
MODEL = build_model(ModelSpec(embedding=3, encoders={"a": {"kind": "mlp", "hidden": [5]}}), {"a": (4,)}, 3)
ROWS = [torch.arange(0, 20), torch.arange(20, 60)]
CHOSEN = [torch.tensor([7, 3, 19, 0, 11]), torch.tensor([30, 2, 2, 39, 8])]
KEYS = (5, 6)


def alone(client: int) -> SingleClientData:
    return SingleClientData(COLUMNS, ROWS[client], ("a",), MODEL, KEYS[client], 1, 3)


def stacked(task: Any) -> Any:
    def one(lane: torch.Tensor, chosen: torch.Tensor) -> Any:
        return task(StackedClientData(COLUMNS, stack_of(ROWS), KEYS, lane, ("a",), MODEL, 1, 3), chosen)

    return vmap(one)(torch.arange(2), torch.stack(CHOSEN))


def collected(view: Any, chosen: torch.Tensor) -> Any:
    part = view.at(chosen)
    found = part.collect(lambda batch: {"x": batch.x["a"], "y": batch.y, "rows": batch.rows})
    return found | {"ids": part.ids, "n": part.num_rows}


def test_a_selection_has_the_chosen_rows_in_order() -> None:
    many = stacked(collected)
    for client in range(2):
        wanted = ROWS[client][CHOSEN[client]]
        one = collected(alone(client), CHOSEN[client])
        assert torch.equal(one["x"], COLUMNS.modalities["a"].take(wanted))
        assert torch.equal(one["y"], COLUMNS.label[wanted])
        assert torch.equal(one["ids"], COLUMNS.ids[wanted])
        assert one["rows"].tolist() == [0, 1, 2, 3, 4]
        assert int(one["n"]) == 5
        for name, value in one.items():
            assert torch.equal(many[name][client], value)


@pytest.mark.parametrize("train", [Train(lr=0.1, batch_size=2, epochs=2), Train(lr=0.1, batch_size=0, steps=3)])
def test_training_on_a_selection_is_the_same_in_both_machines(train: Train) -> None:
    w = MODEL.init(keys.key(0))

    def fit(view: Any, chosen: torch.Tensor) -> Any:
        def loss(w: Any, batch: Any) -> torch.Tensor:
            return cross_entropy(MODEL.logits(w, batch), batch)

        return view.at(chosen).minimise(loss, w, train=train).params

    many = stacked(fit)
    for client in range(2):
        for name, value in fit(alone(client), CHOSEN[client]).items():
            assert torch.allclose(many[name][client], value, atol=1e-6)


def test_a_selection_of_a_selection() -> None:
    again = torch.tensor([4, 1])
    many = stacked(lambda view, chosen: view.at(chosen).at(again).ids)
    for client in range(2):
        wanted = COLUMNS.ids[ROWS[client][CHOSEN[client][again]]]
        assert torch.equal(many[client], wanted)
        assert torch.equal(alone(client).at(CHOSEN[client]).at(again).ids, wanted)


def test_ids_of_a_stack_are_padded_to_the_longest() -> None:
    many = stacked(lambda view, chosen: view.ids)
    assert many.shape == (2, 40)
    assert torch.equal(many[0, :20], COLUMNS.ids[ROWS[0]])
    assert torch.equal(many[1], COLUMNS.ids[ROWS[1]])
