"""A device's [purposes]: servers that serve another purpose, come too late, or train in the name of an evaluation."""

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from typing_extensions import override

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import polyfed
from attacks.test_requirements import Hostile, left, text
from engines.devices import Devices
from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.base import OwnScore
from polyfed.cli import main
from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.messages import Message
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, digest
from polyfed.deploy import handlers
from polyfed.deploy.app_folder import write_job
from polyfed.deploy.server.server import serve
from polyfed.engines.protocol import ENROLLED, REFUSED, REPLY, Facts, RequestId, versions
from polyfed.experiment.evaluate import job_of
from polyfed.experiment.recipes.settings import DeploymentSpec
from polyfed.experiment.running.loop import execute
from polyfed.federation.context import ClientContext
from polyfed.federation.wire.wire_format import Packet, encode
from polyfed.privacy.egress.limit_guard import LimitGuard
from polyfed.privacy.egress.limits import NO_LIMITS
from polyfed.privacy.egress.purposes import Purposes
from polyfed.training.client_data import ClientData
from refusals import refuses

TODAY = datetime.now(UTC).date()


def recipe(purpose: str = "sepsis", more: str = "") -> str:
    made = text("").replace("alpha = 2.0", "alpha = 2.0\npersonal_test = 0.3")
    return made.replace("[deployment]\n", f'[deployment]\npurpose = "{purpose}"\n') + more


class Server(Hostile):
    """A server that sends any task to the second device, whose owner has written a section [purposes]."""

    def __init__(self, folder: Path, policy: str, made: str = "") -> None:
        super().__init__(Devices(folder, made or recipe()))
        self.policy(policy)

    def policy(self, table: str) -> None:
        path = self.devices.places[1] / "policy.toml"
        path.write_text(path.read_text().partition("\n[purposes")[0] + "\n" + table)

    def asks(self, name: str, run: str = "run", round: int = 1) -> tuple[str, str]:
        columns, engine = self.parts.population.columns, self.parts.engine
        about = {"task": name, "seed": 0, "rounds": 2, "turn": 0, "modalities": list(self.owned), "kept": 0}
        shapes = {n: c.shape for n, c in columns.modalities.items()}
        facts = Facts(shapes, columns.num_classes, digest(self.parts.model.frozen))
        header = RequestId(run, 1, round, 0, 1).header(want="ask", facts=asdict(facts), **versions(), **about)
        kind = engine.algorithm.sends if name == "update" else engine.algorithm.evaluates
        sent = encode(kind(self.params))
        answer = self.devices(Packet(header | sent.header, sent.body), {"partition-id": 1})
        return str(answer.header["verdict"]), str(answer.header.get("reason", ""))


TABLES = {
    "": "",
    "[purposes.sepsis]": "",
    "[purposes.sepsis]\nuntil = 2999-01-01": "",
    f"[purposes.sepsis]\nuntil = {TODAY}": "",
    "[purposes.sepsis]\nevaluation = false": "",
    "[purposes]": "certain purposes only",
    "[purposes.cancer]": '"sepsis"',
    "[purposes.sepsis]\nuntil = 2020-01-01": "has passed",
    "[purposes.sepsis]\ntraining = false": "the recipe trains",
    "[purposes.sepsis]\ntraining = false\nevaluation = false": "the recipe trains",
}


@pytest.mark.parametrize("table", TABLES)
def test_a_device_enrols_for_its_purposes_only_and_until_their_end(table: str, tmp_path: Path, capsys: Any) -> None:
    server, words = Server(tmp_path, table), TABLES[table]
    answer = server.enrol().header
    assert answer["verdict"] == (REFUSED if words else ENROLLED)
    why = str(answer.get("reason", ""))
    assert words in why
    assert "cancer" not in why, "the server learns nothing of other purposes"
    if not words:
        assert answer["tested"] is ("evaluation = false" not in table)
    place = server.devices.places[1]
    node = f'data="{place}/data.npz" client=1 modalities="a, b" policy="{place}/policy.toml"'
    with pytest.raises(SystemExit) as end:
        main(["check", str(server.devices.recipe), "--node", node, "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert end.value.code == (3 if words else 0)
    if words:
        assert words in json.dumps(shown, ensure_ascii=False).replace('\\"', '"')


@pytest.mark.parametrize(
    ("table", "task", "words"),
    [
        ("[purposes.sepsis]", "update", ""),
        ("[purposes.sepsis]", "score_own", ""),
        ("[purposes.sepsis]\ntraining = false", "update", "reads the training rows"),
        ("[purposes.sepsis]\ntraining = false", "score_own", ""),
        ("[purposes.sepsis]\nevaluation = false", "update", ""),
        ("[purposes.sepsis]\nevaluation = false", "score_own", "its own test"),
        ("[purposes.cancer]", "update", "certain purposes only"),
        ("[purposes.sepsis]\nuntil = 2020-01-01", "score_own", "has passed"),
    ],
)
def test_each_request_is_compared_also_of_a_server_that_never_let_the_device_enrol(
    table: str, task: str, words: str, tmp_path: Path
) -> None:
    server = Server(tmp_path, table)
    verdict, why = server.asks(task)
    assert (verdict, words in why) == (REFUSED if words else REPLY, True), why
    assert bool(left(server.devices)) is not bool(words)


class Disguised(Averaging):
    """Trains in a task whose name, message and reply are those of an evaluation."""

    @task(sends="evaluates")
    @override
    def score_own(self, context: ClientContext, data: ClientData, local: Tree, got: Message) -> tuple[OwnScore, Tree]:
        params: Any = got
        try:
            data.minimise(lambda w, batch: self.loss(context, w, batch, got, local), params.params, train=self.train)
        except Exception:  # a method may catch what stops it: nothing leaves all the same
            return super().score_own(context, data, local, got)
        return super().score_own(context, data, local, got)


def test_a_training_that_is_sent_as_an_evaluation_is_refused(tmp_path: Path) -> None:
    made = recipe().replace('name = "fedavg"', f'name = "{__name__}:Disguised"')
    server = Server(tmp_path, "[purposes.sepsis]", made)
    assert server.asks("score_own")[0] == REPLY
    server.policy("[purposes.sepsis]\ntraining = false")
    before = len(left(server.devices))
    verdict, why = server.asks("score_own", "another")
    assert verdict == REFUSED
    assert "the task reads the training rows" in why
    assert len(left(server.devices)) == before


def test_a_device_that_only_evaluates_serves_evaluation_jobs(tmp_path: Path) -> None:
    trained, made = tmp_path / "trained", tmp_path / "recipe.toml"
    made.write_text(recipe(more="classes = 4\n").replace("rounds = 2", "rounds = 1"))
    polyfed.run(made, trained, engine="sequential")
    server = Server(tmp_path, "[purposes.sepsis]\ntraining = false", made.read_text())
    for place in server.devices.places:
        path = place / "policy.toml"
        path.write_text(path.read_text().partition("\n[purposes")[0] + "\n[purposes.sepsis]\ntraining = false")
    with refuses(EgressError, "recipe trains"):
        server.devices.serve(tmp_path / "run")
    app = write_job(job_of(trained, None), tmp_path / "job")
    server.devices.handler = handlers.Deployed(app / "recipe.toml")
    serve(app / "recipe.toml", server.devices.transport(), {"out": str(tmp_path / "evaluated")}, execute)
    told = json.loads((tmp_path / "evaluated" / "result.json").read_text())
    assert set(told["evaluation"]["sites"]) == {"0", "1", "2"}


READS: dict[str, Callable[[ClientData, Any], object]] = {
    "minimise": lambda data, made: data.minimise(lambda w, batch: w["x"].sum(), {"x": torch.zeros(1)}, train=made),
    "batch": lambda data, made: data.batch(made, 0),
    "fold": lambda data, made: data.fold(lambda total, batch: total, 0),
    "at": lambda data, made: data.at(torch.zeros(1, dtype=torch.int64)),
    "ids": lambda data, made: data.ids,
    "groups": lambda data, made: data.groups,
}


@pytest.mark.parametrize("how", READS)
def test_however_a_task_reads_training_rows_it_is_seen(how: str) -> None:
    refusal = EgressError("no")
    guard = LimitGuard(NO_LIMITS, 0, "score_own", trains=lambda task: refusal)
    seen = guard.watch(MagicMock(num_rows=8, round=1, rounds=2), MagicMock())
    with refuses(EgressError, "no"), guard.enforced(8):
        READS[how](seen, MagicMock())
    fresh = LimitGuard(NO_LIMITS, 0, "score_own", trains=lambda task: refusal)
    with fresh.enforced(8):
        fresh.watch(MagicMock(num_rows=8, round=1, rounds=2), MagicMock()).test.fold(lambda total, batch: total, 0)


def test_every_way_to_read_rows_is_in_the_list_above() -> None:
    ways = {name for name in ClientData.__abstractmethods__ | {"groups"} if name != "test"}
    assert ways == set(READS)


def test_a_run_keeps_its_purpose(tmp_path: Path) -> None:
    """The server renames the purpose of a run in the middle; both are allowed, but the local state is of the first."""
    server = Server(tmp_path, "[purposes.sepsis]\n[purposes.cancer]")
    assert server.asks("update")[0] == REPLY
    server.sends(recipe("cancer"))
    before = len(left(server.devices))
    verdict, why = server.asks("update", round=2)
    assert verdict == REFUSED
    assert 'purpose = "sepsis", and now the recipe says "cancer"' in why
    assert len(left(server.devices)) == before
    assert server.asks("update", run="another")[0] == REPLY
    server.sends(recipe())
    assert server.asks("update", round=2)[0] == REPLY, "a refusal changes nothing"


def test_a_purpose_ends_in_the_middle_of_a_run_by_the_clock_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, f"[purposes.sepsis]\nuntil = {TODAY}")
    assert server.asks("update")[0] == REPLY
    clock = MagicMock(now=lambda zone: datetime.now(UTC) + timedelta(days=1))
    monkeypatch.setattr(handlers, "datetime", clock)
    verdict, why = server.asks("update", round=2)
    assert (verdict, "has passed" in why) == (REFUSED, True)


@pytest.mark.parametrize(
    ("table", "noun"),
    [
        ({"sepsis": 1}, "made of tables"),
        ([], "made of tables"),
        ({"sepsis": {"until": "2027-03-31"}}, "without quotes"),
        ({"sepsis": {"until": datetime(2027, 3, 31, tzinfo=UTC)}}, "without quotes"),
        ({"sepsis": {"untill": date(2027, 3, 31)}}, "untill"),
        ({"sepsis": {"training": "no"}}, "training"),
    ],
)
def test_a_section_that_cannot_be_read_is_refused(table: Any, noun: str) -> None:
    with pytest.raises(RecipeError) as refused:
        Purposes.parse(table, "policy p.toml:")
    assert noun in str(refused.value)
    assert "policy p.toml: [purposes" in str(refused.value)
    assert Purposes.parse({"a b": {}}, "").sentences() == ('[purposes."a b"] training and evaluation',)


@pytest.mark.parametrize("purpose", ["a\nb", "x" * 201])
def test_a_purpose_is_one_printable_line(purpose: str) -> None:
    with refuses(RecipeError, "deployment.purpose: printable characters"):
        DeploymentSpec(purpose=purpose)
