"""A job of `polyfed cluster slurm` on a Slurm of two nodes, if its Debian packages are installed. Slow.

A node is a network namespace with a host name of its own: apt-get install slurmctld slurmd slurm-client munge.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from engines.federations import until
from engines.machines import Machines

pytest.importorskip("ray", reason="Ray is not installed")

TOOLS = ("slurmctld", "slurmd", "sbatch", "munged")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="Slurm is not installed"),
]

ADDRESSES = {"pfone": "10.123.0.1", "pftwo": "10.123.0.2"}

CONFIGURATION = """ClusterName=trial
SlurmctldHost=pfone({pfone})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=pfone NodeAddr={pfone} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=pftwo NodeAddr={pftwo} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

RECIPE = """rounds = 3
data = { name = "toy", rows = 6000, shapes = { a = [48], b = [32] } }
clients.num = 8
model = { embedding = 64, encoders.a = { kind = "mlp", hidden = [900] }, encoders.b = { kind = "mlp", hidden = [900] } }
train = { lr = 0.05, batch_size = 16 }
algorithm.name = "fedavg"
engine.name = "sequential"
"""


class Slurm(Machines):
    """Two nodes with two cores each, and the controller on the first one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ADDRESSES, ADDRESSES)
        self.at = folder
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "RAY_TMPDIR": f"/tmp/{self.mark}"}

    def __enter__(self) -> "Slurm":
        super().__enter__()
        (self.at / "slurm.conf").write_text(CONFIGURATION.format(folder=self.at, **ADDRESSES))
        (self.at / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # asked for nothing, so none is needed
        (self.at / "state").mkdir()
        (self.at / "munge").mkdir(mode=0o755)
        (self.at / "key").write_bytes(os.urandom(128))
        (self.at / "key").chmod(0o400)
        files = "--socket=munge/socket --key-file=key --pid-file=munge/pid --seed-file=munge/seed --log-file=munge/log"
        self.named("pfone", f"cd {self.at}; munged --force --foreground {files}")
        until(lambda: (self.at / "munge" / "socket").exists(), "munge", 60)
        self.named("pfone", "slurmctld -D")
        for name in ADDRESSES:
            self.named(name, "slurmd -D")
        until(lambda: self.says("sinfo -h -o %T").split() == ["idle"], "two idle nodes", 120)
        return self

    def __exit__(self, *given: object) -> None:
        super().__exit__(*given)
        shutil.rmtree(f"/tmp/{self.mark}", ignore_errors=True)

    def named(self, name: str, text: str) -> "subprocess.Popen[bytes]":
        """Start a command on a node whose host name is the node's."""
        return self.start(name, f"exec unshare --uts bash -ec 'hostname {name}; {text}'")

    def says(self, text: str) -> str:
        """Return what a command prints on the first node."""
        path = self.at / "said"
        with suppress(FileNotFoundError):
            path.unlink()
        self.named("pfone", f"{text} > {path} 2>&1").wait(60)
        return path.read_text() if path.exists() else ""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with Slurm(tmp_path) as made:
        yield made


def test_a_job_of_two_nodes_has_the_result_of_one_process(slurm: Slurm, tmp_path: Path) -> None:
    recipe, out, job = (tmp_path / name for name in ("recipe.toml", "out", "job.sh"))
    recipe.write_text(RECIPE)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    setup = f'export PATH="{path}" PYTHONPATH="{os.environ.get("PYTHONPATH", "")}"'
    words = f"--nodes 2 --cores 2 --time 0:20:00 --out {out} --setup '{setup}'"
    assert slurm.start("pfone", f"polyfed cluster slurm {recipe} {words} > {job}").wait(120) == 0
    assert "to start at" in slurm.says(f"sbatch --test-only {job}")
    assert slurm.says(f"sbatch --chdir={tmp_path} --output={tmp_path}/printed {job}").startswith("Submitted")
    until(lambda: slurm.says("squeue -h") == "", "the end of the job", 600)
    printed = (tmp_path / "printed").read_text()
    assert "ExitCode=0:0" in slurm.says("scontrol show job 2") + slurm.says("scontrol show job 1"), printed
    assert printed.count("Ray runtime started.") == 2, printed
    assert slurm.start("pfone", f"polyfed run {recipe} --out one --set engine.workers=1").wait(300) == 0
    one = slurm.folders["pfone"] / "one"
    digests = [json.loads((folder / "result.json").read_text())["state_sha256"] for folder in (out, one)]
    assert digests[0] == digests[1]
