"""The data sets that a recipe can name. Each `[data] name` is a class here; docs/data.md has a table of them.

A source is a frozen dataclass whose fields are the keys of its section `[data]`. `load()` returns the table.
`describe()` returns the facts that `polyfed data NAME` prints. To add a source, write a file here with a class that
extends `Source` (or `MediaSet`, if its samples are media files). Then add a line to `SOURCES` below.

Bases and helpers:

- `base`: the base class `Source`, and `Facts`, the result of `describe()`.
- `media_set`: base class of the data sets whose samples are media files, with their feature cache.
- `image_text`: base class of the data sets that pair an image with a text.
- `mnist`, `pictures`, `colour`: reading MNIST, reading picture files, colouring digits.

Your own arrays and tables:

- `npz`: arrays of an `.npz` file or of a folder of `.npy` files; `table`: CSV, parquet and JSON-lines files; `memory`:
  objects of a Python program; `hugging_face`: any table of the `datasets` library.

Images and digits:

- `cg_digits`, `cg_mnist`: gray and coloured digits; `mnist_m`: MNIST and MNIST-M; `av_mnist`: written and spoken
  digits.
- `cifar100`: colour and gray images; `multiview`: objects seen from several sides.

Emotion and sentiment:

- `iemocap`, `msp_improv`, `meld`: sound and transcript; `crema_d`: sound and video.
- `cmu`: CMU-MOSEI and CMU-MOSI: text, audio and video features.

Other data (events, images with text, sensors, synthetic data):

- `ave`: audio-visual events; `food101`, `hateful_memes`, `crisismmd`: image and text.
- `ucihar`, `ku_har`: motion sensors; `ptb_xl`: electrocardiograms.
- `toy`: synthetic data for tests.
"""

from polyfed.data.sources.base import Facts, Source
from polyfed.data.sources.own.hugging_face import HuggingFace
from polyfed.data.sources.own.memory import Memory
from polyfed.data.sources.own.npz import Npz
from polyfed.data.sources.own.table_files import Table
from polyfed.data.sources.own.toy import Toy
from polyfed.data.sources.pictures.av_mnist import AvMnist
from polyfed.data.sources.pictures.cg_digits import CgDigits
from polyfed.data.sources.pictures.cg_mnist import CgMnist
from polyfed.data.sources.pictures.cifar100 import Cifar100
from polyfed.data.sources.pictures.crisismmd import CrisisMmd
from polyfed.data.sources.pictures.food101 import Food101
from polyfed.data.sources.pictures.hateful_memes import HatefulMemes
from polyfed.data.sources.pictures.mnist_m import MnistM
from polyfed.data.sources.pictures.multiview import MultiView
from polyfed.data.sources.sensors.ku_har import KuHar
from polyfed.data.sources.sensors.ptb_xl import PtbXl
from polyfed.data.sources.sensors.ucihar import UciHar
from polyfed.data.sources.speech.ave import Ave
from polyfed.data.sources.speech.cmu import Mosei, Mosi
from polyfed.data.sources.speech.crema_d import CremaD
from polyfed.data.sources.speech.iemocap import Iemocap
from polyfed.data.sources.speech.meld import Meld
from polyfed.data.sources.speech.msp_improv import MspImprov

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
    "memory": Memory,
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
    "table": Table,
    "toy": Toy,
    "ucihar": UciHar,
}
"""Sources by the name that `[data] name` gives."""

__all__ = ["SOURCES", "AvMnist", "CgDigits", "CgMnist", "Facts", "Memory", "Npz", "Source", "Table", "Toy", "UciHar"]
