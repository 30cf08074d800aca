"""PartialFL: a server model of the shareable modalities guides a federated model of the private modalities.

Open `partialfl.py` first: it holds the whole method, its options, the steps of Algorithm 1 and the three losses.
`messages.py` has the messages. The server model's embedding of a row is the row's teacher. `teacher_rows.py` finds the
rows that have a teacher, and replaces teachers by meaningless vectors for the control experiments (`placebo`).
`deposits.py` checks what clients sent. The page is docs/algorithms/partialfl.md.
"""

from polyfed.algorithms.partialfl.partialfl import PartialFL

__all__ = ["PartialFL"]
