"""The parts of the samples of a PyTorch dataset: only the named keys are modalities, and facts of a row never are."""

import pytest
import torch
from pairs import AUDIO, HAS_TEXT, LABEL, ROWS, TEXT, WHO
from torch.utils.data import Dataset

import polyfed
from polyfed.core.errors import DataError, PolyfedError
from polyfed.data.reading.objects import Given, table_of
from refusals import refuses


class Samples(Dataset):
    """A dataset whose samples a function makes from their row."""

    def __init__(self, make, rows=range(ROWS)):
        self.make, self.rows = make, list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.make(self.rows[number])


def keyed(row):
    held = {"audio": torch.from_numpy(AUDIO[row]), "text": TEXT[row], "index": torch.tensor(row)}
    return held | {"label": int(LABEL[row]), "who": WHO[row], "part": "test" if row % 4 == 0 else "train"}


def inside(row):
    held = keyed(row)
    return held, held.pop("label")


NAMED = {"clients": "who", "split": "part", "modalities": ["text", "audio"]}


@pytest.mark.parametrize("make", [keyed, inside])
def test_only_the_named_keys_are_modalities(make):
    found = table_of(Samples(make), Given(**NAMED))
    assert list(found.modalities) == ["text", "audio"]
    assert torch.equal(found.column("text").values, torch.from_numpy(TEXT))
    assert found.label.tolist() == LABEL.tolist()
    assert found.client.tolist() == [row % 4 for row in range(ROWS)]
    assert found.split.tolist() == [int(row % 4 == 0) for row in range(ROWS)]
    by_split = table_of({"train": Samples(make), "test": Samples(make, range(8))}, Given(**NAMED | {"split": None}))
    assert list(by_split.modalities) == ["text", "audio"]
    assert len(by_split.client) == ROWS + 8


def test_keys_of_facts_are_no_modalities_without_named_modalities_either():
    assert list(table_of(Samples(keyed), Given(clients="who", split="part")).modalities) == ["audio", "text", "index"]


def test_a_sample_may_lack_a_named_key():
    def some(row):
        return {name: cell for name, cell in keyed(row).items() if name != "text" or HAS_TEXT[row]}

    found = table_of(Samples(some), Given(modalities=["text", "audio"]))
    assert torch.equal(found.present["text"], torch.from_numpy(HAS_TEXT))


def test_a_task_without_labels_reads_named_keys_too():
    task = {"name": "retrieval"}
    for make in (inside, lambda row: {"audio": AUDIO[row], "text": TEXT[row], "row": row}):
        made = polyfed.make_recipe(Samples(make), modalities=["audio", "text"], task=task)
        assert list(made.data.load().modalities) == ["audio", "text"]


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        (keyed, {"modalities": ["audoi"]}, "modality 'audoi'"),
        (inside, {"modalities": ["audoi"]}, "modality 'audoi'"),
        (keyed, {"modalities": ["audio", "label"]}, "'label' is the"),
        (keyed, {"modalities": ["who"], "clients": "who"}, "'who' is the"),
        (keyed, {"modalities": {"audio": "a"}}, "modality 'a'"),
        (keyed, {"modalities": "audio"}, "modalities = 'audio'"),
        (keyed, {"modalities": ["audio", "audio"]}, "distinct names"),
        (keyed, {"labels": "lable"}, "no 'lable'"),
        (keyed, {"clients": "speaker"}, "no 'speaker'"),
        (
            lambda row: (AUDIO[row], 1),
            {"clients": "who"},
            "names a key",
        ),
        (lambda row: AUDIO[row], {}, "a ndarray"),
        (lambda row: (AUDIO[row],), {}, "tuple"),
        (lambda row: (AUDIO[row], [0] * (1 + row % 2)), {}, "differ in length"),
    ],
)
def test_samples_in_other_forms_are_refused(make, given, words):
    with refuses(PolyfedError, words):
        table_of(Samples(make), Given(**given))


def test_a_sample_without_the_key_of_its_label_is_named():
    with refuses(DataError, "no 'label'"):
        table_of(Samples(lambda row: {"audio": AUDIO[row]} | ({} if row == 7 else {"label": 1})), Given())
