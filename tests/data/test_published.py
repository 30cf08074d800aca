"""Every published data set: a small folder in its true layout goes through a federated round; broken ones are named."""

import dataclasses
import shutil

import numpy as np
import published
import pytest
import tiny_models
import torch

import polyfed
from polyfed.algorithms import FedAvg
from polyfed.core.errors import DataError, RecipeError
from polyfed.data import SOURCES, ClientsSpec
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.model import Mlp, ModelSpec
from refusals import refuses

CASES = {
    # name: builder, options, shapes, rows (train, test, validation), classes, natural clients
    "iemocap": ("iemocap", {"frames": 40}, {"audio": (40, 80), "text": (16,)}, (20, 5, 0), [5, 5, 5, 10], 10),
    "msp-improv": ("msp_improv", {"frames": 30}, {"audio": (30, 80)}, (30, 6, 0), [12, 12, 0, 12], 12),
    "food101": ("food101", {"size": 32}, {"image": (1280,), "text": (16,)}, (27, 15, 3), [15, 15, 15], 0),
    "crema-d": (
        "crema_d",
        {"size": 16},
        {"audio": (1, 257, 299), "visual": (3, 3, 16, 16)},
        (12, 3, 0),
        [3, 2, 3, 2, 3, 2],
        5,
    ),
    "ave": ("ave", {"size": 16}, {"audio": (1, 257, 1004), "visual": (3, 4, 16, 16)}, (5, 1, 1), [4, 3], 0),
    "ku-har": ("ku_har", {}, {"acc": (128, 3), "gyro": (128, 3)}, (40, 10, 0), [10, 5, 10, 5, 5, 5, 5, 5], 5),
    "meld": (
        "meld",
        {"frames": 30, "min_utterances": 1},
        {"audio": (30, 80), "text": (16,)},
        (6, 6, 6),
        [6, 3, 6, 3],
        2,
    ),
    "hateful-memes": (
        "hateful_memes",
        {"image": "pixels", "size": 16},
        {"image": (3, 16, 16), "text": (16,)},
        (6, 3, 2),
        [6, 5],
        0,
    ),
    "crisismmd": (
        "crisismmd",
        {"image": "pixels", "size": 16, "text": "tokens"},
        {"image": (3, 16, 16), "text": (64,)},
        (6, 3, 2),
        [4, 0, 4, 0, 0, 3, 0, 0],
        0,
    ),
    "ptb-xl": ("ptb_xl", {"min_records": 1}, {"limb": (1000, 6), "chest": (1000, 6)}, (10, 1, 1), [6, 6, 0, 0, 0], 2),
    "hf": (
        "hugging_face",
        {
            "modalities": {"image": "image", "text": "text", "sensor": "values"},
            "columns": {"image": "picture", "text": "caption"},
            "label": "kind",
            "client": "who",
            "size": 16,
        },
        {"image": (3, 16, 16), "text": (16,), "sensor": (3,)},
        (6, 3, 0),
        [5, 4],
        2,
    ),
}
MODEL_OPTION = {"hf": "model", "ku-har": None, "ptb-xl": None, "crema-d": None, "ave": None, "msp-improv": None}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Builds each data set and model once."""
    root, made = tmp_path_factory.mktemp("shelf"), {}

    def get(name):
        if name not in made:
            made[name] = root / name
            maker = getattr(tiny_models, name, None) or getattr(published, name)
            maker(made[name])
        return made[name]

    return get


@pytest.fixture
def source(shelf, tmp_path):
    def make(name, root=None, **changes):
        builder, options, shapes, *_ = CASES[name]
        options = dict(options)
        model = MODEL_OPTION.get(name, "text_model")
        if model:
            options[model] = str(shelf("text_model"))
        if shapes.get("image") == (1280,):
            options["image_model"] = str(shelf("image_model"))
        options |= changes
        return SOURCES[name](path=str(root or shelf(builder)), cache=str(tmp_path / "cache"), **options)

    return make


def one_round(data, natural):
    clients = ClientsSpec(partition="by-client") if natural else ClientsSpec(num=2)
    columns = data.load()
    model = ModelSpec(embedding=4, encoders={name: Mlp() for name in columns.modalities})
    recipe = Recipe(
        data=data, algorithm=FedAvg(), model=model, clients=clients, rounds=1, engine=EngineSpec(name="sequential")
    )
    return columns, polyfed.run(recipe)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_in_the_true_layout_goes_through_a_round(name, source):
    _, _, shapes, rows, classes, natural = CASES[name]
    columns, run = one_round(source(name), natural)
    assert {m: column.shape for m, column in columns.modalities.items()} == shapes
    assert tuple(int((columns.split == code).sum()) for code in (0, 1, 2)) == rows
    assert torch.bincount(columns.label, minlength=columns.num_classes).tolist() == classes
    assert (0 if columns.client is None else len(columns.client.unique())) == natural
    assert len(columns.ids.unique()) == len(columns)
    assert np.isfinite(run.result["metrics"]["global"]["loss"])


@pytest.mark.parametrize("name", ["iemocap", "msp-improv", "meld"])
def test_published_counts_are_those_of_the_paper(name):
    totals = {"iemocap": 2943, "msp-improv": 4580, "meld": 13708}
    module = __import__(SOURCES[name].__module__, fromlist=["COUNTS"])
    assert sum(module.COUNTS.values()) == totals[name]


def test_crema_counts_are_all_clips_of_the_set():
    from polyfed.data.sources.speech.crema_d import COUNTS

    # in order NEU HAP SAD FEA DIS ANG, see docs/data.md
    train, test = (973, 1148, 1131, 1138, 1142, 1166), (114, 123, 140, 133, 129, 105)
    assert list(COUNTS.values()) == [a + b for a, b in zip(train, test, strict=True)]
    assert (sum(train), sum(test), sum(COUNTS.values())) == (6698, 744, 7442)


# splits ------------------------------------------------------------------------------------------------------------


def test_a_session_of_iemocap_is_its_test_set_without_new_features(source):
    first, second = (source("iemocap", test_session=n, modalities=("audio",)).load() for n in (1, 2))
    assert not torch.equal(first.split, second.split)
    held = set(first.client[first.split == 1].tolist())
    assert len(held) == 2
    assert not held & set(first.client[first.split == 0].tolist())


def test_iemocap_takes_the_speaker_from_the_turn_and_standardises_him(source):
    columns = source("iemocap", modalities=("audio",)).load()
    x = columns.column("audio").take(torch.arange(len(columns))).double().numpy()
    for client in columns.client.unique():
        frames = x[columns.client.numpy() == int(client)].reshape(-1, 80)
        frames = frames[(frames != 0).any(1)]
        np.testing.assert_allclose(frames.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(frames.std(0), 1, atol=1e-3)


def test_crema_reads_the_released_split_or_keeps_actors_apart(source):
    apart = source("crema-d", split="actors", modalities=("audio",)).load()
    assert len(set(apart.client[apart.split == 1].tolist())) == 1
    assert not set(apart.client[apart.split == 1].tolist()) & set(apart.client[apart.split == 0].tolist())


def test_crema_has_the_spectrogram_of_fmml_too(source):
    assert source("crema-d", spectrogram="257x188", modalities=("audio",)).load().column("audio").shape == (1, 257, 188)


def test_food_101_has_titles_or_pages_and_leaves_out_images_without_text(source, shelf):
    pages, titles = source("food101").load(), source("food101", text_source="title").load()
    assert (len(pages), len(titles)) == (45, 48)


def test_meld_leaves_out_speakers_with_few_utterances(source):
    assert (source("meld", min_utterances=4, modalities=("text",)).load().split == 3).all()


def test_ku_har_has_all_activities_if_asked_and_never_subject_1101(source):
    columns = source("ku-har", activities=18, min_windows=1).load()
    assert columns.num_classes == 18
    assert len(columns.client.unique()) == 5


def test_ptb_xl_has_several_labels_if_asked(source):
    one, several = source("ptb-xl", min_records=1).load(), source("ptb-xl", min_records=1, labels="several").load()
    assert len(several) == len(one) + 1, "the record of two superclasses"
    assert several.class_names == ("NORM", "MI", "STTC", "CD", "HYP")
    sets = [[place for place, yes in enumerate(row) if yes] for row in several.label.tolist()]
    assert sets.count([0, 1]) == 1
    assert sorted(label for label, *more in sets if not more) == sorted(one.label.tolist())


def test_ptb_xl_gives_millivolts(source, shelf):
    columns = source("ptb-xl", normalise="none").load()
    raw = np.fromfile(shelf("ptb_xl") / "records100/00000/00000_lr.dat", "<i2").reshape(1000, 12) / 1000.0
    row = int((columns.label == 0).nonzero()[0, 0])
    np.testing.assert_allclose(columns.column("chest").take(torch.tensor([row]))[0], raw[:, 6:], atol=1e-6)


def test_a_turn_of_msp_without_a_transcript_has_no_text(source, tmp_path, shelf):
    said = tmp_path / "said.csv"
    said.write_text("utt,text\nMSP-IMPROV-S01A-F01-S-FM00,the cat\n")
    columns = source(
        "msp-improv", modalities=("audio", "text"), transcripts=str(said), text_model=str(shelf("text_model"))
    ).load()
    assert int(columns.present["text"].sum()) == 1


# CMU-MOSEI and CMU-MOSI ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "widths", "steps"),
    [("mosei", (300, 74, 35), 12), ("mosei", (300, 74, 35), 60), ("mosi", (300, 5, 20), 12)],
)
@pytest.mark.filterwarnings("ignore:.*no training row")
def test_cmu_sets_go_through_a_round(name, widths, steps, tmp_path):
    arrays = published.cmu(tmp_path, name, widths, steps=steps)
    columns, _ = one_round(SOURCES[name](path=str(tmp_path / f"{name}.npz")), natural=True)
    assert [columns.column(m).shape for m in columns.modalities] == [(50, w) for w in widths]
    scores = np.concatenate([arrays[f"{part}_labels"].ravel() for part in ("train", "valid", "test")])
    assert columns.label.tolist() == (np.round(np.clip(scores, -3, 3)) + 3).astype(int).tolist()
    assert torch.bincount(columns.split.long()).tolist() == [8, 4, 3]


@pytest.mark.filterwarnings("ignore:.*measures nothing")
def test_cmu_scores_are_the_targets_of_a_regression(tmp_path):
    arrays = published.cmu(tmp_path, "mosi", (300, 5, 20), steps=12)
    source = SOURCES["mosi"](path=str(tmp_path / "mosi.npz"), target="score", steps=12)
    scores = np.concatenate([arrays[f"{part}_labels"].ravel() for part in ("train", "valid", "test")])
    assert source.load().label.tolist() == scores.astype(np.float32).tolist()
    recipe = polyfed.load_recipe("recipes/fedavg-mosi-regression.toml", ["rounds=1"])
    measured = polyfed.run(dataclasses.replace(recipe, data=source)).result["metrics"]
    assert {"mae", "pearson", "acc7", "acc2", "f1", "c_index"} <= measured["global"].keys()
    assert "validation" in measured


def test_cmu_padding_stays_zero_and_training_steps_are_standardised(tmp_path):
    published.cmu(tmp_path)
    columns = SOURCES["mosei"](path=str(tmp_path / "mosei.npz"), steps=12).load()
    x = columns.column("audio").values
    assert (x[:, -3:] == 0).all()
    train = x[columns.split == 0][:, :9].reshape(-1, 74)
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(train.std(0, correction=0), 1, atol=1e-4)


def test_cmu_unaligned_steps_move_to_the_front(tmp_path):
    arrays = published.cmu(tmp_path)
    arrays["train_text"][0, :4] = 0.0
    np.savez(tmp_path / "mosei.npz", **arrays)
    x = SOURCES["mosei"](path=str(tmp_path / "mosei.npz"), steps=6).load().column("text").values[0]
    np.testing.assert_array_equal(x[:5], arrays["train_text"][0, 4:9])
    assert (x[5] == 0).all()


def test_the_conversion_line_for_the_pickle_makes_a_file_that_loads(tmp_path, monkeypatch):
    import pickle
    import subprocess
    import sys

    arrays = published.cmu(tmp_path / "made")
    nested = {
        p: {k: arrays[f"{p}_{k}"] for k in ("text", "audio", "vision", "labels", "id")}
        for p in ("train", "valid", "test")
    }
    path = tmp_path / "mosei_senti_data.pkl"
    path.write_bytes(pickle.dumps(nested))
    with refuses(DataError, "is a pickle") as caught:
        SOURCES["mosei"](path=str(path)).load()
    line = str(caught.value).split("convert it once: ")[1].replace("python", sys.executable, 1)
    line = line.replace("'mosei_senti_data.npz'", repr(str(tmp_path / "mosei_senti_data.npz")))
    subprocess.run(line, shell=True, check=True)
    assert len(SOURCES["mosei"](path=str(tmp_path / "mosei_senti_data.npz")).load()) == 15


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_audio": None}, "no array 'train_audio'"),
        ({"test_labels": np.full((4, 1, 1), 9.0)}, "-3..3"),
        ({"valid_text": np.ones((3, 12, 7), np.float32)}, "expected 300"),
        ({"train_vision": np.ones((7, 12, 35), np.float32)}, "labels have 15"),
        ({"train_text": np.ones((8, 300), np.float32)}, "steps, features"),
    ],
)
def test_broken_cmu_files_are_named(change, words, tmp_path):
    arrays = published.cmu(tmp_path) | change
    np.savez(tmp_path / "mosei.npz", **{k: v for k, v in arrays.items() if v is not None})
    with refuses(DataError, words):
        SOURCES["mosei"](path=str(tmp_path / "mosei.npz")).load()


# broken folders ----------------------------------------------------------------------------------------------------


def remove(path):
    return lambda root: (root / path).unlink()


def remove_folder(path):
    return lambda root: shutil.rmtree(root / path)


def replace(path, old, new):
    def change(root):
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new, 1))

    return change


def empty_sound(path):
    return lambda root: published.empty_sound(root / path)


def cut(path, share=0.5):
    def change(root):
        content = (root / path).read_bytes()
        (root / path).write_bytes(content[: int(len(content) * share)])

    return change


CRISIS = "crisismmd_datasplit_all/task_humanitarian_text_img_dev.tsv"
IEMO = "IEMOCAP_full_release/Session2"
BROKEN = [
    ("iemocap", remove_folder(f"{IEMO}/dialog/EmoEvaluation"), "Session2/dialog/EmoEvaluation' is missing"),
    ("iemocap", remove(f"{IEMO}/dialog/transcriptions/Ses02F_impro01.txt"), "Ses02F_impro01.txt' is missing"),
    ("iemocap", remove(f"{IEMO}/sentences/wav/Ses02F_impro01/Ses02F_impro01_F002.wav"), "F002.wav' does"),
    (
        "iemocap",
        empty_sound(f"{IEMO}/sentences/wav/Ses02F_impro01/Ses02F_impro01_F002.wav"),
        "holds no sound",
    ),
    ("iemocap", cut(f"{IEMO}/sentences/wav/Ses02F_impro01/Ses02F_impro01_F002.wav", 0), "F002.wav' is empty"),
    (
        "iemocap",
        replace(f"{IEMO}/dialog/EmoEvaluation/Ses02F_impro01.txt", "\tang\t", "\tagn\t"),
        "unknown label",
    ),
    ("iemocap", replace(f"{IEMO}/dialog/EmoEvaluation/Ses02F_impro01.txt", "\tang\t", "\t1\tang\t"), "malformed label"),
    (
        "iemocap",
        replace(f"{IEMO}/dialog/transcriptions/Ses02F_impro01.txt", "F000 [", "F009 ["),
        "utterance Ses02F_impro01_F000",
    ),
    ("msp-improv", remove("Evalution.txt"), "msp-improv"),
    ("msp-improv", replace("Evalution.txt", "; N;", "; Q;"), "unknown label 'Q'"),
    ("msp-improv", replace("Evalution.txt", "-S-FM00.avi", "-FM00.avi"), "malformed name 'S01A-F01-FM00'"),
    ("msp-improv", empty_sound("Audio/session1/S01A/S/MSP-IMPROV-S01A-F01-S-FM00.wav"), "holds no sound"),
    ("food101", remove_folder("images/test/ramen"), "images/test/ramen' is missing"),
    ("food101", remove_folder("texts_txt"), "texts_txt' is missing"),
    ("food101", cut("images/train/ramen/ramen_0.jpg"), "whole image"),
    (
        "food101 title",
        replace("texts/train_titles.csv", "apple_pie_0.jpg,", "apple_pie_0.jpg,1,"),
        "4 columns",
    ),
    ("food101 title", replace("texts/train_titles.csv", "cat,ramen", "cat,rmen"), "unknown class 'rmen'"),
    ("crema-d", remove("test.csv"), "data.split"),
    ("crema-d", replace("train.csv", "_XX,NEU", "_XX,NEU,1"), "expected 2"),
    ("crema-d", replace("train.csv", "_XX,NEU", "_XX,HAP"), "third field"),
    ("crema-d", remove("VideoFlash/1001_DFA_NEU_XX.flv"), "1001_DFA_NEU_XX.flv' does"),
    ("crema-d", cut("VideoFlash/1001_DFA_NEU_XX.flv"), "announces"),
    ("crema-d", empty_sound("AudioWAV/1001_DFA_NEU_XX.wav"), "holds no sound"),
    ("ave", remove("valSet.txt"), "valSet.txt'"),
    ("ave", replace("trainSet.txt", "Bark&vid_1", "Brak&vid_1"), "unknown label"),
    ("ave", replace("trainSet.txt", "Bark&vid_1&good", "Bark&vid_1&good&1"), "malformed line 'Bark&vid_1&good&1&1&3'"),
    ("ave", cut("AVE/vid_0.mp4"), "decoded"),
    ("ave", lambda root: published.film(root / "AVE/vid_0.mp4", 4), "sound track"),
    ("ku-har", remove_folder("Trimmed_interpolated_data/1.Sit"), "ku-har"),
    (
        "ku-har",
        replace("Trimmed_interpolated_data/1.Sit/1002_B_1.csv", "\n", ",1\n"),
        "table of numbers",
    ),
    (
        "ku-har",
        replace("Trimmed_interpolated_data/1.Sit/1002_B_1.csv", "0.010,", "x,"),
        "table of numbers",
    ),
    ("meld", remove("dev_sent_emo.csv"), "meld"),
    ("meld", replace("train_sent_emo.csv", "Emotion", "Mood"), "no column 'Emotion'"),
    ("meld", replace("train_sent_emo.csv", "Ann,neutral", "Ann,neutral,1"), "12 columns"),
    (
        "meld",
        replace("train_sent_emo.csv", "Ann,neutral", "Ann,netural"),
        "unknown label",
    ),
    ("meld", cut("train_splits/dia0_utt0.mp4"), "decoded"),
    ("meld", empty_sound("train_splits/waves/dia0_utt1.wav"), "holds no sound"),
    ("hateful-memes", remove("test_seen.jsonl"), "hateful-memes"),
    ("hateful-memes", replace("train.jsonl", '"label": 0', '"label": 7'), "label 7"),
    ("hateful-memes", replace("train.jsonl", '"label": 0, ', ""), "1 lacks"),
    ("hateful-memes", cut("train.jsonl", 0.45), "is not JSON"),
    ("hateful-memes", remove("img/00003.png"), "00003.png'"),
    ("crisismmd", remove(CRISIS), "img_dev.tsv' is missing"),
    ("crisismmd", replace(CRISIS, "label_image", "label_img"), "label_text_image"),
    ("crisismmd", replace(CRISIS, "\tPositive", "\tPositive\t1"), "10 columns"),
    (
        "crisismmd",
        replace(CRISIS, "\tnot_humanitarian\tPositive", "\thumanitarian\tPositive"),
        "unknown label 'humanitarian'",
    ),
    ("crisismmd", cut("data_image/flood/1_1_2017/0_0.jpg"), "whole image"),
    ("ptb-xl", remove("scp_statements.csv"), "ptb-xl"),
    ("ptb-xl", replace("ptbxl_database.csv", "strat_fold", "fold"), "filename_hr"),
    ("ptb-xl", replace("ptbxl_database.csv", "'NORM': 100.0", "'NORM': "), "malformed scp_codes"),
    ("ptb-xl", replace("scp_statements.csv", ",,MI", ",,MU"), "unknown label 'MU'"),
    ("ptb-xl", cut("records100/00000/00004_lr.dat"), "12000 bytes"),
    ("ptb-xl", replace("records100/00000/00004_lr.hea", " V6", " V7"), "lead V6"),
    ("ptb-xl", remove("records100/00000/00004_lr.hea"), "00004_lr.hea'"),
    ("hf", remove_folder("test"), "opened by datasets"),
]


@pytest.mark.parametrize(("name", "change", "words"), BROKEN)
def test_a_broken_folder_is_refused_with_the_file_and_what_to_do(name, change, words, source, shelf, tmp_path):
    name, _, kind = name.partition(" ")
    root = tmp_path / "copy"
    shutil.copytree(shelf(CASES[name][0]), root)
    change(root)
    with refuses(DataError, words):
        source(name, root, **({"text_source": kind} if kind else {})).load()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label": "kinds"}, "'kinds'"),
        ({"columns": {"image": "picture", "text": "captions"}}, "no column 'captions'"),
        (
            {"modalities": {"sensor": "values", "caption": "values"}, "columns": {}},
            "array of numbers",
        ),
        ({"modalities": {"sensor": "image"}, "columns": {}}, "file but"),
    ],
)
def test_a_column_of_the_wrong_name_or_kind_is_named(changes, words, source):
    with refuses(DataError, words):
        source("hf", **changes).load()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("crema-d", {"modalities": ["sound"]}),
        ("crema-d", {"fold": 6}),
        ("iemocap", {"test_session": 6}),
        ("meld", {"classes": 5}),
        ("ku-har", {"activities": 9}),
        ("mosei", {"classes": 3}),
        ("hf", {"modalities": {"a": "sound"}}),
    ],
)
def test_options_out_of_range_are_refused(name, options):
    ((option, value),) = options.items()
    key, given = (option, value) if not isinstance(value, dict) else (f"{option}.a", value["a"])
    with refuses(RecipeError, f"data.{key}: {given if isinstance(given, int) else 'sound'}"):
        SOURCES[name](path="x", **options)
