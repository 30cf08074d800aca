"""Lists, before a run, which parts of messages can leave the clients."""

import itertools
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from polyfed.algorithms import NAMED, Averaging
from polyfed.core.errors import EgressError, PolyfedWarning, RecipeError, TooFewReplies
from polyfed.core.messages import DESTINATIONS, KINDS, LABELS, OF_THE_MODEL
from polyfed.core.registry import name_of
from polyfed.core.request import Request, Send
from polyfed.core.tree import SHARED
from polyfed.data import Population
from polyfed.data.column_fitting import features_of
from polyfed.data.leaked_labels import repeated_rows
from polyfed.engines.workers.cluster import STORE_SHARE, facts, size_of
from polyfed.experiment.checks.check_result import CheckResult, Planned
from polyfed.experiment.checks.check_tables import check_tables
from polyfed.experiment.checks.idle_options import warn_idle
from polyfed.experiment.recipes.recipe import Recipe, recipe_of
from polyfed.experiment.running.assembly import Assembly, assemble, block_sizes, facts_of, not_in_ledger, private_sizes
from polyfed.experiment.running.column_statistics import SET_UP, announced, sizes_of, stated
from polyfed.experiment.running.dry_run import Place, Size, metrics_of, run_dry
from polyfed.experiment.running.stopping import Choice, refuse_unmeasured
from polyfed.federation.client_registry import VALIDATION
from polyfed.federation.replies import Answer
from polyfed.privacy.egress.announcement import Announced, Announcement
from polyfed.privacy.egress.policy import EVERY, Policy
from polyfed.report.formatting import bytes_of, counted
from polyfed.report.text_layout import text_of

MEGABYTE = 2**20

SERVER_CODE = 1
"""The exit code of a run in which the code of the server raises an exception that is not polyfed's own."""


class Check(CheckResult):
    """The result of `polyfed check`; printing it shows the text that the command prints."""

    def __repr__(self) -> str:
        return text_of(check_tables(self))


def check(recipe: Recipe | str | Path, population: Population | None = None) -> Check:
    """Validate a recipe against its data, dry-run a round, and list what can leave the clients.

    Args:
        recipe: a recipe, or the path of one.
        population: the clients of the recipe, if they are loaded already.

    Raises:
        PolyfedError: a run would refuse the recipe before its first round, or a reply differs from what its task
            declares.
    """
    recipe = recipe_of(recipe)
    assembly = assemble(recipe, population=population)
    refuse_idle_metric(assembly)
    warn_unmeasured(assembly)
    warn_idle(assembly)
    sizes, failures, code = _dry_run_sizes(assembly)
    planned = tuple(plan(assembly, sizes))
    refused = [row for row in planned if not row.allowed]
    guarantee = assembly.guarantee
    return Check(
        assembly.recipe,
        facts_of(assembly),
        planned,
        failures,
        why=tuple(_why(refused, assembly)),
        fixes=tuple(fixes_of(refused, assembly.policy, assembly.fed.clients.modalities)),
        not_in_ledger=tuple(not_in_ledger(assembly)),
        private=private_sizes(assembly),
        links=() if assembly.fed.links is None else tuple(assembly.fed.links.sentences()),
        guesses=(*assembly.guesses, *filter(None, [_repeated_rows(assembly.population)])),
        privacy=None if guarantee is None else guarantee.facts(guarantee.rounds),
        promises=() if guarantee is None else tuple(guarantee.sentences()),
        node_needs=tuple(_node_needs(assembly)),
        failure_code=code,
    )


def _repeated_rows(population: Population) -> str:
    """Return the sentence about test rows that also train, of the server and of clients."""
    own = [population.test_rows] if population.test is None else [population.test_rows, population.test.rows]
    test, train = torch.unique(torch.cat(own)), torch.unique(population.train.rows)
    return "" if bool((train < 0).any()) else repeated_rows(population.columns, train, test)


def _why(refused: Sequence[Planned], assembly: Assembly) -> Iterator[str]:
    """Yield sentences that explain the refused parts.

    A policy has rows for blocks, such as the modality `image` or the block `shared`. If it has no row for `shared`, its
    rows for the modalities also limit what `shared` may send. For a refused part of `shared`, the sentences name the
    row that forbids it. If the policy forbids that the parameters of a block leave the client, one more sentence
    explains how each client can train the block and keep it, with all else that the policy then still refuses.
    """
    yield from assembly.policy.explanations((row.kind, row.block, row.destination) for row in refused)
    yield from _named(refused, assembly)
    blocks = dict.fromkeys(row.block for row in refused if row.kind == "parameters")
    method = assembly.algorithm
    if not blocks or len(blocks) == len(block_sizes(assembly)) or not isinstance(method, Averaging):
        return
    own = [block for block in blocks if block != SHARED]
    apart = bool(own) and SHARED in blocks and (SHARED, "server") not in assembly.policy.rules
    private = (*method.private, *(own if apart else blocks))
    clients = assembly.recipe.clients
    tested = clients if clients.personal_test is not None else replace(clients, personal_test=0.2)
    try:
        replace(assembly.recipe, algorithm=replace(method, private=private), clients=tested)
    except RecipeError:  # the method cannot keep private blocks
        return
    kept = own if apart else blocks
    left = [row for row in refused if row.kind not in OF_THE_MODEL or row.block not in kept]
    lines = [f"[algorithm] private = {json.dumps(private)}"]
    lines += fixes_of((row for row in left if row.task != SET_UP), assembly.policy, assembly.fed.clients.modalities)
    told = fixes_of((row for row in left if row.task == SET_UP), assembly.policy, assembly.fed.clients.modalities)
    lines += [f"named words and means, or {line}" for line in told]
    lines += [] if tested is clients else ["[clients] personal_test = 0.2"]
    yield f"without sending {' and '.join(kept)}, every client can keep and train its own: {', '.join(lines)}"


def _named(refused: Sequence[Planned], assembly: Assembly) -> Iterator[str]:
    """Yield a sentence about refused words and means, if there are any: nobody tells those that the recipe names."""
    told = {(row.block, row.field) for row in refused if row.task == SET_UP}
    columns = features_of(assembly.population.columns).items()
    if fitted := [one for block, features in columns for one in features if (block, one.column) in told]:
        yield f"nobody tells words and means that the recipe names, as in {stated(fitted)}"


def _node_needs(assembly: Assembly) -> Iterator[str]:
    """Yield what each node of the cluster needs, if the recipe names one."""
    spec = assembly.recipe.engine
    if not spec.cluster:
        return
    columns, what = (
        (None, "the model takes") if spec.shared_folder else (assembly.population.columns, "data and model take")
    )
    size = size_of(columns, assembly.initial)
    yield "Ray, and " + ", ".join(f"{package} {number}" for package, number in facts().items())
    yield (
        f"an object store of {bytes_of(int(size / STORE_SHARE))} or more: {what} {bytes_of(size)}, once "
        "on each node (`ray start --object-store-memory=BYTES`)"
    )
    if spec.shared_folder:
        yield f"to read {Path(spec.shared_folder).absolute()}, where the command writes the data once"
    yield f"{counted(max(1, spec.threads), 'core')} for each worker" + (" and a GPU" if spec.device == "cuda" else "")


def _dry_run_sizes(assembly: Assembly) -> tuple[dict[Place, Size], tuple[str, ...], int]:
    """Return the sizes of the messages in the dry run, and the reasons and the exit code if the dry run failed.

    The dry run uses only a few rows of each client. If it fails, a round on all rows may still succeed. If tasks of
    clients fail, a run has too few replies. If the code of the server fails, a run ends with its exception.
    """
    failed: dict[str, None] = {}
    code = 0

    def listen(event: str, **facts: Any) -> None:
        if event == "client-failed":
            failed[f"task {facts['task']}: {facts['reason']}"] = None

    try:
        sizes = run_dry(assembly.recipe, assembly.population, listen)
    except (RecipeError, EgressError):  # a reply that differs from its declaration is refused in every run as well
        raise
    except Exception as error:
        sizes = {}
        code = SERVER_CODE
        failed[f"server code: {type(error).__name__}: {error}"] = None
    remarks = tuple(f"The dry run of a round failed, so some sizes are not known: {why}" for why in failed)
    return sizes, remarks, code or (TooFewReplies.exit_code if failed else 0)


def warn_unmeasured(assembly: Assembly) -> None:
    """Warn before training if the run will evaluate nothing, so that `metrics` would be empty.

    The check calls the algorithm's `evaluate` with an engine that has no clients. An error means that `evaluate` sent a
    request. The algorithm then evaluates something, and there is no warning. If `evaluate` returns no metrics, it
    evaluates nothing. This check also works for the user's own algorithms. Here, `evaluate` runs under a policy that
    allows everything. If the recipe's policy forbids an evaluation, the algorithm itself warns of that.
    """
    rows = itertools.product((*assembly.fed.clients.modalities, SHARED, LABELS), DESTINATIONS)
    context = replace(assembly.fed.context, policy=Policy(dict.fromkeys(rows, frozenset(KINDS))))
    fed = replace(assembly.fed, context=context, engine=_NoClients(), clock=None, emit=lambda *_, **__: None)
    fed.begin(fed.rounds)
    try:
        measured = assembly.algorithm.evaluate(SimpleNamespace(params=assembly.initial), fed)
    except Exception:  # `evaluate` sent a request, or read the state to prepare one
        return
    if measured.metrics:
        return
    warnings.warn(
        f"{name_of(assembly.algorithm, NAMED)} on data '{assembly.population.columns.name}' measures nothing, "
        f"metrics will be empty: {personal_fix(tested=bool(assembly.fed.clients.tested))}",
        PolyfedWarning,
        stacklevel=2,
    )


def personal_fix(*, tested: bool) -> str:
    """Return how to change a recipe so that its runs evaluate clients on their own test rows.

    Args:
        tested: whether clients already have test rows of their own.
    """
    if tested:
        return "its clients have test rows of their own: set [evaluate] personal = true"
    return "give clients test rows of their own, as in [clients] personal_test = 0.2"


class _NoClients:
    """An engine without clients: every request is an error."""

    name = "no-clients"

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        """Raise a LookupError."""
        raise LookupError(f"request {request.name} to {len(clients)} clients, and there are none")


def check_before_run(assembly: Assembly) -> None:
    """Refuse a run that would fail later, because of the policy or of a message that is too large.

    Warn if the run will evaluate nothing, and of every option that changes nothing.

    Raises:
        PolyfedError: see `refuse_forbidden` and, where clients are in other processes, `refuse_large`.
    """
    refuse_forbidden(assembly)
    if not assembly.engine.keeps_locals:
        refuse_large(assembly)
    refuse_idle_metric(assembly)
    warn_unmeasured(assembly)
    warn_idle(assembly)


def refuse_idle_metric(assembly: Assembly) -> None:
    """Refuse a section [stop] whose metric the run will never measure.

    The untrained model is evaluated on a few rows, see `metrics_of`. The server of a deployment has no rows of its
    clients, so it only knows whether there are validation rows.

    Raises:
        RecipeError: there are no such rows, or there is no such metric on them.
    """
    recipe, fed = assembly.recipe, assembly.fed
    if not (recipe.stop.metric or recipe.stop.patience):
        return
    choice = Choice.of(recipe.stop, fed.context.objective)
    if assembly.deployed:
        has = VALIDATION in fed.evaluation_clients if choice.group == "validation" else bool(fed.clients.validated)
        refuse_unmeasured(recipe.stop, choice, {choice.group: {choice.name}} if has else {})
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpu = replace(recipe, engine=replace(recipe.engine, device="cpu", name="sequential"))
        try:
            measured = metrics_of(cpu, assembly.population)
        except (RecipeError, EgressError):
            raise
        except Exception:  # the run itself will say what is wrong
            return
    refuse_unmeasured(recipe.stop, choice, measured)


def refuse_forbidden(assembly: Assembly) -> None:
    """Refuse a run before training if the policy would refuse one of its replies later.

    Raises:
        EgressError: the policy forbids a part. The message lists all forbidden parts, and the lines that would allow
            them.
    """
    refused = [row for row in plan(assembly) if not row.allowed]
    if not refused:
        return
    lines = [*_causes(refused), *_why(refused, assembly)]
    listed = fixes_of(refused, assembly.policy, assembly.fed.clients.modalities)
    fixes = ["it would leave if the policy said:", *(f"  {fix}" for fix in listed)]
    raise EgressError("\n".join(["the policy forbids what this algorithm sends:", *lines, *fixes]))


def _causes(refused: Iterable[Planned]) -> Iterator[str]:
    """Yield a line for each kind of a block that may not go to a destination, with all parts that hold it."""
    causes: dict[tuple[str, str, str], dict[tuple[str, str], list[str]]] = {}
    for row in refused:
        messages = causes.setdefault((row.kind, row.block, row.destination), {})
        messages.setdefault((row.message, row.task), []).append(row.field)
    for (kind, block, destination), messages in causes.items():
        parts = (f"{message}.{', '.join(names)} (task {task})" for (message, task), names in messages.items())
        yield f"  {kind} of {block} to the {destination}: {', '.join(parts)}"


def refuse_large(assembly: Assembly) -> None:
    """Refuse a run if one of its replies is larger than `[deployment] message_megabytes` allows.

    Raises:
        RecipeError: a reply of one of the tasks is too large. Only parts whose sizes are known before the run are
            counted.
    """
    megabytes = assembly.recipe.deployment.message_megabytes
    once = {(row.task, row.message, row.field, row.block): row.bytes or 0 for row in plan(assembly)}
    sizes = Counter[str]()
    for (task, *_), size in once.items():
        sizes[task] += size
    for task, size in sizes.most_common(1):
        if size > megabytes * MEGABYTE:
            raise RecipeError(
                f"a reply of task '{task}' takes {size:,} bytes, and [deployment] message_megabytes = {megabytes} "
                f"allows {megabytes * MEGABYTE:,}. Write message_megabytes = {-(-size * 11 // 10 // MEGABYTE)}, if the "
                "server and the devices have the memory, or take a smaller model"
            )


def fixes_of(refused: Iterable[Planned], policy: Policy, modalities: Sequence[str] = ()) -> list[str]:
    """Return the lines of a recipe that would allow these parts, without repetition.

    If all of `modalities` lack the same kinds, and none has a row, one line for `[egress."*"]` stands for all of them.
    """
    kinds: dict[tuple[str, str], set[str]] = {}
    others: dict[str, None] = {}  # lines outside of [egress], which each part names itself
    for row in refused:
        if policy.allows(row.kind, row.block, row.destination):
            others[row.fix] = None
        else:
            kinds.setdefault((row.block, row.destination), set()).add(row.kind)
    lines = []
    for destination in DESTINATIONS:
        places = [(name, destination) for name in modalities]
        wanted = [kinds.get(place) for place in places]
        if (
            len(places) > 1
            and wanted[0]
            and all(own == wanted[0] for own in wanted)
            and not policy.rules.keys() & {*places}
        ):
            every = policy.fix(wanted[0], *places[0])
            lines.append(every.replace(f"[egress.{modalities[0]}]", f'[egress."{EVERY}"]'))
            kinds = {place: own for place, own in kinds.items() if place not in places}
    lines += [policy.fix(own, *place) for place, own in kinds.items()]
    return [*dict.fromkeys(lines), *others]


def plan(
    assembly: Assembly, in_dry_run: Mapping[Place, Size] | None = None, announcement: Announcement | None = None
) -> Iterator[Planned]:
    """List every part of a message that the algorithm's tasks can send, block by block.

    Args:
        assembly: the parts of a run.
        in_dry_run: the sizes that a dry run saw.
        announcement: what one client can send. If None, the client has all modalities.
    """
    listed = announcement or assembly.engine.announcement(assembly.fed.clients.modalities)
    sizes, seen = block_sizes(assembly), in_dry_run or {}
    planned = (_sized(row, sizes, seen) for row in listed.rows.values())
    told = {(SET_UP, column, block): size for (block, column), size in sizes_of(assembly.population.told).items()}
    before = {place: Size(fixed=size, per_row=0.0) for place, size in told.items()}
    yield from (_sized(row, {}, before) for row in announced(features_of(assembly.population.columns), listed.policy))
    yield from (
        row for row in planned if row.bytes != 0 or row.in_dry_run
    )  # a block that is frozen as a whole sends nothing


def _sized(row: Announced, blocks: Mapping[str, int], seen: Mapping[Place, Size]) -> Planned:
    """Return a part of a message with its size: the size that a dry run saw, or else the size of the model's block."""
    size = seen.get((row.task, row.field, row.block))
    known = blocks.get(row.block) if row.kind in OF_THE_MODEL else None
    return Planned(
        **vars(row),
        bytes=known if size is None else size.fixed,
        bytes_per_row=0.0 if size is None else size.per_row,
        in_dry_run=size is not None,
    )
