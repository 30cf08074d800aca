"""Whole numbers are token ids only if that is plausible; counts and histograms are numbers."""

from typing import Any

import numpy as np
import pytest
import torch

import polyfed
from polyfed.data.columns import Column
from polyfed.data.token_ids import vocabulary_of
from polyfed.experiment.running.assembly import assemble
from refusals import warned

DRAW = np.random.default_rng(7)
ROWS = 300


def padded(ids: np.ndarray, left: bool = False) -> np.ndarray:
    """Set the ends of the rows to the id of padding."""
    lengths = DRAW.integers(3, ids.shape[1] + 1, len(ids))[:, None]
    place = np.arange(ids.shape[1])[None]
    return np.where((place[:, ::-1] if left else place) < lengths, ids, 0)


def words(rows: int, steps: int, vocabulary: int) -> np.ndarray:
    """Draw ids whose frequencies fall as those of words do, with the ids in another order."""
    weight = 1 / np.arange(1, vocabulary)
    ids = DRAW.permutation(np.arange(1, vocabulary))
    return ids[DRAW.choice(vocabulary - 1, (rows, steps), p=weight / weight.sum())]


TOKENS: dict[str, Any] = {
    "uniform": DRAW.integers(0, 50, (ROWS, 12)),
    "uniform, few rows": DRAW.integers(1, 20, (40, 6)),
    "padded": padded(DRAW.integers(1, 500, (ROWS, 20))),
    "padded on the left": padded(DRAW.integers(1, 500, (ROWS, 20)), left=True),
    "words": padded(words(ROWS, 30, 2000)),
    "words by frequency": padded(np.sort(words(ROWS, 30, 2000).ravel())[DRAW.permutation(ROWS * 30)].reshape(ROWS, 30)),
    "bases": DRAW.integers(0, 4, (ROWS, 40)),
    "letters": padded(words(ROWS, 60, 28)),
}

NUMBERS: dict[str, Any] = {
    "counts": DRAW.poisson(5, (ROWS, 8)),
    "small counts": DRAW.poisson(1.5, (ROWS, 8)),
    "large counts": DRAW.poisson(80, (ROWS, 8)),
    "counts of unlike size": DRAW.poisson([1, 4, 20, 900, 3, 8], (ROWS, 6)),
    "histograms": DRAW.multinomial(100, np.ones(16) / 16, ROWS),
    "wide histograms": DRAW.multinomial(4000, DRAW.dirichlet(np.ones(256) * 0.3), ROWS),
    "bags of words": DRAW.poisson(0.05, (ROWS, 400)),
    "large sums": DRAW.integers(0, 80_000, (210, 256)),
    "flags": DRAW.integers(0, 2, (ROWS, 10)),
    "one number": DRAW.integers(0, 90, (ROWS, 1)),
    "scans": np.round(16 * DRAW.beta(0.3, 0.3, (ROWS, 64)) * (DRAW.random((ROWS, 64)) < 0.6)).astype(int),
    "answers from 1 to 5": DRAW.choice(np.arange(1, 6), (ROWS, 20), p=[0.05, 0.15, 0.3, 0.35, 0.15]),
    "below zero": DRAW.integers(-3, 50, (ROWS, 12)),
}


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("kind", [torch.int16, torch.int32, torch.int64])
def test_ids_are_ids(name: str, kind: torch.dtype) -> None:
    ids = torch.from_numpy(TOKENS[name]).to(kind)
    assert vocabulary_of(Column(ids)) == int(ids.max()) + 1


@pytest.mark.parametrize("name", NUMBERS)
def test_counts_are_numbers(name: str) -> None:
    assert vocabulary_of(Column(torch.from_numpy(NUMBERS[name]))) is None


def test_scanned_digits_are_numbers() -> None:
    from sklearn.datasets import load_digits

    assert vocabulary_of(Column(torch.from_numpy(load_digits().data).long())) is None


@pytest.mark.filterwarnings("ignore:data. x. features differ in size")
@pytest.mark.parametrize(("values", "line"), [(TOKENS["padded"], "token ids"), (NUMBERS["large counts"], "quantities")])
def test_the_guess_is_one_line_with_its_alternative(values: Any, line: str) -> None:
    recipe = polyfed.make_recipe({"x": values}, labels=np.arange(ROWS) % 3)
    parts = assemble(recipe)
    said = [note for note in parts.guesses if "whole numbers of 'x'" in note]
    assert len(said) == 1
    assert f"are taken as {line}" in said[0]
    entry = parts.recipe.model.encoders["x"].kind
    other = "mlp" if entry == "token-transformer" else "token-transformer"
    assert f'kind = "{other}"' in said[0]
    turned = {"kind": "mlp", "hidden": [64]} if other == "mlp" else {"kind": other, "vocabulary": int(values.max()) + 1}
    found = assemble(polyfed.make_recipe({"x": values}, labels=np.arange(ROWS) % 3, model={"encoders": {"x": turned}}))
    assert (found.population.columns.modalities["x"].shift is None) == (other == "token-transformer")


def test_counts_are_standardised_and_ids_are_not() -> None:
    x = {"counts": NUMBERS["large counts"], "ids": TOKENS["padded"]}
    with warned("features differ"):
        columns = assemble(polyfed.make_recipe(x, labels=np.arange(ROWS) % 3)).population.columns
    assert columns.modalities["ids"].shift is None
