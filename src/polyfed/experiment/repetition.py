"""Rounds that a deployed run repeats after it was resumed, and that [privacy] has to count."""

import json
from typing import Any

from polyfed.core.files import read_notes, replace_text
from polyfed.experiment.assembly import Assembly
from polyfed.experiment.records import Records

REPEATED = "repeated-rounds.json"
"""The file in the folder of a deployed run that holds the number of repeated rounds."""


def rewound(
    records: Records, places: dict[str, int], round: int, assembly: Assembly
) -> tuple[list[dict[str, Any]], int]:
    """Cut the records back to a checkpoint.

    A deployed run draws its noise from the operating system. A repeated round therefore releases a second result, and
    epsilon counts both. The interrupted round counts too, because its result may have been released.

    Args:
        records: the records of the run.
        places: file name -> size in bytes at the checkpoint.
        round: the round of the checkpoint, or 0 without a checkpoint.
        assembly: the parts of the run.

    Returns:
        The rows of the remaining rounds, and the number of additional rounds that epsilon has to count.

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
