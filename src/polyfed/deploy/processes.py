"""Process groups, signals and ports of this machine, and the ports of a server."""

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"


@dataclass(frozen=True)
class ServerPorts:
    """The address and the ports on which a server listens.

    Attributes:
        host: address of the ports for other machines.
        port: port for devices.
        metrics_port: port on loopback that serves health and metrics. With 0, there is no such port.
        status_port: port that serves health, metrics and status to other machines that have the token. With 0, there is
            no such port.
    """

    host: str = "0.0.0.0"
    port: int = 9092
    metrics_port: int = 0
    status_port: int = 0


def listens(port: int) -> bool:
    """Return whether a process listens on this port of the loopback interface."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def free_ports(count: int) -> list[int]:
    """Find ports of the loopback interface on which no process listens."""
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind((HOST, 0))
    ports = [int(probe.getsockname()[1]) for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def signal_group(group: int, how: signal.Signals) -> None:
    """Send a signal to a process group. Do nothing if the group has ended."""
    try:
        os.killpg(group, how)
    except ProcessLookupError:
        return


def lives(group: int) -> bool:
    """Return whether a process group has a member."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def groups_of(pid: int) -> set[int]:
    """Return the process groups of a process and of its descendants; on a system without /proc, only its own group."""
    children: dict[int, list[tuple[int, int]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, parent, group = stat.read_text().rpartition(")")[2].split()[:3]  # the name may hold spaces
        except OSError:  # the process has ended
            continue
        children.setdefault(int(parent), []).append((int(stat.parent.name), int(group)))
    result, seen = {pid}, [pid]
    for one in seen:
        for child, own in children.get(one, ()):
            seen.append(child)
            result.add(own)
    return result
