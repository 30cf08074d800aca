"""The server's cost of a round of personalised aggregation (pfmml): scheduling, mixing and learning coefficients.

    python benchmarks/pfmml_server.py [--devices 1000] [--numbers 100000] [--rounds 4] [--device cpu]

No device trains. There are three modalities and a shared block of `--numbers` / 100; a third of the devices each owns
three, two and one of the modalities; K-hat is a third of the devices. Uploads are random numbers, drawn before the
clock starts. Round 1 has nothing to learn from, so the median of the later rounds is printed, with the processor time
over all threads, which other work on the machine does not change.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from polyfed.algorithms.local import Done
from polyfed.algorithms.personal.blocks import Blocks, Installed
from polyfed.algorithms.pfmml.pfmml import Pfmml
from polyfed.core.tree import block_of
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.clock import Clock
from polyfed.federation.federation import Answer, Federation, ReplyStack, Request, Send
from polyfed.federation.links.network import Network
from polyfed.privacy.egress.ledger import Ledger

MODALITIES = ("a", "b", "c")
HOLDINGS = [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 1, 1], [0, 0, 1]]


class Uploads:
    """Devices that reply at once with random blocks; their time is measured separately."""

    name = "uploads"

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        self.params, self.seconds, self.cpu_seconds = params, 0.0, 0.0
        self.draw = torch.Generator().manual_seed(0)

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        started, busy = time.perf_counter(), time.process_time()
        parts = self.parts(request.name, list(clients), send)
        self.seconds += time.perf_counter() - started
        self.cpu_seconds += time.process_time() - busy
        return Answer(parts, {})

    def parts(self, task: str, clients: list[int], send: Any) -> list[ReplyStack]:
        count = len(clients)
        if task == "install":
            return [ReplyStack(tuple(clients), Installed())]
        if task == "practise":
            return [ReplyStack(tuple(clients), Done(torch.ones(count), torch.ones(count)))]
        alike: dict[tuple[str, ...], list[int]] = {}
        for client in clients:
            alike.setdefault(tuple(send[client].blocks), []).append(client)
        return [ReplyStack(tuple(group), Blocks(self.rows(names, len(group)))) for names, group in alike.items()]

    def rows(self, wanted: Sequence[str], count: int) -> dict[str, torch.Tensor]:
        blocks = {block_of(name) for name in wanted}
        size = {n: (count, *v.shape) for n, v in self.params.items() if block_of(n) in blocks}
        device = next(iter(self.params.values())).device
        return {n: 0.01 * torch.randn(s, generator=self.draw).to(device) for n, s in size.items()}


def federation(devices: int, numbers: int, device: str) -> tuple[Federation, Uploads]:
    """A federation whose devices send random uploads."""
    params = {f"{m}.w": torch.zeros(numbers, device=device) for m in MODALITIES}
    params["shared.w"] = torch.zeros(max(numbers // 100, 1), device=device)
    holds = torch.tensor(HOLDINGS, dtype=torch.bool)[torch.arange(devices) % len(HOLDINGS)]
    engine = Uploads(params)
    clock = Clock(Network().links(devices, 1), Ledger("r"))
    context = SimpleNamespace(
        model=SimpleNamespace(is_buffer=lambda name: False, has_batchnorm=False, flops=lambda block: 1e6)
    )
    registry = ClientRegistry(MODALITIES, torch.full((devices,), 100), holds)
    return Federation(registry, engine, Pfmml(), context, params, 1, 50, clock=clock), engine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--numbers", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    fed, engine = federation(options.devices, options.numbers, options.device)
    method = fed.owner
    state = method.init(fed, engine.params)
    wall, cpu = [], []
    for number in range(1, options.rounds + 1):
        fed.begin(number)
        engine.seconds = engine.cpu_seconds = 0.0
        started, busy = time.perf_counter(), time.process_time()
        state = method.round(state, fed)
        if options.device != "cpu":
            torch.cuda.synchronize()
        wall.append(time.perf_counter() - started - engine.seconds)
        cpu.append(time.process_time() - busy - engine.cpu_seconds)
        uploads = {block: int(entry.sent.sum()) for block, entry in state.blocks.items()}
        print(f"round {number}: {wall[-1]:.2f} s at the server, {cpu[-1]:.2f} s of processor time, uploads {uploads}")
    print(
        f"median of rounds 2 to {options.rounds}: {statistics.median(wall[1:]):.2f} s, "
        f"{statistics.median(cpu[1:]):.2f} s of processor time on {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
