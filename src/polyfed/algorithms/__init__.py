"""Every method: what the server and the clients do in a round. Each method has its own file or folder.

Open `base.py` first. `Algorithm` is the base class of every method, and its docstring lists the hooks. `averaging.py`
has `Averaging`, the template of most methods. `fedprox.py` is the shortest method that uses the template. `blocks.py`
and `second_model.py` are helpers that several methods use. docs/algorithms/NAME.md explains the method NAME.
"""

from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.centralized import Centralized
from polyfed.algorithms.cmsfed.cmsfed import CmsFed
from polyfed.algorithms.creamfl import CreamFL
from polyfed.algorithms.fedamp import FedAmp
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fedfomo import FedFomo
from polyfed.algorithms.fedgkt import FedGKT, ServerOnTop
from polyfed.algorithms.fedmsplit import FedMSplit
from polyfed.algorithms.fedogm import FedOgm
from polyfed.algorithms.fedpmr import FedPmr
from polyfed.algorithms.fedproto import FedProto, NearestPrototype
from polyfed.algorithms.fedprox import FedProx
from polyfed.algorithms.hfl import Hfl
from polyfed.algorithms.hfm.hfm import Hfm
from polyfed.algorithms.hfm.vfl import Vfl
from polyfed.algorithms.local import Local
from polyfed.algorithms.moon import Moon
from polyfed.algorithms.partialfl.partialfl import PartialFL
from polyfed.algorithms.pfmml.pfmml import Pfmml
from polyfed.algorithms.scaffold import Scaffold
from polyfed.algorithms.split.split_learning import SplitLearning
from polyfed.algorithms.split.splitfed import SplitFed
from polyfed.evaluation.scores import Predictor

__all__ = ["ALGORITHMS", "PREDICTORS", "Algorithm", "Averaging"]

PREDICTORS: dict[str, type[Predictor]] = {
    "logits": Predictor,
    "nearest-prototype": NearestPrototype,
    "server-on-top": ServerOnTop,
}
"""The predictors: how personal models predict. The keys are the names that the description of a saved model uses."""

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "moon": Moon,
    "local": Local,
    "cmsfed": CmsFed,
    "fedmsplit": FedMSplit,
    "fedogm": FedOgm,
    "fedpmr": FedPmr,
    "fedproto": FedProto,
    "fedamp": FedAmp,
    "fedfomo": FedFomo,
    "pfmml": Pfmml,
    "partialfl": PartialFL,
    "centralized": Centralized,
    "split-learning": SplitLearning,
    "splitfed": SplitFed,
    "fedgkt": FedGKT,
    "creamfl": CreamFL,
    "hfl": Hfl,
    "hfm": Hfm,
    "vfl": Vfl,
}
"""The methods. The keys are the values that `[algorithm] name` accepts."""
