"""What the page says about classes, calibration, single clients, updates and picks; its script as files."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from sample import CLASSES, MODALITIES, write_run
from test_page import read

from polyfed.core.errors import DataError, RecipeError
from polyfed.report import write_report
from polyfed.report.pages.page import matrices
from polyfed.report.pages.template import asset
from polyfed.report.reading import egress
from polyfed.report.reading.run_folder import Folder
from refusals import refuses


def rows_of(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def rewrite(folder, rows):
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def chart(folder, title, **more):
    (found,) = [c for c in read(write_report(folder, **more)).drawn["charts"] if c["title"] == title]
    return found


def test_classes_have_their_names_recall_precision_and_commonest_mistake(made_run):
    page = read(write_report(made_run()))
    grid = page.drawn["grids"]["confusion"]
    assert grid["rows"] == grid["columns"] == list(CLASSES)
    assert grid["counts"][0] == [9, 1, 0, 0]
    assert "calm 10 90.0 % 56.2 % glad (1)" in page.words
    assert "sad 0 – 0.0 %" in page.words
    assert "wild, very 10 50.0 % 100.0 % calm (5)" in page.words


def test_a_task_without_a_confusion_matrix_has_a_page_without_one(made_run):
    folder = made_run()
    rewrite(folder, [{k: v for k, v in row.items() if k != "confusion"} for row in rows_of(folder)])
    result = json.loads((folder / "result.json").read_text())
    del result["calibration"]
    (folder / "result.json").write_text(json.dumps(result))
    page = read(write_report(folder))
    assert "confusion" not in page.drawn["grids"]
    assert "Classes and calibration" not in page.words


def test_class_numbers_stand_in_for_missing_names(made_run):
    folder = made_run()
    facts = json.loads((folder / "run.json").read_text())
    del facts["data"]["class_names"]
    (folder / "run.json").write_text(json.dumps(facts))
    assert read(write_report(folder)).drawn["grids"]["confusion"]["rows"] == ["0", "1", "2", "3"]


def test_calibration_is_accuracy_by_confidence(made_run):
    found = chart(made_run(), "Calibration")
    assert found["x"] == [0.5, 0.875]
    assert found["series"][0]["values"] == [0.375, 0.75]
    assert "12.5 %" in found["caption"]


def test_labels_and_modalities_of_the_clients_have_their_names(made_run):
    page = read(write_report(made_run(clients=24)))
    grid = page.drawn["grids"]["labels"]
    assert grid["columns"] == list(CLASSES)
    assert grid["rows"] == [str(number) for number in range(24)]
    assert grid["counts"][5] == [10, 5, 20, 10]
    assert "audio 24 100.0 %" in page.words


def test_rows_that_lack_a_modality_do_not_count_as_its_rows(made_run):
    folder = made_run()
    facts = json.loads((folder / "run.json").read_text())
    total = sum(client["rows"] for client in facts["clients"])
    for client in facts["clients"]:
        client["missing_rows"] = {"audio": 0.5}
    (folder / "run.json").write_text(json.dumps(facts))
    halves = sum(client["rows"] - round(client["rows"] * 0.5) for client in facts["clients"])
    assert f"audio 24 100.0 % {halves:,} {100 * halves / total:.1f} %" in read(write_report(folder)).words


def test_what_may_not_come_in_is_marked_as_forbidden(made_run):
    folder = made_run()
    facts = json.loads((folder / "run.json").read_text())
    facts["egress"]["audio"] = {"server": [], "silo": []}
    (folder / "run.json").write_text(json.dumps(facts))
    lines = (folder / "egress.jsonl").read_text().splitlines(keepends=True)
    (folder / "egress.jsonl").write_text("".join(line for line in lines if '"block": "audio"' not in line))
    (down,) = [
        one for one in matrices(egress.aggregate(Folder(folder)), Folder(folder), MODALITIES) if not one["is_gated"]
    ]
    cells = {block: dict(zip(down["kinds"], row, strict=True)) for block, row in down["rows"]}
    assert not cells["audio"]["parameters"]["allowed"]
    assert cells["text"]["parameters"]["allowed"]


def test_neighbouring_clients_are_summed_where_there_are_many(made_run):
    grid = read(write_report(made_run(rounds=2, clients=1000))).drawn["grids"]["labels"]
    assert grid["rows"][0] == "0 to 9"
    assert np.sum(grid["counts"]) == sum(40 + c % 17 for c in range(1000))


def test_gains_of_clients_over_a_baseline(made_run):
    ours, theirs = made_run("ours", algorithm="fedprox"), made_run("theirs")
    rows = rows_of(ours)
    last = rows[-1]["personal_accuracy"]
    rows[-1]["personal_accuracy"] = {client: max(0.0, a - 0.1) if int(client) < 6 else a for client, a in last.items()}
    rewrite(ours, rows)
    found = chart(ours, "Gain of each client over fedavg", baseline=theirs)
    gains = found["series"][0]["values"]
    assert gains == sorted(gains)
    assert gains[:6] == pytest.approx([-0.1] * 6, abs=1e-4)
    assert gains[6:] == [0.0] * 18
    assert "0 clients gain, 6 lose, 18 stay" in found["caption"]


@pytest.mark.parametrize(("change", "says"), [({"seed": 2}, "seed"), ({}, "sha256"), (None, "no client has")])
def test_a_baseline_that_measures_something_else_is_refused(made_run, change, says):
    ours, theirs = made_run("ours"), made_run("theirs", **(change or {}))
    if change == {}:
        facts = json.loads((theirs / "run.json").read_text())
        facts["data"]["sha256"] = says
        (theirs / "run.json").write_text(json.dumps(facts))
    if change is None:
        rewrite(theirs, [{k: v for k, v in row.items() if k != "personal_accuracy"} for row in rows_of(theirs)])
    with refuses(RecipeError, says):
        write_report(ours, theirs)


def test_updates_by_block_and_picks(made_run):
    folder = made_run(rounds=4)
    norms = {one["label"]: one["values"] for one in chart(folder, "Norm of the updates, by block")["series"]}
    assert norms["audio"] == pytest.approx([1.0, 0.5, 1 / 3, 0.25], rel=1e-5)
    assert norms["audio, clients' mean"] == pytest.approx([2.0, 1.0, 2 / 3, 0.5], rel=1e-5)
    rows, seen = rows_of(folder), set()
    for row, share in zip(rows, chart(folder, "Clients picked so far")["series"][0]["values"], strict=True):
        seen |= set(row["cohort"])
        assert share == pytest.approx(len(seen) / 24, rel=1e-5)
    times = chart(folder, "Picks of each client")["series"][0]["values"]
    assert sum(times) == sum(len(row["cohort"]) for row in rows)
    assert len(times) == 24
    sent = {one["label"]: one["values"] for one in chart(folder, "Picks by block")["series"]}
    assert sent["text"] == [len(row["trained"]["text"]) for row in rows]


def test_entries_of_a_logged_matrix_over_rounds(made_run):
    folder = made_run(rounds=20)
    series = {one["label"]: one["values"] for one in chart(folder, "client affinity, over rounds")["series"]}
    for number, row in enumerate(rows_of(folder)):
        matrix = np.asarray(row["tables"]["client_affinity"])
        assert series["mean"][number] == pytest.approx(matrix.mean(), rel=1e-4)
        assert series["diagonal"][number] == pytest.approx(matrix.diagonal().mean(), rel=1e-4)
        assert series["largest"][number] == pytest.approx(matrix.max(), rel=1e-4)


def test_traffic_of_evaluations_is_apart(made_run):
    folder = made_run()
    before = egress.aggregate(Folder(folder)).bytes.total()
    own = {"run": "m", "round": 1, "ask": 1, "client": 0, "message": "OwnScore", "field": "hits", "kind": "statistic"}
    row = own | {"block": "shared", "dtype": "float32", "shape": [], "bytes": 4, "destination": "server"}
    with (folder / "egress.jsonl").open("a") as file:
        file.write(json.dumps(row | {"verdict": "allowed"}) + "\n")
    sums = egress.aggregate(Folder(folder), {1: 1})
    assert sums.bytes.total() == before
    assert sums.evaluation.bytes.total() == 4
    page = read(write_report(folder))
    assert "To the server, for training" in page.words
    assert "To the server, for evaluation" in page.words
    assert "evaluation traffic 2.89 MB" in page.words
    assert "including evaluation" not in page.words


def test_tiles_name_the_first_round_and_what_the_method_keeps(made_run):
    page = read(write_report(made_run()))
    assert "time per round 55 ms median, without evaluation; first round 1.5 s" in page.words
    assert "parameters 3,000 of the model; server keeps 6,000, each client keeps up to 3,000" in page.words
    seconds = next(c for c in page.drawn["charts"] if c["title"] == "Seconds per round")
    assert seconds["x"][0] == 2


def test_a_confusion_matrix_that_is_not_square_is_damage(made_run):
    folder = made_run(rounds=1)
    rewrite(folder, [rows_of(folder)[0] | {"confusion": [[1, 2]]}])
    with refuses(DataError, "rounds.jsonl"):
        write_report(folder)


@pytest.fixture(scope="session")
def large_run(tmp_path_factory):
    """1,000 clients and 500 rounds, of which every 20th measured all clients."""
    folder = write_run(tmp_path_factory.mktemp("large") / "run", rounds=3, clients=1000)
    first, *_, last = rows_of(folder)
    light = {key: value for key, value in first.items() if key not in ("personal_accuracy", "tables")}
    draw = np.random.default_rng(1)
    with (folder / "rounds.jsonl").open("w") as file:
        for number in range(1, 501):
            row = last if number == 500 else first if number % 20 == 0 else light
            cohort = sorted(draw.choice(1000, 100, replace=False).tolist())
            held = {"cohort": cohort, "trained": {"audio": cohort, "text": cohort[:60], "shared": cohort}}
            file.write(json.dumps(row | {"round": number} | held) + "\n")
    (folder / "recipe.toml").write_text((folder / "recipe.toml").read_text().replace("rounds = 3", "rounds = 500"))
    sent = [json.loads(line) for line in (folder / "egress.jsonl").read_text().splitlines()]
    with (folder / "egress.jsonl").open("w") as file:
        for client in range(1000):
            file.writelines(json.dumps(row | {"client": client}) + "\n" for row in sent[:6])
    return folder


def test_the_page_of_a_large_run_stays_small(large_run):
    path = write_report(large_run, large_run)
    assert path.stat().st_size < 5_000_000
    assert len(read(path).drawn["charts"][0]["x"]) == 500


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_script_of_the_page_is_valid_and_writes_csv_and_svg(tmp_path):
    own = "\n".join(asset(name) for name in ("report.js", "export.js"))
    head = """
const document = { getElementById: () => ({ textContent: "{}" }), documentElement: null };
const getComputedStyle = () => ({ getPropertyValue: () => "#123456" });
"""
    tail = """
const chart = { title: "A & B", unit: "share", x_label: "round", x: [1, 2], series: [
  { label: 'one, "two"', values: [0.5, null], colour: 1, dashed: false, low: [0.25, null], high: [0.75, null] } ] };
console.log(JSON.stringify([csvOf(rowsOfCurves(chart)), svgOfCurves(chart, new Set(), false)]));
"""
    script = tmp_path / "page.cjs"
    script.write_text(head + own.replace('"use strict";', "", 1) + tail)
    done = subprocess.run(["node", str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    csv, svg = json.loads(done.stdout)
    head, first, second = csv.splitlines()
    assert head == 'round,"one, ""two""","one, ""two"", low","one, ""two"", high"'
    assert (first, second) == ("1,0.5,0.25,0.75", "2,,,")
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "A &amp; B" in svg
    assert "<polygon" in svg
