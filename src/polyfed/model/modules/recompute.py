"""Gradient checkpointing: layers compute their activations again in the backward pass instead of keeping them.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016. Dropout layers draw the same
masks in both passes, because the batch's key is restored for the second pass. `vmap` does not support gradient
checkpointing, so only clients that train one at a time save memory. The vectorised engine therefore trains such models
for one client after another.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from polyfed.core.errors import ModelError
from polyfed.model.modules.layers import Rows


class Recompute:
    """Replaces a layer's `forward`. `adopt` stores the model's `Rows` in `rows`.

    Args:
        forward: the layer's own `forward`.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.rows: Rows | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Compute the layer.

        If the model runs with the parameters that `Model.live` yielded, the backward pass computes the layer a second
        time. With other parameters, the layer keeps its activations for the backward pass.
        """
        if self.rows is None or self.rows.bound or not torch.is_grad_enabled():
            return self.forward(*args, **options)
        rows, key, ok, draws = self.rows, self.rows.key, self.rows.ok, dict(self.rows.draws)

        @contextmanager
        def as_before() -> Iterator[None]:
            first = rows.key is not None or key is None
            if not first:
                rows.key, rows.ok, rows.draws = key, ok, dict(draws)
            try:
                yield
            finally:
                if not first:
                    rows.clear()

        def run(*inputs: Any) -> Any:
            with as_before():
                return self.forward(*inputs, **options)

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


def recompute_layers(backbone: nn.Module) -> None:
    """Let the repeated layers of a backbone of `transformers` recompute their activations.

    Raises:
        ModelError: the backbone has no such layers.
    """
    repeated = import_module("transformers.modeling_layers").GradientCheckpointingLayer
    layers = [layer for layer in backbone.modules() if isinstance(layer, repeated)]
    if not layers:
        raise ModelError(f"{type(backbone).__name__} has no layers that can be computed again: remove checkpointing.")
    for layer in layers:
        layer.__dict__["forward"] = Recompute(layer.forward)
