"""The cost of a round of a simulation on Flower: time over Flower's own minimum for messages of that size.

    python benchmarks/flower_cost.py [--clients 8] [--rounds 10]

The minimum is Flower's `send_and_receive` with a ClientApp that returns what it received, without polyfed. The round is
FedAvg on the simulation runtime (Ray); the time of the same training in one process is printed beside it.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import polyfed
from polyfed.experiment.recipes.recipe import load_recipe

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "federation-demo.toml"


def floor(clients: int, rounds: int, size: int, cpus: float) -> float:
    """Median seconds of a round of Flower without polyfed that carries `size` bytes to and from each client."""
    from flwr.app import Array, ArrayRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    echo, server, times = ClientApp(), ServerApp(), []

    @echo.train()
    def back(message, context):
        return Message(message.content, reply_to=message)

    @server.main()
    def main(grid, context):
        while len(list(grid.get_node_ids())) < clients:
            time.sleep(0.1)
        for _ in range(rounds):
            body = ArrayRecord({"body": Array("uint8", (size,), "bytes", bytes(size))})
            started = time.perf_counter()
            sent = [Message(RecordDict({"body": body}), node, "train") for node in grid.get_node_ids()]
            assert len(list(grid.send_and_receive(sent))) == clients
            times.append(time.perf_counter() - started)

    resources = {"client_resources": {"num_cpus": cpus, "num_gpus": 0.0}}
    run_simulation(server, echo, clients, backend_config=resources)
    return statistics.median(times)


def seconds(run: polyfed.Run) -> float:
    return statistics.median(row["seconds"]["train"] for row in run.rounds)


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--clients", type=int, default=8)
    words.add_argument("--rounds", type=int, default=10)
    given = words.parse_args()
    recipe = load_recipe(RECIPE, [f"clients.num={given.clients}", f"rounds={given.rounds}", "evaluate.every=0"])
    size = sum(polyfed.check(recipe).facts["blocks"].values())
    cpus = recipe.deployment.client_cpus
    found = {"clients": given.clients, "bytes_each_way": size, "floor": floor(given.clients, given.rounds, size, cpus)}
    found["round"] = seconds(polyfed.run(recipe, engine="flower"))
    found["training_in_one_process"] = seconds(polyfed.run(recipe, engine="sequential"))
    found["over_floor"] = found["round"] / found["floor"]
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
