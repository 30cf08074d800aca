"""How do clients of different data train one model together? Federated averaging and what changes one part of it.

`template.py` has `Averaging`, which most methods of polyfed extend, also those in other folders; `fedprox.py` is the
shortest of them. `buffered.py` has `Buffered`, the same without waiting for slow clients. `private_blocks.py` keeps
parts of the model on the clients.
"""

from polyfed.algorithms.averaging.template import Averaging, State, Update, mean_loss

__all__ = ["Averaging", "State", "Update", "mean_loss"]
