"""How the tensors of an engine reach the nodes of a cluster: in Ray's object store, or in a folder that all nodes read.

Ray gives the arrays of its object store to all actors of a node as views of one piece of memory. Files of a folder that
all nodes read do the same: actors map them, so that a page of a file is in a node's memory once, and the system takes
the memory back when it needs it.
"""

import os
import stat
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import RecipeError
from polyfed.core.system.files import sync

LARGE = 2**20
"""Least bytes of a tensor that the actors of a node share. They must not write to it, so small ones are copied."""

Content = tuple[NDArray[Any] | str, torch.dtype, tuple[int, ...]]
"""The bytes of a tensor, or the path of the file that holds them; its type, and its shape."""


class SharedFolder:
    """A folder that all nodes read, for the large tensors of an engine.

    The name of a file is the SHA-256 of its content, so that further runs with the same data use the file again. Nobody
    deletes it.

    Args:
        path: the folder. If it does not exist, it is made for this user alone, since it holds the clients' data.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def content_of(self, tensor: Tensor) -> Content:
        """Return the content of a tensor. If it is large, write its bytes to a file, unless the file exists.

        Raises:
            RecipeError: the file cannot be written.
        """
        array, dtype, shape = content_of(tensor)
        assert not isinstance(array, str)
        if array.nbytes < LARGE:
            return array, dtype, shape
        path = self.path / f"{sha256(array.data).hexdigest()}.npy"
        if not _holds(path, array):
            with self._written(path) as draft, open(draft, "xb") as file:
                np.save(file, array)
        return str(path), dtype, shape

    @contextmanager
    def probe(self) -> Iterator[Path]:
        """Make the folder, and a file in it that a node can try to read. The file is deleted after this block.

        Raises:
            RecipeError: this machine cannot write to the folder.
        """
        path = self.path / f".probe-{uuid.uuid4().hex}"
        with self._written(path) as draft:
            draft.write_bytes(b"polyfed")
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _written(self, path: Path) -> Iterator[Path]:
        """Yield the path of a draft, which becomes the file in one step: no node ever reads a part of it."""
        draft = self.path / f".draft-{uuid.uuid4().hex}"
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._refuse_everybody()
            yield draft
            sync(draft)
            os.replace(draft, path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise RecipeError(
                f"[engine] shared_folder = '{self.path}': this machine cannot write there ({error.strerror or error}). "
                "Choose a folder with enough space that all nodes read and this machine writes",
                ("engine", "shared_folder"),
            ) from error

    def _refuse_everybody(self) -> None:
        """Refuse a folder in which everybody can replace a file, which changes the data of a run that has mapped it.

        Raises:
            RecipeError: everybody can write there.
        """
        if self.path.stat().st_mode & stat.S_IWOTH:
            raise RecipeError(
                f"[engine] shared_folder = '{self.path}': every user can write there, and so change the data of a run. "
                f"Take this right away (chmod o-w {self.path}), or choose another folder",
                ("engine", "shared_folder"),
            )


def content_of(tensor: Tensor) -> Content:
    """Return the bytes of a tensor, for the object store."""
    plain = tensor.detach().cpu().contiguous().view(-1)
    return plain.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def tensor_of(content: Content) -> Tensor:
    """Return the tensor on a node. A large one reads the object store or the file in place.

    Raises:
        OSError: the node cannot read the file.
    """
    array, dtype, shape = content
    if isinstance(array, str):  # changes would stay in the memory of the process
        array = np.load(array, mmap_mode="c", allow_pickle=False)
    if not array.nbytes:
        return torch.empty(shape, dtype=dtype)
    if array.nbytes < LARGE:
        array = np.array(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a large array of the object store is not writable
        return torch.from_numpy(array).view(dtype).reshape(shape)


def _holds(path: Path, array: NDArray[Any]) -> bool:
    """Return whether a file of this user has this content. One that is damaged, a link or another user's has not."""
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return False  # its owner could change it while it is mapped
        return bool(np.array_equal(np.load(path, mmap_mode="r", allow_pickle=False), array))
    except (OSError, ValueError):
        return False
