"""The commands of docs/deploy.md as they stand, on three machines: network namespaces with a folder each. Slow.

The server is reached by its name, over a bridge. Nothing but the tokens is carried from one machine to another, and
the wheel to each of them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.federations import PATIENCE, rows, until
from engines.machines import Machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "deploy.md"
SERVER, DEVICES = "server", ("device 0", "device 1")
ADDRESSES = {SERVER: "10.117.0.1", "device 0": "10.117.0.2", "device 1": "10.117.0.3"}
FIVE_MINUTES = 300.0
"""What all commands but the installs take at most. Installing depends on network, disk and other work."""

CPU_TORCH = "torch --index-url https://download.pytorch.org/whl/cpu"
"""No machine of the tests reaches this index. Here, the version that runs the tests comes from pip's own index."""


class Block(NamedTuple):
    """A block of the page: whose it is, what is done with it, its text."""

    machines: tuple[str, ...]
    what: str
    text: str


def blocks() -> list[Block]:
    """The blocks of the step-by-step section, each of which begins with a line that says where it belongs."""
    section = PAGE.read_text().partition("## Several machines, step by step")[2].partition("\n## ")[0]
    groups = {"every machine": (SERVER, *DEVICES), "every device": DEVICES, "a clone": ()}
    found = []
    for text in re.findall(r"^```\w*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        head, _, rest = text.partition("\n")
        where, _, what = head.removeprefix("# ").partition(": ")
        found.append(Block(groups.get(where, (where,)), what, rest))
    return found


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(tmp_path, ADDRESSES, {"server.example.org": ADDRESSES[SERVER]}) as made:
        yield made


def tokens(machines: Machines) -> dict[str, str]:
    """The tokens that the operator sends to the owners of the devices."""
    return dict(zip(DEVICES, re.findall(r"polyfed device join (polyfed-join-\S+)", machines.told()), strict=True))


def install(machines: Machines, machine: str, text: str) -> None:
    """Install as the page says, outside of the namespaces, which do not reach the package index."""
    folder = machines.folders[machine]
    (wheel,) = (folder.parent / "dist").glob("*.whl")
    shutil.copy(wheel, folder)
    torch = f"torch=={version('torch').partition('+')[0]}"
    text = text.replace(CPU_TORCH, torch).replace("polyfed[device]", f"polyfed[{machine.split()[0]}]")
    path = os.pathsep.join([str(Path(sys.base_prefix) / "bin"), os.environ.get("PATH", "")])
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        ["bash", "-ec", text], cwd=folder, env=kept | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def commands(machines: Machines, block: Block, machine: str) -> str:
    """The text of a block as its owner types it, in the environment of this machine if it has one of its own."""
    text = block.text
    if "TOKEN" in text:
        text = text.replace("TOKEN", f"{tokens(machines)[machine]} --yes")
    own = (machines.folders[machine] / "polyfed-env").exists()
    return f". polyfed-env/bin/activate\n{text}" if own else text


def follow(machines: Machines, *, installs: bool) -> list[dict[str, float]]:
    """Do what the page says, in its order. Return, for each block, the seconds that it took on each machine."""
    took = list[dict[str, float]]()
    for block in blocks():
        took.append({})
        for machine in block.machines:
            start = time.monotonic()
            if block.what.startswith("install"):
                if not installs:
                    continue
                install(machines, machine, block.text)
            elif block.what == "keeps running":
                machines.start(machine, commands(machines, block, machine))
            elif block.what:
                (machines.folders[machine] / block.what).write_text(block.text)
            else:
                code = machines.start(machine, commands(machines, block, machine)).wait(PATIENCE)
                assert code == 0, f"{machine}: {block.text}{machines.told()[-3000:]}"
            if block.what and "polyfed server" in block.text:
                until(lambda: "waiting for devices on port 9092" in machines.told(), "the server", 120)
            took[-1][f"{machine}: {block.what or block.text.splitlines()[0]}"] = time.monotonic() - start
    return took


def check(machines: Machines) -> None:
    """The run has ended, and each device has sent what its owner saw."""
    run = machines.folders[SERVER] / "my-app" / "run"
    assert (run / "result.json").exists(), machines.told()[-3000:]
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    assert (result["rounds"], result["clients"]) == (3, 2)
    assert result["metrics"]["global"]["accuracy"] > 0.5
    for client, name in enumerate(DEVICES):
        (ledger,) = (machines.folders[name] / "polyfed-state").glob(f"*/client-{client}/egress.jsonl")
        sent = [row for row in rows(ledger) if row["destination"] == "server"]
        assert {row["kind"] for row in sent} == {"parameters", "statistic"}


def test_a_new_user_follows_the_page_on_three_machines(machines: Machines) -> None:
    follow(machines, installs=False)
    check(machines)


def test_a_new_operator_has_a_run_from_the_wheel_and_the_page_alone(machines: Machines, tmp_path: Path) -> None:
    """From the wheel, in empty environments. Counted are the commands of the page, and no typing.

    Real machines install at the same time. Here they take turns, and the slowest counts.
    """
    machines.environment["PYTHONPATH"] = ""
    (build,) = [block.text for block in blocks() if block.what == "wheel"]
    started = time.monotonic()
    build = build.replace("pip ", f"{sys.executable} -m pip --quiet ").replace(" dist ", f" {tmp_path / 'dist'} ")
    subprocess.run(["bash", "-ec", build], cwd=ROOT, check=True)
    took = [{"a clone: wheel": time.monotonic() - started}, *follow(machines, installs=True)]
    seconds = sum(max(block.values()) for block in took if block)
    check(machines)
    for machine, folder in machines.folders.items():
        where = "import polyfed, torch; print('FROM', polyfed.__file__, torch.__file__)"
        assert machines.start(machine, f'. polyfed-env/bin/activate; python -c "{where}"').wait(120) == 0
        (line,) = [one for one in machines.told().splitlines() if one.startswith(f"FROM {folder}")]
        assert line.count(f"{folder}/polyfed-env/") == 2, "nothing of the clone was used"
    lines = [f"{one:6.1f} s {what}" for block in took for what, one in block.items()]
    print(*lines, f"{seconds:6.1f} s from nothing to the end of three rounds", sep="\n")
    (installs,) = [block for block in took if any("install" in what for what in block)]
    assert seconds - max(installs.values()) < FIVE_MINUTES


def test_from_another_machine_only_the_public_port_answers(machines: Machines) -> None:
    """Ports that docs/operations.md says are on loopback are closed to the network."""
    setup = """
        import sys
        from pathlib import Path
        from polyfed.deploy.credentials import write_credentials
        write_credentials("c", 1, ["server.example.org"])
    """
    assert machines.start(SERVER, f"python -c '{textwrap.dedent(setup)}'").wait(120) == 0
    machines.start(SERVER, "polyfed server c --metrics-port 9095 --status-port 9096")
    until(lambda: "waiting for devices on port 9092" in machines.told(), "all ports", 120)
    probe = """
        import socket
        for port in (9092, 9095, 9096):
            with socket.socket() as line:
                line.settimeout(5)
                print("PORT", port, line.connect_ex(("server.example.org", port)) == 0)
    """
    assert machines.start("device 0", f"python -c '{textwrap.dedent(probe)}'").wait(120) == 0
    found = dict(re.findall(r"^PORT (\d+) (\w+)$", machines.told(), re.MULTILINE))
    assert found == {"9092": "True", "9095": "False", "9096": "True"}
    shutil.copy(machines.folders[SERVER] / "c" / "ca.pem", machines.folders["device 0"])
    shutil.copy(machines.folders[SERVER] / "c" / "status.token", machines.folders["device 0"])
    ask = "polyfed status server.example.org:9096 --root-certificates ca.pem --token status.token"
    assert machines.start("device 0", ask).wait(120) == 0
    assert "0 of 1 devices online" in machines.told()
