"""Large tensors in mapped files."""

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from polyfed.core.system.mapping import ALIGNED, LARGE, on_disk
from polyfed.core.tree import Tree
from polyfed.experiment.running import checkpoint

TREE: Tree = {
    "odd": torch.arange(3.0),
    "large": torch.rand(LARGE // 4 + 1),
    "small": torch.ones(2, 2, dtype=torch.bool),
    "counts": torch.arange(LARGE // 8 + 3),
    "half": torch.rand(2, LARGE // 4).bfloat16(),
    "turned": torch.rand(600, 900).T,
    "empty": torch.zeros(0, 3),
}


def anonymous() -> float:
    """The memory of this process that belongs to no file, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def most_while(work: Callable[[], object]) -> float:
    """How much of such memory `work` takes at most, beyond what the process has before."""
    before, done, found = anonymous(), Event(), [0.0]

    def watch() -> None:
        while not done.wait(0.0005):
            found.append(anonymous() - before)

    thread = Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return max(found)


def test_a_copy_on_the_disk_has_the_same_bits_in_the_same_order(tmp_path: Path) -> None:
    found = on_disk(TREE, tmp_path)
    assert [*found] == [*TREE]
    for name, value in found.items():
        assert value.dtype == TREE[name].dtype
        assert torch.equal(value, TREE[name])
        assert value.nbytes < LARGE or value.data_ptr() % ALIGNED == 0, "as PyTorch allocates it"
    assert not [*tmp_path.iterdir()], "the file has no name, and nothing stays of a process that is killed"


def test_a_change_stays_with_its_copy(tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in TREE.items()}
    one, other = on_disk(TREE, tmp_path), on_disk(TREE, tmp_path)
    for value in one.values():
        value.zero_()
    assert all(torch.equal(value, before[name]) for tree in (other, TREE) for name, value in tree.items())


def test_a_state_that_is_put_away_leaves_the_memory_and_keeps_its_digest(tmp_path: Path) -> None:
    state = {"round": 3, "models": [{"a": torch.rand(3000, 3000)}, {"b": torch.rand(3000, 3000)}], "loss": 0.5}
    digest, size, before = checkpoint.digest(state), 2 * 36e6, anonymous()
    state = checkpoint.put_away(state, tmp_path, ())
    assert anonymous() - before < -0.9 * size
    assert most_while(lambda: checkpoint.digest(state)) < 0.1 * size, "a digest copies nothing"
    assert checkpoint.digest(state) == digest


def test_a_state_without_large_tensors_stays_as_it_is(tmp_path: Path) -> None:
    state = {"a": torch.rand(10)}
    assert checkpoint.put_away(state, tmp_path, ()) is state


def test_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError):
        on_disk(TREE, Path("/proc/self"))
