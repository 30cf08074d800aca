"""Data in memory and in files follow the same rules: facts of a row, index columns, labels, and missing rows."""

import numpy as np
import pandas as pd
import pytest
import torch
from pairs import AUDIO, HAS_TEXT, LABEL, ROWS, TEXT, WHO, WORDS, frame
from torch.utils.data import Dataset

import polyfed
from polyfed.cli import main
from polyfed.core.errors import DataError, PolyfedError
from polyfed.data.reading.objects import Given, table_of
from refusals import refuses, warned


class Samples(Dataset):
    """A dataset whose samples a function makes from their row."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        if row >= ROWS:
            raise IndexError
        return self.make(row)


def usual(row):
    held = {"audio": AUDIO[row], "text": TEXT[row], "label": int(LABEL[row]), "client": row % 4}
    return held | {"split": "test" if row % 4 == 0 else "train"}


def paired(row):
    held = usual(row)
    return held, held.pop("label")


def saved(folder, **arrays):
    path = folder / "mine.npz"
    np.savez(path, **({"audio": AUDIO, "text": TEXT, "label": LABEL} | arrays))
    return path


def told(*words):
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return caught.value.code


@pytest.mark.parametrize("make", [usual, paired])
def test_the_keys_client_and_split_of_samples_are_facts_of_the_row(make):
    with warned("samples") as caught:
        found = table_of(Samples(make), Given())
    assert sum("To confirm this, write clients='client'. If 'client'" in str(w.message) for w in caught) == 1
    assert list(found.modalities) == ["audio", "text"]
    assert found.client.tolist() == [row % 4 for row in range(ROWS)]
    assert found.split.tolist() == [int(row % 4 == 0) for row in range(ROWS)]
    assert any("'client' of the samples is the natural client of each row" in note for note in found.notes)
    confirmed = table_of(Samples(make), Given(clients="client", split="split"))  # warns of nothing
    assert torch.equal(confirmed.client, found.client)
    given = table_of(Samples(make), Given(clients=WHO, split=["train"] * ROWS))
    assert list(given.modalities) == ["audio", "text"]
    named = table_of(
        Samples(lambda row: usual(row) | {"client": AUDIO[row]}), Given(modalities=["text", "client"], split="split")
    )
    assert list(named.modalities) == ["text", "client"]


def test_a_sample_without_the_usual_key_of_the_others_is_named():
    def some(row):
        return {name: cell for name, cell in usual(row).items() if name != "client" or row != 7}

    with refuses(DataError, "sample 7"):
        table_of(Samples(some), Given(split="split"))


@pytest.mark.parametrize("name", ["Unnamed: 0", "Unnamed: 0.1", ""])
def test_a_column_without_a_name_is_no_feature(tmp_path, name):
    held = frame()
    held.insert(0, name, np.arange(ROWS))
    with warned(f"column '{name}'"):
        assert list(table_of(held, Given()).modalities) == ["audio", "text"]
    with warned("no name of"):
        table_of({"train": held, "test": frame()}, Given())
    kept = table_of(held.rename(columns={name: "Unnamed: 0"}), Given(modalities={"number": "Unnamed: 0"}))
    assert list(kept.modalities) == ["number"]
    empty = frame().assign(**{name: np.nan})
    assert list(table_of(empty, Given()).modalities) == ["audio", "text"]
    path = tmp_path / "mine.csv"
    held.to_csv(path, index=False)
    with warned("no name"):
        assert set(polyfed.make_recipe(path).data.modalities) == {"audio", "text"}


def test_ordered_levels_given_as_labels_keep_their_order():
    levels = ["owl", "cat", "dog"]
    ordered = pd.Categorical(WORDS, categories=levels, ordered=True)
    for labels in (ordered, pd.Series(ordered), pd.CategoricalIndex(ordered)):
        for data in ({"audio": AUDIO}, frame(), Samples(lambda row: {"audio": AUDIO[row]})):
            found = table_of(data, Given(labels=labels))
            assert found.class_names == tuple(levels)
            assert found.label.tolist() == [levels.index(word) for word in WORDS]
            assert not found.words_sorted
    turned = table_of({"audio": AUDIO}, Given(labels=ordered, class_names=["dog", "cat", "owl"]))
    assert turned.class_names == ("dog", "cat", "owl")
    with refuses(DataError, "40 rows"):
        table_of({"audio": AUDIO}, Given(labels=pd.Categorical([*WORDS[:3], None, *WORDS[4:]], levels, ordered=True)))
    unordered = table_of({"audio": AUDIO}, Given(labels=pd.Categorical(WORDS, categories=levels)))
    assert unordered.class_names == ("cat", "dog", "owl")


def test_class_numbers_in_one_column_are_classes(tmp_path):
    for labels in (LABEL[:, None], torch.from_numpy(LABEL)[:, None], [[int(number)] for number in LABEL]):
        found = table_of({"audio": AUDIO}, Given(labels=labels))
        assert found.label.dtype == torch.int64
        assert found.label.tolist() == LABEL.tolist()
    path = saved(tmp_path, label=LABEL[:, None])
    assert polyfed.make_recipe(path).data.load().num_classes == 3
    known = np.arange(ROWS)[:, None] % 4 > 0
    path = saved(tmp_path, label=LABEL[:, None], label_known=known)
    assert polyfed.make_recipe(path).data.load().label.isnan().tolist() == (~known[:, 0]).tolist()
    floats = table_of({"audio": AUDIO}, Given(labels=TEXT[:, :1]))
    assert floats.label.shape == (ROWS, 1)


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_one_hot_labels_are_remarked_on(kind):
    one_hot = np.eye(3, dtype=kind)[LABEL]
    with warned("one-hot labels"):
        polyfed.make_recipe({"audio": AUDIO}, labels=one_hot)
    polyfed.make_recipe({"audio": AUDIO}, labels=one_hot, task={"name": "multi-label"})
    one_hot[0] = 1
    polyfed.make_recipe({"audio": AUDIO}, labels=one_hot)


def test_init_and_check_remark_on_doubtful_labels_like_python(tmp_path, capsys):
    recipe = str(tmp_path / "recipe.toml")
    path = saved(tmp_path, label=LABEL.astype(np.float32))
    with warned("stored as floats"):
        assert told("init", str(path), "--out", recipe) == 0
    with warned("stored as floats"):
        assert told("check", recipe) == 0
    with warned("stored as floats") as caught:
        polyfed.check(polyfed.make_recipe(path))
    assert len(caught) == 1
    assert told("init", str(path), "--out", str(tmp_path / "named.toml"), "--task", "regression") == 0


def test_a_list_of_labels_that_mixes_words_and_numbers_is_refused():
    with refuses(DataError, "mixes words"):
        table_of({"audio": AUDIO}, Given(labels=[1, "a"] * (ROWS // 2)))
    with refuses(DataError, "mixes words"):
        table_of({"audio": AUDIO}, Given(labels=LABEL, clients=[1, "a"] * (ROWS // 2)))
    with refuses(DataError, "40 rows"):
        table_of({"audio": AUDIO}, Given(labels=[float("nan"), *WORDS.tolist()[1:]]))
    assert table_of({"audio": AUDIO}, Given(labels=WORDS.tolist())).class_names == ("cat", "dog", "owl")


def test_rows_that_have_some_cells_are_not_told_to_be_left_out():
    held = frame()
    held.loc[0, "audio_0"] = np.nan  # row 0 has no text
    with pytest.raises(DataError) as caught:
        table_of(held, Given())
    assert "audio': 1 row has only some of its cells, first row 0" in str(caught.value)
    assert "every modality" not in str(caught.value)
    for data in (held, {"train": held, "test": held[1:]}):
        with refuses(DataError, "cells of 'audio'"):
            table_of(data, Given(partial="absent"))
    held.loc[0, ["audio_1", "audio_2"]] = np.nan
    with refuses(DataError, "Leave these"):
        table_of(held, Given(partial="absent"))


@pytest.mark.parametrize("folder", [False, True])
def test_rows_of_nan_in_a_file_of_arrays_lack_the_modality(tmp_path, folder):
    text = np.where(HAS_TEXT[:, None], TEXT, np.nan).astype(np.float32)
    path = saved(tmp_path, text=text)
    if folder:
        path = tmp_path / "arrays"
        path.mkdir()
        for name, array in (("audio", AUDIO), ("text", text), ("label", LABEL)):
            np.save(path / f"{name}.npy", array)
    recipe = polyfed.make_recipe(path, rounds=1)
    found = recipe.data.load()
    assert torch.equal(found.present["text"], torch.from_numpy(HAS_TEXT))
    assert found.column("text").take(torch.arange(ROWS)).isfinite().all()
    assert np.isnan(np.load(path / "text.npy") if folder else np.load(path)["text"]).any()  # the file is unchanged
    same = table_of({"audio": AUDIO, "text": text}, Given(labels=LABEL))
    assert torch.equal(found.column("text").values, same.column("text").values)
    polyfed.check(recipe)


def test_marks_and_rows_of_nan_in_a_file_of_arrays_add_up(tmp_path):
    text = np.where(HAS_TEXT[:, None], TEXT, np.nan)
    marked = np.arange(ROWS) % 7 > 0
    found = polyfed.make_recipe(saved(tmp_path, text=text, text_present=marked)).data.load()
    assert found.present["text"].tolist() == (HAS_TEXT & marked).tolist()
    with refuses(PolyfedError, "values are NaN"):
        polyfed.make_recipe(saved(tmp_path, text=TEXT * np.nan))
    audio = np.where(np.arange(ROWS)[:, None] == 5, np.nan, AUDIO)
    with refuses(PolyfedError, "1 row lacks"):
        polyfed.make_recipe(saved(tmp_path, audio=audio, text=text))
    partly = np.where((np.arange(ROWS)[:, None] == 5) & (np.arange(2) == 0), np.nan, TEXT)
    with refuses(PolyfedError, "infinite values"):
        polyfed.check(polyfed.make_recipe(saved(tmp_path, text=partly), standardise=False))


def test_clients_of_a_float_type_are_told_how_to_be_converted():
    numbers = (np.arange(ROWS) % 4).astype(float)
    with refuses(DataError, "hold integers"):
        table_of({"audio": AUDIO}, Given(labels=LABEL, clients=numbers))
    numbers[7] = np.nan
    for given in ({"clients": numbers}, {"split": numbers}, {"ids": numbers}):
        with refuses(DataError, "40 rows"):
            table_of({"audio": AUDIO}, Given(labels=LABEL, **given))


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        (
            lambda row: {"audio": AUDIO[row], "label": 0, "speaker": WHO[row]},
            {},
            "0 holds",
        ),
        (
            lambda row: {"inputs": {"audio": AUDIO[row]}, "label": 0},
            {},
            "keys audio",
        ),
        (
            lambda row: {"inputs": {"audio": AUDIO[row]}, "label": 0},
            {"modalities": ["audio"]},
            "keys audio",
        ),
    ],
)  # fmt: skip
def test_words_and_dictionaries_in_samples_are_told_with_their_cure(make, given, words):
    with refuses(PolyfedError, words):
        table_of(Samples(make), Given(**given))
