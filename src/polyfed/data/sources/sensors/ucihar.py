"""ucihar: windows of smartphone motion of 30 subjects, from the published folder or an .npz of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import DataError, require, require_one_of
from polyfed.core.option_checks import check_ranges
from polyfed.data.column_scaling import standardised
from polyfed.data.columns import TEST, TRAIN, Column, Columns
from polyfed.data.reading.array_files import Arrays, existing
from polyfed.data.sources.base import Facts, Source

CLASSES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
STEPS = 128  # 2.56 s at 50 Hz
_FILES = {"acc": "body_acc", "gyro": "body_gyro", "total_acc": "total_acc"}
_EPS = 1e-5  # added to the deviation of a window, as in FedMultimodal


@dataclass(frozen=True, kw_only=True)
class UciHar(Source):
    """10,299 windows of 128 steps x 3 axes: `acc` (acceleration without gravity), `gyro`, `total_acc` (with gravity).

    The natural clients are the subjects, with the numbers 0 to 29. The official test set is the windows of 9 subjects
    who are never in training.

    Attributes:
        path: The folder `UCI HAR Dataset`, or an .npz with the arrays acc, gyro, total_acc (N, 128, 3), label 0..5,
            client, split and, optionally, split_personal.
        modalities: "acc", "gyro", "total_acc"; FedMultimodal uses the first two.
        split: "official", or "none", in which all 30 subjects train, for use with clients.personal_test.
        normalise: "train" standardises each axis over the training rows; "window" each axis of each window, as
            FedMultimodal does, which makes sitting, standing and lying hard to tell apart; "none" keeps the values.
    """

    path: str
    modalities: tuple[str, ...] = ("acc", "gyro", "total_acc")
    split: Literal["official", "none"] = "official"
    normalise: Literal["train", "window", "none"] = "train"

    def __post_init__(self) -> None:
        require(bool(self.modalities), "data.modalities", self.modalities, ", ".join(_FILES))
        for name in self.modalities:
            require_one_of("data.modalities", name, _FILES)
        check_ranges("[data]", self)

    @override
    def load(self) -> Columns:
        found = existing(self.path, "UCI HAR")
        is_original = (found / "train" / "Inertial Signals").is_dir()
        windows, label, client, split, personal = (_from_folder if is_original else _from_npz)(found, self.modalities)
        if self.normalise == "window":
            windows = {name: _by_window(x) for name, x in windows.items()}
        columns = Columns(
            name="ucihar",
            modalities={name: Column(x) for name, x in windows.items()},
            label=label,
            num_classes=len(CLASSES),
            split=split if self.split == "official" else torch.full_like(split, TRAIN),
            ids=torch.arange(len(label)),
            class_names=CLASSES,
            client=client,
            split_personal=personal,
        )
        return standardised(columns) if self.normalise == "train" else columns

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data ucihar` prints them."""
        return Facts(
            title="smartphone motion of 30 subjects, 6 activities, 10,299 windows of 2.56 s",
            modalities={
                "acc": "(128, 3) body acceleration, g",
                "gyro": "(128, 3) angular velocity, rad/s",
                "total_acc": "(128, 3) acceleration with gravity, g",
            },
            licence="UCI catalogue: CC BY 4.0; the README in the archive forbids commercial use",
            obtain="UCI repository, 'Human Activity Recognition Using Smartphones' (Anguita et al. 2013)",
            layout="UCI HAR Dataset/{train,test}/Inertial Signals/*.txt, y_*.txt, subject_*.txt; or an .npz",
        )


Parts = tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor | None]


def _from_folder(folder: Path, modalities: tuple[str, ...]) -> Parts:
    halves = ("train", "test")
    labels = [_table(folder / half / f"y_{half}.txt", 1)[:, 0] for half in halves]
    subjects = [_table(folder / half / f"subject_{half}.txt", 1)[:, 0] for half in halves]
    codes = [np.full(len(part), code) for part, code in zip(labels, (TRAIN, TEST), strict=True)]
    windows = {
        name: torch.from_numpy(
            np.concatenate([_signal(folder / half / "Inertial Signals", _FILES[name], half) for half in halves])
        )
        for name in modalities
    }
    label, client = (torch.from_numpy(np.concatenate(x)).long() - 1 for x in (labels, subjects))
    return windows, label, client, torch.from_numpy(np.concatenate(codes)).to(torch.int8), None


def _signal(folder: Path, name: str, half: str) -> np.ndarray:
    axes = [_table(folder / f"{name}_{axis}_{half}.txt", STEPS) for axis in "xyz"]
    lengths = {len(axis) for axis in axes}
    if len(lengths) > 1:
        raise DataError(f"'{folder}': the x, y and z files of {name}_{half} differ in length: {sorted(lengths)}")
    return np.stack(axes, axis=-1).astype(np.float32)


def _table(path: Path, columns: int) -> np.ndarray:
    try:
        table = np.loadtxt(existing(path, "UCI HAR"), ndmin=2)
    except ValueError as error:
        raise DataError(f"'{path}' is damaged ({error}). Unpack the archive again") from error
    if table.shape[1] != columns:
        raise DataError(f"'{path}': {table.shape[1]} numbers a line, expected {columns}. Unpack the archive again")
    return table


def _from_npz(path: Path, modalities: tuple[str, ...]) -> Parts:
    if path.is_dir() and (path / "ucihar.npz").exists():
        path = path / "ucihar.npz"
    arrays = Arrays(path)
    windows = {name: arrays.features(name) for name in modalities}
    for name, x in windows.items():
        if tuple(x.shape[1:]) != (STEPS, 3):
            raise DataError(f"'{path}': '{name}' has windows of shape {tuple(x.shape[1:])}, expected ({STEPS}, 3)")
    label, client, split = (arrays.integers(name) for name in ("label", "client", "split"))
    has_personal = "split_personal" in arrays
    personal = arrays.integers("split_personal").to(torch.int8) if has_personal else None
    return windows, label, client, split.to(torch.int8), personal


def _by_window(x: Tensor) -> Tensor:
    x = x.to(torch.float32)
    return (x - x.mean(1, keepdim=True)) / (x.std(1, correction=0, keepdim=True) + _EPS)
