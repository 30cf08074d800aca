"""Selectors: the rules that choose which clients take part in a round. Every `Averaging` method can use any of them.

Open `base.py` first: `Selector` is the base class, and `Uniform` is the default. `power_of_choice.py` and `divfl.py`
are the other two selectors. `submodular.py` is the greedy choice that DivFL and CMSFed use. Page:
docs/algorithms/selection.md.
"""

from polyfed.selection.base import Selector, Uniform
from polyfed.selection.divfl import DivFl
from polyfed.selection.power_of_choice import PowD

__all__ = ["SELECTORS", "DivFl", "PowD", "Selector", "Uniform"]

SELECTORS: dict[str, type[Selector]] = {"uniform": Uniform, "pow-d": PowD, "divfl": DivFl}
"""Selectors by their name in `[selection] name`."""
