import io

import pytest
from rich.console import Console

from polyfed.report.progress import Progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def row(number, **changes):
    return {
        "round": number,
        "cohort": [1, 2, 3],
        "train_loss": 0.5,
        "bytes_up": 2_000_000,
        "bytes_down": 1_000,
        "metrics": {"global": {"accuracy": 0.5}, "unimodal": {"audio": 0.25, "text": 0.75}},
    } | changes


def started(rounds=10, first=1):
    return {
        "run": "r",
        "algorithm": "fedavg",
        "engine": "vectorised",
        "dataset": "cg-digits",
        "rounds": rounds,
        "first_round": first,
        "clients": 1000,
        "num_parameters": 50_826,
    }


@pytest.fixture
def lines():
    return Console(file=io.StringIO(), force_terminal=False, width=40)


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


def said(console):
    return console.file.getvalue()


def play(progress, clock, rounds, seconds=2.0):
    progress("run-started", **started(rounds))
    for number in range(1, rounds + 1):
        progress("round-started", round=number)
        clock.now += seconds
        progress("round-finished", row=row(number))
    progress("run-finished", result={})


def test_without_a_terminal_rounds_are_plain_whole_lines(lines):
    play(Progress(lines, clock := Clock()), clock, 3)
    text = said(lines).splitlines()
    assert "\x1b" not in said(lines)
    assert text[0] == "fedavg on cg-digits: 1,000 clients, 50,826 parameters, vectorised engine"
    numbers = "cohort 3  loss 0.5  accuracy 50.0 %  audio 25.0 %  text 75.0 %  up 2 MB  down 1 kB"
    assert text[1] == f"round 1/3  {numbers}"
    assert text[2] == f"round 2/3  {numbers}  0.5 rounds/s  2 s left"
    assert len(text) == 4


def test_without_a_terminal_long_runs_stay_quiet(lines):
    play(Progress(lines, clock := Clock()), clock, 1000)
    text = said(lines).splitlines()
    assert len(text) <= 23
    assert text[1].startswith("round 1/1000")
    assert text[-1].startswith("round 1000/1000")


def test_on_a_terminal_the_panel_shows_the_latest_round(terminal):
    progress, clock = Progress(terminal, clock := Clock()), clock
    with progress:
        progress("run-started", **started())
        for number in (1, 2):
            clock.now += 2.0
            progress("round-finished", row=row(number))
        terminal.print(progress.panel())
    for words in ("round 2/10", "0.5 rounds/s", "16 s left", "cohort", "25.0 %", "2 MB", "50,826 parameters"):
        assert words in said(terminal)


def test_time_left_follows_the_pace_and_starts_at_the_first_round_of_a_resumed_run(lines):
    progress = Progress(lines, clock := Clock())
    progress("run-started", **started(10, first=6))
    assert progress.seconds_left is None
    clock.now = 30.0
    progress("round-finished", row=row(6))
    assert progress.seconds_left is None, "a first round also loads libraries"
    clock.now = 33.0
    progress("round-finished", row=row(7))
    assert progress.seconds_left == pytest.approx(3 * 3.0)


def test_slow_first_round_does_not_spoil_the_estimate(lines):
    progress = Progress(lines, clock := Clock())
    progress("run-started", **started(10))
    for number, moment in ((1, 60.0), (2, 61.0)):
        clock.now = moment
        progress("round-finished", row=row(number))
    assert progress.seconds_left == pytest.approx(8 * 1.0)


def test_round_without_evaluation_shows_no_stale_accuracy(lines):
    progress = Progress(lines, Clock())
    progress("run-started", **started(3))
    progress("round-finished", row=row(1))
    progress("round-finished", row=row(2, metrics={}, train_loss=None))
    assert "accuracy" not in said(lines).splitlines()[-1]


def test_reason_shared_by_many_clients_is_said_once_and_counted(lines):
    progress = Progress(lines, Clock())
    progress("run-started", **started(1))
    for client in range(50):
        progress("client-missing", round=1, task="update", client=client, reason="ValueError: [bold]x[/]")
    progress("run-finished", result={})
    assert said(lines).count("ValueError: [bold]x[/]") == 1
    assert "50 times" in said(lines)


def test_tasks_that_cannot_be_vectorised_are_named(lines):
    Progress(lines, Clock())("looped", task="score", reason="sorts by value")
    assert said(lines) == "score runs client by client: sorts by value\n"


def test_a_reason_of_several_tasks_is_one_line(lines):
    progress = Progress(lines, Clock())
    for task in ("update", "score_own", "score_subsets"):
        progress("looped", task=task, reason="convolves")
    assert said(lines).count("convolves") == 1


def fail_in_the_first_round(progress):
    with progress:
        progress("run-started", **started())
        raise ValueError


def test_error_in_a_run_leaves_the_terminal_clean(terminal):
    progress = Progress(terminal, Clock())
    with pytest.raises(ValueError):
        fail_in_the_first_round(progress)
    assert progress.live is None
    assert "\x1b[?25h" in said(terminal), "the cursor is shown again"


def test_unknown_events_say_nothing(lines):
    Progress(lines, Clock())("something-new", fact=1)
    assert said(lines) == ""
