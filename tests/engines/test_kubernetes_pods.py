"""The containers and probes of deploy/kubernetes with real processes: paths and ports are those of the test."""

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")
pytest.importorskip("prometheus_client", reason="the extra polyfed[server] is not installed")

import polyfed
from house.test_kubernetes import main_container, pod
from polyfed.deploy.processes import free_ports

POLICY = '[egress.a]\nserver = ["parameters", "statistic"]\n[egress.labels]\nserver = []\n'
PATIENCE = 180.0


class Cluster:
    """A folder in place of the volumes, in which the containers of the manifests run as processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        server, edge, self.status, *health = free_ports(6)
        self.ports = {"server": server, "edge": edge}
        self.health = dict(zip(("server", "edge", "device"), health, strict=True))
        for name in ("bin", "server", "edge", "device", "data", "policy", "token", "tmp"):
            (folder / name).mkdir()
        for name, words in (("polyfed", [sys.executable, "-m", "polyfed"]), ("python", [sys.executable])):
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        source = str(Path(polyfed.__file__).parents[1])
        self.environment = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": source,
            "HOME": str(folder / "tmp"),
            "OMP_NUM_THREADS": "1",
        }

    def words(self, role: str, words: Sequence[str]) -> list[str]:
        """A command of a container of a role, with the paths and ports of this test."""
        places = {
            "/var/lib/polyfed": self.folder / role,
            "/etc/polyfed-join": self.folder / "token",
            "/etc/polyfed/": f"{self.folder / 'policy'}/",
            "/data/": f"{self.folder / 'data'}/",
            "server.example.org": "127.0.0.1",
            "edge.example.org": "127.0.0.1",
            "9095": self.health[role],
            "9096": self.status,
        }
        found = list(words)
        for inside, outside in places.items():
            found = [word.replace(inside, str(outside)) for word in found]
        return found

    def run(self, role: str, words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Carry out a command in a container."""
        return subprocess.run(
            self.words(role, words), env=self.environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    def prepared(self, role: str) -> "subprocess.CompletedProcess[str]":
        """Carry out the container that prepares the volume. The server's listens on a port of the test."""
        (container,) = pod(role)["initContainers"]
        more = [f"--port={self.ports[role]}"] if role in self.ports else []
        return self.run(role, [*container["command"], *container["args"], *more])

    @contextmanager
    def started(self, role: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Run the container of a role; at the end it is asked to end, as by a cluster, and does so in time."""
        more = [f"--port={self.ports[role]}"] if role == "server" else []  # that of an edge is in its file
        words = self.words(role, ["polyfed", *main_container(role)["args"], *more])
        with (self.folder / f"{role}.log").open("ab") as log:
            process = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(pod(role)["terminationGracePeriodSeconds"])
            assert code in (0, -signal.SIGTERM), self.log(role)

    def log(self, role: str) -> str:
        return (self.folder / f"{role}.log").read_text()

    def passes(self, role: str, name: str) -> bool:
        """Carry out a probe as a kubelet does: exit code 0, or a status from 200 to 399; no certificate is checked."""
        probe = main_container(role)[f"{name}Probe"]
        if "exec" in probe:
            return self.run(role, probe["exec"]["command"]).returncode == 0
        return answers(probe["httpGet"], self.ports[role])

    def reaches(self, role: str, name: str, *, state: bool = True) -> None:
        """Wait until a probe passes, or until it fails."""
        end = time.monotonic() + PATIENCE
        while self.passes(role, name) is not state:
            assert time.monotonic() < end, self.log(role)
            time.sleep(0.2)


def answers(call: Mapping[str, Any], port: int) -> bool:
    assert (call["scheme"], call["port"]) == ("HTTPS", "devices")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(
        f"https://127.0.0.1:{port}{call['path']}", headers={"User-Agent": "kube-probe/1.37"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return 200 <= answer.status < 400
    except (urllib.error.URLError, OSError):
        return False


def mounted(folder: Path, name: str, text: str) -> None:
    """Write a file as a cluster mounts that of a ConfigMap: a link to a link, whose target changes at once."""
    new = folder / f"..{time.monotonic_ns()}"
    new.mkdir()
    (new / name).write_text(text)
    draft = folder / "..data.draft"
    draft.symlink_to(new.name)
    draft.rename(folder / "..data")
    if not (folder / name).is_symlink():
        (folder / name).symlink_to(Path("..data") / name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_edge_joins_without_a_token_in_its_log_and_tells_alive_from_ready(tmp_path: Path) -> None:
    cluster, credentials = Cluster(tmp_path), tmp_path / "server" / "app-credentials"
    assert cluster.prepared("server").returncode == 0
    assert cluster.prepared("edge").returncode != 0, "there is no token yet, and the cluster tries again"
    with cluster.started("server"):
        cluster.reaches("server", "startup")
        token = cluster.run("server", ["polyfed", "server", "token", str(credentials), "--json"])
        mounted(tmp_path / "token", "token", json.loads(token.stdout)["token"])
        done = cluster.prepared("edge")
        assert done.returncode == 0, done.stderr
        assert "polyfed-join-" not in done.stdout + done.stderr, "the log of a pod shows no token"
        tokens = tmp_path / "edge" / "tokens.json"
        assert len(json.loads(tokens.read_text())["tokens"]) == 2
        assert tokens.stat().st_mode & 0o077 == 0
        (tmp_path / "token" / "token").unlink()
        assert cluster.prepared("edge").returncode == 0, "a restart needs no token"
    assert not cluster.passes("edge", "liveness")
    with cluster.started("edge"):
        cluster.reaches("edge", "startup")
        assert cluster.passes("edge", "liveness"), "a server that is away is no reason to end an edge"
        assert not cluster.passes("edge", "readiness")
        with cluster.started("server"):
            cluster.reaches("edge", "readiness")
    assert (tmp_path / "edge" / "edge" / "edge.key").stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_and_a_device_start_join_and_tell_alive_from_ready(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    mounted(tmp_path / "policy", "policy.toml", POLICY)
    np.savez(tmp_path / "data" / "mine.npz", a=np.random.default_rng(1).normal(size=(12, 3)), label=np.arange(12) % 2)

    credentials = tmp_path / "server" / "app-credentials"
    cut = credentials.with_name(f"{credentials.name}.new")
    cut.mkdir()
    (cut / "ca.key").write_text("a start that was cut off")
    for _ in range(2):  # the second start changes nothing
        done = cluster.prepared("server")
        assert done.returncode == 0, done.stderr
        assert "polyfed-join-" not in done.stdout + done.stderr, "the log of a pod shows no token"
        authority = (credentials / "ca.pem").read_bytes()
    assert not cut.exists()
    assert (credentials / "server.key").stat().st_mode & 0o077 == 0

    assert cluster.prepared("device").returncode != 0, "there is no token yet, and the cluster tries again"
    assert not any(cluster.passes("server", name) for name in ("startup", "liveness", "readiness"))
    with cluster.started("server"):
        cluster.reaches("server", "startup")
        cluster.reaches("server", "readiness")
        token = cluster.run("server", ["polyfed", "server", "token", str(credentials), "--json"])
        mounted(tmp_path / "token", "token", json.loads(token.stdout)["token"])
        done = cluster.prepared("device")
        assert done.returncode == 0, done.stderr
        (tmp_path / "token" / "token").unlink()
        assert cluster.prepared("device").returncode == 0, "a restart needs no token"
        (credentials / "server.pem").rename(credentials / "server.pem.away")
        assert not cluster.passes("server", "readiness"), "it cannot read its files"
        assert cluster.passes("server", "liveness"), "but a restart would not help"
        (credentials / "server.pem.away").rename(credentials / "server.pem")
        cluster.reaches("server", "readiness")
    assert not cluster.passes("server", "liveness")
    assert (credentials / "ca.pem").read_bytes() == authority

    assert not cluster.passes("device", "liveness")
    with cluster.started("device") as device:
        cluster.reaches("device", "startup")
        assert cluster.passes("device", "liveness"), "a server that is away is no reason to end a device"
        assert not cluster.passes("device", "readiness")
        with cluster.started("server") as server:
            cluster.reaches("device", "readiness")
            server.send_signal(signal.SIGSTOP)
            try:
                assert not cluster.passes("server", "liveness"), "a process that hangs is ended"
            finally:
                server.send_signal(signal.SIGCONT)
            cluster.reaches("server", "liveness")
        assert device.poll() is None
    assert (tmp_path / "device" / "config" / "node.key").stat().st_mode & 0o077 == 0
    assert not [*(tmp_path / "data").glob("polyfed*")], "the data are mounted read-only"
