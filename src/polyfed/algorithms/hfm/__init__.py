"""HFM and its control VFL: devices of a silo hold different modalities of the same samples.

Open `vertical.py` first: it is the training inside silos, which both methods share. `hfm.py` adds averaging across
silos. `vfl.py` trains and evaluates every silo separately. Three helper files do not import the methods:

- `exchange.py`: the messages between devices, edges and server, and the computations of an edge;
- `options.py`: the options of both methods;
- `alignment.py`: the devices of each silo, and the check that they hold the same samples.

The pages are docs/algorithms/hfm.md and docs/algorithms/vfl.md. HFL, the horizontal control, is `algorithms/hfl.py`.
"""

from polyfed.algorithms.hfm.alignment import check_aligned, devices_of_silos
from polyfed.algorithms.hfm.hfm import Hfm
from polyfed.algorithms.hfm.vertical import SiloState, Vertical
from polyfed.algorithms.hfm.vfl import Vfl

__all__ = ["Hfm", "SiloState", "Vertical", "Vfl", "check_aligned", "devices_of_silos"]
