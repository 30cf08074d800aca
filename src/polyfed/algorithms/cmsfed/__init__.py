"""CMSFed: select modalities of clients instead of clients.

Open `cmsfed.py` first: it holds the whole method in the order of the paper's Algorithm 1 (state, options, round,
selection, local loss, tasks). It uses five files that know nothing of it:

- `messages.py`: what crosses between server and clients;
- `selection.py`: the two facility-location problems of a round (Eq. 13-14);
- `imbalance.py`: imbalance ratios of a batch, of a client and of the federation;
- `client_gradients.py`: the gradients g and h by which clients are compared (Eq. 11);
- `local_scope.py`: which modalities one client trains, and its features and prototypes.

The page of the method is docs/algorithms/cmsfed.md.
"""

from polyfed.algorithms.cmsfed.cmsfed import CmsFed

__all__ = ["CmsFed"]
