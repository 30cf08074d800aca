"""What `polyfed check` says of a recipe: sizes of what can leave, exact and in time."""

import json
import re
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tomli_w
import torch
from torch import Tensor

import polyfed
from leaky import OPEN, Leaky
from polyfed.algorithms.averaging import Averaging
from polyfed.cli import main
from polyfed.cli.evaluate import _shown
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.tree import Tree
from polyfed.data import ClientsSpec
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import Check, check
from polyfed.experiment.checks.check_result import Planned
from polyfed.experiment.checks.egress_tables import grouped, in_short, remarks, sentence, size
from polyfed.experiment.recipes.from_data import make_recipe
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.report.text_layout import SafeConsole, text_of
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, played, recipe

LABELS = {"labels": {"server": ["labels"]}}


@message
class Chatty(Message):
    """An update with a statistic that is none, and one entry per row."""

    params: Tree = carries("parameters")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic")
    sketch: Tensor = carries("statistic")
    losses: Tensor = carries("statistic")


@dataclass(frozen=True, kw_only=True)
class Talker(Averaging):
    """FedAvg that hides 2,000 numbers, and as many as it has rows, among its statistics."""

    replies = Chatty

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Chatty, Tree]:
        rows = data.collect(lambda batch: {"y": batch.y.float()})["y"]
        return Chatty(fit.params, fit.loss, data.num_rows, torch.zeros(2000), rows), local


@dataclass(frozen=True, kw_only=True)
class Faulty(Averaging):
    """Its clients fail."""

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> Any:
        raise ValueError("no reply today")


@dataclass(frozen=True, kw_only=True)
class Misconfigured(Averaging):
    """Its server half does not like the recipe."""

    def init(self, fed: Any, params: Tree) -> Any:
        raise RecipeError("[algorithm] is not for these clients")


@dataclass(frozen=True, kw_only=True)
class BrokenServer(Averaging):
    """Its server half raises an exception of its own."""

    def merge(self, state: Any, replies: Any, fed: Any) -> Any:
        raise KeyError("a mistake")


def found(checked: Check, field: str, block: str = "shared") -> Planned:
    (row,) = [r for r in checked.planned if (r.field, r.block) == (field, block)]
    return row


def test_a_statistic_of_two_thousand_numbers_shows_by_its_size() -> None:
    row = found(check(recipe(Talker())), "sketch")
    assert (row.kind, row.bytes, row.bytes_per_row, row.in_dry_run) == ("statistic", 8000, 0.0, True)


def test_what_grows_with_the_rows_is_told_per_row_declared_or_not() -> None:
    row = found(check(recipe(Talker())), "losses")
    assert (row.bytes, row.bytes_per_row) == (0, 4.0)


def test_sensitive_kinds_have_sizes_also_where_the_policy_refuses_them() -> None:
    checked = check(recipe(Leaky()))
    assert {row.kind for row in checked.refused} == {"raw", "labels", "embeddings"}
    assert found(checked, "inputs", "a").bytes == 16 * 4
    assert found(checked, "features", "b").bytes == 6 * 4
    assert found(checked, "targets", "labels").bytes == 4


def test_bytes_of_a_reply_are_those_of_the_ledger() -> None:
    made = recipe(Leaky(), egress=OPEN)
    said = {(r.field, r.block): r.bytes for r in check(made).planned}
    sent = {(r["field"], r["block"]): r["bytes"] for r in played(made)[2] if r["destination"] == "server"}
    assert sent == said


def test_a_rehearsal_neither_trains_nor_fails_the_check_where_a_task_does() -> None:
    checked = check(recipe(Faulty()))
    assert checked.remarks == (
        "The dry run of a round failed, so some sizes are not known: task update: ValueError: no reply today",
    )
    assert checked.exit_code == 4, "as a run that no client answers"
    assert size([found(checked, "loss")], known=False) == "not known"
    assert found(checked, "params", "a").bytes == checked.facts["blocks"]["a"]


def test_what_the_servers_half_refuses_is_refused_by_check() -> None:
    with refuses(RecipeError, "for these clients"):
        check(recipe(Misconfigured()))


def test_the_command_ends_with_the_code_of_a_run_that_fails_like_its_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.toml"
    for name, code in (("Faulty", 4), ("BrokenServer", 1)):
        path.write_text(
            tomli_w.dumps(recipe(algorithm("fedavg")).table() | {"algorithm": {"name": f"test_check:{name}"}})
        )
        with pytest.raises(SystemExit) as end:
            main(["check", str(path)])
        out = capsys.readouterr().out
        assert end.value.code == code
        assert "The dry run of a round failed" in out
        assert "parameters" in out, "the tables are still there"
    with pytest.raises(SystemExit):
        main(["check", str(path), "--json"])
    assert "KeyError" in json.loads(capsys.readouterr().out)["dry_run_failed"][0]


def test_a_check_leaves_the_run_as_it_was() -> None:
    made = recipe(algorithm("scaffold"))
    before = played(made)[2]
    check(made)
    assert played(made)[2] == before


def test_one_line_a_modality_kind_and_destination() -> None:
    planned = check(recipe(algorithm("cmsfed", ratio_rule="threshold", dominance_threshold=1.0))).planned
    groups = grouped(planned)
    assert len(groups) < len(planned) / 3
    assert sum(len(rows) for rows in groups.values()) == len(planned)
    assert list(dict.fromkeys(block for block, _, _ in groups)) == ["a", "b", "shared"]


def test_several_tasks_show_the_largest_reply() -> None:
    one = Planned("first", "Up", "x", "statistic", "shared", "server", 8, True, in_dry_run=True)
    more = [one, replace(one, field="y"), replace(one, task="second", bytes=12)]
    assert size(more) == "16 B"
    assert size([replace(one, bytes=0, bytes_per_row=256.0)]) == "256 B a row"
    assert size([replace(one, bytes_per_row=256.0)]) == "8 B + 256 B a row"
    assert size([replace(one, in_dry_run=False)]) == "none in a first round"


@pytest.mark.parametrize(
    ("name", "egress", "sentences"),
    [
        ("fedavg", {}, {"a": "parameters only", "b": "parameters only", "labels": "nothing"}),
        (
            "centralized",
            {"a": {"server": ["raw"]}, "b": {"server": []}} | LABELS,
            {
                "a": "raw samples may leave",
                "b": "nothing; the policy refuses: raw samples",
                "labels": "labels may leave",
            },
        ),
    ],
)
def test_a_plain_sentence_for_each_modality(name: str, egress: Any, sentences: dict[str, str]) -> None:
    checked = check(recipe(algorithm(name), egress=egress))
    for block, words in sentences.items():
        assert sentence([row for row in checked.planned if row.block == block], checked) == words


def test_the_short_summary_tells_of_the_rows_that_no_message_carries() -> None:
    made = recipe(algorithm("fedavg"))
    pooled = check(replace(made, clients=replace(made.clients, validation=0.2)))
    data = pooled.facts["data"]
    shown = " ".join(text_of(in_short(pooled)).split())
    listed = f"outside messages: {data['validation_rows']} validation rows and {data['test_rows']} test rows, samples"
    assert listed in shown
    assert "personal_validation = 0.2 in place of validation" in shown
    assert pooled.facts["not_in_ledger"] == list(pooled.not_in_ledger)
    (kept,) = check(replace(made, clients=replace(made.clients, personal_validation=0.2))).not_in_ledger
    assert "validation rows" not in kept


def test_a_table_of_scores_is_never_cut() -> None:
    file = StringIO()
    table = _shown("scores", ["site", *("a long heading" for _ in range(9))], [["aachen", *(["12,345.678"] * 9)]])
    SafeConsole(file=file, width=60, highlight=False, color_system=None).print(table, crop=False)
    assert file.getvalue().count("12,345.678") == 9


@pytest.mark.filterwarnings("ignore:data. .*features differ in size")
def test_the_short_summary_tells_of_the_means_that_scale_the_samples() -> None:
    data = {"a": torch.arange(40.0)[:, None] % 7 + 50, "b": torch.arange(40.0)[:, None] % 3}
    told, *_ = check(make_recipe(data, labels=torch.arange(40) % 2)).not_in_ledger
    assert told.startswith("the mean and the deviation of each feature of a, over all training rows")


def test_a_modality_that_may_not_leave_gets_the_whole_recipe_at_once() -> None:
    made = recipe(algorithm("fedavg"), egress={"a": {"server": []}})
    refused = check(made)
    (told,) = [text for text in refused.why if "every client can keep and train its own" in text]
    assert told.endswith(
        '[algorithm] private = ["a"], [egress.shared] server = ["parameters", "statistic"], '
        "[clients] personal_test = 0.2"
    )
    cured = recipe(
        algorithm("fedavg", private=("a",)),
        egress={"a": {"server": []}, "shared": {"server": ["parameters", "statistic"]}},
    )
    allowed = check(replace(cured, clients=replace(cured.clients, personal_test=0.2)))
    assert all(row.allowed for row in allowed.planned)
    assert not any(row.block == "a" for row in allowed.planned)
    scored = replace(algorithm("fedavg"), evaluation=Evaluation(conformal="split"))  # asks for scores of all encoders
    sets = check(replace(made, algorithm=scored, clients=replace(made.clients, personal_validation=0.2)))
    assert any('[algorithm] private = ["a"]' in text for text in sets.why)


def test_the_forecast_has_the_histogram_of_scores_as_large_as_the_ledger_books_it(tmp_path: Path) -> None:
    scored = replace(algorithm("fedavg"), evaluation=Evaluation(conformal="split"))
    made = replace(recipe(scored, rounds=1), clients=ClientsSpec(num=4, personal_validation=0.3))
    (told,) = [row for row in check(made).planned if row.field == "in_bins"]
    ledger = polyfed.run(made, out=tmp_path / "run").folder / "egress.jsonl"
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    booked = {row["bytes"] for row in rows if row["field"] == "in_bins" and row["destination"] == "server"}
    assert booked == {told.bytes}
    assert told.bytes == 3 * 1001 * 8  # subsets of two modalities, bins, int64


def test_what_a_kind_does_not_say_is_said() -> None:
    policy = {m: {"server": ["parameters", "gradients", "prototypes", "statistic"]} for m in "ab"}
    found = check(recipe(algorithm("cmsfed"), egress=policy))
    told = {(row.message, row.field): row.tells for row in found.planned if row.tells}
    assert told == {("Report", "rows_per_class"): "how many rows of each class a client has"}
    shown = "\n".join(str(text) for text in remarks(found))
    assert "Report.rows_per_class tells how many rows of each class a client has" in shown
    assert not [row for row in check(recipe(algorithm("fedavg"))).planned if row.tells]


def test_a_long_training_is_not_rehearsed_step_by_step() -> None:
    sizes = []
    for steps in (1, 10**6):
        method = algorithm("fedavg", train=Train(lr=0.1, batch_size=16, steps=steps))
        sizes.append([(row.field, row.block, row.bytes) for row in check(recipe(method)).planned])
    assert sizes[0] == sizes[1]


def test_a_check_prints_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text('[data]\nname = "cg-digits"\n[algorithm]\nname = "fedavg"\n')
    with refuses(SystemExit, "0"):
        main(["check", str(file)])
    checked = check(file)
    assert str(checked) == repr(checked)
    assert f"{checked}\n" == capsys.readouterr().out
    assert "the model has 10 outputs" in str(checked)


def test_a_single_target_is_in_the_singular() -> None:
    target = torch.linspace(0, 1, 60)[torch.randperm(60)]
    shown = str(check(make_recipe({"a": torch.randn(60, 3)}, labels=target)))
    assert "60 rows of 1 target each;" in shown
    assert "the model has 1 output\n" in shown


def test_columns_that_nothing_reads_are_listed(tmp_path: Path) -> None:
    rows = 80
    held = pd.DataFrame({"x": torch.randn(rows).tolist(), "note": "n", "day": "2024-01-01", "id": range(rows)})
    held.assign(who=[f"p{n % 4}" for n in range(rows)], y=[n % 2 for n in range(rows)]).to_csv(
        tmp_path / "a.csv", index=False
    )
    table = {"name": "table", "path": str(tmp_path / "a.csv"), "label": "y", "client": "who", "modalities": {"a": "x"}}
    made = parse_recipe(
        {"rounds": 1, "data": table, "clients": {"partition": "by-client"}, "algorithm": {"name": "fedavg"}}
    )
    shown = text_of(check(made))
    assert "not read: note, day\n" in re.sub(" *\n", "\n", shown)
