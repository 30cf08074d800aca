"""Which engine, device, worker processes and settings of PyTorch a recipe asks for."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import current_process
from pathlib import Path

import torch

from polyfed.core.errors import RecipeError
from polyfed.core.system.openmp import using_threads
from polyfed.engines import Sequential, Vectorised
from polyfed.engines.base import Engine
from polyfed.engines.machine.gpu import deterministic
from polyfed.engines.workers.cluster import Cluster
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running import machine

MOST_WORKERS = 64
"""Largest number of worker processes if `workers = 0`. On `food`, the server's own work makes a round less than 12
times as fast as with one process (docs/results/speed.md). Each worker needs six file descriptors in this process."""


@contextmanager
def pytorch_settings(recipe: Recipe) -> Iterator[None]:
    """Let PyTorch use the recipe's number of threads in this block and, on a GPU, deterministic algorithms.

    Raises:
        RecipeError: the recipe asks for CUDA, but PyTorch finds no CUDA device.
    """
    with using_threads(recipe.engine.threads), deterministic(device_of(recipe)):
        yield


def engine_of(recipe: Recipe) -> Callable[..., Engine]:
    """Return the constructor of the recipe's engine, with the engine's own options bound to it.

    Raises:
        RecipeError: the recipe asks for worker processes or a GPU, but they cannot work here.
    """
    spec = recipe.engine
    if spec.apart:  # the sequential engine only checks the recipe here, and others run it
        return Sequential
    folder = Path(spec.shared_folder) if spec.shared_folder else None
    chosen = partial(Vectorised, stack=spec.stack, replay=spec.replay)
    return partial(
        chosen if spec.name == "vectorised" else Sequential,
        workers=workers_of(recipe),
        threads=spec.threads or 1,
        gpus=gpus_of(recipe),
        cluster=Cluster(spec.address, folder) if spec.cluster else None,
    )


def workers_of(recipe: Recipe) -> int:
    """Return the number of processes that train clients; 1 means this process alone.

    If the recipe says 0, the number of cores decides on a CPU, and this process trains alone on a GPU. On a cluster, 0
    means that the cluster decides.

    Raises:
        RecipeError: the recipe asks for several worker processes, but they cannot work here.
    """
    spec = recipe.engine
    if spec.cluster:
        return spec.workers
    reason = ""
    if not hasattr(os, "memfd_create"):
        reason = "worker processes share memory by means that only Linux has"
    elif current_process().daemon:
        reason = "this Python process is a daemon, as in a multiprocessing.Pool, and cannot start other processes"
    elif spec.debug:
        reason = "[engine] debug raises a client's exception in this process"
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # PyTorch can then neither use CUDA in processes that this one forks nor compute gradients in them
        reason = "this Python process already uses CUDA, so processes that it forks cannot train. A new process can"
    if reason and spec.workers > 1:
        raise RecipeError(
            f"[engine] workers = {spec.workers}: {reason}. Remove `workers`, or use workers = 1", ("engine", "workers")
        )
    if reason or device_of(recipe).type != "cpu":
        return 1
    return spec.workers or max(1, min(machine.cores() // max(1, spec.threads), MOST_WORKERS))


def device_of(recipe: Recipe) -> torch.device:
    """Return the device of the process that runs the recipe, with `auto` resolved.

    It is the CPU if worker processes use the GPUs.

    Raises:
        RecipeError: the recipe asks for CUDA, but PyTorch finds no CUDA device.
    """
    wanted = recipe.engine.device
    if recipe.engine.cluster:
        return torch.device("cpu")
    if wanted == "cuda" and not num_gpus():
        raise RecipeError(
            "[engine] device = 'cuda', but PyTorch sees no CUDA device; use 'cpu' or 'auto'", ("engine", "device")
        )
    one_gpu = wanted != "cpu" and num_gpus() and not gpus_of(recipe)
    return torch.device("cuda" if one_gpu else "cpu")


def gpus_of(recipe: Recipe) -> tuple[torch.device, ...]:
    """Return the GPUs on which worker processes train. Empty if this process trains, or if PyTorch finds no GPU."""
    spec = recipe.engine
    if spec.cluster:  # Ray shows each actor its own GPU as the first one
        return (torch.device("cuda", 0),) if spec.device == "cuda" else ()
    if spec.device == "cpu" or spec.workers < 2 or spec.apart:
        return ()
    return tuple(torch.device("cuda", number) for number in range(num_gpus()))


def num_gpus() -> int:
    """Return the number of GPUs that PyTorch can use. This call does not start CUDA in this process."""
    # otherwise PyTorch starts CUDA to answer, and no process that is forked later can use CUDA
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
