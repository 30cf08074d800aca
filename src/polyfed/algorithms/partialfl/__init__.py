"""PartialFL: a server model that reads shareable modalities guides a federated model of the private ones.

Open `partialfl.py` first: it holds the whole method, the steps of Algorithm 1 and the three losses. `options.py` has
the options, `messages.py` the messages that cross, `teachers.py` the rows that have a teacher and the controls, and
`deposits.py` the checks of what clients handed over and sent back. The page is docs/algorithms/partialfl.md.
"""

from polyfed.algorithms.partialfl.partialfl import PartialFL

__all__ = ["PartialFL"]
