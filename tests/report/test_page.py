import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import polyfed.report
from polyfed.core.errors import DataError, RecipeError
from polyfed.report import compare, write_comparison, write_report
from polyfed.report.reading.history import MOST_FRAMES, Frames
from refusals import refuses

VOID = {"meta", "br", "link", "img", "input", "hr"}
ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&"


class Page(HTMLParser):
    """Reads a page strictly: every tag closed, in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes = [], [], []
        self.scripts, self.data, self.text, self.ids = [], None, [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "script":
            self.scripts.append([dict(attrs).get("type"), ""])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1][1] += data
        elif self.open and self.open[-1] != "style":
            self.text.append(data)

    @property
    def drawn(self):
        return json.loads(next(text for kind, text in self.scripts if kind == "application/json"))

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def read(path):
    return Page(path.read_text(encoding="utf-8"))


def test_page_parses_with_unique_ids(made_run):
    page = read(write_report(made_run()))
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("h1") == 1


def test_page_loads_nothing_from_elsewhere(made_run):
    path = write_report(made_run())
    page, text = read(path), path.read_text()
    loads = [(t, n, v) for t, n, v in page.attributes if n in ("src", "srcset", "data", "action", "poster")]
    links = [v for t, n, v in page.attributes if n == "href"]
    assert loads == []
    assert all(link.startswith("#") for link in links)
    assert "@import" not in text
    assert "url(" not in text
    assert "link" not in page.tags


def test_security_policy_allows_exactly_the_scripts_of_the_page(made_run):
    page = read(write_report(made_run()))
    policy = next(v for t, n, v in page.attributes if t == "meta" and n == "content" and "default-src" in v)
    hashes = {
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for kind, text in page.scripts if kind is None
    }
    assert set(re.findall(r"sha256-([^']+)", policy)) == hashes
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]


def test_page_carries_the_licence_of_the_library_inside_it(made_run):
    licence = (Path(polyfed.report.__file__).parent / "assets" / "uPlot.LICENSE").read_text()
    assert licence.strip() in write_report(made_run()).read_text()


def test_numbers_of_the_run_are_on_the_page(made_run):
    folder = made_run()
    page = read(write_report(folder))
    last = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])["metrics"]
    assert f"{100 * last['global']['accuracy']:.1f} %" in page.words
    for modality, value in last["unimodal"].items():
        assert f"{modality} alone {100 * value:.1f} %" in page.words
    assert "fedavg on made-up" in page.words
    assert "mu = 0.1" in page.words
    assert "8 refused" in page.words


def test_curves_hold_the_rounds_file(made_run):
    folder = made_run()
    charts = {chart["name"]: chart for chart in read(write_report(folder)).drawn["charts"]}
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    series = {one["label"]: one["values"] for one in charts["accuracy"]["series"]}
    assert charts["accuracy"]["x"] == [row["round"] for row in rows]
    assert series["text alone"] == pytest.approx([row["metrics"]["unimodal"]["text"] for row in rows], rel=1e-5)
    assert list(series) == ["all modalities", "audio alone", "text alone", "video alone", "validation"]
    ranked = charts["ranked"]["series"][0]["values"]
    assert ranked == pytest.approx(sorted(rows[-1]["personal_accuracy"].values()), rel=1e-5)


def test_matrices_are_kept_evenly_over_rounds_and_the_last_always():
    for rounds in (1, 16, 17, 100, 333):
        frames = Frames()
        for number in range(1, rounds + 1):
            frames.add(number, [[float(number)]])
            assert frames.rounds[-1] == number
        assert frames.rounds[0] == 1
        assert len(frames.rounds) <= MOST_FRAMES + 1
        assert {b - a for a, b in pairwise(frames.rounds[:-1])} <= {frames.stride}
        assert frames.tables == [[[float(number)]] for number in frames.rounds]


def test_accuracy_is_drawn_against_what_it_took(made_run):
    folder = made_run(rounds=4)
    rows = [
        json.loads(line) | {"simulated_seconds": 2.5} for line in (folder / "rounds.jsonl").read_text().splitlines()
    ]
    for number, row in enumerate(rows, 1):
        row["logged"] |= {"exchanges": 2 * number, "local_rounds": 10 * number}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    charts = {chart["title"]: chart for chart in read(write_report(folder)).drawn["charts"]}
    assert charts["Accuracy against simulated time"]["x"] == [2.5, 5.0, 7.5, 10.0]
    moved = np.cumsum([row["bytes_up"] + row["bytes_down"] for row in rows]) / 1e6
    assert charts["Accuracy against bytes"]["x"] == pytest.approx(moved.tolist())
    assert charts["Test loss against exchanges"]["x"] == [2, 4, 6, 8]
    assert charts["Accuracy against local rounds"]["x"] == [10, 20, 30, 40]
    series = {one["label"]: one["values"] for one in charts["Accuracy against simulated time"]["series"]}
    assert series["all modalities"] == pytest.approx([row["metrics"]["global"]["accuracy"] for row in rows], rel=1e-5)


def test_untrusted_text_stays_text(made_run):
    folder = made_run(algorithm=ATTACK.replace('"', "'"), text=ATTACK)
    facts = json.loads((folder / "run.json").read_text())
    facts["egress"][ATTACK] = {"server": []}
    facts["clients"][0]["modalities"] = [ATTACK]
    facts["data"]["class_names"][0] = ATTACK
    (folder / "run.json").write_text(json.dumps(facts))
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for row in rows:
        row["metrics"]["unimodal"][ATTACK] = 0.5
        row["logged"][ATTACK] = 1.0
        row["tables"][ATTACK] = [[1.0]]
        row["trained"][ATTACK] = [0]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = read(write_report(folder))
    assert len(page.scripts) == 3
    assert "img" not in page.tags
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert ATTACK in " ".join(page.text)
    assert ATTACK in page.drawn["tables"]


def test_run_without_rounds_has_a_page(made_run):
    folder = made_run(rounds=0, finished=False)
    (folder / "rounds.jsonl").unlink()
    (folder / "egress.jsonl").unlink()
    page = read(write_report(folder))
    assert "No round has been finished." in page.words
    assert "not finished" in page.words


def test_run_of_one_round_and_one_client_has_a_page(made_run):
    page = read(write_report(made_run(rounds=1, clients=1)))
    assert page.drawn["charts"][0]["x"] == [1]
    assert page.drawn["participation"]["asked"] == [[1]]


def test_values_that_are_not_finite_become_gaps(made_run):
    folder = made_run(rounds=3)
    text = (folder / "rounds.jsonl").read_text()
    (folder / "rounds.jsonl").write_text(re.sub(r'"train_loss": [-\d.e]+', '"train_loss": NaN', text, count=1))
    loss = next(c for c in read(write_report(folder)).drawn["charts"] if c["name"] == "loss")
    assert loss["series"][0]["values"][0] is None


def test_page_stays_small_however_many_clients_and_rounds(made_run):
    folder = made_run(rounds=5, clients=20_000)
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("personal_accuracy")
    with (folder / "rounds.jsonl").open("w") as file:
        for number in range(1, 2001):
            file.write(json.dumps(rows[number % 5] | {"round": number}) + "\n")
    recipe = (folder / "recipe.toml").read_text().replace("rounds = 5", "rounds = 2000")
    (folder / "recipe.toml").write_text(recipe)
    path = write_report(folder)
    assert path.stat().st_size < 1_000_000
    accuracy = read(path).drawn["charts"][0]
    assert len(accuracy["x"]) == len(accuracy["series"][0]["values"]) <= 1500
    assert accuracy["x"][-1] == 2000


def test_line_cut_short_by_a_killed_run_is_left_out(made_run):
    folder = made_run(finished=False)
    for name in ("rounds.jsonl", "egress.jsonl"):
        path = folder / name
        path.write_text(path.read_text() + path.read_text().splitlines()[0][:40])
    assert len(read(write_report(folder)).drawn["charts"][0]["x"]) == 30


@pytest.mark.parametrize("name", ["rounds.jsonl", "egress.jsonl", "run.json", "result.json", "recipe.toml"])
def test_damaged_file_is_named(made_run, name):
    folder = made_run()
    (folder / name).write_text("{ damaged\n")
    with refuses(DataError, name):
        write_report(folder)


@pytest.mark.parametrize("change", [{"metrics": None}, {"round": "one"}, {"tables": {"t": [[1], [1, 2]]}}])
def test_round_that_cannot_be_read_is_named(made_run, change):
    folder = made_run()
    path = folder / "rounds.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(first + json.dumps(json.loads(rest[0]) | change) + "\n" + "".join(rest[1:]))
    with refuses(DataError, "rounds.jsonl"):
        write_report(folder)


def test_folder_without_a_run_is_refused(tmp_path):
    with refuses(DataError, "holds no run"):
        write_report(tmp_path)


def test_a_folder_of_runs_is_told_from_a_run(made_run):
    folder = made_run()
    with refuses(DataError, "folders of runs"):
        write_report(folder.parent)


def test_page_that_cannot_be_written_is_an_error_of_the_user(made_run, tmp_path):
    comparison = compare([made_run()])
    with refuses(RecipeError, "cannot write"):
        write_comparison(comparison, tmp_path / "nowhere" / "page.html")


def test_comparison_page_holds_every_group_and_its_range(made_run, tmp_path):
    folders = [made_run(f"{a}-{s}", algorithm=a, seed=s) for a in ("fedavg", "moon") for s in (1, 2, 3)]
    (tmp_path / "notes.html").write_text("<p>mine</p>")
    with refuses(RecipeError, "polyfed's"):
        write_comparison(compare(folders), tmp_path / "notes.html")
    assert (tmp_path / "notes.html").read_text() == "<p>mine</p>"
    write_comparison(compare(folders), tmp_path / "comparison.html")
    page = read(write_comparison(compare(folders), tmp_path / "comparison.html"))
    accuracy = page.drawn["charts"][0]
    assert [one["label"] for one in accuracy["series"]] == ["fedavg (n=3)", "moon (n=3)"]
    texts = [(folder / "rounds.jsonl").read_text().splitlines() for folder in folders]
    rows = [[json.loads(line)["metrics"]["global"]["accuracy"] for line in text] for text in texts]
    assert accuracy["series"][0]["high"] == pytest.approx([max(v) for v in zip(*rows[:3], strict=True)], rel=1e-5)
    assert accuracy["series"][1]["low"] == pytest.approx([min(v) for v in zip(*rows[3:], strict=True)], rel=1e-5)
    assert "±" in page.words


def test_a_small_confusion_matrix_prints_its_counts_and_logged_numbers_have_captions(made_run):
    folder = made_run()
    facts = json.loads((folder / "run.json").read_text()) | {"captions": {"pull": "How strongly <it> pulls."}}
    (folder / "run.json").write_text(json.dumps(facts))
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    logged = [row | {"logged": {"pull": 0.5, "other": 1.0}} for row in rows]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    text = write_report(folder).read_text()
    table = text.split('<table class="counts">')[1].split("</table>")[0]
    assert [int(cell.split("<")[0]) for cell in table.split("<td>")[1:]] == [
        9,
        1,
        0,
        0,
        2,
        6,
        2,
        0,
        0,
        0,
        0,
        0,
        5,
        0,
        0,
        5,
    ]
    assert "How strongly &lt;it&gt; pulls." in text
    assert "its page explains it" in text


def test_page_tells_how_to_repeat_and_to_cite_the_run(made_run):
    text = write_report(made_run()).read_text()
    assert "polyfed run recipe.toml" in text
    assert "polyfed algorithms " in text
    assert "The polyfed developers" in text
