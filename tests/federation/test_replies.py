from collections.abc import Sequence

import pytest
import torch

from polyfed.algorithms.averaging import Update
from polyfed.core.messages import Message
from polyfed.federation.replies import MOST, SMALL, Replies, ReplyStack, joined, stacked
from refusals import refuses


def replies(clients: tuple[int, ...], missing: dict[int, str]) -> Replies:
    rows = torch.tensor([float(c) for c in clients])
    stack = Update({"shared.bias": rows.unsqueeze(-1)}, rows, rows)
    return Replies([ReplyStack(clients, stack)] if clients else [], missing)


def test_joined_asks_read_like_one() -> None:
    both = joined([replies((5, 1), {4: "late"}), replies((), {}), replies((3,), {2: "gone"})])
    assert list(both) == [1, 3, 5]
    assert both.numbers("num_rows") == {1: 1.0, 3: 3.0, 5: 5.0}
    assert both.missing == {4: "late", 2: "gone"}
    weights = dict.fromkeys(both, 1.0)
    assert both.mean("params", weights)["shared.bias"].item() == 3.0


def update(client: int, width: int) -> Update:
    value = torch.full((width,), float(client))
    return Update({"shared.bias": value}, torch.tensor(0.5), torch.tensor(client))


def test_small_replies_of_one_form_come_together_and_large_ones_alone() -> None:
    large = SMALL // 4
    widths = {0: 3, 1: large, 2: 3, 3: 4, 4: large, 5: 3}
    came: dict[int, Message] = {client: update(client, width) for client, width in widths.items()}
    parts = list(stacked(came))
    assert [part.clients for part in parts] == [(0, 2, 5), (1,), (3,), (4,)]
    assert came == {}, "nothing is held twice"
    together = Replies(parts)
    for client, width in widths.items():
        assert torch.equal(together[client].params["shared.bias"], torch.full((width,), float(client)))
        assert together[client].num_rows.item() == client


def test_a_stack_of_replies_is_never_longer_than_it_may_be() -> None:
    parts = list(stacked({client: update(client, 1) for client in range(MOST + 1)}))
    assert [len(part.clients) for part in parts] == [MOST, 1]


def test_the_mean_is_the_same_however_replies_came() -> None:
    weights = {client: 1.0 + client for client in range(5)}
    singly = Replies([part for c in range(5) for part in stacked({c: update(c, 2)})]).mean("params", weights)
    together = Replies(list(stacked({c: update(c, 2) for c in range(5)}))).mean("params", weights)
    expected = sum(c * w for c, w in weights.items()) / sum(weights.values())
    for mean in (singly, together):
        torch.testing.assert_close(mean["shared.bias"], torch.full((2,), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [3, SMALL])
def test_a_mean_of_the_same_is_the_same_in_every_type(dtype: torch.dtype, width: int) -> None:
    value, clients = torch.full((width,), 1.0 + 2.0**-6, dtype=dtype), range(200)
    came: dict[int, Message] = {c: Update({"shared.bias": value}, torch.tensor(0.0), torch.tensor(c)) for c in clients}
    mean = Replies(list(stacked(came))).mean("params", {c: 0.1 + c for c in clients})["shared.bias"]
    assert mean.dtype is dtype
    torch.testing.assert_close(mean.double(), value.double(), rtol=3e-6, atol=0.0)


@pytest.mark.parametrize(
    "groups", [[range(70)], [range(64), range(64, 70)], [range(69, -1, -1)], [[c] for c in range(70)]]
)
def test_the_bits_of_a_mean_of_small_entries_do_not_depend_on_the_stacks(groups: list[Sequence[int]]) -> None:
    values = torch.randn(70, 5, generator=torch.Generator().manual_seed(1))

    def mean(groups: Sequence[Sequence[int]]) -> torch.Tensor:
        zeros = torch.zeros(70)
        parts = [
            ReplyStack(tuple(g), Update({"shared.bias": values[list(g)]}, zeros[list(g)], zeros[list(g)]))
            for g in groups
        ]
        return Replies(parts).mean("params", {c: 1.0 + c % 7 for c in range(70)})["shared.bias"]

    assert torch.equal(mean(groups), mean([range(0, 70, 2), range(1, 70, 2)]))


def test_stacks_of_other_shapes_have_no_mean() -> None:
    """Otherwise, entries at different positions would be added."""
    side = int(SMALL**0.5)
    parts = [
        ReplyStack(clients, Update(params={"a": torch.ones(2, *shape)}, loss=torch.zeros(2), num_rows=torch.ones(2)))
        for clients, shape in (((0, 1), (side, side // 2)), ((2, 3), (side // 2, side)))
    ]
    with refuses(RuntimeError, "size"):
        Replies(parts).mean("params", dict.fromkeys(range(4), 1.0))


def test_counters_take_the_maximum_and_a_weight_must_be_a_number() -> None:
    one = torch.zeros(2)
    told = Replies([ReplyStack((0, 1), Update({"shared.steps": torch.tensor([7, 3])}, one, one))])
    assert told.mean("params", {0: 1.0, 1: 2.0})["shared.steps"].item() == 7
    with refuses(AssertionError, "not a number"):
        told.mean("params", {0: float("nan"), 1: 2.0})
