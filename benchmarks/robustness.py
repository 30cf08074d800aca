"""Accuracy under attacks, for every aggregation rule: the tables of docs/results/robustness.md.

    python benchmarks/robustness.py --sets cg-digits mfeat ucihar --methods fedavg partialfl --seeds 1 2

Ten clients take part in every round, and two of them attack. Each finished run adds a line to the file `--out`. The
same command continues after an interruption. `--seconds` ends the script in time, and `--print` only prints the tables
of the runs that are finished. `--cost` measures the time of a round for each rule instead.
"""

import argparse
import itertools
import json
import time
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

import polyfed
from polyfed.core.errors import Diverged, TooFewReplies

RULES = ["mean", "median", "trimmed-mean", "multi-krum", "geometric-median", "norm-clip"]
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "scaling": {"scale": 10.0},
    "sign-flip": {"scale": 4.0},
    "label-flip": {},
    "backdoor": {"scale": 5.0, "target": 0},
    "alie": {},
}
SETS = {
    "cg-digits": ("partialfl-cg-digits.toml", ("gray", "color")),
    "mfeat": ("partialfl-mfeat.toml", ("pix", "fou")),
    "ucihar": ("fedavg-ucihar.toml", ("acc", "gyro")),
}
"""Set -> the recipe with its data, and its modalities. PartialFL shares the embeddings of the first one. The trigger of
the backdoor is in the second one, which PartialFL's global model reads."""

ROUNDS, CLIENTS = 12, 10


def table_of(name: str, method: str) -> dict[str, Any]:
    """The recipe of a set as a table, without an attack."""
    file, (open_, private) = SETS[name]
    table = tomllib.loads((Path("recipes") / file).read_text())
    table |= {"rounds": ROUNDS, "engine": {"name": "vectorised", "threads": 1, "workers": 1}}
    table["clients"] = {"partition": "dirichlet", "num": CLIENTS, "alpha": 1.0, "min_size": 2}
    encoders = {modality: {"kind": "mlp", "hidden": [64]} for modality in (open_, private)}
    table["model"] = {"fusion": "concat", "embedding": 32, "head": [32], "encoders": encoders}
    table["train"] = {"steps": 12, "batch_size": 32, "optimiser": "adam", "lr": 0.004}
    table["evaluate"] = {"every": ROUNDS}
    shared = {"server": ["parameters", "statistic"]}
    table["egress"] = {private: {"server": ["parameters"]}, "shared": shared, "labels": {"server": []}}
    table["egress"][open_] = {"server": ["parameters", "embeddings", "raw"]}
    options = {"inputs": "raw", "beta": 0.1, "mu": 0.0, "local_hidden": [64], "server_hidden": [64]}
    table["algorithm"] = {"name": method, "aggregation": "uniform"} | (options if method == "partialfl" else {})
    return table


def measured(name: str, method: str, attack: str, rule: str, seed: int) -> dict[str, Any]:
    """Accuracy of the last round, and the share of triggered rows assigned to the target; or the reason of a fault."""
    table = table_of(name, method) | {"seed": seed, "server": {"aggregate": rule}}
    if attack != "none":
        more = {"modality": SETS[name][1][1]} if attack == "backdoor" else {}
        table["attack"] = {"name": attack, "share": 0.2} | ATTACKS[attack] | more
    started = time.perf_counter()
    try:
        result = polyfed.run(polyfed.parse_recipe(table)).result
    except (Diverged, TooFewReplies) as error:
        return {"failed": str(error)[:200]}
    found = {"accuracy": result["metrics"]["global"]["accuracy"], "seconds": time.perf_counter() - started}
    return found | ({"success": result["backdoor"]["success"]} if attack == "backdoor" else {})


def finished(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The results so far, by (set, method, attack, rule, seed)."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {tuple(row["key"]): row for row in map(json.loads, lines)}


def cell(results: dict[tuple[Any, ...], dict[str, Any]], key: tuple[str, ...], seeds: list[int], what: str) -> str:
    """The mean over the seeds in per cent, with the number of diverged runs."""
    rows = [results[*key, seed] for seed in seeds if (*key, seed) in results]
    known = [100 * row[what] for row in rows if what in row]
    lost = f" ({len(rows) - len(known)} diverged)" if len(known) < len(rows) else ""
    missing = "" if len(rows) == len(seeds) else f" ({len(rows)} of {len(seeds)} seeds)"
    return (f"{fmean(known):.1f}{lost}" if known else ("diverged" if rows else "not run")) + (missing if rows else "")


def tables(
    results: dict[tuple[Any, ...], dict[str, Any]], sets: list[str], methods: list[str], seeds: list[int]
) -> None:
    """Print a Markdown table for each set and method."""
    for name, method in itertools.product(sets, methods):
        print(f"\n### {name}, {method}\n\n| attack | {' | '.join(RULES)} |\n|---|{'---:|' * len(RULES)}")
        for attack in ATTACKS:
            cells = (cell(results, (name, method, attack, rule), seeds, "accuracy") for rule in RULES)
            print(f"| {attack} | {' | '.join(cells)} |")
        turned = (cell(results, (name, method, "backdoor", rule), seeds, "success") for rule in RULES)
        print(f"| backdoor: rows assigned to the target | {' | '.join(turned)} |", flush=True)


def costs(name: str, rounds: int = 15) -> None:
    """Print, for each rule, the median time of a round of FedAvg without an attack, and the bytes of a round."""
    print("| rule | ms a round | MB up a round |\n|---|---:|---:|")
    for rule in RULES:
        table = table_of(name, "fedavg") | {"seed": 1, "server": {"aggregate": rule}, "rounds": rounds}
        table["evaluate"] = {"every": 0}
        result = polyfed.run(polyfed.parse_recipe(table)).result
        up = result["bytes_up"] / rounds / 1e6
        print(f"| {rule} | {1000 * result['seconds_per_round']:.0f} | {up:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", nargs="+", default=[*SETS], choices=sorted(SETS))
    parser.add_argument("--methods", nargs="+", default=["fedavg", "partialfl"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/robustness.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--cost", action="store_true", help="measure the time of a round for each rule")
    given = parser.parse_args()
    if given.cost:
        for name in given.sets:
            print(f"\n{name}\n")
            costs(name)
        return
    end, results = time.monotonic() + given.seconds, finished(given.out)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for key in itertools.product(given.seeds, given.sets, given.methods, ATTACKS, RULES):
        key = (*key[1:], key[0])
        if given.print or key in results or time.monotonic() > end:
            continue
        results[key] = {"key": key} | measured(*key)
        with given.out.open("a") as file:
            file.write(json.dumps(results[key]) + "\n")
    tables(results, given.sets, given.methods, given.seeds)


if __name__ == "__main__":
    main()
