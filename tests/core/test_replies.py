import torch

from polyfed.algorithm import Update
from polyfed.messages import Message
from polyfed.replies import MOST, SMALL, Part, Replies, joined, stacked


def replies(clients: tuple[int, ...], missing: dict[int, str]) -> Replies:
    rows = torch.tensor([float(c) for c in clients])
    stack = Update({"shared.bias": rows.unsqueeze(-1)}, rows, rows)
    return Replies([Part(clients, stack)] if clients else [], missing)


def test_joined_asks_read_like_one() -> None:
    both = joined([replies((5, 1), {4: "late"}), replies((), {}), replies((3,), {2: "gone"})])
    assert list(both) == [1, 3, 5]
    assert both.numbers("num_rows") == {1: 1.0, 3: 3.0, 5: 5.0}
    assert both.missing == {4: "late", 2: "gone"}
    weights = dict.fromkeys(both, 1.0)
    assert both.mean("params", weights)["shared.bias"].item() == 3.0


def update(client: int, width: int) -> Update:
    value = torch.full((width,), float(client))
    return Update({"shared.bias": value.requires_grad_()}, torch.tensor(0.5), torch.tensor(client))


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
    assert not any(part.message.params["shared.bias"].requires_grad for part in parts)


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
