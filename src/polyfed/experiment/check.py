"""What a recipe can let leave, told before anything runs."""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from polyfed.algorithms import ALGORITHMS
from polyfed.core.errors import EgressError, PolyfedWarning, RecipeError
from polyfed.core.messages import DESTINATIONS, KINDS, LABELS, OF_THE_MODEL
from polyfed.core.registry import name_of
from polyfed.core.request import Request, Send
from polyfed.core.tree import SHARED
from polyfed.experiment.assembly import Assembly, assemble, block_sizes, facts_of
from polyfed.experiment.dry_run import Place, Size, run_dry
from polyfed.experiment.recipe import Recipe, recipe_of
from polyfed.federation.replies import Answer
from polyfed.privacy.announcement import Announced, Announcement
from polyfed.privacy.policy import Policy


@dataclass(frozen=True)
class Planned:
    """Something a task of the algorithm can send: what is `Announced`, and its size.

    Attributes:
        bytes: of one reply: as rehearsed, or what the block takes (parameters, gradients); None if neither tells.
        bytes_per_row: more, for each row that the reply speaks of.
        in_dry_run: whether the dry run sent it (`polyfed.experiment.dry_run`); what depends on the state of the run or
            on the data may come later, or never.
        fix: the line that would allow it, empty when it is allowed.
        tells: what it gives away beyond what its kind says; empty for most.
    """

    task: str
    message: str
    field: str
    kind: str
    block: str
    destination: str
    bytes: int | None
    allowed: bool
    fix: str = ""
    bytes_per_row: float = 0.0
    in_dry_run: bool = False
    tells: str = ""


@dataclass(frozen=True)
class Check:
    """What `polyfed check` prints.

    Attributes:
        facts: clients, blocks and their bytes, the resolved policy; as in run.json.
        planned: everything that can leave, allowed or not.
        remarks: what the rehearsal could not do; sizes may be missing then.
        why: why `shared` may not send something that no row of its own forbids.
        fixes: lines of a policy that would allow what it forbids.
        beside: what the recipe has the server know of clients' rows without asking them.
    """

    recipe: Recipe
    facts: dict[str, Any]
    planned: tuple[Planned, ...]
    remarks: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def refused(self) -> tuple[Planned, ...]:
        """What the policy forbids; not empty means that a run would end with exit code 3."""
        return tuple(row for row in self.planned if not row.allowed)


def check(recipe: Recipe | str | Path) -> Check:
    """Validate a recipe, or the one at a path, against its data, run_dry a round, and list what can cross.

    Raises:
        PolyfedError: what a run would refuse before its first round; a reply that is not as its task declares.
    """
    recipe = recipe_of(recipe)
    assembly = assemble(recipe)
    warn_unmeasured(assembly)
    sizes, failures = _rehearsed(assembly)
    planned = tuple(plan(assembly, sizes))
    refused = [row for row in planned if not row.allowed]
    return Check(
        recipe,
        facts_of(assembly),
        planned,
        failures,
        why=tuple(_why(refused, assembly.policy)),
        fixes=tuple(fixes_of(refused, assembly.policy)),
        beside=tuple(_beside_the_ledger(recipe, assembly)),
    )


def _why(refused: Iterable[Planned], policy: Policy) -> Iterator[str]:
    """Why the policy forbids what no row of `shared` forbids; see `Policy.explanations`."""
    return policy.explanations((row.kind, row.block, row.destination) for row in refused)


def _beside_the_ledger(recipe: Recipe, assembly: Assembly) -> Iterator[str]:
    """What a simulation gives the server that no message carries."""
    if recipe.clients.validation:
        yield (
            f"[clients] validation = {recipe.clients.validation}: {len(assembly.population.validation_rows):,} rows of "
            "clients, labels included, are pooled at the server to choose the best round. No message carries them and "
            "no ledger books them; a deployment has none"
        )


def _rehearsed(assembly: Assembly) -> tuple[dict[Place, Size], tuple[str, ...]]:
    """Sizes, and why some are not known: a round on a few rows can fail where one on all of them would not."""
    failed: dict[str, None] = {}

    def listen(event: str, **facts: Any) -> None:
        if event == "client-failed":
            failed[f"task {facts['task']}: {facts['reason']}"] = None

    try:
        sizes = run_dry(assembly.recipe, assembly.population, listen)
    except (RecipeError, EgressError):  # a reply that is not as its task declares is refused in every run
        raise
    except Exception as error:
        sizes = {}
        failed[f"the server's half: {type(error).__name__}: {error}"] = None
    return sizes, tuple(f"A round rehearsed on a few rows failed, so some sizes are not known: {why}" for why in failed)


def warn_unmeasured(assembly: Assembly) -> None:
    """Say before anything is trained that no accuracy will come of it: `metrics` would be empty, without a word.

    The method itself is asked, with nobody there to answer: one that judges anything asks somebody, and stops there. So
    this holds of methods and switches of the user's own as well. What a policy keeps a method from judging is its own
    to tell: here everything may go.
    """
    rows = itertools.product((*assembly.fed.clients.modalities, SHARED, LABELS), DESTINATIONS)
    context = replace(assembly.fed.context, policy=Policy(dict.fromkeys(rows, frozenset(KINDS))))
    fed = replace(assembly.fed, context=context, engine=_Nobody(), clock=None, emit=lambda *_, **__: None)
    fed.begin(fed.rounds)
    try:
        measured = assembly.algorithm.evaluate(SimpleNamespace(params=assembly.initial), fed)
    except Exception:  # somebody was asked, or the state was looked into for what to ask
        return
    if measured.metrics:
        return
    if assembly.fed.clients.tested:
        fix = "its clients have test rows of their own: set [evaluate] personal = true"
    else:
        fix = "give clients test rows of their own, as in [clients] personal_test = 0.2"
    warnings.warn(
        f"{name_of(assembly.algorithm, ALGORITHMS)} on data '{assembly.population.columns.name}' measures nothing, "
        f"metrics will be empty: {fix}",
        PolyfedWarning,
        stacklevel=2,
    )


class _Nobody:
    """An engine without clients: to ask is an error."""

    name = "nobody"

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        """Refuse."""
        raise LookupError(f"{request.name} was asked of {len(clients)}")


def refuse_forbidden(assembly: Assembly) -> None:
    """Stop before training what the policy would refuse during it.

    Raises:
        EgressError: every forbidden crossing, and the lines that would allow them.
    """
    refused = [row for row in plan(assembly) if not row.allowed]
    if not refused:
        return
    lines = [
        f"  {row.message}.{row.field} (task {row.task}): {row.kind} of {row.block} to the {row.destination}"
        for row in refused
    ]
    lines += _why(refused, assembly.policy)
    fixes = ["it would leave if the policy said:", *(f"  {fix}" for fix in fixes_of(refused, assembly.policy))]
    raise EgressError("\n".join(["the policy forbids what this algorithm sends:", *lines, *fixes]))


def fixes_of(refused: Iterable[Planned], policy: Policy) -> list[str]:
    """The lines of a policy that would allow all of this, one for each block and destination."""
    kinds: dict[tuple[str, str], set[str]] = {}
    for row in refused:
        kinds.setdefault((row.block, row.destination), set()).add(row.kind)
    return [policy.fix(wanted, *place) for place, wanted in kinds.items()]


def plan(
    assembly: Assembly, in_dry_run: Mapping[Place, Size] | None = None, announcement: Announcement | None = None
) -> Iterator[Planned]:
    """Everything the algorithm's tasks can send, block by block.

    Args:
        assembly: the parts of a run.
        in_dry_run: the sizes that were seen.
        announcement: of one client; by default of one that has all modalities, so what any client can send.
    """
    listed = announcement or assembly.engine.announcement(assembly.fed.clients.modalities)
    sizes, seen = block_sizes(assembly), in_dry_run or {}
    planned = (_sized(row, sizes, seen) for row in listed.rows.values())
    return (row for row in planned if row.bytes != 0 or row.in_dry_run)  # of a block that is wholly frozen nothing can


def _sized(row: Announced, blocks: Mapping[str, int], seen: Mapping[Place, Size]) -> Planned:
    """With the size that a dry run saw, or else that of the model's block."""
    size = seen.get((row.task, row.field, row.block))
    known = blocks.get(row.block) if row.kind in OF_THE_MODEL else None
    return Planned(
        **vars(row),
        bytes=known if size is None else size.fixed,
        bytes_per_row=0.0 if size is None else size.per_row,
        in_dry_run=size is not None,
    )
