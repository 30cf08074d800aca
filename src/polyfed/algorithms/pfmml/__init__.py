"""Personalised federated multimodal learning with learned aggregation coefficients (`pfmml` in recipes).

Open `pfmml.py` first: it holds the whole method, in the steps of the paper's Algorithm 1. `coefficients.py` has the
matrix algebra for mixing and learning, and `scheduling.py` chooses who uploads; neither uses clients or messages. The
page of the method is docs/algorithms/pfmml.md.
"""

from polyfed.algorithms.pfmml.pfmml import Pfmml

__all__ = ["Pfmml"]
