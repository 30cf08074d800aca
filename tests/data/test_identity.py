"""Who a row belongs to, and which word a label is, in every form of data: names are never numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed
from polyfed.core.errors import DataError, PolyfedError
from polyfed.data.columns import Columns
from polyfed.data.reading.objects import Given, table_of
from refusals import refuses, warned

ROWS = 60
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(ROWS, 2))
LABEL = np.arange(ROWS) % 3
SUFFIXES = ("csv", "tsv", "parquet", "jsonl")


def held(label: Any = LABEL, client: Any = None, **more: Any) -> pd.DataFrame:
    found = pd.DataFrame({"a_0": X[:, 0], "a_1": X[:, 1], "label": label})
    return found.assign(**({} if client is None else {"client": client}), **more)


def written(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="the extra polyfed[parquet] is not installed")
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path


def read(path: Path, **options: Any) -> Columns:
    found: Columns = polyfed.make_recipe(path, **options).data.load()
    return found


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_clients_1_and_01_are_two_people(tmp_path: Path, suffix: str) -> None:
    client = np.array(["1", "01", "2"])[LABEL]
    found = read(written(held(client=client), tmp_path / f"mine.{suffix}"))
    assert found.client is not None
    assert len(found.client.unique()) == 3
    same = table_of(held(client=client), Given()).client
    assert same is not None
    assert torch.equal(found.client, same)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_clients_that_are_numbers_keep_their_order_as_text(tmp_path: Path, suffix: str) -> None:
    client = np.arange(ROWS) % 12 + 1  # "10" comes before "2" only as text
    found = read(written(held(client=client), tmp_path / f"mine.{suffix}")).client
    assert found is not None
    assert found.tolist() == (client - 1).tolist()
    arrays = table_of({"a": X}, Given(labels=LABEL, clients=client.astype(str))).client
    assert arrays is not None
    assert torch.equal(arrays, found)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_only_an_empty_cell_is_empty(tmp_path: Path, suffix: str) -> None:
    label, client = np.array(["None", "NA", "nan"])[LABEL], np.array(["NA", "null", "n/a"])[LABEL]
    found = read(written(held(label, client), tmp_path / f"mine.{suffix}"))
    assert found.class_names == ("NA", "None", "nan")
    assert found.client is not None
    assert len(found.client.unique()) == 3
    client = np.where(np.arange(ROWS) == 7, None, client)
    with refuses(DataError, "client column"):
        read(written(held(label, client), tmp_path / f"gone.{suffix}"))


def test_words_among_numbers_are_named_or_declared_empty(tmp_path: Path) -> None:
    frame = held(b_0=X[:, 1], b_1=X[:, 0] - 1)
    path = written(frame.assign(a_0=frame["a_0"].astype(str).where(frame.index != 4, "NA")), tmp_path / "mine.csv")
    with refuses(DataError, "holds 'NA'"):
        read(path)
    with warned("of the cells"):
        found = read(path, empty=["NA"])
    assert not found.present["a"][4]
    missing = written(frame.assign(a_0=frame["a_0"].where(frame.index != 4)), tmp_path / "nan.csv")
    missing.write_text(missing.read_text().replace("\n,", "\nNaN,"))  # NumPy's word for a missing number
    with warned("of the cells"):
        assert not read(missing).present["a"][4]


@pytest.mark.parametrize(
    ("words", "names"),
    [(["0", "1", "2"], None), (["01", "1", "2"], ("01", "1", "2")), (["a", "1", "2"], ("1", "2", "a"))],
)
def test_labels_are_numbers_only_if_all_are_written_as_numbers(tmp_path: Path, words: list[str], names: Any) -> None:
    found = read(written(held(np.array(words)[LABEL]), tmp_path / "mine.csv"))
    assert found.class_names == names
    assert found.num_classes == 3
    assert found.label.tolist() == [sorted(words).index(words[number]) for number in LABEL]


def test_targets_of_a_text_file_are_floats(tmp_path: Path) -> None:
    y = X[:, 0] * 3 + 0.5
    found = read(written(held(y), tmp_path / "mine.csv"))
    np.testing.assert_array_equal(found.label.numpy(), y.astype(np.float32))
    y[3] = np.nan
    assert bool(read(written(held(y), tmp_path / "holes.csv")).label[3].isnan())


@pytest.mark.parametrize("codes", [["0", "1"], ["train", "test"]])
def test_splits_of_a_text_file_are_words_or_codes(tmp_path: Path, codes: list[str]) -> None:
    split = np.array(codes)[np.arange(ROWS) % 4 // 3]
    found = read(written(held(split=split), tmp_path / "mine.csv"))
    assert found.split.tolist() == (np.arange(ROWS) % 4 // 3).tolist()


@pytest.mark.parametrize("words", [["Cat", "cat", "dog"], ["cat", "cat ", "dog"], ["a b", "a  B", "dog"]])
def test_labels_and_clients_that_differ_by_case_or_blanks_are_told(words: list[str]) -> None:
    label = np.array(words)[LABEL]
    if words[0] == "Cat":
        with warned("relabel = {"):
            assert table_of({"a": X}, Given(labels=label)).num_classes == 3
    else:  # nobody sees blanks
        with refuses(DataError, "different classes"):
            table_of({"a": X}, Given(labels=label))
    with warned("different clients"):
        table_of({"a": X}, Given(labels=LABEL, clients=label))
    named = table_of({"a": X}, Given(labels=label, class_names=sorted(words)))  # the caller knows: no warning
    assert named.num_classes == 3


def test_class_labels_of_several_splits_are_mapped_by_name() -> None:
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    names = [["bird", "cat", "dog"], ["dog", "bird", "cat"]]

    def split(listed: list[str], **more: Any) -> Any:
        features = {"feat": datasets.Sequence(datasets.Value("float32"), length=2)}
        features |= {"label": datasets.ClassLabel(names=listed), "client": datasets.ClassLabel(names=listed)} | more
        numbers = [listed.index(names[0][number]) for number in LABEL]
        columns = {"feat": X.tolist(), "label": numbers, "client": numbers} | dict.fromkeys(more, numbers)
        return datasets.Dataset.from_dict(columns, features=datasets.Features(features))

    both = {"train": split(names[0]), "test": split(names[1])}
    found = table_of(datasets.DatasetDict(both), Given())
    assert found.class_names == ("bird", "cat", "dog")
    assert found.label.tolist() == [*LABEL, *LABEL]
    assert found.client is not None
    assert found.client.tolist() == [*LABEL, *LABEL]
    more = table_of({"train": split(names[0]), "test": split([*names[1], "eel"])}, Given())
    assert more.class_names == ("bird", "cat", "dog", "eel")
    kind = [split(listed, kind=datasets.ClassLabel(names=listed)) for listed in names]
    with refuses(DataError, "column 'kind'"):
        table_of({"train": kind[0], "test": kind[1]}, Given())
    with refuses(DataError, "column 'label'"):
        table_of(both, Given(class_names=["x", "y", "z"]))
    assert table_of({"train": split(names[0])}, Given(class_names=["x", "y", "z"])).class_names == ("x", "y", "z")


def test_a_saved_dataset_maps_its_splits_by_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    names = {"train": ["bird", "cat", "dog"], "test": ["dog", "bird", "cat"]}

    def split(listed: list[str]) -> Any:
        features = datasets.Features(
            {"feat": datasets.Sequence(datasets.Value("float32"), length=2), "label": datasets.ClassLabel(names=listed)}
        )
        numbers = [listed.index(names["train"][number]) for number in LABEL]
        return datasets.Dataset.from_dict({"feat": X.tolist(), "label": numbers}, features=features)

    datasets.DatasetDict({name: split(listed) for name, listed in names.items()}).save_to_disk(str(tmp_path / "saved"))
    source = polyfed.data.SOURCES["hf"](  # type: ignore[call-arg]
        path=str(tmp_path / "saved"), modalities={"feat": "values"}, cache=str(tmp_path / "cache")
    )
    found = source.load()
    for code in (0, 1):
        rows = found.rows(code)
        np.testing.assert_allclose(found.modalities["feat"].take(rows), X, rtol=1e-6)
        assert found.label[rows].tolist() == LABEL.tolist()


def test_ordered_categories_of_several_splits_are_mapped_by_name() -> None:
    levels = [["low", "mid", "high"], ["mid", "low", "high"]]
    words = np.array(levels[0])[LABEL]
    frames = [held(pd.Categorical(words, categories=each)) for each in levels]
    found = table_of({"train": frames[0], "test": frames[1]}, Given())
    assert found.label[:ROWS].tolist() == found.label[ROWS:].tolist()
    frames = [held(pd.Categorical(words, categories=each, ordered=True)) for each in levels]
    found = table_of({"train": frames[0], "test": frames[1]}, Given())
    assert found.class_names == ("low", "mid", "high")
    assert found.label[:ROWS].tolist() == found.label[ROWS:].tolist() == LABEL.tolist()


HOUSE = "a_0{s}a_1{s}label\n1{d}5{s}2{d}5{s}x\n0{d}5{s}-1{d}25{s}y\n3{d}0{s}4{d}75{s}x\n1e1{s}0{d}5{s}y\n"
VALUES = [[1.5, 2.5], [0.5, -1.25], [3.0, 4.75], [10.0, 0.5]]


@pytest.mark.parametrize("separator", [";", "|", "\t", " "])
@pytest.mark.parametrize("decimal", [".", ","])
def test_other_separators_and_decimal_commas_are_read_when_they_are_named(
    tmp_path: Path, separator: str, decimal: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(HOUSE.format(s=separator, d=decimal))
    with refuses(PolyfedError, "separated by"):
        read(path)
    found = read(path, separator=separator, decimal=decimal, test_share=0.0)
    np.testing.assert_array_equal(found.modalities["a"].values, VALUES)
    assert found.class_names == ("x", "y")


def test_decimal_commas_are_suggested(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_text(HOUSE.format(s="\t", d=","))
    with refuses(DataError, "holds '1,5'"):
        read(path)
    np.testing.assert_array_equal(read(path, decimal=",", test_share=0.0).modalities["a"].values, VALUES)


def test_comment_lines_are_read_when_they_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("# recorded on a Monday, with gloves\n" + HOUSE.format(s=",", d="."))
    with refuses(DataError, "a comment"):
        read(path)
    np.testing.assert_array_equal(read(path, comment="#", test_share=0.0).modalities["a"].values, VALUES)


@pytest.mark.parametrize(("encoding", "word"), [("cp1252", "Größe"), ("utf-16", "Größe"), ("utf-8-sig", "größe")])
def test_encodings_are_read_when_they_are_named(tmp_path: Path, encoding: str, word: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(HOUSE.format(s=",", d=".").replace("x", word), encoding=encoding)
    if encoding != "utf-8-sig":
        with refuses(DataError, f'encoding = "{encoding}"'):
            read(path)
        assert word in (read(path, encoding=encoding, test_share=0.0).class_names or ())
    else:
        assert word in (read(path, test_share=0.0).class_names or ())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"separator": ";;"}, "data.separator: ';;'"),
        ({"decimal": "x"}, "data.decimal: 'x'"),
        ({"separator": ",", "decimal": ","}, "data.decimal: ','"),
        ({"encoding": "klingon"}, "data.encoding: 'klingon'"),
    ],
)
def test_a_wrong_dialect_is_refused(tmp_path: Path, options: dict[str, str], said: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(HOUSE.format(s=",", d="."))
    with refuses(PolyfedError, said):
        read(path, **options)
    with refuses(PolyfedError, "path of a"):
        polyfed.make_recipe({"a": X}, labels=LABEL, **options)  # type: ignore[arg-type]
