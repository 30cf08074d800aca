import json
import os
import re
import signal
import subprocess
import sys
import warnings
from importlib import import_module

import pytest

import polyfed
from polyfed.algorithms import ALGORITHMS
from polyfed.cli.printing.catalogue import crossings, hyper_parameters, options
from polyfed.core.errors import PolyfedWarning
from polyfed.data import SOURCES
from polyfed.experiment.recipes.overrides import apply
from refusals import warned

RECIPE = """seed = 1
rounds = 2

[data]
name = "cg-digits"

[clients]
partition = "iid"
num = 6
participation = 3
missing = { color = 0.34 }

[model]
embedding = 8
[model.encoders]
gray = { kind = "mlp", hidden = [8] }
color = { kind = "mlp", hidden = [8] }

[train]
lr = 0.05

[algorithm]
name = "fedavg"
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "digits.toml"
    path.write_text(RECIPE)
    return str(path)


def test_a_warning_of_ours_is_one_line_without_source(polyfed_command, recipe):
    with warned("participation = 3") as caught:
        polyfed_command("check", recipe, "--set", "algorithm.name=fedamp", "--set", "clients.personal_test=0.2")
    (own,) = (w for w in caught if w.category is PolyfedWarning)
    assert warnings.formatwarning(own.message, own.category, "recipe.py", 1) == f"polyfed: warning: {own.message}\n"
    assert "UserWarning: torch's" in warnings.formatwarning("torch's", UserWarning, "torch.py", 1)


def test_run_ends_with_a_table_and_leaves_its_files(polyfed_command, recipe, tmp_path):
    code, out, err = polyfed_command("run", recipe, "--out", str(tmp_path / "out"))
    assert code == 0
    for words in ("accuracy, all modalities", "accuracy, gray alone", "accuracy, color alone"):
        assert words in out
    assert "round 2/2" in err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"recipe.toml", "rounds.jsonl", "egress.jsonl", "result.json", "report.html"} <= names


def test_json_is_alone_on_standard_output(polyfed_command, recipe, tmp_path):
    code, out, _ = polyfed_command("run", recipe, "--out", str(tmp_path / "out"), "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "out" / "result.json").read_text())


def test_run_without_out_takes_a_folder_that_is_not_there_yet(polyfed_command, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert polyfed_command("run", recipe, "--set", "rounds=1")[0] == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits", "digits-2"]


def test_words_of_the_call_reach_the_run(polyfed_command, recipe, tmp_path):
    words = ("--set", "train.lr=0.5", "--set", "rounds=1", "--engine", "sequential", "--device", "cpu")
    _, out, _ = polyfed_command("run", recipe, *words, "--out", str(tmp_path / "out"), "--json")
    result = json.loads(out)
    assert (result["engine"], result["rounds"]) == ("sequential", 1)
    assert "lr = 0.5" in (tmp_path / "out" / "recipe.toml").read_text()


def test_resumed_run_goes_on(polyfed_command, recipe, tmp_path):
    out = str(tmp_path / "out")
    polyfed_command("run", recipe, "--set", "rounds=1", "--out", out)
    code, text, err = polyfed_command("run", recipe, "--out", out, "--resume", "--json")
    assert code == 0
    assert json.loads(text)["rounds"] == 2
    assert "resumed after round 1" in err


def test_ctrl_c_says_how_to_go_on(polyfed_command, recipe, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("polyfed.start"), "run", interrupted)
    code, out, err = polyfed_command("run", recipe, "--out", str(tmp_path / "out"), "--set", "train.lr=1.0")
    assert code == 130
    assert out == ""
    assert f"polyfed run {recipe} --set train.lr=1.0 --resume --out {tmp_path / 'out'}" in err


def test_a_batch_system_that_ends_a_run_is_told_how_to_go_on(polyfed_command, recipe, tmp_path, monkeypatch):
    module, before = import_module("polyfed.start"), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(module, "run", lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGTERM))
    code, _, err = polyfed_command("run", recipe, "--out", str(tmp_path / "out"))
    assert code == 130
    assert f"--resume --out {tmp_path / 'out'}" in err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--set", "algorithm.name=fedavgg"), 2, "did you mean 'fedavg'"),
        (("--set", "train.lrr=1"), 2, "digits.toml --set train.lrr=1: [train] has no option 'lrr'"),
        (("--set", "lr=1"), 2, "'lr' belongs in a section: write train.lr or server.lr"),
        (("--set", "zzz=1"), 2, "no section or key 'zzz'"),
        (("--set", "name=toy"), 2, "write data.name or algorithm.name or selection.name or attack.name or engine.name"),
        (("--set", "train.lr"), 2, "--set train.lr: write section.key=value"),
        (("--set", "train..lr=1"), 2, "--set train..lr=1: write section.key=value"),
        (("--set", "clients.holdings=[[a],[b]]"), 2, "is not TOML"),
        (("--set", "train.lr=0.5\nseed=2"), 2, "repeat --set for more"),
        (("--engine", "warp"), 2, "warp"),
        (("--resume",), 2, "--out"),
        (("--set", 'egress.color.server=["statistic"]'), 3, "parameters of color"),
        (("--set", 'egress.colour.server=["raw"]'), 2, ": [egress] has no row 'colour'"),
        (("--set", "clients.missing={grey=0.2}"), 2, ": clients.missing names modality 'grey'"),
        (("--set", "rounds=0"), 2, "digits.toml --set rounds=0: rounds = 0"),
        (("--set", 'data={name="npz", path="nowhere.npz", modalities=["a"]}'), 5, "nowhere.npz"),
    ],
)
def test_error_of_the_user_ends_with_its_code_and_no_traceback(
    polyfed_command, recipe, tmp_path, words, code, says, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    got, out, err = polyfed_command("run", recipe, *words)
    assert got == code
    assert out == ""
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [("fly",), ("run",), ("run", "a.toml", "--fast"), ("run", "a.toml", "--device", "x")])
def test_words_that_are_no_call_end_with_2(polyfed_command, words):
    assert polyfed_command(*words)[0] == 2


def test_missing_recipe_is_named(polyfed_command):
    code, _, err = polyfed_command("check", "nowhere.toml")
    assert code == 2
    assert "nowhere.toml" in err


def test_check_prints_clients_blocks_and_crossings(polyfed_command, recipe):
    code, out, _ = polyfed_command("check", recipe)
    assert code == 0
    for pattern in (r"gray \+ color +4", r"gray +2", r"color +parameters +server .* Update\.params \(update\)"):
        assert re.search(pattern, out)
    assert re.search(r"gray: +parameters only", out)
    assert re.search(r"labels: +nothing", out)
    assert re.search(r"; the server holds [\d,]+ test rows and (no|[\d,]+) validation rows", " ".join(out.split()))


def test_check_of_a_forbidden_recipe_ends_with_3_and_names_the_cure(polyfed_command, recipe):
    code, out, _ = polyfed_command("check", recipe, "--set", 'egress.color.server=["statistic"]')
    assert code == 3
    assert "REFUSED" in out
    assert '[egress.color] server = ["parameters", "statistic"]' in out


def test_check_as_json(polyfed_command, recipe):
    content = json.loads(polyfed_command("check", recipe, "--json")[1])
    assert content["num_clients"] == 6
    assert {row["block"] for row in content["planned"]} == {"gray", "color", "shared"}


def test_compare_and_report_read_what_run_wrote(polyfed_command, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in ("1", "2"):
        polyfed_command("run", recipe, "--set", f"seed={seed}", "--out", seed)
    code, out, _ = polyfed_command("compare", "1", "2", "--html")
    assert code == 0
    assert re.search(r"fedavg +2 +\d+\.\d ± \d+\.\d", out)
    assert (tmp_path / "comparison.html").exists()
    polyfed_command("compare", "1", "2", "--html", "other.html")
    _, text, told = polyfed_command("compare", "1", "2", "--html", "--format", "csv")
    assert "comparison.html" in told
    assert "comparison.html" not in text
    assert (tmp_path / "other.html").exists()
    (row,) = json.loads(polyfed_command("compare", "1", "2", "--json")[1])
    assert row["n"] == 2
    (tmp_path / "1" / "report.html").unlink()
    assert polyfed_command("report", "1")[0] == 0
    assert (tmp_path / "1" / "report.html").exists()


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_folder_without_a_run_ends_with_5(polyfed_command, tmp_path, verb):
    code, _, err = polyfed_command(verb, str(tmp_path))
    assert code == 5
    assert "holds no run" in err


def test_algorithms_are_listed_with_their_first_lines(polyfed_command):
    code, out, _ = polyfed_command("algorithms")
    assert code == 0
    for name in ALGORITHMS:
        assert re.search(rf"^{name} +\S+", out, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_explains_its_hyper_parameters_and_what_crosses(polyfed_command, name):
    code, out, _ = polyfed_command("algorithms", name)
    assert code == 0
    for option in hyper_parameters(ALGORITHMS[name]):
        assert option.about, f"{name}.{option.name} is not explained in its class's docstring"
        assert option.name in out
    words = set(re.findall(r"\w+", out))
    assert {part for row in crossings(ALGORITHMS[name]) for part in row.field.split(".")} <= words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "fedavg",
            ['"client"  yes, with [algorithm] aggregation = "uniform"', '"example" yes', "[secure_aggregation] yes"],
        ),
        ("scaffold", ['unprotected = ["gradients"]', "[secure_aggregation] yes"]),
        (
            "cmsfed",
            ['gradient_split = "exact" and unprotected = ["gradients",', "no: the server reads Report.cross_entropy"],
        ),
        ("fedproto", ["no: its server does not only average the updates"]),
    ],
)
def test_every_algorithm_says_which_protection_it_can_use(polyfed_command, name, words):
    code, out, _ = polyfed_command("algorithms", name)
    flat = " ".join(out.split())
    assert code == 0
    for part in words:
        assert " ".join(part.split()) in flat


def test_hyper_parameters_are_read_off_the_dataclass():
    mu, aggregation, *others = hyper_parameters(ALGORITHMS["fedprox"])
    assert [option.name for option in others] == ["private", "private_epochs", "fine_tune", "repair"]
    assert (mu.name, mu.kind, mu.default) == ("mu", "float, 0 or more", "0.01")
    assert mu.about.startswith("weight of the proximal term")
    assert aggregation.kind == '"weighted" | "uniform"'


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_source_tells_licence_and_how_to_obtain_it(polyfed_command, name):
    code, out, _ = polyfed_command("data", name)
    assert code == 0
    facts = SOURCES[name].describe()
    for words in (facts.licence, facts.obtain, *facts.modalities):
        assert "".join(words.split()) in "".join(out.split()) or words.split()[0] in out
    assert all(option.about for option in options(SOURCES[name]))


@pytest.mark.parametrize(
    ("verb", "name", "near"), [("algorithms", "fedagv", "fedavg"), ("data", "cgdigits", "cg-digits")]
)
def test_unknown_name_gets_the_nearest(polyfed_command, verb, name, near):
    code, _, err = polyfed_command(verb, name)
    assert code == 2
    assert f"did you mean '{near}'" in err


def test_version(polyfed_command):
    assert polyfed_command("--version")[1].strip() == polyfed.__version__


def test_brackets_of_the_help_are_plain(polyfed_command):
    code, out, _ = polyfed_command("init", "--help")
    assert code == 0
    assert "[required]" in out
    assert "\\" not in out


def test_help_names_the_verbs_of_the_contract(polyfed_command):
    code, out, _ = polyfed_command("--help")
    assert code == 0
    for verb in ("run", "check", "compare", "report", "algorithms", "data"):
        assert re.search(rf"\b{verb}\b", out)


def test_a_key_is_set_and_not_a_whole_section(polyfed_command, recipe):
    code, _, err = polyfed_command("check", recipe, "--set", "train={lr=0.2}")
    assert code == 2
    assert "'train' is a section; set its keys one by one" in err
    table = {"egress": {"audio": {"server": []}}, "rounds": 2}
    apply(table, "egress={}")
    assert table == {"rounds": 2}


def test_folders_without_a_finished_run_are_left_out_of_a_comparison(polyfed_command, recipe, tmp_path):
    polyfed_command("run", recipe, "--set", "rounds=1", "--out", str(tmp_path / "one"))
    (tmp_path / "empty").mkdir()
    with warned("holds no run"):
        code, text, _ = polyfed_command("compare", str(tmp_path / "one"), str(tmp_path / "empty"), "--json")
    assert code == 0
    assert [row["n"] for row in json.loads(text)] == [1]


def test_the_command_needs_no_package_that_only_some_releases_of_typer_bring() -> None:
    """Typer before 0.26 depends on click, and later releases bring their own copy of it."""
    script = (
        "import sys, typer\n"
        "for name in [n for n in sys.modules if n.partition('.')[0] == 'click']: del sys.modules[name]\n"
        "sys.modules['click'] = None\n"
        "from polyfed.cli.application import UsageError\n"
        "assert issubclass(typer.BadParameter, UsageError) and UsageError.__base__ is Exception"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_quiet_prints_nothing_but_warnings_and_errors(polyfed_command, recipe, tmp_path):
    assert polyfed_command("run", recipe, "--quiet", "--out", str(tmp_path / "one")) == (0, "", "")
    code, out, err = polyfed_command("run", recipe, "--quiet", "--json", "--out", str(tmp_path / "two"))
    assert (code, err) == (0, "")
    assert json.loads(out)["algorithm"] == "fedavg"
    code, out, err = polyfed_command("run", recipe, "-q", "--set", "train.lr=x", "--out", str(tmp_path / "three"))
    assert code
    assert not out
    assert "[train] lr" in err
