"""`polyfed cluster`: the job script or the manifest that starts a Ray cluster and runs a recipe or a study on it."""

import json
import re
import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from polyfed.cli.application import HELP_OPTIONS, AsJson
from polyfed.cli.application import app as polyfed_app
from polyfed.cli.output import print_json
from polyfed.core.errors import RecipeError
from polyfed.core.system.json_and_toml import parse_toml

app = typer.Typer(
    name="cluster",
    help="Run a recipe or a study on a Ray cluster that Slurm or Kubernetes starts.",
    no_args_is_help=True,
    context_settings=HELP_OPTIONS,
)
polyfed_app.add_typer(app)

SLURM = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cores}
#SBATCH --time={time}
{gpus}{memory}#SBATCH --requeue
# Starts Ray on the nodes of this job and runs polyfed on them. All nodes share this folder and the Python environment.
# Nothing is downloaded. A job that was stopped or requeued continues where it was: submit this script again.
set -euo pipefail
{setup}export RAY_USAGE_STATS_ENABLED=0
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${{nodes[0]}}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{{print $1}}')
export RAY_ADDRESS="$address:$((20000 + SLURM_JOB_ID % 20000))"  # two jobs on one node need two ports
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \\
    ray start --head --node-ip-address="$address" --port="${{RAY_ADDRESS##*:}}" \\
    --num-cpus="$SLURM_CPUS_PER_TASK"{ray_gpus} --include-dashboard=false --block &
for try in $(seq 60); do
    ray health-check --address="$RAY_ADDRESS" 2>/dev/null && break
    [ "$try" -lt 60 ] || {{ echo "Ray did not start on $head within two minutes" >&2; exit 1; }}
    sleep 2
done
if [ "${{#nodes[@]}}" -gt 1 ]; then
    srun --overlap --nodes=$((${{#nodes[@]}} - 1)) --ntasks-per-node=1 --exclude="$head" \\
        ray start --address="$RAY_ADDRESS" --num-cpus="$SLURM_CPUS_PER_TASK"{ray_gpus} --block &
fi
{command}
"""

Target = Annotated[
    Path, typer.Argument(metavar="FILE.toml", help="A recipe or a study, on a disk that all nodes share.")
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the run or study. [default: runs/NAME]")]
Nodes = Annotated[int, typer.Option(min=1, metavar="N", help="The number of nodes.")]
Cores = Annotated[int, typer.Option(min=1, metavar="N", help="The cores of each node.")]
Gpus = Annotated[int, typer.Option(min=0, metavar="N", help="The GPUs of each node.")]


@app.command("slurm")
def slurm(
    target: Target,
    nodes: Nodes = 2,
    cores: Cores = 8,
    gpus: Gpus = 0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each node, as in 64G.")] = "",
    time: Annotated[str, typer.Option(metavar="H:MM:SS", help="The longest time of the job.")] = "8:00:00",
    setup: Annotated[str, typer.Option(metavar="COMMAND", help="What makes polyfed available on a node.")] = "",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Print a job script for sbatch. It needs no internet."""
    for option, value, form in (("--time", time, r"[0-9:-]+"), ("--memory", memory, r"([0-9]+[KMGT]?)?")):
        if not re.fullmatch(form, value):
            raise RecipeError(f"{option} {value!r} is no value of sbatch. Write it as in --time 8:00:00 --memory 64G")
    name, words = _command(target, out)
    script = SLURM.format(
        name=name,
        nodes=nodes,
        cores=cores,
        time=time,
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        ray_gpus=f" --num-gpus={gpus}" if gpus else "",
        memory=f"#SBATCH --mem={memory}\n" if memory else "",
        setup=f"{setup}\n" if setup else "",
        command=shlex.join(words),
    )
    if as_json:
        print_json({"script": script})
    else:
        typer.echo(script, nl=False)


@app.command("kubernetes")
def kubernetes(
    target: Target,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="A container image with polyfed and ray[default].")],
    claim: Annotated[str, typer.Option(metavar="NAME", help="A PersistentVolumeClaim that all pods can write.")],
    nodes: Nodes = 2,
    cores: Cores = 8,
    gpus: Gpus = 0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each pod, as in 64Gi.")] = "16Gi",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Print a RayJob for the KubeRay operator, always as JSON: kubectl apply -f FILE. Paths are those on the claim."""
    try:
        release = version("ray")
    except PackageNotFoundError:
        raise RecipeError("the manifest names the release of Ray: pip install 'polyfed[cluster]'") from None
    name, words = _command(target, out)

    def pod(container: str) -> dict[str, Any]:
        amounts = {"cpu": str(cores), "memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
        main = {
            "name": container,
            "image": image,
            "workingDir": "/data",
            "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
            "resources": {"limits": amounts, "requests": amounts},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        }
        volume = {"name": "data", "persistentVolumeClaim": {"claimName": claim}}
        return {"spec": {"containers": [main], "volumes": [volume]}}

    workers = {"groupName": "workers", "replicas": nodes, "minReplicas": 0, "maxReplicas": nodes}
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": f"sh -c {shlex.quote('cd /data && ' + shlex.join(words))}",
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 3,  # a repeated job continues from the checkpoints
            "rayClusterSpec": {
                "rayVersion": release,
                "headGroupSpec": {"rayStartParams": {}, "template": pod("head")},
                "workerGroupSpecs": [{**workers, "rayStartParams": {}, "template": pod("worker")}],
            },
        },
    }
    typer.echo(json.dumps(manifest, indent=2))


def _command(target: Path, out: Path | None) -> tuple[str, list[str]]:
    """Return the name of the job, and the command that starts or continues the run or the study.

    Raises:
        RecipeError: the file is neither a recipe nor a study.
    """
    try:
        table = parse_toml(target.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{target}: {error}. Give the path of a recipe or a study") from None
    name = re.sub(r"[^a-z0-9-]+", "-", target.stem.lower())[:32].strip("-") or "run"
    name = name if name[0].isalpha() else f"polyfed-{name}"  # KubeRay takes no other name
    folder = str(out or Path("runs") / target.stem)
    if "methods" in table:
        return name, ["polyfed", "sweep", str(target), "--out", folder, "--ray", ""]
    if not {"algorithm", "data"} & set(table):
        raise RecipeError(f"{target} has no [methods], [algorithm] or [data]. Give the path of a recipe or a study")
    return name, ["polyfed", "run", str(target), "--out", folder, "--resume", "--set", "engine.cluster=ray"]
