"""How the vectorised engine divides similar clients into stacks, so that a round takes the least time.

The numbers of this file are measured, and docs/performance.md has the measurements. Stacks of other sizes give slightly
different results. The division therefore depends only on the recipe, its data and the number of the round, and, on a
GPU, on the size of its memory. It does not depend on the number of worker processes.
"""

import math

import torch

from polyfed.engines.machine.gpu import total_bytes

STACK_BYTES = 512 * 2**20
"""Memory budget of a stack on a CPU, in bytes, for the parameters, gradients, optimiser moments and batches of all its
clients. 512 MiB keep two cores busy and fit into the memory of a laptop (measured in docs/performance.md)."""

GPU_SHARE = 0.25
"""Share of a GPU's memory that is the memory budget of a stack. The features of the data set may take half of the
memory (`engines/machine/gpu.py`), and the replies and the results of single operations need the rest."""

STACK_FLOPS = 5e8
"""Floating-point operations of local training that are worth a stack of their own. With 1.9e8 operations in each of two
stacks, two processes took longer than one process with all clients in one stack."""

LEAST_STACK, MOST_STACKS = 8, 16
"""Bounds on the division of similar clients among worker processes: the least clients in a stack, and the most stacks.
A step costs about 1 ms of dispatch for each stack."""

LEAST_STEP = 2.5e9
"""A stack may have fewer than `LEAST_STACK` clients if each of its steps has this many floating-point operations. They
take about 50 ms, so the dispatch of the step's operations hardly counts."""

CACHE_BYTES = 6e6
"""Bytes of a stack's parameters that stay in the processor's cache from one step to the next, while two processes share
the cache. If a stack has more parameters, its matrix products take up to 1.4 times as long."""

CACHED_STEP = 1e8
"""Least floating-point operations in each step of a stack that the engine makes smaller because of the cache."""

OPERATIONS_PER_BYTE = 60.0
"""If a step has at least this many floating-point operations for each byte of parameters, the cache does not make it
faster. A linear layer has 24 operations for each byte with 16 rows in a batch, and 96 operations with 64 rows.
Convolutions have hundreds."""


def stack_bytes(device: torch.device) -> int:
    """Return the memory budget of a stack in bytes.

    On a GPU, the budget follows from its total memory. If it followed from the free memory, other programs on the GPU
    would change the stacks, and therefore the last bits of the result.
    """
    return int(GPU_SHARE * total_bytes(device)) if device.type == "cuda" else STACK_BYTES


def num_stacks(num: int, *, work: float, step: float, weights: int, cached: bool) -> int:
    """Return into how many stacks the engine divides clients on a CPU whose tensors have the same names and shapes.

    Args:
        num: number of these clients.
        work: floating-point operations of the local training of all of them.
        step: floating-point operations of a step of one client.
        weights: size of a client's parameters in bytes.
        cached: whether the size of the processor's cache counts. It counts if programs run the steps. Without programs,
            a step has so much dispatch that smaller stacks make a round slower.
    """
    least = min(LEAST_STACK, math.ceil(LEAST_STEP / max(step, 1.0)))
    stacks = max(1, min(MOST_STACKS, num // least, int(work / STACK_FLOPS)))
    if cached and step < OPERATIONS_PER_BYTE * weights:
        # at least two clients, because a client that trains alone has no programs
        fitting = max(2, int(CACHE_BYTES // weights), math.ceil(CACHED_STEP / max(step, 1.0)))
        stacks = max(stacks, min(math.ceil(num / fitting), num // 2))
        if 1 < stacks < num // 2:
            stacks += stacks % 2  # an even number, so that two workers get the same work
    return stacks
