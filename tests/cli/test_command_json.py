"""Every verb under --json: standard output holds one JSON value and nothing else, also when the verb fails."""

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer.main

from polyfed.cli.application import app
from polyfed.cli.doctor import problem_of

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes" / "fedavg-cg-digits.toml")
SMALL = ("--set", "rounds=2")


def verbs(group: click.Command, head: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    found = {}
    for name, command in getattr(group, "commands", {}).items():
        inner = verbs(command, (*head, name))
        found |= inner or {(*head, name): command}
    return found


VERBS = verbs(typer.main.get_command(app))


@pytest.mark.parametrize("words", sorted(VERBS), ids=" ".join)
def test_every_verb_has_the_option(words):
    assert "--json" in [name for option in VERBS[words].params for name in option.opts]


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (("run", "nowhere.toml"), 2, "RecipeError"),
        (("run", RECIPE, "--set", "learning_rate=1"), 2, "RecipeError"),
        (("run", RECIPE, *SMALL, "--set", 'egress.color.server=["statistic"]'), 3, "EgressError"),
        (("report", "nowhere"), 5, "DataError"),
        (("compare", "nowhere"), 5, "DataError"),
        (("algorithms", "nothing"), 2, "RecipeError"),
        (("data", "prepare"), 2, "RecipeError"),
        (("app", "a", "--recipe", "nowhere.toml"), 2, "RecipeError"),
        (("check",), 2, "MissingParameter"),
        (("fly",), 2, "NoSuchCommand"),
        (("run", RECIPE, "--fast"), 2, "NoSuchOption"),
        (("completion", "tcsh"), 2, "BadParameter"),
    ],
)
def test_an_error_is_json_with_the_same_exit_code(polyfed_command, tmp_path, monkeypatch, words, code, kind):
    monkeypatch.chdir(tmp_path)
    plain = polyfed_command(*words)
    got = polyfed_command(*words, "--json")
    error = json.loads(got[1])["error"]
    assert (plain[0], got[0], error["exit_code"], error["kind"]) == (code, code, code, kind)
    assert plain[1] == ""
    assert got[2] == plain[2], "standard error is the same with and without --json"
    assert " ".join(error["message"].split()) in " ".join(got[2].split())


@pytest.mark.parametrize("words", [("algorithms",), ("data",)])
def test_lists_name_every_part(polyfed_command, words):
    rows = json.loads(polyfed_command(*words, "--json")[1])
    text = polyfed_command(*words)[1]
    assert rows
    assert all(re.search(rf"^{re.escape(row['name'])} ", text, re.MULTILINE) for row in rows)


def test_descriptions(polyfed_command):
    method = json.loads(polyfed_command("algorithms", "fedprox", "--json")[1])
    assert method["options"][0] == {
        "name": "mu",
        "kind": "float, 0 or more",
        "default": "0.01",
        "about": method["options"][0]["about"],
        "search": "0.0, 0.001, 0.01, 0.1, 1.0",
    }
    assert {
        "task": "update",
        "way": "server",
        "field": "Update.loss",
        "kind": "statistic",
        "blocks": "shared",
    } in method["crossings"]
    source = json.loads(polyfed_command("data", "cg-digits", "--json")[1])
    assert set(source["modalities"]) == {"gray", "color"}


def test_lines_of_a_recipe_and_a_first_recipe(polyfed_command, tmp_path):
    lines = json.loads(polyfed_command("algorithms", "fedprox", "--recipe", "--json")[1])["recipe"]
    assert lines == polyfed_command("algorithms", "fedprox", "--recipe")[1].rstrip("\n")
    data, recipe = tmp_path / "own.csv", tmp_path / "recipe.toml"
    data.write_text("label,tone_0,tone_1\n" + "".join(f"{row % 2},0.{row},0.5\n" for row in range(40)))
    facts = json.loads(polyfed_command("init", str(data), "--out", str(recipe), "--json")[1])
    assert facts["recipe"] == str(recipe)
    assert facts["guessed"]
    assert polyfed_command("check", str(recipe), "--json")[0] == 0


def test_run_report_and_events(polyfed_command, tmp_path):
    out = tmp_path / "out"
    code, text, _ = polyfed_command("run", RECIPE, *SMALL, "--out", str(out), "--events", "-")
    assert code == 0
    lines = [json.loads(line) for line in text.splitlines()]
    names = [line["event"] for line in lines]
    assert names[0] == "run-started"
    assert names.count("round-finished") == 2
    assert lines[-1]["result"] == json.loads((out / "result.json").read_text())
    assert polyfed_command("run", RECIPE, "--json", "--events", "-")[0] == 2
    (out / "report.html").unlink()
    assert json.loads(polyfed_command("report", str(out), "--json")[1]) == {"report": str(out / "report.html")}
    assert (out / "report.html").exists()


def test_events_are_appended_to_a_file(polyfed_command, tmp_path):
    path = tmp_path / "events.jsonl"
    for seed in ("1", "2"):
        words = ("--set", f"seed={seed}", "--out", str(tmp_path / seed), "--events", str(path), "--json")
        assert json.loads(polyfed_command("run", RECIPE, *SMALL, *words)[1])["seed"] == int(seed)
    names = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert names.count("run-started") == names.count("run-finished") == 2


def test_a_written_app_says_how_to_start_it(polyfed_command, tmp_path):
    app = tmp_path / "app"
    facts = json.loads(polyfed_command("app", str(app), "--recipe", RECIPE, "--json")[1])
    assert facts["app"] == str(app)
    assert facts["start"] in polyfed_command("app", str(app), "--recipe", RECIPE)[1]


@pytest.mark.parametrize(("shell", "file"), [("bash", ".bash_completions/polyfed.sh"), ("zsh", ".zfunc/_polyfed")])
def test_completion_is_installed_for_a_shell(polyfed_command, tmp_path, monkeypatch, shell, file):
    monkeypatch.setenv("HOME", str(tmp_path))
    facts = json.loads(polyfed_command("completion", shell, "--json")[1])
    assert facts == {"shell": shell, "installed": str(tmp_path / file)}
    shown = polyfed_command("completion", shell, "--show")[1]
    assert shown.strip() == (tmp_path / file).read_text().strip()
    assert "_POLYFED_COMPLETE" in shown


def test_the_shell_is_given_verbs_and_options():
    code = "from polyfed.cli import main; main()"
    for words, wanted in (("polyfed com", {"compare", "completion"}), ("polyfed run --ev", {"--events"})):
        asked = {"_POLYFED_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        done = subprocess.run(
            [sys.executable, "-c", code], env={**_environment(), **asked}, capture_output=True, text=True, timeout=60
        )
        assert set(done.stdout.split()) == wanted, done.stderr


def _environment():
    import os

    return dict(os.environ)


def test_help_and_version_import_neither_torch_nor_pandas():
    code = "import sys; from polyfed.cli import main\ntry: main(['{}'])\nfinally: print(*sys.modules, file=sys.stderr)"
    for word in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", code.format(word)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        heavy = {"torch", "numpy", "pandas", "pydantic", "rich", "flwr", "sklearn"} & set(done.stderr.split())
        assert not heavy


def test_the_doctor_knows_parts_versions_and_what_is_missing(polyfed_command, monkeypatch):
    monkeypatch.setattr("polyfed.cli.doctor.problem_of", lambda module: "no symbol" if module == "av" else None)
    code, text, _ = polyfed_command("doctor", "--json")
    found = json.loads(text)
    assert code == 0
    assert found["works"]
    packages = {entry["name"]: entry for entry in found["packages"]}
    assert packages["torch"]["part"] == "required"
    assert packages["scikit-learn"]["works"]
    assert packages["av"]["problem"] == "no symbol"
    assert any("av is installed and cannot be imported (no symbol)" in line for line in found["advice"])
    assert found["memory"]["total_bytes"] > 0
    assert found["disk"]["free_bytes"] > 0
    assert "torch" in polyfed_command("doctor")[1]


def test_a_package_that_cannot_be_imported_says_why():
    assert problem_of("json") is None
    assert problem_of("nothing_of_this_name") == "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    assert problem_of("os; os.abort()") == "signal 6 ended the process"


def test_the_doctor_ends_with_2_if_a_required_package_is_broken(polyfed_command, monkeypatch):
    monkeypatch.setattr("polyfed.cli.doctor.problem_of", lambda module: "broken" if module == "torch" else None)
    assert polyfed_command("doctor", "--json")[0] == 2


def test_the_recipes_that_come_with_polyfed(polyfed_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {path.stem: path.read_text() for path in (Path(__file__).parents[2] / "recipes").glob("*.toml")}
    rows = json.loads(polyfed_command("recipes", "--json")[1])
    assert [row["name"] for row in rows] == sorted(files)
    assert all(len(row["about"]) > 10 for row in rows)
    for name in ("cmsfed-cg-digits", "cmsfed-cg-digits.toml"):
        assert json.loads(polyfed_command("recipes", name, "--json")[1])["recipe"] == files["cmsfed-cg-digits"]
    assert not list(tmp_path.iterdir())
    assert json.loads(polyfed_command("recipes", "cmsfed-cg-digits", "--copy", "--json")[1]) == {
        "written": ["cmsfed-cg-digits.toml"]
    }
    assert (tmp_path / "cmsfed-cg-digits.toml").read_text() == files["cmsfed-cg-digits"]
    assert len(json.loads(polyfed_command("recipes", "--copy", "--json")[1])["written"]) == len(files)
    assert {path.stem: path.read_text() for path in (tmp_path / "recipes").iterdir()} == files


def test_a_copied_recipe_overwrites_nothing(polyfed_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedprox-cg-digits.toml").write_text("mine")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "vfl-mfeat.toml").symlink_to(tmp_path / "nowhere")
    for words in (("fedprox-cg-digits", "--copy"), ("--copy",)):
        code, _, text = polyfed_command("recipes", *words)
        assert code == 2
        assert "exists already" in text
    assert (tmp_path / "fedprox-cg-digits.toml").read_text() == "mine"
    assert [path.name for path in (tmp_path / "recipes").iterdir()] == ["vfl-mfeat.toml"]
    for name in ("fedprox-cg-digit", "../README", "*"):
        code, _, text = polyfed_command("recipes", name)
        assert (code, f"no recipe '{name}' comes with polyfed" in text) == (2, True)


def test_the_demo_compares_two_methods_and_overwrites_nothing(polyfed_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("--set", "rounds=1", "--set", "clients.num=3", "--set", "clients.participation=2")
    rows = json.loads(polyfed_command("demo", *small, "--json")[1])
    assert [row["label"] for row in rows] == ["fedavg", "cmsfed"]
    assert polyfed_command("demo", *small)[1].endswith("picture in runs/demo-2/compare.html\n")
    for folder in (tmp_path / "runs" / "demo", tmp_path / "runs" / "demo-2"):
        assert (folder / "compare.html").exists()
        assert {path.parent.name for path in folder.glob("*/report.html")} == {"fedavg", "cmsfed"}
    before = (tmp_path / "runs/demo/fedavg/result.json").read_bytes()
    assert polyfed_command("demo", *small, "--out", "runs/demo")[0] == 2
    assert (tmp_path / "runs/demo/fedavg/result.json").read_bytes() == before
