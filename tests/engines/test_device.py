"""Nothing of the CPU meets what is on an accelerator: every algorithm on a device that is not there (`elsewhere`)."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from elsewhere import DEVICE, Elsewhere, elsewhere
from laws.rows import PROTOTYPES
from laws.test_laws import NAMES, world
from polyfed.algorithms.averaging import Averaging
from polyfed.data import Column, Columns
from polyfed.data.sources import Toy
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.experiment.running.loop import Run
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.links.network import Network
from polyfed.selection import DivFl, PowD
from polyfed.start import run
from polyfed.training.losses import cross_entropy
from polyfed.training.optimisers import Train
from polyfed.training.programs.rewrite import rewrite
from refusals import refuses
from sampled import one_in
from world import AWKWARD, FROZEN, WHOLE, losing

THREE = torch.tensor([1.0, 2.0, 3.0])
INDEX = torch.tensor([0, 2])
LAST = Evaluation(every=0)


def small(name: str, encoders: Any = AWKWARD, **options: Any) -> Recipe:
    """The laws' recipe of an algorithm with fewer rows and steps, and with clients that have test rows."""
    made = world(name, "sequential", encoders, **({"evaluation": LAST} | options))
    if made.clients.partition != "silos":
        made = replace(made, clients=replace(made.clients, personal_test=0.2))
    train = made.algorithm.train if "train" in options else replace(made.algorithm.train, epochs=1, batch_size=32)
    return replace(made, data=replace(made.data, rows=240), algorithm=replace(made.algorithm, train=train))


def outcome(finished: Run) -> str:
    """All that a run tells, but how long it took; as text, since a NaN is to equal a NaN."""
    taken = dict.fromkeys(("seconds", "seconds_total", "seconds_per_round", "seconds_first_round"))
    return "\n".join(map(repr, [finished.result | taken, *(row | taken for row in finished.rounds)]))


def resumed(made: Recipe, first: int, rounds: int, folder: Path) -> str:
    """The outcome of a run that is stopped after its first rounds and goes on from its checkpoint."""
    run(replace(made, rounds=first), folder)
    return outcome(run(replace(made, rounds=rounds), folder, resume=True))


def there(made: Recipe) -> Recipe:
    """For elsewhere: what a client raises ends the run, and the client is not left out."""
    return replace(made, engine=replace(made.engine, debug=True))


@pytest.fixture(autouse=True)
def no_reports() -> Iterator[None]:
    """Charts cost more time than these runs."""
    with patch("polyfed.experiment.running.loop.write_report"):
        yield


@pytest.mark.filterwarnings("ignore:.*measures nothing")  # devices of silos have no test rows of their own
@pytest.mark.parametrize("name", one_in(3, NAMES))
def test_a_run_that_is_resumed_elsewhere_equals_the_one_on_the_cpu(name: str, tmp_path: Path) -> None:
    made = small(name)
    here = resumed(made, 2, 3, tmp_path / "here")
    with elsewhere():
        assert resumed(there(made), 2, 3, tmp_path / "there") == here


@cache
def here(name: str, engine: Any) -> tuple[Recipe, str]:
    """A recipe of two rounds, and its outcome on the CPU."""
    made = replace(small(name), engine=EngineSpec(name=engine), rounds=2)
    return made, outcome(run(made))


@pytest.mark.filterwarnings("ignore:.*measures nothing")
@pytest.mark.parametrize("name", one_in(3, NAMES, 1))
def test_a_vectorised_run_elsewhere_equals_the_one_on_the_cpu(name: str) -> None:
    made, expected = here(name, "vectorised")
    with elsewhere():
        assert outcome(run(there(made))) == expected


@contextmanager
def full() -> Iterator[None]:
    """Inside the block, the device has no free memory, so the features of a data set stay on the CPU."""
    taken: list[Any] = []

    def noted(column: Column, device: Any, *, features: bool = True) -> Column:
        taken.append(features)
        return move(column, device, features=features)

    move = Column.to
    with patch("polyfed.engines.machine.gpu.free_bytes", lambda device: 0.0), patch.object(Column, "to", noted):
        yield
    assert taken
    assert not any(taken)


@contextmanager
def small_memory() -> Iterator[None]:
    """Inside the block, the rows of a task fit the device, and the data set does not."""
    places = Counter[torch.device]()

    def noted(column: Column, rows: Tensor) -> Tensor:
        if rows.device == DEVICE:
            places[column.values.device] += 1
        return raw(column, rows)

    def kept(columns: Columns, device: torch.device, emit: Any) -> Columns:
        return columns.to(device, features=False)

    raw = Column.raw
    with patch("polyfed.engines.base.placed", kept), patch.object(Column, "raw", noted):
        yield
    assert [*places] == [DEVICE]


FEATURES = [
    (name, engine, memory) for name in NAMES for engine, memory in (("sequential", full), ("vectorised", small_memory))
] + [("fedavg", "sequential", small_memory), ("fedavg", "vectorised", full)]
"""Both memories and both engines for every method, and all pairs for one: how rows are read is no part of a method."""


@pytest.mark.filterwarnings("ignore:.*measures nothing")
@pytest.mark.parametrize(("name", "engine", "memory"), one_in(3, FEATURES))
def test_a_run_whose_features_do_not_fit_the_device_equals_the_one_on_the_cpu(
    name: str, engine: Any, memory: Any
) -> None:
    made, expected = here(name, engine)
    with elsewhere(), memory():
        assert outcome(run(there(made))) == expected


def test_a_gpu_trains_without_programs_wherever_the_features_are() -> None:
    made = replace(small("fedavg"), engine=EngineSpec(name="vectorised"), rounds=2)
    train = replace(made.algorithm.train, epochs=8, batch_size=4)  # enough steps for programs on a CPU
    made = there(replace(made, algorithm=replace(made.algorithm, train=train)))
    with patch("polyfed.training.programs.replay.rewrite", wraps=rewrite) as programs, elsewhere():
        resident = outcome(run(made))
        with full():
            assert outcome(run(made)) == resident
        with small_memory():
            assert outcome(run(made)) == resident
    assert programs.call_count == 0


@dataclass(frozen=True, kw_only=True)
class Holed(Toy):
    """Data of which a third of the rows lack `b`, and whose columns are standardised when a batch is cut."""

    def load(self) -> Columns:
        """Draw the data set."""
        columns = super().load()
        norm = {"shift": torch.full((16,), 0.1), "scale": torch.full((16,), 2.0)}
        changed = {**columns.modalities, "a": replace(columns.modalities["a"], **norm)}
        return replace(columns, modalities=changed, present={"b": torch.arange(len(columns.label)) % 3 > 0})


ENCODERS = {"a": {"kind": "cnn4"}, "b": {"kind": "transformer"}}
SEQUENCES = {m: {"kind": "conv-gru"} for m in "ab"}


def shaped(made: Recipe, fusion: str, **shapes: tuple[int, ...]) -> Recipe:
    """With samples of these shapes, and another fusion."""
    data = Toy(rows=240, classes=3, shapes=shapes)
    return replace(made, data=data, model=replace(made.model, fusion=fusion, embedding=8))  # type: ignore[arg-type]


EXTRAS: dict[str, Callable[[], Recipe]] = {
    "divfl": lambda: small("fedavg", selector=DivFl(participation=3, sketch=16, weights="clusters")),
    "divfl at_global": lambda: small("fedavg", selector=DivFl(participation=3, grad="at_global", greedy="lazy")),
    "pow-d": lambda: small("fedavg", selector=PowD(participation=3, d=4, allow_incongruent=True)),
    "server yogi": lambda: small("fedavg", server=ServerOptimiser(optimiser="yogi", lr=0.1)),
    "adam": lambda: small("fedavg", train=Train(lr=0.01, batch_size=32, optimiser="adamw", clip_norm=1.0)),
    "by prototype": lambda: replace(
        small("fedavg", evaluation=Evaluation(every=0, unimodal="prototype")), egress=PROTOTYPES
    ),
    "rows that lack": lambda: replace(small("cmsfed"), data=Holed(rows=240, classes=4)),
    "gated": lambda: shaped(small("fedogm"), "gated", a=(5,), b=(4,)),
    "images and sequences": lambda: shaped(small("fedavg", ENCODERS), "sum", a=(1, 8, 8), b=(6, 4)),
    "attention": lambda: shaped(small("fedavg", SEQUENCES), "attention", a=(8, 3), b=(12, 4)),
    "network": lambda: replace(small("pfmml", rule="linear", scale="per-step"), network=Network(stragglers=0.3)),
    "candidates": lambda: replace(small("fedfomo", candidates=2), network=Network(deadline_s=1.0)),
    "frozen in part": lambda: small("fedavg", FROZEN),
    "frozen as a whole": lambda: small("split-learning", WHOLE),
    "server's head": lambda: small("vfl", resample=False, head_update="server"),
}


@pytest.mark.filterwarnings("ignore:.*measures nothing")
@pytest.mark.parametrize("what", EXTRAS)
def test_what_goes_with_algorithms_runs_elsewhere_too(what: str, tmp_path: Path) -> None:
    made = EXTRAS[what]()
    here = resumed(made, 1, 2, tmp_path / "here")
    with elsewhere():
        assert resumed(there(made), 1, 2, tmp_path / "there") == here


@pytest.mark.filterwarnings("ignore:.*measures nothing")
@pytest.mark.parametrize(
    ("name", "task", "options"),
    [("fedamp", "install", {"uploads": 2}), ("pfmml", "install", {}), ("vfl", "embed", {"resample": False})],
)
def test_what_is_kept_for_those_who_are_not_heard_is_met_elsewhere(
    name: str, task: str, options: dict[str, Any], tmp_path: Path
) -> None:
    def deaf(*args: Any, **kwargs: Any) -> Assembly:
        parts = assemble(*args, **kwargs)
        losing(parts, task, *range(5))
        return parts

    def outcome_of(made: Recipe, folder: Path) -> str:
        run(replace(made, rounds=1), folder)
        with patch("polyfed.experiment.running.loop.assemble", deaf):
            return outcome(run(replace(made, rounds=2), folder, resume=True))

    here = outcome_of(small(name, **options), tmp_path / "here")
    with elsewhere():
        assert outcome_of(there(small(name, **options)), tmp_path / "there") == here


@dataclass(frozen=True, kw_only=True)
class Forgetful(Averaging):
    """FedAvg, but it forgets where its batches are."""

    def loss(self, context: Any, w: Any, batch: Any, got: Any, local: Any) -> Any:
        """Cross-entropy of noisy logits."""
        logits = context.model.logits(w, batch)
        return cross_entropy(logits + torch.zeros(logits.shape[-1]), batch)


def test_a_mismatch_in_an_algorithm_ends_the_run_elsewhere_and_only_there() -> None:
    made = small("fedavg")
    made = replace(made, algorithm=Forgetful(train=made.algorithm.train, evaluation=LAST), rounds=1)
    run(made)
    with elsewhere(), refuses(RuntimeError, "of lazy"):
        run(there(made))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + THREE,
        lambda x: x @ THREE,
        lambda x: torch.cat([x, THREE]),
        lambda x: torch.stack([x.sum(), THREE.sum()]),
        lambda x: torch.where(THREE > 1, x, 0.0),
        lambda x: x.masked_fill(THREE > 1, 0.0),
        lambda x: x.index_select(0, INDEX),
        lambda x: x.gather(0, INDEX),
        lambda x: x.clamp(min=torch.tensor(0.0)),
        lambda x: torch.searchsorted(x, THREE),
        lambda x: torch.equal(x, THREE),
        lambda x: THREE[INDEX.to(DEVICE)],
        lambda x: x.index_put((INDEX,), THREE[:2]),
        lambda x: THREE + x.sum(),
        lambda x: torch.tensor(0.0).add_(x.sum()),
        lambda x: torch._foreach_add([x], [THREE]),
    ],
)
def test_what_cuda_refuses_is_refused(call: Callable[[Tensor], Any]) -> None:
    call(THREE) if "DEVICE" not in call.__code__.co_names else None
    with elsewhere(), refuses(RuntimeError, "the same device"):
        call(THREE.to(DEVICE))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + torch.tensor(2.0),
        lambda x: torch.where(x > 1, x, torch.tensor(0.0)),
        lambda x: x.masked_fill(x > 1, torch.tensor(0.0)),
        lambda x: x[INDEX],
        lambda x: x.index_put((INDEX,), torch.tensor(7.0)),
        lambda x: torch.zeros(3).copy_(x).to(x.device),
        lambda x: x.clone().copy_(THREE),
        lambda x: x.new_ones(3) + torch.tensor([5.0], device=x.device),
        lambda x: torch.as_tensor(3, device=x.device) * x,
    ],
)
def test_what_cuda_allows_gives_the_numbers_of_the_cpu(call: Callable[[Tensor], Tensor]) -> None:
    with elsewhere():
        found = call(THREE.to(DEVICE))
        assert isinstance(found, Elsewhere)
        assert found.device == DEVICE
        assert found.tolist() == call(THREE).tolist()


def test_numbers_come_back_only_by_way_of_the_cpu() -> None:
    with elsewhere():
        x = THREE.to(DEVICE)
        assert type(x.cpu()) is Tensor
        assert x.sum().item() == 6.0
        with refuses(TypeError, "convert"):
            x.numpy()
    with pytest.raises((RuntimeError, NotImplementedError)):
        THREE.to(DEVICE)
