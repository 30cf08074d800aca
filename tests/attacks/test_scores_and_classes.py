"""Servers that read rows from what is not training: scores on test rows, class means, and counts of rows.

Before, 170 scores of models that the server had made gave a test row and its label under a policy that let nothing of
its modality leave, new run names renewed every budget, and the prototype of a class of one row was this row.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import RECIPE
from laws.test_announced import CASES, with_tests
from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.base import Broadcast
from polyfed.algorithms.knowledge.fedproto import Learned, Shared
from polyfed.core.batch import Batch
from polyfed.core.errors import CheckpointError, DataError, EgressError, RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.registry import Allowance, only
from polyfed.core.tasks import tasks_of, types_of
from polyfed.core.tree import SHARED, Tree, digest
from polyfed.data import Column, Columns
from polyfed.data.row_groups import device_groups
from polyfed.deploy.device.memory import privacy_budget as budget
from polyfed.deploy.device.memory.request_limits import admit_today
from polyfed.deploy.device.memory.store import STORE, DeviceStore
from polyfed.deploy.handlers import Deployed
from polyfed.engines.base import ClientExchange
from polyfed.engines.protocol import ENROLLED, REPLY, Facts, RequestId, hello, versions
from polyfed.evaluation.scores import OwnScore
from polyfed.evaluation.subsets import SubsetScores
from polyfed.experiment.recipes.recipe import load_recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble, initial_of, model_of
from polyfed.federation.wire.wire_format import Packet, decode, encode
from polyfed.objective import CLASSES
from polyfed.objective.multi_label import MultiLabel
from polyfed.objective.regression import Regression
from polyfed.objective.report import shown_columns
from polyfed.privacy.differential.accounting import epsilon_of_all
from polyfed.privacy.egress.limit_guard import rows_of_classes
from polyfed.privacy.egress.limits import Limits
from polyfed.privacy.egress.policy import ACCEPT, Policy
from polyfed.privacy.egress.requirements import Requirements
from refusals import refuses
from world import algorithm, on_device, recipe, through

TEXT = """
seed = 1
rounds = 9
[data]
name = "npz"
path = "x.npz"
modalities = ["gray", "color"]
[clients]
num = 2
[model]
embedding = 4
[model.encoders]
gray = {{ kind = "mlp", hidden = [] }}
color = {{ kind = "mlp", hidden = [] }}
[train]
batch_size = 16
lr = 0.1
[algorithm]
name = "{method}"
"""
NO_GRAY = """[egress.gray]
server = []
[egress.labels]
server = []
[egress.shared]
server = ["statistic"]
"""
SOME = '[egress."*"]\nserver = ["parameters", "prototypes", "statistic"]\n'


class Device:
    """A device with its real handler, and the server that it should fear."""

    def __init__(self, folder: Path, policy: str, method: str = "fedavg") -> None:
        generator = np.random.default_rng(0)
        label = np.arange(120, dtype=np.int64) % 2
        label[:100][:1], label[1:100] = 2, np.arange(99) % 2  # a class with one training row
        data = {"gray": generator.random((120, 6)), "color": generator.random((120, 4))}
        self.data = {name: value.astype(np.float32) for name, value in data.items()} | {"label": label}
        np.savez(folder / "data.npz", split=np.repeat([0, 1], [100, 20]), **self.data)
        (folder / "recipe.toml").write_text(TEXT.format(method=method) + SOME * (method == "fedproto"))
        (folder / "policy.toml").write_text(policy)
        self.folder, self.recipe = folder, load_recipe(folder / "recipe.toml")
        self.config = {name: str(folder / file) for name, file in (("data", "data.npz"), ("policy", "policy.toml"))}
        self.config |= {"client": 1, "modalities": "gray,color", "state": str(folder / "state")}  # type: ignore[dict-item]
        self.shapes = {"gray": (6,), "color": (4,)}
        self.model = model_of(self.recipe, self.shapes, 3, Policy.parse(self.recipe.egress, self.shapes))
        self.params = initial_of(self.recipe, self.model)
        self.handler = Deployed(folder / "recipe.toml")

    def enrol(self) -> Packet:
        return self.handler(hello(), self.config)

    def ask(self, task: str, got: Message, number: int = 0, run: str = "run", held_out: str = "test") -> Any:
        """The reply, or the text of the refusal."""
        about = {"task": task, "seed": 0, "rounds": 9, "turn": 0, "modalities": ["gray", "color"], "kept": 0}
        about |= {} if held_out == "test" else {"held_out": held_out}
        header = RequestId(run, 1, 1, number, 1).header(
            want="ask", facts=asdict(Facts(self.shapes, 3, digest(self.model.unsent))), **versions(), **about
        )
        sent = encode(got)
        answer = self.handler(Packet(header | sent.header, sent.body), self.config)
        if answer.header["verdict"] != REPLY:
            return str(answer.header["reason"])
        return decode(answer, types_of(tasks_of(self.recipe.algorithm)[task])[1], limit=2**30)

    def score(self, number: int = 0, run: str = "run") -> Any:
        return self.ask("score_own", Broadcast(self.params), number, run)


def test_no_score_is_computed_with_an_encoder_that_the_server_made(tmp_path: Path) -> None:
    device = Device(tmp_path, NO_GRAY)
    assert device.enrol().header["verdict"] == ENROLLED
    assert "client 1 refused to take Broadcast.params: parameters of gray" in device.score()
    assert '[egress.gray] accept = ["parameters"]' in device.score(1)


def test_the_owner_may_let_such_encoders_in(tmp_path: Path) -> None:
    accepting = NO_GRAY.replace("server = []", 'server = []\naccept = ["parameters"]', 1)
    accepting = accepting.replace('server = ["statistic"]', 'server = ["statistic"]\naccept = ["parameters"]')
    policy = accepting + '[egress.color]\nserver = ["parameters", "statistic"]\n'
    device = Device(tmp_path, policy)
    assert isinstance(device.score(), OwnScore)


def test_prototypes_of_the_server_are_no_way_round(tmp_path: Path) -> None:
    device = Device(tmp_path, NO_GRAY, 'fedproto"\nmode = "original')  # in which no parameters are sent
    got = Shared({}, {"gray": torch.ones(3, 4)})
    assert "refused to take Shared.prototypes: prototypes of gray" in device.ask("score_own", got)


def test_a_recipe_cannot_open_what_the_device_keeps_shut() -> None:
    own = Policy.parse({"a": {"server": []}}, ["a"])
    loose = Policy.parse({"a": {"server": ["parameters"], "accept": ["parameters"]}}, ["a"])
    assert not own.stricter(loose).accepts("parameters", "a", "server")
    open_ = Policy.parse({"a": {"server": [], "accept": ["parameters"]}}, ["a"])
    assert open_.stricter(Policy()).accepts("parameters", "a", "server")
    assert not open_.stricter(own.__class__.parse({"a": {"server": [], "silo": []}}, ["a"])).accepts(
        "parameters", "a", "server"
    )
    assert open_.table(["a"])["a"][ACCEPT] == ["parameters"]


@pytest.mark.parametrize("case", CASES)
def test_what_a_method_sends_may_come_in_under_its_own_policy(case: str) -> None:
    """The rule stops no method: each runs on a device under the policy that its replies need."""
    parts = on_device(replace(with_tests(CASES[case]()), rounds=1), on_device=True)  # no allowance for simulations
    through(parts, 1)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("min_test_rows = 21", "min_test_rows = 21 of the device, and a score covers a group of fewer test rows"),
        ("min_batch_size = 21", "min_test_rows = 21 of the device"),
        ("max_evaluations_per_day = 0", "max_evaluations_per_day = 0 of the device, and this is request 1"),
    ],
)
def test_a_score_over_few_rows_is_not_given(limits: str, words: str, tmp_path: Path) -> None:
    device = Device(tmp_path, f"{SOME}[limits]\n{limits}\n")
    assert words in device.score()
    assert "20" not in device.score(1).replace("2026", ""), "the number of test rows is not told"


@pytest.mark.parametrize(("least", "tested"), [(20, True), (21, False)])
def test_a_device_whose_test_rows_are_too_few_enrols_without_them(least: int, tested: bool, tmp_path: Path) -> None:
    device = Device(tmp_path, f"{SOME}[limits]\nmin_test_rows = {least}\n")
    assert device.enrol().header["tested"] is tested


@pytest.mark.parametrize(
    ("objective", "y", "sizes"),
    [
        (CLASSES, torch.tensor([0, 1, 1]), [3]),
        (MultiLabel(), torch.tensor([[1.0, 0.0], [0.0, torch.nan], [1.0, 0.0]]), [2, 0, 1, 2]),
        (Regression(), torch.tensor([[1.0, torch.nan], [2.0, 3.0]]), [2, 1]),
    ],
)
def test_groups_with_sums_of_their_own_are_counted_apart(objective: Any, y: torch.Tensor, sizes: list[int]) -> None:
    assert objective.group_sizes(Batch({}, y, torch.arange(len(y)))).tolist() == sizes


BUDGETS = {"max_requests_per_day": 2, "max_runs_per_day": 2, "max_evaluations_per_day": 2}


@pytest.mark.parametrize("budget", BUDGETS)
def test_new_run_names_and_restarts_do_not_renew_a_budget(budget: str, tmp_path: Path) -> None:
    device = Device(tmp_path, f"{SOME}[limits]\n{budget} = 2\n")
    for run in ("first", "second"):
        assert isinstance(device.score(run=run), OwnScore)
    device.handler = Deployed(device.handler.recipe_path)  # a restart of the device
    assert f"{budget} = 2 of the device" in device.score(run="third")
    if budget == "max_runs_per_day":
        assert isinstance(device.score(1, run="second"), OwnScore), "a run that has begun goes on"


NOISY = f"{SOME}[require]\nscore_noise = 4.0\n"


def figures(folder: Path) -> list[tuple[str, float, int]]:
    """The Gaussian mechanisms that the device has used: unit, noise, how often."""
    with contextlib.closing(sqlite3.connect(folder / "state" / STORE)) as rows:
        return rows.execute("SELECT * FROM spent").fetchall()


def test_noise_in_a_score_is_new_in_every_request_and_each_is_booked(tmp_path: Path) -> None:
    plain = Device(tmp_path, SOME).score()
    (noisy := tmp_path / "noisy").mkdir()
    device = Device(noisy, NOISY)
    scores = [device.score(number) for number in range(12)]
    right, rows = np.array([(float(score.sums), int(score.num_rows)) for score in scores]).T
    assert len(set(right)) > 1
    assert len(set(rows)) > 3
    assert (right == right.round()).all()
    assert ((right >= 0) & (right <= rows) & (rows >= 1)).all(), "the server would drop an impossible score"
    assert abs(rows.mean() - float(plain.num_rows)) < 4 * 4.0 / 12**0.5
    assert figures(noisy) == [("example", pytest.approx(4.0 / 2**0.5), 12)]
    again = device.score(11)
    assert (float(again.sums), int(again.num_rows)) != (right[-1], rows[-1])
    assert figures(noisy)[0][2] == 13, "a repeated request has new noise and costs again"


def test_epsilon_ends_the_scores_whatever_the_name_of_the_run(tmp_path: Path) -> None:
    """An attacker averages the noise away, one request after another; the budget ends that."""
    required = Requirements(max_epsilon=1.0, delta=1e-5, unit="example", score_noise=40.0)
    release, given = required.score_release(OwnScore, 3), 0
    assert release is not None

    with contextlib.suppress(EgressError):
        while given < 1000:
            with DeviceStore(tmp_path).transaction(f"run{given}", 1) as memory:
                budget.spend(memory, required, release)
            given += 1
    assert 20 < given < 1000
    assert epsilon_of_all({release.noise: given}, 1e-5) <= 1.0 < epsilon_of_all({release.noise: given + 1}, 1e-5)


def test_the_noise_of_a_count_has_the_deviation_that_is_booked() -> None:
    score = OwnScore(torch.tensor(500.0), torch.tensor(1000))
    required = Requirements(score_noise=5.0)
    drawn = [required.with_noise(score, CLASSES, 1) for _ in range(2000)]
    for name, value in (("sums", 500.0), ("num_rows", 1000.0)):
        found = np.array([float(getattr(one, name)) for one in drawn])
        assert found.std() == pytest.approx(5.0, rel=0.08)
        assert found.mean() == pytest.approx(value, abs=0.5)


def test_sums_of_errors_are_no_counts(tmp_path: Path) -> None:
    score = OwnScore(torch.zeros(2, 2), torch.tensor(20))
    with refuses(EgressError, "without a bound"):
        Requirements(score_noise=5.0).with_noise(score, Regression(), 1)
    with refuses(RecipeError, "require.score_noise: Set unit"):
        Requirements(score_noise=5.0, max_epsilon=1.0, delta=1e-5)
    with refuses(RecipeError, "require.score_noise: from 0.5"):
        Requirements(score_noise=0.1)


def test_scores_with_noise_need_no_exception_and_count_at_enrolment(tmp_path: Path) -> None:
    example = '[privacy]\nunit = "example"\ndelta = 0.001\nclip_norm = 0.5\nnoise_multiplier = 8.0\n'
    example += 'unprotected = ["statistic"]\n'
    demands = '[require]\nmax_epsilon = {}\ndelta = 0.001\nunit = "example"\nscore_noise = {}\n'
    verdicts = {}
    for name, epsilon, noise in (("enough", 9.0, 50.0), ("few", 1.5, 2.0)):
        (folder := tmp_path / name).mkdir()
        device = Device(folder, SOME + demands.format(epsilon, noise))
        device.handler.recipe_path.write_text(TEXT.format(method="fedavg") + example)
        device.recipe = load_recipe(folder / "recipe.toml")
        verdicts[name] = device.enrol().header
        if name == "enough":
            assert isinstance(device.score(), OwnScore), "no unprotected kind of the device is needed"
    assert verdicts["enough"]["verdict"] == ENROLLED
    assert "max_epsilon = 1.5 of the device" in verdicts["few"]["reason"]


@pytest.mark.parametrize(("budget", "enough"), [(2, False), (3, True)])
def test_every_subset_of_the_modalities_counts_as_an_evaluation(budget: int, enough: bool, tmp_path: Path) -> None:
    device = Device(tmp_path, f"{SOME}[limits]\nmax_evaluations_per_day = {budget}\n")
    path = tmp_path / "recipe.toml"
    path.write_text(path.read_text() + '[evaluate]\nsubsets = "all"\n')
    answer = device.ask("score_subsets", Broadcast(device.params))
    assert isinstance(answer, SubsetScores) if enough else "max_evaluations_per_day = 2 of the device" in answer
    assert "max_evaluations_per_day" in str(device.score(1)), "the budget is spent either way"


def test_a_subset_that_few_rows_have_or_lack_is_not_told(tmp_path: Path) -> None:
    """The sums of the rows with both modalities, and those of all rows, would tell of the one row that lacks one."""
    device = Device(tmp_path, f"{SOME}[limits]\nmin_test_rows = 3\n")
    path = tmp_path / "recipe.toml"
    path.write_text(path.read_text() + '[evaluate]\nsubsets = "all"\n')
    with np.load(tmp_path / "data.npz") as arrays:
        data = dict(arrays)
    tested = (data["split"] == 1).nonzero()[0]
    for lacking, told in ((1, [0, len(tested), 0]), (4, [len(tested) - 4, len(tested), len(tested) - 4])):
        data["gray_present"] = ~np.isin(np.arange(len(data["label"])), tested[:lacking])
        np.savez(tmp_path / "data.npz", **data)
        device.handler = Deployed(device.handler.recipe_path)
        answer = device.ask("score_subsets", Broadcast(device.params), lacking)
        assert answer.num_rows.tolist() == told
        assert (answer.sums != 0).tolist() <= [bool(rows) for rows in told]
    data["color_present"] = ~np.isin(np.arange(len(data["label"])), tested[1:5])  # one of these rows has gray
    np.savez(tmp_path / "data.npz", **data)
    device.handler = Deployed(device.handler.recipe_path)
    answer = device.ask("score_subsets", Broadcast(device.params), 9)
    assert answer.num_rows.tolist() == [len(tested) - 4, len(tested) - 4, 0], "it would tell of the row with gray alone"


def test_counts_for_conformal_sets_leave_out_small_classes_and_small_devices(tmp_path: Path) -> None:
    device = Device(tmp_path, f"{SOME}[limits]\nmin_rows_per_class = 2\nmin_test_rows = 5\n")
    with np.load(tmp_path / "data.npz") as arrays:
        data = dict(arrays) | {"split": np.repeat([0, 2, 1], [90, 20, 10])}
    data["label"] = np.where(np.arange(120) == 95, 2, np.arange(120) % 2)  # one validation row of class 2
    np.savez(tmp_path / "data.npz", **data)
    path = tmp_path / "recipe.toml"
    path.write_text(path.read_text() + '[evaluate]\nconformal = "class"\nshrinkage = true\n')
    answer = device.ask("count_scores", Broadcast(device.params), held_out="validation")
    assert answer.in_bins.sum(-1).tolist() == [[10, 9, 0]] * 3
    assert not ((answer.in_bins > 0) & (answer.in_bins < 5)).any(), "a bin of few rows tells their scores"
    sizes = device.ask("count_sizes", Broadcast(device.params), 2, "sizes", "validation").in_bins
    assert sizes.any()
    assert not ((sizes > 0) & (sizes < 5 * 3)).any(), "each row has a score of each of the three classes"
    np.savez(
        tmp_path / "data.npz",
        **data | {"split": np.where((data["split"] == 2) & (np.arange(120) > 93), 3, data["split"])},
    )
    device.handler = Deployed(device.handler.recipe_path)
    assert "min_test_rows = 5" in str(device.ask("count_scores", Broadcast(device.params), 1, "two", "validation"))


def test_counts_of_two_subsets_do_not_differ_in_few_rows(tmp_path: Path) -> None:
    """One validation row lacks `color`: both modalities would have the counts of `gray` without its score."""
    device = Device(tmp_path, f"{SOME}[limits]\nmin_test_rows = 5\n")
    with np.load(tmp_path / "data.npz") as arrays:
        data = dict(arrays) | {"split": np.repeat([0, 2, 1], [90, 20, 10])}
    path = tmp_path / "recipe.toml"
    path.write_text(path.read_text() + '[evaluate]\nconformal = "split"\n')
    for lacking, told in ((1, [20, 19, 0]), (6, [20, 14, 14])):
        np.savez(
            tmp_path / "data.npz", color_present=~((np.arange(120) >= 90) & (np.arange(120) < 90 + lacking)), **data
        )
        device.handler = Deployed(device.handler.recipe_path)
        answer = device.ask("count_scores", Broadcast(device.params), 0, f"run{lacking}", "validation")
        assert answer.in_bins.sum((1, 2)).tolist() == told


def test_every_subset_of_the_modalities_has_noise_that_is_booked(tmp_path: Path) -> None:
    device = Device(tmp_path, NOISY)
    path = tmp_path / "recipe.toml"
    path.write_text(path.read_text() + '[evaluate]\nsubsets = "all"\n')
    answer = device.ask("score_subsets", Broadcast(device.params))
    assert isinstance(answer, SubsetScores)
    assert len(set(answer.num_rows.tolist())) > 1, "three scores of the same rows have noise of their own"
    assert figures(tmp_path) == [("example", pytest.approx(4.0 / 2**0.5), 3)]


@pytest.mark.parametrize("kind", ["split", "class"])
def test_a_device_that_demands_noise_on_scores_tells_a_histogram_of_few_bins_with_noise(
    kind: str, tmp_path: Path
) -> None:
    device = Device(tmp_path, NOISY)
    with np.load(tmp_path / "data.npz") as arrays:
        data = dict(arrays) | {"split": np.repeat([0, 2, 1], [90, 20, 10])}
    np.savez(tmp_path / "data.npz", **data)
    path = tmp_path / "recipe.toml"
    path.write_text(path.read_text() + f'[evaluate]\nconformal = "{kind}"\nshrinkage = true\n')
    answer = device.ask("count_scores", Broadcast(device.params), held_out="validation")
    if kind == "class":
        assert "Set [evaluate] conformal = 'split'" in str(answer)
        return
    assert int(answer.noise) >= 16
    assert (answer.in_bins[0] != 0).sum() <= 21, "few bins"
    assert figures(tmp_path) == [("example", pytest.approx(4.0 / 2**0.5), 3)], "one for each subset"
    answer = device.ask("count_sizes", Broadcast(device.params), 1, "two", "validation")
    assert "[require] score_noise" in str(answer), "they get no noise, so they do not leave"


def test_subsets_are_not_scored_unless_the_recipe_says_so(tmp_path: Path) -> None:
    device = Device(tmp_path, SOME)
    assert isinstance(device.ask("score_subsets", Broadcast(device.params)), str)


def spend(folder: Path, times: int = 1, budget: str = "max_requests_per_day") -> None:
    for _ in range(times):
        with DeviceStore(folder).transaction("run", 0) as memory:
            admit_today(memory, Limits(**{budget: 5}), budget, "update")


def test_budgets_return_after_a_day_and_not_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1e9]
    monkeypatch.setattr("polyfed.deploy.device.memory.request_limits.time.time", lambda: clock[0])
    spend(tmp_path, 5)
    for later in (0.0, -9e8, 86_399.0):
        clock[0] = 1e9 + later
        with refuses(EgressError, "request 6"):
            spend(tmp_path)
    clock[0] = 1e9 + 86_401
    spend(tmp_path, 5)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _overwritten(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)


def _linked(path: Path) -> None:
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def _doubled(path: Path) -> None:
    os.link(path, path.with_name("elsewhere"))


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _without_tables(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as rows:
        rows.execute("CREATE TABLE other (a)")


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("elsewhere"))


def _linked_journal(path: Path) -> None:
    path.with_name("elsewhere").write_text("of another")
    path.with_name(f"{path.name}-journal").symlink_to(path.with_name("elsewhere"))


DAMAGE = [_cut, _overwritten, _linked, _doubled, _emptied, _without_tables, _dangling, _linked_journal]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_linked_store_refuses_and_does_not_begin_again(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    spend(tmp_path)
    damage(tmp_path / STORE)
    with refuses(CheckpointError, "state folder"):
        spend(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    assert damage is not _dangling or not elsewhere.exists()
    assert damage is not _linked_journal or elsewhere.read_text() == "of another"


VALUES = {"uses": "at", "requests": "times", "releases": "times", "spent": "times", "units": "unit"}


@pytest.mark.parametrize("value", ["'many'", "-1", "x'00'"])
@pytest.mark.parametrize("table", VALUES)
def test_a_value_that_cannot_be_right_in_any_table_refuses_everything(table: str, value: str, tmp_path: Path) -> None:
    spend(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / STORE, isolation_level=None)) as rows:
        rows.execute("PRAGMA ignore_check_constraints = ON")
        columns = [column for _, column, *_ in rows.execute(f"PRAGMA table_info({table})")]
        made = [value if column == VALUES[table] else "2.0" if column == "noise" else "'client'" for column in columns]
        rows.execute(f"INSERT INTO {table} VALUES ({', '.join(made)})")
    with refuses(CheckpointError, "state folder"):
        spend(tmp_path)


def test_a_process_that_dies_while_it_makes_the_store_leaves_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("polyfed.deploy.device.memory.store.os.rename", die)
        with pytest.raises(KeyboardInterrupt):
            spend(tmp_path)
    assert not (tmp_path / STORE).exists()
    spend(tmp_path, 5)


def test_a_full_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spend(tmp_path)
    connect = sqlite3.connect

    def full(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.execute("PRAGMA max_page_count = 1")
        connection.execute("PRAGMA query_only = ON")
        return connection

    monkeypatch.setattr("polyfed.deploy.device.memory.store.sqlite3.connect", full)
    with refuses(CheckpointError, "answers nothing"):
        spend(tmp_path)


def test_processes_that_count_at_once_lose_no_request(tmp_path: Path) -> None:
    def attempt(_: int) -> int:
        try:
            spend(tmp_path)
        except EgressError:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(20))) == 5
    assert (tmp_path / STORE).stat().st_mode & 0o777 == 0o600


def learned(device: Device) -> Learned:
    params = {name: value.clone() for name, value in device.params.items()}
    return device.ask("update", Shared(params, {}))  # type: ignore[no-any-return]


def test_a_class_of_one_row_has_no_prototype_and_no_count(tmp_path: Path) -> None:
    found = learned(Device(tmp_path, f"{SOME}[limits]\nmin_batch_size = 8\n", "fedproto"))
    assert found.rows_per_class[SHARED][2] == 0
    assert not found.prototypes["gray"][2].any()
    assert found.prototypes["gray"][0].any()


def test_without_the_limit_such_a_class_is_told(tmp_path: Path) -> None:
    found = learned(Device(tmp_path, f"{SOME}[limits]\nmin_rows_per_class = 0\nmin_batch_size = 8\n", "fedproto"))
    assert found.rows_per_class[SHARED].tolist() == [50, 49, 1]


@message
class PerClass(Message):
    """What a method of one's own may tell of classes."""

    params: Tree = carries("parameters")
    width: Tree = carries("statistic", shape=(None, "classes"), blocks=(SHARED,))
    labels: torch.Tensor = carries("labels", rows="num_rows", shape=())
    loss: torch.Tensor = carries("statistic")
    num_rows: torch.Tensor = carries("statistic")


@dataclass(frozen=True, kw_only=True)
class Careless(Averaging):
    """Computes something for each class without `class_means`."""

    rows: bool = False
    replies = PerClass

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Any, Tree]:
        table = rows_of_classes(data, context.num_classes)[SHARED].expand(2, -1)
        y = data.collect(lambda batch: {"y": batch.y})["y"] if self.rows else torch.zeros(0, dtype=torch.int64)
        width = {} if self.rows else {SHARED: table.clone()}
        return PerClass(fit.params, width, y, fit.loss, torch.tensor(len(y))), local


@pytest.mark.parametrize("rows", [False, True])
def test_nothing_else_may_tell_of_a_small_class(rows: bool) -> None:
    made = recipe(Careless(train=algorithm("fedavg").train, rows=rows), rounds=1)
    made = replace(made, egress={"labels": {"server": ["labels"]}})
    through(assemble(made), 1)
    parts = on_device(made, limits=Limits(min_rows_per_class=500))
    with refuses(EgressError, "min_rows_per_class"):
        through(parts, 1)
    assert parts.ledger.bytes_up == 0


@pytest.mark.parametrize("case", CASES)
def test_no_method_tells_of_a_small_class(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all methods: what is declared per class is zero for small classes, or the reply is refused."""
    made = with_tests(CASES[case]())
    parts = on_device(replace(made, rounds=1), limits=Limits(min_rows_per_class=10**6))
    told: list[str] = []
    alone = ClientExchange.run

    def watched(self: ClientExchange) -> Any:
        reply = alone(self)
        for name, said in ({} if reply is None or self.client < 0 else reply.declared).items():
            if said.kind == "labels" or ("classes" in (said.shape or ()) and said.rows is None):
                value = getattr(reply, name)
                values = [value] if isinstance(value, torch.Tensor) else list(value.values())
                told.extend(f"{self.request.name}.{name}" for v in values if bool((v != 0).any()))
        return reply

    monkeypatch.setattr(ClientExchange, "run", watched)
    with contextlib.suppress(EgressError):  # such as for the labels of rows
        state = through(parts, 1)
        parts.algorithm.evaluate(state, parts.fed)
    assert not told


def test_old_run_folders_are_deleted_and_the_audit_log_keeps_their_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyfed.deploy.device.memory.local_states.KEPT_LEDGERS", 3)
    device = Device(tmp_path, SOME)
    device.enrol()
    for number in range(6):
        assert isinstance(device.score(run=f"run{number}"), OwnScore)
    state = tmp_path / "state"
    assert sorted(path.name for path in state.iterdir() if path.is_dir()) == ["run3", "run4", "run5"]
    log = (state / "audit.jsonl").read_text()
    assert all(f'"run{number}"' in log for number in range(6))


@pytest.mark.parametrize("place", ["run", "run/client-1"])
def test_a_link_in_the_state_folder_is_not_followed(place: str, tmp_path: Path) -> None:
    device = Device(tmp_path, SOME)
    target, link = tmp_path / "target", tmp_path / "state" / place
    target.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    assert isinstance(device.score(), str)
    assert not list(target.iterdir())


@pytest.mark.parametrize("name", ["egress.jsonl", "device.sqlite3", "audit.jsonl"])
def test_a_link_in_place_of_a_file_is_not_written_through(name: str, tmp_path: Path) -> None:
    device = Device(tmp_path, SOME)
    target, folder = tmp_path / "target", tmp_path / "state" / "run" / "client-1"
    target.write_text("of another")
    folder.mkdir(parents=True)
    place = tmp_path / "state" if name != "egress.jsonl" else folder
    (place / name).symlink_to(target)
    assert isinstance(device.score(), str)
    assert target.read_text() == "of another"


def test_a_policy_that_changes_during_a_request_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half of a change counts alone: the request is answered under the file as it was when it came."""
    device = Device(tmp_path, f"{SOME}[limits]\nmin_test_rows = 21\n")
    read = Path.read_bytes

    def swapped(path: Path) -> bytes:
        content = read(path)
        if path.name == "policy.toml":
            path.write_text(SOME)  # the owner loosens the policy just after it was read
        return content

    monkeypatch.setattr(Path, "read_bytes", swapped)
    assert "min_test_rows = 21" in device.score()


def test_recipes_may_name_the_limits(tmp_path: Path) -> None:
    import tomllib

    stated = parse_recipe(tomllib.loads(RECIPE + "[limits]\nmin_rows_per_class = 4\nmax_runs_per_day = 3\n")).limits
    joined = Limits(min_batch_size=8).stricter(stated)
    assert (joined.value("min_rows_per_class"), joined.value("max_runs_per_day")) == (8, 3)
    assert not joined.is_of_the_recipe("min_rows_per_class")
    assert Limits(min_rows_per_class=0, min_batch_size=8).stricter(stated).value("min_rows_per_class") == 4


def test_two_jobs_with_other_groups_tell_no_group_of_few_rows(tmp_path: Path) -> None:
    """Ward C has three rows. A job for ward A alone, and one for A and B, would tell its sums by subtraction."""
    ward, sex = np.repeat(["A", "B", "C"], [30, 12, 3]), np.repeat(["f", "m"], [28, 17])
    path, y = tmp_path / "data.npz", torch.arange(45) % 3
    np.savez(path, ward=ward, sex=sex)
    told = []
    with only(Allowance(groups=("ward", "sex"))):
        for values in (["A"], ["A", "B"], ["B", "C"]):
            codes = device_groups(str(path), {"ward": values}, 45)
            assert set(codes) == {"ward", "sex"}, "the other job's column counts too"
            shown = shown_columns({name: codes[name] for name in sorted(codes)}, y, 10)["ward"]
            told.append({value for place, value in enumerate(values) if bool(shown[place])})
    assert told == [set(), set(), set()], "A differs from the women in two rows, and B is the smallest besides C"
    with only(Allowance(groups=("ward",))):
        codes = device_groups(str(path), {"ward": ["A", "B"]}, 45)
    assert shown_columns(codes, y, 10)["ward"][:2].tolist() == [True, False]


def test_a_regression_of_class_numbers_tells_of_a_class_that_is_hidden_but_not_of_words() -> None:
    """What docs/evaluate.md says is not prevented: the sums of one row in class 4; and that words are refused."""
    label = torch.tensor([0] * 30 + [1] * 30 + [4])
    assert not bool(CLASSES.visible(label, 10)[0][label == 4].any())
    columns = Columns(
        "rows", {"a": Column(torch.zeros(61, 1))}, label, 5, torch.zeros(61, dtype=torch.int8), torch.arange(61)
    )
    targets = Regression().prepared(columns).label
    shown = Regression().visible(targets, 10)[1]
    sums = Regression().site_sums(torch.zeros(61, 1), Batch({}, shown, torch.arange(61)))
    assert {61, 30 + 4, 30 + 16} <= set(sums.tolist()), "rows, their sum, and the sum of their squares"
    with refuses(DataError, "regression' needs numbers"):
        Regression().prepared(replace(columns, class_names=tuple("abcde")))
