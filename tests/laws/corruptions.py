"""What a message must not be, derived from its declaration, and the recipes whose messages are corrupted so.

The laws of `attacks/test_hostile_messages.py` (a device, a hostile server) and `laws/test_malformed.py` (the server, a
hostile device) use the same list.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laws.rows import PROTOTYPES, ROWS
from laws.test_laws import world
from polyfed.core.masked import LONG
from polyfed.core.messages import OF_THE_MODEL, Declared
from polyfed.core.tree import Tree, block_of
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.privacy.differential.section import Privacy
from polyfed.selection import DivFl, PowD, Selector, Uniform
from world import AWKWARD

Change = Callable[[Any], Any]


def entries(change: Callable[[Tensor], Tensor]) -> Change:
    """A change of every tensor of a field."""
    return lambda v: change(v) if isinstance(v, Tensor) else {name: change(t) for name, t in v.items()}


def floats(change: Callable[[Tensor], Tensor]) -> Change:
    """A change of every tensor of a field that holds floating-point numbers."""
    return entries(lambda t: change(t) if t.is_floating_point() else t)


def tree(change: Callable[[Tree], Tree]) -> Change:
    """A change of a field that is a tree and not empty."""
    return lambda v: v if isinstance(v, Tensor) or not v else change(v)


def without_a_block(value: Tree) -> Tree:
    """A tree without the block of its first tensor."""
    return {name: t for name, t in value.items() if block_of(name) != block_of(next(iter(value)))}


def lacking(value: Tree) -> Tree:
    """A tree without one tensor of a block that has others."""
    blocks = [block_of(name) for name in value]
    places = [i for i, block in enumerate(blocks) if blocks.count(block) > 1]
    return {name: t for i, (name, t) in enumerate(value.items()) if not places or i != places[-1]}


def negative_variances(value: Tree) -> Tree:
    """A tree whose BatchNorms have negative variances."""
    return {name: -t - 1 if name.endswith("running_var") else t for name, t in value.items()}


CORRUPT: dict[str, Change] = {
    "an extra axis": entries(lambda t: t.unsqueeze(0)),
    "a row for each sample": floats(lambda t: t.expand(5, *t.shape).clone()),
    "another shape": entries(lambda t: torch.cat([t, t], -1) if t.dim() and t.numel() else t),
    "float64": floats(Tensor.double),
    "float32": entries(lambda t: t if t.is_floating_point() else t.float()),
    "float16": floats(Tensor.half),
    "bfloat16": floats(Tensor.bfloat16),
    "int64": entries(lambda t: t.to(torch.int64)),
    "int32": entries(lambda t: t.to(torch.int32)),
    "truth values": entries(Tensor.bool),
    "NaN": floats(lambda t: t * torch.nan),
    "infinity": floats(lambda t: t + torch.inf),
    "one infinity": floats(lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 0, -torch.inf, t)),
    "an extra name": tree(lambda v: v | {"stranger": next(iter(v.values()))}),
    "an extra name in a block": tree(lambda v: v | {f"{next(iter(v))}.stranger": next(iter(v.values()))}),
}

TYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool, "uint8": torch.uint8, "": torch.float32}


def corruptions(said: Declared, *, received: bool, whole: bool = False) -> dict[str, Change]:
    """The corruptions that a field of this declaration must not have, on a device (`received`) or on the server.

    `whole` says that a device must receive every block that it has. A reply may lack blocks.
    """
    found = dict(CORRUPT)
    if said.kind == "raw":  # the samples of some modalities are whole numbers
        del found["int64"]
    if said.dtype == "sums":
        del found["float64"]
    if said.masked:  # looks random, so it has no range
        for word in ("int64", *(("int32",) if said.kind != LONG else ())):
            del found[word]
    if not received and said.rows is not None and said.shape in ((), ("label",)):
        del found["another shape"]  # rows beyond their number are padding, which the server leaves out
    if said.kind in OF_THE_MODEL and (whole or not said.partial):
        found["a missing name"] = tree(lacking)
        found["another missing name"] = tree(lambda v: {n: t for n, t in v.items() if not n.endswith("encoder.0.bias")})
    if said.kind == "parameters" and not said.masked:
        found["negative variances"] = tree(negative_variances)
    if whole and not said.bare:
        found |= {"a missing block": without_a_block, "no block": lambda value: {}}
    return found | _out_of_range(said, received)


def _out_of_range(said: Declared, received: bool) -> dict[str, Change]:
    numbers = (("a number below its range", -1), ("a number above its range", 2**62))
    if said.kind in ("labels", "ids"):
        wrong = [] if said.kind == "ids" and not received else numbers  # the server does not know who has which ids
    else:
        within, kind = said.within, TYPES.get(said.dtype, torch.float64)
        outside = within and not said.masked
        wrong = [pair for pair in numbers if outside and not bool(within.holds(torch.tensor(pair[1], dtype=kind)))]  # type: ignore[union-attr]
    return {word: entries(lambda t, number=number: torch.full_like(t, number)) for word, number in wrong}  # type: ignore[misc]


def unlike(one: Any, other: Any) -> bool:
    """Whether two fields differ in form or in a number."""
    if isinstance(one, Tensor):
        return one.dtype != other.dtype or one.shape != other.shape or bool(one.numel() and (one != other).any())
    return list(one) != list(other) or any(unlike(one[name], other[name]) for name in one)


def everybody(made: Recipe) -> Recipe:
    """With all clients in every cohort."""
    if not hasattr(made.algorithm, "selector"):
        return made
    return replace(made, algorithm=replace(made.algorithm, selector=Uniform(participation=1.0)))


def under(selector: Selector) -> Recipe:
    """FedAvg, its cohort chosen by a selector that asks the clients itself."""
    made = world("fedavg")
    return replace(made, algorithm=replace(made.algorithm, selector=selector))  # type: ignore[call-arg]


def u_shaped() -> Recipe:
    """SplitFed whose clients keep labels and head."""
    made = world("splitfed", u_shaped=True)
    egress = {block: {"server": ["parameters", "embeddings", "statistic"]} for block in ("a", "b", "shared")}
    return replace(made, model=replace(made.model, head=(8,)), egress=egress)


def judged_by_prototypes(name: str) -> Recipe:
    """An evaluation for which the clients send class means."""
    made = world(name, evaluation=Evaluation(every=0, unimodal="prototype"))
    return replace(made, egress=PROTOTYPES | {"shared": {"server": ["parameters", "statistic"]}})


def noisy() -> Recipe:
    """FedAvg whose clients add the noise."""
    made = replace(everybody(world("fedavg")), rounds=2)
    made = replace(made, algorithm=replace(made.algorithm, aggregation="uniform"))  # type: ignore[call-arg]
    return replace(
        made,
        privacy=Privacy(
            unit="client",
            noise_at="client",
            noise_multiplier=4.0,
            delta=0.01,
            clip_norm=0.5,
            unprotected=("statistic",),
        ),
    )


def secured(name: str, **options: Any) -> Recipe:
    """A method whose replies are masked."""
    return everybody(world(name, secure_aggregation=SecureAggregation(min_clients=2), **options))


CASES: dict[str, Callable[[], Recipe]] = {
    **{name: lambda name=name: everybody(world(name)) for name in sorted(ROWS)},  # type: ignore[misc]
    "cmsfed, deltas": lambda: everybody(world("cmsfed", gradient_split="delta")),
    "splitfed, u-shaped": u_shaped,
    "hfm, head at the edge": lambda: world("hfm", head_update="server"),
    "fedavg under divfl": lambda: under(DivFl(participation=3)),
    "fedavg under pow-d": lambda: under(PowD(participation=3, d=6, allow_incongruent=True)),
}
"""Every method, and options under which a method sends other messages."""

FURTHER: dict[str, Callable[[], Recipe]] = {
    "fedavg, BatchNorm": lambda: everybody(world("fedavg", encoders=AWKWARD)),
    "fedavg, private head, fine-tuned": lambda: everybody(world("fedavg", private=("head",), fine_tune=1)),
    "fedavg, judged by prototypes": lambda: everybody(judged_by_prototypes("fedavg")),
    "fedavg, noise of the clients": noisy,
    "fedavg, secure aggregation": lambda: secured("fedavg"),
    "scaffold, secure aggregation": lambda: secured("scaffold"),
    "fedproto, original": lambda: everybody(world("fedproto", mode="original")),
}
