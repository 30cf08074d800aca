"""The server's start: who takes part, and the same loop as any run, with a post in place of an engine's own clients."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from polyfed.core.errors import BadReply, DataError, EgressError, PolyfedError, RecipeError, TooFewReplies
from polyfed.data import Column, Columns, Population, Shards, stacked
from polyfed.data.columns import LEFT_OUT, TEST, VALIDATION
from polyfed.deploy.handlers import MEGABYTE, Simulated
from polyfed.engines.base import Engine
from polyfed.engines.protocol import ENROLLED, REFUSED, Enrolment
from polyfed.engines.remote import Remote, ReplyTerms
from polyfed.experiment.assembly import population_of
from polyfed.experiment.events import Emitter
from polyfed.experiment.lock import alone_in
from polyfed.experiment.recipe import Recipe, load_recipe
from polyfed.experiment.records import Records
from polyfed.experiment.settings import EngineSpec
from polyfed.federation.wire_format import Packet

ERROR = "error.json"
"""What ended a run, beside its records; gone when the run goes on."""


def reply_terms_of(spec: EngineSpec) -> ReplyTerms:
    """The terms of the [engine] section; the session is the time of the start, in milliseconds."""
    return ReplyTerms(
        session=int(time.time() * 1000),
        reply_seconds=spec.reply_seconds,
        stop_on_refusal=spec.on_refusal == "stop",
        relay=spec.relay == "server-sees",
        limit=spec.message_megabytes * MEGABYTE,
    )


def engine_by(transport: Any, spec: EngineSpec) -> Callable[..., Engine]:
    """The constructor of an engine that asks by this post."""
    terms = reply_terms_of(spec)
    return lambda *args, **kwargs: Remote(*args, transport=transport, terms=terms, **kwargs)


_T = TypeVar("_T")

Execute = Callable[..., _T]
"""`polyfed.run.execute`: assembles a run and brings it to its end."""


def placed(recipe: Recipe, data: str) -> Recipe:
    """A recipe as a server runs it: on this engine, its own rows where they are on this machine."""
    source = replace(recipe.data, path=data) if data else recipe.data
    return replace(recipe, data=source, engine=replace(recipe.engine, name="flower"))


def simulate(recipe: Recipe, records: Records | None, emit: Emitter, execute: Execute[_T]) -> _T:
    """Run a recipe on Flower's simulation runtime; gives what `execute` gives.

    Raises:
        RecipeError: the extra `polyfed[flower]` is not installed.
    """
    try:
        from polyfed.engines import flower
    except ImportError as error:
        raise RecipeError(f"[engine] name = 'flower' needs Flower ({error}): pip install 'polyfed[flower]'") from None
    with tempfile.TemporaryDirectory(prefix="polyfed-") as spare:
        folder = Path(spare) if records is None else (records.folder / "nodes").absolute()
        population = population_of(recipe)
        finished: list[_T] = []

        def main(transport: flower.GridTransport) -> None:
            meet(recipe, population, transport)
            engine = engine_by(transport, recipe.engine)
            finished.append(execute(recipe, records, emit, population=population, engine=engine))

        cpus = recipe.engine.client_cpus
        flower.simulate(main, Simulated(recipe, folder), population.num_clients, cpus)
    return finished[0]


def meet(recipe: Recipe, population: Population, transport: Any) -> None:
    """Have the simulated clients enrol.

    Raises:
        TooFewReplies: they have not all started in time.
    """
    answers = transport.enrol(population.num_clients, recipe.engine.enrol_seconds)
    started = len([told_by(answer) for answer in answers])
    if started < population.num_clients:
        raise TooFewReplies(
            f"{started} of {population.num_clients} simulated clients started within "
            f"{recipe.engine.enrol_seconds:g} seconds; raise [engine] enrol_seconds"
        )


def serve(recipe_path: Path, transport: Any, config: Mapping[str, Any], execute: Execute[Any]) -> None:
    """A ServerApp's main: wait for clients, then run the recipe, going on with what `out` holds.

    Args:
        recipe_path: the recipe that came with the app.
        transport: carries packets.
        config: the run's configuration: `out`, a folder on the server, and `data`, where the server's own rows are, if
            the recipe's [data] has a path.
        conduct: `polyfed.run.execute`.

    Raises:
        PolyfedError: it ends the run; its text and exit code are also left in `out/error.json`.
    """
    out = Path(str(config.get("out", "runs/flower"))).expanduser()
    (out / ERROR).unlink(missing_ok=True)
    try:
        recipe = placed(load_recipe(recipe_path), str(config.get("data", "")))
        records = Records(out, resume=True)
        emit = Emitter([_Log()])
        with only_server(out):
            population = enrolled(recipe, transport, emit)
            execute(recipe, records, emit, population=population, engine=engine_by(transport, recipe.engine))
        (out / ERROR).unlink(missing_ok=True)  # of another server, which was refused meanwhile
    except PolyfedError as error:
        told = {"error": type(error).__name__, "text": str(error), "exit_code": error.exit_code}
        if out.is_dir():
            (out / ERROR).write_text(json.dumps(told, indent=1))
        print(f"polyfed: {error} (exit code {error.exit_code})", flush=True)  # noqa: T201  the app's log is its screen
        raise


def only_server(out: Path, seconds: float = 90.0) -> AbstractContextManager[None]:
    """Hold the run's folder; a server whose SuperLink was killed may live on for some seconds.

    Raises:
        RecipeError: another server still holds it after `seconds`.
    """
    return alone_in(out, "another server is writing this run", "Stop it (flwr list, flwr stop) or end it", seconds)


class _Log:
    """Events as lines of the app's log, which `flwr log` shows."""

    def __call__(self, event: str, **facts: Any) -> None:
        if event == "round-finished":
            row = facts["row"]
            evaluated = row.get("metrics", {}).get("global", {})
            shown = "".join(f", {name} {evaluated[name]:.4f}" for name in ("accuracy", "loss") if name in evaluated)
            text = f"round {row['round']}: {len(row['cohort'])} asked, {row['bytes_up']} bytes up{shown}"
        elif event == "note":
            text = facts["text"]
        elif event == "client-missing":
            text = f"{event}: " + ", ".join(f"{name} {value}" for name, value in facts.items())
        else:
            return
        print(f"polyfed: {text}", flush=True)  # noqa: T201  the app's log is its screen


def enrolled(recipe: Recipe, transport: Any, emit: Emitter) -> Population:
    """Wait for the clients of a deployment; what the server knows of them is what they say.

    Raises:
        TooFewReplies: fewer than `min_nodes`, or than `min_replies`, came in time.
        EgressError: one refused, and the recipe says to stop then.
        DataError: they contradict each other, or the server's own data.
    """
    spec = recipe.engine
    wanted = spec.nodes or recipe.clients.num or 1
    answers: list[Packet] = transport.enrol(wanted, spec.enrol_seconds, _Waiting(wanted, spec.enrol_seconds, emit))
    known: list[Enrolment] = []
    absent: list[str] = []
    for answer in answers:
        try:
            known.append(told_by(answer))
        except (BadReply, EgressError) as error:
            if isinstance(error, EgressError) and spec.on_refusal == "stop":
                raise
            absent.append(str(error))
    why = f"Not enrolled: {'; '.join(absent)}" if absent else "No other node answered"
    if len(known) < max(spec.min_nodes or wanted, spec.min_replies, 1):
        raise TooFewReplies(
            f"{len(known)} of {wanted} clients enrolled ([engine] nodes, enrol_seconds = {spec.enrol_seconds:g}). "
            f"{why}. A run that may begin without some says so by [engine] min_nodes"
        )
    if len(known) < wanted:
        emit("note", text=f"WARNING: starting with {len(known)} of {wanted} clients. {why}")
    return population_from(known, columns_from(known, recipe, emit))


class _Waiting:
    """Says how many have enrolled: when that changes, and now and then while nothing does."""

    EVERY = 30.0
    """Seconds without news between two lines."""

    def __init__(self, wanted: int, seconds: float, emit: Emitter) -> None:
        self.wanted, self.seconds, self.emit = wanted, seconds, emit
        self.said: int | None = None
        self.moment = 0.0

    def __call__(self, answers: Sequence[Packet]) -> None:
        count = sum(answer.header.get("verdict") == ENROLLED for answer in answers)
        now = time.monotonic()
        if count == self.said and now - self.moment < self.EVERY:
            return
        self.said, self.moment = count, now
        word = "waiting: " if count < self.wanted else ""
        self.emit("note", text=f"{word}{count} of {self.wanted} enrolled")


def told_by(answer: Packet) -> Enrolment:
    """The enrolment in an answer.

    Raises:
        EgressError: the client's policy refused.
        BadReply: it is none, for another reason.
    """
    if answer.header.get("verdict") == REFUSED:
        raise EgressError(str(answer.header.get("reason")))
    if answer.header.get("verdict") != ENROLLED:
        raise BadReply(str(answer.header.get("reason")))
    return Enrolment.read(answer.header)


def columns_from(known: list[Enrolment], recipe: Recipe, emit: Emitter) -> Columns:
    """The server's table: its own rows for tests, or, where it has none, a single row that nobody uses.

    Raises:
        DataError: shapes of a modality differ.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for told in sorted(known, key=lambda told: told.client):
        for name, shape in told.shapes.items():
            if shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise DataError(
                    f"samples of '{name}' have shape {tuple(shape)} at client {told.client}, {shapes[name]} elsewhere"
                )
    num_classes = max(told.num_classes for told in known)
    try:
        own: Columns = stacked(recipe.data.load(), recipe.stack)
    except DataError as error:
        emit("note", text=f"the server has no data, so there is no global evaluation ({error})")
        order = [name for name in getattr(recipe.data, "modalities", ()) if name in shapes]
        shapes = {name: shapes[name] for name in order or sorted(shapes)}
        zero = torch.zeros(1, dtype=torch.int64)
        columns = {name: Column(torch.zeros(1, *shape)) for name, shape in shapes.items()}
        return Columns("deployed", columns, zero, num_classes, torch.full((1,), LEFT_OUT, dtype=torch.int8), zero)
    for name, shape in shapes.items():
        if own.column(name).shape != shape:
            raise DataError(f"samples of '{name}' have shape {shape} at the clients, {own.column(name).shape} here")
    emit("note", text=f"the global test set: {len(own.rows(TEST))} of the {len(own)} rows of [data]")
    return replace(own, num_classes=max(own.num_classes, num_classes))


def population_from(known: list[Enrolment], columns: Columns) -> Population:
    """What the server knows of clients that enrolled; numbers nobody has are clients without rows."""
    size = max(told.client for told in known) + 1
    rows, tested = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    holds = torch.zeros(size, len(columns.modalities), dtype=torch.bool)
    silo = torch.full((size,), -1)
    for told in known:
        rows[told.client], tested[told.client] = told.rows, int(told.tested)
        holds[told.client] = torch.tensor([name in told.modalities for name in columns.modalities])
        silo[told.client] = -1 if told.silo is None else told.silo
    return Population(
        columns=columns,
        train=_elsewhere(rows),
        test=_elsewhere(tested) if bool(tested.any()) else None,
        holds=holds,
        silo=silo if bool((silo >= 0).any()) else None,
        test_rows=columns.rows(TEST),
        validation_rows=columns.rows(VALIDATION),
    )


def _elsewhere(sizes: torch.Tensor) -> Shards:
    """Rows that are not here: only how many there are is known."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return Shards(offsets, torch.tensor([-1]).expand(int(offsets[-1])))
