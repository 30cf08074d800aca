"""Prepares an ordinary PyTorch module for federated training by replacing some of its layers.

The layers of `layers.py` replace batch normalisation, dropout, GRU, LSTM and attention of `torch.nn`, because these
layers depend on the batch or do not support `vmap`. `max_pool.py` replaces a layer that is slow. Each replacement has
the same parameters and the same results as the original layer. Layers that cannot run under `torch.func.vmap`, or
that draw from a global random generator, are refused. polyfed also refuses layers that do more than their class in
`torch.nn`, for example because a subclass overrides a method: the replacement would leave this addition out. The error
says what to use instead.
"""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from polyfed.core import keys
from polyfed.core.errors import ModelError
from polyfed.model.modules.layers import GRU, LSTM, Attention, BatchNorm, Dropout, Rows
from polyfed.model.modules.max_pool import MaxPool2d
from polyfed.model.modules.recompute import Recompute

_CHANNEL_DROPOUT = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

_REFUSED: dict[type[nn.Module], str] = {
    nn.SyncBatchNorm: "use nn.BatchNorm2d: clients share no statistics while they train",
    nn.RNN: "use nn.GRU or nn.LSTM, or write the cell out: the fused kernel takes no weights per client",
    nn.AlphaDropout: "use nn.Dropout: its mask follows the batch key",
    nn.FeatureAlphaDropout: "use nn.Dropout1d/2d/3d: their masks follow the batch key",
    nn.RReLU: "use nn.LeakyReLU: random slopes would differ between engines",
}


_REPLACED = (nn.Dropout, *_CHANNEL_DROPOUT, nn.GRU, nn.LSTM, nn.MultiheadAttention, _BatchNorm)
"""The classes whose layers polyfed replaces. Their subclasses outside `torch.nn` are refused."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Memo = dict[int, tuple[nn.Module, nn.Module]]
"""The id of a module -> the module, which must live as long as its id is in use, and its replacement."""


def adopt(module: nn.Module, rows: Rows, path: str, memo: Memo | None = None) -> nn.Module:
    """Replace each layer of a module, at any depth, for which polyfed has its own version.

    A layer that has several names has one replacement, which has all of these names. A shared dropout layer has one
    random stream, that of its first name, and draws another mask each time that it is applied.

    Args:
        module: a new module of an encoder or a fusion; it is changed.
        rows: the rows of the current batch, shared by all layers of the model.
        path: full name of the module. The random stream of a dropout layer depends only on this name.
        memo: the modules that have been visited before, with their replacements; the function adds to it.

    Returns:
        The module, or its replacement.

    Raises:
        ModelError: a layer, or an option of a layer, is not supported. The text says what to use instead.
    """
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)][1]
    _refuse(module, path)
    ours = _swapped(module, rows, path)
    memo[id(module)] = (module, module if ours is None else ours)
    if ours is not None:
        return ours
    if isinstance(recompute := module.__dict__.get("forward"), Recompute):
        recompute.rows = rows
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0  # 1 and 2 select a fused kernel in evaluation mode, which vmap cannot batch
    if isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False  # True passes nested tensors to that kernel
    for name, child in tuple(module._modules.items()):  # `named_children` gives only the first name of a child
        if child is not None:
            setattr(module, name, adopt(child, rows, f"{path}.{name}", memo))
    return module


def _swapped(module: nn.Module, rows: Rows, path: str) -> nn.Module | None:
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return _batch_norm(module, rows, path)
    if type(module) in (nn.Dropout, *_CHANNEL_DROPOUT):
        return _dropout(module, rows, path)
    if type(module) is nn.GRU:
        return _gru(module, path)
    if type(module) is nn.LSTM:
        return _lstm(module, path)
    if type(module) is nn.MultiheadAttention:
        return _attention(module, path)
    if type(module) is nn.MaxPool2d:
        return MaxPool2d(module, rows)
    return None


def _batch_norm(module: nn.Module, rows: Rows, path: str) -> nn.Module:
    assert isinstance(module, _BatchNorm)
    _need(module.momentum is not None, path, "momentum=None (cumulative average)", "give a number, e.g. 0.1")
    _need(module.track_running_stats, path, "track_running_stats=False", "leave it at True, or use nn.GroupNorm")
    return BatchNorm(module, rows)


def _dropout(module: nn.Module, rows: Rows, path: str) -> nn.Module:
    assert isinstance(module, (nn.Dropout, *_CHANNEL_DROPOUT))
    _need(module.p < 1.0, path, "p=1", "give a probability below 1")
    return Dropout(module.p, keys.key("dropout", path), rows, isinstance(module, _CHANNEL_DROPOUT))


def _gru(module: nn.GRU, path: str) -> nn.Module:
    _need(module.num_layers == 1, path, f"num_layers={module.num_layers}", "stack several nn.GRU of one layer")
    _need(not module.bidirectional, path, "bidirectional=True", "use two nn.GRU, one on x.flip(1)")
    _need(module.batch_first, path, "batch_first=False", "set batch_first=True: dimension 0 must be the rows")
    _need(module.bias, path, "bias=False", "leave it at True")
    return GRU(module)


def _lstm(module: nn.LSTM, path: str) -> nn.Module:
    _need(module.batch_first, path, "batch_first=False", "set batch_first=True: dimension 0 must be the rows")
    _need(module.dropout == 0.0, path, "dropout between layers", "use several nn.LSTM with nn.Dropout between them")
    _need(module.proj_size == 0, path, f"proj_size={module.proj_size}", "put an nn.Linear behind the layer")
    return LSTM(module)


def _attention(module: nn.MultiheadAttention, path: str) -> nn.Module:
    _need(module.dropout == 0.0, path, "attention dropout", "set its `dropout` attribute to 0.0")
    _need(module.batch_first, path, "batch_first=False", "set batch_first=True: dimension 0 must be the rows")
    return Attention(module)


def _refuse(module: nn.Module, path: str) -> None:
    checks: list[tuple[bool, str, str]] = [
        (isinstance(module, kind), f"nn.{kind.__name__}", fix) for kind, fix in _REFUSED.items()
    ]
    if isinstance(module, torch.jit.ScriptModule):
        fix = "give the module as it was before, as its parameters cannot be replaced by those of a client"
        checks = [(True, f"{module.original_name or 'a module'} after torch.jit.script or torch.jit.trace", fix)]
    if isinstance(module, _InstanceNorm):
        checks.append((module.track_running_stats, "track_running_stats=True", "leave it at False"))
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        checks.append(
            (module.scale_grad_by_freq, "scale_grad_by_freq=True", "leave it at False: it counts padded rows")
        )
    own = list(module.parameters(recurse=False))
    lazy = any(map(is_lazy, own))
    checks.append((lazy, "a lazy layer", "give all sizes: clients must agree on shapes before any data is seen"))
    is_complex = any(p.is_complex() and p.requires_grad for p in own)
    checks.append((is_complex, "a complex parameter", "train a real parameter (..., 2) and use torch.view_as_complex"))
    if isinstance(module, _REPLACED) and type(module) is not Attention:
        checks += _changed(module)
    for found, what, fix in checks:
        _need(not found, path, what, fix)


def _changed(module: nn.Module) -> list[tuple[bool, str, str]]:
    """Return checks of whether a layer does anything that its replacement would not do: (found, what, cure)."""
    kind = type(module)
    base = next((k for k in kind.__mro__ if getattr(nn, k.__name__, None) is k is not nn.Module), None)
    name = f"nn.{'BatchNorm1d' if base is None else base.__name__}"
    wrap = f"polyfed replaces it by its own layer, so write a module that holds a plain {name} and calls it"
    hooked = any(module.__dict__.get(hooks) for hooks in _HOOKS) and not isinstance(module, nn.MultiheadAttention)
    return [
        (kind is not base, f"{kind.__name__}, a subclass of {name},", f"{wrap}, without a parametrization"),
        (hooked, f"a hook of {name}", wrap + ", and put the code of the hook into this module"),
        ("forward" in module.__dict__, f"an {name} with a replaced forward", wrap + " in its own forward"),
    ]


def _need(fine: bool, path: str, what: str, fix: str) -> None:
    if not fine:
        raise ModelError(f"{path}: {what} is not supported in a federated model; {fix}.")
