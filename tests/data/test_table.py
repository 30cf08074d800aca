"""CSV, parquet and JSON-lines files: the same table from each, and every fault of a file told with its cure."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from pairs import AUDIO, HAS_TEXT, LABEL, ROWS, TEXT, frame

from polyfed.core.errors import DataError, PolyfedError, RecipeError
from polyfed.core.problems import Problems
from polyfed.data import SOURCES
from polyfed.data.features import listing
from polyfed.data.sources.own.table_files import read
from refusals import refuses, warned

NUMBERS = ["audio_0", "audio_1", "audio_2", "text.a", "text.b"]
MODALITIES = {"audio": "audio_*", "text": ["text.a", "text.b"]}


def written(held, folder, suffix):
    path = folder / f"mine{suffix}"
    if suffix == ".parquet":
        held.to_parquet(path)
    elif suffix == ".jsonl":
        held.to_json(path, orient="records", lines=True, double_precision=15)
    else:
        held.to_csv(path, index=False, sep="\t" if suffix == ".tsv" else ",")
    return str(path)


def load(path, **options):
    return SOURCES["table"](path=path, **({"modalities": MODALITIES} | options)).load()


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".jsonl"])
def test_every_kind_of_file_gives_the_same_table(tmp_path, suffix):
    found = load(written(frame(), tmp_path, suffix))
    assert found.name == "mine"
    assert found.class_names == ("cat", "dog", "owl")
    assert found.label.tolist() == LABEL.tolist()
    assert found.client.tolist() == [row % 4 for row in range(ROWS)]
    assert torch.equal(found.present["text"], torch.from_numpy(HAS_TEXT))
    np.testing.assert_allclose(found.column("audio").values.numpy(), AUDIO, rtol=1e-6)
    np.testing.assert_allclose(found.column("text").values.numpy()[HAS_TEXT], TEXT[HAS_TEXT], rtol=1e-6)
    assert (found.split[found.label == 0] == 1).sum() == round(0.2 * int((LABEL == 0).sum()))


def test_words_codes_and_shares_make_the_test_set(tmp_path):
    split = np.where(np.arange(ROWS) % 4 == 0, "test", "train")
    assert (
        load(written(frame().assign(split=split), tmp_path, ".csv")).split.tolist()
        == (split == "test").astype(int).tolist()
    )
    codes = (split == "test").astype(int)
    assert load(written(frame().assign(part=codes), tmp_path, ".csv"), split="part").split.tolist() == codes.tolist()
    assert load(written(frame(), tmp_path, ".csv"), test_share=0.0).split.sum() == 0


def test_columns_become_images_and_lists_become_series_and_tokens(tmp_path):
    pixels = pd.DataFrame(np.arange(ROWS * 12).reshape(ROWS, 12) % 255, columns=[f"px{n}" for n in range(12)])
    path = written(pixels.assign(label=LABEL), tmp_path, ".csv")
    assert load(path, modalities={"image": "px*"}, shapes={"image": (1, 3, 4)}).column("image").shape == (1, 3, 4)
    with refuses(RecipeError, "data.shapes.image: shapes.image"):
        load(path, modalities={"image": "px*"}, shapes={"image": (5,)})
    lines = [
        {"acc": [[1.0, 2.0]] * (2 + row % 2), "words": [3] * (1 + row % 2), "label": row % 3} for row in range(ROWS)
    ]
    lines[4]["acc"] = None
    (tmp_path / "lists.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = load(str(tmp_path / "lists.jsonl"), modalities={"acc": "acc", "words": "words"})
    assert found.column("acc").shape == (3, 2)
    assert found.column("words").values[:2].tolist() == [[3, 0], [3, 3]]
    assert found.column("words").values.dtype == torch.int64
    assert (~found.present["acc"]).nonzero().tolist() == [[4]]


def test_several_columns_of_targets_are_passed_on(tmp_path):
    path = written(frame().assign(valence=0.5, arousal=-1.5), tmp_path, ".csv")
    found = load(path, label=["valence", "arousal"])
    assert found.label.dtype == torch.float32
    assert found.label[:2].tolist() == [[0.5, -1.5]] * 2
    assert found.class_names == ("valence", "arousal")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label": "audio_0"}, "part of modality"),
        ({"label": ["text.a", "text.b"]}, "part of modality"),
        ({"client": "audio_1"}, "part of modality"),
        ({"split": "audio_2"}, "part of modality"),
    ],
)
def test_a_modality_that_holds_the_labels_is_refused(tmp_path, options, words):
    held = frame().assign(audio_0=LABEL, audio_1=LABEL, audio_2=np.arange(ROWS) % 2)
    with refuses(DataError, words):
        load(written(held, tmp_path, ".csv"), **options)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"modalities": {}}, "data.modalities: could be"),
        ({}, {"label": "lable"}, "name the right"),
        ({}, {"client": "speaker"}, "column 'speaker'"),
        ({}, {"modalities": {"video": "video_*"}}, "column 'video_*'"),
        ({"label": ["cat"] * 39 + [None]}, {}, "label column"),
        ({"label": [f"a long text {row}" for row in range(ROWS)]}, {}, "different words"),
        ({"audio_1": [1.0] * 39 + ["?"]}, {}, "'audio_1' holds"),
        ({"audio_1": np.where(np.arange(ROWS) == 2, np.nan, 1.0)}, {}, "treat"),
        ({"text.a": np.nan, "text.b": np.nan}, {}, "missing in every"),
        ({"client": [None] * 39 + ["a"]}, {}, "client column"),
        ({"split": "trian"}, {}, "holds 'trian'"),
        (dict.fromkeys(NUMBERS, [np.nan] + [1.0] * 39), {}, "1 row lacks"),
    ],
)  # fmt: skip
def test_bad_tables_are_told_with_their_cure(tmp_path, change, options, words):
    with refuses(PolyfedError, words):
        load(written(frame().assign(**change), tmp_path, ".csv"), **options)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"", "as .csv"),
        ("a.csv", b"x_1,x_1,label\n1,2,0\n", "columns named"),
        ("a.csv", b"x_1,label\n1,0\n1,2,3,4\n", "as .csv"),
        ("a.csv", b"x_1,x_2,label\n1,2,0,7\n3,4,1,8\n", "header has names"),
        ("a.csv", b"x_1,x_2,label\n1,2,0,\n3,4,1,8\n", "header has names"),
        ("a.tsv", b"x_1\tx_2\tlabel\n1\t2\t0\t7\n3\t4\t1\n", "header has names"),
        ("a.csv", b"\xff\xfe\x00x", "as .csv"),
        ("a.parquet", b"PAR1 no", "parquet file"),
        ("a.jsonl", b'{"x": 1, "label": 0}\n{"x": 1', "line 2"),
        ("a.jsonl", b"[1]\n", "line 1"),
        ("a.jsonl", b"\n", "has no rows"),
        ("a.xlsx", b"", "table that polyfed"),
    ],
)
def test_damaged_files_are_told_apart(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with refuses(DataError, words):
        load(str(tmp_path / name), modalities={"x": "x*"})
    with refuses(DataError, "does not exist"):
        load(str(tmp_path / "nowhere.csv"))


@pytest.mark.parametrize("header", ["", ",", ",,"])
@pytest.mark.parametrize("first", ["", "word-"])
def test_a_comma_at_the_end_of_each_row_moves_no_column(tmp_path, first, header):
    rows = "".join(f"{first}{row},{row}.5,{row % 2},{row % 3},{header[1:]}\n" for row in range(12))
    (tmp_path / "commas.csv").write_text(f"who,x_1,label,x_2{header}\n{rows}")
    assert list(read(tmp_path / "commas.csv", Problems())) == ["who", "x_1", "label", "x_2"]
    found = load(str(tmp_path / "commas.csv"), modalities={"x": "x_*"}, client="who", test_share=0.0)
    assert found.column("x").values.tolist() == [[row + 0.5, row % 3] for row in range(12)]
    assert found.label.tolist() == [row % 2 for row in range(12)]
    assert len(found.client.unique()) == 12


def test_the_row_numbers_that_pandas_writes_are_no_feature(tmp_path):
    frame().to_csv(tmp_path / "mine.csv")
    with warned("column 1"):
        assert list(read(tmp_path / "mine.csv", Problems())) == list(frame())


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\x0c"])
def test_a_text_with_a_separator_of_lines_stays_in_its_json_line(tmp_path, mark):
    lines = [json.dumps({"x": row / 2, "label": row % 2, "note": f"a{mark}b"}, ensure_ascii=False) for row in range(8)]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    found = load(str(tmp_path / "a.jsonl"), modalities={"x": "x"})
    assert found.column("x").values[:, 0].tolist() == [row / 2 for row in range(8)]
    assert listing.lines(tmp_path / "a.jsonl", "hateful-memes") == lines


def test_targets_are_numbers_and_may_be_unknown(tmp_path):
    held = frame().assign(fever=pd.array([1, None] * (ROWS // 2), dtype="Int64"), who="x")
    found = load(
        written(held, tmp_path, ".parquet"), label=["fever", "audio_0"], modalities={"x": ["audio_1", "audio_2"]}
    )
    assert found.label[:2, 0].isnan().tolist() == [False, True]
    with refuses(DataError, "columns of labels"):
        load(written(held, tmp_path, ".csv"), label=["fever", "who"])


def test_parquet_without_its_library_names_the_extra(tmp_path, monkeypatch):
    path = written(frame(), tmp_path, ".parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refuses(DataError, "pip install 'polyfed[parquet]'"):
        load(path)


def test_all_faults_of_a_table_are_told_at_once(tmp_path):
    held = frame().assign(audio_1=["?"] + [1.0] * 39, split="trian", client=[None] + ["a"] * 39)
    held["text.a"] = held["text.b"] = np.nan
    with pytest.raises(DataError) as caught:
        load(written(held, tmp_path, ".csv"), label="lable")
    assert str(caught.value).startswith("5 problems:\n")
