"""What the first run on one's own data says: whether to go on, what sets hold, who the clients are, what is wrong."""

import io
import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed
from polyfed.cli import main
from polyfed.cli.printing.tables import result_table
from polyfed.core.errors import DataError, PolyfedWarning, UnknownClient
from polyfed.data import ClientsSpec, Columns, populate
from polyfed.data.reading.given import Given
from polyfed.data.reading.objects import table_of
from polyfed.experiment.recipes.file_reading import read_file
from polyfed.experiment.results.model_facts import least_held
from polyfed.experiment.results.round_facts import still_falls
from polyfed.report.pages.evaluation import notes
from polyfed.report.text_layout import SafeConsole
from refusals import refuses, warned

ROWS = 120
DRAW = np.random.default_rng(3)
LABEL = np.arange(ROWS) % 2
PLACES = np.array(["Nord", "Süd", "West"])[np.arange(ROWS) // 2 % 3]

pytestmark = pytest.mark.filterwarnings("ignore:data. .*features differ in size", "ignore:.*because of the name")


def rounds(losses: Any, **groups: Any) -> list[dict[str, Any]]:
    held = [{name: {"loss": own[place]} for name, own in groups.items()} for place in range(len(losses))]
    return [{"train_loss": float(loss), "metrics": one} for loss, one in zip(losses, held, strict=True)]


def test_noise_seldom_seems_to_fall() -> None:
    told = [still_falls(rounds(DRAW.normal(0.5, 0.2, 20))) for _ in range(2000)]
    assert sum(one is not None for one in told) <= 20  # 0.5 %, and some
    levelled = 0.4 + np.exp(-np.arange(40) / 3) + DRAW.normal(0, 0.003, 40)
    assert still_falls(rounds(levelled)) is None
    assert still_falls(rounds(np.linspace(0.5, 0.499, 20))) is None, "a fall of less than a twentieth"


@pytest.mark.parametrize("group", ["validation", "personal_validation", "global"])
def test_a_loss_that_falls_is_told_unless_others_rise(group: str) -> None:
    falling = 0.3 + np.exp(-np.arange(20) / 12) + DRAW.normal(0, 0.01, 20)
    assert still_falls(rounds(falling)) == {
        "first": pytest.approx(falling[10:13].mean()),
        "last": pytest.approx(falling[-3:].mean()),
        "rounds": 10,
    }
    rising = np.linspace(0.5, 0.6, 20)
    assert still_falls(rounds(falling, **{group: rising})) is None
    assert still_falls(rounds(falling, **{group: rising[::-1]})) is not None
    assert still_falls(rounds(falling[:7])) is None
    seldom = [{} if place not in (11, 15, 19) else {"loss": value} for place, value in enumerate(rising)]
    told = [row | {"metrics": {group: own}} for row, own in zip(rounds(falling), seldom, strict=True)]
    assert still_falls(told) is None, "three evaluations are enough to see a rise"
    late = np.concatenate([np.linspace(0.6, 0.3, 18), [0.5, 0.55]])
    assert still_falls(rounds(falling, **{group: late})) is None, "the lowest loss is not the last"
    assert still_falls(rounds(np.where(np.arange(20) == 15, np.nan, falling))) is None


def frame(rows: int = ROWS, **more: Any) -> pd.DataFrame:
    y, draw = LABEL[:rows], np.random.default_rng(7)
    signal = draw.normal(size=(rows, 5)) + y[:, None]
    held = {f"{'aaabb'[n]}_{n % 3}": signal[:, n] for n in range(5)}
    return pd.DataFrame({**held, "place": PLACES[:rows], "label": np.array(["no", "yes"])[y], **more})


def printed(result: dict[str, Any], folder: object) -> str:
    console = SafeConsole(width=400, file=io.StringIO())
    console.print(result_table(result, folder))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_printed_command_goes_on_to_more_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame().to_csv(tmp_path / "mine.csv", index=False)
    run = polyfed.run(
        data=tmp_path / "mine.csv", clients="place", rounds=10, train={"lr": 0.1}, seed=1, out=tmp_path / "run"
    )
    text = printed(run.result, run.folder)
    told = re.search(r"still falls, from .*To go on to 20 rounds: polyfed (run .*)", text)
    assert told is not None, text
    assert "To go on to 20 rounds" in (tmp_path / "run" / "report.html").read_text()
    with pytest.raises(SystemExit) as ended:
        main(told[1].split())
    assert ended.value.code == 0, capsys.readouterr().err
    assert polyfed.load_run(tmp_path / "run").result["rounds"] == 20
    assert "still falls" not in printed(run.result | {"still_falls": None}, None)


def test_an_evaluation_tells_how_often_sets_hold_the_truth_of_new_rows(tmp_path: Path) -> None:
    made: dict[str, Any] = {"clients": {"partition": "by-client", "personal_validation": 0.3}, "rounds": 2, "seed": 1}
    frame().rename(columns={"place": "client"}).to_csv(tmp_path / "train.csv", index=False)
    fresh = frame().rename(columns={"place": "client"}).assign(label="no")  # all of one class, so not like the others
    fresh.to_csv(tmp_path / "fresh.csv", index=False)
    groups = {"modalities": {"a": "a_*", "b": "b_*"}, "evaluate": {"conformal": "split"}}
    run = polyfed.run(data=tmp_path / "train.csv", **made, **groups, out=tmp_path / "run")
    run.export(tmp_path / "model")
    told = polyfed.evaluate(tmp_path / "run", data=tmp_path / "fresh.csv").content
    sets = run.predict_set(fresh.drop(columns="label"), 0.9)
    right = np.mean(["no" in names for names in sets.classes])
    assert told["sets"]["holds"] == pytest.approx(right)
    assert told["sets"]["size"] == pytest.approx(float(sets.sizes.double().mean()))
    assert told["sets"]["rows"] == len(fresh)
    recipe = tmp_path / "run" / "recipe.toml"
    same = polyfed.evaluate(tmp_path / "model", recipe=recipe, data=tmp_path / "fresh.csv").content
    assert same["sets"] == told["sets"]
    about = tmp_path / "model" / "model.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"predictor": {"name": "theirs:Predictor"}}))
    strange = polyfed.evaluate(tmp_path / "model", recipe=recipe, data=tmp_path / "fresh.csv").content
    assert strange["pooled"]["metrics"] == told["pooled"]["metrics"], "the recipe's own classes computed the scores"
    assert "theirs:Predictor" in strange["sets"]["refused"]
    (line,) = [line for line in notes(told) if line.startswith("prediction sets")]
    assert f"{100 * right:.1f} % of {len(fresh)} test rows" in line
    assert "sets" not in polyfed.evaluate(tmp_path / "run", rows="validation").content, "sets were calibrated on these"
    polyfed.run(data=tmp_path / "train.csv", **made, modalities=groups["modalities"], out=tmp_path / "without")
    assert "sets" not in polyfed.evaluate(tmp_path / "without", data=tmp_path / "fresh.csv").content


def test_sets_are_told_with_their_size_and_rows() -> None:
    made: dict[str, Any] = {"clients": {"partition": "by-client", "personal_validation": 0.3}, "rounds": 2, "seed": 1}
    held = frame(sex=np.array(["f", "m"])[DRAW.integers(0, 2, ROWS)]).rename(columns={"place": "client"})
    groups = {"a": "a_*", "b": ["b_0", "b_1", "sex"]}
    options = made | {"modalities": groups, "columns": {"sex": "one-hot"}, "evaluate": {"conformal": "split"}}
    run = polyfed.run(data=held, **options)
    told = run.result["sets"]
    test = held.iloc[polyfed_test_rows(held, options)]
    sets = run.predict_set(test, 0.9)
    assert sets.sets is not None
    assert told["size"] == pytest.approx(float(sets.sizes.double().mean()))
    right = [name in held for name, held in zip(test["label"], sets.classes, strict=True)]
    assert told["holds"] == pytest.approx(np.mean(right))
    assert (told["rows"], told["validation_rows"]) == (len(test), int(sets.rows.min()))
    text = printed(run.result, "runs/x")
    assert re.search(r"prediction sets, 90.0 %.* classes on average.*polyfed predict runs/x FILE --coverage 0.9", text)
    assert "fewer than promised" not in text
    told = {**run.result, "unseen_clients": ["Nord"], "sets": {**run.result["sets"], "holds": 0.7}}
    assert "70.0 % of 24 test rows, fewer than promised, because no validation row is of these clients" in printed(
        told, None
    )
    least = {"class": "yes", "holds": 0.4, "rows": 12}
    told = {**run.result, "sets": {**run.result["sets"], "least": least}}
    assert "but only of 40.0 % of 12 rows of class 'yes'" in printed(told, None)
    few = polyfed.run(data=held, **options | {"clients": made["clients"] | {"personal_validation": 0.05}})
    assert "needs 9 validation rows" in printed(few.result, None)
    target = held.drop(columns="label").assign(days=np.linspace(-1, 1, ROWS))
    numbers = polyfed.run(data=target, labels="days", **options)
    assert numbers.result["targets"] == ["days"]
    text = printed(numbers.result, None)
    assert "MAE of 'days', " in text
    assert re.search(r"prediction intervals, 90.0 %.* wide on average", text)
    answers = numbers.predict_frame(target[:4], coverage=0.9)
    assert {"prediction.days", "low.days", "high.days"} <= {*answers.columns}


def polyfed_test_rows(held: pd.DataFrame, options: dict[str, Any]) -> np.ndarray:
    from polyfed.experiment.running.assembly import population_of

    return population_of(polyfed.make_recipe(held, **options)).test_rows.numpy()


def test_clients_have_names_in_check_and_predict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame().to_csv(tmp_path / "mine.csv", index=False)
    run = polyfed.run(
        data=tmp_path / "mine.csv", clients="place", rounds=1, seed=1, algorithm="local", out=tmp_path / "run"
    )
    new = frame(6).drop(columns=["label"])
    new.to_csv(tmp_path / "new.csv", index=False)
    south = run.predict(new, client="Süd")  # no warning: it was asked
    assert torch.equal(south, run.predict(new, client=1))
    assert torch.equal(south, run.predict(new, client="1"))
    said = []
    for client in ("Süd", "1"):
        with pytest.raises(SystemExit):
            main(["predict", str(tmp_path / "run"), str(tmp_path / "new.csv"), "--client", client])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""
    with refuses(UnknownClient, "no such client"):
        run.predict(new, client="Nordd")
    with refuses(UnknownClient, "from 0 to"):
        run.predict(new, client="3")
    text = repr(polyfed.check(tmp_path / "run" / "recipe.toml"))
    assert "Training rows of each client" in text
    line = next(line for line in text.splitlines() if line.strip().startswith("Süd"))
    counts = run.clients.set_index("name").loc["Süd"] if "name" in run.clients else run.clients.iloc[1]
    assert line.split()[1:] == ["a", "+", "b", str(counts["rows"]), *map(str, counts["labels"])]
    holes = polyfed.check(polyfed.load_recipe(tmp_path / "run" / "recipe.toml", ["clients.missing_rows=0.3"]))
    named = [line for line in repr(holes).splitlines() if line.strip().startswith("training rows, client")]
    assert ["Süd" in line for line in named].count(True) == 1
    assert not any(f"client {k} " in line for line in named for k in range(3))


def test_several_columns_of_words_are_one_refusal_with_one_line() -> None:
    words = {"b_sex": np.array(["f", "m"] * 60), "b_ward": np.array(["x", "y", "z"] * 40), "a_x": ["1"] * 119 + ["?"]}
    held = frame().assign(**words)
    with pytest.raises(DataError) as told:
        polyfed.run(data=held, modalities={"a": "a_*", "b": "b_*"}, rounds=1)
    text = str(told.value)
    assert text.count("[data] columns") == 1
    assert "2 columns of modalities hold words or dates: 'b_sex', such as 'f' at row 0, 'b_ward'" in text
    assert 'columns = { b_sex = "one-hot", b_ward = "one-hot" }' in text
    assert "'a_x' holds '?' at row 119" in text, "other faults are said at the same time"


def test_a_doubtful_column_is_named_once_with_the_words_that_leave_it_out(tmp_path: Path) -> None:
    frame(window=np.arange(ROWS)).to_csv(tmp_path / "mine.csv", index=False)
    reading = read_file(tmp_path / "mine.csv", {"client": "place"})
    assert [remark for remark in reading.remarks if "(polyfed init: --leave-out window)" in remark]
    assert not any("would reveal the label" in note for note in reading.columns.notes)


def test_a_column_that_never_changes_is_doubtful_if_it_would_be_a_modality(tmp_path: Path) -> None:
    frame(scanner_tesla=1.5, a_corner=0.0).to_csv(tmp_path / "mine.csv", index=False)
    reading = read_file(tmp_path / "mine.csv", {"client": "place"})
    assert [remark for remark in reading.remarks if "'scanner_tesla' has the same value in every row" in remark]
    assert not any("a_corner" in remark for remark in reading.remarks), "as a pixel in the corner of every image"


def test_a_table_of_a_few_different_texts_is_read_as_texts(tmp_path: Path) -> None:
    said = np.array(["the room was cold", "very kind nurse", "long waiting time", "good food here"])
    table = pd.DataFrame({"comment": said[np.arange(ROWS) % 4], "label": LABEL})
    table.to_csv(tmp_path / "texts.csv", index=False)
    with refuses(DataError, "--column comment=words") as told:
        read_file(tmp_path / "texts.csv", {})
    assert "one-hot" not in str(told.value)
    table.assign(x=DRAW.normal(size=ROWS)).to_csv(tmp_path / "both.csv", index=False)
    assert any("one-hot" in remark for remark in read_file(tmp_path / "both.csv", {}).remarks), "names beside numbers"


def one_table(held: pd.DataFrame) -> Columns:
    return table_of(held, Given(clients="place", empty_rows="leave-out"))


def test_rows_without_anything_are_counted_and_left_out(tmp_path: Path) -> None:
    held = frame()
    cells = [name for name in held if name.startswith(("a_", "b_"))]
    run = polyfed.run(data=held, clients="place", rounds=1, seed=1, out=None)
    holes = held.copy()
    holes.loc[[5, 9], cells] = np.nan
    with refuses(DataError, "empty_rows = 'leave-out'"):
        polyfed.run(data=holes, clients="place", rounds=1)
    one = polyfed.run(data=holes, clients="place", rounds=1, seed=1, empty_rows="leave-out")
    assert one.facts["data"]["test_rows"] + sum(client["rows"] for client in one.facts["clients"]) == ROWS - 2
    assert sum(client["rows"] for client in run.facts["clients"]) + run.facts["data"]["test_rows"] == ROWS
    kept = populate(one_table(holes), ClientsSpec(partition="by-client", test_clients=["Nord"]), 1)
    assert len(kept.test_rows) + len(kept.train.rows) == ROWS - 2, "whole clients as test rows bring none back"
    held.to_csv(tmp_path / "mine.csv", index=False)
    holes.to_csv(tmp_path / "holes.csv", index=False)
    held.drop([5, 9]).to_csv(tmp_path / "fewer.csv", index=False)
    polyfed.run(data=tmp_path / "mine.csv", clients="place", rounds=1, seed=1, out=tmp_path / "run")
    with warned("first row 5"):
        found = polyfed.evaluate(tmp_path / "run", data=tmp_path / "holes.csv").content
    fewer = polyfed.evaluate(tmp_path / "run", data=tmp_path / "fewer.csv").content
    assert found["pooled"] == fewer["pooled"]


def test_the_class_that_sets_hold_least_is_named_unless_that_is_chance() -> None:
    models: Any = SimpleNamespace(model=SimpleNamespace(num_classes=2), class_names=("no", "yes"))
    label = torch.from_numpy(np.repeat([0, 1], [90, 10]))
    seldom = least_held(torch.from_numpy(np.arange(100) < 95), label, models)
    assert seldom == {"least": {"class": "yes", "holds": pytest.approx(0.5), "rows": 10}}
    assert least_held(torch.from_numpy(np.arange(100) % 10 > 0), label, models) == {}
    assert least_held(torch.from_numpy(np.arange(95) < 90), label[:95], models) == {}, "five rows are no evidence"


def test_values_of_another_unit_are_told() -> None:
    data = {"lab": np.column_stack([DRAW.normal(80, 20, 60), DRAW.normal(5, 1, 60)]), "b": DRAW.normal(size=(60, 2))}
    run = polyfed.run(data=data, labels=np.arange(60) % 2, clients=np.arange(60) % 3, rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.predict({name: rows[:5] for name, rows in data.items()})
    with pytest.warns(PolyfedWarning) as told:
        run.predict({"lab": data["lab"][:5] * [88.4, 1], "b": data["b"][:5]})
    assert "feature 0 (counted from 0) of 'lab' has the median" in str(told[0].message)
    one = data["lab"][:5].copy()
    one[2, 0] = 8000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.predict({"lab": one, "b": data["b"][:5]})  # an outlier among others is no other unit
