"""Data sources: frozen dataclasses, each the schema of its `[data]`, with `load()` and `describe()`."""

from polyfed.data.sources.av_mnist import AvMnist
from polyfed.data.sources.ave import Ave
from polyfed.data.sources.cg_digits import CgDigits
from polyfed.data.sources.cg_mnist import CgMnist
from polyfed.data.sources.cifar100 import Cifar100
from polyfed.data.sources.cmu import Mosei, Mosi
from polyfed.data.sources.crema_d import CremaD
from polyfed.data.sources.crisismmd import CrisisMmd
from polyfed.data.sources.facts import Facts, Source
from polyfed.data.sources.food101 import Food101
from polyfed.data.sources.hateful_memes import HatefulMemes
from polyfed.data.sources.hugging_face import HuggingFace
from polyfed.data.sources.iemocap import Iemocap
from polyfed.data.sources.ku_har import KuHar
from polyfed.data.sources.meld import Meld
from polyfed.data.sources.mnist_m import MnistM
from polyfed.data.sources.msp_improv import MspImprov
from polyfed.data.sources.multiview import MultiView
from polyfed.data.sources.npz import Npz
from polyfed.data.sources.ptb_xl import PtbXl
from polyfed.data.sources.toy import Toy
from polyfed.data.sources.ucihar import UciHar

SOURCES: dict[str, type[Source]] = {
    "av-mnist": AvMnist,
    "ave": Ave,
    "crema-d": CremaD,
    "crisismmd": CrisisMmd,
    "food101": Food101,
    "hateful-memes": HatefulMemes,
    "hf": HuggingFace,
    "iemocap": Iemocap,
    "ku-har": KuHar,
    "meld": Meld,
    "mosei": Mosei,
    "mosi": Mosi,
    "msp-improv": MspImprov,
    "ptb-xl": PtbXl,
    "cg-digits": CgDigits,
    "cg-mnist": CgMnist,
    "cifar100": Cifar100,
    "mnist-m": MnistM,
    "multiview": MultiView,
    "npz": Npz,
    "toy": Toy,
    "ucihar": UciHar,
}
"""Sources by the name that `[data] name` gives."""

__all__ = ["SOURCES", "AvMnist", "CgDigits", "CgMnist", "Facts", "Npz", "Source", "Toy", "UciHar"]
