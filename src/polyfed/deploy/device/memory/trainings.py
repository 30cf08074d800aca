"""What a device keeps of a task that trains, so that the task goes on if its process dies.

`KeptProgress` writes the state of a training from time to time. The states go as soon as the reply is on the disk, or
the client is asked something else in the run.
"""

import json
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import CheckpointError
from polyfed.core.system.files import sync
from polyfed.core.system.json_and_toml import parse_json
from polyfed.deploy.device.memory.store import ClientStore, DeviceStore, Memory
from polyfed.deploy.faults import log_problem
from polyfed.engines.protocol import RequestId, versions
from polyfed.experiment.running.checkpoint import pack, separate, unpack
from polyfed.training.progress import PartOfTraining, Progress

_OF = "run = ? AND client = ?"


class KeptProgress(Progress):
    """The local trainings of a task, whose states a device writes to its store.

    Args:
        store: the client's part of the store.
        request_id: the request that the task answers.
        use: digest of everything that decides the reply; see `digest_of_use`.
        seconds: see `Progress`.
    """

    def __init__(self, store: ClientStore, request_id: RequestId, use: str, seconds: float) -> None:
        super().__init__(seconds)
        self.store, self.place = store, request_id.place
        self.use = json.dumps(
            [use, versions(), torch.__version__, torch.get_num_threads()]
        )  # which decide the rounding

    @override
    def found(self, number: int) -> PartOfTraining | None:
        try:
            with self.store.transaction() as memory:
                query = f"SELECT steps, skeleton, digest FROM trainings WHERE {_OF} AND use = ? AND number = ?"
                row = memory.rows.execute(query, (memory.run, memory.client, self.use, number)).fetchone()
                if row is None:
                    return None
                steps, skeleton, digest = row
                tensors = load_file(memory.checked("trainings", (*self.place, number, steps), digest))
            # copies, because a file gives less alignment than PyTorch, and operations round by it
            part: PartOfTraining = unpack(parse_json(skeleton), {n: t.clone() for n, t in tensors.items()}, ())
        except (CheckpointError, OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            log_problem(f"the state of a training cannot be read, so it begins again: {error}")
            return None
        log_problem(f"the training goes on after step {steps}")
        return part

    @override
    def keep(self, number: int, part: PartOfTraining) -> None:
        tensors: dict[str, Tensor] = {}
        skeleton, steps = json.dumps(pack(part, tensors)), len(part.losses)
        try:
            with self.store.transaction() as memory:
                place = (*self.place, number, steps)
                digest = memory.write("trainings", place, partial(_save, separate(tensors)))
                row = (memory.run, memory.client, *place, self.use, skeleton, digest)
                memory.rows.execute("INSERT OR REPLACE INTO trainings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        except (CheckpointError, OSError, SafetensorError) as error:
            log_problem(f"the state of the training could not be kept; it goes on: {error}")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    path.chmod(0o600)


def forget_trainings(memory: Memory, progress: KeptProgress | None = None) -> None:
    """Forget the states of the trainings of a client and run, except those of the task of `progress`."""
    use = None if progress is None else progress.use
    memory.rows.execute(f"DELETE FROM trainings WHERE {_OF} AND use IS NOT ?", (memory.run, memory.client, use))


def forget_answered(folder: Path, request_id: RequestId, reply: Path) -> None:
    """Forget the states of the trainings of a task once its reply, which is in a file, is on the disk."""
    store = DeviceStore(folder)
    if any(store.folder_of(request_id.run, request_id.client).glob("training-*")):
        sync(reply)
        sync(reply.parent)
        with store.alone(request_id.run, request_id.client) as own:
            assert own is not None, "the lock was waited for"
            with own.transaction() as memory:
                forget_trainings(memory)
