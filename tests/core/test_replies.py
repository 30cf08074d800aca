import torch

from polyfed.algorithm import Update
from polyfed.replies import Part, Replies, joined


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
