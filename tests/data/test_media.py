"""Extractors against SciPy, Pillow, PyAV and transformers, used directly."""

import io

import numpy as np
import published
import pytest
import scipy.signal
import tiny_models
import torch
from PIL import Image as PillowImage

from polyfed.core.errors import DataError, RecipeError
from polyfed.data.media import (
    Clip,
    Ecg,
    Frames,
    Image,
    ImageEmbedding,
    LogMel,
    LogSpectrogram,
    SensorWindow,
    StftMagnitude,
    TextEmbedding,
    Tokens,
)
from polyfed.data.media import clip as clip_module
from polyfed.data.media.audio import read_wave, tiled
from refusals import refuses


@pytest.fixture
def sound(tmp_path):
    def make(seconds=0.7, rate=16_000, seed=1):
        path = tmp_path / f"{seconds}-{rate}-{seed}.wav"
        published.sound_file(path, seconds, rate, seed)
        return Clip.at(path)

    return make


# sound -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "frames"), [(3.0, 299), (10.0, 1004)])
def test_the_spectrogram_of_cmsfed_is_that_of_scipy(seconds, frames, sound):
    clip = sound(1.3)
    wave = np.tile(read_wave(clip, 16_000), 10)[: int(seconds * 16_000)].clip(-1, 1)
    _, _, power = scipy.signal.spectrogram(wave.astype(np.float64), 16_000, nperseg=512, noverlap=353)
    logs = np.log(power + 1e-7)
    found = LogSpectrogram(seconds=seconds)(clip)
    assert found.shape == (1, 257, frames)
    np.testing.assert_allclose(found[0], (logs - logs.mean()) / (logs.std() + 1e-9), atol=2e-4)
    assert abs(found.mean()) < 1e-4
    assert found.std() == pytest.approx(1, abs=1e-4)


def test_the_spectrogram_of_fmml_is_that_of_scipy(sound):
    clip = sound(1.1, rate=22_050)
    wave = np.tile(read_wave(clip, 22_050), 3)[:66_150].clip(-1, 1).astype(np.float64)
    options = {"nperseg": 512, "noverlap": 512 - 353, "boundary": "even", "padded": False}
    _, _, stft = scipy.signal.stft(wave, 22_050, "hann", **options)
    magnitude = np.abs(stft) * scipy.signal.get_window("hann", 512).sum()  # SciPy divides by the window's sum
    found = StftMagnitude()(clip)
    assert found.shape == (1, 257, 188)
    np.testing.assert_allclose(found[0], np.log(magnitude + 1e-7), atol=1e-4)


def test_the_log_mel_is_a_filter_bank_over_scipys_transform(sound):
    clip = sound(0.5)
    found = LogMel(frames=60)(clip)
    wave = read_wave(clip, 16_000).astype(np.float64)
    starts = range(0, len(wave) - 399, 160)
    window = scipy.signal.get_window("hamming", 400, fftbins=False)
    power = np.array([np.abs(np.fft.rfft(wave[s : s + 400] * window, 512)) ** 2 for s in starts])
    hertz = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 8000 / 700), 82) / 2595) - 1)
    bins = np.arange(257) * 16_000 / 512
    bank = np.array([np.interp(bins, hertz[b : b + 3], [0, 1, 0]) for b in range(80)])
    assert len(power) == 48
    np.testing.assert_allclose(found[:48], np.log(power @ bank.T + 1e-10), atol=1e-4)
    assert (found[48:] == 0).all()


def test_a_wave_is_resampled_mixed_to_mono_and_tiled(tmp_path):
    time = np.arange(44_100) / 44_100
    left, right = np.sin(2 * np.pi * 300 * time), np.sin(2 * np.pi * 700 * time)
    content = io.BytesIO()
    import soundfile

    soundfile.write(content, 0.4 * np.stack([left, right], 1), 44_100, format="WAV", subtype="FLOAT")
    found = read_wave(Clip.of("two tones", content.getvalue()), 16_000)
    place = np.arange(16_000) / 16_000
    expected = 0.2 * (np.sin(2 * np.pi * 300 * place) + np.sin(2 * np.pi * 700 * place))
    np.testing.assert_allclose(found[100:-100], expected[100:-100], atol=2e-3)
    np.testing.assert_array_equal(tiled(np.array([0.5, 2.0], np.float32), 5), np.float32([0.5, 1, 0.5, 1, 0.5]))


def test_the_sound_of_a_video_is_cut_to_its_part(tmp_path):
    published.film(tmp_path / "a.mp4", 3, sound=True)
    found = read_wave(Clip.at(tmp_path / "a.mp4", 1.0, 2.0), 16_000)
    assert len(found) == 16_000
    spectrum = np.abs(np.fft.rfft(found))
    assert spectrum.argmax() == 440
    with refuses(DataError, "holds no sound"):
        read_wave(Clip.at(tmp_path / "a.mp4", 9.0, 10.0), 16_000)


def test_what_is_not_sound_is_refused(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF, but no more")
    with refuses(DataError, "read as sound"):
        read_wave(Clip.at(tmp_path / "a.wav"), 16_000)


# frames and images -------------------------------------------------------------------------------------------------


@pytest.fixture
def film(tmp_path):
    published.film(tmp_path / "a.mp4", 4, fps=4)  # brightness 10 + 15 i
    return Clip.at(tmp_path / "a.mp4")


def brightness(frames):
    return np.round((frames.reshape(3, frames.shape[1], -1).mean((0, 2)) - 10) / 15).astype(int).tolist()


def test_candidates_are_the_first_frames_of_every_second(film):
    assert brightness(Frames(count=4, pick="even", size=8)(film)) == [0, 4, 8, 12]
    assert brightness(Frames(count=2, pick="first", size=8)(film)) == [0, 4]
    assert brightness(Frames(count=1, pick="even", size=8)(film)) == [8]


def test_a_part_of_a_video_gives_its_frames_and_repeats_when_there_are_few(film):
    part = Clip.at(film.path, 1.0, 3.0)
    assert brightness(Frames(count=4, least=1, size=8)(part)) == [4, 4, 8, 8]
    assert brightness(Frames(count=3, least=3, size=8)(part)) == [5, 8, 10]


def test_random_frames_are_distinct_in_order_and_the_same_again(film):
    extractor = Frames(count=2, pick="random", size=8)
    first = extractor(film)
    np.testing.assert_array_equal(first, extractor(film))
    assert sorted(set(brightness(first))) == brightness(first)


def test_an_image_is_scaled_and_its_middle_cut_out(tmp_path):
    published.picture(tmp_path / "a.png", size=(80, 60))
    opened = PillowImage.open(tmp_path / "a.png")
    scaled = opened.resize((round(80 * 32 * 256 / 224 / 60), round(32 * 256 / 224)), PillowImage.Resampling.BILINEAR)
    left, top = (scaled.width - 32) // 2, (scaled.height - 32) // 2
    expected = np.asarray(scaled)[top : top + 32, left : left + 32].transpose(2, 0, 1)
    np.testing.assert_array_equal(Image(size=32)(Clip.at(tmp_path / "a.png")), expected)
    assert Image(size=8, fit="stretch")(Clip.at(tmp_path / "a.png")).shape == (3, 8, 8)


# sensors -----------------------------------------------------------------------------------------------------------


def test_a_sensor_window_is_cut_and_normalised_by_itself(tmp_path):
    table = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    np.savetxt(tmp_path / "a.csv", table, delimiter=",")
    found = SensorWindow(columns=(1, 3), width=4, stride=2)(Clip.at(tmp_path / "a.csv", 4, 12))
    part = table[4:12:2, [1, 3]]
    np.testing.assert_allclose(found, (part - part.mean(0)) / (part.std(0) + 1e-5), atol=1e-4)


def test_gain_and_baseline_of_an_electrocardiogram(tmp_path):
    counts = np.array([[10, 100], [20, 300]], "<i2")
    (tmp_path / "a.dat").write_bytes(counts.tobytes())
    head = ["# a comment", "a 2 100 2", "a.dat 16 200(10)/mV 16 0 10 0 0 II", "a.dat 16 100/mV 16 0 100 0 0 V1"]
    (tmp_path / "a.hea").write_text("\n".join(head))
    found = Ecg(leads=("v1", "II"), samples=2, normalise="none")(Clip.at(tmp_path / "a.dat"))
    np.testing.assert_allclose(found, [[1.0, 0.0], [3.0, 0.05]])
    with refuses(DataError, "2 samples"):
        Ecg(leads=("II",), samples=3)(Clip.at(tmp_path / "a.dat"))


# embeddings --------------------------------------------------------------------------------------------------------


def test_a_text_embedding_is_the_mean_or_the_first_token_of_the_last_layer(tmp_path):
    from transformers import AutoModel, AutoTokenizer

    folder = str(tiny_models.text_model(tmp_path / "text"))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = model(**tokenizer(["the cat", "a user the cat"], padding=True, return_tensors="pt")).last_hidden_state
    clip = Clip.of("row", "the cat")
    np.testing.assert_allclose(TextEmbedding(model=folder)(clip), states[0, :4].mean(0), atol=1e-5)
    np.testing.assert_allclose(TextEmbedding(model=folder, pool="cls")(clip), states[0, 0], atol=1e-5)
    assert Tokens(model=folder, tokens=6)(clip).tolist() == [2, 5, 6, 3, 0, 0]


def test_an_image_embedding_pools_what_the_model_gives(tmp_path):
    from transformers import AutoModel

    published.picture(tmp_path / "a.png", size=(36, 36))
    clip = Clip.at(tmp_path / "a.png")
    pixels = torch.from_numpy(Image(size=32)(clip)).float()[None] / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    pooled = str(tiny_models.image_model(tmp_path / "conv"))
    patches = str(tiny_models.patch_model(tmp_path / "patches"))
    with torch.no_grad():
        first = AutoModel.from_pretrained(pooled).eval()(pixel_values=pixels).pooler_output[0]
        second = AutoModel.from_pretrained(patches).eval()(pixel_values=pixels).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(ImageEmbedding(model=pooled, size=32)(clip), first, atol=1e-5)
    np.testing.assert_allclose(ImageEmbedding(model=patches, size=32)(clip), second, atol=1e-5)


def test_a_model_that_is_not_there_is_named_with_the_command_that_fetches_it(tmp_path):
    with refuses(RecipeError, "hf download"):
        TextEmbedding(model=str(tmp_path / "none"))(Clip.of("row", "the cat"))


@pytest.mark.parametrize(
    ("module", "extra"), [("soundfile", "audio"), ("av", "video"), ("PIL.Image", "image"), ("datasets", "text")]
)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(module, extra, monkeypatch):
    def refuse(name):
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(clip_module, "import_module", refuse)
    with refuses(RecipeError, f"pip install 'polyfed[{extra}]'"):
        clip_module.optional(module, extra)


def test_importing_the_package_imports_no_optional_package():
    import subprocess
    import sys

    packages = ("soundfile", "av", "PIL", "transformers", "datasets")
    code = f"import sys, polyfed; print([m for m in {packages} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
