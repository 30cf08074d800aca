"""Functions over all fields and all tensors of a message."""

import torch
from torch import Tensor

from polyfed.core.messages import Message, carries, cut, map_fields, map_tensors, message, tensors, trimmed
from polyfed.core.request import contiguous
from polyfed.core.tree import Tree


@message
class Told(Message):
    """A tree that is cut, a tree that is not, a field with an entry per row, and its count."""

    params: Tree = carries("parameters")
    heads: Tree = carries("parameters", whole=True)
    logits: Tensor = carries("predictions", rows="num_rows", shape=(2,))
    num_rows: Tensor = carries("statistic")


def told(by: float = 1.0) -> Told:
    tree = {"a.w": torch.full((2,), by), "b.w": torch.full((3,), by)}
    return Told(tree, dict(tree), torch.full((5, 2), by), torch.tensor(3))


def test_a_message_that_no_change_touches_is_itself() -> None:
    msg = told()
    assert map_fields(msg, lambda name, value: value) is msg
    assert cut(msg, frozenset(("a", "b"))) is msg


def test_every_tensor_meets_those_of_the_same_name() -> None:
    first, second = told(1.0), told(10.0)
    both = map_tensors(first, lambda *values: torch.stack(values), second)
    assert type(both) is Told
    assert [(name, key) for name, key, _ in tensors(both)] == [(name, key) for name, key, _ in tensors(first)]
    found = zip(tensors(both), tensors(first), tensors(second), strict=True)
    assert all(torch.equal(pair, torch.stack([one, other])) for (_, _, pair), (_, _, one), (_, _, other) in found)
    assert first.params["a.w"].tolist() == [1.0, 1.0], "the message itself is not changed"


def test_messages_become_contiguous_and_still_share_their_tensors() -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    plain = told()
    first, second = (Told({"a.w": turned}, {}, turned, torch.tensor(3)) for _ in range(2))
    found = contiguous({0: plain, 1: first, 2: second})
    assert found[0] is plain
    copy = found[1].logits
    assert copy.is_contiguous()
    assert torch.equal(copy, turned)
    assert all(tree["a.w"] is copy for tree in (found[1].params, found[2].params))
    assert found[2].logits is copy
    assert contiguous(first).params["a.w"].is_contiguous()
    assert contiguous(plain) is plain


def test_only_trees_that_are_not_whole_lose_foreign_blocks() -> None:
    received = cut(told(), frozenset("a"))
    assert (received.params.keys(), received.heads.keys()) == ({"a.w"}, {"a.w", "b.w"})
    assert received.logits.shape == (5, 2)


def test_only_fields_with_an_entry_per_row_are_trimmed() -> None:
    real = trimmed(told())
    assert (real.logits.shape, real.params["b.w"].shape) == ((3, 2), (3,))
    assert int(real.num_rows) == 3
