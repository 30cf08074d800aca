"""Steps by CUDA graphs give the bits of programs, on a machine without a GPU.

`recorded` stands for CUDA: it notes the operations of a step, and repeats them on the tensors that they had then, as a
graph repeats them at the addresses that they had then. No Python code of the step runs again. What it cannot show: the
kernels, streams and memory pools of CUDA. `tests/engines/test_cuda.py` tests them on a machine with a GPU.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laws.rows import ROWS
from laws.test_laws import params, world
from polyfed.algorithms import Averaging
from polyfed.core.errors import RecipeError
from polyfed.data import Columns
from polyfed.engines.machine.gpu import _with_entries
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from polyfed.training.programs import cuda_graph as step_graph
from polyfed.training.programs import program as step_program
from polyfed.training.programs import replay as step_replay
from polyfed.training.programs.cuda_graph import StepGraph, forget_graphs, recordable
from polyfed.training.programs.trace import Form, makes_view
from world import AWKWARD, PLAIN, furthest, played, recipe, same

NEVER = ("centralized", "split-learning", "splitfed")
"""Methods that train one client, or one batch in a request, so they use no programs."""

GRAPHS = EngineSpec(name="vectorised", device="auto", cuda_graphs=True, debug=True)
aten = torch.ops.aten


class Recorded(TorchDispatchMode):
    """The operations of a step. `replay` repeats them on the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and id(leaf) not in given]
        if not makes_view(op):
            self.calls.append((op, args, kwargs or {}, made))
        return out

    def spoil(self) -> None:
        """Delete all results. A graph has none before its first replay."""
        for *_, made in self.calls:
            for tensor in made:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

    def replay(self) -> None:
        for op, args, kwargs, made in self.calls:
            found = [leaf for leaf in tree_leaves(op(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for kept, new in zip(made, found if made else (), strict=True):
                kept.copy_(new)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    """CUDA graphs on the CPU; the list has all that were made."""
    graphs: list[Recorded] = []

    def record(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        for _ in range(step_graph.WARM_UP):
            step()
        graph = Recorded()
        with graph:
            made = step()
        graph.spoil()
        graphs.append(graph)
        return graph.replay, made

    monkeypatch.setattr(step_graph, "record", record)
    monkeypatch.setattr(step_graph, "on_gpu", lambda device: True)
    monkeypatch.setattr(step_graph, "memory_bytes", lambda device: 2**40)
    monkeypatch.setattr(step_program, "GRAPHED", 1)
    monkeypatch.setattr(step_replay, "FEW", 2)
    monkeypatch.setattr(step_replay, "_known", OrderedDict())
    yield graphs
    forget_graphs()


def directly(made: Recipe) -> Recipe:
    return replace(made, engine=replace(made.engine, cuda_graphs=False))


@pytest.mark.parametrize("encoders", [PLAIN, AWKWARD], ids=["plain", "batchnorm+dropout"])
@pytest.mark.parametrize("name", sorted(ROWS))
def test_graphs_give_the_bits_of_programs(name: str, encoders: Any, recorded: list[Recorded]) -> None:
    made = replace(world(name, "vectorised", encoders), engine=GRAPHS)
    here, state, ledger = played(made)
    made_graphs = len(recorded)
    other, plain, plain_ledger = played(directly(made))
    assert len(recorded) == made_graphs
    assert (made_graphs > 0) == (name not in NEVER)
    assert same(params(state), params(plain))
    assert ledger == plain_ledger
    for client, tree in here.engine.locals.items():
        assert same(tree, other.engine.locals[client]), f"local state of client {client}"


def test_later_rounds_make_no_more_graphs(recorded: list[Recorded]) -> None:
    made = replace(world("fedprox", "vectorised"), engine=GRAPHS)
    made = replace(made, algorithm=replace(made.algorithm, selector=Uniform(participation=6)))
    played(replace(made, rounds=2))  # in round 2, the server's model lies elsewhere
    few = len(recorded)
    assert few
    forget_graphs()
    recorded.clear()
    played(replace(made, rounds=6))
    assert len(recorded) == few


def test_graphs_read_the_rows_that_are_copied_before_each_task(
    recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of these rows lies elsewhere for each stack of clients."""
    tables = []

    def copied(columns: Columns, rows: Sequence[Tensor], names: Sequence[str], device: torch.device) -> Columns:
        read = torch.unique(torch.cat([part.flatten() for part in rows]))
        near = {name: _with_entries(columns.modalities[name], read, read, device) for name in names}
        tables.append(columns.with_modalities(near))
        return tables[-1]

    made = replace(world("fedprox", "vectorised"), engine=GRAPHS, rounds=4)
    made = replace(made, algorithm=replace(made.algorithm, selector=Uniform(participation=6)))
    _, whole, _ = played(made)
    few = len(recorded)
    monkeypatch.setattr("polyfed.engines.vectorised.with_rows", copied)
    _, parts, _ = played(made)
    assert tables
    assert len(recorded) > few
    assert same(params(whole), params(parts))


@dataclass(frozen=True, kw_only=True)
class Sorting(Averaging):
    """FedAvg with a term that reads one of several results of operations on the received model."""

    def loss(self, context: Any, w: Any, batch: Any, got: Any, local: Any) -> Tensor:
        name = next(key for key, value in got.params.items() if value.dim() == 2)
        first, *_ = got.params[name].split(3)
        term = w[name] - got.params[name].sort(1).values + torch.topk(got.params[name], 2, dim=1).values.sum()
        return super().loss(context, w, batch, got, local) + 0.01 * term.square().mean() + first.mean()


def test_graphs_read_parts_of_operations_on_constants(recorded: list[Recorded]) -> None:
    made = recipe(Sorting(train=Train(lr=0.1, batch_size=16, epochs=2)), GRAPHS)
    _, state, _ = played(made)
    assert recorded
    _, plain, _ = played(directly(made))
    assert same(params(state), params(plain))
    _, single, _ = played(replace(made, engine=EngineSpec(name="sequential")))
    assert furthest(params(single), params(state)) < 1e-5


class Toyed:
    """A program of one step: `step` in place of the operations of a training."""

    def __init__(self, step: Callable[..., Any], once: Callable[..., Any] = lambda *_: ()) -> None:
        self.step, self.once = step, once


def taken(graph: StepGraph, state: Sequence[Tensor], outside: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """The state and the losses after a step with each of these inputs."""
    graph.begin(state, outside)
    losses = [graph.take([value], []) for value in inputs]
    return [tensor.tolist() for tensor in graph.end()], [loss.item() for loss in losses]


INPUTS = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]


def descend(w: Tensor, x: Tensor, rate: Tensor, *early: Tensor) -> tuple[Tensor, Tensor]:
    return w.sub_(rate * x), (w * x).sum()


def test_a_tensor_that_lies_elsewhere_is_read_there(recorded: list[Recorded]) -> None:
    graph = StepGraph(Toyed(descend))
    assert taken(graph, [torch.tensor([10.0])], [torch.tensor([1.0])], INPUTS) == ([[4.0]], [9.0, 14.0, 12.0])
    assert taken(graph, [torch.tensor([10.0])], [torch.tensor([0.0])], INPUTS) == ([[10.0]], [10.0, 20.0, 30.0])
    assert taken(graph, [torch.tensor([10.0])], [torch.tensor([2.0])], INPUTS) == ([[-2.0]], [8.0, 8.0, -6.0])
    assert len(recorded) == 2


def test_a_tensor_that_changes_in_place_is_read_again(recorded: list[Recorded]) -> None:
    graph, rate = StepGraph(Toyed(descend)), torch.tensor([1.0])
    taken(graph, [torch.tensor([10.0])], [rate], INPUTS)
    rate.fill_(2.0)
    assert taken(graph, [torch.tensor([10.0])], [rate], INPUTS)[0] == [[-2.0]]
    assert len(recorded) == 1


def test_what_steps_share_is_computed_again_in_each_training(recorded: list[Recorded]) -> None:
    def step(w: Tensor, x: Tensor, rate: Tensor, doubled: Tensor) -> tuple[Tensor, Tensor]:
        return w - doubled * x, w.sum()

    graph = StepGraph(Toyed(step, lambda w, rate: (2 * rate,)))
    rate = torch.tensor([1.0])
    assert taken(graph, [torch.tensor([20.0])], [rate], INPUTS)[0] == [[8.0]]
    rate.fill_(0.5)
    assert taken(graph, [torch.tensor([20.0])], [rate], INPUTS)[0] == [[14.0]]
    assert len(recorded) == 1


def test_what_steps_share_may_be_views(recorded: list[Recorded]) -> None:
    def once(w: Tensor, rate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        doubled = 2 * rate
        return doubled, doubled.expand(3), w.view(1, 1)  # no operation may write into the expanded tensor

    def step(w: Tensor, x: Tensor, rate: Tensor, doubled: Tensor, three: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        w.sub_(three.sum() * x)
        return w, own.sum() + doubled.sum()

    graph, rate = StepGraph(Toyed(step, once)), torch.tensor([1.0])
    assert taken(graph, [torch.tensor([20.0])], [rate], INPUTS) == ([[-16.0]], [16.0, 4.0, -14.0])
    rate.fill_(0.5)
    assert taken(graph, [torch.tensor([20.0])], [rate], INPUTS) == ([[2.0]], [18.0, 12.0, 3.0])
    assert len(recorded) == 1


def test_a_graph_changes_neither_the_given_state_nor_an_earlier_result(recorded: list[Recorded]) -> None:
    graph, start, rate = StepGraph(Toyed(descend)), torch.tensor([10.0]), torch.tensor([1.0])
    graph.begin([start], [rate])
    losses = [graph.take([value], []) for value in INPUTS]
    (after,) = graph.end()
    taken(graph, [torch.tensor([100.0])], [rate], INPUTS)
    assert (start.item(), after.item()) == (10.0, 4.0)
    assert [loss.item() for loss in losses] == [9.0, 14.0, 12.0]


def test_two_tensors_of_the_state_may_swap(recorded: list[Recorded]) -> None:
    graph = StepGraph(Toyed(lambda a, b, x: (b, a, x.sum())))
    state = [torch.tensor([1.0]), torch.tensor([2.0])]
    assert taken(graph, state, [], INPUTS) == ([[2.0], [1.0]], [1.0, 2.0, 3.0])
    assert len(recorded) == 1


def test_a_loss_may_be_a_part_of_the_state(recorded: list[Recorded]) -> None:
    graph = StepGraph(Toyed(lambda w, x: (w + x, w[0])))
    assert taken(graph, [torch.tensor([1.0])], [], INPUTS) == ([[7.0]], [1.0, 2.0, 4.0])
    assert len(recorded) == 1


def test_copies_have_the_strides_of_their_tensors(recorded: list[Recorded]) -> None:
    """With other strides, sums may round differently."""
    state = torch.randn(7, 9)[:, ::2]
    strides: list[tuple[int, ...]] = []

    def step(w: Tensor, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        strides.append(w.stride())
        return w.add_(x), w.sum()

    graph = StepGraph(Toyed(step))
    graph.begin([state], [])
    for value in INPUTS:
        graph.take([value], [])
    assert recorded
    assert {*strides, graph.end()[0].stride()} == {(9, 2)}


def test_a_state_with_repeated_entries_has_no_graph(recorded: list[Recorded]) -> None:
    def step(w: Tensor, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return w * 2, w.sum()

    graph = StepGraph(Toyed(step))
    for _ in range(2):
        ((after,), losses) = taken(graph, [torch.ones(1).expand(3)], [], INPUTS)
        assert after == [8.0, 8.0, 8.0]
        assert losses == [3.0, 6.0, 12.0]
    assert not recorded


def test_a_step_that_changes_the_strides_of_the_state_has_no_graph(recorded: list[Recorded]) -> None:
    def step(w: Tensor, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return (w + x).t().contiguous().t(), w.sum()

    graph = StepGraph(Toyed(step))
    ((after,), _) = taken(graph, [torch.zeros(2, 2)], [], INPUTS)
    assert after == [[6.0, 6.0], [6.0, 6.0]]
    assert graph._unfit


def test_a_program_without_a_graph_keeps_no_state(recorded: list[Recorded]) -> None:
    graph = StepGraph(Toyed(lambda w, x, *_: (w * 2, w.sum())))
    state = torch.ones(1).expand(3)
    taken(graph, [state], [], INPUTS)
    assert graph._direct is None


def test_a_state_whose_tensors_share_memory_has_no_graph(recorded: list[Recorded]) -> None:
    def step(w: Tensor, kept: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w.sub_(x)
        return w, w, kept.sum()

    graph = StepGraph(Toyed(step))
    found = taken(graph, [torch.tensor([10.0]), torch.tensor([5.0])], [], INPUTS)
    assert found == ([[4.0], [4.0]], [5.0, 7.0, 4.0])
    assert not recorded
    assert taken(graph, [torch.tensor([10.0]), torch.tensor([5.0])], [], INPUTS) == found


def wrong(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A graph that does nothing."""
    return lambda: None, step()


def failing(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    step()
    raise RuntimeError("operation not permitted when stream is capturing")


def test_a_graph_with_other_results_is_not_used(recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "record", wrong)
    graph = StepGraph(Toyed(descend))
    for _ in range(2):
        assert taken(graph, [torch.tensor([10.0])], [torch.tensor([1.0])], INPUTS) == ([[4.0]], [9.0, 14.0, 12.0])


def test_steps_that_cuda_cannot_record_run_without_a_graph(
    recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graph, "record", failing)
    graph = StepGraph(Toyed(descend))
    with pytest.warns(UserWarning, match="without a CUDA graph: operation not permitted"):
        found = taken(graph, [torch.tensor([10.0])], [torch.tensor([1.0])], INPUTS)
    assert found == ([[4.0]], [9.0, 14.0, 12.0])
    assert taken(graph, [torch.tensor([10.0])], [torch.tensor([1.0])], INPUTS) == found


def test_graphs_that_take_too_much_memory_are_deleted(
    recorded: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(world("fedavg", "vectorised", PLAIN), engine=GRAPHS)
    _, roomy, _ = played(made)
    enough = len(recorded)
    forget_graphs()
    recorded.clear()
    monkeypatch.setattr(step_graph, "memory_bytes", lambda device: 0)
    _, cramped, _ = played(made)
    assert len(recorded) > enough
    assert same(params(roomy), params(cramped))


def test_threads_do_not_share_graphs(recorded: list[Recorded]) -> None:
    program, state, outside = Toyed(descend), [torch.tensor([10.0])], [torch.tensor([1.0])]
    found = [step_graph.graph_of(program, state, outside)]
    thread = Thread(target=lambda: found.append(step_graph.graph_of(program, state, outside)))
    thread.start()
    thread.join()
    assert found[0] is step_graph.graph_of(program, state, outside)
    assert found[0] is not found[1]


GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def graph_with(op: Any, *inputs: Form, listed: bool = False) -> tuple[fx.Graph, list[fx.Node]]:
    """The graph of one operation on these inputs."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"t{place}") for place in range(len(inputs))]
    for node, one in zip(nodes, inputs, strict=True):
        node.meta["form"] = one
    made = graph.call_function(op, (nodes[0], nodes[1:]) if listed else tuple(nodes))
    made.meta["form"] = inputs[0]
    graph.output((made,))
    return graph, nodes


ROWS_ON_GPU = Form(torch.float32, (3,), GPU)


@pytest.mark.parametrize(
    ("op", "other", "listed", "fit"),
    [
        (aten.mul.Tensor, Form(torch.float32, (3,), GPU), False, True),
        (aten.mul.Tensor, Form(torch.float32, (), CPU), False, False),  # CUDA would keep the number of the first round
        (aten.mul.Tensor, Form(torch.float32, (3,), torch.device("cuda", 1)), False, False),
        (aten.index.Tensor, Form(torch.int64, (2,), GPU), True, True),
        (aten.index.Tensor, Form(torch.int64, (2,), CPU), True, False),
        (aten.index.Tensor, Form(torch.bool, (3,), GPU), True, False),
        (aten.masked_select.default, Form(torch.bool, (3,), GPU), False, False),
    ],
)
def test_what_cuda_can_record(op: Any, other: Form, listed: bool, fit: bool) -> None:
    graph, _ = graph_with(op, ROWS_ON_GPU, other, listed=listed)
    assert recordable(graph, []) == fit


def test_fixed_numbers_may_be_on_the_cpu() -> None:
    graph, (_, number) = graph_with(aten.mul.Tensor, ROWS_ON_GPU, Form(torch.float32, (), CPU))
    assert recordable(graph, [number])


def test_a_step_on_the_cpu_has_no_graph() -> None:
    graph, _ = graph_with(aten.mul.Tensor, Form(torch.float32, (3,), CPU), Form(torch.float32, (3,), CPU))
    assert not recordable(graph, [])


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"replay": False}, {"name": "sequential"}])
def test_graphs_without_effect_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"cuda_graphs = true needs name = 'vectorised', replay = true"):
        replace(GRAPHS, **options)
