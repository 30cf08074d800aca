"""Flower's simulation (its Message API on the Ray backend), with FedAvg's arithmetic in the server app.

There are as many actors as threads, with one thread each, so that the same processors are available as to the other
programs. Every actor keeps the data in memory, so that no round reads files. speed.py starts it with telemetry off and
with this folder on PYTHONPATH.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from flower_client import app as client_app
from run_bare import Bare
from settings import SETTINGS
from worker import cpu_seconds, say, wait

server_app = ServerApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """The ServerApp's loop: a round of federated averaging over a random cohort on each request."""
    name, folder = sys.argv[1:3]
    setting = SETTINGS[name]
    while len(nodes := list(grid.get_node_ids())) < setting.clients:
        time.sleep(0.5)
    net = Bare(setting, Path(folder)).net
    params = net.state_dict()
    say(parameters=sum(p.numel() for p in net.parameters()))
    while wait():
        started, cpu = time.perf_counter(), cpu_seconds()
        params = round_(grid, params, torch.randperm(len(nodes))[: setting.cohort].tolist(), nodes)
        say(seconds=time.perf_counter() - started, cpu=cpu_seconds() - cpu)


def round_(grid: Grid, params: dict[str, Any], cohort: list[int], nodes: list[int]) -> dict[str, Any]:
    """One round: send the model, wait for all replies, average them."""
    content = RecordDict(
        {"params": ArrayRecord(params), "config": ConfigRecord({"name": sys.argv[1], "folder": sys.argv[2]})}
    )
    messages = [Message(content=content, dst_node_id=nodes[k], message_type="train") for k in cohort]
    replies = list(grid.send_and_receive(messages))
    failed = [str(r.error) for r in replies if r.has_error()]
    assert not failed, failed[0]
    assert len(replies) == len(cohort), f"{len(replies)} of {len(cohort)} clients answered"
    counts = [float(r.content["metrics"]["num-examples"]) for r in replies]
    mean = {key: torch.zeros_like(value) for key, value in params.items()}
    for reply, count in zip(replies, counts, strict=True):
        for key, value in reply.content["params"].to_torch_state_dict().items():
            mean[key].add_(value, alpha=count / sum(counts))
    return mean


def main(name: str, folder: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=SETTINGS[name].clients,
        backend_config={
            "init_args": {"num_cpus": int(threads), "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
