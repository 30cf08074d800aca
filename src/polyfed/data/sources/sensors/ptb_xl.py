"""PTB-XL: ten-second electrocardiograms with limb and chest leads, recorded at many sites; used by FedMultimodal."""

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from typing_extensions import override

from polyfed.core.errors import DataError
from polyfed.core.option_checks import check_ranges
from polyfed.data.columns import LEFT_OUT, TEST, TRAIN, VALIDATION, Columns
from polyfed.data.features.listing import Listing, Sample, class_of, table
from polyfed.data.media import Clip, Ecg, Extractor
from polyfed.data.sources.base import Facts
from polyfed.data.sources.media_set import MediaSet, check_modalities

CLASSES = ("NORM", "MI", "STTC", "CD", "HYP")
_LEADS = {"limb": ("I", "II", "III", "AVR", "AVL", "AVF"), "chest": ("V1", "V2", "V3", "V4", "V5", "V6")}
_CERTAIN = 100.0  # a diagnostic statement counts at this likelihood only, as in FedMultimodal


@dataclass(frozen=True, kw_only=True)
class PtbXl(MediaSet):
    """The modalities are `limb` (1000, 6), leads I to aVF, and `chest` (1000, 6), leads V1 to V6, at 100 Hz.

    The classes are the 5 diagnostic superclasses. The natural clients are the recording sites, and records without a
    site are left out. Folds 1 to 8 are for training, fold 9 is for validation and fold 10 for testing, as the owners of
    the data set propose. Only diagnostic statements with likelihood 100 are used. If `labels` is "one", a record is
    left out if its statements name no superclass or several superclasses. If `labels` is "several", a record is left
    out only if its statements name no superclass. The label of a record is then five values of 0 or 1, for the task
    `multi-label`, as in FedMultimodal.

    Attributes:
        path: Folder with ptbxl_database.csv, or a folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: "limb", "chest".
        labels: Superclasses in the label of a record: "one" or "several".
        min_records: A site with fewer training records is left out of training. FedMultimodal uses 10.
        normalise: "window" standardises every lead over the record (FedMultimodal); "none" keeps millivolts.
    """

    NAME: ClassVar[str] = "ptb-xl"
    CHOOSES: ClassVar[tuple[str, ...]] = ("min_records",)

    modalities: tuple[str, ...] = ("limb", "chest")
    labels: Literal["one", "several"] = "one"
    min_records: int = 10
    normalise: Literal["window", "none"] = "window"

    def __post_init__(self) -> None:
        check_modalities(self.modalities, tuple(_LEADS))
        check_ranges("[data]", self)

    @override
    def chosen(self) -> Mapping[str, Any]:
        return dict(super().chosen()) | ({"labels": self.labels} if self.labels == "several" else {})

    @override
    def load(self) -> Columns:
        columns = super().load()
        if self.labels == "one":
            return columns
        bits = (columns.label.unsqueeze(1) >> torch.arange(len(CLASSES))) & 1
        return replace(columns, label=bits.to(torch.float32), num_classes=len(CLASSES), class_names=CLASSES)

    @override
    def extractors(self) -> dict[str, Extractor]:
        return {name: Ecg(leads=_LEADS[name], normalise=self.normalise) for name in self.modalities}

    @override
    def listing(self, root: Path) -> Listing:
        superclass = _superclasses(root / "scp_statements.csv")
        database = root / "ptbxl_database.csv"
        samples = []
        for row in table(database, ("ecg_id", "site", "scp_codes", "strat_fold", "filename_lr"), self.NAME):
            labels = _labels(database, row, superclass)
            several = self.labels == "several"
            if not labels or (len(labels) > 1 and not several) or not row["site"]:
                continue
            where = f"'{database}', record {row['ecg_id']}"
            numbers = [class_of(name, CLASSES, where) for name in sorted(labels)]
            label = sum(1 << number for number in numbers) if several else numbers[0]
            clip = Clip.at((root / row["filename_lr"]).with_suffix(".dat"))
            context = str(int(float(row["site"])))
            samples.append(Sample(row["ecg_id"], label, dict.fromkeys(_LEADS, clip), _split(database, row), context))
        counts = Counter(sample.client for sample in samples if sample.split == TRAIN)
        few = {sample.client for sample in samples if counts[sample.client] < self.min_records}
        samples = [replace(s, split=LEFT_OUT) if s.split == TRAIN and s.client in few else s for s in samples]
        return Listing(samples, _combinations() if self.labels == "several" else CLASSES)

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data ptb-xl` prints them."""
        return Facts(
            title="21,799 electrocardiograms of 10 s from about 50 sites, 5 diagnostic superclasses",
            modalities={"limb": "(1000, 6) leads I..aVF", "chest": "(1000, 6) leads V1..V6"},
            licence="CC BY 4.0",
            obtain="physionet.org/content/ptb-xl/1.0.3 (Wagner et al. 2020)",
            layout="ptbxl_database.csv, scp_statements.csv, records100/<thousand>/<id>_lr.{hea,dat}",
        )


def _combinations() -> tuple[str, ...]:
    """Return the names of all sets of superclasses. Bit k of a set's index is 1 if the set holds superclass k."""
    sets = ([name for bit, name in enumerate(CLASSES) if number >> bit & 1] for number in range(1 << len(CLASSES)))
    return tuple("+".join(names) or "none" for names in sets)


def _superclasses(file: Path) -> dict[str, str]:
    """Diagnostic statement -> superclass. The first column of the file has no name."""
    result = table(file, ("", "diagnostic", "diagnostic_class"), "ptb-xl")
    return {row[""]: row["diagnostic_class"] for row in result if row["diagnostic"] in ("1", "1.0")}


def _labels(file: Path, row: dict[str, str], superclass: dict[str, str]) -> set[str]:
    try:
        codes = ast.literal_eval(row["scp_codes"])
        return {superclass[code] for code, likelihood in codes.items() if code in superclass and likelihood == _CERTAIN}
    except (ValueError, SyntaxError, AttributeError) as error:
        raise DataError(
            f"'{file}', record {row['ecg_id']}: malformed scp_codes '{row['scp_codes'][:60]}' ({error}). "
            "Restore the published file"
        ) from error


def _split(file: Path, row: dict[str, str]) -> int:
    fold = row["strat_fold"].removesuffix(".0")
    if not fold.isdigit() or not 1 <= int(fold) <= 10:
        raise DataError(f"'{file}', record {row['ecg_id']}: strat_fold '{fold}', allowed: 1 to 10")
    return {9: VALIDATION, 10: TEST}.get(int(fold), TRAIN)
