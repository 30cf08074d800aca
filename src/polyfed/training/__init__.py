"""How a client trains: a client's dataset, the loop of optimiser steps over the dataset, optimisers and losses.

- `client_data.py`: `ClientData`, the dataset as a client task sees it, and the arguments and result of local training.
- `single.py`: the dataset of one client, with plain PyTorch autograd.
- `stacked.py`: the datasets of many similar clients, which train together under `torch.func.vmap`.
- `stacked_gradients.py`: the gradients of a training step of a stack.
- `per_sample.py`: gradients of single rows, clipped and with noise, for differential privacy.
- `step_plan.py`: which rows every client of a stack takes in every step.
- `step_replay.py`: runs the steps of a stack, directly or by programs, which are faster.
- `step_source.py`: what a step reads, so that later rounds can use the same program.
- `step_trace.py`: records the operations of a training step of a stack.
- `step_rewrite.py`: the rules that make a recorded step faster.
- `step_memory.py`: which tensors of a recorded step share memory, and which operations write into them.
- `step_check.py`: tests that a rewritten step must pass before it is used.
- `step_program.py`: a rewritten step as a Python function.
- `step_counts.py`: how many rows and steps a local training uses.
- `optimisers.py`: the optimisers of clients and of the server; the `[train]` and `[server]` sections of a recipe.
- `losses.py`: losses that several methods use.
- `prototypes.py`: class prototypes, and what methods compute from them.
"""

from polyfed.training.client_data import ClientData, TrainingResult
from polyfed.training.single import SingleClientData
from polyfed.training.stacked import StackedClientData

__all__ = ["SingleClientData", "TrainingResult", "StackedClientData", "ClientData"]
