"""The commands of docs/deploy.md as they stand, on three machines: network namespaces with a folder each. Slow.

The server is reached by its name, over a bridge. Nothing but the tokens is carried from one machine to another.
"""

import json
import re
import shutil
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.federations import PATIENCE, rows, until
from engines.machines import Machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "deploy.md"
SERVER, DEVICES = "server", ("device 0", "device 1")
ADDRESSES = {SERVER: "10.117.0.1", "device 0": "10.117.0.2", "device 1": "10.117.0.3"}
FIFTEEN_MINUTES = 900.0


class Block(NamedTuple):
    """A block of the page: whose it is, what is done with it, its text."""

    machines: tuple[str, ...]
    what: str
    text: str


def blocks() -> list[Block]:
    """The blocks of the step-by-step section, each of which begins with a line that says where it belongs."""
    section = PAGE.read_text().partition("## Several machines, step by step")[2].partition("\n## ")[0]
    groups = {"every machine": (SERVER, *DEVICES), "every device": DEVICES}
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


def follow(machines: Machines) -> None:
    """Do what the page says, in its order."""
    for block in blocks():
        for machine in block.machines:
            if block.what == "install":
                continue
            if block.what == "keeps running":
                machines.start(machine, block.text)
            elif block.what:
                (machines.folders[machine] / block.what).write_text(block.text)
            else:
                text = block.text
                if "TOKEN" in text:
                    text = text.replace("TOKEN", f"{tokens(machines)[machine]} --yes")
                code = machines.start(machine, text).wait(PATIENCE)
                assert code == 0, f"{machine}: {block.text}{machines.told()[-3000:]}"
        if block.what and "polyfed server" in block.text:
            until(lambda: "waiting for devices on port 9092" in machines.told(), "the server", 120)


def test_a_new_user_follows_the_page_on_three_machines(machines: Machines) -> None:
    started = time.monotonic()
    follow(machines)
    seconds = time.monotonic() - started
    run = machines.folders[SERVER] / "my-app" / "run"
    assert (run / "result.json").exists(), machines.told()[-3000:]
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    assert (result["rounds"], result["clients"]) == (3, 2)
    assert result["metrics"]["global"]["accuracy"] > 0.5
    for client, name in enumerate(DEVICES):
        (ledger,) = (machines.folders[name] / "polyfed-state").glob(f"*/client-{client}/egress.jsonl")
        sent = [row for row in rows(ledger) if row["destination"] == "server"]
        assert {row["kind"] for row in sent} == {"parameters", "statistic"}
    print(f"from the page alone: {seconds:.0f} seconds")
    assert seconds < FIFTEEN_MINUTES


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
