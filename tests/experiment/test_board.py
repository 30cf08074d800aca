"""Entries of a board: whoever edits one is found out, and no code of a stranger runs unasked."""

import copy
import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.cli import main
from polyfed.core.errors import DataError, NotAllowed, RecipeError
from polyfed.core.system.json_and_toml import parse_toml, to_json
from polyfed.experiment.leaderboard.entry import LARGEST, NOT_PACKED, faults_of, here, numbers, read_entry
from polyfed.experiment.leaderboard.packing import pack_entry
from polyfed.experiment.leaderboard.page import write_page
from polyfed.experiment.leaderboard.verification import verify_entry
from polyfed.experiment.recipes.first_recipe import starter
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.recipes.sections import SECTIONS
from polyfed.start import run
from refusals import refuses

BOARD = Path(__file__).parents[2] / "board"
ENTRIES = sorted(path for path in BOARD.glob("*.json") if "receipt" not in path.name)

OWN = '''
from dataclasses import dataclass
from pathlib import Path
from polyfed.algorithms import Averaging
Path("{mark}").write_text("ran")

@dataclass(frozen=True, kw_only=True)
class Mine(Averaging):
    """FedAvg under another name."""
'''


def table(method: str, seed: int, **options: Any) -> dict[str, Any]:
    """A run of one round on the generated data."""
    return {
        "seed": seed,
        "rounds": 1,
        "data": {"name": "toy", "rows": 60, "classes": 3, "shapes": {"a": [4], "b": [4]}},
        "clients": {"num": 3},
        "model": {"embedding": 4, "encoders": {"a": {"kind": "mlp", "hidden": []}, "b": {"kind": "mlp", "hidden": []}}},
        "train": {"lr": 0.1},
        "algorithm": {"name": method, **options},
        "engine": {"threads": 1},
    }


def part(name: str, method: str, **options: Any) -> dict[str, Any]:
    """Three runs of a method, without a search."""
    runs, recipe = [], dict[str, Any]()
    for seed in (1, 2, 3):
        loaded = parse_recipe(table(method, seed, **options))
        recipe = json.loads(json.dumps(loaded.table(), default=list))
        result = json.loads(to_json(numbers(run(loaded).result)))
        runs.append({"seed": seed, "tuning": False, "chosen": {}, "result": result})
    for section in ("seed", "checkpoint"):
        recipe.pop(section, None)
    return {"name": name, "recipe": recipe, "runs": runs}


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    columns = parse_recipe(table("fedavg", 1)).data.load()
    return {
        "format": "polyfed board entry 1",
        "scenario": "toy",
        "metrics": ["global.accuracy"],
        "data": columns.fingerprint(),
        "method": part("feddyn", "feddyn"),
        "control": part("fedavg", "fedavg"),
        "placebo": part("feddyn-placebo", "feddyn", placebo="random"),
        "no_placebo": "",
        "code": None,
        "made": here(),
    }


def written(tmp_path: Path, entry: dict[str, Any]) -> Path:
    path = tmp_path / "entry.json"
    path.write_text(json.dumps(entry))
    return path


def test_an_honest_entry_repeats(tmp_path: Path, made: dict[str, Any]) -> None:
    found = verify_entry(written(tmp_path, made), receipt=tmp_path / "receipt.json")
    assert not found.faults
    assert found.runs == 9
    rows = write_page([tmp_path / "entry.json", tmp_path / "receipt.json"], tmp_path / "board.md")
    assert rows[0]["seeds"] == 3
    assert len(rows[0]["repeated"]) == 1
    assert "feddyn" in (tmp_path / "board.md").read_text()


def test_edited_entries_do_not_repeat(tmp_path: Path, made: dict[str, Any]) -> None:
    """A number, a digest and a recipe; the cause is other versions only if the entry names other ones."""
    entry = copy.deepcopy(made)
    entry["method"]["runs"][0]["result"]["metrics"]["global"]["accuracy"] += 0.1
    entry["method"]["runs"][1]["result"]["state_sha256"] = "0" * 64
    entry["control"]["recipe"]["model"]["embedding"] = 5
    *faults, cause = verify_entry(written(tmp_path, entry)).faults
    of_method = [fault for fault in faults if fault.startswith("method")]
    assert ["seed 1: metrics.global.accuracy" in of_method[0], "seed 2: state_sha256" in of_method[1]] == [True, True]
    assert len(of_method) == 2
    assert not [fault for fault in faults if fault.startswith("placebo")]
    assert {seed for seed in (1, 2, 3) for fault in faults if f"control, seed {seed}: state" in fault} == {1, 2, 3}
    assert "not those of its recipes" in cause


def _searched(entry: dict[str, Any], tried: dict[str, int], best: float = 0.1) -> None:
    """Give each role so many trials, whose scores rise with the learning rate up to 0.1."""
    for role in ("method", "control", "placebo"):
        del entry[role]["recipe"]["train"]["lr"]
        for one in entry[role]["runs"]:
            one["chosen"] = {"train.lr": best}
        rates = [0.1, 0.05, 0.02][: tried[role]]
        for lr in rates:
            result = copy.deepcopy(entry[role]["runs"][0]["result"])
            result["metrics"]["global"]["accuracy"] = lr
            entry[role]["runs"].append({"seed": 101, "tuning": True, "chosen": {"train.lr": lr}, "result": result})


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(entry: dict[str, Any]) -> None:
        *heads, last = path.split(".")
        for head in heads:
            entry = entry.setdefault(head, {})
        entry[last] = value

    return edit


def _choose(role: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Write a setting beside the recipe, as if a search had chosen it."""

    def edit(entry: dict[str, Any]) -> None:
        for one in entry[role]["runs"]:
            one["chosen"] = {key: value}

    return edit


RULES: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("a control with fewer trials", lambda e: _searched(e, {"method": 3, "control": 2, "placebo": 3}), "budget"),
    ("not the best setting", lambda e: _searched(e, dict.fromkeys(("method", "control", "placebo"), 3), 0.05), "best"),
    ("a missing placebo", lambda e: e.pop("placebo"), "lacks"),
    ("a placebo that is the method", _set("placebo.recipe.algorithm.placebo", "none"), "another value"),
    ("two seeds", lambda e: e["method"]["runs"].pop(), "different ones"),
    ("other seeds of the control", lambda e: e["control"]["runs"][0].update(seed=9), "other seeds"),
    ("a control with other clients", _set("control.recipe.clients.num", 4), "clients.num"),
    ("a control of another method", _set("control.recipe.algorithm.name", "fedprox"), "plain fedavg"),
    ("a private control", _set("control.recipe.algorithm.private", ["head"]), "plain fedavg"),
    ("a path outside", _set("method.recipe.data.path", "../../etc/passwd"), "path"),
    ("a folder of features", _set("method.recipe.data.cache", "/tmp"), "path"),
    ("another file", _set("method.recipe.data.label", "/etc/passwd"), "path"),
    ("another model", _set("method.recipe.model.init", "/root/model"), "another model"),
    ("a tracker", _set("method.recipe.tracking", {"name": "wandb"}), "tracking"),
    ("a graphics card", _set("method.recipe.engine.device", "cuda"), "threads"),
    ("processes", _set("method.recipe.engine.name", "flower"), "vectorised"),
    ("names of Markdown", _set("method.name", "a](http://x)|<b>"), "letters"),
    ("more rounds than the control, as a setting", _choose("method", "rounds", 9), "rounds than"),
    ("a path as a setting", _choose("control", "data.path", "/etc/passwd"), "is a path"),
    ("a whole section as a setting", _choose("control", "data", {"path": "/etc/passwd"}), "is a path"),
    ("another model as a setting", _choose("method", "model.init", "/root/model"), "another model"),
    ("a tracker as a setting", _choose("placebo", "tracking", {"name": "wandb"}), "tracking"),
    ("a graphics card as a setting", _choose("control", "engine.device", "cuda"), "threads"),
    ("another algorithm as a setting", _choose("method", "algorithm.name", "fedprox"), "choose the algorithm"),
    ("a private control as a setting", _choose("control", "algorithm.private", ["head"]), "plain fedavg"),
    ("a placebo that is the method, as a setting", _choose("placebo", "algorithm.placebo", "none"), "another value"),
    ("a setting inside of a value", _choose("method", "rounds.more", 1), "is a value"),
    ("a section that is none", _set("control.recipe.algorithm", 3), "section"),
    ("a section that is a text", _set("control.recipe.server", "os:system"), "section"),
]


@pytest.mark.parametrize(("edit", "said"), [row[1:] for row in RULES], ids=[row[0] for row in RULES])
def test_rules(tmp_path: Path, made: dict[str, Any], edit: Callable[[dict[str, Any]], Any], said: str) -> None:
    entry = copy.deepcopy(made)
    assert not list(faults_of(entry))  # type: ignore[arg-type]
    edit(entry)
    with refuses(DataError, said):
        verify_entry(written(tmp_path, entry))


def test_a_number_under_a_dotted_name_hides_no_other(tmp_path: Path, made: dict[str, Any]) -> None:
    """`metrics.global.accuracy` in one key is not the accuracy of the page, and does not stand for it."""
    entry = copy.deepcopy(made)
    for one in entry["method"]["runs"]:
        scores = one["result"]["metrics"]["global"]
        one["result"]["metrics.global.accuracy"] = scores["accuracy"]
        scores["accuracy"] = 0.999
    faults = verify_entry(written(tmp_path, entry)).faults
    assert sum("0.999 in the file" in fault for fault in faults) == 3


def test_reading_an_entry_imports_nothing(
    tmp_path: Path, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as the control, whose class a rule looks up, nor as a setting of it."""
    (tmp_path / "unasked.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    for edit in (
        _set("control.recipe.algorithm.name", "unasked:Mine"),
        _choose("control", "algorithm.name", "unasked:Mine"),
    ):
        entry = copy.deepcopy(made)
        edit(entry)
        with refuses(DataError, "plain fedavg"):
            read_entry(written(tmp_path, entry))
        assert not (tmp_path / "ran").exists()


def test_same_budget_is_allowed(tmp_path: Path, made: dict[str, Any]) -> None:
    entry = copy.deepcopy(made)
    _searched(entry, dict.fromkeys(("method", "control", "placebo"), 3))
    assert not list(faults_of(entry))  # type: ignore[arg-type]


def test_files_that_are_no_entry(tmp_path: Path, made: dict[str, Any]) -> None:
    bomb, deep, large = tmp_path / "bomb.zip", tmp_path / "deep.json", tmp_path / "large.json"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("entry.json", b"0" * 10**7)
    deep.write_text("[" * 100_000)
    with large.open("wb") as file:
        file.truncate(LARGEST + 1)
    for path in (bomb, deep, tmp_path / "absent.json"):
        with refuses(DataError, path.name):
            read_entry(path)
    with refuses(DataError, "bytes"):
        read_entry(large)
    with refuses(DataError, "Extra inputs"):
        read_entry(written(tmp_path, made | {"more": 1}))


def _with_code(made: dict[str, Any], module: str, mark: Path) -> dict[str, Any]:
    """An entry whose method is FedAvg in a module that leaves a mark when it is imported."""
    entry, text = copy.deepcopy(made), OWN.format(mark=mark)
    del entry["placebo"]
    entry["no_placebo"] = "It changes nothing, so nothing can be replaced."
    entry["method"] = copy.deepcopy(entry["control"]) | {"name": "mine"}
    entry["method"]["recipe"]["algorithm"]["name"] = f"{module}:Mine"
    for one in entry["method"]["runs"]:
        one["result"]["algorithm"] = f"{module}:Mine"
    entry["code"] = {"module": module, "sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}
    return entry


def test_code_of_a_stranger_is_not_run_unasked(tmp_path: Path, made: dict[str, Any]) -> None:
    mark = tmp_path / "mark"
    entry = _with_code(made, "stranger_of_the_board", mark)
    file, digest = written(tmp_path, entry), entry["code"]["sha256"]
    with refuses(NotAllowed, "--run-code"):
        verify_entry(file)
    for given in ("0" * 64, digest[:4]):
        with refuses(NotAllowed, "unread"):
            verify_entry(file, run_code=given)
    (tmp_path / "other.py").write_text("pass")
    with refuses(RecipeError, "--code"):
        verify_entry(file, code=tmp_path / "other.py")
    assert not mark.exists()
    assert not verify_entry(file, run_code=digest[:12]).faults
    assert mark.exists()


@pytest.mark.parametrize("key", ["model.fusion", "data.name", "clients.partition", "model.encoders.a.kind"])
def test_other_classes_are_not_imported(
    tmp_path: Path, made: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules refuse them, and so does whatever the rules might overlook."""
    mark, entry = tmp_path / "mark", copy.deepcopy(made)
    (tmp_path / "stranger_elsewhere.py").write_text(OWN.format(mark=mark))
    monkeypatch.syspath_prepend(tmp_path)
    for role in ("method", "control", "placebo"):
        _set(key, "stranger_elsewhere:Mine")(entry[role]["recipe"])
    with refuses(DataError, "is a class"):
        verify_entry(written(tmp_path, entry))
    monkeypatch.setattr("polyfed.experiment.leaderboard.entry.faults_of", lambda entry: iter(()))
    with refuses(NotAllowed, "may not"):
        verify_entry(written(tmp_path, entry))
    assert not mark.exists()


def test_edited_code_and_taken_names(tmp_path: Path, made: dict[str, Any]) -> None:
    entry = _with_code(made, "pytest", tmp_path / "mark")
    with refuses(RecipeError, "Run elsewhere"):
        verify_entry(written(tmp_path, entry), run_code=entry["code"]["sha256"])
    entry["code"]["text"] += "\n"
    with refuses(DataError, "SHA-256"):
        read_entry(written(tmp_path, entry))
    entry = _with_code(made, "../outside", tmp_path / "mark")
    with refuses(DataError, "plain name"):
        read_entry(written(tmp_path, entry))


def test_exit_codes_and_other_data(tmp_path: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    entry = copy.deepcopy(made)
    entry["made"]["versions"]["torch"] = "1.0"
    entry["method"]["runs"][0]["result"]["bytes_up"] += 1
    with pytest.raises(SystemExit) as end:
        main(["board", "verify", str(written(tmp_path, entry)), "--json"])
    assert end.value.code == 5
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 5
    assert "torch 1.0 there" in error["message"]
    with pytest.raises(SystemExit) as end:
        main(["board", "verify", str(written(tmp_path, _with_code(made, "unread", tmp_path / "mark")))])
    assert end.value.code == 3
    entry = copy.deepcopy(made)
    entry["data"] = "0" * 64
    with refuses(DataError, "other data"):
        verify_entry(written(tmp_path, entry))


@pytest.mark.parametrize(
    "key",
    [f"{name}.key" for name, section in SECTIONS.items() if not section.of_method and name not in NOT_PACKED],
)
def test_the_control_has_the_sections_that_no_method_brings(made: dict[str, Any], key: str) -> None:
    """`model` is one that a method may bring."""
    entry = copy.deepcopy(made)
    _set("control.recipe.model.key", 1)(entry)
    assert not list(faults_of(entry))  # type: ignore[arg-type]
    _set(f"control.recipe.{key}", 1)(entry)
    assert list(faults_of(entry)) == [f"control: it has another {key} than the method"]  # type: ignore[arg-type]


def _study(folder: Path, data: dict[str, Any] | None = None) -> Path:
    """The folder of a study with two trials of one seed, of which one diverged at the control."""
    methods: dict[str, dict[str, Any]] = {
        "fedavg": {"method": "fedavg"},
        "feddyn": {"method": "feddyn"},
        "random": {"method": "feddyn", "placebo": "random"},
    }
    runs = []
    for name, options in methods.items():
        for seed, tuning, lr in [(1, False, 0.1), (2, False, 0.1), (3, False, 0.1), (9, True, 0.1), (9, True, 0.0001)]:
            if tuning and name == "random":  # it has the settings of feddyn
                continue
            own = table(seed=seed, **options)
            own["train"]["lr"] = lr
            own["data"] = data or own["data"]
            own["clients"] |= {"validation": 0.2} | ({"measure_on": "validation"} if tuning else {})
            place = f"runs/{name}-{seed}-{lr}"
            diverged = name == "fedavg" and lr < 0.1
            if diverged:
                (folder / "failures").mkdir(parents=True)
                (folder / "failures" / f"{Path(place).name}.json").write_text("{}")
            else:
                run(parse_recipe(own), out=folder / place)
            told = {"folder": place, "method": name, "scenario": "toy", "tuning": tuning, "seed": seed}
            runs.append(told | {"state": "failed" if diverged else "finished", "chosen": {"train.lr": lr}})
    (folder / "study.json").write_text(json.dumps({"metrics": {"toy": ["global.accuracy"]}, "runs": runs}))
    return folder


def test_packing_a_study(tmp_path: Path) -> None:
    file = tmp_path / "entry.json"
    entry = pack_entry(_study(tmp_path / "study"), file)
    assert (entry["method"]["name"], entry["control"]["name"], entry["placebo"]["name"]) == (
        "feddyn",
        "fedavg",
        "random",
    )
    assert [one["result"] is None for one in entry["control"]["runs"]] == [False, False, False, False, True]
    assert read_entry(file)[0] == json.loads(file.read_text())
    faults = verify_entry(file, search=True).faults  # the run that "diverged" does not diverge
    assert [fault for fault in faults if "does not diverge" in fault] == faults[:-1]
    assert len(faults) == 2
    with refuses(RecipeError, "single run"):
        pack_entry(tmp_path / "study" / "runs" / "feddyn-1-0.1", file)
    with refuses(RecipeError, "none of"):
        pack_entry(tmp_path / "study", file, method="fedin")
    with refuses(DataError, "lacks"):
        pack_entry(tmp_path / "study", file, method="feddyn", no_placebo="It has one, but we do not show it.")


def _ended(*words: Any) -> int:
    """The exit code of `polyfed board`."""
    try:
        main(["board", *map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_file_of_data_stays_with_its_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An entry has the name of the file and its fingerprint: a copy elsewhere repeats it, an edited one does not."""
    secret, copied, entry = tmp_path / "secret", tmp_path / "copy.csv", tmp_path / "entry.json"
    secret.mkdir()
    rows = [f"{i % 3},{i % 7 / 7:.3f},{i % 3 + i % 5 / 9:.3f},{i % 4 / 4:.3f},{i % 9}" for i in range(60)]
    text = "\n".join(["label,a_0,a_1,b_0,b_1", *rows]) + "\n"
    (secret / "mine.csv").write_text(text)
    copied.write_text(text)
    study = _study(tmp_path / "study", parse_toml(starter(secret / "mine.csv", {}).text)["data"])
    assert _ended("pack", study, "--out", entry) == 0
    assert "mine.csv" in entry.read_text()
    assert "secret" not in entry.read_text()
    assert "0.143,1.111" not in entry.read_text()
    assert _ended("verify", entry) == 2
    assert "--data PATH" in capsys.readouterr().err
    assert not polyfed.verify_entry(str(entry), data=str(copied)).faults
    copied.write_text(text.replace("0.143,1.111", "0.143,1.112"))
    assert copied.read_text() != text
    assert _ended("verify", entry, "--data", copied) == 5
    assert "other data" in capsys.readouterr().err


@pytest.mark.parametrize("file", ENTRIES, ids=lambda path: path.stem)
def test_the_entries_of_the_repository_keep_the_rules(file: Path) -> None:
    assert read_entry(file)[0]["code"] is None


@pytest.mark.slow
@pytest.mark.parametrize("file", ENTRIES, ids=lambda path: path.stem)
def test_the_entries_of_the_repository_repeat(file: Path) -> None:
    entry, now = read_entry(file)[0], here()
    same = (entry["made"]["versions"], entry["made"]["processor"]) == (now["versions"], now["processor"])
    faults = verify_entry(file, search=True).faults
    assert not faults if same else not faults or "likely cause" in faults[-1]
