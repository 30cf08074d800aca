"""The recipe of docs/models.md for `torch.export`: one program for any number of rows, whatever the encoder."""

from typing import Any

import pytest
import torch

from polyfed.model import ModelSpec, build_model
from polyfed.model.plain_module import PlainModule

ENCODERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "cnn4": ((3, 16, 16), {}),
    "resnet18": ((3, 32, 32), {"stem": "imagenet", "widths": [4, 4, 4, 4], "norm": "group"}),
}
"""The encoders that pool, each with the shape of a sample: the choice of their kernel must not bound the rows."""


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_exported_program_takes_few_and_many_rows(kind: str) -> None:
    shape, options = ENCODERS[kind]
    model = build_model(ModelSpec(embedding=4, encoders={"a": {"kind": kind, **options}}), {"a": shape}, 3)
    net = PlainModule(model, model.init(0), ("a",), None, lambda made, w, batch: made.logits(w, batch))
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(net, ({"a": torch.randn(4, *shape)},), dynamic_shapes=({"a": {0: rows}},)).module()
    for count in (2, 70):
        x = {"a": torch.randn(count, *shape)}
        torch.testing.assert_close(program(x), net(x), atol=1e-5, rtol=1e-4)
