"""Machines for tests: network namespaces on one bridge, each with an address, a folder and processes of its own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from polyfed.deploy.processes import groups_of, lives, signal_group


class Machines:
    """Network namespaces that reach each other, and nothing else. Use them in a `with` block.

    Args:
        folder: where each machine gets a folder, and all of them one log.
        addresses: name -> address. The first machine has the bridge.
        hosts: host name -> address, for all machines.
    """

    def __init__(self, folder: Path, addresses: Mapping[str, str], hosts: Mapping[str, str] | None = None) -> None:
        self.mark = f"pf{os.getpid() % 100_000}"
        self.addresses, self.hosts = dict(addresses), dict(hosts or {})
        self.folders = {name: folder / name.replace(" ", "-") for name in addresses}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.log = folder / "log"
        self.environment = {"OMP_NUM_THREADS": "1"}

    def __enter__(self) -> "Machines":
        try:
            self.up()
        except (OSError, subprocess.CalledProcessError) as error:
            self.down()
            pytest.skip(f"no network namespaces can be made here: {getattr(error, 'stderr', error)}")
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def space(self, name: str) -> str:
        return f"{self.mark}-{name.replace(' ', '')}"

    def up(self) -> None:
        first, *others = self.addresses
        bridge = self.space(first)
        text = "".join(f"{address} {host}\n" for host, address in self.hosts.items())
        for name in self.addresses:
            space = self.space(name)
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            hosts = Path("/etc/netns") / space
            hosts.mkdir(parents=True)
            (hosts / "hosts").write_text(f"127.0.0.1 localhost\n{text}")
            (hosts / "resolv.conf").write_text("")
            self.folders[name].mkdir()
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "addr", "add", f"{self.addresses[first]}/24", "dev", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for place, name in enumerate(others):
            space, port = self.space(name), f"p{place}"
            ip("-n", bridge, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", bridge, "link", "set", port, "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
        for name in self.addresses:  # as on real machines; the gateway answers nothing
            ip(
                "-n",
                self.space(name),
                "route",
                "add",
                "default",
                "via",
                self.addresses[first].rpartition(".")[0] + ".99",
            )

    def down(self) -> None:
        # the number of a process that has ended may belong to another program by now
        running = [process for process in self.processes if process.poll() is None]
        groups = {group for process in running for group in groups_of(process.pid)}
        for how in (signal.SIGTERM, signal.SIGKILL):
            for group in groups:
                signal_group(group, how)
            end = time.monotonic() + 5.0
            while time.monotonic() < end and any(lives(group) for group in groups):
                [process.poll() for process in self.processes]
                time.sleep(0.1)
        for name in reversed(self.addresses):
            self.cut_power(name)
            subprocess.run(["ip", "netns", "del", self.space(name)], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / self.space(name), ignore_errors=True)

    def start(self, machine: str, text: str) -> "subprocess.Popen[bytes]":
        """Start a shell command on a machine, in its folder."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = dict(os.environ) | {"PATH": path} | self.environment
        words = ["ip", "netns", "exec", self.space(machine), "bash", "-ec", text]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                words, cwd=self.folders[machine], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def inside(self, machine: str) -> list[int]:
        """Return the numbers of all processes of a machine."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.space(machine)], capture_output=True, text=True, check=False
        )
        return [int(number) for number in found.stdout.split()]

    def cut_power(self, machine: str) -> None:
        """Kill all processes of a machine with signal 9."""
        while numbers := self.inside(machine):
            for number in numbers:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            [process.poll() for process in self.processes]
            time.sleep(0.02)

    def told(self) -> str:
        return self.log.read_text(errors="replace")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
