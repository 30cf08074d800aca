"""Every method: what the server and the clients do in a round, one file or folder for each.

Open `base.py` first: `Algorithm` is the base class of every method, and its docstring lists the hooks. `centralized.py`
and `local.py` are the two ends between which federated learning lies. The other methods stand in folders by question:

- `averaging`: one model together, and the template `Averaging` that most methods extend;
- `personal`: a model for each client;
- `modalities`: balance between the modalities of a model, and modalities that rows lack;
- `knowledge`: prototypes, embeddings or predictions instead of parameters;
- `split`: a model that is cut between client and server;
- `cmsfed`, `hfm` (with VFL), `partialfl`, `pfmml`: one method each.

docs/algorithms/NAME.md explains the method NAME.
"""

from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.averaging.fedavg import FedAvg
from polyfed.algorithms.averaging.fedbuff import FedBuff
from polyfed.algorithms.averaging.feddyn import FedDyn
from polyfed.algorithms.averaging.fednova import FedNova
from polyfed.algorithms.averaging.fedprox import FedProx
from polyfed.algorithms.averaging.hfl import Hfl
from polyfed.algorithms.averaging.moon import Moon
from polyfed.algorithms.averaging.scaffold import Scaffold
from polyfed.algorithms.base import Algorithm
from polyfed.algorithms.centralized import Centralized
from polyfed.algorithms.cmsfed.cmsfed import CmsFed
from polyfed.algorithms.evaluate import Evaluate
from polyfed.algorithms.hfm.hfm import Hfm
from polyfed.algorithms.hfm.silo_evaluation import EvaluateSilos
from polyfed.algorithms.hfm.vfl import Vfl
from polyfed.algorithms.knowledge.creamfl import CreamFL
from polyfed.algorithms.knowledge.fedgkt import FedGKT, ServerOnTop
from polyfed.algorithms.knowledge.fedproto import FedProto, NearestPrototype
from polyfed.algorithms.local import Local
from polyfed.algorithms.modalities.fedmac import FedMac
from polyfed.algorithms.modalities.fedmchain import FedMChain
from polyfed.algorithms.modalities.fedmsplit import FedMSplit
from polyfed.algorithms.modalities.fedogm import FedOgm
from polyfed.algorithms.modalities.fedpmr import FedPmr
from polyfed.algorithms.modalities.mfedmc import MFedMC
from polyfed.algorithms.modalities.pepsy import Pepsy
from polyfed.algorithms.modalities.pmcmfl import PmcmFL
from polyfed.algorithms.partialfl.partialfl import PartialFL
from polyfed.algorithms.personal.apfl import Apfl
from polyfed.algorithms.personal.ditto import Ditto
from polyfed.algorithms.personal.fedamp import FedAmp
from polyfed.algorithms.personal.fedavg_ft import FedAvgFt
from polyfed.algorithms.personal.fedbn import FedBn
from polyfed.algorithms.personal.fedcouncil import Council, FedCouncil
from polyfed.algorithms.personal.fedfomo import FedFomo
from polyfed.algorithms.personal.fedrep import FedRep
from polyfed.algorithms.personal.lg_fedavg import LgFedAvg
from polyfed.algorithms.personal.pfedme import PFedMe
from polyfed.algorithms.personal.pfedmma import PFedMma
from polyfed.algorithms.pfmml.pfmml import Pfmml
from polyfed.algorithms.split.split_learning import SplitLearning
from polyfed.algorithms.split.splitfed import SplitFed
from polyfed.evaluation.scores import Predictor

__all__ = ["ALGORITHMS", "JOBS", "NAMED", "PREDICTORS", "Algorithm", "Averaging"]

PREDICTORS: dict[str, type[Predictor]] = {
    "logits": Predictor,
    "council": Council,
    "nearest-prototype": NearestPrototype,
    "server-on-top": ServerOnTop,
}
"""The predictors: how personal models predict. The keys are the names that the description of a saved model uses."""

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "moon": Moon,
    "feddyn": FedDyn,
    "fednova": FedNova,
    "fedbuff": FedBuff,
    "local": Local,
    "fedavg-ft": FedAvgFt,
    "fedrep": FedRep,
    "lg-fedavg": LgFedAvg,
    "fedbn": FedBn,
    "ditto": Ditto,
    "apfl": Apfl,
    "pfedme": PFedMe,
    "pfedmma": PFedMma,
    "fedcouncil": FedCouncil,
    "cmsfed": CmsFed,
    "fedmsplit": FedMSplit,
    "fedogm": FedOgm,
    "fedpmr": FedPmr,
    "mfedmc": MFedMC,
    "fedmchain": FedMChain,
    "fedmac": FedMac,
    "pepsy": Pepsy,
    "pmcmfl": PmcmFL,
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

JOBS: dict[str, type[Algorithm]] = {"evaluate": Evaluate, "evaluate-silos": EvaluateSilos}
"""Jobs that train nothing. `[algorithm] name` accepts their keys too; `polyfed evaluate` writes such recipes."""

NAMED: dict[str, type[Algorithm]] = {**ALGORITHMS, **JOBS}
"""Everything that `[algorithm] name` accepts."""
