"""A task's view of a client's data: the only two ways through it, for a client alone and for many stacked."""

from polyfed.training.client_data import ClientData, TrainingResult
from polyfed.training.single import SingleClientData
from polyfed.training.stacked import StackedClientData

__all__ = ["SingleClientData", "TrainingResult", "StackedClientData", "ClientData"]
