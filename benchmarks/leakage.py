"""What the messages of the methods give away: the tables of docs/results/privacy.md.

    python benchmarks/leakage.py --out runs/leakage

Each method runs on two modalities of each set, and `polyfed audit` attacks its messages. A second table of each set has
FedAvg before and after each defence. Each run has a folder, and a finished audit is not repeated. `--print` only prints
the tables of the audits that are finished.
"""

import argparse
import itertools
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import polyfed
from polyfed.experiment.leakage import audit, write

ROUNDS, CLIENTS, SHADOWS = 10, 12, 4

SETS = {"mfeat": ("partialfl-mfeat.toml", ("pix", "fou")), "cg-digits": ("partialfl-cg-digits.toml", ("gray", "color"))}
"""Set -> the recipe with its data, and its modalities. PartialFL shares the embeddings of the first one."""

EVERYTHING = ["parameters", "gradients", "prototypes", "statistic"]
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"algorithm": {"name": "fedavg"}},
    "PartialFL": {"algorithm": {"name": "partialfl", "beta": 0.1, "local_hidden": [64], "server_hidden": [64]}},
    "CMSFed": {"algorithm": {"name": "cmsfed", "preset": "paper", "feature_norm": 6.0}},
    "HFM": {"algorithm": {"name": "hfm", "local_rounds": 5, "exchanges": 2}},
    "PFMML": {"algorithm": {"name": "pfmml", "coefficient_lr": 5.0, "scale": "per-size", "uploads": 6}},
    "FedAvg, one row a step": {"algorithm": {"name": "fedavg"}, "train": {"lr": 0.05, "steps": 1, "batch_size": 1}},
}
"""Column of the first table of a set -> sections that differ. The last column is the worst case, in which the attacks
succeed."""

ROWS = {"unit": "example", "delta": 5e-4, "clip_norm": 1.0}
DEFENCES: dict[str, dict[str, Any]] = {
    "FedAvg": METHODS["FedAvg"],
    "FedAvg, rows, epsilon 8": {"privacy": ROWS | {"epsilon": 8.0}},
    "FedAvg, rows, epsilon 1": {"privacy": ROWS | {"epsilon": 1.0}},
    "FedAvg, clients, noise at the client, epsilon 8": {
        "algorithm": {"name": "fedavg", "aggregation": "uniform"},
        "privacy": {"unit": "client", "noise_at": "client", "delta": 1e-3, "clip_norm": 1.0, "epsilon": 8.0},
    },
    "FedAvg, secure aggregation": {"secure_aggregation": {}},
    "FedAvg, one row a step": METHODS["FedAvg, one row a step"],
}
"""Column of the second table of a set -> sections that differ: FedAvg before and after each defence."""


def table_of(name: str, method: str, seed: int) -> dict[str, Any]:
    """The recipe of a method on a set, as a table."""
    file, modalities = SETS[name]
    table = tomllib.loads((Path("recipes") / file).read_text())
    table |= {"seed": seed, "rounds": ROUNDS, "engine": {"name": "vectorised", "threads": 1, "workers": 1}}
    table["clients"] = {"partition": "dirichlet", "num": CLIENTS, "alpha": 0.5, "min_size": 8, "validation": 0.25}
    table["model"] |= {"embedding": 32, "head": [32]}
    table["train"] = {"epochs": 1, "batch_size": 16, "lr": 0.05}
    table["evaluate"] = {"every": 0}
    table["egress"] = {m: {"server": EVERYTHING} for m in modalities}
    table |= {"algorithm": {"name": "fedavg"}} | (METHODS | DEFENCES)[method]
    if method == "PartialFL":
        table["algorithm"]["inputs"] = "raw" if name == "cg-digits" else "embeddings"
        table["egress"] = {modalities[0]: {"server": ["parameters", "embeddings", "raw"]}}
        table["egress"] |= {
            modalities[1]: {"server": ["parameters"]},
            "shared": {"server": ["parameters", "statistic"]},
        }
    elif method == "HFM":
        table["clients"] = {"partition": "silos", "silos": CLIENTS // 2, "validation": 0.25}
        table["egress"] = {m: {"silo": ["parameters", "embeddings"], "server": ["parameters"]} for m in modalities}
        table["egress"]["shared"] = {"server": ["parameters", "statistic"], "silo": ["parameters", "statistic", "ids"]}
    elif method == "PFMML":
        table["clients"] |= {"personal_test": 0.2, "holdings": [[*modalities], [modalities[0]], [modalities[1]]]}
    return table


def audited(name: str, method: str, seed: int, out: Path) -> list[dict[str, Any]]:
    """The findings for a method on a set."""
    folder = place_of(name, method, seed, out)
    if not (folder / "leakage.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        polyfed.run(polyfed.parse_recipe(table_of(name, method, seed)), out=folder)
        write(audit(folder, rounds=ROUNDS, clients=CLIENTS, shadows=SHADOWS))
    found: list[dict[str, Any]] = json.loads((folder / "leakage.json").read_text())["findings"]
    return found


def cell(findings: list[dict[str, Any]]) -> str:
    """The advantage with its interval, in bold if the interval lies above 0; else why there is none."""
    measured = [one for one in findings if one["status"] == "measured"]
    if not measured:
        return findings[0]["status"] if findings else "–"
    one = measured[0]
    text = f"{one['advantage']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f})"
    raw = "" if one["raw"] is None else f"; {one['value']:.2f} against {one['raw']:.2f} on samples"
    return (f"**{text}**" if one["low"] > 0 else text) + raw


def place_of(name: str, method: str, seed: int, out: Path) -> Path:
    """The folder of a run."""
    return out / f"{name}-{method.lower().replace(', ', '-').replace(' ', '-')}-{seed}"


def print_table(heading: str, columns: dict[str, list[dict[str, Any]]]) -> None:
    """Print one table: a row for each attack that could be measured on some column."""
    print(f"\n### {heading}\n\n| attack | from | of | seen by | how | {' | '.join(columns)} |")
    print(f"|{'---|' * (5 + len(columns))}")
    rows: dict[tuple[str, ...], None] = {}
    for one in itertools.chain(*columns.values()):
        if one["status"] == "measured":
            how = one["method"] + (f" ({one['field']})" if one["field"] else "")
            rows[one["attack"], one["kind"], one["block"], one["seen_by"], how] = None
    for attack, kind, block, seen_by, how in sorted(rows):
        cells = []
        for findings in columns.values():
            same = [f for f in findings if (f["attack"], f["kind"], f["block"]) == (attack, kind, block)]
            exact = [f for f in same if f["seen_by"] == seen_by and how.startswith(f["method"]) and f["field"] in how]
            kinds = [f for f in findings if (f["attack"], f["kind"]) == (attack, kind)]
            crossed = any(f["status"] == "measured" for f in kinds)
            cells.append(cell(exact or [f for f in same if f["status"] != "measured"] or ([] if crossed else kinds)))
        print(f"| {attack} | {kind} | {block} | {seen_by} | {how} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/leakage"))
    parser.add_argument("--print", action="store_true")
    given = parser.parse_args()
    for (heading, group), name in itertools.product({"methods": METHODS, "defences": DEFENCES}.items(), SETS):
        places = {method: place_of(name, method, given.seed, given.out) for method in group}
        methods = [m for m, place in places.items() if not given.print or (place / "leakage.json").exists()]
        columns = {method: audited(name, method, given.seed, given.out) for method in methods}
        print_table(f"{name}, {heading}", columns)


if __name__ == "__main__":
    main()
