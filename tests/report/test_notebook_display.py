"""What a notebook shows of recipes and runs, and the rounds of a run as data frames."""

import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import polyfed
from polyfed.evaluation.scores import Evaluation
from polyfed.report.progress import Progress
from world import algorithm, recipe


@pytest.fixture(scope="module")
def done() -> polyfed.Run:
    spec = recipe(algorithm("fedavg", evaluation=Evaluation(every=1)))
    return polyfed.run(replace(spec, rounds=3))


def test_metrics_are_one_number_in_each_row(done: polyfed.Run) -> None:
    frame = done.metrics
    assert list(frame.columns) == ["round", "group", "metric", "value"]
    picked = frame[(frame["group"] == "global") & (frame["metric"] == "accuracy")]
    assert picked["round"].tolist() == [1, 2, 3]
    assert picked["value"].tolist() == [row["metrics"]["global"]["accuracy"] for row in done.rounds]
    assert picked["value"].tolist() == done.history["metrics.global.accuracy"].tolist()


def test_clients_are_counted_over_rounds(done: polyfed.Run) -> None:
    frame = done.clients
    assert frame.index.name == "client"
    assert frame["rows"].sum() == sum(map(sum, frame["labels"])) > 0
    assert set(", ".join(frame["modalities"]).split(", ")) == {"a", "b"}
    assert frame["asked"].sum() == sum(len(row["cohort"]) for row in done.rounds)
    last = done.rounds[-1].get("personal_accuracy", {})
    for client, value in frame["personal_score"].items():
        assert value == last[str(client)] if str(client) in last else math.isnan(value)


def test_a_recipe_and_a_run_fit_on_a_line_and_open_in_a_notebook(done: polyfed.Run) -> None:
    spec = recipe(algorithm("fedavg"))
    assert len(repr(spec)) < 120
    assert "fedavg" in repr(spec)
    assert "<td" in spec._repr_html_()
    assert "train.lr" in spec._repr_html_()
    assert len(repr(done)) < 120
    assert "global: accuracy" in done._repr_html_()


def test_untrusted_words_stay_words() -> None:
    spec = recipe(algorithm("fedavg"))
    page = replace(spec, egress={"<b>a": {"server": ["<script>"]}})._repr_html_()
    assert "<script>" not in page
    assert "<b>a" not in page


class Handle:
    """Stands for IPython's handle of a display: keeps what would be sent to the browser."""

    def __init__(self) -> None:
        self.sent: list[dict[str, str]] = []

    def update(self, shown: Any) -> None:
        self.sent.append(shown._repr_mimebundle_())


def test_progress_in_a_notebook_is_one_panel_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, moments = Handle(), iter(range(1000))
    monkeypatch.setattr("IPython.display.display", lambda shown, display_id: handle)
    console = Console(force_jupyter=True, width=100)
    spec = replace(recipe(algorithm("fedavg")), rounds=3)
    with Progress(console, clock=lambda: float(next(moments))) as progress:
        polyfed.run(spec, listeners=[progress])
    assert len(handle.sent) > 3
    assert "round 3/3" in handle.sent[-1]["text/plain"]
    assert handle.sent[-1]["text/html"].startswith("<pre")
    assert "fedavg" in handle.sent[-1]["text/html"]


def test_run_shows_its_progress_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    polyfed.run(replace(recipe(algorithm("fedavg")), rounds=2), progress=True)
    assert "round 2/2" in capfd.readouterr().err


@pytest.mark.slow
def test_a_real_notebook_shows_the_panel_and_the_run() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    code = (
        "import polyfed\npolyfed.run(polyfed.load_recipe('recipes/fedavg-cg-digits.toml', ['rounds=2']), progress=True)"
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    shown = [output["data"] for output in book.cells[0].outputs if "data" in output]
    assert "round 2/2" in shown[0]["text/plain"]
    assert "global: accuracy" in shown[-1]["text/html"]
