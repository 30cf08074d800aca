"""LoRA for pre-trained backbones, with the `peft` library: trainable low-rank matrices that are added to frozen layers.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022. A frozen weight W becomes W + (alpha
/ r) B A. Only A (r, inputs) and B (outputs, r) are trained. Frozen parameters are in no Tree, so only A and B are sent.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from polyfed.core.errors import ModelError, did_you_mean
from polyfed.model.checks import known_fields, probability, whole

_CARRIES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
"""The layers that `peft` can adapt."""

_MATRIX_A = re.compile(r"(\.lora_(?:embedding_)?)A\.")
"""The part of a name by which `peft` marks the matrix A of an adapter. The name of B differs only in this letter."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The option `lora` of the encoder `hf`.

    Attributes:
        target_modules: names of the layers to adapt, such as `query`. Each entry is the last part of a layer's name,
            and selects all layers whose name ends with it.
        r: rank of the matrices. The default of `peft` is 8.
        alpha: the product of the matrices is multiplied by alpha / r. The default of `peft` is 8.
        dropout: dropout probability for the input of A.
    """

    target_modules: tuple[str, ...]
    r: int = 8
    alpha: float = 8.0
    dropout: float = 0.0


def read(table: Mapping[str, Any]) -> Lora:
    """Read the option `lora`.

    Raises:
        ModelError: a key is unknown, or a value is out of range.
    """
    if not isinstance(table, Mapping):
        raise ModelError(f"lora = {table!r}: give a table, e.g. {{ r = 4, target_modules = ['query', 'value'] }}.")
    known_fields("lora", table, Lora)
    targets = table.get("target_modules")
    if not (isinstance(targets, list | tuple) and targets and all(isinstance(name, str) for name in targets)):
        raise ModelError(f"lora.target_modules = {targets!r}: give the names of layers, e.g. ['query', 'value'].")
    result = Lora(**{**table, "target_modules": tuple(targets)})
    whole("lora.r", result.r)
    probability("lora.dropout", result.dropout)
    if isinstance(result.alpha, bool) or not isinstance(result.alpha, int | float) or not result.alpha > 0:
        raise ModelError(f"lora.alpha = {result.alpha!r}: give a number above 0.")
    return result


def pairs(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the names of the matrices A and B of every adapter in a Tree.

    A is (r, inputs) and B is (outputs, r). The matrices of a convolution have two more axes. In A, these axes have the
    size of the kernel.
    """
    known = dict.fromkeys(names)
    named = ((name, _MATRIX_A.sub(r"\1B.", name)) for name in known)
    return tuple((a, b) for a, b in named if a != b and b in known)


def adapt(backbone: nn.Module, lora: Lora) -> None:
    """Freeze a backbone and add the trainable matrices A and B of LoRA to its layers.

    Raises:
        ModelError: the backbone lacks a layer, or `peft` is not installed.
    """
    layers = [name for name, layer in backbone.named_modules() if isinstance(layer, _CARRIES)]
    last = dict.fromkeys(name.rpartition(".")[2] for name in layers)
    for target in lora.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            raise ModelError(
                f"lora.target_modules = '{target}': {type(backbone).__name__} has no such layer to adapt; "
                f"{did_you_mean(target, last)}."
            )
    try:
        peft = import_module("peft")
    except ImportError as error:
        raise ModelError(f"lora needs the package 'peft' ({error}): pip install 'polyfed[lora]'") from error
    backbone.requires_grad_(False)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
    )
    peft.inject_adapter_in_model(config, backbone)
