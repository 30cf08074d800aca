"""Rounds that a deployed run does again after it was resumed, and that [privacy] has to count."""

import json
from typing import Any

from polyfed.core.files import read_notes, replace_text
from polyfed.experiment.assembly import Assembly
from polyfed.experiment.records import Records

REPEATED = "repeated-rounds.json"
"""File in the folder of a deployed run with the number of rounds that were done again."""


def rewound(
    records: Records, places: dict[str, int], round: int, assembly: Assembly
) -> tuple[list[dict[str, Any]], int]:
    """Cut the records back to a checkpoint.

    A deployed run draws its noise from the operating system. A repeated round therefore releases a second result, and
    epsilon counts both. The interrupted round counts too, because its result may have been released.

    Args:
        records: the records of the run.
        places: file name -> size in bytes at the checkpoint.
        round: the round of the checkpoint; 0 without one.
        assembly: the parts of the run.

    Returns:
        The rows of the rounds that are left, and the number of rounds that epsilon has to count besides them.

    Raises:
        CheckpointError: the files do not hold the rounds up to the checkpoint, or a file is damaged.
    """
    done = len(records.rounds())
    left = records.rewind(places, round)
    if assembly.guarantee is None or not assembly.engine.deployed:
        return left, 0
    path = records.folder / REPEATED
    total = read_notes(path, int).get("rounds", 0)
    if done:
        total += done - round + 1
        replace_text(path, json.dumps({"rounds": total}))
    return left, total
