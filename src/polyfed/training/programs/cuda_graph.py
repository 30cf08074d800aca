"""CUDA graphs of training steps: one call starts all operations of a step on the GPU.

A program (`step_program.py`) calls the operations of a step one after another. On a GPU, each call takes some
microseconds of the processor's time, which is often longer than the operation. CUDA can record all operations of a step
as a *graph* and repeat them with one call. A graph repeats its operations at fixed addresses. polyfed therefore
copies to these addresses: the state at the start of a local training, the inputs of each step, and those tensors that
lie at another address in a later local training.

A graph must pass a test before it is used: it must give the same numbers as the program's first step.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from polyfed.training.programs.check import same_bits
from polyfed.training.programs.memory import NO_TENSOR, args, form, is_operation
from polyfed.training.programs.tensor_memory import (
    copies_of,
    copy_of,
    fill,
    memory_of,
    overlap,
    repeats,
    same_memory,
    with_own_memory,
)

WARM_UP = 3
"""How many times a step runs before CUDA records it, so that libraries such as cuBLAS prepare themselves. PyTorch's
notes on CUDA graphs use the same number (pytorch.org/docs, "CUDA semantics", "Whole-network capture")."""

SHARE = 0.125
"""If the copies of a thread's graphs take more than this share of the GPU's memory, `graph_of` deletes these graphs
before it makes another one. It is half of what a stack of clients may take."""

_aten = torch.ops.aten

INDEXING = {_aten.index, _aten._unsafe_index, _aten.index_put, _aten.index_put_, _aten._unsafe_index_put}
"""Operations that must wait for the values of an index if this index is a mask."""

WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""PyTorch's tags of operations that must wait for values of their arguments."""

Step = Callable[..., Any]
"""`step(*state, *slices, *lookups, *outside, *early)` -> (*state, value); see `Program`."""


class Steps(Protocol):
    """The two functions of a program that `StepGraph` calls."""

    once: Step
    """`once(*state, *outside)` returns what all steps share."""
    step: Step


class _Graphs(threading.local):
    """The graphs of one Python thread. Two threads that used one graph would overwrite each other's state."""

    def __init__(self) -> None:
        self.of: dict[Steps, StepGraph] = {}
        self.recorded: list[Any] = []
        self.stream: Any = None
        self.pool: Any = None


_graphs = _Graphs()


def graph_of(program: Steps, state: Sequence[Tensor], outside: Sequence[Tensor]) -> "StepGraph":
    """Return this thread's graph of a program, ready for the first step; see `StepGraph.begin`.

    If the copies of all graphs take too much memory, this function deletes all graphs before it makes another one.
    """
    if program not in _graphs.of:
        if sum(graph.size_bytes for graph in _graphs.of.values()) > SHARE * memory_bytes(state[0].device):
            forget_graphs()
        _graphs.of[program] = StepGraph(program)
    found = _graphs.of[program]
    found.begin(state, outside)
    return found


def forget_graphs() -> None:
    """Delete the graphs of this thread, and free their memory.

    All graphs of a thread share one stream and one pool of memory, and they are deleted together: PyTorch 2.13 frees
    the workspace of cuBLAS for all graphs of a stream when one of them is deleted (PyTorch issue 193402).
    """
    _graphs.of.clear()
    _graphs.recorded.clear()
    _graphs.stream = _graphs.pool = None


def memory_bytes(device: torch.device) -> int:
    """Return the size of a GPU's memory in bytes."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def recordable(graph: fx.Graph, fixed: Iterable[fx.Node]) -> bool:
    """Return whether CUDA can record the operations of a step.

    All tensors must be on one GPU, and neither a Python number nor a shape may depend on the values of tensors.

    Args:
        graph: the graph of a step.
        fixed: the inputs that a step makes from Python numbers. They may be on the CPU.
    """
    numbers, devices = set(fixed), set()
    for node in graph.nodes:
        if is_operation(node) and _waits(node):
            return False
        if form(node) is not NO_TENSOR and node not in numbers:
            devices.add(form(node).device)
    return len(devices) == 1 and on_gpu(devices.pop())


def _waits(node: fx.Node) -> bool:
    """Return whether an operation needs values of tensors before the GPU can begin it."""
    op: Any = node.target
    if op.overloadpacket in INDEXING:
        return any(form(index).dtype in (torch.bool, torch.uint8) for index in args(node)[1] if index is not None)
    return bool(WAITING.intersection(op.tags))


def on_gpu(device: torch.device) -> bool:
    """Return whether CUDA records operations on this device."""
    return device.type == "cuda"


def record(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record the operations of a step on the GPU.

    Args:
        step: takes the step. It reads and writes the same memory in every call.

    Returns:
        A function that repeats the operations, and the tensor that `step` returned. Each repetition changes this
        tensor.
    """
    current = torch.cuda.current_stream()
    stream = _graphs.stream = _graphs.stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
    pool = _graphs.pool = _graphs.pool or torch.cuda.graph_pool_handle()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # other threads may allocate memory on the GPU meanwhile
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        made = step()
    _graphs.recorded.append(graph)
    return graph.replay, made


class DirectSteps:
    """Takes the steps of a program by calling its operations.

    Args:
        program: the program.
        state: the state before the first step; the steps may change it in place.
        outside: the tensors that the steps close over.

    Attributes:
        state: the state after the last step.
    """

    def __init__(self, program: Steps, state: Sequence[Tensor], outside: Sequence[Tensor]) -> None:
        self.state, self._outside = list(state), outside
        self._step, self._early = program.step, program.once(*state, *outside)

    def take(self, inputs: Sequence[Tensor | None], found: Sequence[Tensor]) -> Tensor:
        """Take a step, and return the value of the loss; see `StepGraph.take`."""
        value: Tensor
        *self.state, value = self._step(*self.state, *inputs, *found, *self._outside, *self._early)
        return value

    def end(self) -> list[Tensor]:
        """Return the state after the last step."""
        return self.state


class StepGraph:
    """Takes the steps of a program with a CUDA graph, or by direct calls if there is no graph or its test fails.

    Args:
        program: the program.

    Attributes:
        size_bytes: memory of the copies that the graph needs, in bytes.
    """

    def __init__(self, program: Steps) -> None:
        self._program = program
        self._replay: Callable[[], None] | None = None
        self._unfit = False
        self._direct: DirectSteps | None = None
        self._moving: set[int] = set()
        self._state: list[Tensor] = []
        self._outside: list[Tensor] = []
        self._early: list[Tensor] = []
        self._own: list[int] = []
        self._inputs: list[Tensor | None] = []
        self.size_bytes = 0

    def begin(self, state: Sequence[Tensor], outside: Sequence[Tensor]) -> None:
        """Start a local training.

        Args:
            state: the state before the first step; the steps may change it in place.
            outside: the tensors that the steps close over. The graph reads each of them at its address. If a later
                local training passes one at another address, this object makes the graph again, and copies the tensor
                from then on.
        """
        if self._unfit:
            self._direct = DirectSteps(self._program, state, outside)
            return
        if self._replay is not None:
            pairs = enumerate(zip(self._outside, outside, strict=True))
            moved = {place for place, (held, given) in pairs if not same_memory(held, given)} - self._moving
            self._moving |= moved
            self._replay = None if moved else self._replay
        if self._replay is None:
            if any(map(repeats, [*state, *(outside[place] for place in self._moving)])):
                self._unfit, self._direct = True, DirectSteps(self._program, state, outside)
                return
            self._state = copies_of(state)
            self._outside = [copy_of(t) if place in self._moving else t for place, t in enumerate(outside)]
            self._early = list(self._program.once(*self._state, *self._outside))
            self._own = with_own_memory(self._early, [*self._state, *self._outside])
            return
        fill(self._state, state)
        fill(self._outside, outside)
        early = self._program.once(*self._state, *self._outside)
        fill([self._early[place] for place in self._own], [early[place] for place in self._own])

    def take(self, inputs: Sequence[Tensor | None], found: Sequence[Tensor]) -> Tensor:
        """Take a step, and return the value of the loss.

        Args:
            inputs: the inputs of the step; None for those that the step does not read.
            found: the rows that the program has looked up for this step.
        """
        if self._direct is not None:
            return self._direct.take(inputs, found)
        if self._replay is None:
            return self._first(inputs, found)
        fill(self._inputs, [*inputs, *found])
        self._replay()
        return self._value.clone()

    def end(self) -> list[Tensor]:
        """Return the state after the last step. Later local trainings do not change it."""
        direct, self._direct = self._direct, None  # otherwise this object would keep the state
        return copies_of(self._state) if direct is None else direct.end()

    def _first(self, inputs: Sequence[Tensor | None], found: Sequence[Tensor]) -> Tensor:
        """Take a step by direct calls, and make the graph for the following steps."""
        direct = DirectSteps(self._program, copies_of(self._state), self._outside)
        before, self._inputs = copies_of(self._state), copies_of([*inputs, *found])
        value = direct.take(inputs, found)
        try:
            if overlap(direct.state):
                raise _Unfit
            self._replay, self._value = record(self._recorded)
            fill(self._state, before)
            self._replay()
            if not all(map(same_bits, [*self._state, self._value], [*direct.state, value])):
                raise _Unfit
            if any(kept.stride() != new.stride() for kept, new in zip(self._state, direct.state, strict=True)):
                raise _Unfit  # the next step would round differently
        except (_Unfit, RuntimeError) as error:
            if not isinstance(error, _Unfit):
                warnings.warn(f"[engine] cuda_graphs: some steps run without a CUDA graph: {error}", stacklevel=2)
            self._unfit, self._replay, self._direct, self.size_bytes = True, None, direct, 0
            self._state, self._outside, self._early, self._inputs = [], [], [], []
            return value
        copies = [*self._state, *self._inputs, *self._early, *(self._outside[place] for place in self._moving)]
        self.size_bytes = sum(tensor.nbytes for tensor in copies if tensor is not None)
        return value

    def _recorded(self) -> Tensor:
        """Take a step from the copies of its inputs, and write the new state over the old state."""
        *after, value = self._program.step(*self._state, *self._inputs, *self._outside, *self._early)
        # a result may lie in the memory of the old state, which `fill` changes
        made: Tensor = value.clone()
        old = set(map(memory_of, self._state))
        moved = [
            copy_of(new) if memory_of(new) in old and not same_memory(kept, new) else new
            for kept, new in zip(self._state, after, strict=True)
        ]
        fill(self._state, moved)
        return made


class _Unfit(Exception):
    """A graph cannot take the steps of this program, or does not give the results of the program."""
