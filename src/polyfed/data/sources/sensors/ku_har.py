"""KU-HAR: motion of about ninety subjects, from accelerometer and gyroscope (FedMultimodal)."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import DataError
from polyfed.core.option_checks import between, check_ranges
from polyfed.data.columns import LEFT_OUT
from polyfed.data.features.listing import Listing, Sample, folder
from polyfed.data.features.prepared import Prepared
from polyfed.data.media import Clip, Extractor, SensorWindow
from polyfed.data.sources.base import Facts
from polyfed.data.sources.media_set import MediaSet, check_modalities, fold_of_clients

EIGHT = ("0.Stand", "1.Sit", "11.Walk", "5.Lay", "8.Jump", "14.Run", "15.Stair-up", "16.Stair-down")
"""Activities that FedMultimodal trains on, in its order."""

ALL = (
    *("0.Stand", "1.Sit", "2.Talk-sit", "3.Talk-stand", "4.Stand-sit", "5.Lay", "6.Lay-stand", "7.Pick", "8.Jump"),
    *("9.Push-up", "10.Sit-up", "11.Walk", "12.Walk-backward", "13.Walk-circle", "14.Run", "15.Stair-up"),
    *("16.Stair-down", "17.Table-tennis"),
)

_FOLDERS = ("Trimmed_interpolated_data", "2.Trimmed_interpolated_data")
_WIDTH = 8  # time, acceleration x y z, time, angular velocity x y z
_COLUMNS = {"acc": (1, 2, 3), "gyro": (5, 6, 7)}
_LINES, _STRIDE = 256, 2  # 2.56 s at 100 Hz, every second line: 128 steps at 50 Hz, as UCI-HAR
_SHORT = "1101"  # FedMultimodal leaves this subject out
_FOLDS = 5


@dataclass(frozen=True, kw_only=True)
class KuHar(MediaSet):
    """Windows `acc` and `gyro` of 128 steps x 3 axes at 50 Hz, of the 8 activities of FedMultimodal, or of all 18.

    The natural clients are the subjects, and a fifth of them is the test set. A window covers 256 lines of a file, as
    in FedMultimodal. Every second line is a step, so a window has 128 steps. The extractor that FedMultimodal released
    reads only the first 64 steps. This source reads all 128.

    Attributes:
        path: The folder that holds Trimmed_interpolated_data, or a folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: "acc", "gyro".
        activities: Number of activities, 8 or 18.
        fold: The fifth of the subjects, by number, that is tested.
        min_windows: A training subject with fewer windows is left out; 10 in FedMultimodal.
        normalise: "window" standardises each axis of each window, as FedMultimodal does; "none" keeps the numbers.
    """

    NAME: ClassVar[str] = "ku-har"
    CHOOSES: ClassVar[tuple[str, ...]] = ("activities",)

    modalities: tuple[str, ...] = ("acc", "gyro")
    activities: Literal[8, 18] = 8
    fold: Annotated[int, between(1, _FOLDS)] = 1
    min_windows: int = 10
    normalise: Literal["window", "none"] = "window"

    def __post_init__(self) -> None:
        check_modalities(self.modalities, tuple(_COLUMNS))
        check_ranges("[data]", self)

    @override
    def extractors(self) -> dict[str, Extractor]:
        return {
            name: SensorWindow(columns=_COLUMNS[name], width=_WIDTH, stride=_STRIDE, normalise=self.normalise)
            for name in self.modalities
        }

    @override
    def listing(self, root: Path) -> Listing:
        found = [root / name for name in _FOLDERS if (root / name).is_dir()]
        classes = EIGHT if self.activities == 8 else ALL
        root = found[0] if found else root
        samples = []
        for label, name in enumerate(classes):
            for file in sorted(folder(root, name, self.NAME).glob("*.csv")):
                if file.stem.split("_")[0] != _SHORT:
                    samples += _windows(file, label)
        return Listing(samples, classes)

    @override
    def split_of(self, prepared: Prepared, split: Tensor) -> Tensor:
        clients = prepared.clients()
        codes = fold_of_clients(clients, _FOLDS, self.fold)
        counts = Counter(clients)
        is_few = torch.tensor([counts[client] < self.min_windows for client in clients])
        return torch.where(is_few & (codes == 0), LEFT_OUT, codes).to(torch.int8)

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data ku-har` prints them."""
        return Facts(
            title="motion of about 90 subjects, 18 activities; FedMultimodal uses 8, about 10,300 windows",
            modalities={"acc": "(128, 3) acceleration, m/s^2", "gyro": "(128, 3) angular velocity, rad/s"},
            licence="CC BY 4.0",
            obtain="Mendeley Data 45f952y38r, archive 2, 'Trimmed interpolated data' (Sikder and Nahid 2021)",
            layout="Trimmed_interpolated_data/<n.Activity>/<subject>_<activity>_<take>.csv, 8 numbers a line",
        )


def _windows(file: Path, label: int) -> list[Sample]:
    subject = file.stem.split("_")[0]
    if not subject.isdigit():
        raise DataError(f"'{file}': the name must begin with the subject's number and _")
    with file.open("rb") as opened:
        num = sum(1 for line in opened if line.strip()) // _LINES
    samples = []
    for window in range(num):
        clip = Clip.at(file, window * _LINES, (window + 1) * _LINES)
        name = f"{file.parent.name}/{file.stem} {window}"
        samples.append(Sample(name, label, dict.fromkeys(_COLUMNS, clip), client=subject))
    return samples
