"""CMU-MOSEI and CMU-MOSI: sentiment of opinion videos, with three sequences for each sample (docs/data.md)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import DataError
from polyfed.core.option_checks import AT_LEAST_ONE, check_ranges
from polyfed.data.columns import TEST, TRAIN, VALIDATION, Column, Columns
from polyfed.data.reading.array_files import Arrays, existing
from polyfed.data.sources.base import Facts, Source
from polyfed.data.sources.media_set import check_modalities

MODALITIES = ("text", "audio", "vision")
_PARTS = (("train", TRAIN), ("valid", VALIDATION), ("test", TEST))
_NAMES = {7: ("-3", "-2", "-1", "0", "1", "2", "3"), 2: ("negative", "not negative")}
_SCALED = ("audio", "vision")  # GloVe vectors are not scaled

CONVERT = (
    "python -c \"import pickle, numpy as np; d = pickle.load(open('{file}', 'rb')); np.savez('{stem}.npz', "
    "**{{f'{{s}}_{{k}}': np.asarray(d[s][k]).astype(str if k == 'id' else 'f4') for s in d for k in d[s]}})\""
)


@dataclass(frozen=True, kw_only=True)
class _Cmu(Source):
    NAME: ClassVar[str]
    WIDTHS: ClassVar[dict[str, int]] = {}

    path: str
    modalities: tuple[str, ...] = MODALITIES
    classes: Literal[7, 2] = 7
    target: Literal["class", "score"] = "class"
    steps: Annotated[int, AT_LEAST_ONE] = 50
    standardise: bool = True

    def __post_init__(self) -> None:
        check_modalities(self.modalities, MODALITIES)
        check_ranges("[data]", self)

    @override
    def load(self) -> Columns:
        arrays = _opened(self.path, self.NAME)
        labels = [_labels(arrays, f"{part}_labels") for part, _ in _PARTS]
        codes = [code for (_, code), part in zip(_PARTS, labels, strict=True) for _ in range(len(part))]
        split = torch.tensor(codes, dtype=torch.int8)
        score = torch.cat(labels)
        label = (score.clamp(-3, 3).round() + 3).long() if self.classes == 7 else (score >= 0).long()
        of_classes = self.target == "class"
        return Columns(
            name=self.NAME,
            modalities={name: Column(self._sequence(arrays, name, split)) for name in self.modalities},
            label=label if of_classes else score,
            num_classes=self.classes if of_classes else 1,
            split=split,
            ids=torch.arange(len(split)),
            class_names=_NAMES[self.classes] if of_classes else None,
            client=_videos(arrays, len(split)),
        )

    def _sequence(self, arrays: Arrays, name: str, split: Tensor) -> Tensor:
        parts = [_cut(arrays.features(f"{part}_{name}"), self.steps) for part, _ in _PARTS]
        widths = {tuple(part.shape[1:]) for part in parts}
        expected = self.WIDTHS.get(name)
        if len(widths) != 1 or (expected is not None and parts[0].shape[-1] != expected):
            found = ", ".join(str(width) for width in sorted(widths))
            wanted = "the same in all parts" if expected is None else f"{expected} features a step"
            raise DataError(
                f"'{arrays.path}': '{name}' has samples of shape {found}; expected {wanted}. Convert it again"
            )
        if sum(map(len, parts)) != len(split):
            raise DataError(f"'{arrays.path}': '{name}' has {sum(map(len, parts))} rows, the labels have {len(split)}")
        x = torch.cat(parts)
        return _scaled(x, split == TRAIN) if self.standardise and name in _SCALED else x


@dataclass(frozen=True, kw_only=True)
class Mosei(_Cmu):
    """`text` (steps, 300) GloVe, `audio` (steps, 74), `vision` (steps, 35); 16,326 / 1,871 / 4,659 segments.

    Infinite and missing numbers become 0. A time step that holds only zeros is padding, which encoders that use masks
    (`transformer`) ignore. Scaling keeps such steps at zero. The natural clients are the videos, if the file has ids.
    All arrays are read into memory.

    Attributes:
        path: The .npz (or folder of .npy) converted from mosei_senti_data.pkl (aligned) or ..._noalign.pkl; for a .pkl,
            the error prints the command.
        modalities: "text", "audio", "vision".
        classes: 7, the class round(clip(score, -3, 3)) + 3, or 2, which is 1 if score >= 0. Both rules are inferred, so
            papers may use others (docs/data.md).
        target: "class", or "score", the sentiment from -3 to 3, for `regression`. With "score", `classes` has no
            effect.
        steps: Number of time steps of a sample, from the first one that is not padding; aligned files have 50.
        standardise: Whether to scale `audio` and `vision` by training statistics over steps that are not padding.
    """

    NAME: ClassVar[str] = "mosei"
    WIDTHS: ClassVar[dict[str, int]] = {"text": 300, "audio": 74, "vision": 35}

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data mosei` prints them."""
        return Facts(
            title="sentiment of opinion videos, 7 classes, 16,326 / 1,871 / 4,659 segments",
            modalities={"text": "(50, 300) GloVe", "audio": "(50, 74) COVAREP", "vision": "(50, 35) FACET"},
            licence="as the CMU MultiComp Lab states; the videos belong to their YouTube uploaders",
            obtain="the files of the MulT release (Tsai et al. 2019); then, if you trust the pickle: "
            + CONVERT.format(file="mosei_senti_data.pkl", stem="mosei"),
            layout="mosei.npz with {train,valid,test}_{text,audio,vision,labels} and, if there, _id",
        )


@dataclass(frozen=True, kw_only=True)
class Mosi(_Cmu):
    """`text` (steps, 300) GloVe, `audio` (steps, ...), `vision` (steps, ...); 1,284 / 229 / 686 segments.

    CMU-MOSI is read like CMU-MOSEI, see `Mosei`. Feature widths differ between releases, so they are read from the
    file. For the utterance-level vectors of Poria et al., use the source `npz`.

    Attributes:
        path: The .npz (or folder of .npy) converted from mosi_data.pkl; for a .pkl, the error prints the command.
        modalities: "text", "audio", "vision".
        classes: 7, the class round(clip(score, -3, 3)) + 3, or 2, which is 1 if score >= 0. Both rules are inferred, so
            papers may use others (docs/data.md).
        target: "class", or "score", the sentiment from -3 to 3, for `regression`. With "score", `classes` has no
            effect.
        steps: Number of time steps of a sample, from the first one that is not padding.
        standardise: Whether to scale `audio` and `vision` by training statistics over steps that are not padding.
    """

    NAME: ClassVar[str] = "mosi"

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data mosi` prints them."""
        return Facts(
            title="sentiment of opinion videos, 7 classes, 1,284 / 229 / 686 segments",
            modalities={"text": "(50, 300) GloVe", "audio": "(50, ...)", "vision": "(50, ...)"},
            licence="as the CMU MultiComp Lab states; the videos belong to their YouTube uploaders",
            obtain="the files of the MulT release (Tsai et al. 2019); then, if you trust the pickle: "
            + CONVERT.format(file="mosi_data.pkl", stem="mosi"),
            layout="mosi.npz with {train,valid,test}_{text,audio,vision,labels} and, if there, _id",
        )


def _opened(path: str, what: str) -> Arrays:
    result = existing(path, what)
    if result.suffix in (".pkl", ".pickle", ".dat"):
        raise DataError(
            f"'{result}' is a pickle, which runs code when it is opened; polyfed never does. If you trust it, convert "
            f"it once: {CONVERT.format(file=result, stem=Path(result).stem)}"
        )
    return Arrays(result)


def _labels(arrays: Arrays, name: str) -> Tensor:
    """Return the scores in an array (N,), (N, 1) or (N, 1, 1) as a float32 tensor (N,)."""
    array = arrays[name]
    if array.dtype.kind not in "fiu" or array.size != len(array):
        raise DataError(f"'{arrays.path}': '{name}' must hold one score a row; it is {array.dtype} {array.shape}")
    score = torch.from_numpy(array.reshape(-1).astype(np.float32))
    if not score.isfinite().all() or (score.abs() > 3).any():
        raise DataError(f"'{arrays.path}': '{name}' holds scores outside -3..3. Convert the published file again")
    return score


def _cut(x: Tensor, steps: int) -> Tensor:
    """The first `steps` steps that are not padding, in order, then zeros: float32 (N, steps, F), all finite."""
    if x.dim() != 3:
        raise DataError(f"sequences of shape {tuple(x.shape)}: expected (N, steps, features). Convert the file again")
    x = torch.nan_to_num(x.to(torch.float32), nan=0.0, posinf=0.0, neginf=0.0)
    padding = (x == 0).all(-1)
    order = padding.to(torch.int8).argsort(dim=1, stable=True)[:, :steps]
    kept = x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))
    return torch.nn.functional.pad(kept, (0, 0, 0, steps - kept.shape[1]))


def _scaled(x: Tensor, train: Tensor) -> Tensor:
    """Shift and scale every feature to mean 0 and deviation 1 over the training rows' steps; padding stays 0."""
    real = (x != 0).any(-1)
    seen = x[train][real[train]].double()
    mean, deviation = seen.mean(0), seen.std(0, correction=0)
    deviation = torch.where(deviation > 1e-6, deviation, 1.0)  # a constant feature is centred, but not scaled
    return torch.where(real[..., None], ((x - mean) / deviation).float(), 0.0)


def _videos(arrays: Arrays, num: int) -> Tensor | None:
    """Return the video number of every row, int64 (N,), from the arrays `<part>_id`. Return None if there are no ids.

    An id is `video[segment]`, or the triple (video, start, end).
    """
    if any(f"{part}_id" not in arrays for part, _ in _PARTS):
        return None
    ids = [arrays[f"{part}_id"] for part, _ in _PARTS]
    first = np.concatenate([(part.reshape(len(part), -1)[:, 0]).astype(str) for part in ids])
    if len(first) != num:
        raise DataError(f"'{arrays.path}': {len(first)} ids for {num} rows. Convert the file again")
    videos = np.array([name.split("[")[0] for name in first])
    return torch.from_numpy(np.unique(videos, return_inverse=True)[1].astype(np.int64))
