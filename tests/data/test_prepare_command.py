"""`polyfed data prepare`: its arguments, what it prints, and its exit code."""

import published
import pytest

from polyfed.cli import main


@pytest.fixture
def crema(tmp_path):
    root = tmp_path / "crema"
    for actor in range(5):
        published.sound_file(root / "AudioWAV" / f"{1001 + actor}_DFA_NEU_XX.wav", 0.3, seed=actor)
    return root


@pytest.fixture
def prepare(capsys, crema, tmp_path):
    def call(*words):
        options = ("--set", "split=actors", "--set", 'modalities=["audio"]')
        with pytest.raises(SystemExit) as stop:
            main(("data", "prepare", "crema-d", "--from", str(crema), "--to", str(tmp_path / "out"), *options, *words))
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call


def test_it_ends_with_counts_and_the_line_of_a_recipe(prepare, tmp_path):
    code, out, err = prepare("--workers", "2")
    assert code == 0
    assert "NEU" in out
    assert "1087" in out
    assert f'[data] name = "crema-d", path = "{tmp_path / "out"}"' in out
    assert "5/5" in err
    code, _, err = prepare()
    assert code == 0
    assert "unchanged since it was prepared" in err


def test_corrupt_files_end_with_code_5_or_are_listed(prepare, crema):
    published.empty_sound(crema / "AudioWAV" / "1002_DFA_NEU_XX.wav")
    code, _, err = prepare()
    assert code == 5
    assert "1002_DFA_NEU_XX.wav' holds no sound" in err
    code, out, err = prepare("--on-corrupt", "skip")
    assert code == 0
    assert "skipped 1002_DFA_NEU_XX" in out
    assert "skipped 1002_DFA_NEU_XX" in err
    assert "4 rows" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--set", "frame=3"), "no option 'frame'; did you mean 'frames'"),
        (("--set", "frames='three'"), "frames"),
        (("--set", "frames"), "write key=value"),
        (("--workers", "0"), "workers = 0"),
        (("again",), "polyfed data prepare NAME --from DIR --to DIR"),
    ],
)
def test_a_wrong_call_ends_with_code_2(words, message, prepare):
    code, _, err = prepare(*words)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    "words", [("prepare",), ("prepare", "crema-d"), ("prepare", "crema", "--from", ".", "--to", ".")]
)
def test_a_call_without_its_parts_says_what_is_missing(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(("data", *words))
    assert stop.value.code == 2
    assert "polyfed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cg-digits", "npz"])
def test_a_source_that_is_read_as_it_is_says_so(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main(("data", "prepare", name, "--from", "a", "--to", "b"))
    assert stop.value.code == 2
    assert f"'{name}' needs no preparation: a recipe reads it as it is, [data] name" in capsys.readouterr().err
