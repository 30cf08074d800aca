"""Fields with an entry per row: padding never crosses; and joint representations are what the head reads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed.core.messages import Message, carries, crossings, message, trimmed
from polyfed.model import ModelSpec, build_model
from refusals import refuses
from world import PLAIN


@message
class Told(Message):
    z: Tensor = carries("embeddings", of="a", rows="num_rows", shape=(2,))
    num_rows: Tensor = carries("statistic")


def test_a_message_is_trimmed_to_its_rows() -> None:
    told = trimmed(Told(torch.arange(10.0).view(5, 2), torch.tensor(3)))
    assert torch.equal(told.z, torch.arange(6.0).view(3, 2))


def test_the_ledger_sees_real_rows_only() -> None:
    stack = Told(torch.zeros(4, 5, 2), torch.tensor([3, 3, 3, 3]))
    found = crossings(stack, stacked=True, rows={"z": 3})[0]
    assert (found.shape, found.bytes) == ((3, 2), 24)


def test_a_field_must_count_its_rows_with_a_field_of_the_message() -> None:
    with refuses(AssertionError, "counts rows"):

        @message
        class Wrong(Message):
            z: Tensor = carries("embeddings", rows="missing", shape=(2,))


@pytest.mark.parametrize("options", [{}, {"head": (5,)}, {"fusion": "sum"}, {"fusion": "gated", "head": (5,)}], ids=str)
def test_classify_of_joint_is_fuse(options: Any) -> None:
    model = build_model(ModelSpec(embedding=6, encoders=PLAIN, **options), {"a": (16,), "b": (24,)}, 4)
    w, batch = model.init(1), model.zero_batch(3, "ab")
    draw = torch.Generator().manual_seed(0)
    z = {m: torch.randn(3, 6, generator=draw) for m in "ab"}
    joint = model.joint(w, z, batch)
    assert model.joint_size in (0, joint.shape[1])
    assert torch.equal(model.classify(w, joint, batch), model.fuse(w, z, batch))
