"""Forward and backward pass of max-pooling: PyTorch's layer against polyfed's, and one training step of `cnn4`.

    python benchmarks/max_pool.py [--repeats 15]

One thread. Times are processor time, so other programs on the machine change them little.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.engines.machine.allocator import keep_freed_memory
from polyfed.model import ModelSpec, build_model
from polyfed.model.encoders.images import NormalisedInput
from polyfed.model.modules.layers import Rows
from polyfed.model.modules.max_pool import MaxPool2d

SHAPES = [(16, 16, 16), (16, 16, 64), (32, 8, 64), (32, 28, 4), (32, 28, 16), (32, 28, 64), (64, 16, 16), (64, 56, 16)]
"""Channels, side of the image, rows of the batch. The first is the smallest input that `MaxPool2d` copies."""

WINDOWS = [(2, 2, 0), (3, 2, 1)]
"""Kernel size, stride and padding of the pools in most published networks."""

TURNS = 7
"""How often each way to compute a training step has its turn, because other programs on the machine come and go."""


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The median processor time of a call."""
    times = []
    for _ in range(repeats + 2):
        start = time.process_time()
        call()
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times[2:])


def pool_ms(pool: nn.Module, x: Tensor, repeats: int) -> float:
    """The time of the forward and backward pass of a pool."""
    grad = torch.ones_like(pool(x))
    return milliseconds(lambda: torch.autograd.grad(pool(x), x, grad), repeats)


def pools(repeats: int) -> None:
    """Print the table of the pools."""
    rows = Rows()
    rows.bound = False  # as in a training step
    print("| window, stride | channels | image | rows | PyTorch ms | polyfed ms | times faster |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kernel, stride, padding in WINDOWS:
        for channels, side, size in SHAPES:
            x = keys.normal(1, (size, channels, side, side)).requires_grad_()
            plain = nn.MaxPool2d(kernel, stride, padding)
            theirs, ours = (pool_ms(pool, x, repeats) for pool in (plain, MaxPool2d(plain, rows)))
            shape = f"{kernel}, {stride} | {channels} | {side} x {side} | {size}"
            print(f"| {shape} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.1f} |")


def step_ms(channels: int, size: int, repeats: int) -> float:
    """The time of a training step of one `cnn4` on images of 28 x 28, without the update."""
    model = build_model(ModelSpec(encoders={"a": {"kind": "cnn4"}}, embedding=64), {"a": (channels, 28, 28)}, 10)
    y = torch.arange(size) % 10
    batch = Batch(x={"a": keys.normal(1, (size, channels, 28, 28))}, y=y, rows=torch.arange(size), key=1)
    with model.live(model.init(1)) as w:
        return milliseconds(lambda: cross_entropy(model.logits(w, batch), y).backward(), repeats)


def steps(repeats: int) -> None:
    """Print the table of the training steps of `cnn4` with and without each change."""
    print("\n| channels | rows | plain ms | with `MaxPool2d` | with `NormalisedInput` | with both | times faster |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    pool, norm = MaxPool2d.forward, NormalisedInput.forward
    plain_pool, plain_norm = nn.MaxPool2d.forward, nn.Sequential.forward
    ways = ((plain_pool, plain_norm), (pool, plain_norm), (plain_pool, norm), (pool, norm))
    for channels, size in ((1, 16), (3, 16), (1, 64), (3, 64)):
        found: list[list[float]] = [[] for _ in ways]
        for _ in range(TURNS):
            for way, times in zip(ways, found, strict=True):
                MaxPool2d.forward, NormalisedInput.forward = way  # type: ignore[method-assign]
                times.append(step_ms(channels, size, repeats))
        medians = [statistics.median(times) for times in found]
        figures = " | ".join(f"{ms:.1f}" for ms in medians)
        print(f"| {channels} | {size} | {figures} | {medians[0] / medians[-1]:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    pools(arguments.repeats)
    steps(arguments.repeats)
