"""PartialFL: a server model of the shareable modalities guides a federated model of the private modalities.

Open `partialfl.py` first: it holds the whole method, the steps of Algorithm 1 and the three losses. `options.py` has
the options, and `messages.py` has the messages. `teacher_rows.py` finds the rows that have a teacher and makes the
controls. `deposits.py` checks what clients sent. The page is docs/algorithms/partialfl.md.
"""

from polyfed.algorithms.partialfl.partialfl import PartialFL

__all__ = ["PartialFL"]
