"""Extracts the features of a published data set into a folder, as `polyfed data prepare NAME` does."""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from polyfed.core.errors import RecipeError, did_you_mean, require
from polyfed.data.features.extraction import Listener, OnCorrupt
from polyfed.data.features.prepared import Prepared
from polyfed.data.sources import SOURCES
from polyfed.data.sources.media_set import MediaSet


def prepare(
    name: str,
    source_dir: str | Path,
    target_dir: str | Path,
    *,
    workers: int = 1,
    on_corrupt: OnCorrupt = "fail",
    listener: Listener | None = None,
    **options: Any,
) -> Prepared:
    """Extract the features of a data set once.

    The target folder then holds a manifest with checksums, and one `.npy` file for each array (modalities, label,
    split, client, ...). The source itself and the source `npz` read these files with memory mapping. A stopped
    preparation continues. If the source is unchanged and the folder is undamaged, nothing is written.

    Args:
        name: Name of the data source, as in `[data] name`.
        source_dir: The folder of the published data set.
        target_dir: Folder for the features. It is created if necessary, and may not hold features of another data set.
        workers: Number of threads that extract at the same time.
        on_corrupt: "skip" leaves out and reports samples with an unusable file; "fail" stops at the first such file.
        listener: Called as `listener(event, **facts)`, see `polyfed.data.features.extraction`. The event
            "prepare-unchanged" means that there is nothing to do.
        options: More options of the source, as in `[data]`.

    Returns:
        The manifest of the target folder.

    Raises:
        RecipeError: The source or an option is unknown, the source reads its files directly, or a package is missing.
        DataError: A file is missing, malformed or damaged.
    """
    require(workers >= 1, "workers", workers, "at least 1")
    require(on_corrupt in ("skip", "fail"), "on_corrupt", on_corrupt, "'skip' or 'fail'")
    source, target = _source(name, source_dir, options), Path(target_dir).expanduser()
    result = Prepared.read(target)
    if result is not None:
        result.check(source.NAME, source.extractors(), source.chosen())
        if source.matches(result) and not result.damaged():
            if listener is not None:
                listener("prepare-unchanged", name=name, rows=result.num_rows)
            return result
    return source.prepare(target, workers=workers, on_corrupt=on_corrupt, listener=listener)


def _source(name: str, folder: str | Path, options: dict[str, Any]) -> MediaSet:
    if name not in SOURCES:
        raise RecipeError(f"no data source '{name}'; {did_you_mean(name, SOURCES)}")
    cls = SOURCES[name]
    if not issubclass(cls, MediaSet):
        able = ", ".join(sorted(key for key, value in SOURCES.items() if issubclass(value, MediaSet)))
        where = ', path = "DIR"' if "path" in getattr(cls, "__dataclass_fields__", ()) else ""
        raise RecipeError(
            f"'{name}' needs no preparation: a recipe reads it as it is, [data] name = \"{name}\"{where}. "
            f"These need it: {able}"
        )
    allowed = {f.name: f for f in fields(cls) if f.name not in ("path", "cache")}
    for option in options:
        if option not in allowed:
            raise RecipeError(f"data source '{name}' has no option '{option}'; {did_you_mean(option, allowed)}")
    for option, entry in allowed.items():
        if option not in options and entry.default is MISSING and entry.default_factory is MISSING:
            raise RecipeError(f"data source '{name}' needs the option '{option}'")
    return cls(path=str(folder), **options)
