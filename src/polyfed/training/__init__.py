"""A task's view of a client's data: the only two ways through it, for a client alone and for many stacked."""

from polyfed.training.client_data import Fit, View
from polyfed.training.single import AloneView
from polyfed.training.stacked import StackedView

__all__ = ["AloneView", "Fit", "StackedView", "View"]
