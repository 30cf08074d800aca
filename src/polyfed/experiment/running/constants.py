"""The constants of a model, which no message and no saved model holds: frozen parameters and constant buffers.

Their digests tell whether a model that was built again computes with the same constants.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import DataError
from polyfed.core.tree import blocks, digest, select
from polyfed.model import Model

_PARTS = (
    ("data", "the data is not that of the run in {}: its labels, splits or features have changed"),
    ("frozen", "the model's frozen parameters are not those of the run in {}: their file has changed"),
    ("init", "the values of [model] init are not those of the run in {}: its copy init.safetensors has changed"),
    (
        "constants",
        "the model's constant buffers are not those of the run in {}: their values depend on more than the run's seed, "
        "for example because they were drawn with NumPy. Draw them with PyTorch, or load them from a file",
    ),
)
"""Parts of the facts that have a digest, and what it means if the digest differs."""


def constant_facts(model: Model) -> dict[str, Any]:
    """Return the entries `frozen` and `constants` of run.json; both are empty dictionaries if there are none.

    `frozen` has the number of frozen parameters by block, and a digest of their values. `constants` has the number and
    a digest of the buffers that no Tree contains.
    """
    frozen, constants = model.frozen, model.constants
    counts = {block: sum(v.numel() for v in select(frozen, [block]).values()) for block in blocks(frozen)}
    return {
        "frozen": {"parameters": counts, "sha256": digest(frozen)} if frozen else {},
        "constants": {"buffers": len(constants), "sha256": digest(constants)} if constants else {},
    }


def refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path, purpose: str) -> None:
    """Compare the digests of data, frozen parameters and constant buffers, because the recipe only names their files.

    A part without a digest, such as a model without frozen parameters, is not compared.

    Args:
        before: the facts of the run in the folder.
        now: the facts now.
        folder: the folder of the run.
        purpose: the start of the sentence, such as `cannot resume`.

    Raises:
        DataError: a digest differs.
    """
    for part, what in _PARTS:
        old, new = ((facts.get(part) or {}).get("sha256") for facts in (before, now))
        if old and new and old != new:
            cure = "Restore it, or start in another folder" if "resume" in purpose else "Restore it"
            raise DataError(f"{purpose}: {what.format(folder)}. {cure}")
