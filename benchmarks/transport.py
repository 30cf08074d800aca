"""Measure polyfed's own transport with real processes.

`python benchmarks/transport.py` prints what docs/results/deployments.md quotes. The parts with `echo` tasks show what
the transport alone costs: a task returns the message that it got, in a fork of a process that holds PyTorch, as a real
task does. `federations` runs recipes/federation-demo.toml, whose tasks also read data, train and write ledgers, and
`training` measures the memory of rounds of FedAvg with large models.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Thread

import psutil
import torch

import polyfed
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device import tasks as device_tasks
from polyfed.deploy.local_federation import LocalFederation, run_locally
from polyfed.deploy.processes import free_ports
from polyfed.engines.protocol import Patience
from polyfed.engines.queued import QueueTransport
from polyfed.federation.wire.wire_format import Packet
from polyfed.transport.logins import Keys
from polyfed.transport.queue import Queue

DEMO = Path(__file__).resolve().parents[1] / "recipes" / "federation-demo.toml"
LIMIT = 2**31
"""Largest size in bytes of a message."""

BODY = 36_000
"""Size in bytes of the message of an echo, as a model of 9,000 parameters."""

FLEETS, IDLE = (3, 200, 1000), 60.0
"""Numbers of devices of `fleet`, and for how many seconds they only wait."""

DEVICES = (3, 10, 20)
"""Numbers of devices of `federations`."""

LONG_IDLE, MONTH = 600.0, 30 * 24 * 3600.0
"""For how many seconds `idle` counts the bytes of a device that waits, and the seconds of a month."""

OWN_NETWORK = 'unshare --map-root-user --net sh -c "ip link set lo up && python benchmarks/transport.py idle"'
"""The command of `idle`: in a network of its own, no other process adds to the bytes."""

AGENT = """
import os, sys
from polyfed.deploy.device import agent
os.environ["POLYFED_ECHO"] = "1"
agent.TASKS = "transport"
sys.exit(agent.main(int(sys.argv[1])))
"""
"""The program of a device whose tasks are those of this file."""


class Servers:
    """A server and the processes of devices, whose tasks echo.

    Args:
        folder: a folder for everything.
        groups: number of devices in each process.
    """

    def __init__(self, folder: Path, groups: Sequence[int]) -> None:
        self.folder, self.count = folder, sum(groups)
        self.credentials = write_credentials(folder / "credentials", self.count)
        (self.port,) = free_ports(1)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start(["-m", "polyfed", "server", str(self.credentials), "--port", str(self.port), "--host", "127.0.0.1"])
        first = 0
        for size in groups:
            self._device(range(first, first + size))
            first += size
        app = device_tasks.packed("rounds = 1", "")
        self.transport = QueueTransport(queue=Queue(self.credentials / "queue"), app=app, limit=LIMIT)
        while len(self.transport.online()) < self.count:
            time.sleep(0.1)
        nodes = sorted(map(str, self.transport.online()))
        self.transport.node_of = dict(enumerate(nodes))

    def _start(self, words: Sequence[str], **more: object) -> None:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        log = (self.folder / "log").open("ab")
        self.processes.append(
            subprocess.Popen([sys.executable, *words], env=environment, stdout=log, stderr=log, **more)  # type: ignore[call-overload]
        )

    def _device(self, numbers: Sequence[int]) -> None:
        told = {
            "server": f"127.0.0.1:{self.port}",
            "ca": str(self.credentials / "ca.pem"),
            "limit": LIMIT,
            "parallel": os.cpu_count(),
            "idle_seconds": 60.0,
            "metrics_port": 0,
            "devices": [
                {
                    "key": str(self.credentials / f"node-{number}.key"),
                    "config": {"client": number, "state": str(self.folder / "state" / str(number))},
                }
                for number in numbers
            ],
        }
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(told).encode())
            file.seek(0)
            self._start(["-c", AGENT, str(file.fileno())], pass_fds=[file.fileno()])

    def asked(self, clients: int) -> float:
        """Return the seconds that one request to so many clients takes."""
        begun = time.perf_counter()
        packets = {client: Packet({"number": client}, self.body) for client in range(clients)}
        answers = self.transport.exchange(packets, Patience(120.0, clients))
        took = time.perf_counter() - begun
        same = [isinstance(one, Packet) and memoryview(one.body) == self.body for one in answers.values()]  # type: ignore[arg-type]
        assert all(same), "an echo is what was sent"
        return took

    body = bytes(BODY)

    def memory(self) -> list[float]:
        """Return the resident memory of each process with its children, in MB, the server first."""
        found = []
        for process in self.processes:
            own = psutil.Process(process.pid)
            found.append(sum(one.memory_info().rss for one in [own, *own.children(recursive=True)]) / 1e6)
        return found

    def seconds(self) -> float:
        """Return the processor time of the server so far."""
        used = psutil.Process(self.processes[0].pid).cpu_times()
        return float(used.user + used.system)

    def stop(self) -> None:
        """End all processes."""
        self.transport.end()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()


def echoes(folder: Path) -> None:
    """Measure the transport with echoes."""
    servers = Servers(folder / "three", [1, 1, 1])
    idle = servers.memory()
    say("idle: MB of each device, and of the server", [*idle[1:], idle[0]])
    servers.asked(3)
    say("one request to one device, ms", [1000 * servers.asked(1) for _ in range(30)])
    say("one request to three devices, ms", [1000 * servers.asked(3) for _ in range(30)])
    say("six requests to three devices, ms", [1000 * sum(servers.asked(3) for _ in range(6)) for _ in range(5)])
    servers.stop()
    for count in (50, 200):
        servers = Servers(folder / str(count), [count])
        say(f"{count} devices of one process, idle: MB of the process, and of the server", servers.memory()[::-1])
        servers.asked(count)
        before = servers.seconds()
        say(f"one request to {count} devices of one process, s", [servers.asked(count) for _ in range(5)])
        say("processor time of the server, ms a device and request", [1000 * (servers.seconds() - before) / 5 / count])
        servers.stop()


def fleet(folder: Path) -> None:
    """Measure what each further device costs the server: its processor time, memory and files."""
    for count in FLEETS:
        servers = Servers(folder / f"fleet-{count}", [count])
        process = psutil.Process(servers.processes[0].pid)
        say(f"{count} devices: processor time of the server until all have logged in, s", [servers.seconds()])
        say("memory of the server, MB", [servers.memory()[0]])
        say("open files of the server", [process.num_fds()])
        before, begun = servers.seconds(), time.monotonic()
        time.sleep(IDLE)
        idle = (servers.seconds() - before) / (time.monotonic() - begun) / count
        say("processor time of the server while nobody asks, ms a device and minute", [60_000 * idle])
        servers.asked(count)
        before = servers.seconds()
        say(f"one request to {count} devices, s", [servers.asked(count) for _ in range(3)])
        say("processor time of the server, ms a device and request", [1000 * (servers.seconds() - before) / 3 / count])
        say("memory of the server afterwards, MB", [servers.memory()[0]])
        keys = Keys(servers.credentials)
        say("reading all keys, s", [_seconds(keys.look)])
        say("looking for new keys, s", [_seconds(keys.look) for _ in range(5)])
        servers.stop()


def _seconds(work: Callable[[], object]) -> float:
    """Return the processor time of this process that a call takes."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def large(folder: Path) -> None:
    """Measure echoes of large messages: seconds, and the memory that belongs to no file, beyond that of small ones."""
    for megabytes in (300, 1000):
        servers = Servers(folder / f"large-{megabytes}", [1])
        servers.asked(1)
        servers.body = bytes(megabytes * 10**6)
        before, most, done = _anonymous(servers), dict[str, float](), Event()
        thread = Thread(target=_watch, args=(servers, most, done))
        thread.start()
        say(f"an echo of {megabytes} MB, s", [servers.asked(1) for _ in range(3)])
        done.set()
        thread.join()
        for name, size in most.items():
            print(f"  {name}: at most {size - before.get(name, 0.0):.0f} MB more", flush=True)
        servers.stop()


def _watch(servers: Servers, most: dict[str, float], done: Event) -> None:
    while not done.wait(0.02):
        for name, size in _anonymous(servers).items():
            most[name] = max(most.get(name, 0.0), size)


def _anonymous(servers: Servers) -> dict[str, float]:
    """Return the memory of the run, the web server, the device and its tasks that belongs to no file, in MB."""
    server, device = (psutil.Process(process.pid) for process in servers.processes)
    names = {"the run, without the message": [psutil.Process()], "the web server": [server], "the device": [device]}
    names["its tasks"] = device.children(recursive=True)
    return {name: sum(map(_anonymous_of, processes)) for name, processes in names.items()}


def _anonymous_of(process: psutil.Process) -> float:
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0.0
    return next((float(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon")), 0.0)


HIDDEN = {"0.04 MB": [32], "346 MB": [6500, 6500], "1.03 GB": [6500, 6500, 6500, 6500]}
"""The widths of the two encoders of the models of `training`, by the size of the model."""

LARGE_RECIPE = """
seed = 1
rounds = 3
[data]
name = "cg-digits"
[clients]
num = 2
[model]
embedding = 16
[model.encoders]
gray = {{ kind = "mlp", hidden = {hidden} }}
color = {{ kind = "mlp", hidden = {hidden} }}
[train]
steps = 3
batch_size = 32
lr = 0.01
[algorithm]
name = "fedavg"
[evaluate]
every = 0
[deployment]
reply_seconds = 1200
message_megabytes = 2000
"""


def training(folder: Path, optimiser: str = "none") -> None:
    """Measure rounds of FedAvg with SGD: seconds, and the memory of each process that belongs to no file."""
    small = dict[str, float]()
    for name, hidden in HIDDEN.items():
        recipe = LARGE_RECIPE.format(hidden=hidden) + f'[server]\noptimiser = "{optimiser}"\n'
        megabytes, seconds, most = trained(recipe, folder / name.replace(" ", "-"))
        say(f"a round of FedAvg with {megabytes:.3g} MB, s", seconds)
        for what, size in most.items():
            beyond = size - small.setdefault(what, size)
            print(
                f"  {what}: at most {size:.0f} MB, {beyond / megabytes:.2f} models more than the smallest", flush=True
            )


def trained(recipe: str, folder: Path) -> tuple[float, list[float], dict[str, float]]:
    """Run a recipe with a process for each device.

    Returns:
        The size of the model in MB, the seconds of the rounds without the first, and by process the most memory that
        belongs to no file, in MB.
    """
    folder.mkdir()
    (folder / "recipe.toml").write_text(recipe)
    with LocalFederation(folder / "recipe.toml", folder) as federation:
        federation.start_server()
        for number in range(len(federation.nodes)):
            federation.start_device(number, message_megabytes=2000)  # type: ignore[arg-type]
        while not all("ready" in federation.log(f"device-{number}") for number in range(len(federation.nodes))):
            time.sleep(0.1)
        words = ["submit", str(federation.app), "--credentials", str(federation.credentials)]
        run, most = federation.begin("run", words), dict[str, float]()
        while run.poll() is None:
            for who, process in federation.processes.items():
                for what, size in _each(who.partition("-")[0], process.pid).items():
                    most[what] = max(most.get(what, 0.0), size)
            time.sleep(0.02)
        assert run.returncode == 0, federation.log("run")
        blocks = json.loads((federation.out / "run.json").read_text())["blocks"]
        return sum(blocks.values()) / 1e6, rounds_of(federation.out), most


def _each(who: str, number: int) -> dict[str, float]:
    """Return the memory of a process that belongs to no file, and that of the largest of its children."""
    try:
        process = psutil.Process(number)
        children = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    own = {who: _anonymous_of(process)}
    return own | ({f"a task of a {who}": max(map(_anonymous_of, children))} if children else {})


def federations(folder: Path) -> None:
    """Measure rounds of a whole run, with a process for each device."""
    for count in DEVICES:
        recipe = folder / f"demonstration-{count}.toml"
        text = DEMO.read_text().replace("rounds = 3", "rounds = 6").replace("num = 3", f"num = {count}")
        recipe.write_text(text)
        rounds = rounds_of(run_locally(recipe, folder / recipe.stem))
        say(f"a round of the demonstration with {count} devices, s", rounds)


HFM = """
seed = 1
rounds = 9
[data]
name = "cg-digits"
[clients]
partition = "silos"
silos = 2
[model]
fusion = "concat"
embedding = 16
[model.encoders]
gray = { kind = "mlp", hidden = [32] }
color = { kind = "mlp", hidden = [32] }
[train]
lr = 0.01
[algorithm]
name = "hfm"
exchanges = 2
[evaluate]
every = 0
[deployment]
relay = "server-sees"
[egress.gray]
silo = ["parameters", "embeddings"]
[egress.color]
silo = ["parameters", "embeddings"]
[egress.shared]
server = ["parameters", "statistic"]
silo = ["parameters", "statistic", "ids"]
"""
"""HFM in two silos of two devices. A round has six requests: `adopt`, twice `embed` and `practise`, and `upload`."""


def silos(folder: Path) -> None:
    """Measure rounds of HFM with a process for each device: over the server, over edges, and in one process."""
    for name, text in {"the server": HFM, "an edge for each silo": HFM.replace("server-sees", "edge")}.items():
        recipe = folder / f"{name.replace(' ', '-')}.toml"
        recipe.write_text(text)
        out = run_locally(recipe, folder / recipe.stem)
        say(f"a round of HFM over {name}, s", rounds_of(out))
    polyfed.run(recipe, folder / "one", engine="sequential")
    say("a round of HFM in one process, s", rounds_of(folder / "one"))


def idle(folder: Path) -> None:
    """Measure the bytes that an idle device moves, with the headers of TCP/IP."""
    if _moved():
        print(f"idle: needs a network of its own: {OWN_NETWORK}", flush=True)
        return
    servers = Servers(folder / "idle", [1])
    before = _moved()
    time.sleep(LONG_IDLE)
    moved = _moved() - before
    servers.stop()
    print(f"an idle device: {moved} bytes in {LONG_IDLE:.0f} s, {moved / LONG_IDLE * MONTH / 1e6:.3g} MB a month")


def _moved() -> int:
    """Return the bytes that have passed the loopback of this network."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[0] == "lo:")


def rounds_of(out: Path) -> list[float]:
    """Return the seconds of the rounds of a run, without the first."""
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [sum(row["seconds"].values()) for row in rows[1:]]


def say(what: str, values: Sequence[float]) -> None:
    """Print a median and the range."""
    middle, least, most = (
        f"{float(f'{value:.3g}'):,.10g}" for value in (statistics.median(values), min(values), max(values))
    )
    print(f"{what}: {middle} ({least} to {most})   load {os.getloadavg()[0]:.1f}", flush=True)


def tasks() -> None:
    """The process of tasks, with an echo in place of a device's work."""

    def echo(recipe: Path) -> Callable[[Packet, object], Packet]:
        return lambda packet, config: Packet(packet.header | {"verdict": "reply"}, packet.body)

    device_tasks.Deployed = echo  # type: ignore[assignment, misc]
    device_tasks.main()


def main() -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="none", help="the server's optimiser in `training`, such as avgm")
    parts = {part.__name__: part for part in (echoes, fleet, large, training, federations, silos, idle)}
    parser.add_argument("part", nargs="?", choices=[*parts])
    part, optimiser = parser.parse_args().part, parser.parse_args().server
    parts["training"] = partial(training, optimiser=optimiser)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for measure in parts.values() if part is None else [parts[part]]:
            measure(Path(folder))


if __name__ == "__main__":
    tasks() if os.environ.get("POLYFED_ECHO") else main()
