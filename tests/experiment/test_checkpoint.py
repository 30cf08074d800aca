from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.algorithms.averaging import State
from polyfed.core.errors import CheckpointError
from polyfed.experiment.running import checkpoint
from refusals import refuses


@dataclass(frozen=True)
class Odd:
    """A state with everything a state may hold."""

    by_client: dict[int, Any] = field(default_factory=dict)
    history: tuple[Any, ...] = ()
    best: float | None = None


PLAIN = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text()
NESTS = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(NESTS)
def test_any_nest_of_plain_values_comes_back_as_it_was(nest: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    back = checkpoint.unpack(checkpoint.pack(nest, tensors), tensors, [State.__module__])
    assert back == nest
    assert type(back) is type(nest)


def test_tensors_of_all_types_and_shapes_come_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    values = {
        "view": base[:, 1],
        "half": base.to(torch.float16),
        "bfloat": base.to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        "flags": base > 3,
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    state = Odd({3: values, 7: State(values)}, (values["view"], 1.5), None)
    checkpoint.save(tmp_path, 4, state, [Odd.__module__])
    found = checkpoint.load(tmp_path, [Odd.__module__])
    assert found is not None
    assert found[0] == 4
    assert checkpoint.digest(found[1]) == checkpoint.digest(state)
    for name, value in values.items():
        back = found[1].by_client[3][name]
        assert back.dtype == value.dtype
        assert back.shape == value.shape


def test_digests_tell_values_types_shapes_and_structure_apart() -> None:
    one = torch.ones(2, 2)
    nests = [{"a": one}, {"b": one}, {"a": one * 2}, {"a": one.view(4)}, {"a": one.double()}, [one], {"a": one, "b": 1}]
    assert len({checkpoint.digest(nest) for nest in nests}) == len(nests)


def test_only_the_newest_is_kept(tmp_path: Path) -> None:
    for round in (1, 2, 3):
        checkpoint.save(tmp_path, round, {"x": torch.ones(1)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "round-000003"]


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"x": torch.ones(1)})
    with refuses(CheckpointError, "test_checkpoint:Odd"):
        checkpoint.save(tmp_path, 2, {"odd": [Odd()]})
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[0] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "round-000001"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None


class Pair(NamedTuple):
    """A tuple that would come back as a plain one."""

    one: int


class Level(IntEnum):
    """A number that would come back as a plain one."""

    low = 1


@pytest.mark.parametrize("value", [{1}, Pair(1), Level.low, np.int64(3), np.zeros(2), object()])
def test_what_would_not_come_back_as_it_was_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    with refuses(CheckpointError, f"holds a {type(value).__name__}"):
        checkpoint.save(tmp_path, 1, {"state": value})


def test_a_class_of_a_function_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Inner:
        x: int

    with refuses(CheckpointError, "defined"):
        checkpoint.save(tmp_path, 1, Inner(1), modules=[__name__])


def test_a_changed_number_is_found_although_the_file_can_still_be_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"x": torch.ones(4)})
    tensors = tmp_path / "round-000001" / checkpoint.TENSORS
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with refuses(CheckpointError, "its SHA-256 differs"):
        checkpoint.load(tmp_path)
