"""Forward and backward pass of a layer for several clients: a loop over the clients against stacked operations.

    python benchmarks/stacked_layers.py [--repeats 15]

One thread. The shapes are those of the recipes (CG-MNIST's cnn4, UCI-HAR's convolutions and GRU, attention fusion).
Times are processor time, so other programs on the machine change them little. Ways to stack a convolution:

- `vmap`: `torch.func.vmap` of the loop's code, which makes one grouped convolution for all clients.
- `grouped`: the same grouped convolution with PyTorch's autograd, without `vmap`.
- `im2col`: `unfold` copies every patch of the input to a column, and `baddbmm` multiplies.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import conv1d, conv2d, unfold

from polyfed.core import keys
from polyfed.model.modules.layers import GRU, Attention

Way = Callable[[], object]


@dataclass(frozen=True)
class Conv:
    """A convolution of a recipe: channels, kernel, stride, side of the input (time steps if `time`), rows, clients."""

    name: str
    before: int
    after: int
    kernel: int
    stride: int
    side: int
    rows: int
    clients: int
    time: bool = False
    first: bool = False  # the first layer needs no gradient of its input

    def ways(self) -> dict[str, Way]:
        """The passes to compare."""
        shape = (self.side,) if self.time else (self.side, self.side)
        kernel = (self.kernel,) * len(shape)
        x = keys.normal(1, (self.clients, self.rows, self.before, *shape)).requires_grad_(not self.first)
        w = keys.normal(2, (self.clients, self.after, self.before, *kernel)).requires_grad_()
        bias = keys.normal(3, (self.clients, self.after)).requires_grad_()
        conv, options = (conv1d if self.time else conv2d), {"stride": self.stride, "padding": self.kernel // 2}
        given = [t for t in (x, w, bias) if t.requires_grad]

        def loop() -> list[tuple[Tensor, ...]]:
            alone = [[t[k].detach().requires_grad_(t.requires_grad) for t in (x, w, bias)] for k in range(self.clients)]
            return [
                torch.autograd.grad(conv(*one, **options).square().sum(), [t for t in one if t.requires_grad])
                for one in alone
            ]

        def value(*args: Tensor) -> Tensor:
            return conv(*args, **options).square().sum()

        with_vmap = vmap(grad(value, argnums=(1, 2) if self.first else (0, 1, 2)))

        def grouped() -> tuple[Tensor, ...]:
            together = x.transpose(0, 1).reshape(self.rows, self.clients * self.before, *shape)
            out = conv(together, w.flatten(0, 1), bias.flatten(), groups=self.clients, **options)
            return torch.autograd.grad(out.square().sum(), given)

        def im2col() -> tuple[Tensor, ...]:
            flat = x.flatten(0, 1).unsqueeze(2) if self.time else x.flatten(0, 1)
            kernels, padding = (
                ((1, self.kernel), (0, self.kernel // 2)) if self.time else (self.kernel, self.kernel // 2)
            )
            stride = (1, self.stride) if self.time else self.stride
            columns = unfold(flat, kernels, padding=padding, stride=stride)
            # (clients, patches, entries of a patch) times (clients, entries, channels)
            patches = columns.unflatten(0, (self.clients, self.rows)).transpose(2, 3).flatten(1, 2)
            out = torch.baddbmm(bias.unsqueeze(1), patches, w.flatten(2).transpose(1, 2))
            return torch.autograd.grad(out.square().sum(), given)

        return {"loop": loop, "vmap": lambda: with_vmap(x, w, bias), "grouped": grouped, "im2col": im2col}


@dataclass(frozen=True)
class Module:
    """A layer with weights of its own for each client, on samples of a shape."""

    name: str
    make: Callable[[], nn.Module]
    fused: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int
    clients: int

    def ways(self) -> dict[str, Way]:
        """The passes to compare. `fused` is a loop with PyTorch's own layer."""
        module, fused = self.make(), self.fused()
        x = keys.normal(1, (self.clients, self.rows, *self.shape))
        params = {name: value.detach() for name, value in module.named_parameters()}
        stack = {name: value.expand(self.clients, *value.shape).clone() for name, value in params.items()}

        def value(w: dict[str, Tensor], rows: Tensor) -> Tensor:
            given = (rows,) * (3 if isinstance(module, nn.MultiheadAttention) else 1)
            return functional_call(module, w, given)[0].square().sum()

        def passes(layer: nn.Module) -> None:
            for k in range(self.clients):
                given = (x[k],) * (3 if isinstance(layer, nn.MultiheadAttention) else 1)
                torch.autograd.grad(layer(*given)[0].square().sum(), list(layer.parameters()))

        stacked = vmap(grad(value))
        return {"loop": lambda: passes(module), "vmap": lambda: stacked(stack, x), "fused": lambda: passes(fused)}


def attention() -> nn.MultiheadAttention:
    """Self-attention over an embedding of 128 with four heads."""
    return nn.MultiheadAttention(128, 4, batch_first=True)


def gru() -> nn.GRU:
    """UCI-HAR's GRU."""
    return nn.GRU(128, 128, batch_first=True)


CNN4 = ((1, 32, 5, 1, 28), (32, 32, 3, 1, 14), (32, 64, 3, 2, 14), (64, 64, 3, 1, 7))
CONV_GRU = ((3, 32, 5, 1, 128), (32, 64, 5, 1, 64), (64, 128, 5, 1, 32))

CASES: list[Conv | Module] = [
    *(Conv(f"cnn4 {i}, 64 rows", *of, 64, 6, first=i == 1) for i, of in enumerate(CNN4, 1)),
    *(Conv(f"cnn4 {i}, 16 rows", *of, 16, 6, first=i == 1) for i, of in enumerate(CNN4, 1)),
    *(
        Conv(f"cnn4 {i}, 8 x 8, 16 rows", *of[:4], -(-of[4] * 8 // 28), 16, 20, first=i == 1)
        for i, of in enumerate(CNN4, 1)
    ),
    *(Conv(f"conv-gru {i}, 16 rows", *of, 16, 10, time=True, first=i == 1) for i, of in enumerate(CONV_GRU, 1)),
    Module("GRU 128, 16 steps, 16 rows", lambda: GRU(gru()), gru, (16, 128), 16, 10),
    Module("GRU 128, 16 steps, 4 rows", lambda: GRU(gru()), gru, (16, 128), 4, 40),
    Module("attention 128, 32 steps, 16 rows", lambda: Attention(attention()), attention, (32, 128), 16, 10),
    Module("attention 128, 32 steps, 4 rows", lambda: Attention(attention()), attention, (32, 128), 4, 40),
]


def milliseconds(ways: dict[str, Way], repeats: int) -> dict[str, float]:
    """The median processor time of each way; the ways take turns."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 2):
        for name, way in ways.items():
            started = time.process_time()
            way()
            if number > 1:
                taken[name].append(time.process_time() - started)
    return {name: 1e3 * statistics.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("vmap", "grouped", "im2col", "fused")
    print(f"| layer | clients | loop ms | {' | '.join(columns)} |")
    print("|---|---:|---:|" + "---:|" * len(columns))
    for case in CASES:
        found = milliseconds(case.ways(), options.repeats)
        shown = [f"{found['loop'] / found[name]:.2f}" if name in found else "" for name in columns]
        print(f"| {case.name} | {case.clients} | {found['loop']:.1f} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
