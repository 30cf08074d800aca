"""Turns the samples that a user gives to `predict` into tensors: arrays, lists of sequences, and data frames."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import DataError, RecipeError
from polyfed.data.reading.objects import is_frame, is_hugging_face
from polyfed.data.reading.values import array_of, tensor_of, unmasked

Shape = tuple[int, ...]


def refuse_other_forms(x: Any) -> None:
    """Check that the samples are a dictionary.

    Raises:
        RecipeError: `x` is not a dictionary. The text says how to make one.
    """
    if isinstance(x, Mapping):
        return
    if is_frame(x) or is_hugging_face(x):
        cure = "name the columns of each modality, as in {'audio': frame[['audio_0', 'audio_1']]}"
    elif hasattr(x, "__getitem__") and hasattr(x, "__len__") and not isinstance(x, Tensor | np.ndarray | list | tuple):
        cure = "collect the samples of each modality, as in {'audio': [sample['audio'] for sample in data]}"
    else:
        cure = "give a dictionary of samples, as in {'audio': array}"
    raise RecipeError(f"x is a {type(x).__name__}; {cure}")


def samples_of(name: str, value: Any, shape: Shape, *, tokens: bool) -> tuple[Tensor, Tensor | None]:
    """Return the samples of one modality as a tensor.

    Args:
        name: the modality, for error texts.
        value: a tensor, an array, a list, or a data frame with the columns of the modality. In a list, None is a sample
            that lacks the modality. Sequences in a list, or in the only column of a data frame, may differ in length.
            Shorter ones are padded with zeros at the end to the length of the training, as in the training data.
        shape: the shape of a sample in training.
        tokens: whether the samples are token ids.

    Returns:
        The samples (n, ...), and a mask, bool (n,), of the samples that have the modality. The mask is None if the
        value has no None.

    Raises:
        RecipeError: the value holds no numbers, or is a sparse tensor.
    """
    if is_frame(value):
        columns = [value[column] for column in value.columns]
        value = columns[0].tolist() if len(columns) == 1 and columns[0].dtype == object else value.to_numpy()
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise RecipeError(f"x['{name}'] is a sparse tensor; give a dense one, as in x.to_dense()")
        return value, None
    if isinstance(value, list | tuple) and any(_has_axes(cell) or cell is None for cell in value):
        return _of_list(name, value, shape, tokens=tokens)
    try:
        if isinstance(value, np.ma.MaskedArray):
            value = unmasked(value if value.dtype.kind == "f" else value.astype(np.float64))
        array = np.asarray(value)
        return tensor_of(array if array.flags.writeable else array.copy()), None
    except (TypeError, ValueError):
        raise RecipeError(
            f"x['{name}'] holds values that are not numbers; give an array of numbers (n, ...). The model reads words, "
            f"texts and image files only if it was trained with a rule in [data.columns] for them"
        ) from None


def turned(value: Tensor, shape: Shape) -> Tensor:
    """Return images in the order of axes of the training, (n, C, H, W), as training data is turned: see `laid_out`.

    Args:
        value: the samples (n, ...).
        shape: the shape of a sample in training.
    """
    own = tuple(value.shape[1:])
    if len(shape) != 3 or own == shape:
        return value
    if own == (*shape[1:], shape[0]) and shape[0] in (1, 3, 4):
        return value.movedim(-1, 1)
    return value.unsqueeze(1) if own == shape[1:] and shape[0] == 1 else value


def refuse_unknown_ids(name: str, value: Tensor, there: Tensor, vocabulary: int | None) -> Tensor:
    """Check token ids, and return them with the id 0 in rows that lack the modality.

    Raises:
        RecipeError: an id is negative, or is not in the vocabulary of the encoder.
    """
    if vocabulary is None or not len(value):
        return value
    value = torch.where(there.reshape(-1, *[1] * (value.dim() - 1)), value, 0)
    low, high = float(value.min()), float(value.max())
    if low < 0 or high >= vocabulary:
        raise RecipeError(
            f"x['{name}'] holds ids from {low:g} to {high:g}, and the encoder of '{name}' reads ids from 0 to "
            f"{vocabulary - 1}. Make the ids with the tokenizer of the training data, and map unknown words to an id "
            "that the training data has"
        )
    return value


def _has_axes(cell: Any) -> bool:
    return isinstance(cell, list | tuple) or bool(getattr(cell, "ndim", 0))


def _of_list(name: str, cells: Sequence[Any], shape: Shape, *, tokens: bool) -> tuple[Tensor, Tensor | None]:
    where = f"x['{name}']"
    arrays = [cell.detach().cpu().numpy() if isinstance(cell, Tensor) else cell for cell in cells]
    if all(cell is None for cell in arrays):
        return torch.zeros(len(cells), *shape), torch.zeros(len(cells), dtype=torch.bool)
    try:
        array, there, _ = array_of(arrays, where)
    except DataError as error:
        raise RecipeError(str(error)) from None
    value = torch.as_tensor(array)
    is_series = len(shape) == 2 or (len(shape) == 1 and tokens)
    if is_series and value.dim() == 1 + len(shape) and value.shape[2:] == shape[1:] and value.shape[1] < shape[0]:
        longer = value.new_zeros(len(value), *shape)
        longer[:, : value.shape[1]] = value
        value = longer
    return value, None if there.all() else torch.as_tensor(there)
