"""Process groups, signals and ports of this machine, and the ports of a server."""

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"


@dataclass(frozen=True)
class ServerPorts:
    """Where a server listens.

    Attributes:
        host: address of the ports for other machines.
        port: for devices.
        control_port: on loopback, for `flwr` and the processes of an app.
        metrics_port: on loopback, for health and metrics; 0: none.
        status_port: for other machines that have the token: health, metrics and status; 0: none.
    """

    host: str = "0.0.0.0"
    port: int = 9092
    control_port: int = 9093
    metrics_port: int = 0
    status_port: int = 0


def listens(port: int) -> bool:
    """Whether a process listens on this port of loopback."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def free_ports(count: int) -> list[int]:
    """Find ports of loopback on which no process listens."""
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind((HOST, 0))
    ports = [int(probe.getsockname()[1]) for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def signal_group(group: int, how: signal.Signals) -> None:
    """Send a signal to a process group; do nothing if it has ended."""
    try:
        os.killpg(group, how)
    except ProcessLookupError:
        return


def lives(group: int) -> bool:
    """Whether a process group has a member."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def groups_of(pid: int) -> set[int]:
    """The process groups of a process and of all processes that it started; without /proc, its own group only."""
    children: dict[int, list[tuple[int, int]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, parent, group = stat.read_text().rpartition(")")[2].split()[:3]  # the name may hold spaces
        except OSError:  # it has ended
            continue
        children.setdefault(int(parent), []).append((int(stat.parent.name), int(group)))
    found, seen = {pid}, [pid]
    for one in seen:
        for child, own in children.get(one, ()):
            seen.append(child)
            found.add(own)
    return found
