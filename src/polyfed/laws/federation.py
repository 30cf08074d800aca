"""The small federation of the laws: unequal clients, a modality missing here and there, BatchNorm and dropout."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.problems import Problems
from polyfed.core.registry import name_of
from polyfed.core.tree import Tree
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.parts import algorithm_of, build
from polyfed.experiment.recipes.recipe import Recipe, read_table
from polyfed.experiment.recipes.sections import PARTS
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.model import ModelSpec
from polyfed.privacy.egress.policy import Policy
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train

MODALITIES = ("a", "b")
"""The modalities of the federation."""

PLAIN = {"a": {"kind": "mlp", "hidden": [12]}, "b": {"kind": "mlp", "hidden": [10]}}
"""Encoders without layers that depend on the batch."""

READ = ("algorithm", "egress", "clients", *PARTS.values())
"""The sections of a recipe that the laws use; data, model and engine are their own."""


class NormAndDropout(nn.Module):
    """An encoder with BatchNorm and dropout, in plain PyTorch."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(shape[0], 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.25), nn.Linear(12, embedding)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map samples (B, shape) to embeddings (B, E)."""
        out: Tensor = self.layers(x)
        return out


AWKWARD = {m: {"kind": f"{NormAndDropout.__module__}:NormAndDropout"} for m in MODALITIES}
"""Encoders with BatchNorm and dropout."""


@dataclass(frozen=True)
class Row:
    """How the laws set up a method.

    Attributes:
        options: its hyper-parameters.
        egress: the policy that it needs beyond the default.
        clients: changes to the clients of the federation.
        data: changes to its data.
        stack: modalities stacked into one, for a method of early fusion.
        encoders: the encoders that it needs, if it refuses plain ones.
        tolerance: relative, between engines; 1e-5 unless the method divides by small numbers.
        idle: whether zero local steps leave the global model as it is.
    """

    options: dict[str, Any] = field(default_factory=dict)
    egress: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    clients: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    stack: dict[str, list[str]] = field(default_factory=dict)
    encoders: dict[str, Any] | None = None
    tolerance: float = 1e-5
    idle: bool = True


Played = tuple[Assembly, Any, list[dict[str, Any]]]
"""The parts of a run, its last state and the rows of its ledger."""


@dataclass(frozen=True)
class Trial:
    """A method on trial: its class, and how the laws set it up."""

    method: type[Algorithm]
    row: Row = Row()
    _runs: dict[str, Played] = field(default_factory=dict, init=False, repr=False, compare=False)

    def played(self, engine: str = "sequential", encoders: Any = PLAIN, rounds: int = 3) -> Played:
        """Return a run that several laws look at, and that none may change."""
        key = f"{engine} {encoders} {rounds}"
        if key not in self._runs:
            self._runs[key] = played(replace(self.recipe(engine, encoders), rounds=rounds))
        return self._runs[key]

    def recipe(self, engine: str = "sequential", encoders: Any = None, **options: Any) -> Recipe:
        """Return the recipe of the federation; `options` replace those of the row."""
        row = self.row
        encoders = row.encoders if row.encoders and encoders in (None, PLAIN) else encoders
        made = federation(method(self.method, **(row.options | options)), engine, encoders, egress=row.egress)
        if row.clients:
            made = replace(made, clients=ClientsSpec(**row.clients))
        if row.stack:
            own = {modality: made.model.encoders[modality] for modality in row.stack}
            made = replace(made, stack=row.stack, model=replace(made.model, encoders=own))
        return replace(made, data=replace(made.data, **row.data)) if row.data else made

    @classmethod
    def under(cls, method: type[Algorithm], path: Path) -> "Trial":
        """Return the trial of a method with the options, the policy and the clients of a recipe: its sections `READ`.

        The data of the laws has the modalities `a` and `b`, so a row of [egress] is for one of these, or for `*`.

        Raises:
            RecipeError: the recipe cannot be read, is for another method or does not fit the federation.
        """
        sections = {name: entry for name, entry in read_table(path).items() if name in READ}
        try:
            return cls(method, _row(method, sections))
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from None


def _row(method: type[Algorithm], sections: dict[str, Any]) -> Row:
    name = name_of(method(), ALGORITHMS)
    named = sections.setdefault("algorithm", {}).setdefault("name", name)
    if named != name and named.rpartition(":")[2] != method.__name__:
        raise RecipeError(
            f"[algorithm] name = '{named}' is not the method on trial; {did_you_mean(named, [name])}",
            ("algorithm", "name"),
        )
    sections["algorithm"]["name"] = name
    clients: ClientsSpec = build("[clients]", ClientsSpec, sections.get("clients", {}))
    problems = Problems()
    made = algorithm_of(sections, clients, problems)
    problems.attempt(lambda: Policy.parse(sections.get("egress", {}), MODALITIES))
    problems.raise_all()
    assert made is not None
    given = {key for key in sections["algorithm"] if key != "name"}
    given |= {part for part, section in PARTS.items() if section in sections}
    options = {f.name: getattr(made, f.name) for f in fields(method) if f.name in given}
    return Row(options, egress=sections.get("egress", {}), clients=sections.get("clients", {}))


def method(cls: type[Algorithm], **options: Any) -> Algorithm:
    """Return a method; `selector` defaults to 4 clients a round, `train` to two epochs of SGD."""
    defaults: dict[str, Any] = {
        "train": Train(lr=0.1, batch_size=16, epochs=2),
        "evaluation": Evaluation(every=0),
    }
    if "selector" in cls.__dataclass_fields__:
        defaults["selector"] = Uniform(participation=4)
    return cls(**(defaults | options))


def federation(
    algorithm: Algorithm, engine: str | EngineSpec = "sequential", encoders: Any = None, **changes: Any
) -> Recipe:
    """Return three rounds with six clients of 22 to 70 rows; a third of them lack `b`, half of the others have both."""
    base = Recipe(
        data=Toy(rows=330, classes=4, seed=3),
        algorithm=algorithm,
        model=ModelSpec(embedding=6, encoders=encoders or PLAIN),
        clients=ClientsSpec(partition="dirichlet", num=6, alpha=1.0, holdings=[["a", "b"], ["a"], ["a", "b"], ["b"]]),
        rounds=3,
        engine=EngineSpec(name=engine) if isinstance(engine, str) else engine,  # type: ignore[arg-type]
    )
    return replace(base, **changes)


def played(made: Recipe) -> Played:
    """Run all rounds of a recipe without files. Return its parts, the last state and the rows of the ledger."""
    parts = assemble(made)
    return parts, through(parts, made.rounds), list(parts.ledger.rows())


def through(parts: Assembly, rounds: int) -> Any:
    """Return the state after these rounds."""
    fed, algorithm = parts.fed, parts.algorithm
    state: Any = parts.start()
    for round in range(1, rounds + 1):
        fed.begin(round)
        state = algorithm.round(state, fed)
    return state


def furthest(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two trees, relative to the largest entry of each tensor.

    A tensor below a thousandth of the tree's largest entry is measured against that thousandth: the bias before a
    BatchNorm has no gradient, and its entries are rounding.
    """
    assert a.keys() == b.keys()
    sizes = {n: float(v.abs().max()) for n, v in a.items() if v.numel()}
    floor = 1e-3 * max(sizes.values(), default=1.0) or 1.0
    return max((float((a[n] - b[n]).abs().max()) / max(size, floor) for n, size in sizes.items()), default=0.0)


def trained(parts: Assembly, state: Any) -> list[Tree]:
    """Return what a method trains: the state's model, and the clients' own models if no other is scored."""
    own = parts.engine.locals.values() if parts.algorithm.global_params(state) is None else ()
    return [state.params, *own]
