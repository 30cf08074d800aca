"""A federation over polyfed's own transport, with real processes that are killed at any moment."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from polyfed.core.errors import TransportError
from polyfed.deploy import submit
from polyfed.deploy.app_folder import write_app, write_nodes
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device import agent
from polyfed.deploy.processes import free_ports
from polyfed.experiment.certificate import certify, verify_certificate
from polyfed.experiment.recipes.recipe import load_recipe
from refusals import refuses

PATIENCE = 240.0
RECIPE = """
seed = 3
rounds = {rounds}
[data]
name = "toy"
rows = 240
classes = 4
[clients]
partition = "dirichlet"
num = 3
alpha = 2.0
holdings = [["a", "b"], ["a"], ["b"]]
[model]
embedding = 6
[model.encoders]
a = {{ kind = "mlp", hidden = [8] }}
b = {{ kind = "mlp", hidden = [8] }}
[train]
batch_size = 16
lr = 0.1
[algorithm]
name = "scaffold"
[deployment]
enrol_seconds = 120.0
reply_seconds = 120.0
away_seconds = 120.0
"""


class OwnFederation:
    """A server, its devices and runs, with the commands of docs/deploy.md.

    Args:
        folder: a folder for everything.
        rounds: number of rounds of the recipe.
        together: whether the devices share one process.
        recipe: another recipe.
        more: client -> further lines of its [[device]] table.
    """

    def __init__(
        self,
        folder: Path,
        rounds: int,
        *,
        together: bool = False,
        recipe: str = "",
        more: Callable[[int], str] = lambda client: "",
    ) -> None:
        self.folder, self.processes = folder, dict[str, subprocess.Popen[bytes]]()
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(recipe or RECIPE.format(rounds=rounds))
        self.app, self.credentials = folder / "app", folder / "credentials"
        self.places = self.prepared()
        (self.port,) = free_ports(1)
        head = f'server = "{self.address}:{self.port}"\nca = "{self.credentials}/ca.pem"\n{self.general}'
        tables = [self._table(number, place) + more(number) + "\n" for number, place in enumerate(self.places)]
        self.files = (
            {"devices": head + "".join(tables)}
            if together
            else {f"device-{number}": head + table for number, table in enumerate(tables)}
        )
        for name, text in self.files.items():
            (folder / f"{name}.toml").write_text(text)

    address = "127.0.0.1"
    general = ""
    """Further lines above the tables of devices."""

    def prepared(self) -> list[Path]:
        """Write app, data and credentials. Return the folders of the devices."""
        write_app(self.recipe, self.app)
        places = write_nodes(load_recipe(self.recipe), self.folder)
        write_credentials(self.credentials, len(places), [self.address])
        return places

    def python(self, name: str) -> str:
        """The Python of a process."""
        return sys.executable

    def inside(self, name: str) -> list[str]:
        """The words before a command, such as those that run it in a network namespace."""
        return []

    def program(self, name: str) -> list[str]:
        """What Python runs as the command `polyfed`."""
        return ["-m", "polyfed"]

    patience, pause = PATIENCE, 0.05
    """Seconds for which `until` waits, and between two looks."""

    options: Sequence[str] = ()
    """Further options of `polyfed server`."""

    def packages(self, name: str) -> list[Path]:
        """Where Python finds packages before those that are installed."""
        return [Path(polyfed.__file__).parents[1]]

    def _table(self, number: int, place: Path) -> str:
        with np.load(place / "data.npz", allow_pickle=False) as arrays:
            held = [name for name in arrays.files if name in "ab"]
        return (
            f'[[device]]\nkey = "credentials/node-{number}.key"\ndata = "nodes/{number}/data.npz"\nclient = {number}\n'
            f'modalities = {json.dumps(held)}\npolicy = "nodes/{number}/policy.toml"\n'
        )

    def words(self, name: str) -> list[str]:
        """The words after `polyfed` of `server`, `run` or the process of a device."""
        return {
            "server": ["server", "credentials", "--host", self.address, "--port", str(self.port), *self.options],
            "run": ["submit", "app", "--credentials", "credentials"],
        }.get(name, ["device", f"{name}.toml"])

    def start(self, name: str) -> "subprocess.Popen[bytes]":
        """Start one of these processes."""
        source = os.pathsep.join(map(str, self.packages(name)))
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.inside(name), self.python(name), "-P", *self.program(name), *self.words(name)],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
            )
        return self.processes[name]

    def kill(self, name: str) -> None:
        """Kill a process, but not what it has started."""
        self.processes[name].kill()
        self.processes[name].wait()

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self.patience
        while not done():
            assert time.monotonic() < end, f"waited for {what}: {[self.log(name)[-2000:] for name in self.processes]}"
            time.sleep(self.pause)

    def began(self) -> None:
        for name in ("server", *self.files):
            self.start(name)

    def outcome(self) -> str:
        digest: str = json.loads((self.app / "run" / "result.json").read_text())["state_sha256"]
        return digest

    def undisturbed(self) -> str:
        digest: str = polyfed.run(self.recipe, self.folder / "one", engine="sequential").result["state_sha256"]
        return digest

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Callable[..., OwnFederation]]:
    made: list[OwnFederation] = []

    def begin(rounds: int, **more: Any) -> OwnFederation:
        made.append(OwnFederation(tmp_path, rounds, **more))
        made[-1].began()
        return made[-1]

    yield begin
    for one in made:
        one.stop()


@pytest.mark.timeout(600)
def test_a_run_over_the_own_transport_equals_a_simulation(begun: Callable[..., OwnFederation], capsys: Any) -> None:
    """The devices share one process; it needs little memory before a task comes, and ends its tasks with itself."""
    federation = begun(1, together=True)
    federation.until(lambda: "3 devices are ready" in federation.log("devices"), "the devices")
    assert "when `polyfed submit` is called again" in federation.log("devices"), "what silence of the server means"
    gateway = psutil.Process(federation.processes["devices"].pid)
    assert gateway.memory_info().rss < 60e6
    assert federation.start("run").wait(PATIENCE) == 0, federation.log("run")
    assert federation.outcome() == federation.undisturbed()
    children = gateway.children(recursive=True)
    assert children, "the process of tasks waits for the next round"
    federation.processes["devices"].terminate()
    assert federation.processes["devices"].wait(30) == 0
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    submit(federation.app, federation.credentials, {})
    assert "nothing to do" in capsys.readouterr().err
    federation.processes["server"].terminate()
    assert federation.processes["server"].wait(30) in (0, -signal.SIGTERM)
    with refuses(TransportError, "no server uses"):
        submit(federation.app, federation.credentials, {})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_device_that_was_away_at_the_end_signs_when_it_is_back(begun: Callable[..., OwnFederation]) -> None:
    """The server is killed and started meanwhile, and the certificate of before holds."""
    text = (
        RECIPE.format(rounds=3).replace('"scaffold"', '"fedavg"').replace("away_seconds = 120.0", "away_seconds = 2.0")
    )
    federation = begun(3, recipe=text)
    run, out = federation.start("run"), federation.app / "run"
    federation.until(lambda: "round 1:" in federation.log("run"), "round 1")
    federation.kill("device-2")
    assert run.wait(PATIENCE) == 0, federation.log("run")
    assert {*json.loads((out / "receipts.json").read_text())} == {"0", "1"}
    assert "clients 2 have not signed the run" in federation.log("run")
    before, _ = certify(out, federation.folder / "before.json")
    federation.kill("server")
    federation.start("server")
    federation.start("device-2")
    federation.until(lambda: "2" in json.loads((out / "receipts.json").read_text()), "the receipt")
    federation.until(lambda: not [*(federation.credentials / "receipts").iterdir()], "the end of the wait")
    after, content = certify(out)
    assert all(one["receipt"] for one in content["clients"])
    logs = [place / "polyfed-state" for place in federation.places]
    for certificate in (before, after):
        assert not verify_certificate(certificate, run=out, logs=logs).faults


KEPT_SECONDS, SPARE_SECONDS = 0.5, 3.0
"""How often a device keeps the state of a training, and how much later it may be on a machine with other work."""

LONG = (
    RECIPE.format(rounds=1)
    .replace("num = 3", "num = 1")
    .replace('holdings = [["a", "b"], ["a"], ["b"]]\n', "")
    .replace("[8]", "[256, 256]")
    .replace('"scaffold"', '"fedavg"')
    .replace("lr = 0.1", 'lr = 0.001\noptimiser = "adam"\nsteps = 12000')
)
"""One client trains for half a minute, so that three kills and starts fall into it on a fast machine too."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_device_that_is_killed_while_it_trains_loses_only_the_last_seconds(
    begun: Callable[..., OwnFederation],
) -> None:
    """The process of the task, that of the device, and all of them as in a power failure, each in one training."""
    federation = begun(1, recipe=LONG, more=lambda client: f"checkpoint_seconds = {KEPT_SECONDS}\n")
    run, chance, steps = federation.start("run"), random.Random(1), [0]

    def kept() -> dict[int, float]:
        """When the device has kept the state of its training after so many steps."""
        found = {}
        for path in federation.folder.rglob("training-*"):
            with suppress(FileNotFoundError):  # another one has just replaced it
                found[int(path.stem.rpartition("-")[2])] = path.stat().st_mtime
        return found

    def resumed() -> list[int]:
        return [0, *map(int, re.findall(r"goes on after step (\d+)", federation.log("device-0")))]

    for victim in ("worker", "device", "all"):
        federation.until(lambda: max(kept(), default=0) > steps[-1], "a kept state")  # noqa: B023  called at once
        time.sleep(chance.uniform(1.0, 2.0))
        device = psutil.Process(federation.processes["device-0"].pid)
        (tasks,) = device.children()
        for one in {"worker": tasks.children(), "device": [device], "all": [device, tasks, *tasks.children()]}[victim]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        lost = time.time() - min(kept().values())  # of two, the later one may not be whole
        assert lost < KEPT_SECONDS + SPARE_SECONDS, "what is not kept is lost"
        assert run.poll() is None
        if victim != "worker":
            federation.processes["device-0"].wait()
            federation.start("device-0")
        federation.until(lambda: len(resumed()) > len(steps), "the same training")  # noqa: B023
        steps = resumed()
    assert run.wait(PATIENCE) == 0, federation.log("run")
    assert steps == sorted({*steps}), "no kill has thrown it back"
    assert len(steps) == 1 + 3
    assert federation.outcome() == federation.undisturbed()
    assert not kept(), "the states go with the reply"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_killed_the_run_goes_on_and_loses_nothing(seed: int, begun: Callable[..., OwnFederation]) -> None:
    """The server, a device, the process of its tasks, or the run, each killed without a word at a random moment."""
    federation, chance = begun(40), random.Random(seed)
    run = federation.start("run")
    federation.until(lambda: "round 1:" in federation.log("run"), "round 1")
    victims = ["server", "device-0", "tasks", "device-1", "run", "server", "tasks", "device-2"]
    chance.shuffle(victims)
    for victim in victims:
        time.sleep(chance.uniform(0.0, 1.5))
        if run.poll() is not None and run.returncode == 0:
            break
        if victim == "tasks":
            device = psutil.Process(federation.processes["device-1"].pid)
            for child in chance.sample(found := device.children(recursive=True), min(1, len(found))):
                child.kill()
            continue
        federation.kill(victim)
        process = federation.start(victim)
        run = process if victim == "run" else run
    assert run.wait(PATIENCE) == 0, federation.log("run")
    assert federation.outcome() == federation.undisturbed()
    assert not list((federation.credentials / "queue").glob("*.reply")), "nothing is left in the queue"


HEAVY = (
    RECIPE.format(rounds=4)
    .replace("[8]", "[2200, 2200]")
    .replace('"scaffold"', '"fedavg"')
    .replace("lr = 0.1", "lr = 0.01\nsteps = 1")
)
SOME, MOST = 1_000_000, 35_000_000
"""A message of this model has 39 MB, and is under way while a file has so many bytes of it."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_that_is_killed_while_it_sends_or_receives_a_model_leaves_no_device_behind(
    begun: Callable[..., OwnFederation],
) -> None:
    """Run, web server, or both as in a power failure. On Flower, each device answered the dead run for ever after."""
    federation = begun(4, recipe=HEAVY)
    run, chance = federation.start("run"), random.Random(1)
    places = {
        "to a device": [place / "polyfed-state" / agent.MESSAGES for place in federation.places],
        "to the server": [federation.credentials / "queue"],
    }

    def under_way(way: str) -> list[Path]:
        found = list[Path]()
        for path in (one for place in places[way] for one in place.glob("*/body" if "device" in way else "*.part")):
            with suppress(FileNotFoundError):
                found += [path] if SOME < path.stat().st_size < MOST else []
        return found

    def killed(way: str, victims: Sequence[str]) -> bool:
        if not (moving := under_way(way)):
            return False
        for victim in victims:
            federation.processes[victim].kill()
        for victim in victims:
            federation.processes[victim].wait()
        if "server" in victims:
            cuts.extend(path for path in moving if path in under_way(way))
        return True

    federation.pause, cuts = 0.001, list[Path]()
    for number, (way, *victims) in enumerate(
        [
            ("to a device", "run"),
            ("to the server", "server"),
            ("to a device", "run", "server"),
            ("to the server", "run"),
            ("to a device", "server"),
        ]
    ):
        federation.until(lambda: killed(way, victims), f"kill {number}, {way}")  # noqa: B023  called at once
        time.sleep(chance.uniform(0.0, 2.0))
        for victim in victims:
            process = federation.start(victim)
            run = process if victim == "run" else run
    assert run.wait(PATIENCE) == 0, federation.log("run")
    assert cuts, "a message was cut in the middle"
    rows = [json.loads(line) for line in (federation.app / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [row["missing"] for row in rows] == [{}] * 4, "nobody is late"
    assert federation.outcome() == federation.undisturbed()
    assert not [*(federation.credentials / "queue").glob("*.reply"), *(federation.credentials / "queue").glob("*.part")]
