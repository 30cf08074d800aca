"""Features that are extracted again into the same folder: nothing of the earlier extraction may remain."""

from dataclasses import replace

import numpy as np
import published
import pytest
import tiny_models
import torch

from polyfed.core.errors import DataError
from polyfed.data.features.extraction import Extraction
from polyfed.data.features.listing import Listing, Sample
from polyfed.data.features.prepare import prepare
from polyfed.data.media import Clip, Values
from polyfed.data.sources import SOURCES, Npz
from refusals import refuses

EXTRACTORS = {"sound": Values(), "text": Values()}


def listing(*, without_text):
    """Rows whose numbers are their row number; some of them lack the modality `text`."""
    samples = []
    for row in range(4):
        media = {name: Clip.of(f"{name} of row {row}", [float(row), 1.0]) for name in EXTRACTORS}
        if row in without_text:
            del media["text"]
        samples.append(Sample(f"row {row}", row % 2, media))
    return Listing(samples, ("even", "odd"))


def extract(target, given):
    target.mkdir(exist_ok=True)
    return Extraction(given, EXTRACTORS, target).run("mine", {})


def test_marks_of_missing_rows_go_when_no_row_lacks_the_modality_any_more(tmp_path):
    first = extract(tmp_path / "out", listing(without_text={1, 3}))
    assert first.columns(EXTRACTORS).present["text"].tolist() == [True, False, True, False]
    second = extract(tmp_path / "out", listing(without_text=set()))
    assert second.columns(EXTRACTORS).present == {}
    assert Npz(path=str(tmp_path / "out"), modalities=("sound", "text")).load().present == {}
    assert "text_present.npy" not in second.arrays


def test_marks_of_missing_rows_do_not_outlive_a_stopped_preparation(tmp_path):
    """It stopped after the marks were written and before the manifest was."""
    whole = extract(tmp_path / "out", listing(without_text={1}))
    (tmp_path / "out" / "manifest.json").unlink()
    assert (whole.folder / "text_present.npy").exists()
    again = extract(tmp_path / "out", listing(without_text=set()))
    assert again.columns(EXTRACTORS).present == {}
    assert Npz(path=str(tmp_path / "out"), modalities=("sound", "text")).load().present == {}


def test_an_array_that_the_manifest_does_not_list_is_not_read(tmp_path):
    made = extract(tmp_path / "out", listing(without_text=set()))
    np.save(tmp_path / "out" / "text_present.npy", np.array([True, False, False, False]))
    assert made.columns(EXTRACTORS).present == {}


def test_a_transcript_that_was_added_later_is_used(tmp_path):
    """The same through a published data set, by `prepare` and by the source's own cache."""
    root, table, model, cache = (tmp_path / name for name in ("msp", "said.csv", "model", "cache"))
    published.msp_improv(root)
    tiny_models.text_model(model)
    turns = [file.stem for file in sorted(root.glob("Audio/*/*/[ST]/*.wav"))]
    whole = "".join(["utt,text\n", *(f"{turn},the cat\n" for turn in turns)])
    table.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    options = {"modalities": ("audio", "text"), "transcripts": str(table), "text_model": str(model), "frames": 30}
    source = SOURCES["msp-improv"](path=str(root), cache=str(cache), **options)
    prepare("msp-improv", root, tmp_path / "out", **options)
    assert "text" in source.load().present
    table.write_text(whole)
    prepare("msp-improv", root, tmp_path / "out", **options)
    assert source.load().present == {}
    for folder in (tmp_path / "out", next(cache.iterdir())):
        assert Npz(path=str(folder), modalities=("audio", "text")).load().present == {}


@pytest.fixture
def crema(tmp_path):
    root = tmp_path / "crema"
    for actor in range(5):
        published.sound_file(root / "AudioWAV" / f"{1001 + actor}_DFA_HAP_XX.wav", 0.3, seed=actor)
    return root


def test_a_modality_that_is_no_longer_extracted_leaves_the_folder(tmp_path):
    extract(tmp_path / "out", listing(without_text=set()))
    (tmp_path / "out" / "notes.npy").write_bytes(b"the user's own")
    only_sound = listing(without_text={0, 1, 2, 3})
    work = Extraction(only_sound, {"sound": EXTRACTORS["sound"]}, tmp_path / "out")
    work.run("mine", {})
    assert {file.stem for file in (tmp_path / "out").glob("*.npy")} == {
        *("id", "label", "split", "group", "client", "sample", "label_name", "sound", "notes")
    }


def test_preparing_again_mends_a_folder_whose_arrays_are_missing_or_cut_short(crema, tmp_path):
    options = {"modalities": ("audio",), "split": "actors"}
    made = prepare("crema-d", crema, tmp_path / "out", **options)
    values = np.load(made.folder / "audio.npy")
    for harm in (lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-100])):
        harm(made.folder / "audio.npy")
        with refuses(DataError, "missing or cut"):
            SOURCES["crema-d"](path=str(made.folder), **options).load()
        prepare("crema-d", crema, tmp_path / "out", **options)
        np.testing.assert_array_equal(np.load(made.folder / "audio.npy"), values)


def test_a_cache_whose_array_is_missing_is_made_again(crema, tmp_path):
    source = SOURCES["crema-d"](path=str(crema), cache=str(tmp_path / "cache"), modalities=("audio",), split="actors")
    first = source.load().column("audio").take(torch.arange(5))
    next((tmp_path / "cache").iterdir()).joinpath("audio.npy").unlink()
    assert torch.equal(source.load().column("audio").take(torch.arange(5)), first)


def test_renamed_classes_are_a_change(tmp_path):
    given = listing(without_text=set())
    assert replace(given, class_names=("even", "uneven")).fingerprint() != given.fingerprint()
