"""hf: any data set of the Hugging Face `datasets` library."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import DataError, did_you_mean, require, require_one_of
from polyfed.core.option_checks import BELOW_ONE, check_ranges
from polyfed.data.columns import TEST, TRAIN, VALIDATION, Columns
from polyfed.data.features.listing import Listing, Sample, class_of
from polyfed.data.features.prepared import Prepared
from polyfed.data.media import Clip, Extractor, Image, LogMel, TextEmbedding, Tokens, Values
from polyfed.data.media.clip import optional
from polyfed.data.population.splits import drawn, drawn_note
from polyfed.data.reading.row_facts import persons_of
from polyfed.data.sources.base import Facts
from polyfed.data.sources.media_set import MediaSet

Kind = Literal["image", "text", "tokens", "audio", "values"]
_KINDS = ("image", "text", "tokens", "audio", "values")
_SPLITS = {"train": TRAIN, "test": TEST, "validation": VALIDATION, "valid": VALIDATION, "dev": VALIDATION}
_FILES = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json"}


@dataclass(frozen=True, kw_only=True)
class HuggingFace(MediaSet):
    """A `datasets` table whose columns become modalities. It has the splits train, test, validation (or valid, dev).

    Nothing is downloaded. Save a data set of the hub once with `load_dataset(NAME).save_to_disk(DIR)`.

    Attributes:
        path: A folder that `save_to_disk` wrote, a folder with files `<split>*.parquet`, `.csv` or `.jsonl`, or a
            folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: Modality -> kind: "image", pixels (3, size, size); "text", one embedding by `model`; "tokens", token
            ids (64,); "audio", a log-mel spectrogram (600, 80); "values", numbers, or lists of numbers of one shape.
        columns: Modality -> column of its values, if their names differ.
        label: Column with class numbers or names.
        client: Column with the natural client; empty if there is none.
        person: Column with the person of each row: random splits and partitions keep the rows of a person together.
            Empty if there is none. The words are kept nowhere.
        model: Folder of the model for "text" and "tokens", or its name in the hub's cache.
        size: Height and width of images.
        test_share: Share of every class that is the test set if there is no split test; 0 for none.
        seed: Seed for drawing that test set; the run's own seed has no effect.
    """

    NAME: ClassVar[str] = "hf"
    CHOOSES: ClassVar[tuple[str, ...]] = ("label", "client")

    modalities: Mapping[str, Kind]
    columns: Mapping[str, str] = field(default_factory=dict)
    label: str = "label"
    client: str = ""
    person: str = ""
    model: str = "distilbert-base-uncased"
    size: int = 224
    test_share: Annotated[float, BELOW_ONE] = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges("[data]", self)
        require(bool(self.modalities), "data.modalities", dict(self.modalities), "at least one: modality = kind")
        for name, kind in self.modalities.items():
            require_one_of(f"data.modalities.{name}", kind, _KINDS)
            for role in ("label", "client", "person"):
                other = self._column(name) != getattr(self, role)
                require(other, f"data.{role}", getattr(self, role), "a column that is not in data.modalities too")
        for name in self.columns:
            require(name in self.modalities, "data.columns", name, ", ".join(self.modalities))

    @override
    def extractors(self) -> dict[str, Extractor]:
        kinds: dict[str, Extractor] = {
            "image": Image(size=self.size),
            "text": TextEmbedding(model=self.model),
            "tokens": Tokens(model=self.model),
            "audio": LogMel(per_speaker=bool(self.client)),
            "values": Values(),
        }
        return {name: kinds[kind] for name, kind in self.modalities.items()}

    @override
    def listing(self, root: Path) -> Listing:
        parts = {name: part for name, part in _opened(root, self.cache).items() if name in _SPLITS}
        if not parts:
            raise DataError(f"'{root}' has no split named {', '.join(_SPLITS)}; rename one, as train*.parquet")
        stamp = str(sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in root.rglob("*.*")))
        classes = self._classes(root, parts)
        samples = [
            self._sample(root, name, part, row, classes, stamp)
            for name, part in parts.items()
            for row in range(len(part))
        ]
        if self.person:
            words = [_word(part, self.person, row) for part in parts.values() for row in range(len(part))]
            persons = persons_of(words, f"'{root}': the person column '{self.person}'").tolist()
            samples = [replace(sample, group=number) for sample, number in zip(samples, persons, strict=True)]
        return Listing(samples, classes)

    @override
    def chosen(self) -> Mapping[str, Any]:
        named = {"person": self.person} if self.person else {}  # folders that were prepared before know no person
        return {**super().chosen(), **named}

    @override
    def person_of(self, prepared: Prepared) -> Tensor | None:
        return prepared.groups() if self.person else None

    @override
    def load(self) -> Columns:
        columns = super().load()
        read = {name: (self._column(name),) for name in columns.modalities}
        columns = replace(columns, origin=read | {"labels": (self.label,)})
        rows = columns.rows(TRAIN)
        if not self.test_share or len(columns.rows(TEST)) or not len(rows):
            return columns
        split = columns.split.clone()
        person = None if columns.person is None else columns.person[rows]
        split[rows] = drawn(columns.label[rows], self.test_share, self.seed, person)
        return replace(columns, split=split, notes=(*columns.notes, drawn_note(self.test_share)))

    def _classes(self, root: Path, parts: Mapping[str, Any]) -> tuple[str, ...]:
        wanted = [self.label, *filter(None, (self.client, self.person)), *map(self._column, self.modalities)]
        for name, part in parts.items():
            for column in wanted:
                if column not in part.column_names:
                    raise DataError(
                        f"'{root}', split {name}: no column '{column}'; {did_you_mean(column, part.column_names)}"
                    )
        listed = [getattr(part.features[self.label], "names", None) for part in parts.values()]
        if all(names is not None for names in listed):
            return tuple(dict.fromkeys(name for names in listed for name in names or ()))
        if any(names is not None for names in listed):
            raise DataError(
                f"'{root}': column '{self.label}' has names of classes in some splits and none in others. Save all "
                "splits with the same features"
            )
        result = {value for part in parts.values() for value in part.unique(self.label)}
        if not all(isinstance(value, int | str) and not isinstance(value, bool) for value in result):
            raise DataError(
                f"'{root}': column '{self.label}' must hold class numbers or names, found "
                f"{', '.join(sorted(map(repr, result))[:3])}"
            )
        is_numbers = all(isinstance(value, int) for value in result)
        return tuple(str(n) for n in range(max(result) + 1)) if is_numbers else tuple(sorted(map(str, result)))

    def _column(self, modality: str) -> str:
        return self.columns.get(modality, modality)

    def _sample(self, root: Path, split: str, part: Any, row: int, classes: tuple[str, ...], stamp: str) -> Sample:
        where = f"'{root}', split {split}, row {row}"
        label = _word(part, self.label, row)
        number = label if isinstance(label, int) else class_of(str(label), classes, where)
        if not 0 <= number < len(classes):
            raise DataError(f"{where}: label {number}, allowed: 0 to {len(classes) - 1}")
        media = {
            name: Clip(f"{where}, {self._column(name)}", held=_cell(part, row, self._column(name)), stamp=stamp)
            for name in self.modalities
        }
        client = str(_word(part, self.client, row)) if self.client else ""
        return Sample(f"{split}/{row}", number, media, _SPLITS[split], client)

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data hf` prints them."""
        return Facts(
            title="any table of the Hugging Face datasets library, columns chosen by name",
            modalities={"<name>": "image, text, tokens, audio or values"},
            licence="that of the data set: read its card",
            obtain="datasets.load_dataset(NAME).save_to_disk(DIR), once",
            layout="a folder of save_to_disk, or <split>*.parquet, .csv, .jsonl",
        )


def _word(part: Any, column: str, row: int) -> Any:
    """Return a cell, or the name of the class for which its number stands in this split."""
    value, names = part[column][row], getattr(part.features[column], "names", None)
    return names[value] if names is not None and isinstance(value, int) and 0 <= value < len(names) else value


def _cell(part: Any, row: int, column: str) -> Any:
    def read() -> Any:
        value = part[row][column]
        if isinstance(value, dict):  # an image or a sound that is not decoded
            return value["bytes"] if value.get("bytes") else Path(value["path"]).read_bytes()
        return value

    return read


def _opened(root: Path, cache: str) -> dict[str, Any]:
    """Return a dictionary: split -> its table. Images and sounds are not decoded."""
    datasets = optional("datasets", "text")
    try:
        if (root / "dataset_dict.json").is_file():
            result = dict(datasets.load_from_disk(str(root)))
        elif (root / "state.json").is_file():
            result = {"train": datasets.load_from_disk(str(root))}
        else:
            result = _from_files(datasets, root, cache)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"'{root}' cannot be opened by datasets ({error}). Save it again with save_to_disk") from error
    return {name: _undecoded(datasets, part) for name, part in result.items()}


def _from_files(datasets: Any, root: Path, cache: str) -> dict[str, Any]:
    for suffix, kind in _FILES.items():
        files = {name: sorted(map(str, root.glob(f"{name}*{suffix}"))) for name in _SPLITS}
        files = {name: found for name, found in files.items() if found}
        if files:
            return dict(datasets.load_dataset(kind, data_files=files, cache_dir=cache or None))
    raise DataError(f"'{root}' holds neither a saved table nor <split>*{', *'.join(_FILES)}")


def _undecoded(datasets: Any, part: Any) -> Any:
    for column, feature in part.features.items():
        if isinstance(feature, datasets.Image | datasets.Audio):
            part = part.cast_column(column, type(feature)(decode=False))
    return part
