"""cg-digits: every scanned digit of scikit-learn as a gray and a coloured image. This source needs no files."""

from dataclasses import dataclass

import torch
from typing_extensions import override

from polyfed.core import keys
from polyfed.data.column_scaling import standardised
from polyfed.data.columns import Columns
from polyfed.data.population.splits import stratified
from polyfed.data.sources.base import Facts, Source
from polyfed.data.sources.pictures import colour


@dataclass(frozen=True, kw_only=True)
class CgDigits(Source):
    """1,797 scans of 8 x 8 pixels, each as `gray` (1, 8, 8) and `color` (3, 8, 8), coloured like `cg-mnist`.

    Training colours reveal the label, but test colours do not. A model that relies on colour therefore fails the test.
    A fifth of the scans of every digit is the test set. These scans are always the same. Both modalities are
    standardised per channel with training statistics.

    Attributes:
        seed: Seed of the colours, the same in all runs.
    """

    seed: int = 0

    @override
    def load(self) -> Columns:
        from sklearn.datasets import load_digits  # slow to import, and only this source needs it

        scans = load_digits()
        label = torch.from_numpy(scans.target).long()
        # 17 gray levels, 0..16, spread over the bytes like any other image
        gray = torch.from_numpy(scans.images * 255.0 / 16.0).round().to(torch.uint8)
        split = stratified(label, 0.2, keys.key("cg-digits", "split"))
        color = colour.painted(gray, colour.colours(label, split, self.seed))
        return standardised(
            Columns(
                name="cg-digits",
                modalities=colour.pair(gray, color),
                label=label,
                num_classes=10,
                split=split,
                ids=torch.arange(len(label)),
                class_names=tuple("0123456789"),
            )
        )

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data cg-digits` prints them."""
        return Facts(
            title="1,797 scanned digits as gray and coloured pairs; only training colours reveal the label",
            modalities={"gray": "(1, 8, 8)", "color": "(3, 8, 8)"},
            licence="UCI Optical Recognition of Handwritten Digits, CC BY 4.0, as bundled with scikit-learn",
            obtain="nothing to fetch: scikit-learn contains the scans",
            layout="no files",
        )
