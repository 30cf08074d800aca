"""A device compares what a server sends with the model and with the message's declaration, before anything is spent.

Before, a bias of one row for each sample was broadcast: one request under every limit gave 64 of 64 rows with labels.
"""

import contextlib
import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.direct import hub_of, joined, played
from laws.corruptions import CASES, FURTHER, judged_by_prototypes, noisy
from laws.test_laws import world
from polyfed.core.messages import KINDS, OF_THE_MODEL, Declared, Message, carries, message
from polyfed.core.tasks import task, tasks_of, types_of
from polyfed.core.tree import Tree
from polyfed.deploy.device.memory.store import STORE, TABLES
from polyfed.deploy.device.runtime import ClientRuntime
from polyfed.engines.protocol import FAILED, REPLY
from polyfed.experiment.checks.requirement_checks import release_of
from polyfed.experiment.recipes.recipe import DeploymentSpec, EngineSpec, Recipe
from polyfed.federation.wire.wire_format import Packet, decode, encode
from polyfed.laws.replies import corruptions, unlike
from polyfed.privacy.egress.limits import Limits
from polyfed.privacy.egress.requirements import Requirements
from refusals import refuses

REQUIRED = Requirements(max_epsilon=1e6, delta=1e-3, unprotected=("statistic",))
COUNTED = Limits(max_requests=10**6, max_requests_per_day=10**6, max_runs_per_day=10**6, max_evaluations_per_day=10**6)


def deployed(made: Recipe) -> Recipe:
    """Two rounds of clients with test rows of their own, behind a transport."""
    made = replace(made, rounds=2, engine=EngineSpec(name="flower"), deployment=DeploymentSpec(relay="server-sees"))
    return replace(made, clients=replace(made.clients, personal_test=0.2))


def figures(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every number of the budgets that a device has counted, by table."""
    if not (folder / STORE).exists():
        return {}
    with contextlib.closing(sqlite3.connect(folder / STORE)) as rows:
        return {table: rows.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES}


def files(folder: Path) -> dict[Path, str]:
    """Every file of the clients' state folders with its contents."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


class Attack:
    """A server that tries each corruption of each field once, and then sends the honest request."""

    def __init__(self, made: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.folder = made, folder
        self.faults, self.tried = list[str](), set[tuple[str, str, str]]()
        self.lost, self.answered = list[str](), dict[tuple[int, int], int]()
        self.spent = list[str]()
        work = ClientRuntime._work

        def attacked(runtime: ClientRuntime, packet: Packet, request_id: Any) -> Packet:
            runtime.engine.limits, runtime.engine.required = COUNTED, self.required
            runtime.release = release_of(self.required, made)
            before, counted = files(folder), figures(folder)
            with monkeypatch.context() as honest:
                honest.setattr(ClientRuntime, "_work", work)
                self._try(runtime, packet, request_id.client)
            if before != files(folder) or counted != figures(folder):
                self.faults.append(f"{packet.header['task']}: a refused request left something or cost something")
            answer = work(runtime, packet, request_id)
            place = request_id.client, request_id.round
            self.answered[place] = self.answered.get(place, 0) + (answer.header["verdict"] == REPLY)
            self.spent += [packet.header["task"]] * (answer.header["verdict"] == REPLY)
            return answer

        monkeypatch.setattr(ClientRuntime, "_work", attacked)

    @property
    def required(self) -> Requirements:
        """What the devices demand: an epsilon, if the recipe has noise of the clients."""
        return Requirements() if self.made.privacy is None else REQUIRED

    def _try(self, runtime: ClientRuntime, packet: Packet, client: int) -> None:
        task, method = packet.header["task"], self.made.algorithm
        got = types_of(tasks_of(method)[task])[0]
        msg = decode(packet, got, limit=2**30)
        for field, how, sent in self._corrupt(got, msg, task):
            packed = encode(replace(msg, **{field: sent}))
            answer = runtime.answer(Packet(packet.header | packed.header, packed.body), client)
            text = str(answer.header.get("reason"))
            if answer.header["verdict"] != FAILED or got.__name__ not in text or field not in text:
                self.faults.append(f"{task}.{field} with {how}: {answer.header['verdict']}, {text:.150}")

    def _corrupt(self, got: type[Message], msg: Message, task: str) -> Iterator[tuple[str, str, Any]]:
        for field, said in got.declared.items():
            whole = not said.optional and not (said.kind in OF_THE_MODEL and self.made.algorithm.may_lack(task))
            for how, change in self.of_field(said, whole).items():
                value = getattr(msg, field)
                if (task, field, how) in self.tried or not unlike(value, changed := change(value)):
                    continue
                self.tried.add((task, field, how))
                yield field, how, changed

    def of_field(self, said: Declared, whole: bool) -> dict[str, Callable[[Any], Any]]:
        """The corruptions of a field."""
        return corruptions(said, received=True, whole=whole)

    def play(self) -> Any:
        """The state after two rounds and an evaluation, in which every client takes part."""
        parts = joined(self.made, hub_of(self.made, self.folder))
        emit = parts.fed.emit

        def listen(kind: str, **facts: Any) -> None:
            if kind == "client-missing":
                self.lost.append(f"{facts['task']}: {facts['reason']}")
            emit(kind, **facts)

        parts.fed.emit = listen
        state, _ = played(self.made, parts)
        parts.algorithm.evaluate(state, parts.fed)
        return state


@pytest.mark.parametrize("case", [*CASES, *FURTHER])
def test_a_device_refuses_each_corrupt_message_of_each_method_at_no_cost_and_the_run_goes_on(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = Attack(deployed((CASES | FURTHER)[case]()), tmp_path, monkeypatch)
    attack.play()
    assert not attack.faults, "\n".join(attack.faults)
    assert not attack.lost, "the honest requests are answered"
    assert attack.tried or case in ("centralized", "local"), "the server sent nothing"
    counted = {(client, round): times for _, client, round, times in figures(tmp_path)["requests"]}
    assert counted == {place: times for place, times in attack.answered.items() if times}
    assert len(figures(tmp_path)["uses"]) >= sum(counted.values())


def test_refused_requests_spend_no_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attack = Attack(deployed(noisy()), tmp_path, monkeypatch)
    attack.play()
    assert len(attack.tried) > 20
    release = release_of(REQUIRED, attack.made)
    assert release is not None
    (found,) = figures(tmp_path)["spent"]
    assert found == (release.unit, release.noise, attack.spent.count("update") * release.uses)
    assert attack.spent.count("update") == 2 * 6, "all six clients answered in both rounds"


def test_a_parameter_that_a_device_keeps_private_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = deployed(FURTHER["fedavg, private head, fine-tuned"]())
    attack = Attack(made, tmp_path, monkeypatch)
    parts = joined(made, hub_of(made, tmp_path / "other"))
    private = sorted(made.algorithm.private_names(parts.model))
    assert private
    kept: Tree = {name: parts.initial[name] for name in private}
    attack.of_field = lambda said, whole: {  # type: ignore[method-assign]
        f"the private {name}": lambda v, name=name: v | {name: kept[name]} for name in private
    }
    attack.play()
    assert not attack.faults, "\n".join(attack.faults)
    assert len(attack.tried) >= len(private)
    assert not attack.lost


@message
class Untold(Message):
    """A message to clients that leaves a size open."""

    z: Tree = carries("embeddings", shape=(None, "features"))


@message
class Untyped(Message):
    """A message to clients that leaves a type open."""

    strength: Tree = carries("statistic")


@pytest.mark.parametrize(("kind", "words"), [(Untold, "cannot hold None"), (Untyped, "needs dtype=")])
def test_a_message_to_clients_states_every_size_and_type(kind: Any, words: str) -> None:
    class Careless:
        @task()
        def look(self, context: Any, data: Any, local: Tree, got: Message) -> tuple[Message, Tree]:
            return got, local

        sends = replies = kind

    with refuses(AssertionError, words):
        types_of(Careless().look)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*OF_THE_MODEL, "statistic")])
def test_a_field_states_its_shape(kind: str) -> None:
    with refuses(AssertionError, f"kind '{kind}' needs"):
        carries(kind)


@pytest.mark.parametrize("unimodal", ["auto", "prototype"])
@pytest.mark.parametrize("name", ["fedavg", "moon", "fedgkt", "pfmml", "hfm"])
def test_an_honest_evaluation_is_not_refused(name: str, unimodal: Any, tmp_path: Path) -> None:
    if unimodal == "prototype" and name not in ("fedavg", "moon"):
        pytest.skip("its clients send no class means")
    made = replace(world(name) if unimodal == "auto" else judged_by_prototypes(name), rounds=1)
    made = replace(deployed(made), rounds=1)
    parts, missing = joined(made, hub_of(made, tmp_path)), list[str]()
    state, _ = played(made, parts)
    parts.fed.emit = lambda kind, **facts: missing.append(facts["reason"]) if kind == "client-missing" else None
    measured = made.algorithm.evaluate(state, parts.fed)
    assert "personal" in measured.metrics
    assert not missing
