"""Data in memory: arrays, tensors, data frames and datasets give the same table, and bad input is told at once."""

from dataclasses import replace

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from pairs import AUDIO, HAS_TEXT, LABEL, ROWS, TEXT, WHO, WORDS, frame
from torch.utils.data import Dataset, IterableDataset

from polyfed.core.errors import DataError, PolyfedError, RecipeError
from polyfed.data import Column, Columns
from polyfed.data.column_scaling import fitted
from polyfed.data.reading.objects import Given, refuse_other_columns, table_of
from refusals import refuses


class Pairs(Dataset):
    """Samples with a text that some lack."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return {"audio": torch.from_numpy(AUDIO[row]), "text": TEXT[row] if HAS_TEXT[row] else None}, WORDS[row]


def by_arrays():
    return table_of({"audio": AUDIO, "text": TEXT}, Given(labels=WORDS, clients=WHO, present={"text": HAS_TEXT}))


def by_tensors():
    text = torch.where(torch.from_numpy(HAS_TEXT)[:, None], torch.from_numpy(TEXT), torch.nan)
    return table_of({"audio": torch.from_numpy(AUDIO), "text": text}, Given(labels=list(WORDS), clients=list(WHO)))


def by_frame():
    return table_of(frame(), Given())


def by_mapping():
    given = Given(labels="label", clients="client", modalities={"audio": "audio_*", "text": ["text.a", "text.b"]})
    return table_of(frame().assign(other="words"), given)


def by_frame_and_arrays():
    return table_of(frame().drop(columns=["label", "client"]), Given(labels=WORDS, clients=WHO))


def by_dataset():
    return table_of(Pairs(), Given(clients=WHO))


def by_hugging_face():
    return table_of(datasets.Dataset.from_pandas(frame()), Given())


@pytest.mark.parametrize(
    "make",
    [by_tensors, by_frame, by_mapping, by_frame_and_arrays, by_dataset, by_hugging_face],
    ids=lambda f: f.__name__,
)
def test_the_same_data_gives_the_same_table_in_every_form(make):
    expected, found = by_arrays(), make()
    assert found.class_names == ("cat", "dog", "owl")
    for name in ("label", "split", "client", "ids"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.present["text"], torch.from_numpy(HAS_TEXT))
    for name, has in (("audio", np.ones(ROWS, bool)), ("text", HAS_TEXT)):
        rows = torch.from_numpy(np.flatnonzero(has))
        assert torch.equal(found.column(name).take(rows), expected.column(name).take(rows))


def test_splits_of_their_own_become_split_codes():
    whole = datasets.DatasetDict(
        train=datasets.Dataset.from_pandas(frame()[:30]), test=datasets.Dataset.from_pandas(frame()[30:])
    )
    for parts in (whole, {"train": frame()[:30].reset_index(drop=True), "test": frame()[30:].reset_index(drop=True)}):
        found = table_of(parts, Given())
        assert found.split.tolist() == [0] * 30 + [1] * 10
        assert torch.equal(found.column("audio").values, torch.from_numpy(AUDIO))


def test_columns_pass_unchanged_and_hold_everything():
    split, ids = torch.zeros(ROWS, dtype=torch.int8), torch.arange(ROWS)
    made = Columns("own", {"a": Column(torch.from_numpy(AUDIO))}, torch.from_numpy(LABEL), 3, split, ids)
    assert table_of(made, Given()) is made
    with refuses(RecipeError, "labels is given"):
        table_of(made, Given(labels=LABEL))


def test_images_of_bytes_become_channels_first_and_lists_of_tokens_are_filled_up():
    pictures = np.random.default_rng(2).integers(0, 256, (ROWS, 4, 5, 3), dtype=np.uint8)
    assert table_of({"image": pictures}, Given(labels=LABEL)).column("image").shape == (3, 4, 5)
    tokens = [list(range(1, 2 + row % 3)) for row in range(ROWS)]
    found = table_of(pd.DataFrame({"words": tokens, "label": LABEL}), Given())
    assert found.column("words").values[:3].tolist() == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    assert any("filled up with zeros to 3" in note for note in found.notes)


def test_class_names_of_a_hugging_face_column_are_kept():
    features = datasets.Features(
        {
            "x": datasets.Sequence(datasets.Value("float32"), length=3),
            "label": datasets.ClassLabel(names=["no", "yes", "?"]),
        }
    )
    data = datasets.Dataset.from_dict({"x": AUDIO.tolist(), "label": LABEL.tolist()}, features=features)
    assert table_of(data, Given()).class_names == ("no", "yes", "?")


def test_the_parts_of_a_sample_are_named():
    class Plain(Dataset):
        def __len__(self):
            return ROWS

        def __getitem__(self, row):
            return AUDIO[row], TEXT[row], int(LABEL[row])

    with refuses(RecipeError, "2 parts"):
        table_of(Plain(), Given())
    assert list(table_of(Plain(), Given(modalities=("audio", "text"))).modalities) == ["audio", "text"]


class Endless(IterableDataset):
    """A data set without a length."""

    def __iter__(self):
        yield AUDIO[0], 0


MIXED = np.array([*WORDS[:-1], 3], dtype=object)
HOLES = np.where((np.arange(ROWS) == 7)[:, None] & (np.arange(3) == 1), np.nan, AUDIO)
ONE_WORD = frame().assign(audio_1=["1"] * 39 + ["x"])
OTHER = frame().assign(label=LABEL)
TWICE = frame().assign(again=0.0).rename(columns={"again": "audio_1"})


@pytest.mark.parametrize(
    ("data", "given", "words"),
    [
        ({"audio": AUDIO}, {"labels": MIXED}, "mixes words"),
        ({"audio": AUDIO}, {"labels": [None, *WORDS[1:]]}, "label column"),
        ({"audio": AUDIO}, {}, "labels is missing"),
        ({"audio": AUDIO[:-1]}, {"labels": LABEL}, "39 rows"),
        ({"audio": HOLES}, {"labels": LABEL}, "some values"),
        ({"audio": AUDIO * np.nan}, {"labels": LABEL}, "missing in every"),
        ({"audio": AUDIO.astype(str)}, {"labels": LABEL}, "modality needs numbers"),
        ({"audio": [[1.0], [2.0, 3.0]] * 20}, {"labels": LABEL}, "differ in shapes"),
        ({"audio": AUDIO}, {"labels": LABEL, "clients": WHO[:9]}, "9 rows"),
        ({"audio": AUDIO}, {"labels": LABEL, "clients": AUDIO[:, 0]}, "integers or strings"),
        ({"audio": AUDIO}, {"labels": LABEL, "split": ["trian"] * ROWS}, "holds 'trian'"),
        ({"audio": AUDIO}, {"labels": LABEL, "present": {"audoi": HAS_TEXT}}, "'audoi'"),
        ({"audio": AUDIO}, {"labels": WHO, "class_names": ["s0", "s1", "s2"]}, "holds 's3'"),
        ({"audio": AUDIO, "text": None}, {"labels": LABEL}, "data['text']"),
        ({"audio": {"x": AUDIO}}, {"labels": LABEL}, "data['audio']"),
        ({"audio": AUDIO}, {"labels": [[0, 1], [2]] * 20}, "label column"),
        (frame(), {"labels": [[0, 1], [2]] * 20}, "differ in length"),
        (frame(), {"labels": LABEL[1:]}, "labels has 39"),
        (frame(), {"clients": np.int64(5)}, "clients is"),
        (frame(), {"clients": AUDIO}, "hold integers"),
        (frame(), {"layout": {"audio": "XYZ"}}, "layout: 'HWC'"),
        (frame(), {"layout": "F"}, "layout is of"),
        (frame(), {"present": HAS_TEXT}, "present is of"),
        (frame(), {"present": {"text": WHO}}, "holds other values"),
        (frame(), {"present": {"text": HAS_TEXT[1:]}}, "needs one entry"),
        (frame(), {"class_names": "cat"}, "class_names: a list"),
        (frame(), {"partial": "drop"}, "partial: 'refuse' or 'absent'"),
        ({"train": frame(), "test": frame()}, {"labels": LABEL}, "columns or keys"),
        ({"train": frame(), "test": frame()}, {"clients": 3}, "columns or keys"),
        (AUDIO, {"labels": LABEL}, "name its modality"),
        (3, {}, "a int"),
        (Endless(), {}, "without a length"),
        (frame(), {"labels": "lable"}, "column 'lable'"),
        (frame(), {"clients": "speaker"}, "column 'speaker'"),
        (frame(), {"modalities": {"audio": "audoi_*"}}, "column 'audoi_*'"),
        (frame(), {"modalities": {"a": "audio_*", "b": "audio_0"}}, "'a' and 'b'"),
        (ONE_WORD, {"modalities": {"audio": "audio_*"}}, "'audio_1' holds"),
        (TWICE, {}, "columns named 'audio_1'"),
        (frame().assign(label=[0.0] * 39 + [np.nan]), {}, "column 'label'"),
        ({"train": frame(), "test": OTHER}, {}, "numbers in split"),
        ({"train": frame(), "tset": frame()}, {}, "part 'tset'"),
    ],
)  # fmt: skip
def test_bad_input_is_told_with_its_cure(data, given, words):
    with refuses(PolyfedError, words):
        table_of(data, Given(**given))


def test_all_faults_are_told_at_once():
    with pytest.raises(DataError) as caught:
        table_of({"audio": HOLES, "text": AUDIO * np.nan}, Given(labels=MIXED, clients=AUDIO[:, 0], split=["x"] * ROWS))
    lines = str(caught.value).splitlines()
    assert lines[0] == "5 problems:"
    for word, line in zip(("label", "audio", "text", "client", "split"), lines[1:], strict=True):
        assert word in line


def test_rows_that_lack_some_cells_can_count_as_absent():
    held = frame()
    held.loc[3, "text.a"] = np.nan
    with refuses(DataError, "of its cells"):
        table_of(held, Given())
    assert not table_of(held, Given(partial="absent")).present["text"][3]


def test_standardising_can_be_for_some_modalities():
    made = table_of({"audio": 100 * AUDIO + 5, "text": TEXT}, Given(labels=LABEL, standardise=["audio"]))
    rows = made.rows(0)
    made = fitted(made, rows)
    assert made.column("audio").take(rows).mean(0).abs().max() < 1e-5
    assert torch.equal(made.column("text").take(rows), torch.from_numpy(TEXT)[rows])
    with refuses(DataError, "mean 'audio'"):
        table_of({"audio": AUDIO}, Given(labels=LABEL, standardise=["audoi"]))
    assert replace(made).notes


def test_labels_of_several_targets_beside_a_data_frame_are_targets():
    targets = np.where(np.arange(2 * ROWS).reshape(ROWS, 2) % 7 == 0, np.nan, 2 * AUDIO[:, 1:])
    for given in (targets, torch.from_numpy(targets).requires_grad_(), pd.DataFrame(targets)):
        found = table_of(frame(), Given(labels=given))
        np.testing.assert_array_equal(found.label.numpy(), targets.astype(np.float32))
        assert list(found.modalities) == ["audio", "text"]
    lists = table_of(frame().assign(label=[[row % 2, row % 3] for row in range(ROWS)]), Given())
    assert lists.label[:3].tolist() == [[0, 0], [1, 1], [0, 2]]


def test_the_columns_of_each_split_are_read_once(monkeypatch):
    calls = []
    rename = pd.DataFrame.rename
    monkeypatch.setattr(pd.DataFrame, "rename", lambda self, *a, **k: calls.append(1) or rename(self, *a, **k))
    wide = pd.DataFrame(np.random.default_rng(0).normal(size=(3, 50)))
    refuse_other_columns({"train": wide, "test": wide}, None, ())
    assert len(calls) == 2


@pytest.mark.parametrize("make", ["data frame", "dataset", "arrays"])
def test_a_mask_of_one_modality_keeps_the_rows_that_the_data_lacks(make):
    audio = np.arange(ROWS) % 3 > 0
    rows = np.flatnonzero(audio | HAS_TEXT)
    data = {
        "data frame": frame().iloc[rows],
        "dataset": torch.utils.data.Subset(Pairs(), rows.tolist()),
        "arrays": {"audio": AUDIO[rows], "text": np.where(HAS_TEXT[:, None], TEXT, np.nan)[rows]},
    }[make]
    given = Given(labels=WORDS[rows] if make == "arrays" else None, present={"audio": audio[rows]})
    found = table_of(data, given)
    assert torch.equal(found.present["audio"], torch.from_numpy(audio[rows]))
    assert torch.equal(found.present["text"], torch.from_numpy(HAS_TEXT[rows]))
    both = table_of(data, replace(given, present={"text": [1] * len(rows)}))
    assert torch.equal(both.present["text"], torch.from_numpy(HAS_TEXT[rows]))


def test_options_of_numpy_and_pandas_are_read():
    levels = table_of(
        {"audio": AUDIO}, Given(labels=LABEL, class_names=np.array(["a", "b", "c"]), test_share=np.float32(0.5))
    )
    assert levels.class_names == ("a", "b", "c")
    assert int((levels.split == 1).sum()) == sum(round(0.5 * count) for count in np.bincount(LABEL).tolist())
    numbers = table_of({"audio": AUDIO}, Given(labels=LABEL, class_names=pd.Index([3, 4, 5])))
    assert numbers.class_names == ("3", "4", "5")
    for wrong in ({"standardise": None}, {"standardise": [1]}, {"test_share": 2.0}, {"test_share": "x"}):
        with refuses(RecipeError, f"{next(iter(wrong))}: must be"):
            table_of({"audio": AUDIO}, Given(**({"labels": LABEL} | wrong)))


def test_several_columns_of_labels_can_be_named_for_splits():
    held = frame().drop(columns="label").assign(fever=2 * AUDIO[:, 0], cough=3 * AUDIO[:, 1])
    found = table_of({"train": held, "test": held[:8]}, Given(labels=["fever", "cough"]))
    assert found.class_names == ("fever", "cough")
    assert found.label.shape == (ROWS + 8, 2)
    assert list(found.modalities) == ["audio", "text"]


def test_sequences_of_splits_are_padded_to_the_longest_of_all_splits():
    draw = np.random.default_rng(0)

    def part(rows, steps):
        series = [draw.normal(size=(steps - row % 2, 2)).tolist() for row in range(rows)]
        words = [draw.integers(1, 9, steps + row % 3).tolist() for row in range(rows)]
        return pd.DataFrame({"wave": series, "words": words, "label": np.arange(rows) % 3})

    train, test = part(12, 5), part(6, 7)
    columns = table_of({"train": train, "test": test}, Given())
    assert columns.modalities["wave"].shape == (7, 2)
    assert columns.modalities["words"].shape == (9,)
    whole = table_of(pd.concat([train.assign(split="train"), test.assign(split="test")], ignore_index=True), Given())
    for name, column in whole.modalities.items():
        assert torch.equal(columns.modalities[name].values, column.values)
    narrow = test.assign(wave=[[[1.0]]] * 6)
    with refuses(DataError, "different splits"):
        table_of({"train": train, "test": narrow}, Given())
