"""Bytes per device and round against local epochs, for PartialFL, FedAvg and split learning.

PartialFL federates the colour alone, so its rivals are measured on the colour alone, too, and on both modalities.

A table and a figure, both from the ledgers of one round with all 20 clients of the coloured digits.

    python benchmarks/communication.py [--figure docs/results/communication.svg]
"""

import argparse
import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import polyfed
from polyfed.experiment.recipes.recipe import parse_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
EPOCHS = (1, 2, 5, 10, 20)
METHODS = {
    "PartialFL, colour": ("partialfl", False),
    "FedAvg, colour": ("fedavg", True),
    "SplitFed, colour": ("splitfed", True),
    "Split learning, colour": ("split-learning", True),
    "Split learning, U-shaped, colour": ("split-learning-u", True),
    "FedAvg, both": ("fedavg", False),
    "SplitFed, both": ("splitfed", False),
    "Split learning, both": ("split-learning", False),
    "Split learning, U-shaped, both": ("split-learning-u", False),
}
"""By name: the recipe, and whether clients hold the colour alone."""
COLOURS = ("#2563eb", "#6b7280", "#059669", "#d97706", "#dc2626", "#9ca3af", "#6ee7b7", "#fcd34d", "#fca5a5")
SAME: dict[str, dict[str, Any]] = {  # with a larger lr, some clients diverge within 20 epochs and send fewer bytes
    "clients": {"partition": "dirichlet", "num": 20, "alpha": 0.5, "participation": 1.0, "validation": 0.1},
    "model": {"fusion": "concat", "embedding": 64, "head": [64]},
    "train": {"batch_size": 16, "lr": 0.0005},
    "evaluate": {"every": 0},
    "engine": {"threads": 1},
}


def crossed(name: str, epochs: int, *, alone: bool) -> tuple[int, float]:
    """Bytes per device in both directions: of what is sent once, and of a round.

    Args:
        name: the recipe, without `-cg-digits`.
        epochs: local epochs.
        alone: whether clients hold the colour alone.
    """
    table = tomllib.loads((RECIPES / f"{name}-cg-digits.toml").read_text())
    table |= {"seed": 1, "rounds": 1}
    for section, options in SAME.items():
        table[section] = table.get(section, {}) | options
    table["train"]["epochs"] = epochs
    if alone:
        table["clients"] |= {"holdings": [["color"]]}
    with tempfile.TemporaryDirectory() as folder:
        result = polyfed.run(parse_recipe(table), Path(folder) / "run").result
        rows = [json.loads(line) for line in (Path(folder) / "run" / "egress.jsonl").read_text().splitlines()]
    deposit = sum(row["bytes"] for row in rows if row["message"] == "Deposit")
    return deposit // result["clients"], (result["bytes_up"] + result["bytes_down"] - deposit) / result["clients"]


def drawn(curves: dict[str, list[float]]) -> str:
    """The figure as SVG: kB per device and round over epochs, with one labelled line for each method."""
    width, height, left, bottom, right = 720, 400, 70, 50, 190
    top = max(max(values) for values in curves.values()) * 1.05
    across, up = (width - left - right) / max(EPOCHS), (height - 2 * bottom) / top

    def at(epoch: float, value: float) -> tuple[float, float]:
        return left + epoch * across, height - bottom - value * up

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="24" font-size="14">kB a device and round, both directions (coloured digits)</text>',
        f'<text x="{left + 10 * across}" y="{height - 12}" text-anchor="middle">local epochs a round</text>',
    ]
    step = next(step for step in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if top / 1000 <= 6 * step)
    for mark in range(0, int(top / 1000) + 1, step):
        x, y = at(0, 1000 * mark)
        parts.append(f'<path d="M{x} {y:.1f}H{width - right}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{mark:,}</text>')
    for epoch in EPOCHS:
        x, y = at(epoch, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{epoch}</text>')
    used: list[float] = []
    for colour, (name, values) in zip(COLOURS, curves.items(), strict=True):
        points = [at(epoch, value) for epoch, value in zip(EPOCHS, values, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        label = points[-1][1] + 4
        while any(abs(label - other) < 14 for other in used):
            label -= 1
        used.append(label)
        parts.append(f'<text x="{points[-1][0] + 8:.1f}" y="{label:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="where to write the figure, an SVG")
    options = parser.parse_args()
    print("| kB per device and round | once | " + " | ".join(f"{epochs} epochs" for epochs in EPOCHS) + " |")
    print("|---|---:|" + "---:|" * len(EPOCHS))
    curves: dict[str, list[float]] = {}
    for label, (name, alone) in METHODS.items():
        found = [crossed(name, epochs, alone=alone) for epochs in EPOCHS]
        curves[label] = [value for _, value in found]
        cells = " | ".join(f"{value / 1000:.0f}" for value in curves[label])
        print(f"| {label} | {found[0][0] / 1000:.0f} | {cells} |", flush=True)
    if options.figure:
        options.figure.write_text(drawn(curves))


if __name__ == "__main__":
    main()
