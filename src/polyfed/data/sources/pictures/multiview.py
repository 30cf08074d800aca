"""multiview: objects seen from several sides, in ModelNet's folders (docs/data.md)."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import DataError, did_you_mean, require
from polyfed.core.option_checks import AT_LEAST_ONE, check_ranges
from polyfed.data.columns import TEST, TRAIN, Column, Columns
from polyfed.data.reading.array_files import existing, stored_name
from polyfed.data.sources.base import Facts, Source
from polyfed.data.sources.pictures.picture_files import SUFFIXES, read_picture

LAYOUT = (
    "<class>/{train,test}/<item>...v001.png, ... as the twelve rendered views of ModelNet come "
    "(modelnet40_images_new_12x), or <class>/{train,test}/<item>/<view>.png, as in C-VFL"
)

_NUMBERED = re.compile(r"(?P<item>.+?)[._](?:[A-Za-z]+_)?(?P<view>v?\d+)$")
_SPLITS = {"train": TRAIN, "test": TEST}


@dataclass(frozen=True, kw_only=True)
class MultiView(Source):
    """Each view of an object, or each group of views, is a modality: pictures (C, size, size) scaled to [0, 1].

    Objects that lack one of the views are dropped. Classes are numbered in order of their names. Rows are ordered by
    class, split and object.

    Attributes:
        path: The data set's folder; `polyfed data multiview` prints the layout.
        views: Modality -> names of its views, stacked as channels, such as `{ front = ["v001"], back = ["v007"] }`; by
            default each view of the first object is a modality.
        size: Height and width in pixels; 224 in the papers.
        gray: Whether to use one gray channel for each view instead of three colour channels.
    """

    path: str
    views: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    size: Annotated[int, AT_LEAST_ONE] = 64
    gray: bool = True

    def __post_init__(self) -> None:
        check_ranges("[data]", self)
        require(all(self.views.values()), "data.views", dict(self.views), "one view or more for each modality")

    @override
    def load(self) -> Columns:
        root = existing(self.path, "multi-view pictures")
        classes = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
        objects = [
            (number, code, views)
            for number, name in enumerate(classes)
            for split, code in _SPLITS.items()
            for _, views in sorted(_objects(root / name / split))
        ]
        if not objects:
            raise DataError(f"'{root}' holds no objects. Expected: {LAYOUT}")
        wanted = self.views or {view: (view,) for view in sorted(objects[0][2])}
        whole = [entry for entry in objects if all(view in entry[2] for names in wanted.values() for view in names)]
        if not whole:
            missing = next(view for names in wanted.values() for view in names if view not in objects[0][2])
            raise DataError(f"'{root}': no object has all views; '{missing}': {did_you_mean(missing, objects[0][2])}")
        return Columns(
            name=stored_name(root),
            modalities={name: self._column(whole, names) for name, names in wanted.items()},
            label=torch.tensor([number for number, _, _ in whole]),
            num_classes=len(classes),
            split=torch.tensor([code for _, code, _ in whole], dtype=torch.int8),
            ids=torch.arange(len(whole)),
            class_names=tuple(classes),
        )

    def _column(self, objects: list[tuple[int, int, dict[str, Path]]], names: tuple[str, ...]) -> Column:
        def sample(views: dict[str, Path]) -> Tensor:
            return torch.cat([read_picture(views[name], gray=self.gray, size=self.size) for name in names])

        return Column(torch.stack([sample(views) for _, _, views in objects]), scale=torch.tensor(255.0))

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data multiview` prints them."""
        return Facts(
            title="objects seen from several sides, a modality a view: ModelNet10, ModelNet40, or your own",
            modalities={"<view>": "(1, size, size), or 3 channels with gray = false"},
            licence="ModelNet: for academic use (Z. Wu et al., CVPR 2015)",
            obtain="modelnet40_images_new_12x.tar.gz of the MVCNN authors, or your own renderings",
            layout=LAYOUT,
        )


def _objects(folder: Path) -> Iterator[tuple[str, dict[str, Path]]]:
    """The objects of a folder: name -> (view -> picture file)."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*")):
        if path.is_dir():
            found[path.name] = {file.stem: file for file in sorted(path.iterdir()) if file.suffix.lower() in SUFFIXES}
        elif path.suffix.lower() in SUFFIXES and (parts := _NUMBERED.match(path.stem)):
            found.setdefault(parts["item"], {})[parts["view"]] = path
    yield from found.items()
