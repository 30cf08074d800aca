"""`polyfed cluster`: the job script runs with stand-ins for Slurm and Ray, and the manifest has a RayJob's fields."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli import main

pytest.importorskip("ray", reason="Ray is not installed")

RECIPE = '[algorithm]\nname = "fedavg"\n'
STUDY = "seeds = [1]\n[methods.fedavg]\n"

STAND_INS = {
    "scontrol": 'printf "one\\ntwo\\nthree\\n"',
    "hostname": "echo 10.0.0.1 192.168.0.1",
    "srun": 'echo "srun $*" >>"$LOG"; while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "ray": 'echo "ray $*" >>"$LOG"; case "$1" in health-check) test "$(grep -c health "$LOG")" -gt 2;; esac',
    "sleep": "true",
    # the other nodes start in the background, and the end of the script ends them
    "polyfed": 'for try in $(seq 50); do grep -q "^ray start --address" "$LOG" && break; /bin/sleep 0.1; done\n'
    'echo "polyfed $* at $RAY_ADDRESS" >>"$LOG"',
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "my recipe.toml").write_text(RECIPE)
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["cluster", *words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def carried_out(script: str, job: Path, **changes: str) -> tuple[int, list[str]]:
    log = job / "log"
    own = {"PATH": f"{job / 'bin'}:{os.environ['PATH']}", "LOG": str(log), "SLURM_JOB_NODELIST": "x"}
    own |= {"SLURM_JOB_ID": "70005", "SLURM_CPUS_PER_TASK": "8"} | changes
    done = subprocess.run(["bash", "-c", script], env=os.environ | own, timeout=60, capture_output=True, text=True)
    return done.returncode, log.read_text().splitlines()


def test_a_job_script_starts_ray_on_all_nodes_and_then_the_run(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(job / "my recipe.toml")
    script = printed(capsys, "slurm", target, "--nodes", "3", "--gpus", "2", "--memory", "64G", "--out", "runs/a b")
    assert json.loads(printed(capsys, "slurm", target, "--nodes", "3", "--json"))["script"] != script
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=my-recipe\n#SBATCH --nodes=3\n")
    head = script.split("\n\n")[0].splitlines()
    assert {"#SBATCH --gpus-per-node=2", "#SBATCH --mem=64G", "#SBATCH --requeue"} <= set(head)
    code, log = carried_out(script, job)
    assert code == 0
    (head_line,) = [line for line in log if line.startswith("ray start --head")]
    assert "--node-ip-address=10.0.0.1 --port=30005 --num-cpus=8 --num-gpus=2" in head_line
    (others,) = [line for line in log if line.startswith("srun") and "--exclude=one" in line]
    assert "--nodes=2 --ntasks-per-node=1" in others
    assert "ray start --address=10.0.0.1:30005 --num-cpus=8 --num-gpus=2 --block" in others
    (run,) = [line for line in log if line.startswith("polyfed")]
    assert run == f"polyfed run {target} --out runs/a b --resume --set engine.cluster=ray at 10.0.0.1:30005"


def test_a_job_script_of_a_study_sweeps_and_one_without_ray_ends(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(capsys, "slurm", str(job / "study.toml"), "--nodes", "1", "--setup", "export READY=1")
    (job / "bin" / "scontrol").write_text("#!/bin/bash\necho one\n")
    (job / "bin" / "polyfed").write_text('#!/bin/bash\necho "polyfed $* at $RAY_ADDRESS" >>"$LOG"\n')
    code, log = carried_out(script, job)
    assert code == 0
    assert not any("--exclude" in line for line in log)
    assert log[-1] == f"polyfed sweep {job / 'study.toml'} --out runs/study --ray  at 10.0.0.1:30005"
    (job / "bin" / "ray").write_text("#!/bin/bash\nexit 1\n")
    (job / "log").unlink()
    code, log = carried_out(script, job)
    assert code == 1
    assert not any(line.startswith("polyfed") for line in log)


def test_a_failed_run_fails_the_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "bin" / "polyfed").write_text("#!/bin/bash\nexit 4\n")
    assert carried_out(printed(capsys, "slurm", str(job / "study.toml")), job)[0] == 4


def field(content: Any, path: str) -> Any:
    for name in path.split("."):
        content = content[int(name) if name.isdigit() else name]
    return content


def test_the_manifest_has_what_a_ray_job_needs(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--image", "registry/polyfed:1", "--claim", "shared", "--nodes", "4", "--gpus", "1"]
    made = json.loads(printed(capsys, "kubernetes", str(job / "my recipe.toml"), *words))
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == ("ray.io/v1", "RayJob", "my-recipe")
    shell = shlex.split(made["spec"]["entrypoint"])
    assert shell[:2] == ["sh", "-c"]
    assert shlex.split(shell[2])[:5] == ["cd", "/data", "&&", "polyfed", "run"]
    cluster = made["spec"]["rayClusterSpec"]
    for place in ("headGroupSpec", "workerGroupSpecs.0"):
        group = field(cluster, place)
        assert group["rayStartParams"] == {}
        (container,) = field(group, "template.spec.containers")
        assert container["image"] == "registry/polyfed:1"
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        volume = field(group, "template.spec.volumes.0")
        assert volume["name"] == container["volumeMounts"][0]["name"]
        assert volume["persistentVolumeClaim"] == {"claimName": "shared"}
    assert field(cluster, "workerGroupSpecs.0.replicas") == 4


@pytest.mark.parametrize("stem", ["2026", "-x-", "Ünï", "a" * 31 + "-b", "x" * 80, "7" * 80])
def test_the_name_of_a_job_is_one_that_kuberay_takes(stem: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / f"{stem}.toml").write_text(RECIPE)
    target = str(tmp_path / f"{stem}.toml")
    made = json.loads(printed(capsys, "kubernetes", target, "--image", "x", "--claim", "shared"))
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", made["metadata"]["name"])


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("seed = 1\n", [], "has no [methods], [algorithm] or [data]"),
        ("not toml", [], "Give the path of a recipe or a study"),
        (None, [], "Give the path of a recipe or a study"),
        (STUDY, ["--time", "8 hours\n#SBATCH --account=x"], "no value of sbatch"),
        (STUDY, ["--memory", "much"], "no value of sbatch"),
    ],
)
def test_what_is_no_recipe_and_no_time_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, options: list[str], words: str
) -> None:
    if content is not None:
        (tmp_path / "given.toml").write_text(content)
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "slurm", str(tmp_path / "given.toml"), *options])
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
