"""Mistakes of operators and full disks, with real processes: a sentence and an exit code, and nothing is lost. Slow.

Each test makes the fault good afterwards, and the same command then ends with the bits of a simulation.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.federations import Federation, until
from engines.test_edges import EDGES, same_run
from engines.test_own_processes import RECIPE
from engines.test_rough_links import WIDE, fill, small_disk
from polyfed.deploy.server.jobs import FAILED, FINISHED, RUNNING, Job, Jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ENROL_SECONDS = 150.0
"""As long as a run waits for devices that do not come; edges and devices import PyTorch meanwhile."""

PLAIN = RECIPE.format(rounds=2).replace('"scaffold"', '"fedavg"')
LARGE = WIDE.format(rounds=2)
"""A model of 1.4 MB, of which two of the three clients have a half: 2.7 MB each way in a round."""

DISK = 12 * 2**20
"""Bytes of a small disk."""

Begin = Callable[..., Federation]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Returns a federation of a recipe, whose processes the test starts."""
    with ExitStack() as stack:

        def made(text: str) -> Federation:
            recipe = tmp_path / "recipe.toml"
            recipe.write_text(text.replace("enrol_seconds = 120.0", f"enrol_seconds = {ENROL_SECONDS}"))
            return stack.enter_context(Federation(recipe, tmp_path / "fed"))

        yield made


def submitted(federation: Federation, *more: str) -> tuple[int, str]:
    """The exit code of `polyfed submit`, and what it says."""
    before = len(federation.log("run"))
    words = ["submit", str(federation.app), "--credentials", str(federation.credentials), *more]
    code = federation.begin("run", words).wait(400)
    return code, federation.log("run")[before:]


def ended_well(federation: Federation, out: Path | None = None) -> None:
    """The run has the bits of a simulation, and no process has shown a traceback."""
    one = federation.folder / "one"
    polyfed.run(federation.folder.parent / "recipe.toml", one, engine="sequential")
    same_run(out or federation.out, one)
    for path in federation.folder.rglob("*log"):
        assert "Traceback" not in path.read_text(errors="replace"), path


def test_two_devices_with_one_number(begin: Begin) -> None:
    federation = begin(PLAIN)
    right, federation.tables[1]["client"] = federation.tables[1]["client"], 0
    federation.start()
    code, said = submitted(federation)
    assert code == 4, said
    assert "2 of 3 clients enrolled" in said
    assert "client 0 belongs to the device with key SHA256:" in said
    assert "Give this device another client number" in said
    federation.kill("device-1")
    federation.tables[1]["client"] = right
    (federation.out / ".clients.json").unlink()  # whoever enrolled first has the number
    federation.start_device(1)
    assert submitted(federation)[0] == 0
    ended_well(federation)


def test_an_edge_without_its_silo(begin: Begin) -> None:
    federation = begin(EDGES)
    federation.start_server()
    for silo in federation.edges:
        federation.start_edge(silo)
    late = [number for number, table in enumerate(federation.tables) if table["silo"] == 1]
    for number in {*range(len(federation.nodes))} - {*late}:
        federation.start_device(number)
    code, said = submitted(federation)
    assert code == 4, said
    assert "the edges of 1 of 2 silos enrolled" in said
    assert "the edge of silo 1: 0 of its 2 devices enrolled (no other device answered)" in said
    for number in late:
        federation.start_device(number)
    assert submitted(federation)[0] == 0
    ended_well(federation)


def test_ids_that_overlap_nowhere(begin: Begin) -> None:
    federation = begin(EDGES.replace('"hfm"', '"hfm"\noverlap = "common"'))
    data = federation.nodes[-1] / "data.npz"
    right = data.read_bytes()
    with np.load(data) as arrays:
        kept = dict(arrays)
    np.savez(data, **kept | {"id": kept["id"] + 1_000_000_007})
    federation.start()
    code, said = submitted(federation)
    assert code == 5, said
    assert "the sample ids of its devices do not fit each other, or they share none" in said
    assert json.loads((federation.out / "error.json").read_text())["exit_code"] == 5
    assert "10000000" not in said, "an id"
    data.write_bytes(right)
    number = len(federation.nodes) - 1
    federation.kill(f"device-{number}")
    federation.start_device(number)
    assert submitted(federation)[0] == 0
    ended_well(federation)


# full disks


@contextmanager
def full(folder: Path, spare: int) -> Iterator[Path]:
    """A disk at a folder in which so many bytes are left. Yields what fills it."""
    with small_disk(folder, DISK) as disk:
        yield fill(disk, spare)


@pytest.mark.parametrize("spare", [0, 1_000_000])
def test_a_server_whose_disk_has_no_room_for_a_request(spare: int, begin: Begin) -> None:
    """Not even for the question who is there, or not for the model."""
    federation = begin(LARGE)
    with small_disk(federation.credentials / "queue", DISK) as disk:
        federation.start()
        until(lambda: federation.log("server").count("is online") >= 3, "the devices")
        filler = fill(disk, spare)
        code, said = submitted(federation)
        assert code == 6, said
        assert "cannot be written" in said
        assert "Make room, and call the same command again" in said
        filler.unlink()
        assert submitted(federation)[0] == 0
        federation.kill("server")
    ended_well(federation)


def test_a_server_whose_disk_has_no_room_for_the_replies(begin: Begin) -> None:
    federation = begin(LARGE)
    with small_disk(federation.credentials / "queue", DISK) as disk:
        federation.start()
        until(lambda: federation.log("server").count("is online") >= 3, "the devices")
        filler = fill(disk, 3_300_000)
        run = federation.run()
        devices = [f"device-{number}" for number in range(3)]
        until(lambda: any("the disk of the server is full" in federation.log(name) for name in devices), "a full disk")
        assert run.poll() is None
        filler.unlink()
        assert run.wait(400) == 0, federation.log("run")
        federation.kill("server")
    ended_well(federation)


def test_a_run_whose_disk_is_full(begin: Begin) -> None:
    federation = begin(LARGE)
    federation.start()
    out = federation.folder / "disk"
    with full(out, 500_000) as filler:
        code, said = submitted(federation, "--out", str(out / "run"))
        assert code == 5, said
        assert "No space left on device" in said
        filler.unlink()
        assert submitted(federation, "--out", str(out / "run"))[0] == 0
        ended_well(federation, out / "run")


def job_of(federation: Federation) -> Job:
    return Jobs(federation.credentials).get(1)


def command(federation: Federation, *words: str) -> None:
    name = f"command-{words[0]}"
    assert federation.begin(name, [*words]).wait(400) == 0, federation.log(name)


def test_a_job_whose_disk_is_full(begin: Begin) -> None:
    federation = begin(LARGE)
    federation.start()
    out = federation.folder / "disk"
    with full(out, 500_000) as filler:
        assert submitted(federation, "--queue", "--out", str(out / "run"))[0] == 0
        until(lambda: job_of(federation).ended, "the job")
        job = job_of(federation)
        assert (job.state, job.exit_code) == (FAILED, 5), job.reason
        assert "No space left on device" in job.reason
        filler.unlink()
        command(federation, "jobs", str(federation.credentials), "resume", "1")
        until(lambda: job_of(federation).state == FINISHED, "the job")
        ended_well(federation, out / "run")


def test_a_server_whose_disk_has_no_room_for_the_records_of_jobs(begin: Begin) -> None:
    """A new job is refused; one that is there goes on when there is room, and until then the server says so once."""
    federation = begin(PLAIN)
    jobs = federation.credentials / "jobs"
    with small_disk(jobs, 2**20) as disk:
        federation.start()
        assert submitted(federation, "--queue")[0] == 0
        until(lambda: job_of(federation).state == RUNNING, "the job")
        filler = fill(disk, 0)
        code, said = submitted(federation, "--queue", "--out", str(federation.folder / "other"))
        assert code == 5, said
        assert "No space left on device" in said
        filler.unlink()
        until(lambda: job_of(federation).state == FINISHED, "the record")
        assert [job.id for job in Jobs(federation.credentials).all()] == [1]
        assert job_of(federation).exit_code == 0
        assert federation.log("server").count("cannot be looked after") <= 2
        ended_well(federation)
        federation.kill("server")


@pytest.mark.parametrize("what", ["state", "queue"])
def test_an_edge_whose_disk_is_full(what: str, begin: Begin, tmp_path: Path) -> None:
    """What it keeps itself, or what waits for its devices."""
    federation = begin(EDGES)
    edge = tmp_path / "fed" / "edges" / "1"
    folder = edge / {"state": "polyfed-edge", "queue": "credentials/queue"}[what]
    with small_disk(folder, DISK) as disk:
        federation.start()
        until(lambda: federation.log("edge-1").count("is online") >= 2, "the devices of the edge")
        filler = fill(disk, 0)
        code, said = submitted(federation)
        assert code == 4, said
        assert "the edges of 1 of 2 silos enrolled" in said
        assert "No space left on device" in said + federation.log("edge-1")
        assert str(tmp_path) not in said.partition("Not enrolled")[2], "a path of the silo"
        filler.unlink()
        assert submitted(federation)[0] == 0
        federation.kill("edge-1")
    ended_well(federation)
