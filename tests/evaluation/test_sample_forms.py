"""The forms of samples that `predict` takes, and what it says of any other form."""

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed
from polyfed.core.errors import DataError, RecipeError
from refusals import refuses

ROWS = 40


@pytest.fixture(scope="module")
def sequences():
    """A run on time series of up to 9 steps and token ids of up to 6 tokens, and its padded samples."""
    draw = np.random.default_rng(0)
    label = np.arange(ROWS) % 3
    wave = np.zeros((ROWS, 9, 2), np.float32)
    words = np.zeros((ROWS, 6), np.int64)
    for row in range(ROWS):
        steps, count = 9 - row % 5, 6 - row % 4
        wave[row, :steps] = draw.normal(size=(steps, 2)) + label[row]
        words[row, :count] = draw.integers(1, 20, count)
    words[0, 0] = 19
    model = {"embedding": 8, "encoders": {"wave": {"kind": "conv-gru", "channels": [4]}}}
    run = polyfed.run(data={"wave": wave, "words": words}, labels=label, clients=4, rounds=1, model=model)
    return run, wave, words


def unpadded(samples):
    """The samples without the padding at their ends."""
    return [sample[: 1 + np.flatnonzero(sample.reshape(len(sample), -1).any(1)).max()] for sample in samples]


def test_sequences_of_different_lengths_are_padded_to_the_length_of_the_training(sequences):
    run, wave, words = sequences
    rows = slice(2, 9)  # all are shorter than the longest samples of the training
    wanted = run.predict({"wave": wave[rows], "words": words[rows]})
    short = {"wave": unpadded(wave[rows]), "words": unpadded(words[rows])}
    assert torch.equal(run.predict(short), wanted)
    assert torch.equal(run.predict({m: list(map(torch.as_tensor, cells)) for m, cells in short.items()}), wanted)
    assert torch.equal(run.predict({m: [cell.tolist() for cell in cells] for m, cells in short.items()}), wanted)
    frame = pd.DataFrame({m: [cell.tolist() for cell in cells] for m, cells in short.items()})
    assert torch.equal(run.predict({"wave": frame[["wave"]], "words": frame[["words"]]}), wanted)
    alone = run.predict({"wave": short["wave"][1:2], "words": short["words"][1:2]})
    assert torch.allclose(alone, wanted[1:2], atol=1e-6)
    mask = {"words": torch.arange(7) != 3}
    gone = [None if row == 3 else cell for row, cell in enumerate(short["words"])]
    expected = run.predict({"wave": wave[rows], "words": words[rows]}, present=mask)
    assert torch.equal(run.predict({"wave": wave[rows], "words": gone}), expected)
    outside = [cell if row != 3 else cell * 0 - 7 for row, cell in enumerate(short["words"])]
    assert torch.equal(run.predict({"wave": wave[rows], "words": outside}, present=mask), expected)


def test_no_samples_give_no_predictions(sequences):
    run, wave, words = sequences
    assert run.predict({"wave": wave[:0], "words": words[:0]}).shape == (0, 3)


def test_the_columns_of_a_data_frame_are_samples():
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(ROWS, 3)), columns=["audio_0", "audio_1", "audio_2"])
    run = polyfed.run(data=frame.assign(label=np.arange(ROWS) % 3), clients=4, rounds=1)
    wanted = run.predict({"audio": frame.to_numpy()})
    assert torch.equal(run.predict({"audio": frame}), wanted)
    assert torch.equal(run.predict(frame), wanted)
    with refuses(DataError, "lacks 1"):
        run.predict({"audio": frame[["audio_0", "audio_1"]]})


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, row):
        return {"wave": torch.zeros(3, 2)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda wave, words: {"words": words + 100}, "holds ids"),
        (lambda wave, words: {"words": -words}, "holds ids"),
        (
            lambda wave, words: {"wave": [np.ones((12, 2)), np.ones((3, 2))]},
            "be (n, 9,",
        ),
        (lambda wave, words: {"wave": [np.ones((4, 2)), np.ones((3, 1))]}, "differ in shape"),
        (lambda wave, words: {"wave": ["a", "b"]}, "holds values"),
        (lambda wave, words: {"wave": torch.as_tensor(wave).to_sparse()}, "sparse tensor"),
        (lambda wave, words: Samples(), "Samples"),
        (lambda wave, words: wave, "dictionary of samples"),
    ],
)
def test_other_samples_are_refused_in_our_words(sequences, change, words):
    run, wave, tokens = sequences
    with refuses(RecipeError, words):
        run.predict(change(wave, tokens))
