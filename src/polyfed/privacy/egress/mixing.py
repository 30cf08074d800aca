"""Which blocks of a built model can reveal another modality of their client, and why.

A model, a loss and a method *keep modalities apart* if the training of one modality's block reads another modality only
through the error at the model's outputs. Everything else mixes. `mixing` decides this for the model that was built. It
records the gradients of all parameters as a graph of PyTorch operations, in which the error at the outputs is an input
like any other. A gradient can depend only on the inputs from which a path of this graph leads to it. The graph contains
no values, so the result holds for all parameters, also for those that a hostile server makes.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from polyfed.core.batch import Batch
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.model import Model
from polyfed.model.fusion import FUSIONS, Adapted, Concat, Sum
from polyfed.model.whole_module import WholeModel
from polyfed.objective import Objective
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.training.optimisers import Train

ROWS = 4
"""Rows of the batches in the graph. No operation looks at values, so any number above 1 gives the same graph."""

AVOIDS = '[model] fusion = "concat" with head = [] avoids this'

_SHAPE_ONLY = frozenset(
    {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"}
)
"""Operations that read the shape of a tensor, but none of its values."""

_Source = tuple[str, str]  # ("sample", modality), ("tensor", name in the Tree) or ("error", "")


class Trained(Protocol):
    """The part of a method that `mixing` uses."""

    @property
    def train(self) -> Train:
        """How clients train."""

    @property
    def mixing(self) -> str:
        """Why the method itself mixes modalities; see `Algorithm.mixing`."""


@dataclass(frozen=True)
class Mixing:
    """The answer of `mixing`.

    Attributes:
        blocks: the modalities whose blocks can reveal another modality of the client.
        why: the reason, and the option that avoids it. Empty if no block can.
    """

    blocks: frozenset[str] = frozenset()
    why: str = ""


def mixing(
    method: Trained, objective: Objective, model: Model, own: Collection[str], privacy: Mechanism | None = None
) -> Mixing:
    """Return which blocks of a client's model can reveal another of its modalities, and why.

    Args:
        objective: what the model learns to predict.
        model: the built model.
        own: the client's modalities.
        privacy: how the client protects its replies.
    """
    read = tuple(name for name in model.modalities if name in own)
    if len(read) < 2:
        return Mixing()
    if why := _in_training(method, objective, privacy):
        return Mixing(frozenset(read), why)
    try:
        reached = _reached(_Recorded(model, objective, read))
    except Exception as error:  # whatever the user's own module raises
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return Mixing(frozenset(read), f"polyfed cannot record its operations, as it raises {text}; {AVOIDS}")
    result = {
        name: others for name in reached if (others := reached[name] - {block_of(name)}) and block_of(name) in read
    }
    blocks = frozenset(map(block_of, result))
    return Mixing(blocks, _in_model(model, min(result), min(result[min(result)]))) if result else Mixing()


def _in_training(method: Trained, objective: Objective, privacy: Mechanism | None) -> str:
    """Return why training mixes the modalities of every model, or an empty text."""
    name = type(method).__name__
    if "mixing" not in vars(type(method)):  # what a parent says may be false for a method that changes its loss
        return f'the method {name} does not say that it keeps them apart; `mixing = ""` in its class says so'
    if method.mixing:
        return method.mixing
    if objective.BY_MODALITY:
        return f"the loss of the task '{objective.NAME}' compares their embeddings"
    if method.train.clip_norm:
        return "[train] clip_norm divides the gradient of every block by their common norm; clip_norm = 0 avoids this"
    if privacy is not None and privacy.unit == "example" and not privacy.clip.limits:
        return (
            "[privacy] divides the gradient of a row by its norm over all blocks; "
            '[privacy] clip = "per-block" avoids this'
        )
    return ""


def _in_model(model: Model, name: str, other: str) -> str:
    """Return why the model mixes modalities: the gradient of tensor `name` reads modality `other`."""
    fusion: Any = type(model._fusion)
    if fusion is Concat and not model.linear_head:
        return 'fusion = "concat" passes their sum through the hidden layers of the head; [model] head = [] avoids this'
    if fusion is Sum:
        return f'fusion = "sum" trains the same output layers with all of them; {AVOIDS}'
    if fusion is Adapted:
        return f'fusion = "adapted" passes each of them through one shared projection; {AVOIDS}'
    if named := [name for name, cls in FUSIONS.items() if cls is fusion and cls is not Concat]:
        return f'fusion = "{named[0]}" multiplies them by each other; {AVOIDS}'
    what = "module" if isinstance(model, WholeModel) else "model"
    return (
        f"the gradient of {name} depends on '{other}'; a {what} avoids this if its outputs are a sum of one term for "
        "each modality, and each term has parameters of its own"
    )


@dataclass
class _Recorded:
    """The gradients of a model as a graph of operations.

    The graph holds three calls with the same parameters: a training batch, a training batch in which rows lack
    modalities, and an evaluation batch. So a value that a module keeps for its next call is part of the graph.

    Attributes:
        model: the model.
        objective: makes the outputs whose error is an input of the graph.
        read: the modalities of the batches.
        names: names of the tensors of the Tree, in the order of the graph's inputs.
        trained: names of the tensors that have a gradient.
        graph: the graph.
    """

    model: Model
    objective: Objective
    read: tuple[str, ...]
    names: list[str] = field(init=False)
    trained: list[str] = field(init=False)
    graph: fx.Graph = field(init=False)

    def __post_init__(self) -> None:
        tensors = [t for module in self.model._modules.values() for t in (*module.parameters(), *module.buffers())]
        # a module may keep values of a batch, and the values of the graph are not real; the copy shares all tensors
        self.model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})
        w = {n: v for n, v in self.model.init(0).items() if block_of(n) in (*self.read, SHARED)}
        self.names, trainable = list(w), self.model.trainable(w)
        self.trained = [name for name in w if name in trainable]
        x = {m: torch.zeros(ROWS, *self.model.shapes[m]) for m in self.read}
        present = {m: torch.ones(ROWS, dtype=torch.bool) for m in self.read}
        with torch.no_grad():
            outputs = self.objective.outputs(self.model, w, self._batch(x, {}, None))

        def gradients(w: Tree, x: Tree, present: Tree, error: Tensor) -> Any:  # `make_fx` counts `self` as an argument
            return self._gradients(w, x, present, error)

        record = make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)
        with torch.enable_grad():
            self.graph = record(w, x, present, torch.zeros_like(outputs)).graph

    def sources(self) -> list[_Source]:
        """What each input of the graph holds."""
        samples = [("sample", m) for m in self.read]
        return [("tensor", name) for name in self.names] + samples + samples + [("error", "")]

    def _batch(self, x: Tree, present: Tree, key: int | None) -> Batch:
        return Batch(x=x, y=torch.zeros(ROWS, dtype=torch.int64), rows=torch.arange(ROWS), present=present, key=key)

    def _gradients(self, w: Tree, x: Tree, present: Tree, error: Tensor) -> list[tuple[Tensor | None, ...]]:
        result: list[tuple[Tensor | None, ...]] = []
        for there, key in (({}, 1), (present, 1), (present, None)):
            leaves = {n: v.detach().requires_grad_() if n in self.trained else v for n, v in w.items()}
            outputs = self.objective.outputs(self.model, leaves, self._batch(x, there, key))
            trained = [leaves[name] for name in self.trained]
            result.append(torch.autograd.grad(outputs, trained, error, allow_unused=True) if trained else ())
        return result


def _reached(recorded: _Recorded) -> dict[str, set[str]]:
    """Return the modalities on which each tensor of the Tree can depend after any number of training steps."""
    flow = _Flow(recorded.graph, recorded.sources())
    reads = {name: flow.of(node) for name, node in zip(recorded.names, flow.inputs, strict=False)}  # buffers
    reads = {name: set(found) for name, found in reads.items()}
    trained = recorded.trained * (len(flow.output) // max(1, len(recorded.trained)))
    for name, node in zip(trained, flow.output, strict=True):  # the graph lists the gradients of all calls in a row
        if node is not None:
            reads[name] |= flow.of(node)
    changed = True
    while changed:  # a tensor reads in the next step what another one has read in this step
        changed = False
        for result in reads.values():
            more = set().union(*(reads[other] for kind, other in result if kind == "tensor")) - result
            changed = changed or bool(more)
            result |= more
    return {name: {other for kind, other in found if kind == "sample"} for name, found in reads.items()}


class _Flow:
    """From which inputs of a graph there is a path to a node.

    Nodes that can share memory are one node here, and the order of operations does not count. Writing into a tensor
    then needs no special rule, and a path too many only makes the policy stricter.

    Args:
        sources: what each input of the graph holds.

    Raises:
        TypeError: a node of the graph is no operation of PyTorch, so what it reads and writes is not known.
    """

    def __init__(self, graph: fx.Graph, sources: list[_Source]) -> None:
        self._same: dict[fx.Node, fx.Node] = {}
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        (last,) = (node for node in graph.nodes if node.op == "output")
        self.output: Any = last.args[0]
        if strange := [node for node in graph.nodes if not _known(node)]:
            raise TypeError(f"{strange[0].target} is no operation of PyTorch")
        for node in nodes:
            for viewed in _viewed(node):
                self._join(node, viewed)
        constants = [node for node in graph.nodes if node.op == "get_attr"]
        roots = {self._root(node) for node in constants}
        if any(self._root(target) in roots for node in nodes for target in _written(node)):
            for node in constants:  # a module keeps a value in a tensor that is not in the Tree
                self._join(node, constants[0])
        self._found: dict[fx.Node, set[_Source]] = {}
        for node, source in zip(self.inputs, sources, strict=True):
            self.of(node).add(source)
        while self._spread(nodes):
            pass

    def of(self, node: fx.Node) -> set[_Source]:
        """The inputs from which a path leads to this node."""
        return self._found.setdefault(self._root(node), set())

    def _spread(self, nodes: list[fx.Node]) -> bool:
        changed = False
        for node in nodes:
            if getattr(node.target, "_opname", "") in _SHAPE_ONLY:
                continue
            read: set[_Source] = set().union(*(self.of(before) for before in node.all_input_nodes))
            for target in (node, *_written(node)):
                changed = changed or not read <= self.of(target)
                self.of(target).update(read)
        return changed

    def _root(self, node: fx.Node) -> fx.Node:
        while (above := self._same.get(node, node)) is not node:
            node = above
        return node

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        first, second = self._root(one), self._root(other)
        if first is not second:
            self._same[first] = second


def _known(node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target is getitem or isinstance(node.target, torch._ops.OpOverload)
    return node.op in ("placeholder", "output", "get_attr")


def _arguments(node: fx.Node) -> Iterator[tuple[Any, list[fx.Node]]]:
    """Yield the alias information of each argument of an operation, and the nodes in this argument."""
    given: Mapping[str, Any] = node.kwargs
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        value = node.args[place] if place < len(node.args) else given.get(argument.name)
        leaves = tree_leaves(value, is_leaf=lambda leaf: isinstance(leaf, fx.Node))
        yield argument.alias_info, [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _viewed(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the inputs whose memory the result of an operation can share."""
    if node.target is getitem:
        yield from node.all_input_nodes
        return
    for alias, nodes in _arguments(node):
        if alias is not None:
            yield from nodes


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the inputs that an operation changes in place."""
    if node.target is not getitem:
        for alias, nodes in _arguments(node):
            if alias is not None and alias.is_write:
                yield from nodes
