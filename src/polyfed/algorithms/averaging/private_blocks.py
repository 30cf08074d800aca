"""Private blocks: parts of the model that no client of an averaging method sends.

`Averaging` uses these functions. A client's private parameters are part of its local state, so they never leave the
client. In a simulation, the checkpoint contains them. On a real device, they stay in the device's own store.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.messages import OF_THE_MODEL, Message, map_fields
from polyfed.core.tree import SHARED, Tree, block_of, nested, under
from polyfed.federation.context import ClientContext
from polyfed.model import Model
from polyfed.training.optimisers import Train

HEAD, ENCODERS, NORMS, PROJECTIONS = "head", "encoders", "norms", "projections"
FUSION, CLASSIFIER = "fusion", "classifier"
"""Words that the option `private` accepts besides block names: everything after the encoders, all encoders, all
normalisation layers, wherever they are, the modalities' own projections in the fusion `adapted`, and the two parts of
the head: its last layer, and everything before that."""

PRIVATE, TUNED = "@private", "@tuned"
"""Prefixes in a client's local state: its private parameters, and its model after fine-tuning. No modality can have a
name that starts with @."""

PRIVATE_STREAM, TUNE_STREAM = 1001, 1002
"""Random streams of the batches for separate training of private parameters, and for fine-tuning."""


_TEMPLATE = ("model_spec", "round", "update", "evaluation_message", "own_params", "global_params")
"""Hooks of `Averaging` that add the private blocks to a model. A method that overrides one of these hooks cannot have
private blocks."""


def check(method: Any, template: type) -> None:
    """Check the options `private`, `private_epochs` and `fine_tune` of a method.

    Args:
        template: `Averaging`.

    Raises:
        RecipeError: the method cannot keep private blocks.
    """
    for option, what in (("private", "private blocks"), ("fine_tune", "fine-tuning")):
        if getattr(type(method), option) and not getattr(method, option):
            raise RecipeError(
                f"[algorithm] {option}: without {what}, {type(method).__name__} is FedAvg: use fedavg",
                ("algorithm", option),
            )
    if method.private_epochs and not method.private:
        raise RecipeError(
            "[algorithm] private_epochs trains private blocks, and there are none: set private",
            ("algorithm", "private_epochs"),
        )
    if not (method.private or method.fine_tune):
        return
    kind = type(method)
    if kind.completes_private and not method.fine_tune:
        return
    if replaced := [name for name in _TEMPLATE if getattr(kind, name) is not getattr(template, name)]:
        raise RecipeError(
            f"[algorithm] private and fine_tune: {kind.__name__} replaces {replaced[0]} of the averaging template, "
            "which keeps the private blocks. Allowed with methods that do not, such as fedavg and fedprox",
            ("algorithm", "private" if method.private else "fine_tune"),
        )


def names_of(words: Iterable[str], model: Model) -> frozenset[str]:
    """Return the names of the parameters and buffers that the words of the option `private` select.

    Args:
        words: `shared`, modalities, `head`, `encoders`, `norms`, `projections`, `fusion` or `classifier`. A modality
            with one of the last six names has precedence.

    Raises:
        RecipeError: a word matches nothing in the model.
    """
    head, result = frozenset(model.head()), set[str]()
    everything = model.names(model.modalities)
    last = frozenset(model.classifier())
    groups = {HEAD: head, ENCODERS: frozenset(everything) - head, NORMS: model.norm_names}
    groups |= {CLASSIFIER: last, FUSION: head - last if last else last}
    groups[PROJECTIONS] = frozenset(n for m in model.modalities for n in model.head_slice(m) if _projects(n))
    groups |= {block: frozenset(n for n in everything if block_of(n) == block) for block in (*model.modalities, SHARED)}
    for word in words:
        if word not in groups:
            raise RecipeError(
                f"[algorithm] private = '{word}': the model has no such block; {did_you_mean(word, groups)}",
                ("algorithm", "private"),
            )
        if word == NORMS and not groups[word]:
            raise RecipeError(
                "[algorithm] private = 'norms': no layer of the model normalises, so there is nothing to keep. Take an "
                "encoder with a norm that trains, such as resnet18 or one of your own, or keep another block",
                ("algorithm", "private"),
            )
        if not groups[word]:
            raise RecipeError(
                f"[algorithm] private = '{word}': this block has no parameters that train, so there is nothing to "
                "keep. Remove the word"
                + (", or give the model a layer before the last one, as [model] head does" if word == FUSION else ""),
                ("algorithm", "private"),
            )
        result |= groups[word]
    return frozenset(result - {*model.zero_inputs.values()})


def _projects(name: str) -> bool:
    """Whether a name of a modality's part of the fusion is a projection of an adapter (`model.fusion.Adapter`)."""
    return name.split(".")[2] in ("down", "up")


def refuse_all_private(words: Iterable[str], model: Model) -> None:
    """Refuse private blocks that leave nothing to average.

    Raises:
        RecipeError: every parameter is private.
    """
    if not set(model.names(model.modalities)) - names_of(words, model) - {*model.zero_inputs.values()}:
        raise RecipeError(
            f"[algorithm] private = {list(words)}: every block is private, so nothing would be averaged. Leave one "
            "out, or use the algorithm 'local'",
            ("algorithm", "private"),
        )


def kept_at_first(context: ClientContext, names: Collection[str]) -> Tree:
    """Return a local state with the private parameters with which a client starts. They are equal on all clients."""
    return nested(PRIVATE, {name: value for name, value in context.initial.items() if name in names})


def as_at_first(context: ClientContext, params: Tree) -> Tree:
    """Return the same parameters with the values of the initial model, which knows no client's rows."""
    return {name: context.initial[name] for name in params}


def parted(local: Tree) -> tuple[Tree, Tree]:
    """Split a local state into the client's private parameters and the method's own entries."""
    prefixes = (f"{PRIVATE}.", f"{TUNED}.")
    if not any(name.startswith(prefixes) for name in local):
        return {}, local
    return under(PRIVATE, local), {name: value for name, value in local.items() if not name.startswith(prefixes)}


def completed(got: Any, private: Tree) -> Any:
    """Return a received message with the client's private parameters added to its field `params`."""
    return replace(got, params=got.params | private) if private else got


def public(reply: Message, names: Collection[str]) -> Any:
    """Return a reply without private parameters. They are removed from all trees that use the model's names."""

    def without(field: str, value: Any) -> Any:
        if reply.kinds[field] not in OF_THE_MODEL:
            return value
        return {name: tensor for name, tensor in value.items() if name not in names}

    return map_fields(reply, without)


def personal(received: Mapping[str, Any], local: Tree) -> Tree:
    """Return a client's own model: the fine-tuned model, if any, else the received model with private parameters."""
    return under(TUNED, local) or {**received, **under(PRIVATE, local)}


def epochs_of(train: Train, epochs: int) -> Train:
    """Return the same options of local training with another number of epochs."""
    return replace(train, epochs=epochs, steps=None)
