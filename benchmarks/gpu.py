"""All that a GPU must show, most important first: tests, parity, resume, speed, `torch.compile`.

    sh benchmarks/gpu.sh [--seconds 600] [--pretend] [--resume] [--only TEXT] [--out FOLDER]

Every item runs in a child process with a time limit of its own. After each item, the results are in gpu.json and
gpu.md, so the script may be stopped at any time; it stops by itself after `--seconds`, and `--resume` continues with
the items that are missing or failed. An item that fails, hangs or kills its process is listed with the reason, and the
next item runs in a new process. Items that measure no time run beside each other.

With `--pretend`, everything runs on the CPU, with smaller models and fewer clients, so that no minute of a GPU is lost
to a mistake in this script. The page then says so.
"""

import argparse
import contextlib
import gc
import importlib.machinery
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"

GPU, CPU = torch.device("cuda"), torch.device("cpu")

TESTS = "tests/engines/test_cuda.py"

Facts = dict[str, Any]
Tell = Callable[[Facts], None]
"""Called with the facts that an item has so far; they count if the item is stopped."""


# ---------------------------------------------------------------- models


class ResNet18(nn.Module):
    """ResNet-18 for small images: a 3 x 3 stem, and two blocks for each of four widths.

    Args:
        shape: (C, H, W) of an image.
        embedding: width of the output.
        width: channels of the first blocks.
    """

    def __init__(self, shape: tuple[int, ...], embedding: int, width: int = 64) -> None:
        super().__init__()
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        layers: list[nn.Module] = [_convolution(shape[0], width, 3), nn.ReLU()]
        for place in range(4):
            layers += [
                _Block(widths[place], widths[place + 1], 1 + (place > 0)),
                _Block(widths[place + 1], widths[place + 1]),
            ]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], embedding))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, E)."""
        return self.layers(x)  # type: ignore[no-any-return]


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class _Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.main = nn.Sequential(
            _convolution(inputs, outputs, 3, stride), nn.ReLU(), _convolution(outputs, outputs, 3)
        )
        self.short = nn.Identity() if inputs == outputs else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.main(x) + self.short(x))


class LowRank(nn.Module):
    """A frozen linear layer and its trained update of rank 8."""

    def __init__(self, width: int, rank: int = 8) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class LoraTransformer(nn.Module):
    """A frozen transformer of 12 layers; the maps to queries and values have trained updates of rank 8.

    Args:
        shape: (T, F), the length of a sequence and the features of a token.
        embedding: width of the output.
        width: width of the layers.
    """

    def __init__(self, shape: tuple[int, ...], embedding: int, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Linear(shape[1], width).requires_grad_(False)
        self.layers = nn.Sequential(*(_Layer(width) for _ in range(12)))
        self.last = nn.Linear(width, embedding)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, F) -> (B, E)."""
        return self.last(self.layers(self.first(x)).mean(1))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    """One layer, with the norms before attention and feed-forward network."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width).requires_grad_(False) for _ in range(2))
        self.query, self.value = LowRank(width), LowRank(width)
        self.key, self.out = (nn.Linear(width, width).requires_grad_(False) for _ in range(2))
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.wide.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(normed), self.key(normed), self.value(normed))
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.wide(self.norms[1](x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A model, and the data of its clients.

    Attributes:
        shapes: shape of a sample of each modality.
        kind: `mlp`, or the name of a class of this file.
        options: arguments of the encoder.
        rows: samples of each client.
    """

    name: str
    shapes: dict[str, tuple[int, ...]]
    kind: str
    options: dict[str, Any]
    embedding: int
    classes: int
    rows: int
    lr: float = 0.1
    batch_size: int = 16

    def encoder(self, shape: tuple[int, ...]) -> nn.Module:
        """Make the encoder of a modality in plain PyTorch."""
        if self.kind == "mlp":
            hidden = self.options["hidden"][0]
            return nn.Sequential(nn.Linear(shape[0], hidden), nn.ReLU(), nn.Linear(hidden, self.embedding))
        made: nn.Module = globals()[self.kind](shape, self.embedding, **self.options)
        return made


SMALL = Case("small", {"a": (74,), "b": (300,)}, "mlp", {"hidden": [32]}, 16, 7, 96)
FOOD = Case("food", {"a": (1280,), "b": (768,)}, "mlp", {"hidden": [128]}, 64, 101, 288)
RESNET = Case("resnet-18", {"a": (3, 32, 32)}, "ResNet18", {}, 128, 10, 32, lr=0.01)
LORA = Case("12 layers, LoRA", {"a": (64, 32)}, "LoraTransformer", {}, 64, 10, 32, lr=0.01)

CASES = {case.name: case for case in (SMALL, FOOD, RESNET, LORA)}

PRETENDED = {
    case.name: case
    for case in (
        replace(SMALL, rows=32),
        replace(FOOD, rows=16),
        replace(RESNET, shapes={"a": (3, 8, 8)}, options={"width": 4}, rows=16),
        replace(LORA, shapes={"a": (8, 16)}, options={"width": 16}, rows=16),
    )
}

POOL = 200
"""Clients with rows of their own. Further clients have the same rows again: they change no time."""


class Net(nn.Module):
    """The network in plain PyTorch: an encoder for each modality, and one linear layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({name: case.encoder(shape) for name, shape in case.shapes.items()})
        self.head = nn.Linear(len(case.shapes) * case.embedding, case.classes)

    def forward(self, *samples: Tensor) -> Tensor:
        """Logits (B, C)."""
        encoded = [encoder(x) for encoder, x in zip(self.encoders.values(), samples, strict=True)]
        return self.head(torch.cat(encoded, 1))  # type: ignore[no-any-return]


def table(case: Case, clients: int) -> tuple[list[Tensor], Tensor]:
    """Draw samples of each modality, (n, *shape), and labels (n,), for the clients of the pool."""
    n = min(clients, POOL) * case.rows
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(n, *shape, generator=draw) for shape in case.shapes.values()], torch.randint(
        case.classes, (n,), generator=draw
    )


# ---------------------------------------------------------------- programs that run rounds


class Polyfed:
    """Rounds of federated averaging on an engine of polyfed. All clients take part."""

    def __init__(self, case: Case, clients: int, engine: str, device: torch.device, **changes: Any) -> None:
        from polyfed.algorithms import ALGORITHMS
        from polyfed.core import keys
        from polyfed.data import Population
        from polyfed.data.columns import Column, Columns
        from polyfed.data.partitions.shards import Shards
        from polyfed.engines import Sequential, Vectorised
        from polyfed.federation.federation import Federation
        from polyfed.model import ModelSpec, build_model
        from polyfed.privacy.egress.ledger import Ledger
        from polyfed.privacy.egress.policy import Policy
        from polyfed.selection import Uniform
        from polyfed.training.optimisers import Train

        x, y = table(case, clients)
        n, none = len(y), torch.zeros(0, dtype=torch.int64)
        names = list(case.shapes)
        columns = Columns(
            name=case.name,
            modalities={name: Column(values) for name, values in zip(names, x, strict=True)},
            label=y,
            num_classes=case.classes,
            split=torch.zeros(n, dtype=torch.int8),
            ids=torch.arange(n),
        )
        people = Population(
            columns=columns,
            train=Shards(torch.arange(clients + 1) * case.rows, torch.arange(clients * case.rows) % n),
            test=None,
            holds=torch.ones(clients, len(names), dtype=torch.bool),
            silo=None,
            test_rows=none,
            validation_rows=none,
        )
        encoder = {"kind": case.kind if case.kind == "mlp" else f"gpu:{case.kind}", **case.options}
        spec = ModelSpec(encoders=dict.fromkeys(names, encoder), embedding=case.embedding)
        net = build_model(spec, case.shapes, case.classes, key=keys.key(1, "init"))
        self.looped: list[str] = []
        self.ledger = Ledger("gpu")
        algorithm = ALGORITHMS["fedavg"](
            train=Train(lr=case.lr, batch_size=case.batch_size, **changes), selector=Uniform(participation=clients)
        )
        first = {name: value.to(device) for name, value in net.init(keys.key(1, "init")).items()}
        runner = {"sequential": Sequential, "vectorised": Vectorised}[engine](
            people,
            net,
            algorithm,
            first,
            policy=Policy(),
            ledger=self.ledger,
            device=device,
            threads=0 if device.type == "cuda" else 1,
            emit=lambda name, **facts: self.looped.append(facts["reason"]) if name == "looped" else None,
        )
        self.fed = Federation(runner.registry, runner, algorithm, runner.context(-1), first, seed=1, rounds=1_000_000)
        self.algorithm, self.state = algorithm, algorithm.init(self.fed, first)
        self.fed.begin(100)  # late enough that the rule for short local trainings uses programs at once

    def round(self) -> None:
        self.fed.begin(self.fed.round + 1)
        self.state = self.algorithm.round(self.state, self.fed)
        self.ledger.drain()


class Bare:
    """Federated averaging in plain PyTorch, with all rows on the device."""

    def __init__(self, case: Case, clients: int, device: torch.device, precision: str) -> None:
        x, y = table(case, clients)
        self.columns, self.case, self.clients = [t.to(device) for t in (*x, y)], case, clients
        self.lower = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
        torch.manual_seed(1)  # a benchmark may use the global generator; the package never does
        self.net = Net(case).to(device)
        trained = [p for p in self.net.parameters() if p.requires_grad]
        self.averaged = [*trained, *(b for b in self.net.buffers() if b.is_floating_point())]
        self.weights = [value.detach().clone() for value in self.averaged]
        self.optimiser = torch.optim.SGD(trained, lr=case.lr)

    def round(self) -> None:
        mean = [torch.zeros_like(weight) for weight in self.weights]
        for client in range(self.clients):
            self.train(client)
            with torch.no_grad():
                for total, value in zip(mean, self.averaged, strict=True):
                    total.add_(value, alpha=1 / self.clients)
        self.weights = mean

    def train(self, client: int) -> None:
        """One epoch of SGD from the global model."""
        with torch.no_grad():
            for value, weight in zip(self.averaged, self.weights, strict=True):
                value.copy_(weight)
        start = client % POOL * self.case.rows
        order = torch.randperm(self.case.rows, device=self.columns[0].device)
        *x, y = (column[start : start + self.case.rows].index_select(0, order) for column in self.columns)
        for first in range(0, self.case.rows, self.case.batch_size):
            rows = slice(first, first + self.case.batch_size)
            with self.lower:
                loss = nn.functional.cross_entropy(self.net(*(column[rows] for column in x)), y[rows])
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()


class _Unused(importlib.machinery.PathFinder):
    """Imports empty modules for packages that pfl needs only for differential privacy: SciPy alone is 35 MB."""

    names = ("scipy", "dp_accounting", "prv_accountant", "multiprocess", "dill")

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:  # type: ignore[override]
        return importlib.machinery.ModuleSpec(name, cls()) if name.split(".")[0] in cls.names else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        return MagicMock(__name__=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module: Any) -> None:
        """Leave the module empty."""


def pfl_rounds(case: Case, clients: int, device: torch.device, timed: "Rounds") -> None:
    """Run pfl's FederatedAveraging with the simulated backend, as its tutorials do, until `timed` has enough rounds."""
    os.environ["PFL_PYTORCH_DEVICE"] = str(device)
    multiprocessing.current_process().name = "MainProcess"  # in any other process, pfl has no backend
    sys.meta_path.append(_Unused)  # type: ignore[arg-type]
    import numpy as np
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Trained(Net):
        def loss(self, *batch: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self(*batch[:-1]), batch[-1])

        def metrics(self, *_: Any) -> dict[str, Any]:
            return {}

    class Paced(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int) -> Any:
            return timed.next(), Metrics()

    x, y = table(case, clients)
    columns = [t.to(device) for t in (*x, y)]

    def dataset(client: int) -> PyTorchTensorDataset:
        start = client % POOL * case.rows
        order = torch.randperm(case.rows, device=device)
        own = (column[start : start + case.rows].index_select(0, order) for column in columns)
        return PyTorchTensorDataset(tuple(own), user_id=str(client))

    np.random.seed(1)  # noqa: NPY002 (pfl samples from the global generator)
    data, net = FederatedDataset(dataset, get_user_sampler("random", list(range(clients)))), Trained(case)
    central = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1.0)
    numbers = {"central_num_iterations": 1_000_000, "evaluation_frequency": 1_000_000}
    timed.start()
    FederatedAveraging().run(
        NNAlgorithmParams(**numbers, train_cohort_size=clients, val_cohort_size=None),
        SimulatedBackend(training_data=data, val_data=data),
        PyTorchModel(model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=central),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=case.lr, local_batch_size=case.batch_size),
        callbacks=[Paced()],
    )


class Rounds:
    """Times rounds until there are enough of them or the time is up. The first `warm` rounds do not count."""

    def __init__(self, device: torch.device, budget: float, most: int = 8, warm: int = 2) -> None:
        self.device, self.budget, self.most, self.warm = device, budget, most, warm
        self.all: list[float] = []

    def start(self) -> None:
        _wait_for(self.device)
        self.began = self.last = time.perf_counter()

    def next(self) -> bool:
        """End a round. Returns whether it was the last one."""
        _wait_for(self.device)
        now = time.perf_counter()
        self.all.append(now - self.last)
        self.last = now
        spent, counted = now - self.began, len(self.all) - self.warm
        return counted >= self.most or spent > (self.budget if counted > 0 else 3 * self.budget)

    def facts(self) -> Facts:
        """The median of the counted rounds; the last round if all of them belong to the warm-up (`rounds` is 0)."""
        counted = self.all[self.warm :]
        return {"seconds": statistics.median(counted or self.all[-1:]), "rounds": len(counted)}


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------- items, which run in the child process


def machine(tell: Tell, *, device: str) -> None:
    """Name the machine."""
    facts: Facts = {
        "processor": next(
            (
                line.partition(":")[2].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if "model name" in line
            ),
            platform.machine(),
        ),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        facts |= {"gpu": found.name, "capability": f"{found.major}.{found.minor}"}
        facts |= {"memory_gib": round(found.total_memory / 2**30, 1)}
    tell(facts)


def tests(tell: Tell, *, device: str) -> None:
    """Run tests/engines/test_cuda.py, on several processes if pytest-xdist and the cores are there."""
    cores = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "pytest", str(HERE / TESTS), "-vv", "-rf", "--tb=short"]
    command += ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "xdist", "-p", "pytest_timeout"]
    command += ["-n", str(min(8, cores) if cores > 3 else 0)]
    command += ["-k", "not trains_the_same or fedavg or hfm"]  # `parity` has every method
    environment = os.environ | ({"POLYFED_PRETEND_GPU": "1"} if device == "cpu" else {})
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plug-ins of this machine may refuse our settings
    counts = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    failures: list[str] = []
    with subprocess.Popen(command, env=environment, cwd=HERE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            if line.startswith(("FAILED ", "ERROR ")):
                failures.append(line.strip()[:400])
            elif found := re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b", line):
                counts[found[1].lower()] += 1
            tell({**counts, "failures": failures})
    tell({**counts, "failures": failures})
    assert running.returncode == 0 or failures, f"pytest ended with exit status {running.returncode}"


def parity(tell: Tell, *, method: str, device: str) -> None:
    """Compare a method on this device with the same method on the CPU: the largest relative difference."""
    from laws.rows import ROWS
    from laws.test_laws import params, world
    from world import AWKWARD, PLAIN, furthest, played

    facts: Facts = {"tolerance": ROWS[method].tolerance}
    with torch.backends.cudnn.flags(allow_tf32=False):
        for engine in ("sequential", "vectorised"):
            for name, encoders in (("plain", PLAIN), ("BatchNorm and dropout", AWKWARD)):
                made = replace(world(method, engine, encoders), rounds=2)
                here, state, ledger = played(made)
                there, moved, booked = played(_on(made, device))
                local = [furthest(tree, _near(there.engine.locals[c])) for c, tree in here.engine.locals.items()]
                facts[f"{engine}, {name}"] = {
                    "model": furthest(params(state), _near(params(moved))),
                    "local_states": max(local, default=0.0),
                    "ledgers_equal": ledger == booked,
                }
                tell(facts)
    cells = [fact for fact in facts.values() if isinstance(fact, dict)]
    apart = max(max(cell["model"], cell["local_states"] / 10) for cell in cells)
    if apart > 10 * facts["tolerance"] or not all(cell["ledgers_equal"] for cell in cells):
        raise AssertionError(f"the GPU differs from the CPU by {apart:.1e}; allowed: {10 * facts['tolerance']:.0e}")


def _on(made: Any, device: str) -> Any:
    return replace(made, engine=replace(made.engine, device=device, debug=True, workers=1))


def _near(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in tree.items()}


def resume(tell: Tell, *, method: str, engine: str, device: str) -> None:
    """Compare a run that continued from its checkpoint with the uninterrupted run, bit for bit."""
    from laws.test_laws import world
    from polyfed.data.sources import Toy
    from polyfed.start import run
    from world import AWKWARD

    if method == "convolutions":
        made = world("fedavg", engine, {"a": {"kind": "cnn4"}, "b": {"kind": "conv-gru"}})
        made = replace(made, data=Toy(rows=330, classes=4, shapes={"a": (1, 16, 16), "b": (32, 6)}))
    else:
        made = world(method, engine, AWKWARD)
    made = _on(replace(made, rounds=3), device)
    silent = patch("polyfed.experiment.running.loop.write_report")
    with silent, tempfile.TemporaryDirectory() as folder:
        whole = run(made, Path(folder, "whole"))
        run(replace(made, rounds=1), Path(folder, "parts"))
        continued = run(made, Path(folder, "parts"), resume=True)
    tell({"equal": continued.result["state_sha256"] == whole.result["state_sha256"]})


def speed(tell: Tell, *, case: str, clients: int, precision: str, program: str, budget: float, device: str) -> None:
    """Time rounds of one program."""
    from polyfed.engines.machine.gpu import deterministic

    place, what = torch.device(device), (PRETENDED if device == "cpu" else CASES)[case]
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    timed, facts, looped = Rounds(place, budget), Facts(), list[str]()
    if program == "pfl":
        pfl_rounds(what, clients, place, timed)
    else:
        lower = {"precision": "bf16"} if precision == "bf16" else {}
        made: Bare | Polyfed
        if program == "bare loop":
            made = Bare(what, clients, place, precision)
        else:
            made = Polyfed(what, clients, program, place, **lower)
            looped = made.looped
        with deterministic(place) if isinstance(made, Polyfed) else contextlib.nullcontext():
            timed.start()
            while True:
                made.round()
                if timed.next():
                    break
    facts = timed.facts() | ({"looped": looped} if looped else {})
    if device == "cuda":
        facts["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    tell(facts | {"parameters": sum(p.numel() for p in Net(what).parameters() if p.requires_grad)})


def compiled(tell: Tell, *, case: str, clients: int, device: str) -> None:
    """Time a step of a stack: of polyfed, and a plain one with and without `torch.compile`.

    The steps of polyfed are the difference of two rounds with 3 and 12 epochs, so that what a round costs beside its
    steps does not count.
    """
    place, what = torch.device(device), (PRETENDED if device == "cpu" else CASES)[case]
    rounds = []
    for epochs in (3, 12):
        made = Polyfed(what, clients, "vectorised", place, epochs=epochs)
        timed = Rounds(place, 10.0, most=5)
        timed.start()
        while True:
            made.round()
            if timed.next():
                break
        rounds.append(timed.facts()["seconds"])
    facts = {"polyfed": (rounds[1] - rounds[0]) / (9 * what.rows / what.batch_size)}
    tell(facts)
    step, state, batches = stacked_step(what, clients, place)
    for name, function in (("plain vmap", step), ("torch.compile", torch.compile(step))):
        began = time.perf_counter()
        values = function(state, *batches)
        _wait_for(place)
        if name == "torch.compile":
            facts["seconds to compile"] = time.perf_counter() - began
        timed = Rounds(place, 5.0, most=30)
        timed.start()
        while True:
            values = function(values, *batches)
            if timed.next():
                break
        facts[name] = timed.facts()["seconds"]
        tell(facts)


def stacked_step(case: Case, clients: int, device: torch.device) -> tuple[Callable[..., Any], Any, list[Tensor]]:
    """Return a step of SGD of all clients at once, its first state, and one batch of each client."""
    net = Net(case).to(device)
    names = {name for name, value in net.named_parameters() if value.requires_grad}
    fixed = {k: v for k, v in [*net.named_parameters(), *net.named_buffers()] if k not in names}
    x, y = table(case, clients)
    start = torch.arange(clients).unsqueeze(1) % POOL * case.rows + torch.arange(case.batch_size)
    batches = [column[start].to(device) for column in (*x, y)]

    def loss(trained: dict[str, Tensor], *batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(net, trained | fixed, batch[:-1]), batch[-1])

    def one(trained: dict[str, Tensor], *batch: Tensor) -> dict[str, Tensor]:
        slopes = torch.func.grad(loss)(trained, *batch)
        return {name: value - case.lr * slopes[name] for name, value in trained.items()}

    state = {k: v.detach().expand(clients, *v.shape).clone() for k, v in net.named_parameters() if k in names}
    return torch.func.vmap(one), state, batches


def misbehave(tell: Tell, *, how: str, device: str) -> None:
    """Fail, hang or die, for the tests of this script."""
    tell({"so far": 1})
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(1000)
    raise ValueError("it failed on purpose")


CALLS: dict[str, Callable[..., None]] = {
    call.__name__: call for call in (machine, tests, parity, resume, speed, compiled, misbehave)
}


@dataclass(frozen=True)
class Item:
    """One thing to find out: a function of `CALLS`, its arguments, and the seconds that it may take."""

    part: str
    name: str
    call: str
    limit: float
    arguments: dict[str, Any] = field(default_factory=dict)


def serve(connection: Connection, log: str, device: str) -> None:
    """Run items in the child process until the parent ends it."""
    os.setsid()  # pytest's processes end with this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if device == "cpu":
        torch.set_num_threads(1)
    connection.send(("ready", ""))
    while True:
        item: Item = connection.recv()
        try:
            CALLS[item.call](lambda facts: connection.send(("facts", facts)), device=device, **item.arguments)
            connection.send(("done", ""))
        except Exception as error:
            traceback.print_exc()
            connection.send(("failed", f"{type(error).__name__}: {str(error).strip()[:400]}"))


# ---------------------------------------------------------------- the parent: items, limits, results


class Stopped(Exception):
    """The time is up, or somebody asked the script to stop."""


class Child:
    """The process that runs items. It is started again after an item that hung or killed it."""

    def __init__(self, log: Path, device: str) -> None:
        self.log, self.device = log, device
        self.process: Any = None

    def run(self, item: Item, seconds: float) -> tuple[Facts, str]:
        """Run an item. Returns its facts, and why it did not end well, or an empty text."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs, str(self.log), self.device), daemon=False)
            self.process.start()
            theirs.close()
            if self.connection.poll(120):  # the import of PyTorch does not count as time of the item
                self.connection.recv()
        facts, end = Facts(), time.monotonic() + seconds
        try:
            self.connection.send(item)
            while self.connection.poll(max(0.0, end - time.monotonic())):
                word, told = self.connection.recv()
                if word != "facts":
                    return facts, told
                facts = dict(told)
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            self.close()
            return facts, f"its process ended with exit status {code}"
        self.close()
        return facts, f"stopped after {seconds:.0f} s"

    def close(self) -> None:
        """End the process, and what it has started."""
        if self.process is not None:
            for end in (lambda: os.killpg(self.process.pid, signal.SIGKILL), self.process.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end()
            self.process.join()
            self.connection.close()
            self.process = None


PROGRAMS = ("polyfed vectorised", "polyfed sequential", "pfl", "bare loop")


def items(*, pretend: bool) -> Iterator[Item]:
    """All items, most important first."""
    from laws.rows import ROWS

    yield Item("machine", "machine", "machine", 60)
    yield Item("tests", TESTS, "tests", 180)
    for method in sorted(ROWS):
        yield Item("parity", method, "parity", 60, {"method": method})
    for engine in ("vectorised", "sequential"):
        for method in ("fedavg", "cmsfed", "hfm", "pfmml", "scaffold", "partialfl", "convolutions"):
            yield Item("resume", f"{method}, {engine}", "resume", 60, {"method": method, "engine": engine})
    yield from speed_items("float32", pretend=pretend)
    for case in ("small",) if pretend else ("small", "food"):
        yield Item("compile", case, "compiled", 90, {"case": case, "clients": 5 if pretend else 50})
    yield from speed_items("bf16", pretend=pretend)


def speed_items(precision: str, *, pretend: bool) -> Iterator[Item]:
    """The programs on all models, with few clients first. pfl's loop has no bfloat16."""
    cohorts, budget = ((5, 10, 20), 0.2) if pretend else ((50, 500, 5000), 2.0)
    for clients, case, program in itertools.product(cohorts, CASES, PROGRAMS):
        if program != "pfl" or precision == "float32":
            facts = {"case": case, "clients": clients, "precision": precision, "budget": budget}
            name = f"{case}, {precision}, {clients} clients, {program}"
            yield Item("speed", name, "speed", 60, facts | {"program": program.removeprefix("polyfed ")})


def runnable(todo: Sequence[Item]) -> tuple[list[Item], list[str]]:
    """Return the items whose framework is installed, and a sentence on each framework that is not."""
    if importlib.util.find_spec("pfl") is not None:
        return list(todo), []
    left = [item for item in todo if item.arguments.get("program") != "pfl"]
    return left, ["pfl is not installed here, so its column is empty."] if len(left) < len(todo) else []


@dataclass
class Results:
    """The results so far, and their two files."""

    folder: Path
    content: Facts

    def add(self, item: Item, facts: Facts, failure: str, seconds: float) -> None:
        """Note an item, and write both files."""
        entry = {"part": item.part, "name": item.name, "seconds": round(seconds, 2), "facts": facts}
        entry |= {"arguments": item.arguments} if item.part == "speed" else {}
        self.content["items"].append(entry | ({"failure": failure} if failure else {}))
        self.write()

    def write(self) -> None:
        """Write both files; a reader sees either the old or the new ones."""
        page = self.folder / "gpu.md"
        text = page.read_text() if page.exists() else f"# GPU\n\n{BEGIN}\n{END}\n"
        before, _, rest = text.partition(BEGIN)
        _, there, after = rest.partition(END)
        if not there:
            sys.exit(f"{page} has no part between {BEGIN} and {END}: add these two lines where the results belong")
        whole = {
            page: f"{before}{BEGIN}\n{page_of(self.content)}\n{END}{after}",
            self.folder / "gpu.json": json.dumps(self.content, indent=1) + "\n",
        }
        for path, content in whole.items():
            new = path.with_name(f".{path.name}.new")
            new.write_text(content)
            new.replace(path)

    def too_slow(self, item: Item) -> str:
        """Say how long a round will take if that is too long, by the rate of fewer clients; otherwise an empty text."""
        own = {key: value for key, value in item.arguments.items() if key != "clients"}
        for entry in reversed(self.content["items"]):
            args = entry.get("arguments", {})
            if {key: value for key, value in args.items() if key != "clients"} == own and "seconds" in entry["facts"]:
                seconds = entry["facts"]["seconds"] * item.arguments["clients"] / args["clients"]
                # more clients fill a GPU better, so a stack takes less time than its rate says
                if seconds > own["budget"] * (15 if own["program"] == "vectorised" else 4):
                    return f"not measured: about {seconds:.0f} s a round, by the rate of {args['clients']} clients"
                return ""
        return ""


class Runner:
    """Runs items one by one, or beside each other if they measure no time, until the time is up."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.began, self.seconds, self.pretend = time.monotonic(), options.seconds, options.pretend
        options.out.mkdir(parents=True, exist_ok=True)
        self.results = Results(options.out, _begin(options))
        log = options.out / "gpu.log"
        if not options.resume:
            log.unlink(missing_ok=True)
        count = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
        self.children = [Child(log, "cpu" if options.pretend else "cuda") for _ in range(count)]
        self.lock, self.ended = threading.Lock(), threading.Event()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.began)

    def run(self, todo: Sequence[Item]) -> str:
        """Run the items. Returns why the script ended."""
        try:
            for part, group in itertools.groupby(todo, lambda item: item.part):
                beside = part in ("parity", "resume")
                self._run_group(iter(list(group)), self.children if beside else self.children[:1])
                for child in self.children[1:] if beside else ():
                    child.close()  # so that it has no memory of the GPU while others measure
                if self.left <= 1:
                    return f"the time limit of {self.seconds:.0f} s"
        except Stopped as reason:
            return str(reason)
        finally:
            self.ended.set()
            for child in self.children:
                child.close()
        return "complete"

    def _run_group(self, items: Iterator[Item], children: Sequence["Child"]) -> None:
        def work(child: Child) -> None:
            while self.left > 1 and not self.ended.is_set():
                with self.lock:
                    item = next(items, None)
                if item is None:
                    return
                self._run_item(item, child)

        if len(children) == 1:
            return work(children[0])
        pool = ThreadPoolExecutor(len(children))
        try:
            for done in [pool.submit(work, child) for child in children]:
                done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _run_item(self, item: Item, child: "Child") -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {item.part}: {item.name}", flush=True)
        start = time.monotonic()
        text = self.results.too_slow(item) if item.part == "speed" else ""
        facts, failure = ({}, text) if text else child.run(item, min(item.limit, self.left))
        with self.lock:
            if not self.ended.is_set():
                self.results.add(item, facts, failure, time.monotonic() - start)
        if item.part == "machine":
            if failure:
                raise Stopped(f"no GPU: {failure}")
            if (before := self.results.content.setdefault("machine", facts)) != facts:
                raise Stopped(f"--resume on another machine: {facts} instead of {before}")


def _begin(options: argparse.Namespace) -> Facts:
    """What the results begin with: nothing, or with `--resume` what has been found without a failure."""
    path, kept = options.out / "gpu.json", []
    started = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    content: Facts = {"pretend": options.pretend, "started": started, "ended": "not yet"}
    if options.resume and path.exists():
        before = json.loads(path.read_text())
        if before["pretend"] != options.pretend:
            sys.exit(f"{path} has results {'of a CPU' if before['pretend'] else 'of a GPU'}: choose another --out")
        kept = [one for one in before["items"] if _is_done(one) and one["part"] != "machine"]
        content |= {"machine": before["machine"], "started": before["started"]}
    return content | {"items": kept}


def _is_done(entry: Facts) -> bool:
    return entry.get("failure", "not measured").startswith("not measured")


def run_all(options: argparse.Namespace) -> None:
    """Run the items until the time is up."""
    runner = Runner(options)
    results = runner.results
    done = {(entry["part"], entry["name"]) for entry in results.content["items"]}
    todo = [item for item in items(pretend=options.pretend) if not options.only or re.search(options.only, item.name)]
    todo = [item for item in todo if item.part == "machine" or (item.part, item.name) not in done]
    todo, absent = runnable(todo)
    results.content["absent"] = absent
    print(*absent, sep="\n", end="\n" if absent else "", flush=True)
    if options.misbehave:
        todo = [Item("tests", how, "misbehave", 2, {"how": how}) for how in ("fail", "hang", "die")] + todo

    def stop(*_: Any) -> None:
        raise Stopped("stopped from outside")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    ended = runner.run(todo)
    tried = {(entry["part"], entry["name"]) for entry in results.content["items"]}
    left_out = [item.name for item in todo if (item.part, item.name) not in tried]
    took = round(results.content.get("seconds", 0.0) + time.monotonic() - runner.began, 1)
    results.content |= {"ended": ended, "left_out": left_out, "seconds": took}
    results.write()
    print(f"{ended}; {took:.0f} s; {options.out / 'gpu.json'}")
    if ended.startswith(("no GPU", "--resume")):
        sys.exit(1)


# ---------------------------------------------------------------- the page


def page_of(content: Facts) -> str:
    """The generated part of the page."""
    by_part: dict[str, list[Facts]] = {}
    for entry in content["items"]:
        by_part.setdefault(entry["part"], []).append(entry)
    facts = content.get("machine", {})
    on = "a CPU, with smaller models and fewer clients: **these are no figures of a GPU**"
    said = ", ".join(f"{name} {value}" for name, value in facts.items())
    where = on if content["pretend"] else "a GPU"
    lines = [
        f"`benchmarks/gpu.sh` wrote this part on {content['started']}, on {where} ({said}).",
        f"It ended: {content['ended']}."
        + (f" Left out: {len(content['left_out'])} items." if content.get("left_out") else ""),
        *content.get("absent", ()),
    ]
    for part, title in PARTS.items():
        if part in by_part:
            lines += ["", f"### {title}", "", *TABLES[part](by_part[part])]
    return "\n".join(lines)


PARTS = {
    "tests": "Tests",
    "parity": "Largest relative difference from the CPU",
    "resume": "Resumed runs equal uninterrupted runs bit for bit",
    "speed": "Seconds of a round [peak memory in MiB]",
    "compile": "Milliseconds of a step of a stack",
}


def of_tests(entries: Sequence[Facts]) -> Iterator[str]:
    for entry in entries:
        facts = {key: value for key, value in entry["facts"].items() if key != "failures"}
        said = ", ".join(f"{value} {key}" for key, value in facts.items())
        yield f"- `{entry['name']}`: {said}{_failure(entry)}"
        yield from (f"    - `{text}`" for text in entry["facts"].get("failures", ()))


def of_parity(entries: Sequence[Facts]) -> Iterator[str]:
    """One row for each engine and kind of encoders, with the method that differs most."""
    yield "| engine, encoders | global model | clients' local states |"
    yield "|---|---:|---:|"
    for engine, kind in itertools.product(ENGINES, ("plain", "BatchNorm and dropout")):
        cells = {one["name"]: cell for one in entries if (cell := one["facts"].get(f"{engine}, {kind}"))}
        if cells:
            shown = []
            for part in ("model", "local_states"):
                apart, name = max((cell[part], name) for name, cell in cells.items())
                shown.append(f"{apart:.1e} ({name})")
            yield f"| {engine}, {kind} | {' | '.join(shown)} |"
    equal = sum(all(c["ledgers_equal"] for c in one["facts"].values() if isinstance(c, dict)) for one in entries)
    yield ""
    yield f"{len(entries)} methods, two rounds each; the ledgers of {equal} are equal."
    yield from (f"- {one['name']}:{_failure(one)}" for one in entries if one.get("failure"))


ENGINES = ("sequential", "vectorised")


def of_resume(entries: Sequence[Facts]) -> Iterator[str]:
    equal = sorted(one["name"] for one in entries if one["facts"].get("equal"))
    yield f"{len(equal)} of {len(entries)} runs: {'; '.join(equal)}."
    yield from (f"- {one['name']}: **differs**{_failure(one)}" for one in entries if not one["facts"].get("equal"))


def of_speed(entries: Sequence[Facts]) -> Iterator[str]:
    programs = [program.removeprefix("polyfed ") for program in PROGRAMS]
    yield f"| model | clients | precision | {' | '.join(PROGRAMS)} |"
    yield "|---|---:|---|" + "---:|" * len(PROGRAMS)
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for entry in entries:
        given, facts = entry["arguments"], entry["facts"]
        shown = f"{facts['seconds']:.4f}" if "seconds" in facts else ""
        shown += " (first rounds)" if facts.get("rounds") == 0 else ""
        shown += f" [{facts['peak_mib']:,.0f}]" if "peak_mib" in facts else ""
        shown += f" one by one: {'; '.join(facts['looped'])}" if facts.get("looped") else ""
        row = rows.setdefault((given["case"], given["clients"], given["precision"]), {})
        row[given["program"]] = shown + _failure(entry)
    for (case, clients, precision), row in rows.items():
        yield f"| {case} | {clients:,} | {precision} | {' | '.join(row.get(program, '') for program in programs)} |"
    yield ""
    yield "*About*: not measured, from the rate of fewer clients."


def of_compile(entries: Sequence[Facts]) -> Iterator[str]:
    columns = ("polyfed", "plain vmap", "torch.compile")
    yield f"| model | {' | '.join(columns)} | seconds to compile |"
    yield "|---|" + "---:|" * (len(columns) + 1)
    for entry in entries:
        facts = entry["facts"]
        cells = [f"{1e3 * facts[name]:.3f}" if name in facts else "" for name in columns]
        took = f"{facts['seconds to compile']:.1f}" if "seconds to compile" in facts else ""
        yield f"| {entry['name']} | {' | '.join(cells)} | {took}{_failure(entry)} |"


def _failure(entry: Facts) -> str:
    text = entry.get("failure", "").replace("|", "\\|").replace("\n", " ")
    if found := re.match(r"not measured: about (\d+) s", text):
        return f"*about {found[1]}*"
    return f" **{text}**" if text else ""


TABLES: dict[str, Callable[[Sequence[Facts]], Iterator[str]]] = {
    "tests": of_tests,
    "parity": of_parity,
    "resume": of_resume,
    "speed": of_speed,
    "compile": of_compile,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="the script ends after this time; default: 600")
    parser.add_argument("--pretend", action="store_true", help="run everything on the CPU, in smaller sizes")
    parser.add_argument("--resume", action="store_true", help="keep earlier results, and run what is missing or failed")
    parser.add_argument("--only", help="only items whose name matches this regular expression")
    parser.add_argument("--out", type=Path, help="folder of gpu.json, gpu.md and gpu.log; default: docs/results")
    parser.add_argument("--misbehave", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out or HERE / ("build/gpu-pretend" if options.pretend else "docs/results")
    run_all(options)


if __name__ == "__main__":
    main()
