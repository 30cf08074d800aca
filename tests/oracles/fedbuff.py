"""FedBuff as a bare event loop: Nguyen et al. 2022, Algorithms 1 and 2, with a staleness for each block.

The loop knows when each client would end its work, and which clients begin with each version. Everything else is
written from the paper with PyTorch alone; `oracles/blockwise.py` trains a client.
"""

import heapq
from collections.abc import Callable

from oracles.blockwise import Federation, Weights, copied, is_statistic, part_of, sgd


def block(name: str) -> str:
    return "shared" if name == "bias" else name.split(".")[0]


def fedbuff(
    fed: Federation,
    w: Weights,
    size: int,
    seconds: Callable[[int], float],
    rate: float = 1.0,
    exponent: float = 0.5,
) -> tuple[Weights, list[list[tuple[int, int, dict[str, int]]]], list[float]]:
    """Return the model, for each buffer (client, round in which it began, staleness by block), and when it was full.

    Args:
        fed: the federation. `cohorts` are the clients that begin with each version.
        w: the initial model.
        size: number of updates in a buffer, K.
        seconds: how long a client works.
        rate: learning rate of the server.
        exponent: an update of staleness tau counts by (1 + tau) ** -exponent.
    """
    steps = {b: 0 for b in map(block, w)}
    working: list[tuple[float, int, int]] = []
    began: dict[int, tuple[Weights, dict[str, int]]] = {}
    buffers, ends, now = [], [], 0.0
    for t, cohort in enumerate(fed.cohorts):
        for k in cohort:
            began[k] = copied(w), dict(steps)
            heapq.heappush(working, (now + seconds(k), t, k))
        arrived = [heapq.heappop(working) for _ in range(min(size, len(working)))]
        now = max(now, arrived[-1][0])
        changes: dict[str, list[tuple[float, object]]] = {}
        told = []
        for _, start, k in sorted(arrived, key=lambda one: one[2]):
            (x, then), client = began[k], fed.clients[k]
            y = sgd(part_of(x, client), client, client.steps[0][start], fed.lr)
            tau = {b: steps[b] - then[b] for b in steps}
            told.append((k, start + 1, tau))
            for n, value in y.items():
                scale = (1 + tau[block(n)]) ** -exponent
                base = w[n] if is_statistic(n) else x[n]
                weight = float(len(client.y)) if fed.weighted else 1.0
                changes.setdefault(n, []).append((weight, scale * (value - base)))
        for n, found in changes.items():
            mean = sum(weight * change for weight, change in found) / sum(weight for weight, _ in found)  # type: ignore[operator]
            w[n] = w[n] + (1.0 if is_statistic(n) else rate) * mean
        for b in {block(n) for n in changes}:
            steps[b] += 1
        buffers.append(told)
        ends.append(now)
    return w, buffers, ends
