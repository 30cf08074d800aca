"""The names of the files of a run, and writing files safely."""

import os
from pathlib import Path

ROUNDS, EGRESS, RESULT, RECIPE, FACTS = (
    "rounds.jsonl",
    "egress.jsonl",
    "result.json",
    "recipe.toml",
    "run.json",
)


STUDY = "study.json"
"""The file in the folder of a sweep that lists its runs."""

AUDIT, PUBLIC_KEY = "audit.jsonl", "audit-key.pub"
"""The audit log in the folder of a node, and the public key that checks it."""


def replace_text(path: Path, text: str) -> None:
    """Write a file so that readers see either the old or the whole new text, even after a power failure."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
