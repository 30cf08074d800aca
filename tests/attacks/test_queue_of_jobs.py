"""The queue of jobs: other users of the server's machine, damaged records, and what a cancelled job costs devices."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from engines.devices import RECIPE
from engines.own_devices import own_devices
from engines.test_jobs import Records, until
from engines.test_own_modes import method
from polyfed.core.errors import RecipeError
from polyfed.deploy.device import tasks
from polyfed.deploy.server.job_process import work
from polyfed.deploy.server.jobs import CANCELLED, RECORD, RUNNING, WAITING, Jobs
from polyfed.deploy.server.queued_run import enqueue
from polyfed.deploy.server.run_log import STATUS_FOLDER
from refusals import refuses

NOBODY = 65534
DEEDS: dict[str, Callable[[Path], object]] = {
    "sees": lambda folder: Jobs(folder).all(),
    "lists": lambda folder: list((folder / "jobs").iterdir()),
    "reads": lambda folder: (folder / "jobs" / "1" / RECORD).read_text(),
    "cancels": lambda folder: Jobs(folder).order(1, "cancel"),
    "submits": lambda folder: (folder / "jobs" / "2").mkdir(),
}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("deed", DEEDS)
def test_another_user_of_the_machine_neither_submits_nor_cancels_nor_sees_a_job(deed: str, open_folder: Path) -> None:
    jobs = Records(open_folder)
    jobs.put()
    jobs.folder.chmod(0o777)  # as a copy may have it
    Jobs(open_folder)
    os.seteuid(NOBODY)
    try:
        with pytest.raises((PermissionError, RecipeError)):
            DEEDS[deed](open_folder)
    finally:
        os.seteuid(0)
    assert jobs.states() == [WAITING]


def broken(told: dict[str, Any]) -> list[str]:
    edits: list[dict[str, Any]] = [
        {"id": 2},
        {"id": "1"},
        {"state": "owned"},
        {"out": ["a"]},
        {"at": "soon"},
        {"more": 1},
        {"starts": None},
    ]
    return [json.dumps(told | edit) for edit in edits] + ["", "[]", "null", "[" * 10**5, '{"id": 1}', "1" * 10**5]


def test_a_record_of_any_form_stops_neither_the_server_nor_the_other_jobs(tmp_path: Path) -> None:
    jobs = Records(tmp_path)
    jobs.put()
    jobs.put()
    path, supervisor = jobs.place(1) / RECORD, jobs.supervisor(0)
    for text in broken(json.loads(path.read_text())):
        path.write_text(text)
        supervisor.look()
        assert (jobs.damaged(), [job.id for job in jobs.all()]) == ([1], [2]), text[:80]


def test_a_record_of_an_older_release_may_lack_what_has_a_default(tmp_path: Path) -> None:
    jobs = Records(tmp_path)
    jobs.put()
    path = jobs.place(1) / RECORD
    told = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in told.items() if name not in ("kills", "begun_at")}))
    assert jobs.order(1, "pause").kills == 0
    for name in ("out", "state"):
        path.write_text(json.dumps({one: value for one, value in told.items() if one != name}))
        assert jobs.damaged() == [1]


@pytest.mark.parametrize("order", ["pause", "cancel"])
def test_a_cancelled_job_costs_devices_nothing_more(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Both devices are in the middle of a task, which nobody waits for any more; none gets another one."""
    monkeypatch.setenv(STATUS_FOLDER, "")
    begun, go, answer, count = Event(), Event(), tasks.answer, [0]

    def slow(task: Any) -> dict[str, Any]:
        count[0] += 1
        if count[0] > 3:  # all have enrolled
            begun.set()
            go.wait(60)
        return answer(task)

    monkeypatch.setattr(tasks, "answer", slow)
    with own_devices(tmp_path, method("fedavg")) as federation:
        jobs, queue = Jobs(federation.credentials), federation.server.hub.queue
        enqueue(federation.app, federation.credentials, {}, 0.0, 3600.0)
        jobs.change(1, WAITING, state=RUNNING, starts=1)

        def cancel() -> None:
            assert begun.wait(60)
            assert queue.wanted()
            jobs.order(1, order)

        thread = Thread(target=cancel)
        thread.start()
        work(jobs, 1, 1)
        thread.join()
        asked = count[0]
        assert not queue.wanted(), "the tasks that waited are deleted"
        run = jobs.get(1).run
        assert not [path for path in queue.folder.iterdir() if path.name.startswith(run)]
        go.set()
        until(lambda: "nobody waits for its reply any more" in capsys.readouterr().err)
    assert count[0] <= asked + 2, "a device that waited for its turn in this process finds nobody"
    assert (jobs.get(1).state == CANCELLED) == (order == "cancel")
    assert not [path for path in queue.folder.iterdir() if path.name.startswith(run)], "late replies leave nothing"


@pytest.mark.parametrize(
    ("app", "said"),
    [
        (f"x = {'[' * 5000}{']' * 5000}", "holds no app"),
        ('name = "a"\nout = "run"\ndata = "/etc/passwd"', "reads no file"),
    ],
    ids=["deep", "data of a recipe without a file"],
)
def test_an_app_of_a_stranger_is_refused_in_words(app: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "app.toml").write_text(app)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    with refuses(RecipeError, said):
        enqueue(tmp_path, tmp_path / "credentials", {}, 0.0, 1.0)
