"""Chooses encoders, according to the data, for modalities without an encoder in the recipe."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from polyfed.core.errors import DataError, ModelError, counted
from polyfed.core.problems import Problems
from polyfed.core.system.json_and_toml import toml_value
from polyfed.data import Column, Columns
from polyfed.data.column_scaling import fitted
from polyfed.data.columns import LEFT_OUT
from polyfed.data.reading.column_guess import IDS
from polyfed.data.sources.own.table_files import Table
from polyfed.data.token_ids import WHOLE, vocabulary_of, whole_numbers
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.model import EncoderSpec, TokenTransformer, default_encoder
from polyfed.model.encoders import pretrained
from polyfed.model.encoders.hugging_face import HuggingFace
from polyfed.model.encoders.spec import Tabular


def with_encoders(recipe: Recipe, columns: Columns) -> Recipe:
    """Return the recipe with an encoder for every modality of the data. Encoders in the recipe stay as they are.

    If the model is one whole module, it has no encoders, and the recipe is returned unchanged.

    Raises:
        ModelError: there is no default encoder for samples of this shape.
        DataError: token ids do not fit the vocabulary of their encoder.
    """
    if recipe.model.module is not None:
        return recipe
    problems = Problems()
    added: dict[str, EncoderSpec] = {}
    for name, column in columns.modalities.items():
        given = recipe.model.encoders.get(name)
        with problems.noting():
            if given is None:
                added[name] = encoder_for(name, column, recipe.model.embedding)
            elif wanted := embeddings_of(column):
                added[name] = _with_vectors(name, given, wanted)
            elif isinstance(given, TokenTransformer):
                cure = "Set its vocabulary to {}, and do not standardise ids"
                _check_tokens(columns.name, name, column, given.vocabulary, cure)
            elif isinstance(given, HuggingFace) and len(column.shape) == 1:
                cure = f"Make the ids with the tokenizer of '{given.path}', and do not standardise them"
                _check_tokens(columns.name, name, column, pretrained.vocabulary(given.path), cure)
    problems.raise_all()
    if not added:
        return recipe
    return replace(recipe, model=replace(recipe.model, encoders={**recipe.model.encoders, **added}))


def encoder_for(name: str, column: Column, embedding: int) -> EncoderSpec:
    """Return the default encoder of a modality; see `default_encoder`.

    Raises:
        ModelError: there is no default encoder for samples of this shape.
    """
    if wanted := embeddings_of(column):
        return Tabular(embeddings=wanted)
    try:
        return default_encoder(column.shape, vocabulary_of(column), embedding)
    except ModelError as error:
        raise ModelError(f"modality '{name}': {error}", ("model", "encoders", name)) from None


def embeddings_of(column: Column) -> tuple[tuple[int, int, int], ...]:
    """Return the places of words whose vectors are trained, as `Tabular.embeddings` holds them."""
    result, place = [], 0
    for feature in column.features or column.coded or ():
        if feature.rule is not None and feature.rule.kind == "embedding":
            result.append((place, feature.width, feature.rule.size))
        place += feature.width
    return tuple(result)


def _with_vectors(name: str, given: EncoderSpec, wanted: tuple[tuple[int, int, int], ...]) -> EncoderSpec:
    """Return the encoder of a modality with the places of its words.

    Raises:
        ModelError: the encoder trains no vectors of words, or has other places.
    """
    where = ("model", "encoders", name)
    if not isinstance(given, Tabular):
        raise ModelError(
            f"[data.columns] gives words of '{name}' a trained vector, which only the encoder 'tabular' has. Write "
            f'[model.encoders] {name} = {{ kind = "tabular" }}, or the kind one-hot',
            where,
        )
    if given.embeddings and given.embeddings != wanted:
        raise ModelError(
            f"[model.encoders] {name}: embeddings = {list(map(list, given.embeddings))}, and the data has "
            f"{list(map(list, wanted))}. Leave the option out",
            where,
        )
    return replace(given, embeddings=wanted)


def scaled(recipe: Recipe, columns: Columns, rows: Tensor) -> Columns:
    """Return the table with features standardised over `rows`, as [data] standardise says; see `fitted`.

    If epsilon counts single rows, "uneven" standardises nothing, because each row would change the features of all.
    Whole numbers are token ids if the recipe's encoder reads ids, and numbers if it names another one. A whole module
    gets them unchanged.

    Args:
        rows: the rows that train, int64 (n,).
    """
    if columns.standardise == "uneven" and recipe.privacy is not None and recipe.privacy.unit == "example":
        return replace(columns, standardise=False)
    vectors = [name for name, column in columns.modalities.items() if len(column.shape) == 1]
    named = {name: recipe.model.encoders[name] for name in vectors if name in recipe.model.encoders}
    ids = {name for name, spec in named.items() if isinstance(spec, TokenTransformer | HuggingFace)}
    if recipe.model.module is not None:
        ids |= {name for name in vectors if whole_numbers(columns.modalities[name])}
    return fitted(columns, rows, named.keys() - ids, ids)


def kind_of(column: Column) -> str:
    """Describe the samples of a modality in words."""
    if (vocabulary := vocabulary_of(column)) is not None:
        return f"token ids {column.shape}, 0 to {vocabulary - 1:,}"
    names = {1: "vectors", 2: "time series", 3: "images", 4: "clips"}
    turned = ", turned from (H, W, C)" if column.layout == "HWC" else ""
    return f"{names.get(len(column.shape), 'samples')} {column.shape}{turned}"


def guesses_of(recipe: Recipe, columns: Columns) -> tuple[str, ...]:
    """Return sentences about what the data source guessed, and about the encoders that the recipe does not name."""
    result = list(columns.notes)
    for name, column in columns.modalities.items():
        if name in columns.present:
            result.append(told_of_missing(columns, name))
        if recipe.model.module is None and name not in recipe.model.encoders:
            spec = encoder_for(name, column, recipe.model.embedding)
            result.append(f"'{name}' holds {kind_of(column)}; its encoder is {name} = {encoder_text(spec)}")
            result += told_of_whole(name, column, spec)
    if unread := _unread(recipe.data, columns):
        more = f" and {len(unread) - MOST_UNREAD:,} more" if len(unread) > MOST_UNREAD else ""
        result.append(f"not read: {', '.join(unread[:MOST_UNREAD])}{more}")
    if columns.client is not None and recipe.clients.partition == "iid":
        count = len(set(columns.client.tolist()))
        result.append(f"the data has {count:,} natural clients; [clients] partition = 'by-client' makes each a client")
    return tuple(result)


def told_of_missing(columns: Columns, modality: str) -> str:
    """Return in how many rows a modality is missing. Rows that are left out count nowhere."""
    kept = columns.split.cpu() != LEFT_OUT
    lacking = int((~columns.present[modality].cpu() & kept).sum())
    return f"'{modality}' is missing in {lacking:,} of {int(kept.sum()):,} rows"


MOST_UNREAD = 20
"""The most columns that the line about columns that nothing reads names."""


def _unread(source: object, columns: Columns) -> list[str]:
    """Return the columns of a table that are no input, no label and name neither client, split nor row."""
    if not isinstance(source, Table):
        return []
    known = {*source.given.meaning, *(IDS if not columns.numbered and not source.ids else ())}
    return [name for name in columns.origin.get("", ()) if name not in known]


def told_of_whole(name: str, column: Column, spec: EncoderSpec) -> list[str]:
    """Return the line about whole numbers, which are either token ids or quantities, with the other reading."""
    kept = column.values.dtype in WHOLE and len(column.shape) == 1 and int(column.values.min()) >= 0
    if not kept or column.features is not None:
        return []
    vocabulary = int(column.values.max()) + 1
    if isinstance(spec, TokenTransformer):
        cure = f'[model.encoders] {name} = {{ kind = "mlp", hidden = [64] }}'
        padding = int((column.raw(torch.arange(len(column))) == 0).all(1).sum())
        lacking = (
            f"{counted(padding, 'row holds', 'rows hold')} only padding in '{name}', the id 0. If such a row lacks it, "
            f"say so: the boolean array '{name}_present' in a file, present={{'{name}': ...}} in Python"
        )
        return [
            f"the whole numbers of '{name}' are taken as token ids; if they are quantities, write {cure}",
            *([lacking] if padding else []),
        ]
    cure = f'[model.encoders] {name} = {{ kind = "token-transformer", vocabulary = {vocabulary} }}'
    return [f"the whole numbers of '{name}' are taken as quantities; if they are token ids, write {cure}"]


def encoder_text(spec: EncoderSpec) -> str:
    """Return the entry of [model.encoders] that gives this encoder, with the options that are not defaults."""
    defaults: Mapping[str, object] = {name: field.default for name, field in type(spec).__dataclass_fields__.items()}
    options = {k: v for k, v in vars(spec).items() if k == "kind" or v != defaults.get(k)}
    return f"{{ {', '.join(f'{key} = {toml_value(value)}' for key, value in options.items())} }}"


def _check_tokens(data: str, name: str, column: Column, vocabulary: int | None, cure: str) -> None:
    """Check that the token ids of a modality fit its encoder.

    `cure` is the advice in the error text. `{}` in it is replaced by the smallest vocabulary size that covers all token
    ids.
    """
    if vocabulary is None:
        return
    low, high = float(column.values.min()), float(column.values.max())
    if low < 0 or high >= vocabulary or column.shift is not None or column.scale is not None:
        raise DataError(
            f"data '{data}': modality '{name}' holds ids from {low:g} to {high:g}, and [model.encoders] {name} reads "
            f"ids from 0 to {vocabulary - 1}. {cure.format(int(high) + 1)}"
        )
