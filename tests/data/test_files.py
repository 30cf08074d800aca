"""Arrays from disk: `.npz` files, folders of `.npy` files and idx files, whole, malformed and damaged."""

import gzip

import numpy as np
import pytest
import torch

from polyfed.core.errors import DataError, RecipeError
from polyfed.data.reading.array_files import Arrays, read_idx
from polyfed.data.sources import SOURCES
from refusals import refuses


@pytest.fixture
def arrays():
    draw = np.random.default_rng(1)
    return {
        "image": draw.integers(0, 256, (60, 5, 4, 3), dtype=np.uint8),
        "gray": draw.integers(0, 256, (60, 5, 4), dtype=np.uint8),
        "text": draw.normal(size=(60, 7)).astype(np.float32),
        "sound": draw.normal(size=(60, 9, 2)).astype(np.float16),
        "count": draw.integers(0, 60000, (60, 4)).astype(np.uint16),
        "label": draw.integers(0, 3, 60).astype(np.uint8),
        "client": np.array([f"s{i % 4}" for i in range(60)]),
        "split": (np.arange(60) % 4 == 3).astype(np.uint8),
        "split_personal": (np.arange(60) % 3).astype(np.uint8),
        "label_name": np.array(["x", "y", "z"]),
    }


@pytest.fixture
def load(tmp_path):
    def save_and_load(arrays, **options):
        np.savez(tmp_path / "mine.npz", **arrays)
        return SOURCES["npz"](path=str(tmp_path / "mine.npz"), **options).load()

    return save_and_load


def test_arrays_come_out_in_the_documented_layout(load, arrays):
    columns = load(arrays, modalities=("image", "gray", "text", "sound", "count"))
    assert {name: c.shape for name, c in columns.modalities.items()} == {
        "image": (3, 5, 4),
        "gray": (1, 5, 4),
        "text": (7,),
        "sound": (9, 2),
        "count": (4,),
    }
    rows = torch.arange(60)
    taken = {name: column.take(rows).numpy() for name, column in columns.modalities.items()}
    np.testing.assert_allclose(taken["image"], arrays["image"].transpose(0, 3, 1, 2) / 255, rtol=1e-6)
    np.testing.assert_allclose(taken["gray"][:, 0], arrays["gray"] / 255, rtol=1e-6)
    for name in ("text", "sound", "count"):
        np.testing.assert_array_equal(taken[name], arrays[name].astype(np.float32))


def test_labels_clients_and_splits_come_out_as_stored(load, arrays):
    columns = load(arrays, modalities=("text",))
    assert columns.name == "mine"
    assert columns.class_names == ("x", "y", "z")
    assert columns.num_classes == 3
    assert columns.client.tolist() == [i % 4 for i in range(60)]
    for name in ("label", "split", "split_personal"):
        np.testing.assert_array_equal(getattr(columns, name).numpy(), arrays[name])


def test_the_guess_of_a_layout_can_be_overruled(load, arrays):
    layout = {"image": "CHW", "sound": "FT"}
    columns = load(arrays, modalities=("image", "sound"), layout=layout)
    assert columns.column("image").shape == (5, 4, 3)
    assert columns.column("sound").shape == (2, 9)
    with refuses(DataError, "layout 'HW'"):
        load(arrays, modalities=("text",), layout={"text": "HW"})
    with refuses(RecipeError, "data.layout: 'txt'"):
        load(arrays, modalities=("text",), layout={"txt": "F"})


def test_standardising_uses_training_rows_alone(load, arrays):
    other = dict(arrays)
    other["text"] = np.where(arrays["split"][:, None] == 1, 1e6, arrays["text"])
    train = torch.from_numpy(np.flatnonzero(arrays["split"] == 0))
    first, second = (load(a, modalities=("text",), standardise=True).column("text") for a in (arrays, other))
    assert torch.equal(first.take(train), second.take(train))


def test_a_file_without_a_split_gets_a_test_set_of_every_class(load, arrays):
    del arrays["split"]
    columns = load(arrays, modalities=("text",), test_share=0.25)
    for number in range(3):
        rows = columns.label == number
        assert (columns.split[rows] == 1).sum() == round(0.25 * int(rows.sum()))
    assert len(load(arrays, modalities=("text",), test_share=0.0).rows(1)) == 0


def test_rows_without_a_modality_are_marked(load, arrays):
    arrays["text_present"] = np.arange(60) != 5
    arrays["text"][5] = np.nan
    assert (~load(arrays, modalities=("text",)).present["text"]).nonzero().tolist() == [[5]]


def test_a_folder_of_arrays_is_read_alike_and_memory_mapped(tmp_path, load, arrays):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    assert isinstance(Arrays(folder)["text"].base, np.memmap)
    options = {"modalities": ("image", "text"), "standardise": True}
    mapped, whole = SOURCES["npz"](path=str(folder), **options).load(), load(arrays, **options)
    for name in ("image", "text"):
        rows = torch.arange(60)
        assert torch.equal(mapped.column(name).take(rows), whole.column(name).take(rows))


def test_modalities_must_be_named_and_the_candidates_are_listed(load, arrays):
    with refuses(RecipeError, "gray, text"):
        load(arrays)
    with refuses(DataError, "array 'txt'"):
        load(arrays, modalities=("txt",))
    with refuses(RecipeError, "data.modalities: distinct"):
        load(arrays, modalities=("text", "text"))


def test_an_array_asked_for_by_name_must_be_there(load, arrays):
    with refuses(DataError, "no array 'speaker'"):
        load(arrays, modalities=("text",), client="speaker")
    assert load(arrays, modalities=("text",), client="").client is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": np.full(60, 0.5)}, "1 classes"),
        ({"label": np.full(60, -1)}, "first -1"),
        ({"label": np.full(60, 7)}, "labels outside 0..2"),
        ({"label": np.zeros(59, int)}, "labels have 59"),
        ({"label": np.zeros((60, 2), int)}, "2 classes"),
        ({"text": np.zeros(60)}, "be a modality"),
        ({"text": np.full((60, 2), "a")}, "be a modality"),
        ({"client": np.zeros(60)}, "integers or strings"),
        ({"id": np.arange(60) // 2}, "repeats some ids"),
        ({"split": np.full(60, 300)}, "'split' holds 127"),
    ],
)
def test_bad_arrays_are_refused_by_name(load, arrays, change, words):
    with refuses(DataError, words):
        load(arrays | change, modalities=("text",))


def test_pickled_arrays_are_never_opened(tmp_path, arrays):
    np.savez(tmp_path / "mine.npz", **arrays, text2=np.array([{}], dtype=object))
    with refuses(DataError, "never unpickles"):
        SOURCES["npz"](path=str(tmp_path / "mine.npz"), modalities=("text2",)).load()


def test_missing_foreign_and_truncated_files_are_told_apart(tmp_path, arrays):
    path = tmp_path / "mine.npz"
    with refuses(DataError, "does not exist"):
        Arrays(path)
    path.write_bytes(b"not an archive")
    with refuses(DataError, "whole .npz"):
        Arrays(path)
    np.savez_compressed(path, **arrays)
    path.write_bytes(path.read_bytes()[:-200])
    with refuses(DataError, "whole .npz"):
        Arrays(path)
    (tmp_path / "empty").mkdir()
    with refuses(DataError, "without .npy files"):
        Arrays(tmp_path / "empty")


def test_a_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, text=np.arange(5000.0))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(bytes(raw))
    with refuses(DataError, "'text' is damaged"):
        Arrays(path)["text"]


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_plain_and_compressed(tmp_path, suffix):
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    path = tmp_path / f"file{suffix}"
    path.write_bytes(gzip.compress(idx(array)) if suffix else idx(array))
    np.testing.assert_array_equal(read_idx(path).numpy(), array)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw[:6], lambda raw: b"", lambda raw: b"x" + raw])
def test_damaged_idx_files_are_refused(tmp_path, damage):
    path = tmp_path / "file"
    path.write_bytes(damage(idx(np.zeros((2, 3), np.uint8))))
    with refuses(DataError, "bytes"):
        read_idx(path)
    compressed = tmp_path / "file.gz"
    compressed.write_bytes(gzip.compress(idx(np.zeros((2, 3), np.uint8)))[:-9])
    with refuses(DataError, "damaged"):
        read_idx(compressed)
