"""Forward and backward pass of max-pooling: PyTorch's layer against polyfed's, and one training step of `cnn4`.

    python benchmarks/max_pool.py [--repeats 15]

One thread. Times are processor time, so other programs on the machine change them little.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.engines.allocator import keep_freed_memory
from polyfed.model import ModelSpec, build_model
from polyfed.model.image_encoders import NormalisedInput
from polyfed.model.layers import Rows
from polyfed.model.max_pool import MaxPool2d

SHAPES = [(16, 16, 16), (16, 16, 64), (32, 8, 64), (32, 28, 4), (32, 28, 16), (32, 28, 64), (64, 16, 16), (64, 56, 16)]
"""Channels, side of the image, rows of the batch. `MaxPool2d` copies all of them to the memory format `channels_last`,
except the first, which is the smallest input with a gain."""

WINDOWS = [(2, 2, 0), (3, 2, 1)]
"""Kernel size, stride and padding of the pools in most published networks."""


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The median processor time of a call."""
    times = []
    for _ in range(repeats + 2):
        start = time.process_time()
        call()
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times[2:])


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
            grad = torch.ones_like(plain(x))
            theirs, ours = (
                milliseconds(lambda pool=pool: torch.autograd.grad(pool(x), x, grad), repeats)  # type: ignore[misc]
                for pool in (plain, MaxPool2d(plain, rows))
            )
            image = f"{side} x {side}"
            print(
                f"| {kernel}, {stride} | {channels} | {image} | {size} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.1f} |"
            )


def steps(repeats: int) -> None:
    """Print the table of the training steps of `cnn4` with and without each change."""
    print("\n| channels | rows | plain ms | with `MaxPool2d` | with `NormalisedInput` | with both | times faster |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    ours = MaxPool2d.forward, NormalisedInput.forward
    plain = nn.MaxPool2d.forward, nn.Sequential.forward
    for channels, size in ((1, 16), (3, 16), (1, 64), (3, 64)):
        model = build_model(ModelSpec(encoders={"a": {"kind": "cnn4"}}, embedding=64), {"a": (channels, 28, 28)}, 10)
        y = torch.arange(size) % 10
        batch = Batch(x={"a": keys.normal(1, (size, channels, 28, 28))}, y=y, rows=torch.arange(size), key=1)
        found = []
        for pool, norm in ((plain[0], plain[1]), (ours[0], plain[1]), (plain[0], ours[1]), ours):
            MaxPool2d.forward, NormalisedInput.forward = pool, norm  # type: ignore[method-assign, assignment]
            with model.live(model.init(1)) as w:
                found.append(milliseconds(lambda w=w: cross_entropy(model.logits(w, batch), y).backward(), repeats))  # type: ignore[misc]
        figures = " | ".join(f"{value:.1f}" for value in found)
        print(f"| {channels} | {size} | {figures} | {found[0] / found[-1]:.2f} |")
    MaxPool2d.forward, NormalisedInput.forward = ours  # type: ignore[method-assign]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    pools(arguments.repeats)
    steps(arguments.repeats)
