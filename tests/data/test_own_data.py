"""What a new user's own data may hide: copies of the labels, words among numbers, ids, names. None passes silently."""

import numpy as np
import pytest
from pairs import AUDIO, LABEL, ROWS, TEXT, frame

import polyfed
from polyfed.core.errors import DataError, PolyfedError, PolyfedWarning
from polyfed.data.objects import Given, table_of


def saved(folder, **arrays):
    path = folder / "mine.npz"
    np.savez(path, audio=AUDIO, text=TEXT, **arrays)
    return str(path)


def test_the_mask_of_known_labels_is_never_a_modality(tmp_path):
    label = np.stack([LABEL == 0, LABEL == 1, LABEL == 2], 1).astype(np.int64)
    known = np.arange(ROWS * 3).reshape(ROWS, 3) % 4 > 0
    path = saved(tmp_path, label=label, label_known=known)
    recipe = polyfed.make_recipe(path)
    assert recipe.data.modalities == ("audio", "text")
    assert np.isnan(recipe.data.load().label.numpy()).sum() == (~known).sum()
    with pytest.raises(PolyfedError, match="'label_known' says which labels are known"):
        polyfed.make_recipe(path, modalities=["audio", "label_known"])


@pytest.mark.parametrize("copy", [LABEL, LABEL[:, None], LABEL[:, None].astype(np.float32)])
def test_a_modality_that_is_a_copy_of_the_labels_is_refused(tmp_path, copy):
    words = "modality 'lab' is equal to the labels in every row"
    with pytest.raises(DataError, match=words):
        table_of({"audio": AUDIO, "lab": copy}, Given(labels=LABEL))
    with pytest.raises(DataError, match=words):
        polyfed.make_recipe(saved(tmp_path, lab=copy[:, None] if copy.ndim == 1 else copy, label=LABEL))


def test_a_feature_that_is_a_copy_of_the_labels_is_warned_about(tmp_path):
    with pytest.warns(PolyfedWarning, match=r"modality 'features': feature 1 .counted from 0. is equal to the label"):
        table_of(frame().assign(age=np.arange(ROWS), again=LABEL), Given())
    there = np.arange(ROWS) % 5 != 0  # a row without the modality, or with an unknown label, tells nothing
    lab = np.where(there, LABEL, np.nan)[:, None]
    with pytest.raises(DataError, match="modality 'lab' is equal to the labels"):
        table_of({"audio": AUDIO, "lab": lab}, Given(labels=LABEL))
    constant = table_of({"audio": AUDIO, "flat": np.zeros(ROWS)}, Given(labels=np.zeros(ROWS, np.int64)))
    assert list(constant.modalities) == ["audio", "flat"]
