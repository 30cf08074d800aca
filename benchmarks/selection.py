"""The cost of a round of CMSFed's (or DivFL's) client selection, for N clients of P parameters.

    python benchmarks/selection.py [--clients 1000] [--parameters 1000000] [--sketch 256] [--cohort 10]

Prints processor seconds (one thread, so that other work on the machine does not count) and peak memory of: filling the
memory once (vectors arrive in chunks, as replies would), refreshing the cohort's rows and columns of D1 and D2, and
choosing. Vectors are random: their values do not matter to the cost.
"""

import argparse
import json
import resource
import time

import torch

from polyfed.algorithms.cmsfed.selection import SelectionProblem
from polyfed.algorithms.cmsfed.weak_modality import ImbalanceRatios
from polyfed.core import keys
from polyfed.federation.client_registry import ClientRegistry
from polyfed.selection.submodular import Similarity, sample_size

CHUNK = 250


def arrived(clients: list[int], size: int, seed: int) -> dict[int, torch.Tensor]:
    """Random vectors of some clients, as the replies of a round would bring."""
    generator = torch.Generator().manual_seed(seed)
    return dict(zip(clients, torch.randn(len(clients), size, generator=generator), strict=True))


def filled(num: int, size: int, sketch: int) -> Similarity:
    """Give the memory a vector of every client, in chunks of at most CHUNK vectors."""
    similarity = Similarity.empty(num, size, sketch, key=1)
    for start in range(0, num, CHUNK):
        similarity = similarity.refreshed(arrived(list(range(start, min(start + CHUNK, num))), size, start))
    return similarity


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--sketch", type=int, default=256)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    num, size, cohort = options.clients, options.parameters, options.cohort
    start = time.process_time()
    gradients, encoder = filled(num, size, options.sketch), filled(num, size // 2, options.sketch)
    setup = time.process_time() - start
    registry = ClientRegistry(("a", "b"), torch.full((num,), 10), torch.ones(num, 2, dtype=torch.bool))
    values = torch.rand(num, 2, dtype=torch.float64) + 0.5
    ratios = ImbalanceRatios(
        ("a", "b"), values, torch.ones(num, dtype=torch.float64), torch.ones(num, dtype=torch.bool)
    )
    refresh, choose = [], []
    for round in range(1, options.rounds + 1):
        problem = SelectionProblem(gradients, encoder, ratios, "b", 1.5, "paper", cohort, sample_size(cohort, num))
        start = time.process_time()
        choice = problem.solve(registry, keys.key(1, "greedy", round))
        choose.append(time.process_time() - start)
        picked = sorted(choice.picked)
        g, h = arrived(picked, size, keys.key(round)), arrived(picked, size // 2, keys.key(round))
        start = time.process_time()
        gradients, encoder = gradients.refreshed(g), encoder.refreshed(h)
        refresh.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        json.dumps(
            vars(options)
            | {"setup_s": round_(setup), "choose_s": round_(min(choose)), "refresh_s": round_(min(refresh))}
            | {"round_s": round_(min(a + b for a, b in zip(choose, refresh, strict=True))), "peak_gib": round_(peak)}
        )
    )


def round_(value: float) -> float:
    return float(f"{value:.3g}")


if __name__ == "__main__":
    main()
