"""The coloured digits: colours follow the label in training only, and the published files are read or refused."""

import gzip

import numpy as np
import pytest
import torch

from polyfed.core.errors import DataError, RecipeError
from polyfed.data.sources import SOURCES
from polyfed.data.sources.pictures.colour import MEAN_COLOURS, colours, painted
from refusals import refuses

LABEL = torch.arange(20000) % 10
TRAIN = torch.zeros(20000, dtype=torch.int8)
TEST = torch.ones(20000, dtype=torch.int8)


def test_training_colours_lie_around_the_mean_colour_of_their_label():
    drawn = colours(LABEL, TRAIN, seed=1).numpy()
    rng = np.random.default_rng(0)
    for digit in range(10):
        noisy = MEAN_COLOURS[digit].numpy() / 255 + rng.normal(0, 0.03**0.5, (200_000, 3))
        np.testing.assert_allclose(drawn[digit == LABEL].mean(0), np.clip(noisy, 0, 1).mean(0), atol=0.015)


def test_the_noise_of_a_channel_that_is_never_clipped_has_variance_003():
    # 128 / 255 is 2.9 deviations from either end
    red_of_nine = colours(LABEL, TRAIN, seed=1)[LABEL == 9, 0]
    assert red_of_nine.var() == pytest.approx(0.03, rel=0.08)


def test_channels_are_noisy_independently():
    noise = colours(LABEL, TRAIN, seed=1)[LABEL == 1, 1:] - 128 / 255
    assert abs(np.corrcoef(noise.numpy().T)[0, 1]) < 0.08


def test_test_colours_are_independent_of_the_label():
    drawn = colours(LABEL, TEST, seed=1)
    nearest = torch.cdist(drawn, MEAN_COLOURS / 255).argmin(1)
    table = np.zeros((10, 10))
    np.add.at(table, (LABEL.numpy(), nearest.numpy()), 1)
    expected = table.sum(0) * table.sum(1, keepdims=True) / table.sum()
    chi_square = ((table - expected) ** 2 / expected).sum()
    assert chi_square < 130  # 81 degrees of freedom: 99.95 % lie below
    assert (nearest == LABEL).float().mean() < 0.15
    on_train = torch.cdist(colours(LABEL, TRAIN, seed=1), MEAN_COLOURS / 255).argmin(1)
    assert (on_train == LABEL).float().mean() > 0.5


def test_colours_follow_the_seed_alone_and_stay_in_range():
    first, again, other = (colours(LABEL, TRAIN, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.min() >= 0
    assert first.max() <= 1


def test_painting_keeps_black_and_scales_the_stroke():
    gray = torch.tensor([[[0, 100], [200, 255]]], dtype=torch.uint8)
    color = painted(gray, torch.tensor([[1.0, 0.5, 0.0]]))
    assert color[0].tolist() == [[[0, 100], [200, 255]], [[0, 50], [100, 128]], [[0, 0], [0, 0]]]


def test_cg_digits_is_fixed_whole_and_standardised():
    first, again = SOURCES["cg-digits"]().load(), SOURCES["cg-digits"]().load()
    assert (len(first), first.column("gray").shape, first.column("color").shape) == (1797, (1, 8, 8), (3, 8, 8))
    assert torch.equal(first.column("color").values, again.column("color").values)
    train = first.rows(0)
    for name in ("gray", "color"):
        x = first.column(name).take(train)
        assert x.mean().abs() < 1e-4
        assert x.std() == pytest.approx(1.0, abs=1e-3)
    per_class = torch.bincount(first.label[first.rows(1)])
    assert per_class.min() >= 34
    assert per_class.max() <= 37


def test_another_seed_recolours_cg_digits_and_keeps_its_split():
    first, other = SOURCES["cg-digits"]().load(), SOURCES["cg-digits"](seed=1).load()
    assert torch.equal(first.split, other.split)
    assert torch.equal(first.column("gray").values, other.column("gray").values)
    assert not torch.equal(first.column("color").values, other.column("color").values)


@pytest.fixture
def small_mnist():
    draw = np.random.default_rng(0)
    return {
        "x_train": draw.integers(0, 256, (60, 28, 28), dtype=np.uint8),
        "y_train": (np.arange(60) % 10).astype(np.uint8),
        "x_test": draw.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        "y_test": (np.arange(20) % 10).astype(np.uint8),
    }


def write_idx(folder, arrays, compress):
    for part, theirs in (("train", "train"), ("test", "t10k")):
        for request_packet, name in (("x", "images-idx3"), ("y", "labels-idx1")):
            array = arrays[f"{request_packet}_{part}"]
            raw = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
            file = folder / f"{theirs}-{name}-ubyte{'.gz' if compress else ''}"
            file.write_bytes(gzip.compress(raw) if compress else raw)


@pytest.mark.parametrize("layout", ["idx", "idx.gz", "keras", "ours"])
def test_every_layout_of_mnist_gives_the_same_pairs(tmp_path, small_mnist, layout):
    arrays = small_mnist
    image, label = (np.concatenate([arrays[f"{x}_train"], arrays[f"{x}_test"]]) for x in "xy")
    if layout == "keras":
        np.savez(tmp_path / "mnist.npz", **arrays)
    elif layout == "ours":
        np.savez(tmp_path / "mnist.npz", image=image, label=label, split=np.arange(80) >= 60)
    else:
        write_idx(tmp_path, arrays, compress=layout == "idx.gz")
    columns = SOURCES["cg-mnist"](path=str(tmp_path)).load()
    assert columns.split.tolist() == [0] * 60 + [1] * 20
    gray = columns.column("gray").take(torch.arange(80)).numpy()
    np.testing.assert_allclose(gray[:, 0], (image / 255 - 0.1307) / 0.3081, atol=1e-5)
    expected = painted(torch.from_numpy(image), colours(columns.label, columns.split, 0)).numpy() / 255
    norm = [np.array(x).reshape(3, 1, 1) for x in ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))]
    color = columns.column("color").take(torch.arange(80)).numpy()
    np.testing.assert_allclose(color, (expected - norm[0]) / norm[1], atol=1e-4)


def test_a_subset_keeps_its_share_of_every_class_and_the_colours_of_the_whole(tmp_path, small_mnist):
    np.savez(tmp_path / "mnist.npz", **small_mnist)
    whole, half = (SOURCES["cg-mnist"](path=str(tmp_path), subset=share).load() for share in (1.0, 0.5))
    assert torch.bincount(half.label[half.rows(0)]).tolist() == [3] * 10
    assert torch.bincount(half.label[half.rows(1)]).tolist() == [1] * 10
    assert torch.equal(half.column("color").values, whole.column("color").values[half.ids])
    with refuses(RecipeError, "data.subset: must be"):
        SOURCES["cg-mnist"](path="x", subset=0)


def test_published_colours_are_read_in_mnists_order(tmp_path, small_mnist):
    np.savez(tmp_path / "mnist.npz", **small_mnist)
    draw = np.random.default_rng(3)
    theirs = {
        f"{part}_image": draw.integers(0, 256, (n, 28, 28, 3), dtype=np.uint8)
        for part, n in (("train", 60), ("test", 20))
    }
    labels = {f"{part}_label": small_mnist[f"y_{part}"] for part in ("train", "test")}
    file = tmp_path / "colored.npz"
    np.savez(file, **theirs, **labels)
    columns = SOURCES["cg-mnist"](path=str(tmp_path), colored=str(file)).load()
    stored = np.concatenate([theirs["train_image"], theirs["test_image"]]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(columns.column("color").values.numpy(), stored)
    np.savez(file, **theirs, train_label=labels["train_label"][::-1], test_label=labels["test_label"])
    with refuses(DataError, "would be wrong"):
        SOURCES["cg-mnist"](path=str(tmp_path), colored=str(file)).load()


def test_the_published_pickle_is_refused_with_the_way_out(tmp_path, small_mnist):
    np.savez(tmp_path / "mnist.npz", **small_mnist)
    np.save(tmp_path / "colored.npy", np.array({"a": 1}, dtype=object), allow_pickle=True)
    with refuses(DataError, "pickled dictionary"):
        SOURCES["cg-mnist"](path=str(tmp_path), colored=str(tmp_path / "colored.npy")).load()


def test_what_is_not_mnist_is_refused(tmp_path, small_mnist):
    with refuses(DataError, "train-images-idx3-ubyte"):
        SOURCES["cg-mnist"](path=str(tmp_path)).load()
    np.savez(tmp_path / "mnist.npz", **(small_mnist | {"x_test": small_mnist["x_test"][:5]}))
    with refuses(DataError, "not MNIST"):
        SOURCES["cg-mnist"](path=str(tmp_path)).load()


def test_real_mnist_has_its_official_sizes(shared_data):
    columns = SOURCES["cg-mnist"](path=str(shared_data("mnist")), subset=0.1).load()
    assert len(columns.rows(0)) == pytest.approx(6000, abs=5)
    assert len(columns.rows(1)) == pytest.approx(1000, abs=5)
    gray = columns.column("gray").take(columns.rows(0))
    assert gray.mean().abs() < 0.02
    assert gray.std() == pytest.approx(1.0, abs=0.02)
