"""Jobs of a server: their order, what becomes of them when processes die, and that a resumed run is exact.

The quick tests of the supervisor start real processes whose run is made up (`RUN`); the others run real jobs beside
real devices, in this process or, slow, in processes that are killed.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.own_devices import OwnDevices, own_devices
from engines.test_own_modes import method
from engines.test_own_processes import OwnFederation, begun
from polyfed.cli import main
from polyfed.core.errors import CheckpointError, RecipeError, TooFewReplies
from polyfed.core.system.files import ROUNDS
from polyfed.deploy.app_folder import write_app
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.server import job_process
from polyfed.deploy.server import jobs as jobs_of
from polyfed.deploy.server.job_process import work
from polyfed.deploy.server.jobs import (
    CANCELLED,
    COPY,
    FAILED,
    FINISHED,
    KILLS,
    PAUSED,
    RECORD,
    RUNNING,
    STATES,
    WAITING,
    Job,
    Jobs,
    Supervisor,
)
from polyfed.deploy.server.queued_run import enqueue
from polyfed.deploy.server.run_log import STATUS_FOLDER
from polyfed.experiment.running.lock import LOCK
from refusals import refuses

__all__ = ["begun"]

RUN = """
import sys, time
from pathlib import Path
from polyfed.deploy.server import job_process, jobs

def run(records, job):
    with open(records.folder.parent / "order", "a") as log:
        log.write(f"{job.id}\\n")
    end = Path(f"{job.out}.end")
    while not end.exists():
        time.sleep(0.02)
    return {"state": jobs.FINISHED}

job_process._run, job_process.LOOK_SECONDS = run, 0.05
job_process.work(jobs.Jobs(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
"""


class Records(Jobs):
    """Jobs whose runs are made up."""

    def __init__(self, credentials: Path) -> None:
        super().__init__(credentials)
        self.supervisors: list[Supervisor] = []

    def put(self, **more: Any) -> Job:
        out = str(self.credentials / f"run-{len(self.all()) + 1}")
        return self.add(
            [], **{"name": "toy", "purpose": "", "rounds": 2, "out": out, "data": "", "wait": 3600.0} | more
        )

    def let_end(self, number: int) -> None:
        (self.credentials / f"run-{number}.end").touch()

    def states(self) -> list[str]:
        return [job.state for job in self.all()]

    def supervisor(self, most: int = 1) -> Supervisor:
        self.supervisors.append(Supervisor(self, most, [sys.executable, "-c", RUN, str(self.credentials)]))
        return self.supervisors[-1]


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    monkeypatch.setenv("PYTHONPATH", str(Path(polyfed.__file__).parents[1]))
    monkeypatch.setattr(jobs_of, "LOOK_SECONDS", 0.05)
    made = Records(tmp_path)
    yield made
    for job in made.all():
        made.let_end(job.id)
    for supervisor in made.supervisors:
        for child in supervisor.children.values():
            child.wait(60)


def until(done: Callable[[], bool], look: Callable[[], object] = lambda: None) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        look()
        time.sleep(0.02)


def test_jobs_run_one_after_another_in_the_order_of_their_submission(records: Records) -> None:
    supervisor = records.supervisor()
    for _ in range(2):
        records.put()
    until(lambda: records.runs(1), supervisor.look)
    assert records.states() == [RUNNING, WAITING]
    records.let_end(1)
    records.let_end(2)
    until(lambda: records.states() == [FINISHED, FINISHED], supervisor.look)
    assert (records.credentials / "order").read_text().split() == ["1", "2"]
    until(lambda: not records.place(1).joinpath(COPY).exists(), supervisor.look)


def test_side_by_side_up_to_the_number_of_the_server_and_not_before_their_time(records: Records) -> None:
    supervisor = records.supervisor(2)
    records.put(at=time.time() + 3600)
    for _ in range(3):
        records.put()
    until(lambda: records.runs(2) and records.runs(3), supervisor.look)
    supervisor.look()
    assert records.states() == [WAITING, RUNNING, RUNNING, WAITING]
    records.change(1, WAITING, at=time.time() - 1)
    records.let_end(3)
    until(lambda: records.runs(1), supervisor.look)
    assert records.get(4).state == WAITING, "the older one first"


def test_orders_end_a_process_and_a_paused_job_goes_on(records: Records) -> None:
    supervisor = records.supervisor(2)
    for _ in range(2):
        records.put()
    until(lambda: records.runs(1) and records.runs(2), supervisor.look)
    records.order(1, "pause")
    records.order(2, "cancel")
    until(lambda: not records.runs(1) and not records.runs(2))
    supervisor.look()
    assert records.states() == [PAUSED, CANCELLED]
    records.order(1, "resume")
    records.let_end(1)
    until(lambda: records.states() == [FINISHED, CANCELLED], supervisor.look)
    assert records.get(1).starts == 2
    for order in ("pause", "resume", "cancel"):
        with refuses(RecipeError, f"'{order}' needs"):
            records.order(2, order)


def test_a_job_whose_process_is_killed_starts_again_and_not_for_ever(records: Records) -> None:
    supervisor, job = records.supervisor(), records.put()
    for start in range(1, KILLS + 1):
        until(lambda: records.runs(1), supervisor.look)
        assert records.get(1).starts == start
        supervisor.children[1].kill()
        supervisor.children[1].wait()
        supervisor.look()
    until(lambda: records.states() == [FAILED], supervisor.look)
    assert "killed 3 times" in records.get(1).reason
    records.order(1, "resume")
    until(lambda: records.runs(1), supervisor.look)
    Path(job.out).mkdir()
    row = {"round": 1, "bytes_up": 5, "bytes_down": 7, "missing": {"0": "late"}, "privacy": {"epsilon": 1.5}}
    (Path(job.out) / ROUNDS).write_text(json.dumps(row) + '\n{"round": 2, "byt')
    records.change(1, RUNNING, kills=KILLS - 1)
    supervisor.children[1].kill()
    until(lambda: records.get(1).starts == KILLS + 2, supervisor.look)
    assert records.get(1).kills == 1, "a round was finished in between"
    facts = records.facts(records.get(1))
    told = [facts[name] for name in ("round", "bytes_up", "bytes_down", "missing", "epsilon")]
    assert told == [1, 5, 7, 1, 1.5], "a row that is being written does not count"


def test_a_process_outlives_its_server_and_the_next_server_starts_no_second_one(records: Records) -> None:
    first, _ = records.supervisor(), records.put()
    until(lambda: records.runs(1), first.look)
    second = records.supervisor()
    for _ in range(3):
        second.look()
    assert records.get(1).starts == 1
    assert not second.children
    first.children[1].kill()
    first.children[1].wait()
    until(lambda: records.get(1).starts == 2, second.look)
    assert not records.get(1).kills, "it may have ended with the machine"


def test_a_server_that_ends_takes_its_jobs_along_and_the_next_one_starts_them(records: Records) -> None:
    supervisor, _ = records.supervisor(), records.put()
    thread = Thread(target=supervisor.run)
    thread.start()
    until((records.credentials / "order").exists)
    supervisor.stop.set()
    thread.join()
    assert records.states() == [WAITING]
    assert not records.runs(1)


def test_a_process_of_another_release_than_the_installed_one_ends_and_is_started_again(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = records.credentials / "installed" / "polyfed-0.1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: polyfed\nVersion: 0.1.0\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(facts.parent), os.environ["PYTHONPATH"]]))
    supervisor, _ = records.supervisor(), records.put()
    until((records.credentials / "order").exists, supervisor.look)
    time.sleep(0.3)
    supervisor.look()
    assert records.get(1).starts == 1
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: polyfed\nVersion: 0.2.0\n")
    until(lambda: records.get(1).starts == 2, supervisor.look)
    assert not records.get(1).kills


def test_a_process_that_does_not_obey_is_killed(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_of, "END_SECONDS", 0.2)
    supervisor, _ = records.supervisor(), records.put()
    until(lambda: records.runs(1), supervisor.look)
    os.kill(supervisor.children[1].pid, signal.SIGSTOP)
    records.order(1, "cancel")
    until(lambda: not records.runs(1), supervisor.look)
    assert records.states() == [CANCELLED]


def test_a_late_process_of_an_earlier_start_does_nothing(records: Records) -> None:
    records.put()
    records.change(1, WAITING, state=RUNNING, starts=2)
    work(records, 1, 1)
    assert (records.get(1).state, records.get(1).starts) == (RUNNING, 2)
    assert not (records.credentials / "order").exists()


def test_a_status_shows_the_jobs_that_run_however_many_wait_behind_them(records: Records) -> None:
    for _ in range(6):
        records.put()
    records.change(1, WAITING, state=RUNNING)
    records.order(6, "cancel")
    told = records.shown(3)
    assert [job["id"] for job in told["jobs"]] == [1, 5, 6]
    assert told["job_states"] == dict.fromkeys(STATES, 0) | {RUNNING: 1, WAITING: 4, CANCELLED: 1}
    assert [job["id"] for job in records.shown(1)["jobs"]] == [1]


def test_too_few_devices_are_waited_for_as_long_as_the_job_says(records: Records) -> None:
    job = records.put(wait=60.0)
    error = TooFewReplies("0 of 3 clients enrolled")
    first = job_process._tried(job, error)
    assert first["state"] == WAITING
    assert first["at"] > time.time() + 20, "others have their turn"
    late = records.change(1, WAITING, failing=time.time() - 61)
    assert late is not None
    last = job_process._tried(late, error)
    assert (last["state"], last["exit_code"]) == (FAILED, 4)
    assert "0 of 3 clients enrolled. It was tried" in last["reason"]


def test_the_records_survive_what_happens_to_them(records: Records) -> None:
    first = records.put()
    with refuses(RecipeError, "run-1"):
        records.put(out=first.out)
    records.order(1, "cancel")
    again = records.put(out=first.out)
    assert again.id == 2, "the job that wrote there has ended"
    (records.place(1) / RECORD).write_text("{}")
    with refuses(CheckpointError, "no record"):
        records.get(1)
    assert (records.damaged(), [job.id for job in records.all()]) == ([1], [2])
    (records.folder / "note.txt").touch()
    (records.folder / ".7").mkdir()
    assert records.put().id == 3, "a job that was half submitted leaves no trace"
    with refuses(RecipeError, "no job 9"):
        records.order(9, "cancel")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnDevices]:
    monkeypatch.setenv(STATUS_FOLDER, "")  # which a run sets
    recipe = method("scaffold").replace("rounds = 2", "rounds = 4")
    with own_devices(tmp_path, recipe) as federation:
        yield federation


def test_a_job_that_was_paused_in_the_middle_ends_as_one_that_was_not(toy: OwnDevices) -> None:
    jobs = Jobs(toy.credentials)
    enqueue(toy.app, toy.credentials, {}, 0.0, 3600.0)
    write_app(toy.recipe, toy.app)
    (toy.app / "recipe.toml").write_text("changed after the job was submitted")
    jobs.change(1, WAITING, state=RUNNING, starts=1)

    def pause() -> None:
        until(lambda: jobs.facts(jobs.get(1))["round"] >= 1)
        jobs.order(1, "pause")

    thread = Thread(target=pause)
    thread.start()
    work(jobs, 1, 1)
    thread.join()
    assert jobs.get(1).state == PAUSED
    assert 1 <= jobs.facts(jobs.get(1))["round"] < 4
    queue = toy.credentials / "queue"
    assert not toy.server.hub.queue.wanted(), "nothing waits for a device"
    assert not [path for path in queue.iterdir() if path.name.startswith(jobs.get(1).run)]
    jobs.order(1, "resume")
    jobs.change(1, WAITING, state=RUNNING, starts=2)
    work(jobs, 1, 2)
    facts = jobs.facts(jobs.get(1))
    assert (facts["state"], facts["round"], facts["enrolled"], facts["wanted"]) == (FINISHED, 4, 3, 3)
    result = json.loads((Path(facts["out"]) / "result.json").read_text())
    assert result["bytes_up"] == facts["bytes_up"]
    one = polyfed.run(toy.recipe, toy.folder / "one", engine="sequential").result
    assert result["state_sha256"] == one["state_sha256"]


@pytest.mark.parametrize(
    ("policy", "purpose", "words"),
    [
        ("[limits]\nmin_rows = 100000", "", "refused to enrol"),
        ("[purposes]", "", "names no purpose"),
        ("[purposes]", "sepsis", "certain purposes only"),
    ],
    ids=["limit", "no-purpose", "purpose"],
)
def test_a_job_that_a_policy_forbids_ends_in_a_sentence(
    policy: str, purpose: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, though it may wait an hour for devices. A section [purposes] that names none forbids every job."""
    monkeypatch.setenv(STATUS_FOLDER, "")
    recipe = method("fedavg").replace("[deployment]\n", f'[deployment]\npurpose = "{purpose}"\n')
    assert f'purpose = "{purpose}"' in recipe
    started = time.monotonic()
    with own_devices(tmp_path, recipe, policy=f"\n{policy}\n") as federation:
        enqueue(federation.app, federation.credentials, {}, 0.0, 3600.0)
        jobs = Jobs(federation.credentials)
        jobs.change(1, WAITING, state=RUNNING, starts=1)
        work(jobs, 1, 1)
        assert not federation.server.hub.queue.wanted(), "nothing waits for a device"
    assert time.monotonic() - started < 60.0
    told = jobs.get(1)
    assert (told.state, told.exit_code, told.reason.count("\n")) == (FAILED, 3, 0)
    assert words in told.reason


def test_the_commands(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, app = tmp_path / "recipe.toml", tmp_path / "app"
    recipe.write_text(method("fedavg"))
    write_app(recipe, app)
    credentials = write_credentials(tmp_path / "app-credentials", 0)

    def said(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main([*map(str, words)])
        return int(end.value.code or 0), " ".join(capsys.readouterr().out.split())

    assert said("jobs", app)[0] == 2, "no credentials"
    assert not (app / "jobs").exists()
    assert "there are no jobs" in said("jobs", credentials)[1]
    assert "no server uses these credentials now" in said("submit", app, "--queue")[1]
    assert said("submit", app, "--queue")[0] == 2, "the same folder"
    assert said("submit", app, "--queue", "--out", tmp_path / "two", "--at", "2001-01-01T00:00")[0] == 2
    assert said("submit", app, "--wait", 2)[0] == 2, "without --queue"
    later = said("submit", app, "--queue", "--out", tmp_path / "two", "--at", "2999-12-31T00:00", "--json")
    assert (later[0], json.loads(later[1])["id"]) == (0, 2)
    code, table = said("jobs", credentials)
    assert (code, "1 recipe waiting 0 of 2" in table, "not before 2999-12-3" in table) == (0, True, True)
    assert said("jobs", credentials, "pause", 1) == (0, "job 1 is paused")
    assert said("jobs", credentials, "cancel")[0] == 2
    assert said("jobs", credentials, "logs", 1) == (0, "")
    (Jobs(credentials).place(1) / "log").write_text("a line\x1b[2J\n")
    assert said("jobs", credentials, "logs", 1)[1] == "a line\\x1b[2J"
    assert "paused since" in said("jobs", credentials, "show", 1)[1]
    told = json.loads(said("jobs", credentials, "--json")[1])
    assert [job["state"] for job in told["jobs"]] == [PAUSED, WAITING]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_jobs_survive_kills_of_the_server_and_of_their_process(begun: Callable[..., OwnFederation]) -> None:
    """The server is killed, then the process of the job, and a second job follows the first."""
    federation = begun(40)
    for out in ("app/run", "second"):
        enqueue(federation.app, federation.credentials, {"out": str(federation.folder / out)}, 0.0, 3600.0)
    jobs = Jobs(federation.credentials)

    def rounds() -> int:
        done: int = jobs.facts(jobs.get(1))["round"]
        return done

    federation.until(lambda: rounds() >= 1, "round 1")
    federation.kill("server")
    federation.start("server")
    before = rounds()
    federation.until(lambda: rounds() >= before + 2, "a round with the next server")
    os.kill(int((jobs.place(1) / LOCK).read_text()), signal.SIGKILL)
    federation.until(lambda: all(job.state == FINISHED for job in jobs.all()), "both jobs")
    assert jobs.get(1).starts > 1
    assert federation.outcome() == federation.undisturbed()
    second = json.loads((federation.folder / "second" / "result.json").read_text())
    assert second["state_sha256"] == federation.outcome()


def test_a_look_reads_only_jobs_that_have_not_ended(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after thousands of ended jobs; orders and new jobs are noticed in the next look."""
    ended = records.put(state=CANCELLED)
    text = (records.place(ended.id) / RECORD).read_text()
    for number in range(2, 302):
        records.place(number).mkdir()
        (records.place(number) / RECORD).write_text(text.replace('"id": 1', f'"id": {number}'))
    waiting = records.put(at=time.time() + 3600)
    read, get = list[int](), records.get

    def counted(number: int) -> Job:
        read.append(number)
        return get(number)

    monkeypatch.setattr(records, "get", counted)
    supervisor = records.supervisor()
    supervisor.look()
    assert len({*read}) == 302, "all of them once"
    read.clear()
    supervisor.look()
    assert {*read} == {waiting.id}
    records.order(waiting.id, "cancel")
    supervisor.look()
    read.clear()
    supervisor.look()
    assert not read
    new = records.put()
    until(lambda: records.runs(new.id), supervisor.look)
    assert records.states()[-1] == RUNNING
