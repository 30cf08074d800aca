"""Hostile and unlucky devices as real processes, with TLS and keys on loopback. `make check-all`.

Device 2 is hostile and device 1 unlucky, each otherwise in every round; device 0 is honest until somebody changes its
configuration. All of it happens in one run of SCAFFOLD, whose clients keep a state, and the run must end with the
state of one in this process in which those replies were never heard of. A run before it has the late reply.
"""

import hashlib
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines import hostile
from engines.federations import PATIENCE, Federation, outcome, recipe_for, rows, said, until
from polyfed.core.tree import Tree
from polyfed.deploy import write_app
from polyfed.engines import Sequential
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.results.records import Records
from polyfed.experiment.results.run_result import Run
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.loop import execute
from polyfed.federation.replies import Answer
from world import kept_states

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HONEST, UNLUCKY, HOSTILE = 0, 1, 2
ROUNDS = 6
PLAN: hostile.Plan = {
    HOSTILE: {
        1: ("remembered",),
        2: ("NaN",),
        3: ("too large",),
        4: ("replayed",),
        5: ("doubled", "held"),  # held until device 0 has come back changed
    },
    UNLUCKY: {2: ("unknown name",), 3: ("wrong shape",), 4: ("full disk",)},
}
WORDS = {
    "NaN": (2, HOSTILE, "is not finite"),
    "unknown name": (2, UNLUCKY, "unheard_of', which the model does not have"),
    "too large": (3, HOSTILE, "is too large: 33554432 bytes, allowed are 1048576"),
    "wrong shape": (3, UNLUCKY, "expected torch.float32"),
    "replayed": (4, HOSTILE, "answered another question: {'run'"),
    "full disk": (4, UNLUCKY, "No space left on device"),
    "changed modalities": (6, HONEST, "is for modalities ['gray', 'color'], client 0 has ['gray'] now"),
}
"""By fault: round, client, and words of the reason."""

NOT_STARTED = {(4, UNLUCKY), (6, HONEST)}
"""What left no trace in the client's state; in the other cases the work was done, and only the reply was lost."""


class Deaf(Sequential):
    """In this process, the same clients without the answers that were lost.

    Args:
        unheard: (round, client) whose reply does not come.
        unstarted: those of them whose client did not even do the work.
    """

    def __init__(self, *args: Any, unheard: set[tuple[int, int]], unstarted: set[tuple[int, int]], **more: Any) -> None:
        super().__init__(*args, **more)
        self.unheard, self.unstarted = unheard, unstarted

    def answer(self, request: Any, clients: Any, send: Any) -> Answer:
        asked = [client for client in clients if (request.round, client) not in self.unstarted]
        answer = super().answer(request, asked, send)
        lost = {client: "unheard" for client in clients if (request.round, client) in self.unheard}
        return Answer([part for part in answer.parts if part.clients[0] not in lost], answer.missing | lost)


@dataclass(frozen=True)
class Lived:
    """A run over processes, and the same in this process.

    Attributes:
        out: the run's files.
        missing: reasons by (round, client).
        spared: the run in this process.
        locals: what its clients kept.
        books: its ledger.
    """

    federation: Federation
    out: Path
    missing: dict[tuple[int, int], str]
    spared: Run
    locals: dict[int, Tree]
    books: list[dict[str, Any]]

    def folder(self, client: int) -> Path:
        """Where a client kept its state of this run."""
        run = json.loads((self.out / "run.json").read_text())["run"]
        return self.federation.state(client) / run / f"client-{client}"


def lived(federation: Federation, app: Path, recipe: Path, folder: Path, unstarted: set[tuple[int, int]]) -> Lived:
    """A finished run beside one in this process that hears as little of the clients."""
    out = app / "run"
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    missing = {(row["round"], int(k)): why for row in lines for k, why in row["missing"].items()}
    engines: list[Deaf] = []

    def deaf(*args: Any, **more: Any) -> Deaf:
        engines.append(Deaf(*args, unheard=set(missing), unstarted=unstarted, **more))
        return engines[0]

    spared = execute(load_recipe(recipe), Records(folder, resume=False), Emitter([]), engine=deaf)
    return Lived(federation, out, missing, spared, engines[0].locals, rows(folder / "egress.jsonl"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: Any) -> Iterator[Path | None]:
    """A file system of half a megabyte, or None where none can be mounted."""
    place = tmp_path_factory.mktemp("disk")
    words = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    mounted = shutil.which("mount") is not None and not subprocess.run(words, capture_output=True).returncode
    yield place if mounted else None
    if mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="module")
def camp(tmp_path_factory: Any) -> Path:
    """Where the hostile processes look for their plan."""
    place: Path = tmp_path_factory.mktemp("camp")
    return place


@pytest.fixture(scope="module")
def federation(tmp_path_factory: Any, camp: Path, disk: Path | None) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation")
    with Federation(recipe_for("scaffold", folder), folder / "fed") as started:
        started.environments = {
            f"device-{HOSTILE}": hostile.surroundings(camp),
            f"device-{UNLUCKY}": hostile.surroundings(camp, disk),
        }
        if disk is not None:
            started.tables[UNLUCKY]["state"] = str(disk)
        started.start()
        yield started


@pytest.mark.filterwarnings("ignore:.*gave no usable reply in any round")
def test_a_late_reply_is_cut_at_the_deadline_and_enters_no_later_round(
    federation: Federation, camp: Path, tmp_path: Path
) -> None:
    hostile.agree(camp, {HOSTILE: {1: ("held",)}})
    recipe = recipe_for("fedavg", tmp_path, rounds=2, reply_seconds=20.0)
    app = write_app(recipe, tmp_path / "app")
    process = federation.run(app)
    until(said(federation, "polyfed: round 1:"), "the deadline of round 1")
    gives_up = "nobody waits for its reply any more"
    until(lambda: gives_up in federation.log(f"device-{HOSTILE}"), "the device's end of it")
    (camp / hostile.GO).touch()
    assert process.wait(PATIENCE) == 0
    found = lived(federation, app, recipe, tmp_path / "one", set())
    assert found.missing[1, HOSTILE] == "late: no answer within 20 seconds"
    assert f"round 1, task update, client {HOSTILE}, reason late: no answer within 20 seconds" in federation.log("run")
    assert outcome(found.out)[0] == found.spared.result["state_sha256"]


@pytest.fixture(scope="module")
def hurt(federation: Federation, camp: Path, disk: Path | None, tmp_path_factory: Any) -> Lived:
    """The run in which everything goes wrong."""
    folder = tmp_path_factory.mktemp("hurt")
    plan = {client: dict(rounds) for client, rounds in PLAN.items()}
    if disk is None:
        del plan[UNLUCKY][4]
    hostile.agree(camp, plan)
    recipe = recipe_for("scaffold", folder, rounds=ROUNDS, more="message_megabytes = 1")
    app = write_app(recipe, folder / "app")
    data = digest(federation.nodes[HONEST] / "data.npz")
    process = federation.run(app)
    until(lambda: 5 in sent_by(federation, HONEST, app), "device 0 in round 5", 4 * PATIENCE)
    time.sleep(3.0)  # so that the server has its answer; otherwise round 5 goes on without it, and nothing else changes
    federation.kill(f"device-{HONEST}", signal.SIGTERM)
    federation.tables[HONEST]["modalities"] = "gray"
    federation.start_device(HONEST)
    until(lambda: federation.log(f"device-{HONEST}").count("are ready") > 1, "device 0")
    (camp / hostile.GO).touch()
    process.wait(PATIENCE)
    assert digest(federation.nodes[HONEST] / "data.npz") == data
    return lived(federation, app, recipe, folder / "one", NOT_STARTED if disk else {(6, HONEST)})


def sent_by(federation: Federation, client: int, app: Path) -> set[int]:
    """The rounds in which a client has sent a reply, by its own ledger."""
    facts = app / "run" / "run.json"
    if not facts.exists():
        return set()
    path = federation.state(client) / json.loads(facts.read_text())["run"] / f"client-{client}" / "egress.jsonl"
    return {row["round"] for row in rows(path) if row["destination"] == "server"} if path.exists() else set()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("fault", WORDS)
def test_the_server_says_who_and_what_was_wrong(fault: str, hurt: Lived, disk: Path | None) -> None:
    if fault == "full disk" and disk is None:
        pytest.skip("no small file system can be mounted here")
    round, client, words = WORDS[fault]
    assert words in hurt.missing[round, client]
    line = f"client-missing: round {round}, task update, client {client}, reason {hurt.missing[round, client]}"
    assert line in hurt.federation.log("run")


def test_the_run_is_the_one_in_which_nobody_heard_of_those_replies(hurt: Lived, disk: Path | None) -> None:
    state, books = outcome(hurt.out)
    assert state == hurt.spared.result["state_sha256"]
    assert heard(books, set(hurt.missing)) == heard(hurt.books, set(hurt.missing))
    planned = {(round, client) for fault, (round, client, _) in WORDS.items() if fault != "full disk" or disk}
    assert planned <= set(hurt.missing)


def heard(books: list[dict[str, Any]], lost: set[tuple[int, int]]) -> list[dict[str, Any]]:
    """The rows of a ledger that do not speak of a client in a round that it was lost for."""
    return [row for row in books if (row["round"], row["client"]) not in lost]


def test_a_reply_delivered_twice_counts_once(hurt: Lived, camp: Path) -> None:
    same, other = (json.loads(line) for line in (camp / hostile.TOLD).read_text().splitlines())
    assert same["request"] != other["request"]
    assert (same["taken"], other["taken"]) == (True, False), "it has arrived, and no other request waits for it"
    assert (5, HOSTILE) not in hurt.missing
    crossed = [
        row["round"] for row in outcome(hurt.out)[1] if (row["client"], row["destination"]) == (HOSTILE, "server")
    ]
    assert crossed.count(5) == crossed.count(1), "as many rows as of a reply delivered once"


@pytest.mark.parametrize("client", [HONEST, UNLUCKY, HOSTILE])
def test_clients_keep_their_state_and_a_whole_ledger(client: int, hurt: Lived) -> None:
    folder = hurt.folder(client)
    states = kept_states(folder.parents[1], folder.parent.name, client)
    assert checkpoint.digest(states[max(states)]) == checkpoint.digest(hurt.locals[client])
    own = rows(folder / "egress.jsonl")
    assert {row["round"] for row in own if row["destination"] == "client"} == set(range(1, ROUNDS + 1)) - (
        {6} if client == HONEST else set()
    )
