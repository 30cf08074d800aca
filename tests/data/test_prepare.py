"""Preparing features: continued, cached by content and settings, with checksums; corrupt files skipped or fatal."""

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
import torch

from polyfed.core.errors import DataError, RecipeError
from polyfed.data import SOURCES
from polyfed.data.columns import TEST
from polyfed.data.features.prepare import prepare
from polyfed.data.features.prepared import Prepared
from refusals import refuses

OPTIONS = {"modalities": ("audio",), "split": "actors"}


@pytest.fixture
def crema(tmp_path):
    root = tmp_path / "crema"
    for actor in range(5):
        for i, label in enumerate(("NEU", "HAP", "SAD")):
            published.sound_file(root / "AudioWAV" / f"{1001 + actor}_DFA_{label}_XX.wav", 0.3, seed=3 * actor + i)
    return root


class Heard(list):
    def __call__(self, event, **facts):
        self.append((event, facts))

    def last(self, event):
        return [facts for name, facts in self if name == event][-1]


def contents(folder):
    return {file.name: file.read_bytes() for file in Path(folder).glob("*.npy")}


def test_the_folder_holds_arrays_that_npz_and_the_source_read(crema, tmp_path):
    made = prepare("crema-d", crema, tmp_path / "out", workers=2, **OPTIONS)
    assert made.num_rows == 15
    generic = SOURCES["npz"](path=str(made.folder), modalities=("audio",)).load()
    own = SOURCES["crema-d"](path=str(made.folder), **OPTIONS).load()
    rows = torch.arange(15)
    assert torch.equal(generic.column("audio").take(rows), own.column("audio").take(rows))
    assert generic.class_names == own.class_names
    assert torch.equal(generic.client, own.client)


def test_columns_are_memory_mapped(crema, tmp_path):
    made = prepare("crema-d", crema, tmp_path / "out", **OPTIONS)
    values = SOURCES["crema-d"](path=str(made.folder), **OPTIONS).load().column("audio").values
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert str(made.folder / "audio.npy") in mapped.read_text()
    assert values.shape == (15, 1, 257, 299)


def test_the_result_does_not_depend_on_the_number_of_workers(crema, tmp_path):
    one = prepare("crema-d", crema, tmp_path / "one", workers=1, **OPTIONS)
    four = prepare("crema-d", crema, tmp_path / "four", workers=4, **OPTIONS)
    assert contents(one.folder) == contents(four.folder)
    assert one.arrays == four.arrays


def test_the_manifest_has_the_checksum_of_every_array(crema, tmp_path):
    made = prepare("crema-d", crema, tmp_path / "out", **OPTIONS)
    manifest = json.loads((made.folder / "manifest.json").read_text())
    assert manifest["arrays"].keys() == contents(made.folder).keys()
    for name, content in contents(made.folder).items():
        assert manifest["arrays"][name]["sha256"] == hashlib.sha256(content).hexdigest()
    assert manifest["classes"] == {"NEU": 5, "HAP": 5, "SAD": 5, "FEA": 0, "DIS": 0, "ANG": 0}
    assert manifest["published"]["NEU"] == 1087


def test_a_second_call_does_nothing_and_a_changed_file_is_the_only_one_read_again(crema, tmp_path):
    made = prepare("crema-d", crema, tmp_path / "out", **OPTIONS)
    before = contents(made.folder)
    heard = Heard()
    prepare("crema-d", crema, tmp_path / "out", listener=heard, **OPTIONS)
    assert [name for name, _ in heard] == ["prepare-unchanged"]
    published.sound_file(crema / "AudioWAV" / "1002_DFA_NEU_XX.wav", 0.4, seed=99)
    prepare("crema-d", crema, tmp_path / "out", listener=heard, **OPTIONS)
    assert heard.last("prepare-finished")["cached"] == 14
    assert contents(made.folder) != before


def test_other_settings_are_refused_in_the_same_folder(crema, tmp_path):
    prepare("crema-d", crema, tmp_path / "out", **OPTIONS)
    with refuses(DataError, "made by LogSpectrogram"):
        prepare("crema-d", crema, tmp_path / "out", spectrogram="257x188", **OPTIONS)
    with refuses(DataError, "split = 'actors'"):
        SOURCES["crema-d"](path=str(tmp_path / "out"), modalities=("audio",)).load()
    with refuses(DataError, "features of 'visual'"):
        SOURCES["crema-d"](path=str(tmp_path / "out"), split="actors").load()
    with refuses(DataError, "holds features"):
        SOURCES["ave"](path=str(tmp_path / "out")).load()


def test_a_stopped_run_goes_on_where_it_was(crema, tmp_path):
    def stop(event, **facts):
        if event == "clip-done" and facts["done"] == 6:
            raise KeyboardInterrupt  # as Ctrl-C would, between two clips

    with pytest.raises(KeyboardInterrupt):
        prepare("crema-d", crema, tmp_path / "out", listener=stop, **OPTIONS)
    assert Prepared.read(tmp_path / "out") is None
    heard = Heard()
    prepare("crema-d", crema, tmp_path / "out", listener=heard, **OPTIONS)
    assert heard.last("prepare-finished")["cached"] >= 6
    whole = prepare("crema-d", crema, tmp_path / "whole", **OPTIONS)
    assert contents(tmp_path / "out") == contents(whole.folder)


def test_a_damaged_array_is_seen_and_made_again(crema, tmp_path):
    made = prepare("crema-d", crema, tmp_path / "out", **OPTIONS)
    before = contents(made.folder)
    content = bytearray(before["audio.npy"])
    content[-5] ^= 1
    (made.folder / "audio.npy").write_bytes(content)
    assert made.damaged() == ["audio.npy"]
    prepare("crema-d", crema, tmp_path / "out", **OPTIONS)
    assert contents(made.folder) == before
    (made.folder / "audio.npy").write_bytes(content[:-100])
    with refuses(DataError, "missing or cut"):
        SOURCES["crema-d"](path=str(made.folder), **OPTIONS).load()


def test_corrupt_media_is_skipped_by_name_or_fatal(crema, tmp_path):
    empty = crema / "AudioWAV" / "1003_DFA_SAD_XX.wav"
    published.empty_sound(empty)
    with refuses(DataError, "no sound"):
        prepare("crema-d", crema, tmp_path / "out", **OPTIONS)
    heard = Heard()
    made = prepare("crema-d", crema, tmp_path / "out", on_corrupt="skip", listener=heard, **OPTIONS)
    assert made.num_rows == 14
    assert [entry["sample"] for entry in made.skipped] == ["1003_DFA_SAD_XX"]
    assert str(empty) in heard.last("clip-skipped")["reason"]
    assert heard.last("prepare-finished")["skipped"] == 1


def test_progress_counts_every_clip_once(crema, tmp_path):
    heard = Heard()
    prepare("crema-d", crema, tmp_path / "out", workers=3, listener=heard, **OPTIONS)
    done = [facts["done"] for name, facts in heard if name == "clip-done"]
    assert done == list(range(1, 16))
    assert heard.last("clip-done")["total"] == heard.last("prepare-started")["total"] == 15


def test_several_workers_work_at_the_same_time(crema, tmp_path, monkeypatch):
    from polyfed.data.media import LogSpectrogram

    meeting = threading.Barrier(2, timeout=20)
    original, met = LogSpectrogram.__call__, threading.Event()

    def meet(self, clip):
        if not met.is_set():
            meeting.wait()
            met.set()
        return original(self, clip)

    monkeypatch.setattr(LogSpectrogram, "__call__", meet)
    prepare("crema-d", crema, tmp_path / "out", workers=2, **OPTIONS)
    assert met.is_set()


def test_a_source_extracts_once_into_its_cache_and_notices_a_change(crema, tmp_path):
    source = SOURCES["crema-d"](path=str(crema), cache=str(tmp_path / "cache"), **OPTIONS)
    source.load()
    (folder,) = (tmp_path / "cache").iterdir()
    stamp = (folder / "audio.npy").stat().st_mtime_ns
    source.load()
    assert (folder / "audio.npy").stat().st_mtime_ns == stamp
    (crema / "AudioWAV" / "1003_DFA_SAD_XX.wav").unlink()
    assert len(source.load()) == 14


def test_samples_of_another_shape_are_named(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [1.0]], "label": [0, 1]})
    table.save_to_disk(str(tmp_path / "hf"))
    with refuses(DataError, "shape (1,)"):
        prepare("hf", tmp_path / "hf", tmp_path / "out", modalities={"x": "values"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("crema", "a", "b"), "multiview"),
        (("npz", "a", "b"), "preparation"),
    ],
)
def test_sources_that_cannot_be_prepared_are_refused(arguments, words):
    with refuses(RecipeError, words):
        prepare(*arguments)


def test_unknown_options_are_refused(crema, tmp_path):
    with refuses(RecipeError, "spectrogram"):
        prepare("crema-d", crema, tmp_path / "out", frame=3)
    with refuses(RecipeError, "needs the option"):
        prepare("hf", crema, tmp_path / "out")
    with refuses(RecipeError, "workers: least 1"):
        prepare("crema-d", crema, tmp_path / "out", workers=0)


def test_numbers_survive_bit_for_bit(tmp_path):
    import datasets

    values = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    rows = {"x": values.tolist(), "label": [0, 1, 0, 1, 0]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "hf"))
    made = prepare("hf", tmp_path / "hf", tmp_path / "out", modalities={"x": "values"})
    np.testing.assert_array_equal(np.load(made.folder / "x.npy"), values)


def test_a_data_set_without_a_split_gets_a_test_set_of_every_class(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra polyfed[text] is not installed")
    rows = {"x": [[float(n)] for n in range(40)], "label": [n % 4 for n in range(40)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "one"))
    given = datasets.Dataset.from_dict(rows).train_test_split(0.5, seed=1)
    given.save_to_disk(str(tmp_path / "two"))

    def loaded(name: str, **options: Any) -> Any:
        options = {"modalities": {"x": "values"}, "cache": str(tmp_path / "cache")} | options
        return SOURCES["hf"](path=str(tmp_path / name), **options).load()  # type: ignore[call-arg]

    drawn = loaded("one", test_share=0.3)
    assert torch.bincount(drawn.label[drawn.rows(TEST)]).tolist() == [3, 3, 3, 3]
    assert any("a share of 0.3 of the rows is drawn as the test set" in note for note in drawn.notes)
    assert not torch.equal(drawn.split, loaded("one", test_share=0.3, seed=1).split)
    assert len(loaded("one", test_share=0.0).rows(TEST)) == 0
    assert len(loaded("two").rows(TEST)) == 20
    assert not loaded("two").notes
