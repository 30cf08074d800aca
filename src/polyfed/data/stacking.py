"""Early fusion: several modalities concatenated into one, before any model sees them.

For example, these lines of a recipe concatenate rgb (3, H, W) and gray (1, H, W) into one modality `image` (4, H, W):

    [data]
    stack = { image = ["rgb", "gray"] }

HFL and Local, two methods with which HFM is compared, train on such a modality (docs/algorithms/hfl.md). A row that
lacks one of the parts lacks the new modality.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyfed.core.errors import DataError, RecipeError
from polyfed.data.columns import Column, Columns, Standardise


def stacked(columns: Columns, stack: Mapping[str, Sequence[str]]) -> Columns:
    """Return the table with some modalities concatenated.

    If samples agree in all axes except the first, they are concatenated along the first axis (channels of images,
    features of vectors). If one of the parts is a vector, all parts are flattened first.

    Args:
        stack: New modality -> its parts, in order. The result no longer has the parts as separate modalities.

    Raises:
        RecipeError: A part is named twice, there are fewer than two parts, or the new name is taken.
        DataError: The data lacks a part, or images differ in size.
    """
    parts = [name for names in stack.values() for name in names]
    rest = {name: column for name, column in columns.modalities.items() if name not in parts}
    for name, names in stack.items():
        if len(names) < 2 or len(set(names)) < len(names) or any(parts.count(part) > 1 for part in names):
            raise RecipeError(
                f"data.stack.{name} = {list(names)}: name at least two modalities, each of them once",
                ("data", "stack", name),
            )
        if name in rest:
            raise RecipeError(
                f"data.stack.{name}: data '{columns.name}' has a modality of that name already", ("data", "stack", name)
            )
    made = {name: _column(columns, name, names) for name, names in stack.items()}
    present = {name: mask for name, mask in columns.present.items() if name in rest}
    for name, names in stack.items():
        masks = [columns.present[part] for part in names if part in columns.present]
        if masks:
            present[name] = torch.stack(masks).all(0)
    return replace(columns, modalities=rest | made, present=present, standardise=_standardise(columns, stack))


def _standardise(columns: Columns, stack: Mapping[str, Sequence[str]]) -> Standardise:
    """Return the modalities to standardise, under their names after the concatenation."""
    if not isinstance(columns.standardise, tuple):
        return columns.standardise
    result = [name for name in columns.standardise if not any(name in names for names in stack.values())]
    for name, names in stack.items():
        if some := [part for part in names if part in columns.standardise]:
            if len(some) < len(names):
                other = next(part for part in names if part not in some)
                raise RecipeError(
                    f"data.standardise names '{some[0]}', and not '{other}', which data.stack.{name} joins with it. "
                    "Name all of its parts, or none",
                    ("data", "standardise"),
                )
            result.append(name)
    return tuple(result)


def _column(columns: Columns, name: str, names: Sequence[str]) -> Column:
    parts = [columns.column(part) for part in names]
    if coded := [part for part, column in zip(names, parts, strict=True) if column.coded is not None]:
        raise RecipeError(
            f"data.stack.{name}: '{coded[0]}' has columns in [data.columns], so its width is not known yet. Name all "
            "columns in one modality instead",
            ("data", "stack", name),
        )
    flat = any(len(part.shape) == 1 for part in parts)
    if not flat and len({part.shape[1:] for part in parts}) > 1:
        found = ", ".join(f"{part} {columns.modalities[part].shape}" for part in names)
        raise DataError(
            f"data.stack.{name}: samples differ beyond their first axis: {found}. Bring them to one size",
            ("data", "stack", name),
        )
    shared = all(part.index is parts[0].index for part in parts)
    values = [part.values if shared else part.raw(torch.arange(len(part))) for part in parts]
    return Column(
        torch.cat([_shaped(value, flat) for value in values], 1),
        shift=_norms([part.shift for part in parts], parts, flat, 0.0),
        scale=_norms([part.scale for part in parts], parts, flat, 1.0),
        index=parts[0].index if shared else None,
    )


def _shaped(values: Tensor, flat: bool) -> Tensor:
    return values.flatten(1) if flat else values


def _norms(norms: Sequence[Tensor | None], parts: Sequence[Column], flat: bool, neutral: float) -> Tensor | None:
    """Join the shifts of several parts, or their scales, into one tensor. Return None if no part has any.

    A sample is the concatenation of its parts. The tensor has one value for each entry of such a sample.
    """
    if all(norm is None for norm in norms):
        return None
    kind = torch.float64 if any(norm is not None and norm.dtype == torch.float64 for norm in norms) else torch.float32
    wide = [torch.tensor(neutral, dtype=kind) if norm is None else norm.to(kind) for norm in norms]
    whole = [norm.broadcast_to(part.shape)[None] for norm, part in zip(wide, parts, strict=True)]
    return torch.cat([_shaped(norm, flat)[0] for norm in whole])
