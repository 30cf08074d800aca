"""The laws, each a function that tries a method in the small federation and raises `Broken` if the law is broken."""

import copy
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import RecipeError
from polyfed.core.request import Request, Send
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.engines import Sequential
from polyfed.engines.workers.process import Unit
from polyfed.experiment.checks.check import check, plan
from polyfed.experiment.checks.check_result import Planned
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.replies import Answer
from polyfed.laws.federation import AWKWARD, PLAIN, Trial, federation, furthest, method, played, through, trained
from polyfed.laws.replies import faults
from polyfed.privacy.egress.ledger import TO_CLIENT
from polyfed.training.optimisers import Train
from polyfed.training.progress import PartOfTraining, Progress

PATTERNS: tuple[Literal["random", "client", "label", "spans"], ...] = ("random", "client", "label", "spans")
"""The patterns of missing rows; each method meets one of them."""

LEARNT = 0.6
"""The accuracy above which a method has learnt the separable toy, which has three classes."""


class Broken(Exception):
    """A method breaks a law; the text says how."""


class NotApplicable(Exception):
    """The law is not about this method; the text says why."""


@dataclass(frozen=True)
class Law:
    """A law.

    Attributes:
        says: what every method must keep, in one line.
        check: raises `Broken` if the method on trial does not keep it, or `NotApplicable`.
    """

    says: str
    check: Callable[[Trial], None]


def demand(kept: bool, otherwise: str) -> None:
    """Raise `Broken` with the text unless the law is kept."""
    if not kept:
        raise Broken(otherwise)


def alike(one: tuple[Assembly, Any, list[Any]], many: tuple[Assembly, Any, list[Any]], tolerance: float) -> None:
    """Demand that two runs agree in the model, in the clients' own states and in the ledger.

    Args:
        one: what `played` returns.
        many: the same on another engine.
        tolerance: the largest relative difference of a parameter. Local states may differ ten times as much: a control
            variate is a difference of models divided by the length of the way.
    """
    far = furthest(one[1].params, many[1].params)
    demand(far < tolerance, f"the models of `sequential` and `vectorised` differ by {far:.1e} of their largest entry")
    for client, tree in one[0].engine.locals.items():
        other = many[0].engine.locals[client]
        demand(tree.keys() == other.keys(), f"the local states of client {client} have different names")
        far = furthest(tree, other)
        demand(far < 10 * tolerance, f"the local states of client {client} differ by {far:.1e}")
    demand(one[2] == many[2], "the ledgers of `sequential` and `vectorised` differ")


def engines_agree(trial: Trial, encoders: Any) -> None:
    """Compare the engines."""
    alike(trial.played("sequential", encoders), trial.played("vectorised", encoders), trial.row.tolerance)


def announces(trial: Trial) -> None:
    """Compare the ledger with the announcement."""
    parts, _, rows = trial.played()
    planned = {(r.message, r.field, r.kind, r.block, r.destination) for r in plan(parts)}
    crossed = {(r["message"], r["field"], r["kind"], r["block"], r["destination"]) for r in rows}
    strange = {row for row in crossed if row[-1] != TO_CLIENT} - planned
    demand(not strange, f"these messages cross and are not announced: {sorted(strange)}")


def announces_sizes(trial: Trial) -> None:
    """Compare the bytes in the ledger with those of the announcement."""
    said: dict[tuple[str, str, str], list[Planned]] = {}
    for planned in check(trial.recipe()).planned:
        said.setdefault((planned.message, planned.field, planned.block), []).append(planned)
    parts, _, rows = trial.played()
    for row in (r for r in rows if r["destination"] != TO_CLIENT):
        num_rows = max(int(parts.fed.clients.num_rows[row["client"]]), *(row["shape"] or [0]))
        most = max(
            (p.bytes or 0) + p.bytes_per_row * num_rows for p in said[row["message"], row["field"], row["block"]]
        )
        where = f"{row['message']}.{row['field']} of block {row['block']}"
        demand(row["bytes"] <= most, f"{where} has {row['bytes']} bytes, and `polyfed check` announced {most}")


def rehearses(trial: Trial) -> None:
    """Check the recipe, with its dry run."""
    checked = check(trial.recipe())
    demand(not checked.remarks, f"`polyfed check` remarks: {'; '.join(map(str, checked.remarks))}")
    seen = sum(row.in_dry_run for row in checked.planned)
    demand(seen >= len(checked.planned) / 2, f"the dry run shows {seen} of {len(checked.planned)} announced messages")


def repeats(trial: Trial) -> None:
    """Run one seed twice."""
    runs = (trial.played("vectorised"), played(trial.recipe("vectorised")))
    first, second = (checkpoint.digest(state) for _, state, _ in runs)
    demand(first == second, "two runs with one seed end with different states; take random numbers from `data.draw`")


def resumes(trial: Trial, engine: str) -> None:
    """Save a run after round two, load it, and compare its third round with that of the uninterrupted run."""
    made = trial.recipe(engine)
    _, whole, _ = trial.played(engine)
    parts, state, _ = trial.played(engine, rounds=2)
    modules = checkpoint.modules_of(made.algorithm)
    with tempfile.TemporaryDirectory(prefix="polyfed-") as folder:
        # the schedule and the stream of a run depend on its rounds, so the second half plays the long recipe
        checkpoint.save(Path(folder), 2, {"state": state, "locals": parts.engine.locals}, modules)
        found = checkpoint.load(Path(folder), modules)
        assert found is not None
        again, state = assemble(made), found[1]["state"]
        again.resume(state, found[1]["locals"], 2)
        again.fed.begin(3)
        after = made.algorithm.round(state, again.fed)
    same = checkpoint.digest(after) == checkpoint.digest(whole)
    demand(same, "a resumed run ends with another state; keep what you remember in the state or in `local`")


class Died(BaseException):
    """A client's process has died."""


class MortalProgress(Progress):
    """Keeps the state after each step in memory, and dies after some of them.

    Args:
        kept: what earlier lives of the task have kept.
        steps: after so many steps, the task dies; 0 for never.
    """

    share = 0.0

    def __init__(self, kept: dict[int, PartOfTraining], steps: int) -> None:
        super().__init__(0.0)
        self.kept, self.left = kept, steps

    @override
    def found(self, number: int) -> PartOfTraining | None:
        return snapshot_of(self.kept[number]) if number in self.kept else None

    @override
    def keep(self, number: int, part: PartOfTraining) -> None:
        self.kept[number] = snapshot_of(part)
        self.left -= 1
        if not self.left:
            raise Died


def snapshot_of(part: PartOfTraining) -> PartOfTraining:
    """Return a copy of the state of a training."""
    tensors: dict[str, Tensor] = {}
    skeleton = checkpoint.pack(part, tensors)
    result: PartOfTraining = checkpoint.unpack(skeleton, {name: value.clone() for name, value in tensors.items()}, ())
    return result


class Mortal(Sequential):
    """Runs each task in three lives, of which the first two end after a few steps of local training."""

    deaths = 0
    _kept: dict[int, PartOfTraining]
    _steps = 0

    @override
    def progress(self, request: Request, client: int) -> Progress | None:
        return MortalProgress(self._kept, self._steps)

    @override
    def answer(
        self, request: Request, clients: Sequence[int], send: Send, units: Sequence[Unit] | None = None
    ) -> Answer:
        answers = [self._in_lives(request, client, send) for client in clients]
        missing = {client: why for one in answers for client, why in one.missing.items()}
        return Answer.of([part for one in answers for part in one.parts], missing)

    def _in_lives(self, request: Request, client: int, send: Send) -> Answer:
        self._kept = {}
        for self._steps in (1 + (5 * client + request.number) % 7, 1 + client % 3, 0):
            try:
                return super().answer(request, [client], send)
            except Died:
                self.deaths += 1
        raise AssertionError("the last life does not end")


def goes_on_with_trainings(trial: Trial) -> None:
    """Let clients die while they train, and go on from the state after the last step."""
    made = trial.recipe("sequential", AWKWARD)
    parts = assemble(made, engine=Mortal)
    state = through(parts, made.rounds)
    assert isinstance(parts.engine, Mortal)
    if not parts.engine.deaths:
        raise NotApplicable("no client trains for more than one step at a time")
    same = digests(parts, state) == digests(*trial.played("sequential", AWKWARD)[:2])
    demand(
        same, "a training that goes on ends with other numbers; `loss` and `direction` must keep nothing of their own"
    )


def round_is_pure(trial: Trial) -> None:
    """Compare the state and the data before and after a round."""
    made = trial.recipe("vectorised")
    parts, state, _ = played(replace(made, rounds=1))
    before = checkpoint.digest(state)
    rows = {m: copy.deepcopy(column.values) for m, column in parts.population.columns.modalities.items()}
    parts.fed.begin(2)
    made.algorithm.round(state, parts.fed)
    demand(checkpoint.digest(state) == before, "`round` changes the state that it receives; return a new one")
    for m, column in parts.population.columns.modalities.items():
        demand(torch.equal(column.values, rows[m]), f"a round changes the data of modality {m}")


def draws_no_global_numbers(trial: Trial) -> None:
    """Compare PyTorch's global generator before and after a round."""
    parts = assemble(trial.recipe("vectorised", AWKWARD))
    before = torch.default_generator.get_state()
    state = parts.start()
    parts.fed.begin(1)
    parts.algorithm.round(state, parts.fed)
    same = torch.equal(torch.default_generator.get_state(), before)
    demand(same, "a round draws from PyTorch's global generator; take random numbers from `data.draw`")


def rests_without_steps(trial: Trial) -> None:
    """Train for zero epochs."""
    if not trial.row.idle:
        raise NotApplicable("the server trains, too")
    parts, state, _ = played(trial.recipe(train=Train(lr=0.1, batch_size=16, epochs=0)))
    for tree in trained(parts, state):
        start = {n: v for n, v in tree.items() if n in parts.initial}
        far = furthest(start, {n: parts.initial[n] for n in start}) if start else 0.0
        demand(far < 1e-6, f"without a training step, the model still changes by {far:.1e}")


def bears_a_rare_modality(trial: Trial) -> None:
    """Give a modality to one client of four only."""
    if trial.row.clients:
        raise NotApplicable("the method fixes who has which modality")
    only = ClientsSpec(partition="iid", num=4, only={"a": [0, 1, 2]})
    made = method(trial.method, **trial.row.options)
    parts, state, _ = played(
        federation(made, "vectorised", trial.row.encoders, clients=only, egress=trial.row.egress)
    )  # fmt: skip
    demand(finite(parts, state), "with a modality that one client has, parameters become NaN or infinite")


def finite(parts: Assembly, state: Any) -> bool:
    """Whether all parameters are finite."""
    return all(
        bool(torch.isfinite(value).all())
        for tree in trained(parts, state)
        for value in tree.values()
        if value.is_floating_point()
    )


def learns(trial: Trial) -> None:
    """Train on a toy that a linear model separates."""
    easy = Toy(rows=600, classes=3, snr={"a": 6.0, "b": 6.0}, seed=1)
    made = trial.recipe("vectorised")
    made = replace(made, data=replace(easy, **trial.row.data), rounds=8)
    if not trial.row.clients:
        made = replace(made, clients=ClientsSpec(partition="iid", num=5, personal_test=0.2))
    parts, state, _ = played(made)
    measured = made.algorithm.evaluate(state, parts.fed).metrics
    score = measured.get("global", {}).get("accuracy") or measured["personal"]["mean"]
    demand(score > LEARNT, f"it reaches accuracy {score:.2f} on three classes that a linear model separates")


def captions_its_numbers(trial: Trial) -> None:
    """Compare the logged numbers with the captions."""
    parts, state, _ = trial.played(rounds=2)
    families = {one.replace("/", ".").partition(".")[0] for one in parts.algorithm.observe(state)}
    without = sorted(families - parts.algorithm.captions.keys())
    demand(not without, f"`observe` logs {', '.join(without)}; add an entry to the class variable `captions`")


def holed(trial: Trial, engine: str, rate: float = 0.35) -> Recipe:
    """Return the recipe with rows that lack a modality. Clients with one modality lose it too, or they lose nothing."""
    made, row = trial.recipe(engine, AWKWARD), trial.row
    alone = made.clients.partition == "silos" or bool(row.stack)
    clients = replace(
        made.clients,
        missing_rows=dict.fromkeys(row.stack or ("a", "b"), rate),
        missing_rows_pattern=PATTERNS[zlib.crc32(trial.method.__name__.encode()) % len(PATTERNS)],
        missing_rows_empty=alone,
    )
    return replace(made, clients=clients, rounds=2)


def digests(parts: Assembly, state: Any) -> tuple[str, dict[int, str]]:
    """Return the digest of the server's state, and those of the local states by client."""
    return checkpoint.digest(state), {client: checkpoint.digest(own) for client, own in parts.engine.locals.items()}


def takes_missing_rows(trial: Trial) -> None:
    """Remove modalities from rows, or demand that the method refuses such rows."""
    if not trial.method.handles_missing_rows:
        try:
            played(holed(trial, "sequential"))
        except RecipeError as refusal:
            demand("takes every row of a client for complete" in str(refusal), f"it refuses something else: {refusal}")
        else:
            raise Broken("`handles_missing_rows` is False, and rows that lack a modality are not refused")
        made = holed(trial, "sequential")
        played(replace(made, clients=replace(made.clients, missing_rows={}, missing_rows_test=0.3), rounds=1))
        return
    one = played(holed(trial, "sequential"))
    # ten times wider: a batch may have BatchNorm statistics over two or three rows, whose variance can be tiny
    alike(one, played(holed(trial, "vectorised")), 10 * trial.row.tolerance)
    demand(finite(*one[:2]), "with rows that lack a modality, parameters become NaN or infinite")


def sees_missing_rows(trial: Trial) -> None:
    """Compare runs with all rows, with a rate of missing rows of 0, and with some missing rows."""
    if not trial.method.handles_missing_rows:
        raise NotApplicable("the method refuses rows that lack a modality")
    plain, none, some = (
        digests(*played(replace(made, rounds=1))[:2])
        for made in (trial.recipe("sequential", AWKWARD), holed(trial, "sequential", 0.0), holed(trial, "sequential"))
    )
    demand(plain == none, "a rate of missing rows of 0 changes the result")
    demand(none != some, "missing rows change nothing of what is learnt")


def drops_modalities(trial: Trial) -> None:
    """Train with modality dropout, or demand that the method refuses it."""

    def dropping(engine: str, rate: Any) -> Recipe:
        made = replace(trial.recipe(engine, AWKWARD), rounds=2)
        train = replace(made.algorithm.train, modality_dropout=rate)
        return replace(made, algorithm=replace(made.algorithm, train=train))

    alone = trial.row.stack or trial.row.clients.get("partition") == "silos"
    if alone or not trial.method.handles_missing_rows:
        try:
            played(dropping("sequential", 0.4))
        except RecipeError as refusal:
            named = "modality_dropout" in str(refusal)
            demand(named, f"it refuses something else than `modality_dropout`: {refusal}")
            return
        raise Broken("no row can lose a modality, and `[train] modality_dropout` is not refused")
    one, many = played(dropping("sequential", 0.4)), played(dropping("vectorised", {"a": 0.4, "b": 0.4}))
    alike(one, many, 10 * trial.row.tolerance)
    plain = trial.played("sequential", AWKWARD, rounds=2)
    none = played(dropping("sequential", {"a": 0.0}))
    demand(digests(*plain[:2]) == digests(*none[:2]), "a modality dropout of 0 changes the result")
    demand(digests(*none[:2]) != digests(*one[:2]), "modality dropout changes nothing of what is learnt")


def drops_corrupt_replies(trial: Trial) -> None:
    """Bend every field of the replies of one client in a dozen ways."""
    found = faults(trial.recipe())
    demand(not found, "; ".join(found))


LAWS: dict[str, Law] = {
    "engines": Law("sequential and vectorised agree in parameters and ledger", partial(engines_agree, encoders=PLAIN)),
    "engines-batchnorm": Law(
        "sequential and vectorised agree with BatchNorm and dropout", partial(engines_agree, encoders=AWKWARD)
    ),
    "announced": Law("nothing leaves a client that polyfed check did not announce", announces),
    "sizes": Law("no reply has more bytes than polyfed check announced", announces_sizes),
    "dry-run": Law("polyfed check rehearses a round without a remark", rehearses),
    "one-seed": Law("one seed gives one state", repeats),
    "resume": Law("a resumed run equals the uninterrupted one bit for bit", partial(resumes, engine="sequential")),
    "resume-vectorised": Law("the same on the engine vectorised", partial(resumes, engine="vectorised")),
    "training": Law("a training whose process dies goes on to the same bits", goes_on_with_trainings),
    "pure-round": Law("a round changes neither the state that it receives nor the data", round_is_pure),
    "own-numbers": Law("no random number comes from the global generator", draws_no_global_numbers),
    "zero-steps": Law("without a training step the model stays as it is", rests_without_steps),
    "rare-modality": Law("a modality that one client has keeps all numbers finite", bears_a_rare_modality),
    "learns": Law("a separable toy is learnt", learns),
    "captions": Law("every logged number has a caption", captions_its_numbers),
    "missing-rows": Law("rows that lack a modality are trained on alike, or refused", takes_missing_rows),
    "missing-rows-count": Law("missing rows change what is learnt, and a rate of 0 changes no bit", sees_missing_rows),
    "modality-dropout": Law("modality dropout is trained alike, or refused", drops_modalities),
    "corrupt-replies": Law("a corrupt reply is dropped with a reason, and the run goes on", drops_corrupt_replies),
}
"""All laws, by name."""
