"""`polyfed init FILE`: the recipe that it writes passes check and run unchanged, and says what it guessed."""

import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import polyfed
from polyfed.cli import main
from polyfed.core.errors import DataError, PolyfedError
from polyfed.experiment.recipes.file_reading import read_file
from polyfed.experiment.recipes.first_recipe import starter
from polyfed.experiment.recipes.recipe import load_recipe
from refusals import refuses, warned

ROWS = 120
DRAW = np.random.default_rng(0)
LABEL = np.arange(ROWS) % 3
AUDIO = (DRAW.normal(size=(3, 4))[LABEL] + DRAW.normal(size=(ROWS, 4))).astype(np.float32)
WORDS = np.array(["cat", "dog", "owl"])[LABEL]


def table() -> pd.DataFrame:
    held = pd.DataFrame(AUDIO, columns=[f"audio_{n}" for n in range(4)])
    held["text_len"], held["text_tone"] = 100.0 * DRAW.normal(size=ROWS) + 500, DRAW.normal(size=ROWS)
    held.loc[:9, ["text_len", "text_tone"]] = np.nan
    held.loc[10, "text_tone"] = np.nan
    return held.assign(note="a text that nobody reads", emotion=WORDS, speaker=[f"s{row % 4}" for row in range(ROWS)])


def write(folder: Path, suffix: str) -> Path:
    path = folder / f"mine{suffix}"
    if suffix == ".csv":
        table().to_csv(path, index=False)
    elif suffix == ".parquet":
        table().to_parquet(path)
    elif suffix == ".jsonl":
        table().to_json(path, orient="records", lines=True)
    else:
        image = DRAW.integers(0, 256, (ROWS, 6, 6), dtype=np.uint8)
        np.savez(
            path,
            audio=DRAW.normal(size=(ROWS, 8, 2)),
            image=image,
            text=DRAW.integers(0, 9, (ROWS, 5)),
            y=WORDS,
            site=LABEL,
        )
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl", ".npz"])
def test_the_recipe_passes_check_and_run_unchanged(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, suffix).name
    with refuses(SystemExit, "0"):
        main(["init", file])
    said = capsys.readouterr().out
    recipe = Path("recipe.toml").read_text()
    if suffix == ".npz":
        assert {"audio", "image", "text"} == {*polyfed.load_recipe("recipe.toml").model.encoders}
        assert "each of the 3 values of 'site' is a client" in said
        assert "'text' holds token ids (5,), 0 to 8" in said
        for kind in ("conv-gru", "resnet18", "token-transformer"):
            assert f'kind = "{kind}"' in recipe
    else:
        assert 'modalities = { audio = "audio_*", text = "text_*" }' in recipe
        assert 'standardise = ["text"]' in recipe
        assert 'partial = "absent"' in recipe
        assert "guessed: left out, because they hold texts: note" in said
        assert "'text' is missing in 11 of 120 rows" in said
        assert "3 classes, cat, dog, owl" in said
        assert "each of the 4 values of 'speaker' is a client" in said
    checked = polyfed.check("recipe.toml")
    assert not checked.refused
    assert not checked.remarks
    ran = polyfed.run(polyfed.load_recipe("recipe.toml", ["rounds=1"]))
    assert ran.result["metrics"]["global"]["accuracy"] >= 0.0
    with refuses(SystemExit, "2"):
        main(["init", file])
    assert "exists already; nothing was replaced" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label": "feeling"}, "column 'feeling'"),
        ({"label": "feels", "client": "person"}, "column 'person'"),
        ({}, "diagnosis"),
    ],
)
def test_what_cannot_be_guessed_is_asked_for(options: dict[str, str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    table().rename(columns={"emotion": "feels"}).to_csv(path, index=False)
    with refuses(PolyfedError, words):
        starter(path, options)
    (tmp_path / "mine.xlsx").touch()
    with refuses(PolyfedError, "file that polyfed"):
        starter(tmp_path / "mine.xlsx", {})


def test_without_natural_clients_the_rows_are_shared(tmp_path: Path) -> None:
    held = table().drop(columns="speaker").assign(client=[f"row{row}" for row in range(ROWS)])
    held.to_csv(tmp_path / "mine.csv", index=False)
    assert 'partition = "iid"\nnum = 4\n' in starter(tmp_path / "mine.csv", {}).text


def test_several_targets_are_labels_and_no_modality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = table().drop(columns="emotion").assign(y1=LABEL == 1, y2=LABEL > 0)
    held.astype({"y1": int, "y2": int}).to_csv(tmp_path / "mine.csv", index=False)
    out = tmp_path / "recipe.toml"
    with refuses(SystemExit, "0"):
        main(["init", str(tmp_path / "mine.csv"), "--label", "y1", "--label", "y2", "--out", str(out)])
    recipe = polyfed.load_recipe(out)
    assert recipe.data.label == ["y1", "y2"]
    assert {*recipe.data.modalities} == {"audio", "text"}
    assert "texts: note. If one of them names the client of a row, name it as client" in capsys.readouterr().out


def test_several_files_are_refused_with_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with refuses(SystemExit, "2"):
        main(["init", "train.csv", "test.csv", "--out", str(tmp_path / "recipe.toml")])
    said = capsys.readouterr().err
    assert "init reads one file, and train.csv test.csv are several. Join them into one file" in said
    assert f"polyfed init joined.csv --out {tmp_path / 'recipe.toml'} --client site" in said, "one table for each site"


def sites(folder: Path) -> Path:
    """A table of a hospital: words, holes in three columns, and a column whose name makes it the labels."""
    draw = np.random.default_rng(1)
    held = pd.DataFrame(draw.normal(size=(ROWS, 3)), columns=["age", "sbp", "crp"]).mask(draw.random((ROWS, 3)) < 0.4)
    words = {"ward": np.array(["icu", "er", "lab"])[LABEL], "again": np.array(["no", "yes", "no"])[LABEL]}
    held = held.assign(**words, patient=np.arange(ROWS) % 30, diagnosis=np.where(LABEL == 2, None, WORDS))
    held.to_csv(folder / "a site.csv", index=False)
    return folder / "a site.csv"


def test_printed_commands_keep_what_was_typed_and_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, call = tmp_path / "made.toml", ["polyfed", "init", str(sites(tmp_path)), "--label", "again"]
    call += ["--leave-out", "diagnosis", "--set", "data.test_share=0.3", "--column", "ward=mean"]
    call += ["--out", str(out), "--force"]
    for _ in range(4):
        with pytest.raises(SystemExit) as stop:
            main(call[1:])
        said = "".join(capsys.readouterr())
        if not stop.value.code:
            break
        text = re.split(r" does|\. You", said[said.index("polyfed init") :])[0]
        assert "[data]" not in said
        call = shlex.split(text)
        for word in ("again", "--leave-out", "diagnosis", "data.test_share=0.3", str(out), "--force"):
            assert word in call
    columns = load_recipe(out).data.columns  # type: ignore[attr-defined]
    assert columns == {"ward": "one-hot", "age": "mean", "sbp": "mean", "crp": "mean"}


def test_a_faulty_column_that_was_guessed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sites(tmp_path)
    with refuses(SystemExit, "5"):
        main(["init", str(file), "--column", "age=mean", "--out", str(tmp_path / "made.toml")])
    said = capsys.readouterr().err
    assert "the label column 'diagnosis' is empty in 40 of 120 rows" in said
    words = ["--out", str(tmp_path / "made.toml"), "--column", "age=mean", "--label", "NAME"]
    assert shlex.join(["polyfed", "init", str(file), *words]) in said
    with refuses(DataError, "label column 'diagnosis'") as told:
        read_file(file, {"label": "diagnosis"})
    assert "to name another" not in str(told.value), "the user named it"


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_it_names_the_labels_the_clients_and_the_missing_split(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with refuses(SystemExit, "0"):
        main(["init", str(write(tmp_path, suffix)), "--out", str(tmp_path / "recipe.toml")])
    said = capsys.readouterr().out
    label, client = ("y", "site") if suffix == ".npz" else ("emotion", "speaker")
    assert f"guessed: '{label}' gives the labels" in said
    assert f"guessed: '{client}' gives the clients" in said
    assert said.count("guessed: no split is given: a share of 0.2 of the rows is drawn as the test set") == 1


def test_python_says_which_columns_it_picked(tmp_path: Path) -> None:
    held = table()[["audio_0", "audio_1", "emotion", "speaker"]].fillna(0.0)
    held.to_csv(tmp_path / "mine.csv", index=False)
    with warned("labels='emotion', clients='speaker'"):
        polyfed.make_recipe(tmp_path / "mine.csv", standardise=False)
    polyfed.make_recipe(tmp_path / "mine.csv", standardise=False, labels="emotion", clients="speaker")


def test_words_of_an_ordinal_task_need_their_order(tmp_path: Path) -> None:
    held = table().drop(columns="emotion").assign(level=WORDS)
    held.to_csv(tmp_path / "mine.csv", index=False)
    out = tmp_path / "recipe.toml"
    words = ["init", str(tmp_path / "mine.csv"), "--label", "level", "--task", "ordinal", "--out", str(out)]
    with refuses(SystemExit, "5"):
        main(words)
    assert not out.exists()
    with refuses(SystemExit, "0"):
        main([*words, "--class-name", "owl", "--class-name", "cat", "--class-name", "dog"])
    assert 'class_names = ["owl", "cat", "dog"]' in out.read_text()
    assert polyfed.check(out).recipe.data.load().class_names == ("owl", "cat", "dog")


def test_several_arrays_of_labels_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", audio=AUDIO, y1=LABEL, y2=LABEL)
    with refuses(PolyfedError, "several arrays"):
        starter(tmp_path / "mine.npz", {"label": ["y1", "y2"]})


def test_a_table_with_holes_gets_scores_of_subsets_and_validation_rows(tmp_path: Path) -> None:
    lines = ["audio_0,text_0,text_1,label"]
    lines += [f"{'' if n % 3 else n / 9},{n / 7},{n % 5},{'ab'[n % 2]}" for n in range(120)]
    (tmp_path / "mine.csv").write_text("\n".join(lines))
    main_out = tmp_path / "recipe.toml"
    with refuses(SystemExit, "0"):
        main(["init", str(tmp_path / "mine.csv"), "--out", str(main_out)])
    made = polyfed.load_recipe(main_out)
    assert (made.algorithm.evaluation.subsets, made.algorithm.evaluation.conformal) == ("all", "split")
    assert (made.clients.validation, made.clients.personal_validation) == (0.0, 0.2)
    whole = [line.replace(",,", ",1,") if line[0] != "," else "1" + line for line in lines]
    (tmp_path / "whole.csv").write_text("\n".join(whole))
    with refuses(SystemExit, "0"):
        main(["init", str(tmp_path / "whole.csv"), "--out", str(tmp_path / "whole.toml")])
    assert "[evaluate]" not in (tmp_path / "whole.toml").read_text()


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_a_refusal_lists_every_name_that_is_wrong_and_keeps_the_earlier_recipe(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write(tmp_path, suffix), tmp_path / "mine.toml"
    out.write_text("seed = 7\n")
    words = ["init", str(file), "--out", str(out), "--leave-out", "one", "--leave-out", "two", "--label", "three"]
    with refuses(SystemExit, "2"):
        main(words)
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--force"])
    said = capsys.readouterr().err
    assert all(f"'{name}'" in said for name in ("one", "two", "three"))
    assert f"{out} is the recipe from before" in said
    assert out.read_text() == "seed = 7\n"
    with pytest.raises(SystemExit):
        main([*words[:2], "--out", str(tmp_path / "none.toml"), "--label", "three"])
    assert "from before" not in capsys.readouterr().err
