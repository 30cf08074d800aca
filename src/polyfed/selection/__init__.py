"""Selectors by their name in `[selection] name`. They combine with every averaging algorithm."""

from polyfed.selection.base import Selector, Uniform, must_be_uniform
from polyfed.selection.divfl import DivFl
from polyfed.selection.power_of_choice import PowD

__all__ = ["SELECTORS", "DivFl", "PowD", "Selector", "Uniform", "must_be_uniform"]

SELECTORS: dict[str, type[Selector]] = {"uniform": Uniform, "pow-d": PowD, "divfl": DivFl}
"""Selectors by their name in `[selection] name`."""
