"""Cost of secure aggregation for cohorts of 5, 10 and 20 clients: the table of docs/secure-aggregation.md.

    python benchmarks/secure_aggregation.py

All clients and the server run in this process on one core. A time is the processor time of a round of training. A row
has the smallest time of four rounds, because other work on the machine can only make a round slower.
"""

import time
from dataclasses import replace
from typing import Any

import torch

import polyfed

COHORTS, ROUNDS = (5, 10, 20), 5


def cost(cohort: int, *, secure: bool) -> tuple[float, int]:
    """Processor time of a round in milliseconds, and the bytes that a client sends in it."""
    words = [f"clients.participation={cohort}", "clients.validation=0.0", f"rounds={ROUNDS}", "evaluate.every=0"]
    recipe = polyfed.load_recipe("recipes/fedavg-secure-cg-digits.toml", words)
    if not secure:
        recipe = replace(recipe, algorithm=replace(recipe.algorithm, secure_aggregation=None))
    times: list[float] = []
    started = 0.0

    def listen(event: str, **facts: Any) -> None:
        nonlocal started
        if event == "round-started":
            started = time.process_time()
        if event == "round-finished" and facts["row"]["round"] < ROUNDS:  # the last round also evaluates
            times.append(time.process_time() - started)

    run = polyfed.run(recipe, listeners=[listen])
    return 1000 * min(times), run.rounds[0]["bytes_up"] // cohort


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| clients in the cohort | plain | secure | bytes up for each client, plain | secure |")
    for cohort in COHORTS:
        (plain, few), (secure, many) = cost(cohort, secure=False), cost(cohort, secure=True)
        print(f"| {cohort} | {plain:.0f} ms | {secure:.0f} ms | {few:,} | {many:,} |", flush=True)


if __name__ == "__main__":
    main()
