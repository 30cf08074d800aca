"""HFM and its control VFL: devices of a silo hold different modalities of the same samples.

Open `silo_exchange.py` first: it holds the training inside silos, which both methods share, with its options, the edge
and the devices. `hfm.py` adds averaging across silos. `vfl.py` trains and evaluates every silo separately. Four files
import none of these:

- `messages.py`: the messages between devices, edges and server, and the computations of an edge;
- `alignment.py`: the devices of each silo, and the check that they hold the same samples;
- `samples.py`: the samples of a silo, and the rows of the devices that hold them;
- `state.py`: the server state.

The pages are docs/algorithms/hfm.md and docs/algorithms/vfl.md. HFL, the horizontal control, is
`algorithms/averaging/hfl.py`.
"""

from polyfed.algorithms.hfm.alignment import check_aligned, devices_of_silos
from polyfed.algorithms.hfm.hfm import Hfm
from polyfed.algorithms.hfm.silo_exchange import Vertical
from polyfed.algorithms.hfm.state import SiloState
from polyfed.algorithms.hfm.vfl import Vfl

__all__ = ["Hfm", "SiloState", "Vertical", "Vfl", "check_aligned", "devices_of_silos"]
