"""PartialFL: a server model that reads shareable modalities guides a federated model of the private ones.

Open `partialfl.py` first: it holds the whole method, the clients' half and the server's half. `messages.py` has the
messages that cross, `options.py` the options, `teachers.py` which rows have a teacher and the controls, `deposits.py` checks what clients handed over and sent back. The page of the method is
docs/algorithms/partialfl.md.
"""

from polyfed.algorithms.partialfl.partialfl import PartialFL

__all__ = ["PartialFL"]
