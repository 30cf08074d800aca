"""What a new user's own data may hide: copies of the labels, words among numbers, ids, names. None passes silently."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from pairs import AUDIO, LABEL, ROWS, TEXT, WORDS, frame

import polyfed
from polyfed.cli import main
from polyfed.core.errors import DataError, PolyfedError, PolyfedWarning
from polyfed.data.reading.objects import Given, table_of
from polyfed.experiment.running.assembly import population_of
from refusals import refuses, warned


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
    with refuses(PolyfedError, "data.modalities: 'label_known'"):
        polyfed.make_recipe(path, modalities=["audio", "label_known"])


@pytest.mark.parametrize("copy", [LABEL, LABEL[:, None], LABEL[:, None].astype(np.float32)])
def test_a_modality_that_is_a_copy_of_the_labels_is_refused(tmp_path, copy):
    with refuses(DataError, "to the labels"):
        table_of({"audio": AUDIO, "lab": copy}, Given(labels=LABEL))
    with refuses(DataError, "to the labels"):
        polyfed.make_recipe(saved(tmp_path, lab=copy[:, None] if copy.ndim == 1 else copy, label=LABEL))


def test_a_feature_that_is_a_copy_of_the_labels_is_warned_about(tmp_path):
    with (
        warned("'age', 'again'"),
        warned("feature 1"),
    ):
        table_of(frame().assign(age=np.arange(ROWS) // 2, again=LABEL), Given())
    there = np.arange(ROWS) % 5 != 0  # a row without the modality, or with an unknown label, tells nothing
    lab = np.where(there, LABEL, np.nan)[:, None]
    with refuses(DataError, "to the labels"):
        table_of({"audio": AUDIO, "lab": lab}, Given(labels=LABEL))
    constant = table_of({"audio": AUDIO, "flat": np.zeros(ROWS)}, Given(labels=np.zeros(ROWS, np.int64)))
    assert list(constant.modalities) == ["audio", "flat"]


ONE_WORD = frame().assign(audio_1=["1"] * 39 + ["x"])
ONE_LATE_WORD = frame().assign(audio_1=[1.5] * 39 + ["x"])
COMMAS = frame().assign(audio_1=["1,5"] * ROWS)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (ONE_WORD, "holds 'x'"),
        (ONE_LATE_WORD, "holds 'x'"),
        (COMMAS, "holds '1,5'"),
    ],
)
def test_a_word_among_numbers_is_refused_without_named_modalities_too(tmp_path, held, words):
    with refuses(DataError, words):
        table_of(held, Given())
    held.to_csv(tmp_path / "mine.csv", index=False)
    with refuses(DataError, words):
        polyfed.make_recipe(tmp_path / "mine.csv")


def test_columns_of_texts_are_left_out_with_a_warning(tmp_path):
    held = frame().assign(note="a text", code=[f"{row}A" for row in range(ROWS)])
    with warned("hold texts"):
        assert list(table_of(held, Given()).modalities) == ["audio", "text"]
    held.to_csv(tmp_path / "mine.csv", index=False)
    with warned("hold texts"):
        polyfed.make_recipe(tmp_path / "mine.csv")
    with warned("two axes"):
        polyfed.make_recipe(saved(tmp_path, label=LABEL, age=np.arange(ROWS)))


def test_python_reads_a_file_as_init_does(tmp_path):
    held = frame().assign(age=np.arange(ROWS) // 2, label=WORDS)
    held.loc[3, "text.a"] = np.nan
    path = tmp_path / "mine.csv"
    held.to_csv(path, index=False)
    assert main_code("init", str(path), "--out", str(tmp_path / "recipe.toml")) == 0
    with pytest.warns(PolyfedWarning) as caught:
        made = polyfed.make_recipe(path)
    told = [str(warning.message) for warning in caught]
    assert any("1 sample has only some of the cells" in text for text in told)
    wanted = polyfed.load_recipe(tmp_path / "recipe.toml").data
    assert made.data == replace(wanted, standardise="uneven")
    assert wanted.standardise == ("features",)
    assert made.data.load().fingerprint() == wanted.load().fingerprint()
    with warned("features differ"):
        assert population_of(made).columns.standardise == ("features",)
    assert made.data.partial == "absent"
    with warned("of the cells"):
        assert not polyfed.make_recipe(path, standardise=False).data.standardise


def main_code(*words):
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return caught.value.code


LEVELS = ["low", "mid", "high"]


def test_the_order_of_levels_is_kept_or_asked_for(tmp_path):
    words = [LEVELS[number] for number in LABEL]
    ordered = frame().assign(label=pd.Categorical(words, categories=LEVELS, ordered=True))
    found = table_of(ordered, Given())
    assert found.class_names == ("low", "mid", "high")
    assert found.label.tolist() == LABEL.tolist()
    task = {"name": "ordinal"}
    assert polyfed.check(polyfed.make_recipe(ordered, task=task)).recipe.task.NAME == "ordinal"
    plain = frame().assign(label=words)
    with refuses(DataError, "needs the order"):
        polyfed.check(polyfed.make_recipe(plain, task=task))
    named = polyfed.make_recipe(plain, task=task, class_names=LEVELS)
    assert named.data.load().label.tolist() == LABEL.tolist()
    assert polyfed.check(named)
    plain.to_csv(tmp_path / "mine.csv", index=False)
    with refuses(DataError, "needs the order"):
        polyfed.check(polyfed.make_recipe(tmp_path / "mine.csv", task=task))
    assert polyfed.make_recipe(tmp_path / "mine.csv", class_names=LEVELS).data.load().label.tolist() == LABEL.tolist()


def test_words_are_no_numbers_for_regression():
    with refuses(DataError, "labels are classes"):
        polyfed.check(polyfed.make_recipe(frame(), task={"name": "regression"}))


@pytest.mark.parametrize("name", ["id", "ids", "row_id"])
def test_a_column_of_ids_is_no_feature(tmp_path, name):
    ids = 1000 + 7 * np.arange(ROWS)
    held = frame().assign(**{name: ids})
    found = table_of(held, Given())
    assert found.ids.tolist() == ids.tolist()
    assert list(found.modalities) == ["audio", "text"]
    held.to_csv(tmp_path / "mine.csv", index=False)
    read = polyfed.make_recipe(tmp_path / "mine.csv").data
    assert read.load().ids.tolist() == ids.tolist()
    assert set(read.modalities) == {"audio", "text"}
    again = frame().assign(**{name: np.arange(ROWS) // 2})
    with refuses(DataError, "repeats some ids"):
        table_of(again, Given())
    by_name = table_of(again, Given(modalities={"audio": "audio_*", "other": name}))
    assert list(by_name.modalities) == ["audio", "other"]
    assert table_of(again.drop(columns="client"), Given(clients=name)).client[:4].tolist() == [0, 0, 1, 1]


def test_ids_may_be_words(tmp_path):
    """A word is the same number in every file, and a word that writes a number is that number."""
    words = [str(row) if row < 3 else f"patient {row}" for row in range(ROWS)]
    found = table_of({"audio": AUDIO}, Given(labels=LABEL, ids=words))
    frame().assign(patient=words).to_csv(tmp_path / "mine.csv", index=False)
    table = polyfed.make_recipe(tmp_path / "mine.csv", ids="patient").data
    assert table.load().ids.tolist() == found.ids.tolist()
    assert found.ids[:3].tolist() == [0, 1, 2]
    assert len({*found.ids.tolist()}) == ROWS
    assert not found.numbered
    np.savez(tmp_path / "mine.npz", audio=AUDIO[::-1], label=LABEL, id=np.array([f" {word} " for word in words[::-1]]))
    recipe = polyfed.make_recipe(tmp_path / "mine.npz", modalities=["audio"])
    assert recipe.data.load().ids.tolist() == found.ids.tolist()[::-1]
    with refuses(DataError, "such as P"):
        table_of({"audio": AUDIO}, Given(labels=LABEL, ids=["P", "P ", *words[2:]]))
    with refuses(DataError, "is empty in"):
        table_of({"audio": AUDIO}, Given(labels=LABEL, ids=["", *words[1:]]))


def test_a_class_without_training_rows_is_warned_about():
    label, split = np.where(np.arange(ROWS) < 30, LABEL % 2, 2), np.where(np.arange(ROWS) < 30, "train", "test")
    recipe = polyfed.make_recipe({"audio": AUDIO}, labels=label, split=split, clients=2)
    with warned("1 class"):
        polyfed.check(recipe)


def test_retrieval_needs_no_labels(tmp_path, capsys):
    task = {"name": "retrieval"}
    unlabelled = frame().drop(columns="label")
    made = polyfed.make_recipe({"audio": AUDIO, "text": TEXT}, task=task, clients=2, rounds=1)
    assert "recall1" in polyfed.run(made).result["metrics"]["global"]
    assert polyfed.check(polyfed.make_recipe(unlabelled.dropna(), task=task, clients=2))
    for path in (tmp_path / "mine.csv", tmp_path / "mine.npz"):
        if path.suffix == ".csv":
            unlabelled.dropna().to_csv(path, index=False)
        else:
            saved(tmp_path)
        assert polyfed.check(polyfed.make_recipe(path, task=task, clients=2))
        out = tmp_path / f"{path.suffix[1:]}.toml"
        assert main_code("init", str(path), "--task", "retrieval", "--out", str(out)) == 0
        assert polyfed.check(out).recipe.task.NAME == "retrieval"
    with refuses(PolyfedError, "labels is missing"):
        polyfed.make_recipe({"audio": AUDIO, "text": TEXT})
    recipe = polyfed.load_recipe(out)
    with refuses(DataError, "no labels"):
        polyfed.check(replace(recipe, task=None))
    with refuses(PolyfedError, "clients.partition: by their class"):
        polyfed.check(replace(recipe, clients=replace(recipe.clients, partition="dirichlet", num=2)))


def test_splits_have_the_same_columns_in_any_order():
    held, other = frame()[:30].reset_index(drop=True), frame()[30:].reset_index(drop=True)
    for part in (other, other[other.columns[::-1]]):
        found = table_of({"train": held, "test": part}, Given())
        np.testing.assert_array_equal(found.column("audio").values.numpy(), AUDIO)
    with refuses(DataError, "column 'text.b'"):
        table_of({"train": held, "test": other.drop(columns="text.b")}, Given())
    with refuses(DataError, "no rows"):
        table_of({"train": held, "test": other[:0]}, Given())


def test_names_that_give_no_modality_are_refused():
    held = frame().assign(音_0=1.0, 音_1=2.0, age=AUDIO[:, 0])
    with refuses(DataError, "'音_0'"):
        table_of(held, Given())
    held = frame().assign(**{"a b_0": 1.0, "a b_1": 2.0, "a-b_0": 1.0, "a-b_1": AUDIO[:, 0]})
    with refuses(DataError, "name 'a_b'"):
        table_of(held, Given())


def test_class_numbers_that_are_floats_are_remarked_on():
    with warned("floats"):
        polyfed.make_recipe({"audio": AUDIO}, labels=LABEL.astype(np.float32))
    polyfed.make_recipe({"audio": AUDIO}, labels=LABEL.astype(np.float32), task={"name": "classification"})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"label;x_0;x_1\n0;1;2\n", "one column"),
        ("a.tsv", b"label,x_0,x_1\n0,1,2\n", "separated"),
        ("a.csv", b"x_0,label\n", "no rows"),
        ("a.csv", "größe_0,label\n1,0\n".encode("latin-1"), "encoding utf-8"),
    ],
)
def test_files_in_other_forms_are_told_apart(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with refuses(DataError, words):
        polyfed.make_recipe(tmp_path / name)


def test_nothing_is_no_data():
    with refuses(DataError, "no rows"):
        table_of(frame()[:0], Given())
    with refuses(PolyfedError, "empty dictionary"):
        polyfed.make_recipe({}, labels=LABEL)


def test_predict_asks_for_samples_by_modality():
    run = polyfed.run(data={"audio": AUDIO}, labels=LABEL, clients=2, rounds=1)
    with refuses(PolyfedError, "hold 'audio'"):
        run.predict(frame())


def test_columns_that_fall_into_the_rest_are_named_in_a_warning():
    draw = np.random.default_rng(0)
    y = np.arange(60) % 3
    frame = pd.DataFrame({f"audio_{i}": draw.normal(size=60) for i in range(2)})
    frame = frame.assign(emotion=y, valence=(y - 1) / 0.8 + draw.normal(size=60) / 9, age=draw.normal(size=60))
    with warned("'valence', 'age'") as told:
        polyfed.make_recipe(frame, labels="emotion").data.load()
    assert any("as in modalities={'audio': ['audio_0'], 'features': ['valence']}" in str(w.message) for w in told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        polyfed.make_recipe(frame, labels="emotion", modalities={"audio": "audio_*"}).data.load()


@pytest.mark.parametrize("role", ["labels", "clients", "split"])
def test_a_series_with_another_index_than_the_frame_is_refused(role):
    data = frame().drop(columns="label")
    values = {"labels": LABEL, "clients": np.arange(ROWS) % 4, "split": np.where(np.arange(ROWS) % 4, "train", "test")}
    series = pd.Series(values[role], index=data.index)
    given = {"labels": LABEL} | {role: series}
    table_of(data, Given(**given))
    with refuses(DataError, f"{role}.loc[frame.index]"):
        table_of(data, Given(**given | {role: series.sample(frac=1, random_state=1)}))


def test_a_sparse_tensor_is_refused():
    with refuses(DataError, "sparse tensor"):
        table_of({"audio": torch.as_tensor(AUDIO).to_sparse()}, Given(labels=LABEL))


def test_whole_numbers_of_a_regression_are_quantities():
    steps = np.arange(ROWS) * 1000 - 7  # as classes, these would be refused
    made = polyfed.make_recipe(
        {"audio": AUDIO}, labels=steps, task={"name": "regression", "shift": 20000, "scale": 11000}
    )
    assert made.data.load().label.tolist() == steps.tolist()


def test_raw_takes_a_list_of_row_numbers():
    column = table_of({"audio": AUDIO}, Given(labels=LABEL)).column("audio")
    assert torch.equal(column.raw([0, 2]), column.raw(torch.tensor([0, 2])))
    assert torch.equal(column.raw(np.array([1])), column.raw(torch.tensor([1])))
