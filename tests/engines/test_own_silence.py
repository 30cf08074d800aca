"""Nothing leaves the machine: a federation in a network of its own that has loopback only. Slow; `make check-all`.

In such a network each attempt to send to another address fails for want of a route, and the kernel counts it, look-ups
of names included.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.federations import PATIENCE, recipe_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ALONE = """
ip link set lo up && mount --bind "$0/resolv.conf" /etc/resolv.conf || exit 99
"$@"
code=$?
cat /proc/net/snmp /proc/net/snmp6 > "$0/counters"
exit $code
"""
"""`$0` is a folder; a resolver on loopback would hide look-ups, so another one is put in its place."""

ATTEMPT = """
import socket
for attempt in (lambda: socket.getaddrinfo("example.org", 443), lambda: socket.create_connection(("192.0.2.1", 443))):
    try:
        attempt()
    except OSError:
        pass
"""


def attempts_of(folder: Path, *command: str) -> int:
    """How often a command and all it started tried to reach another machine."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("needs the programs unshare and ip")
    folder.mkdir()
    (folder / "resolv.conf").write_text("nameserver 192.0.2.53\n")
    words = ["unshare", "--net", "--mount", "sh", "-c", ALONE, str(folder), *command]
    done = subprocess.run(words, capture_output=True, check=False, timeout=2 * PATIENCE)
    if not (folder / "counters").exists():
        pytest.skip(f"no network of its own can be made here: {done.stderr.decode()[-200:]}")
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-2000:]
    return counted((folder / "counters").read_text())


def counted(counters: str) -> int:
    """Packets and connections without a route, IPv4 and IPv6."""
    names, values = (line.split() for line in counters.splitlines() if line.startswith("Ip: "))
    sixth = next(line.split()[1] for line in counters.splitlines() if line.startswith("Ip6OutNoRoutes"))
    return int(values[names.index("OutNoRoutes")]) + int(sixth)


def test_an_attempt_would_be_counted(tmp_path: Path) -> None:
    assert attempts_of(tmp_path / "net", sys.executable, "-c", ATTEMPT) >= 2


def test_a_federation_does_not_try_to_reach_any_other_machine(tmp_path: Path) -> None:
    recipe = recipe_for("fedavg", tmp_path, rounds=1)
    place = tmp_path / "fed"
    polyfed = (sys.executable, "-m", "polyfed")
    tried = attempts_of(tmp_path / "net", *polyfed, "app", str(place), "--recipe", str(recipe), "--local")
    assert (place / "app" / "run" / "result.json").exists(), "it ran to its end"
    assert tried == 0
