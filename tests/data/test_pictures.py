"""CIFAR-100, MNIST-M and multi-view folders, on files made here; stacked modalities."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from polyfed.core.errors import DataError, RecipeError
from polyfed.data import SOURCES, Column, stacked
from polyfed.data.sources.pictures.mnist_m import blended
from refusals import refuses

# cifar100 ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def records(tmp_path):
    """A binary CIFAR-100 of 40 training and 10 test records."""
    draw = np.random.default_rng(0)
    made = {}
    for name, rows in (("train", 40), ("test", 10)):
        raw = draw.integers(0, 256, (rows, 3074), dtype=np.uint8)
        raw[:, 0], raw[:, 1] = np.arange(rows) % 20, np.arange(rows) % 100
        raw.tofile(tmp_path / f"{name}.bin")
        made[name] = raw
    return tmp_path, made


def test_cifar_reads_the_binary_version_plane_by_plane(records):
    folder, made = records
    columns = SOURCES["cifar100"](path=str(folder)).load()
    assert columns.name == "cifar100"
    assert (columns.split == 0).sum() == 40
    assert columns.label.tolist() == [*range(40), *range(10)]
    pixels = np.concatenate([made["train"], made["test"]])[:, 2:].reshape(-1, 3, 32, 32)
    mean, deviation = np.array([0.5071, 0.4866, 0.4409]), np.array([0.2673, 0.2564, 0.2762])
    wanted = (pixels / 255 - mean[:, None, None]) / deviation[:, None, None]
    rows = torch.arange(50)
    assert np.allclose(columns.column("rgb").take(rows).numpy(), wanted, atol=1e-5)
    assert SOURCES["cifar100"](path=str(folder), labels="coarse").load().num_classes == 20


def test_the_gray_image_is_that_of_the_same_row_with_mean_0_and_deviation_1_in_training(records):
    folder, made = records
    columns = SOURCES["cifar100"](path=str(folder)).load()
    pixels = made["train"][:, 2:].reshape(-1, 3, 1024).astype(np.float64)
    gray = (0.299 * pixels[:, 0] + 0.587 * pixels[:, 1] + 0.114 * pixels[:, 2]).round().reshape(-1, 1, 32, 32)
    ours = columns.column("gray").take(torch.arange(40)).numpy()
    # ties may be rounded either way, which moves a byte by one
    assert np.abs(ours - (gray - gray.mean()) / gray.std()).max() < 1.01 / gray.std()
    assert (ours.mean(), ours.std()) == (pytest.approx(0.0, abs=1e-4), pytest.approx(1.0, abs=1e-4))


def test_cifar_refuses_pickles_and_files_cut_short(records, tmp_path):
    folder, _ = records
    (folder / "test.bin").write_bytes(b"\0" * 100)
    with refuses(DataError, "multiple"):
        SOURCES["cifar100"](path=str(folder)).load()
    (tmp_path / "train").write_bytes(b"\x80\x04.")
    with refuses(DataError, "opens no pickles"):
        SOURCES["cifar100"](path=str(tmp_path / "train")).load()


def test_cifar_reads_twenty_classes_of_the_shared_data(shared_data):
    path = shared_data("cifar100_20") / "cifar100_20.npz"
    columns = SOURCES["cifar100"](path=str(path), subset=0.1).load()
    assert columns.num_classes == 20
    assert torch.bincount(columns.label).tolist() == [60] * 20
    with np.load(path) as file:
        image = file["image"][columns.ids]
    back = columns.column("rgb").raw(torch.arange(1200)).permute(0, 2, 3, 1)
    assert torch.equal(back, torch.from_numpy(image))


# mnist-m -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def digits(tmp_path):
    draw = np.random.default_rng(1)
    path = tmp_path / "digits.npz"
    label = np.arange(30) % 10
    image = draw.integers(0, 256, (30, 28, 28), dtype=np.uint8)
    np.savez(path, image=image, label=label, split=(np.arange(30) >= 20).astype(np.int64))
    backgrounds = draw.integers(0, 256, (3, 40, 33, 3), dtype=np.uint8)
    np.savez(tmp_path / "backgrounds.npz", image=backgrounds)
    return tmp_path, image, backgrounds


def test_mnist_m_is_the_difference_of_a_digit_and_a_crop(digits):
    folder, image, backgrounds = digits
    source = SOURCES["mnist-m"](path=str(folder / "digits.npz"), backgrounds=str(folder / "backgrounds.npz"))
    columns = source.load()
    assert torch.equal(columns.column("mnist").raw(torch.arange(30))[:, 0], torch.from_numpy(image))
    digit = np.where(image >= 128, 255, 0)[:, None].astype(np.int64)
    for row, made in enumerate(columns.column("mnist_m").values.numpy().astype(np.int64)):
        crop = np.abs(made - digit[row])  # |b - d| with d in {0, 255} undoes itself
        windows = (
            picture.transpose(2, 0, 1)[:, top : top + 28, left : left + 28]
            for picture in backgrounds
            for top in range(13)
            for left in range(6)
        )
        assert any(np.array_equal(crop, window) for window in windows)
    again = source.load()
    assert torch.equal(again.column("mnist_m").values, columns.column("mnist_m").values)


def test_the_blend_inverts_the_background_under_the_stroke():
    gray = torch.tensor([[[0, 127], [128, 255]]], dtype=torch.uint8)
    crops = torch.full((1, 3, 2, 2), 100, dtype=torch.uint8)
    assert blended(gray, crops)[0, 0].tolist() == [[100, 100], [155, 155]]


def test_backgrounds_may_be_a_folder_of_pictures_none_too_small(digits):
    image = pytest.importorskip("PIL.Image")
    folder, _, backgrounds = digits
    (folder / "pictures").mkdir()
    for number, picture in enumerate(backgrounds):
        image.fromarray(picture).save(folder / "pictures" / f"{number}.png")
    options = {"path": str(folder / "digits.npz")}
    from_folder = SOURCES["mnist-m"](backgrounds=str(folder / "pictures"), **options).load()
    from_arrays = SOURCES["mnist-m"](backgrounds=str(folder / "backgrounds.npz"), **options).load()
    assert torch.equal(from_folder.column("mnist_m").values, from_arrays.column("mnist_m").values)
    image.fromarray(backgrounds[0][:20]).save(folder / "pictures" / "9.png")
    with refuses(DataError, "background 3"):
        SOURCES["mnist-m"](backgrounds=str(folder / "pictures"), **options).load()


# multiview ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def objects(tmp_path):
    """Two classes, two views; one object lacks a view. ModelNet's names in one class, C-VFL's folders in the other."""
    image = pytest.importorskip("PIL.Image")

    def save(path, shade):
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((10, 8, 3), shade, dtype=np.uint8)).save(path)

    for split, items in (("train", (1, 2)), ("test", (3,))):
        for item in items:
            for view in (1, 7):
                save(tmp_path / "chair" / split / f"chair_{item}.obj.shaded_v00{view}.png", 10 * item + view)
                if (item, view) != (2, 7):
                    save(tmp_path / "desk" / split / f"desk_{item}" / f"v00{view}.png", 100 + 10 * item + view)
    return tmp_path


def test_views_of_both_layouts_become_modalities_and_incomplete_objects_are_dropped(objects):
    columns = SOURCES["multiview"](path=str(objects), size=4).load()
    assert list(columns.modalities) == ["v001", "v007"]
    assert columns.class_names == ("chair", "desk")
    assert columns.label.tolist() == [0, 0, 0, 1, 1]
    assert columns.split.tolist() == [0, 0, 1, 0, 1]
    shades = columns.column("v007").raw(torch.arange(5))
    assert shades.shape == (5, 1, 4, 4)
    assert shades[:, 0, 0, 0].tolist() == [17, 27, 37, 117, 137]


def test_a_group_of_views_is_a_modality_of_their_channels(objects):
    views = {"both": ("v001", "v007"), "front": ("v001",)}
    columns = SOURCES["multiview"](path=str(objects), size=4, views=views, gray=False).load()
    assert columns.column("both").shape == (6, 4, 4)
    assert columns.column("front").shape == (3, 4, 4)
    with refuses(DataError, "'v008'"):
        SOURCES["multiview"](path=str(objects), views={"top": ("v008",)}).load()


def test_a_folder_without_objects_says_what_was_expected(tmp_path):
    with refuses(DataError, "holds no objects"):
        SOURCES["multiview"](path=str(tmp_path)).load()


# stacking ----------------------------------------------------------------------------------------------------------


def images(table, **changes):
    columns = table(rows=60)
    draw = np.random.default_rng(2)

    def column(channels, **norms):
        return Column(torch.from_numpy(draw.integers(0, 256, (60, channels, 5, 4), dtype=np.uint8)), **norms)

    rgb = column(3, shift=torch.rand(3, 1, 1) * 9, scale=torch.rand(3, 1, 1) + 1)
    return replace(columns, modalities={"rgb": rgb, "gray": column(1, scale=torch.tensor(255.0))} | changes)


def test_stacked_images_are_the_parts_channel_by_channel(table):
    columns = images(table)
    one = stacked(columns, {"image": ["rgb", "gray"]})
    assert list(one.modalities) == ["image"]
    assert one.column("image").shape == (4, 5, 4)
    assert one.column("image").values.dtype == torch.uint8
    rows = torch.tensor([5, 0, 59])
    parts = [columns.column(name).take(rows) for name in ("rgb", "gray")]
    assert torch.allclose(one.column("image").take(rows), torch.cat(parts, 1), atol=1e-6)


def test_stacked_vectors_and_images_become_one_vector_and_others_stay(table):
    columns = table(rows=60)
    columns = replace(columns, modalities={**columns.modalities, "c": Column(torch.rand(60, 2))})
    one = stacked(columns, {"ba": ["b", "a"]})
    assert list(one.modalities) == ["c", "ba"]
    rows = torch.arange(60)
    wanted = torch.cat([columns.column("b").take(rows).flatten(1), columns.column("a").take(rows)], 1)
    assert torch.allclose(one.column("ba").take(rows), wanted)


def test_stacked_columns_that_share_samples_are_read_through_their_index(table):
    index = torch.randint(0, 7, (60,))
    shared = {name: Column(torch.rand(7, 3), index=index) for name in ("a", "b")}
    apart = {"a": shared["a"], "b": Column(torch.rand(60, 3))}
    for parts in (shared, apart):
        columns = replace(table(rows=60), modalities=parts)
        rows = torch.tensor([3, 3, 41])
        wanted = torch.cat([parts[name].take(rows) for name in "ab"], 1)
        assert torch.equal(stacked(columns, {"ab": ["a", "b"]}).column("ab").take(rows), wanted)


def test_a_row_that_lacks_a_part_lacks_the_whole(table):
    columns = table(rows=60)
    masks = {"a": torch.arange(60) % 2 == 0, "b": torch.arange(60) % 3 == 0}
    one = stacked(replace(columns, present=masks), {"ab": ["a", "b"]})
    assert torch.equal(one.present["ab"], torch.arange(60) % 6 == 0)


@pytest.mark.parametrize(
    ("stack", "error", "words"),
    [
        ({"x": ["a"]}, RecipeError, "data.stack.x: at least two"),
        ({"x": ["a", "a"]}, RecipeError, "data.stack.x: two modalities"),
        ({"x": ["a", "b"], "y": ["b", "c"]}, RecipeError, "data.stack.x: two modalities"),
        ({"c": ["a", "b"]}, RecipeError, "data.stack.c: of that name"),
        ({"x": ["a", "bb"]}, DataError, "mean 'b'"),
    ],
)
def test_wrong_stacks_are_refused(table, stack, error, words):
    columns = table(rows=60)
    columns = replace(columns, modalities={**columns.modalities, "c": Column(torch.rand(60, 2))})
    with refuses(error, words):
        stacked(columns, stack)


def test_images_of_different_sizes_are_not_stacked(table):
    columns = images(table, gray=Column(torch.zeros(60, 1, 5, 5)))
    with refuses(DataError, "data.stack.image: first axis"):
        stacked(columns, {"image": ["rgb", "gray"]})
