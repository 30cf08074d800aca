"""Modes that see every operation: their numbers, and the import that they avoid."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polyfed.core.system.operations import SeesOperations
from polyfed.model.modules.seeded_modules import flops_of


class Reads(nn.Module):
    """Reads the output of an LSTM with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        z, _ = self.lstm(x)
        return self.attention(z, z, z)[0]


NETS = {
    "linear": (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2, bias=False)), (3, 4)),
    "conv1d": (nn.Conv1d(4, 6, 3, groups=2), (3, 4, 9)),
    "conv2d": (nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4)), (3, 2, 8, 8)),
    "transposed": (nn.ConvTranspose2d(2, 4, 3), (3, 2, 8, 8)),
    "gru": (nn.GRU(4, 8, batch_first=True), (3, 5, 4)),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 5, 8)),
    "lstm and attention": (Reads(), (3, 5, 4)),
}

UNCOUNTED = {"transformer", "lstm and attention"}
"""In evaluation mode, PyTorch computes these modules with operations for which it has no formula."""


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("training", [True, False])
def test_counts_as_pytorchs_counter(name, training):
    net, shape = NETS[name]
    net.train(training)
    x = torch.zeros(shape)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(x)
    assert flops_of(lambda: net(x)) == counter.get_total_flops()
    assert counter.get_total_flops() > 0 or (not training and name in UNCOUNTED)


def test_a_compiled_function_computes_inside_the_mode():
    class Counts(SeesOperations):
        def __init__(self) -> None:
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(lambda x: (x @ x).relu(), backend="eager")
    x = torch.ones(2, 2)
    with Counts() as seen:
        assert torch.equal(compiled(x), torch.full((2, 2), 2.0))
    assert {"mm", "relu"} <= {*seen.names}


SCRIPT = """
import sys

import numpy as np

import polyfed

draw = np.random.default_rng(0)
label = np.arange(60) % 3
x = {{name: draw.normal(size=(60, 4)) for name in ("a", "b")}}
own = {{"algorithm": "{}", "engine": {{"name": "sequential"}}}}
run = polyfed.run(data=x, labels=label, clients=np.arange(60) % 6, rounds=2, **own)
run.predict(x)
assert "torch._dynamo" not in sys.modules, "torch._dynamo is imported"
"""


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_a_sequential_run_does_not_import_dynamo(method):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(method)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
