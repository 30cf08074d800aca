"""The sources that read arrays or generate data: toy, UCI-HAR, AV-MNIST and their options."""

import wave
from dataclasses import fields

import numpy as np
import pytest
import torch

from polyfed.core.errors import DataError, RecipeError
from polyfed.data import SOURCES, Facts
from polyfed.data.sources.pictures.av_mnist import log_mel, pairs, read_fsdd
from refusals import refuses


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_documents_its_options_and_its_facts(name):
    cls = SOURCES[name]
    assert isinstance(cls.describe(), Facts)
    assert all(getattr(cls.describe(), f.name) for f in fields(Facts))
    for option in fields(cls):
        assert f"{option.name}:" in cls.__doc__


# toy ---------------------------------------------------------------------------------------------------------------


def separation(column, label):
    """Distance of class means over the deviation within classes."""
    x = column.take(torch.arange(len(label))).flatten(1).numpy()
    means = np.stack([x[label == c].mean(0) for c in range(5)])
    within = np.concatenate([x[label == c] - means[c] for c in range(5)]).std()
    distances = np.linalg.norm(means[:, None] - means[None], axis=-1)
    return distances[np.triu_indices(5, 1)].mean() / within


def test_in_the_toy_modality_a_dominates_as_its_signal_says():
    columns = SOURCES["toy"](rows=20000).load()
    label = columns.label.numpy()
    a, b = (separation(columns.column(name), label) for name in ("a", "b"))
    # random directions of length about 1 lie sqrt(2) apart
    assert a == pytest.approx(3 * 2**0.5, rel=0.25)
    assert b == pytest.approx(1 * 2**0.5, rel=0.25)


def test_a_modality_of_the_toy_draws_from_its_own_stream():
    both = SOURCES["toy"]().load()
    alone = SOURCES["toy"](shapes={"b": (24,)}).load()
    assert torch.equal(both.column("b").values, alone.column("b").values)
    assert not torch.equal(both.column("b").values, SOURCES["toy"](seed=1).load().column("b").values)


def test_the_toy_makes_tiny_images_and_natural_clients():
    columns = SOURCES["toy"](rows=101, shapes={"a": (1, 8, 8), "b": (3, 8, 8)}, natural_clients=7).load()
    assert columns.column("b").shape == (3, 8, 8)
    assert torch.bincount(columns.client).tolist() == [15] * 3 + [14] * 4
    counts = torch.bincount(columns.label)
    assert counts.max() - counts.min() == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": 0}, "data.rows: must be"),
        ({"classes": 0}, "data.classes: must be"),
        ({"shapes": {}}, "data.shapes: allowed"),
        ({"shapes": {"a": ()}}, "data.shapes.a: positive lengths"),
        ({"test_share": 1.0}, "data.test_share: must be"),
        ({"natural_clients": -1}, "data.natural_clients: 0 up to"),
    ],
)
def test_toy_options_out_of_range_are_refused(options, said):
    with refuses(RecipeError, said):
        SOURCES["toy"](**options)


# av-mnist ----------------------------------------------------------------------------------------------------------


def test_pairs_agree_in_digit_and_split_and_use_all_recordings():
    label, digit = torch.arange(4000) % 10, torch.arange(200) % 10
    split = (torch.arange(4000) % 7 == 0).to(torch.int8)
    spoken = (torch.arange(200) % 3 == 0).to(torch.int8)
    partner = pairs(label, split, digit, spoken, key=1)
    assert torch.equal(digit[partner], label)
    assert torch.equal(spoken[partner], split)
    uses = torch.bincount(partner, minlength=200)
    assert uses.min() > 0
    assert torch.equal(partner, pairs(label, split, digit, spoken, key=1))
    assert not torch.equal(partner, pairs(label, split, digit, spoken, key=2))


def test_a_digit_without_a_recording_is_named():
    zeros = torch.zeros(10, dtype=torch.int8)
    with refuses(DataError, "digit 9"):
        pairs(torch.arange(10), zeros, torch.arange(9), zeros[:9], key=1)


def test_log_mel_of_a_tone_peaks_in_its_band():
    time = np.arange(8192) / 8000
    for hertz in (300.0, 1000.0, 2500.0):
        audio = torch.from_numpy((8000 * np.sin(2 * np.pi * hertz * time)).astype(np.int16))[None]
        mel = 2595 * np.log10(1 + hertz / 700) / (2595 * np.log10(1 + 4000 / 700)) * 33 - 1
        spectrum = log_mel(audio)
        assert spectrum.shape == (1, 32, 64)
        assert abs(int(spectrum[0, :, 30].argmax()) - mel) <= 1


def write_wav(path, samples, rate=8000):
    with wave.open(str(path), "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples.astype("<i2").tobytes())


def test_a_folder_of_recordings_equals_the_arrays_of_it(tmp_path):
    draw = np.random.default_rng(0)
    names = [f"{digit}_{who}_{take}" for digit in range(2) for who in ("ann", "bob") for take in (0, 4, 5, 12)]
    audio = np.zeros((len(names), 8192), np.int16)
    for row, name in enumerate(sorted(names)):
        length = 9000 if row == 3 else 3000 + 10 * row
        samples = draw.integers(-9000, 9000, length)
        audio[row, : min(length, 8192)] = samples[:8192]
        write_wav(tmp_path / f"{name}.wav", samples)
    fields_of = [name.split("_") for name in sorted(names)]
    np.savez(
        tmp_path / "arrays.npz",
        audio=audio,
        label=[int(f[0]) for f in fields_of],
        client=[("ann", "bob").index(f[1]) for f in fields_of],
        split=[int(int(f[2]) < 5) for f in fields_of],
    )
    for mine, theirs in zip(read_fsdd(str(tmp_path)), read_fsdd(str(tmp_path / "arrays.npz")), strict=True):
        assert torch.equal(mine, theirs)


def test_recordings_of_another_form_or_name_are_refused(tmp_path):
    with refuses(DataError, "holds no .wav"):
        read_fsdd(str(tmp_path))
    write_wav(tmp_path / "1_ann_0.wav", np.zeros(10), rate=16000)
    with refuses(DataError, "16000 Hz"):
        read_fsdd(str(tmp_path))
    (tmp_path / "1_ann_0.wav").write_bytes(b"RIFF")
    with refuses(DataError, "whole wav"):
        read_fsdd(str(tmp_path))
    (tmp_path / "1_ann_0.wav").rename(tmp_path / "noise.wav")
    with refuses(DataError, "digit"):
        read_fsdd(str(tmp_path))


def test_real_log_mels_agree_with_the_published_ones(shared_data):
    with np.load(shared_data("fsdd") / "fsdd.npz") as arrays:
        audio, published = torch.from_numpy(arrays["audio"][::60]), arrays["logmel"][::60]
    # half precision near -13.8 is spaced by 2**-7
    np.testing.assert_allclose(log_mel(audio).numpy(), published.astype(np.float32), atol=2**-8 + 1e-4)


def test_real_pairs_agree_in_digit_and_speaker(shared_data):
    fsdd = shared_data("fsdd") / "fsdd.npz"
    columns = SOURCES["av-mnist"](mnist=str(shared_data("mnist")), fsdd=str(fsdd), subset=0.05).load()
    audio = columns.column("audio")
    with np.load(fsdd) as arrays:
        for name, mine in (("label", columns.label), ("client", columns.client), ("split", columns.split)):
            np.testing.assert_array_equal(arrays[name][audio.index], mine.numpy())
    assert (columns.column("image").shape, audio.shape) == ((1, 28, 28), (1, 32, 64))
    assert len(columns.client.unique()) == 6
    x = audio.take(columns.rows(0))
    assert x.mean().abs() < 1e-2
    assert x.std() == pytest.approx(1.0, abs=1e-2)


# ucihar ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def original(tmp_path):
    """The original folder layout with a few windows, and an .npz of the same."""
    draw = np.random.default_rng(0)
    files = {"acc": "body_acc", "gyro": "body_gyro", "total_acc": "total_acc"}
    sizes = {"train": 14, "test": 6}
    arrays = {name: [] for name in (*files, "label", "client", "split")}
    for code, (half, n) in enumerate(sizes.items()):
        signals = tmp_path / "UCI HAR Dataset" / half / "Inertial Signals"
        signals.mkdir(parents=True)
        label, subject = draw.integers(1, 7, n), draw.integers(1, 31, n)
        np.savetxt(signals.parent / f"y_{half}.txt", label, fmt="%d")
        np.savetxt(signals.parent / f"subject_{half}.txt", subject, fmt="%d")
        for name, stem in files.items():
            windows = draw.normal(0.3, 2.0, (n, 128, 3)).astype(np.float32)
            for axis, request_packet in enumerate("xyz"):
                np.savetxt(signals / f"{stem}_{request_packet}_{half}.txt", windows[:, :, axis], fmt="%16.9e")
            arrays[name].append(windows)
        for name, values in (("label", label - 1), ("client", subject - 1), ("split", np.full(n, code))):
            arrays[name].append(values)
    np.savez(tmp_path / "ucihar.npz", **{name: np.concatenate(parts) for name, parts in arrays.items()})
    return tmp_path


@pytest.mark.parametrize("normalise", ["none", "train", "window"])
def test_the_original_folder_equals_the_arrays_of_it(original, normalise):
    folder, packed = (
        SOURCES["ucihar"](path=str(original / part), normalise=normalise).load()
        for part in ("UCI HAR Dataset", "ucihar.npz")
    )
    rows = torch.arange(20)
    for name in ("acc", "gyro", "total_acc"):
        np.testing.assert_allclose(
            folder.column(name).take(rows).numpy(), packed.column(name).take(rows).numpy(), rtol=1e-5, atol=1e-6
        )
    for name in ("label", "client", "split"):
        assert torch.equal(getattr(folder, name), getattr(packed, name))


def test_window_normalisation_is_each_windows_own_z_score(original):
    with np.load(original / "ucihar.npz") as arrays:
        raw = arrays["acc"].astype(np.float64)
    expected = (raw - raw.mean(1, keepdims=True)) / (raw.std(1, keepdims=True) + 1e-5)
    columns = SOURCES["ucihar"](path=str(original), modalities=("acc",), normalise="window").load()
    np.testing.assert_allclose(columns.column("acc").take(torch.arange(20)).numpy(), expected, atol=1e-5)


def test_without_the_official_split_every_subject_trains(original):
    columns = SOURCES["ucihar"](path=str(original), split="none").load()
    assert (columns.split == 0).all()


def test_damaged_folders_and_wrong_options_are_refused(original):
    folder = original / "UCI HAR Dataset"
    y = folder / "train" / "y_train.txt"
    signal = folder / "train" / "Inertial Signals" / "body_gyro_y_train.txt"
    whole = signal.read_text()
    cases = [
        (signal, whole.replace("e", "?", 1), "is damaged"),
        (signal, "\n".join(line[:80] for line in whole.splitlines()), "expected 128"),
        (signal, "\n".join(whole.splitlines()[:3]), "differ in length"),
        (y, "1\n2\n", "has 20 rows"),
    ]
    for path, text, words in cases:
        kept = path.read_text()
        path.write_text(text)
        with refuses(DataError, words):
            SOURCES["ucihar"](path=str(folder)).load()
        path.write_text(kept)
    signal.unlink()
    with refuses(DataError, "body_gyro_y_train"):
        SOURCES["ucihar"](path=str(folder)).load()
    with refuses(RecipeError, "data.modalities: mean 'gyro'"):
        SOURCES["ucihar"](path=str(folder), modalities=("gyros",))
    with refuses(RecipeError, "data.normalise: [data] normalise"):
        SOURCES["ucihar"](path=str(folder), normalise="global")


def test_the_real_set_has_its_published_sizes_and_the_recipe_of_fedmultimodal_its_105_clients(shared_data):
    from polyfed.data import ClientsSpec, populate

    columns = SOURCES["ucihar"](path=str(shared_data("ucihar")), modalities=("acc", "gyro")).load()
    assert torch.bincount(columns.label).tolist() == [1722, 1544, 1406, 1777, 1906, 1944]
    spec = ClientsSpec(partition="by-client", shards=5, alpha=0.1, min_size=5, validation=0.2)
    population = populate(columns, spec, 8)
    assert population.num_clients == 105
    assert population.train.sizes.min() >= 5
    assert len(population.test_rows) == 2947
    assert len(population.train.rows) + len(population.validation_rows) == 7352
