"""The cost of a round on Flower: time over Flower's own minimum for messages of that size, bytes over the ledger.

    python benchmarks/flower_cost.py [--clients 8] [--rounds 10]

The minimum is Flower's `send_and_receive` with a ClientApp that returns what it received, without polyfed. The round is
FedAvg on the simulation runtime (Ray); the time of the same training in one process is printed beside it.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import polyfed
from polyfed.deploy.handlers import Simulated
from polyfed.deploy.server.server import engine_by
from polyfed.engines.flower import DirectGrid, GridTransport, client_app
from polyfed.experiment.recipes.recipe import Recipe, load_recipe
from polyfed.experiment.running.assembly import population_of
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.loop import execute

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


def wire(recipe: Recipe, clients: int) -> tuple[float, float]:
    """Ratio of the bytes that Flower serialises to the bytes in the ledger, up and down."""
    with tempfile.TemporaryDirectory() as folder:
        grid = DirectGrid(client_app(Simulated(recipe, Path(folder))), clients)
        transport = GridTransport(grid)
        transport.enrol(clients, 60)
        up, down = grid.bytes_up, grid.bytes_down
        run = execute(
            recipe, None, Emitter(), population=population_of(recipe), engine=engine_by(transport, recipe.engine)
        )
    return (grid.bytes_up - up) / run.result["bytes_up"], (grid.bytes_down - down) / run.result["bytes_down"]


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
    found["wire_over_ledger_up"], found["wire_over_ledger_down"] = wire(replace(recipe, name="bytes"), given.clients)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
