"""CMSFed: a method that selects modalities of clients instead of whole clients.

Open `cmsfed.py` first: it holds the whole method in the order of the paper's Algorithm 1 (state, options, round,
selection, local loss, tasks). It uses five files that do not import it:
- `messages.py`: the messages between server and clients;
- `selection.py`: the two facility-location problems of a round (Eq. 13-14);
- `weak_modality.py`: imbalance ratios of a batch, of a client and of the federation;
- `client_gradients.py`: the gradients g and h that compare clients (Eq. 11);
- `local_scope.py`: the modalities that one client trains, and the client's features and prototypes.

The page of the method is docs/algorithms/cmsfed.md.
"""

from polyfed.algorithms.cmsfed.cmsfed import CmsFed

__all__ = ["CmsFed"]
