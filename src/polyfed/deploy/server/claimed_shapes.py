"""Bounds the size of the encoders that a server builds for sample shapes that clients claim.

With `[deployment] shapes`, or with rows of its own, the server knows the shape of a sample. Otherwise it takes the
shape from the clients that have the modality. If only one client has it, this client alone determines the shape.
The server therefore first tries the encoder on PyTorch's device `meta`, where tensors have a shape but no memory.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from polyfed.core.errors import BadReply, ModelError
from polyfed.core.system.operations import SeesOperations
from polyfed.experiment.checks.check import MEGABYTE
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.model.encoders.catalogue import Custom
from polyfed.model.encoders.hugging_face import HuggingFace
from polyfed.model.user_classes import fusion_class

SHARE = 4
"""If only clients claim the sample shapes of encoders, the parameters of these encoders together may take at most
`message_megabytes / SHARE` (inferred)."""

MAX_OPERATIONS = 100_000
"""Largest number of tensor operations of an encoder for two rows (inferred). An encoder of the user may need a few
operations for each step of a sequence."""

RECURRENT = (torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)
"""The operations of PyTorch's recurrent layers."""


class _OneStep(TorchFunctionMode):
    """Makes the results of a recurrent layer without computing its steps. On `meta`, a tensor has only a shape.

    PyTorch runs such a layer on `meta` as several operations for each step of a sequence. A long sequence, which one
    client can claim, would cost the server many seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation. For a recurrent layer, return tensors of the right shapes."""
        if func not in RECURRENT or not isinstance(args[2], list):  # a packed sequence has its lengths in this place
            return func(*args, **(kwargs or {}))
        x, states, weights, *_, bidirectional, _ = args
        first = states[0] if isinstance(states, tuple) else states
        x.new_empty(*x.shape[:-1], len(weights[0]))  # the gates of all steps, which `_Bounded` sees
        out = x.new_empty(*x.shape[:-1], first.shape[-1] * (2 if bidirectional else 1))
        ends = states if isinstance(states, tuple) else (states,)
        return (out, *(state.new_empty(state.shape) for state in ends))


class _Bounded(SeesOperations):
    """Stops a computation with `BadReply` if it takes too many operations or makes a tensor that is too large."""

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit, self.count = limit, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, count it, and check the sizes of its results."""
        self.count += 1
        if self.count > MAX_OPERATIONS:
            raise BadReply(f"it would take more than {MAX_OPERATIONS:,} operations")
        made = func(*args, **(kwargs or {}))
        most = max((leaf.nbytes for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)), default=0)
        if most > self.limit:
            raise BadReply(f"it would need a tensor of {most:,} bytes")
        return made


def flaws_of(recipe: Recipe, claims: Sequence[tuple[str, tuple[int, ...]]]) -> dict[str, str]:
    """Return modality -> reason, for each modality whose encoder the server does not build.

    No tensor may be larger than `[deployment] message_megabytes`. The parameters of all these encoders together may
    take at most `message_megabytes / SHARE`, because a message of some methods holds several copies of them. An
    encoder that does not run on the device `meta`, such as some encoders of the user, is not limited, but it must be
    able to read such samples. A model that is one module of the user is neither limited nor tried.

    Args:
        claims: modalities with the shape of a sample that clients claim. Earlier modalities use up the limit first.
    """
    flaws: dict[str, str] = {}
    room = recipe.deployment.message_megabytes * MEGABYTE // SHARE
    for name, shape in claims:
        if recipe.model.module is None and name in recipe.model.encoders:
            try:
                room -= _size_of(recipe, name, shape, room)
            except BadReply as error:
                flaws[name] = (
                    f"for samples of '{name}' with shape {shape}, the encoder is not built: {error}. If this shape is "
                    f"right, set [deployment] shapes = {{ {name} = [...] }}"
                )
    return flaws


def _size_of(recipe: Recipe, name: str, shape: tuple[int, ...], room: int) -> int:
    """Return the size of an encoder's parameters in bytes, or 0 if it is not known.

    Raises:
        BadReply: the encoder cannot read such samples, or is too large.
    """
    encoder, megabytes = recipe.model.encoders[name], recipe.deployment.message_megabytes
    try:
        with torch.device("meta"), _Bounded(megabytes * MEGABYTE), _OneStep():
            net = _tried(recipe, name, shape)
    except (ModelError, BadReply) as error:
        raise BadReply(f"{str(error).rstrip('.')} ([deployment] message_megabytes = {megabytes})") from None
    except Exception as error:
        _refuse_unreadable(recipe, name, shape, None if isinstance(encoder, Custom | HuggingFace) else error)
        return 0
    size: int = sum(value.nbytes for value in net.state_dict().values())
    if size > room:
        raise BadReply(
            f"its parameters would take {size:,} bytes, but encoders whose shapes only clients report may take "
            f"{room:,} bytes more ([deployment] message_megabytes = {megabytes})"
        )
    return size


def _tried(recipe: Recipe, name: str, shape: tuple[int, ...]) -> nn.Module:
    """Build the encoder of a modality, and run it on two samples of zeros."""
    sequence = fusion_class(recipe.model.fusion).sequential
    with torch.no_grad():
        net: nn.Module = recipe.model.encoders[name].build(shape, recipe.model.embedding, sequence).eval()
        net(torch.zeros(2, *shape))
    return net


def _refuse_unreadable(recipe: Recipe, name: str, shape: tuple[int, ...], error: Exception | None) -> None:
    """Refuse samples that an encoder cannot read. Otherwise the claim of one client would end the run.

    Args:
        name: the modality.
        shape: the shape of a sample.
        error: why the encoder does not run on the device `meta`. None if the encoder belongs to the user or to a
            library. It may do what is impossible on `meta`, so the function tries it on the CPU.

    Raises:
        BadReply: the encoder cannot read such samples.
    """
    if error is None:
        try:
            with torch.random.fork_rng(devices=[]):
                _tried(recipe, name, shape)
        except Exception as fault:
            error = fault
    if error is not None:
        raise BadReply(f"it cannot read them: {type(error).__name__}: {str(error).rstrip('.')[:500]}")


def without_absent(recipe: Recipe, present: Collection[str]) -> Recipe:
    """Return the recipe without the encoders and policy rows of modalities that the federation lacks.

    A modality is absent if no client that takes part has it, and neither the recipe nor the server's own rows give the
    shape of its samples. The server and every device call this function with the same modalities, so that they build
    the same model. If all modalities of the recipe are absent, the recipe is returned unchanged.

    Args:
        present: the modalities of the federation.
    """
    absent = recipe.model.encoders.keys() - {*present}
    if not absent or not recipe.model.encoders.keys() & {*present}:
        return recipe
    encoders = {name: encoder for name, encoder in recipe.model.encoders.items() if name not in absent}
    egress = {block: rows for block, rows in recipe.egress.items() if block not in absent}
    return replace(recipe, model=replace(recipe.model, encoders=encoders), egress=egress)
