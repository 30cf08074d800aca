"""Folders of made-up runs, for pages and tables: written here by hand, not by the package."""

import json
from pathlib import Path

import numpy as np

RECIPE = """seed = {seed}
rounds = {rounds}

[data]
name = "made-up"

[clients]
num = {clients}
participation = 5

[algorithm]
name = "{algorithm}"
mu = {mu}

[engine]
name = "vectorised"

[versions]
polyfed = "0.0"
"""

MODALITIES = ("audio", "text", "video")
CLASSES = ("calm", "glad", "sad", "wild, very")


def write_run(
    folder: Path,
    *,
    rounds: int = 30,
    clients: int = 24,
    seed: int = 1,
    algorithm: str = "fedavg",
    mu: float = 0.1,
    finished: bool = True,
    text: str = "the client raised ValueError",
) -> Path:
    """A run of three modalities in which clients lack some, some do not answer, and one crossing is refused."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    held = {c: [m for i, m in enumerate(MODALITIES) if (c + i) % 4 or i == 0] for c in range(clients)}
    (folder / "recipe.toml").write_text(
        RECIPE.format(seed=seed, rounds=rounds, clients=clients, algorithm=algorithm, mu=mu)
    )
    (folder / "run.json").write_text(json.dumps(facts(held, seed)))
    crossings = [crossing for c in range(min(clients, 8)) for crossing in crossings_of(c, held[c])]
    (folder / "egress.jsonl").write_text("".join(json.dumps(row) + "\n" for row in crossings))
    rows = [round_row(number, rounds, held, draw, text) for number in range(1, rounds + 1)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        (folder / "result.json").write_text(json.dumps(result(rows, seed, algorithm, clients)))
    return folder


def facts(held: dict[int, list[str]], seed: int) -> dict[str, object]:
    policy = {m: {"server": ["parameters", "gradients", "statistic"], "silo": []} for m in (*MODALITIES, "shared")}
    shown = [
        {"id": c, "rows": 40 + c % 17, "modalities": m, "labels": [10, c % 17, 20, 10]}
        for c, m in list(held.items())[:1000]
    ]
    return {
        "run": f"made-up-{seed}",
        "started": "2026-01-01T00:00:00+00:00",
        "data": {"sha256": "1" * 64, "class_names": list(CLASSES)},
        "num_clients": len(held),
        "clients": shown,
        "blocks": dict.fromkeys((*MODALITIES, "shared"), 1000),
        "egress": policy | {"labels": {"server": [], "silo": []}},
    }


def crossings_of(client: int, held: list[str]) -> list[dict[str, object]]:
    def row(message: str, field: str, kind: str, block: str, size: int, to: str, verdict: str) -> dict[str, object]:
        head = {"run": "made-up", "round": 1, "ask": 0, "client": client, "message": message, "field": field}
        tail = {"kind": kind, "block": block, "dtype": "float32", "shape": [size // 4], "bytes": size}
        return head | tail | {"destination": to, "verdict": verdict}

    down = [row("Broadcast", "params", "parameters", m, 1000, "client", "allowed") for m in held]
    up = [row("Update", "params", "parameters", m, 1000, "server", "allowed") for m in held]
    up.append(row("Update", "loss", "statistic", "shared", 4, "server", "allowed"))
    return [*down, *up, row("Update", "features", "embeddings", "audio", 256, "server", "refused")]


def round_row(
    number: int, rounds: int, held: dict[int, list[str]], draw: np.random.Generator, text: str
) -> dict[str, object]:
    cohort = sorted(int(c) for c in draw.choice(len(held), min(5, len(held)), replace=False))
    lost = [cohort[-1]] if number % 7 == 3 and len(cohort) > 1 else []
    answered = [c for c in cohort if c not in lost]
    rise = 1 - np.exp(-3 * number / rounds)
    noise = draw.normal(0, 0.01, 8)
    personal = np.clip(0.5 + 0.3 * rise + draw.normal(0, 0.1, min(len(held), 2000)), 0, 1)
    score = {
        "accuracy": 0.3 + 0.5 * rise + noise[0],
        "uar": 0.3 + 0.45 * rise + noise[1],
        "macro_f1": 0.25 + 0.5 * rise + noise[2],
        "top5": 0.7 + 0.25 * rise,
        "loss": 2.3 - 1.7 * rise + noise[3],
    }
    alone = {m: 0.2 + (0.5 - 0.12 * i) * rise + noise[4 + i] for i, m in enumerate(MODALITIES)}
    trained = {m: [c for c in answered if m in held[c]] for m in MODALITIES} | {"shared": answered}
    norms = {block: 1.0 / number for block in (*MODALITIES, "shared")}
    last = {"confusion": [[9, 1, 0, 0], [2, 6, 2, 0], [0, 0, 0, 0], [5, 0, 0, 5]]} if number == rounds else {}
    return last | {
        "round": number,
        "training_requests": 1,
        "evaluation": {"bytes_up": 8 * len(held), "bytes_down": 4000 * len(held)},
        "norms": {"model": norms, "clients": {block: 2 * norm for block, norm in norms.items()}},
        "cohort": cohort,
        "trained": trained,
        "missing": {str(c): text for c in lost},
        "train_loss": 2.3 - 2.0 * rise + noise[7],
        "bytes_up": 15_000 * len(answered),
        "bytes_down": 15_000 * len(cohort),
        "seconds": {"train": 0.05 + 0.01 * draw.random(), "evaluate": 0.004},
        "metrics": {
            "global": score,
            "validation": score,
            "unimodal": alone,
            "personal": {"mean": float(personal.mean()), "worst": float(personal.min()), "std": 0.1},
        },
        "personal_accuracy": {str(c): float(a) for c, a in enumerate(personal)},
        "logged": {
            "imbalance_ratio": 1 + rise,
            **{f"weight.{m}": 0.3 + noise[4 + i] for i, m in enumerate(MODALITIES)},
        },
        "tables": {"client_affinity": draw.normal(0, 1, (12, 12)).tolist()},
    }


def result(rows: list[dict[str, object]], seed: int, algorithm: str, clients: int) -> dict[str, object]:
    last = rows[-1]["metrics"] if rows else {}
    return {
        "algorithm": algorithm,
        "engine": "vectorised",
        "dataset": "made-up",
        "seed": seed,
        "rounds": len(rows),
        "clients": clients,
        "num_parameters": 3000,
        "num_kept": {"server": 6000, "client": 3000},
        "calibration": {"ece": 0.125, "rows": [0.0, 8.0, 8.0], "confidence": [0.0, 4.0, 7.0], "right": [0.0, 3.0, 6.0]},
        "metrics": last,
        "bytes_up": 75_000 * len(rows),
        "bytes_down": 75_000 * len(rows),
        "seconds_total": 0.06 * len(rows),
        "seconds_per_round": 0.055,
        "seconds_first_round": 1.5,
        "state_sha256": "0" * 64,
    }
