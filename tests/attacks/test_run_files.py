"""The files of a run or of a saved model may come from somebody else: none of them runs code or ends in a traceback."""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from polyfed.cli import main
from polyfed.core.errors import CheckpointError, DataError, NotAllowed, PolyfedError, RecipeError, TooFewReplies
from polyfed.core.system.json_and_toml import MOST_DEPTH, parse_json, parse_toml
from polyfed.experiment.evaluate import evaluate
from polyfed.experiment.evaluate import write as write_evaluation
from polyfed.experiment.running import checkpoint
from polyfed.recommendation.pilot import Pilot
from polyfed.recommendation.verdicts import Verdicts
from polyfed.report import compare, write_comparison, write_report
from refusals import refuses
from world import algorithm, recipe

ROUNDS = 2

DEEP = "[" * 900 + "]" * 900
DEEPER = "[" * 100_000
HUGE = "9" * 400
HUGER = "9" * 5000

EXTREMES = {
    "deep": f'{{"round": 1, "a": {DEEP}}}',
    "deeper": f'{{"round": 1, "a": {DEEPER}',
    "huge": f'{{"round": {HUGE}, "run": {HUGE}, "num_clients": {HUGE}, "rounds": {HUGE}}}',
    "huger": f'{{"round": {HUGER}}}',
    "infinite": '{"round": 1e999, "num_clients": 1e999, "run": 1e999, "seed": 1e999, "seconds_total": "soon"}',
    "list": "[]",
    "other types": '{"round": [], "clients": 3, "egress": [], "run": {}, "metrics": 1, "seconds": 2}',
}
"""Texts that parse, most of them, and then break code that expects the file of a run."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    polyfed.run(recipe(algorithm("fedavg"), rounds=ROUNDS), folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    for path in finished.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(finished)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return copy


def resume(folder: Path) -> None:
    polyfed.run(recipe(algorithm("fedavg"), rounds=ROUNDS + 1), folder, resume=True)


def restate(folder: Path, change: Callable[[Any], Any]) -> Path:
    """Change state.json and state its new checksum, as an attacker would."""
    (path,) = folder.rglob("state.json")
    text = change(path.read_text())
    path.write_text(text)
    relabel(folder, lambda latest: latest["sha256"].update({"state.json": checkpoint.sha256_of(path)}))
    return path


def relabel(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / "checkpoint" / "latest.json"
    latest = json.loads(path.read_text())
    change(latest)
    path.write_text(json.dumps(latest))


# checkpoints


@pytest.mark.parametrize(
    "change",
    [
        lambda latest: latest["sha256"].clear(),
        lambda latest: latest.pop("sha256"),
        lambda latest: latest["sha256"].pop("state.json"),
        lambda latest: latest["sha256"].pop("state.safetensors"),
        lambda latest: latest.update(sha256=[]),
        lambda latest: latest.update(sha256=dict.fromkeys(["../../run.json"], "")),
    ],
)
@pytest.mark.parametrize("read", [resume, polyfed.load_run])
def test_a_checkpoint_without_its_checksums_is_not_read(change: Any, read: Any, run: Path) -> None:
    relabel(run, change)
    (tensors,) = run.rglob("state.safetensors")
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1  # what the checksum would have shown
    tensors.write_bytes(content)
    with refuses(CheckpointError, "latest.json"):
        read(run)


@pytest.mark.parametrize("name", ["..", "/etc", "round-000002/../../elsewhere", 3, None, "elsewhere"])
def test_a_checkpoint_is_read_from_its_own_folder_only(name: Any, run: Path) -> None:
    relabel(run, lambda latest: latest.update(folder=name))
    with refuses(CheckpointError, "name the folder"):
        polyfed.load_run(run)


@pytest.mark.parametrize("round", [float("inf"), "2", [2], -1, True, 2.5])
def test_the_round_of_a_checkpoint_is_a_number_of_a_round(round: Any, run: Path) -> None:
    relabel(run, lambda latest: latest.update(round=round))
    for read in (resume, polyfed.load_run):
        with refuses(CheckpointError, "name a round"):
            read(run)


def nested(depth: int) -> str:
    return '{"list":[' * depth + '{"value":1}' + "]}" * depth


@pytest.mark.parametrize(
    "text",
    [
        nested(MOST_DEPTH),
        nested(400),
        nested(50_000),
        "[]",
        "{}",
        "3",
        '{"dict": 3}',
        '{"dict": [[1, 2]]}',
        '{"tensor": "not there"}',
        '{"tensor": []}',
        '{"class": 3, "fields": []}',
        '{"class": "polyfed.algorithms.base:State"}',
        '{"class": "polyfed.algorithms.base:State", "fields": [["unheard_of", {"value": 1}]]}',
        '{"class": "polyfed.training.optimisers:Train", "fields": [["lr", {"value": -1.0}]]}',
        f'{{"value": {HUGER}}}',
        '{"value": 3}',
        '{"dict": []}',
        '{"dict": [[{"value": "run"}, {"value": "x"}]]}',
    ],
)
@pytest.mark.parametrize("read", [resume, polyfed.load_run])
def test_a_state_of_another_form_is_refused_in_words(text: str, read: Any, run: Path) -> None:
    restate(run, lambda _: text)
    with refuses(CheckpointError, "checkpoint in") as caught:
        read(run)
    assert caught.value.exit_code == 5


ENTRIES = ["run", "round", "state", "locals", "totals", "places", "federation"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_of_a_checkpoint_is_checked(entry: str, run: Path) -> None:
    def misname(text: str) -> str:
        return text.replace(f'[{{"value": "{entry}"}}', '[{"value": "unheard of"}')

    def retype(text: str) -> str:
        content = json.loads(text)
        for pair in content["dict"]:
            if pair[0] == {"value": entry}:
                pair[1] = {"list": []}
        return json.dumps(content)

    (path,) = run.rglob("state.json")
    before = path.read_text()
    for change in (misname,) if entry == "state" else (misname, retype):
        assert change(before) != before
        text = change(before)
        restate(run, lambda _, text=text: text)  # type: ignore[misc]
        with pytest.raises(CheckpointError):
            polyfed.load_run(run)


def test_a_state_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(MOST_DEPTH):
        deep = [deep]
    cycle: list[Any] = []
    cycle.append(cycle)
    for state in (deep, cycle, 10**400):
        with refuses(CheckpointError, "written to a"):
            checkpoint.save(tmp_path, 1, state)
    checkpoint.save(tmp_path, 1, 2**130)
    assert checkpoint.load(tmp_path) == (1, 2**130)


# the other files of a run


@pytest.mark.parametrize("name", ["rounds.jsonl", "run.json"])
@pytest.mark.parametrize("text", EXTREMES.values(), ids=EXTREMES)
def test_a_run_does_not_go_on_from_a_damaged_file(name: str, text: str, run: Path) -> None:
    (run / name).write_text(text + "\n")
    relabel(run, lambda latest: None)
    with pytest.raises((CheckpointError, DataError)) as caught:
        resume(run)
    assert name in str(caught.value)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("name", ["rounds.jsonl", "result.json"])
@pytest.mark.parametrize("text", EXTREMES.values(), ids=EXTREMES)
def test_a_run_is_not_loaded_from_a_damaged_file(name: str, text: str, run: Path) -> None:
    (run / name).write_text(text + "\n")
    with refuses((CheckpointError, DataError), name):
        polyfed.load_run(run)


@pytest.mark.parametrize("name", ["rounds.jsonl", "run.json", "result.json"])
@pytest.mark.parametrize("text", EXTREMES.values(), ids=EXTREMES)
def test_a_report_of_a_damaged_file_ends_with_exit_code_5(
    name: str, text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).write_text(text + "\n")
    with pytest.raises(SystemExit) as caught:
        main(["report", str(run)])
    said = capsys.readouterr().err
    assert caught.value.code == 5
    assert name in said
    assert "is damaged" in said
    if name == "result.json":
        with pytest.raises(SystemExit) as caught:
            main(["compare", str(run)])
        assert caught.value.code == 5


@pytest.mark.parametrize("text", EXTREMES.values(), ids=EXTREMES)
def test_a_model_is_not_evaluated_beside_a_damaged_file(text: str, run: Path, tmp_path: Path) -> None:
    found = evaluate(run)
    write_evaluation(found, tmp_path / "evaluation")
    (tmp_path / "evaluation" / "evaluation.json").write_text(text)
    with refuses((CheckpointError, RecipeError), "evaluation"):
        write_evaluation(found, tmp_path / "evaluation")
    (run / "result.json").write_text(text)
    with refuses((CheckpointError, DataError), "result.json"):
        evaluate(run)


TABLE = {
    "data": {"name": "toy", "rows": 120, "classes": 3},
    "clients": {"num": 3},
    "model": {"embedding": 4, "encoders": {name: {"kind": "mlp", "hidden": [4]} for name in ("a", "b")}},
    "rounds": 2,
    "seed": 1,
}

PLANS = {
    "a stage": '{"search": []}',
    "a number of trials": '{"search": {"trials": 10000, "tuning_seeds": 1, "dropped": {}}}',
    "endless seeds": '{"seeds-5": {"seeds": 1e999, "dropped": {}, "placebos": {}}}',
    "a cost without bytes": '{"probe": {"fedavg": {"seconds": 1.0}}}',
    "no number of seconds": '{"seconds": "soon"}',
    "time without end": '{"seconds": NaN}',
    "a method that nobody asked for": '{"seconds": 0.0, "probe": {"../../fedavg": {"why": "x"}}}',
}


PLANS |= {name: EXTREMES[name] for name in ("deep", "deeper", "huge", "huger", "list")}


@pytest.mark.parametrize("text", PLANS.values(), ids=PLANS)
def test_a_recommendation_does_not_go_on_from_a_damaged_plan(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(pilot: Pilot) -> Pilot:
        raise TooFewReplies("stopped")

    monkeypatch.setattr(Pilot, "__enter__", stopped)
    ask = partial(polyfed.recommend, TABLE, tmp_path / "r", methods=["fedavg"], jobs=1)
    with refuses(TooFewReplies, "stopped"):
        ask(minutes=1.0)
    monkeypatch.undo()
    (tmp_path / "r" / "plan.json").write_text(text)
    with refuses(CheckpointError, "plan.json is damaged"):
        ask(minutes=1.0)


KEPT = {
    "another type": (
        '{"state": "now", "verdicts": {"x": {"refused": 1, "code": 0, "unmeasured": "", "reply_bytes": 1}}}'
    ),
    "a part": '{"state": "now", "verdicts": {"x": {"refused": ""}}}',
    "bytes below zero": (
        '{"state": "now", "verdicts": {"x": {"refused": "", "code": 0, "unmeasured": "", "reply_bytes": -1}}}'
    ),
}
KEPT |= {name: EXTREMES[name] for name in ("deep", "deeper", "huge", "huger", "list")}


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_damaged_verdicts_are_made_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / "verdicts.json").write_text(text)
    found = Verdicts("now")
    found.read(tmp_path)
    assert not found.known


ROW = {"round": 1, "cohort": [0], "bytes_up": 1, "bytes_down": 1, "seconds": {"train": 1.0}}

WRONG: list[dict[str, Any]] = [
    {"cohort": [10**30]},
    {"cohort": 3},
    {"cohort": ["a"]},
    {"missing": {"nobody": "why"}},
    {"missing": {"1": {"a": 1}}},
    {"trained": {"a": [1e400]}},
    {"metrics": {"global": {"accuracy": "much"}}},
    {"metrics": {"global": 3}},
    {"personal_accuracy": {"0": "much"}},
    {"personal_accuracy": [1]},
    {"tables": {"t": [[1], [1, 2]]}},
    {"tables": {"t": "x"}},
    {"confusion": [[1, 2]]},
    {"confusion": 3},
    {"seconds": {"train": 10**400}},
    {"seconds": None},
    {"bytes_up": -1},
    {"bytes_up": 10**30},
]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_round_with_a_wrong_entry_is_damage(change: dict[str, Any], run: Path, tmp_path: Path) -> None:
    (run / "rounds.jsonl").write_text(json.dumps(ROW | change) + "\n")
    if "confusion" not in change or change["confusion"] == 3:  # a report does not look at the matrix itself
        with refuses(DataError, "rounds.jsonl"):
            write_report(run)
        with refuses(DataError, "rounds.jsonl"):
            write_comparison(compare([run]), tmp_path / "c.html")
    if "tables" not in change and "missing" not in change:  # nor does a comparison look at these
        with refuses(DataError, "rounds.jsonl"):
            compare([run, another_fold(run)], reach=0.5)


def another_fold(folder: Path) -> Path:
    """A copy of a run that is another fold of it, so that comparing both pools their confusion matrices."""
    other = folder.with_name("other")
    other.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".html":
            (other / path.name).write_bytes(path.read_bytes())
    text = (other / "recipe.toml").read_text()
    (other / "recipe.toml").write_text(text.replace("[data]\n", "[data]\nfold = 2\n"))
    return other


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"bytes":', f'"bytes":{DEEP},"was":'),
        ('"bytes":', f'"bytes":{DEEPER},"was":'),
        ('"bytes":', '"bytes":1e999,"was":'),
        ('"bytes":', f'"bytes":{HUGE},"was":'),
        ('"bytes":', '"bytes":-1,"was":'),
        ('"client":', f'"client":{HUGER},"was":'),
    ],
)
def test_a_ledger_with_a_wrong_entry_is_damage(old: str, new: str, run: Path) -> None:
    path = run / "egress.jsonl"
    path.write_text(path.read_text().replace(old, new, 1))
    with refuses(DataError, "egress.jsonl"):
        write_report(run)


RECIPES = {
    "deep lists": f"\nunheard = {DEEP}\n",
    "deeper lists": f"\nunheard = {DEEPER}\n",
    "deep tables": f"\n[{'.'.join(['a'] * 5000)}]\n",
    "huge": f"\n[unheard]\na = {HUGE}\n",
    "huger": f"\n[unheard]\na = {HUGER}\n",
}


@pytest.mark.parametrize("text", RECIPES.values(), ids=RECIPES)
def test_the_resolved_recipe_may_be_an_attack_too(text: str, run: Path) -> None:
    path = run / "recipe.toml"
    path.write_text(path.read_text() + text)
    for read in (resume, write_report, polyfed.load_run, lambda folder: compare([folder])):
        with refuses(PolyfedError, "recipe.toml") as caught:
            read(run)
        assert caught.value.exit_code in (2, 5)


@pytest.mark.parametrize("parse", [parse_json, parse_toml])
def test_what_is_not_extreme_parses(parse: Callable[[str], Any]) -> None:
    list_of_lists = "[" * (MOST_DEPTH - 2) + "]" * (MOST_DEPTH - 2)
    toml = f"a = {list_of_lists}\nb = {2**130}"
    text = toml if parse is parse_toml else f'{{"a": {list_of_lists}, "b": {2**130}}}'
    assert parse(text)["b"] == 2**130


# saved models


SENTINEL = """
import os
from pathlib import Path
from torch import nn

Path(os.environ["TRACE"]).touch()

class Encoder(nn.Module):
    def __init__(self, shape, embedding):
        super().__init__()
        self.layer = nn.Linear(shape[0], embedding)

    def forward(self, x):
        return self.layer(x)
"""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that importing the module `sentinel` leaves."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sentinel.py").write_text(SENTINEL)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    yield tmp_path / "trace"
    sys.modules.pop("sentinel", None)


def exported(folder: Path, change: Callable[[Any], Any]) -> Path:
    """A saved model with another model.json."""
    path = polyfed.run(recipe(algorithm("local"), rounds=1)).export(folder) / "model.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said["model"]["encoders"].update(a={"kind": "sentinel:Encoder"}),
        lambda said: said["predictor"].update(name="sentinel:Encoder"),
    ],
)
@pytest.mark.parametrize("imports", [[], ["other:Encoder"], ["sentinel:Other", "sentinels.*"]])
def test_a_saved_model_imports_nothing_that_the_caller_did_not_name(
    change: Any, imports: list[str], trace: Path, tmp_path: Path
) -> None:
    folder = exported(tmp_path / "model", change)
    with refuses(NotAllowed, 'load_model(..., imports=["sentinel:Encoder"])'):
        polyfed.load_model(folder, imports=imports)
    assert not trace.exists()
    assert "sentinel" not in sys.modules


def test_a_saved_model_imports_what_the_caller_named(trace: Path, tmp_path: Path) -> None:
    encoders = {"a": {"kind": "sentinel:Encoder"}, "b": {"kind": "mlp", "hidden": [4]}}
    run = polyfed.run(recipe(algorithm("fedavg"), encoders=encoders, rounds=1))
    x = {"a": torch.ones(2, 16), "b": torch.ones(2, 24)}
    folder = run.export(tmp_path / "model")
    trace.unlink()
    sys.modules.pop("sentinel")
    models = polyfed.load_model(folder, imports=["sentinel:Encoder"])
    assert trace.exists()
    assert torch.equal(models.predict(x), run.predict(x))


def test_a_saved_model_reads_no_other_model_that_the_caller_did_not_name(tmp_path: Path) -> None:
    folder = exported(
        tmp_path / "model", lambda said: said["model"]["encoders"].update(a={"kind": "hf", "path": "/elsewhere"})
    )
    with refuses(NotAllowed, 'backbones=["/elsewhere"]'):
        polyfed.load_model(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.update(shapes={"a": [10**30], "b": [24]}),
        lambda said: said.update(shapes={"a": [-1], "b": [24]}),
        lambda said: said.update(classes=10**30),
        lambda said: said.update(sha256={}),
        lambda said: said.update(clients=3),
        lambda said: said.update(model=[]),
        lambda said: said["model"].update(encoders=[]),
        lambda said: said.update(predictor={"name": 3}),
        lambda said: said.update(reads=3),
    ],
)
def test_a_damaged_description_of_a_model_is_refused_in_words(change: Any, tmp_path: Path) -> None:
    folder = exported(tmp_path / "model", change)
    with refuses(PolyfedError, "model.json") as caught:
        polyfed.load_model(folder).of(0)
    assert caught.value.exit_code in (2, 5)


@pytest.mark.parametrize("text", [DEEP, DEEPER, f'{{"format": {HUGE}}}', f'{{"format": {HUGER}}}', "[]", ""])
def test_a_description_that_is_extreme_is_refused_in_words(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(DataError):
        polyfed.load_model(tmp_path)
