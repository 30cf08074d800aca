"""Which replies are valid; tests/laws/test_malformed.py covers malformed replies of all methods."""

import torch

from polyfed.core import keys
from polyfed.core.errors import BadReply
from polyfed.core.messages import Message, carries, message
from polyfed.core.tree import Tree
from polyfed.federation.message_validation import MessageValidator
from polyfed.model import ModelSpec, build_model
from refusals import refuses
from world import PLAIN

MODEL = build_model(ModelSpec(embedding=4, encoders=PLAIN), {"a": (16,), "b": (24,)}, 3)
FIRST = MODEL.init(keys.key(1, "init"))


@message
class Numbers(Message):
    """A number for each modality."""

    told: Tree = carries("statistic")


@message
class Weights(Message):
    """Parameters, in a field of the same name."""

    told: Tree = carries("parameters")


def test_a_field_is_judged_by_its_own_message_whatever_another_calls_so() -> None:
    validator, names = MessageValidator(FIRST, MODEL, ("a", "b")), {"a": torch.ones(1), "b": torch.ones(1)}
    validator.check(Numbers(names), Numbers)
    with refuses(BadReply, "told"):
        validator.check(Weights(names), Weights)
    with refuses(BadReply, "Numbers"):
        validator.check(Weights({}), Numbers)
    validator.check(Weights({name: value.unsqueeze(0) for name, value in FIRST.items()}), Weights)
