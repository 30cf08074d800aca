"""How a client trains: a client's dataset, the loop of optimiser steps over it, optimisers and losses.

`client_data.py` has `ClientData`, the dataset as a task sees it; `single_data.py` implements it for one client and
`stacked_data.py` for many under `torch.func.vmap`. `programs` makes the steps of a stack faster.
"""

from polyfed.training.client_data import ClientData, TrainingResult
from polyfed.training.single_data import SingleClientData
from polyfed.training.stacked_data import StackedClientData

__all__ = ["SingleClientData", "TrainingResult", "StackedClientData", "ClientData"]
