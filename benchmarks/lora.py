"""LoRA beside full fine-tuning, and clients with ranks of their own, on a tiny CLIP that this script pre-trains.

    nice -n 19 python benchmarks/lora.py OUTPUT_FOLDER [--rounds 15]

The script pre-trains a CLIP of `transformers` (two towers, 32 wide, two layers) on a third of scikit-learn's digits and
captions of made-up words. The federation has the other digits, rotated by a quarter turn, and captions in which the
words of the digits have changed places. Every method searches its learning rate on validation rows with seed 0. Prints
the first table of docs/results/lora.md, and writes all accuracies to rows.json.
"""

import argparse
import json
import os
import platform
import statistics
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polyfed
from polyfed.algorithms import ALGORITHMS
from polyfed.data import ClientsSpec
from polyfed.data.columns import TEST, TRAIN, Column, Columns
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.model import ModelSpec
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train

PRETRAINING, TRAINING = 600, 700
"""Digits for pre-training and for the clients; the other 497 are the test rows."""

LENGTH = 8
"""Tokens of a caption."""

SOURCE, TARGET = (0.5, 0.3), (0.8, 0.6)
"""For pre-training and for the clients: the share of a caption's words that are drawn at random, and the deviation of
the noise on pixels, whose values are from 0 to 1."""

RATES, SEEDS, TUNED_ON = (1e-3, 3e-3, 1e-2, 3e-2), (1, 2, 3), 0
TARGETS = {"text": ["q_proj", "v_proj", "fc1"], "image": ["q_proj", "v_proj", "fc1"]}
MIXED = [8, 4, 2, 2]


@dataclass(frozen=True)
class Method:
    """What is trained: everything, adapters of a rank, or only the linear maps and the head (`rank = 0`)."""

    name: str
    rank: int | None
    ranks: list[int] | None = None
    aggregate: str = "mean"


METHODS = (
    Method("full fine-tuning", None),
    Method("frozen towers", 0),
    Method("LoRA, rank 2", 2),
    Method("LoRA, rank 4", 4),
    Method("LoRA, rank 8", 8),
    Method("rank 8, hetlora", 8, None, "hetlora"),
    Method("rank 8, flexlora", 8, None, "flexlora"),
    Method("ranks 8, 4, 2, 2, mean", 8, MIXED),
    Method("ranks 8, 4, 2, 2, hetlora", 8, MIXED, "hetlora"),
    Method("ranks 8, 4, 2, 2, flexlora", 8, MIXED, "flexlora"),
)


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """All digits in a random order: images (N, 1, 16, 16) with values from 0 to 1, and labels."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    order = torch.randperm(len(scans.target), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(scans.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    return torch.nn.functional.interpolate(x, size=(16, 16)), torch.tensor(scans.target)[order]


def noisy(x: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Images with noise and three equal channels."""
    return (x + noise * torch.randn(x.shape, generator=generator)).expand(-1, 3, -1, -1).contiguous()


def captions(y: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Tokens (N, LENGTH): 2, words from 4 to 33, 3. Three words belong to each digit."""
    own = 4 + 3 * y.unsqueeze(1) + torch.randint(0, 3, (len(y), LENGTH - 2), generator=generator)
    other = torch.randint(4, 34, own.shape, generator=generator)
    words = torch.where(torch.rand(own.shape, generator=generator) < noise, other, own)
    ends = torch.ones(len(y), 1, dtype=torch.int64)
    return torch.cat([2 * ends, words, 3 * ends], 1)


@dataclass(frozen=True)
class RotatedDigits:
    """The clients' digits: images rotated by a quarter turn, and captions whose words belong to the next digit."""

    seed: int

    def load(self) -> Columns:
        x, y = digits(0)
        x, y = x[PRETRAINING:].rot90(1, (2, 3)), y[PRETRAINING:]
        draw = torch.Generator().manual_seed(1000 + self.seed)
        split = torch.full((len(y),), TEST, dtype=torch.int8)
        split[:TRAINING] = TRAIN
        values = {"text": captions((y + 1) % 10, TARGET[0], draw).float(), "image": noisy(x, TARGET[1], draw)}
        columns = {name: Column(value) for name, value in values.items()}
        return Columns("rotated digits", columns, y, 10, split, torch.arange(len(y)))


def pretrained(folder: Path, steps: int = 1500) -> Path:
    """Train a CLIP with its own loss on images and captions, and save it. A batch has ten different digits."""
    from transformers import CLIPConfig, CLIPModel

    if (folder / "config.json").exists():
        return folder
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    words = small | {"vocab_size": 34, "max_position_embeddings": LENGTH, "pad_token_id": 1}
    words |= {"bos_token_id": 2, "eos_token_id": 3, "projection_dim": 16}
    pictures = small | {"image_size": 16, "patch_size": 4, "projection_dim": 16}
    torch.manual_seed(0)
    net = CLIPModel(CLIPConfig(text_config=words, vision_config=pictures, projection_dim=16)).train()
    x, y = digits(0)
    x, y = x[:PRETRAINING], y[:PRETRAINING]
    draw = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(steps):
        rows = torch.stack([of[torch.randint(len(of), (1,), generator=draw)][0] for of in map(rows_of(y), range(10))])
        ids = captions(y[rows], SOURCE[0], draw)
        loss = net(input_ids=ids, pixel_values=noisy(x[rows], SOURCE[1], draw), return_loss=True).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 250 == 0:
            print(f"pre-training, step {step}: loss {float(loss.detach()):.3f}", flush=True)
    net.save_pretrained(folder)
    return folder


def rows_of(y: Tensor) -> Any:
    """A function from a class to the rows of this class."""
    return lambda label: (y == label).nonzero().flatten()


def recipe(method: Method, path: Path, seed: int, lr: float, rounds: int) -> Recipe:
    """Twelve clients (Dirichlet 0.5), all of them in every round, two epochs of Adam."""
    entry: dict[str, Any] = {"kind": "hf", "path": str(path), "frozen": method.rank is not None}
    encoders = {
        m: entry
        | ({"lora": {"r": method.rank, "alpha": 2 * method.rank, "target_modules": targets}} if method.rank else {})
        for m, targets in TARGETS.items()
    }
    algorithm = ALGORITHMS["fedavg"](
        selector=Uniform(),
        train=Train(optimiser="adam", lr=lr, epochs=2, batch_size=32),
        server=ServerOptimiser(aggregate=method.aggregate),  # type: ignore[arg-type]
        evaluation=Evaluation(every=0),
    )
    return Recipe(
        data=RotatedDigits(seed),
        algorithm=algorithm,
        model=ModelSpec(embedding=16, encoders=encoders),
        clients=ClientsSpec(partition="dirichlet", num=12, alpha=0.5, min_size=10, ranks=method.ranks),
        seed=seed,
        rounds=rounds,
        engine=EngineSpec(name="sequential", workers=1),
    )


def measured(made: Recipe) -> dict[str, float]:
    """Accuracy in % on the test rows after the last round, and the bytes of all messages."""
    result = polyfed.run(made).result
    return {"accuracy": 100 * result["metrics"]["global"]["accuracy"], "up": result["bytes_up"]}


def tuned(method: Method, path: Path, rounds: int) -> float:
    """The learning rate with the best accuracy on a fifth of the clients' rows, with seed 0; no test rows are used."""
    scores = {}
    for lr in RATES:
        made = recipe(method, path, TUNED_ON, lr, rounds)
        made = replace(made, clients=replace(made.clients, validation=0.2, measure_on="validation"))
        scores[lr] = measured(made)["accuracy"]
    return max(scores, key=scores.__getitem__)


def line(name: str, rows: list[dict[str, float]], lr: float, full: list[dict[str, float]], per_round: float) -> str:
    """A row of the table: mean and deviation, the paired differences to full fine-tuning, bytes."""
    accuracy = [row["accuracy"] for row in rows]
    apart = [row["accuracy"] - other["accuracy"] for row, other in zip(rows, full, strict=True)]
    shown = ", ".join(f"{value:+.1f}" for value in apart)
    spread = f"{statistics.mean(accuracy):.1f} ± {statistics.stdev(accuracy):.1f}"
    return f"| {name} | {lr:g} | {spread} | {shown} | {per_round:,.0f} | {rows[0]['up'] / full[0]['up']:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path, notes = pretrained(options.folder / "clip"), options.folder / "rows.json"
    found: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {}
    for method in METHODS:
        if method.name in found:
            continue
        lr = tuned(method, path, options.rounds)
        rows = [measured(recipe(method, path, seed, lr, options.rounds)) for seed in SEEDS]
        found[method.name] = {"lr": lr, "rows": rows}
        notes.write_text(json.dumps(found))
        print(method.name, lr, [round(row["accuracy"], 1) for row in rows], flush=True)
    full = found[METHODS[0].name]["rows"]
    print(f"{platform.machine()}, {os.cpu_count()} cores, PyTorch {torch.__version__}, {options.rounds} rounds\n")
    for method in METHODS:
        rows = found[method.name]["rows"]
        print(line(method.name, rows, found[method.name]["lr"], full, rows[0]["up"] / options.rounds / 12))


if __name__ == "__main__":
    main()
