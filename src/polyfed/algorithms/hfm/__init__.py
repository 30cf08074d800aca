"""HFM and its control VFL: devices of a silo hold different modalities of the same samples.

Open `vertical.py` first: it is the server half of the training inside silos, which both methods share. `devices.py` is
the half on the devices. `hfm.py` adds averaging across silos. `vfl.py` trains and evaluates every silo separately.
`silo_scores.py` evaluates a silo's model across its devices. Five helper files import none of the files above:

- `exchange.py`: the messages between devices, edges and server, and the computations of an edge;
- `options.py`: the options of both methods;
- `alignment.py`: the devices of each silo, and the check that they hold the same samples;
- `samples.py`: the samples of a silo, and the rows of the devices that hold them;
- `state.py`: the server state.

The pages are docs/algorithms/hfm.md and docs/algorithms/vfl.md. HFL, the horizontal control, is `algorithms/hfl.py`.
"""

from polyfed.algorithms.hfm.alignment import check_aligned, devices_of_silos
from polyfed.algorithms.hfm.hfm import Hfm
from polyfed.algorithms.hfm.state import SiloState
from polyfed.algorithms.hfm.vertical import Vertical
from polyfed.algorithms.hfm.vfl import Vfl

__all__ = ["Hfm", "SiloState", "Vertical", "Vfl", "check_aligned", "devices_of_silos"]
