"""Checks of the values in `[model]`. All checks use the same wording of errors."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from polyfed.core.errors import ModelError, did_you_mean
from polyfed.core.option_checks import key_of
from polyfed.core.problems import Problems
from polyfed.model.modules.parameter_slots import IN_PLACE


def whole(where: str, value: Any) -> None:
    """Raise ModelError unless the value is a whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where} = {value!r}: give a whole number of at least 1.")


def sizes(where: str, values: Any) -> tuple[int, ...]:
    """Return the sizes as a tuple. Raise ModelError unless each is a whole number of at least one."""
    if not isinstance(values, (list, tuple)):
        raise ModelError(f"{where} = {values!r}: give a list of sizes, e.g. [64].")
    for value in values:
        whole(where, value)
    return tuple(values)


def probability(where: str, value: Any) -> None:
    """Raise ModelError unless the value is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
        raise ModelError(f"{where} = {value!r}: give a probability, 0 <= p < 1.")


def one_of(where: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ModelError unless the value is one of the allowed words."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ModelError(f"{where} = {value!r}: {did_you_mean(str(value), allowed)}.")


def known_fields(where: str, given: Iterable[str], spec: type) -> None:
    """Raise ModelError for a key that the dataclass `spec` does not have."""
    allowed = [f.name for f in fields(spec)]
    for name in given:
        if name not in allowed:
            raise ModelError(f"{where} has no option {name!r}: {did_you_mean(name, allowed)}.")


def refuse_state(constants: Callable[[], Mapping[str, Tensor]], call: Callable[[], Any]) -> None:
    """Call a module once more, and refuse it if the call changes a buffer that polyfed takes for a constant.

    The value of such a buffer would pass from one client to the next. Modules that fill such a buffer in their first
    call only, as a cache, are allowed.

    Args:
        constants: returns the constant buffers by name.
        call: calls the module. It has been called before.

    Raises:
        ModelError: a buffer has changed. The text names it and the cure.
    """
    before = {name: value.clone() for name, value in constants().items()}
    if not before:
        return
    call()
    for name, value in constants().items():
        if value.shape != before[name].shape or not torch.equal(value.nan_to_num(), before[name].nan_to_num()):
            raise ModelError(
                f"{name}: forward() changes this buffer, and polyfed takes it for a constant, because it holds "
                "integers, is not saved with the module, or belongs to a module in evaluation mode. Its value would "
                f"pass from one client to the next. {IN_PLACE}"
            )


def check_entries(
    section: str, entries: Mapping[str, Any], modalities: Collection[str], cure: Callable[[str], str]
) -> None:
    """Check that a section has one entry for each modality of the data, and no other.

    Args:
        section: the name of the section, for the messages.
        entries: the entries of the section, by modality.
        modalities: the modalities of the data.
        cure: a function that returns the end of an error text: what the user should write if a modality has no entry.
            Its argument is the name of the modality.

    Raises:
        ModelError: a modality has no entry, or an entry names a modality that the data lacks. One error lists all of
            these faults.
    """
    problems = Problems()
    for name in modalities:
        if name not in entries:
            text = f"{section} has no entry for the modality {name!r}{cure(name)}"
            problems.add(ModelError(text, key_of(section, name)))
    for name in entries:
        if name not in modalities:
            text = f"{section} {name}: the data has no such modality; {did_you_mean(name, modalities)}."
            problems.add(ModelError(text, key_of(section, name)))
    problems.raise_all()
