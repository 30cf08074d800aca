"""The server of a deployment or of a Flower simulation: it waits for its clients and then runs the recipe.

The only difference from a run in one process is the engine, which sends requests to clients over a transport.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from polyfed.core.errors import DataError, PolyfedError, RecipeError, TooFewReplies
from polyfed.core.system.files import RECIPE as FILE_OF_RECIPE
from polyfed.core.system.files import RESULT
from polyfed.data import Population
from polyfed.deploy.app_folder import data_of, placed
from polyfed.deploy.handlers import MEGABYTE, Simulated
from polyfed.deploy.server.claimed_shapes import without_absent
from polyfed.deploy.server.countersignatures import collect_receipts
from polyfed.deploy.server.enrolment import enrolled, enrolment_in
from polyfed.deploy.server.membership import Membership, expected, expected_edges
from polyfed.deploy.server.run_log import LOGGER, RunStatus, listeners_of
from polyfed.engines.base import Engine
from polyfed.engines.edges import EdgeRemote
from polyfed.engines.kept_answers import KeptAnswers
from polyfed.engines.remote import Remote, ReplyTerms
from polyfed.experiment.recipes.defaults import with_encoders
from polyfed.experiment.recipes.recipe import Recipe, load_recipe
from polyfed.experiment.results.records import Records
from polyfed.experiment.running.assembly import population_of
from polyfed.experiment.running.checkpoint import newest
from polyfed.experiment.running.events import INTERRUPTED, Emitter
from polyfed.experiment.running.lock import alone_in
from polyfed.privacy.egress.audit_log.log import AuditLog

ANSWERS = ".answers"
"""The folder in a run folder with what devices have answered in the present round under secure aggregation."""

ERROR = "error.json"
"""The file in a run folder with the error that ended the run. It is removed when the run resumes."""


def reply_terms_of(recipe: Recipe, session: int | None = None, *, holds: bool = True) -> ReplyTerms:
    """Make the reply terms from a recipe.

    Args:
        holds: whether clients may work on while the server goes on.
        session: a number that identifies this start of the server; later starts have larger numbers. The default is the
            time in milliseconds.
    """
    spec = recipe.deployment
    return ReplyTerms(
        session=int(time.time() * 1000) if session is None else session,
        reply_seconds=spec.reply_seconds,
        close_at=spec.close_at,
        min_replies=recipe.engine.min_replies,
        away_seconds=spec.away_seconds,
        stop_on_refusal=spec.on_refusal == "stop",
        relay=spec.relay == "server-sees",
        limit=spec.message_megabytes * MEGABYTE,
        holds=holds,
    )


def engine_by(
    transport: Any, recipe: Recipe, session: int | None = None, *, holds: bool = True, kept: KeptAnswers | None = None
) -> Callable[..., Engine]:
    """Return a function that builds an engine with this transport.

    Args:
        transport: carries packets.
        session: a number that identifies this start of the server; later starts have larger numbers. The default is the
            time in milliseconds.
        holds: whether clients may work on while the server goes on. In a simulation on Flower they do not, so that the
            machine's speed decides nothing.
        kept: keeps the answers of a round under secure aggregation.
    """
    if kept is not None and recipe.algorithm.secure_aggregation is not None:
        return partial(
            Remote, transport=transport, terms=reply_terms_of(recipe, session, holds=holds), kept_answers=kept
        )
    kind = EdgeRemote if recipe.deployment.relay == "edge" else Remote
    return partial(kind, transport=transport, terms=reply_terms_of(recipe, session, holds=holds))


_T = TypeVar("_T")

Execute = Callable[..., _T]
"""The type of `polyfed.experiment.running.loop.execute`, which sets up a run and executes all of its rounds."""


def simulate(recipe: Recipe, records: Records | None, emit: Emitter, execute: Execute[_T]) -> _T:
    """Run a recipe on Flower's simulation runtime and return what `execute` returns.

    Raises:
        RecipeError: the extra `polyfed[flower]` is not installed.
    """
    try:
        from polyfed.engines import flower
    except ImportError as error:
        raise RecipeError(
            f"[engine] name = 'flower' needs Flower ({error}): pip install 'polyfed[flower]'", ("engine", "name")
        ) from None
    with tempfile.TemporaryDirectory(prefix="polyfed-") as spare:
        folder = Path(spare) if records is None else (records.folder / "nodes").absolute()
        population = population_of(recipe)
        recipe = with_encoders(recipe, population.columns)  # clients build the model without other clients' data
        finished: list[_T] = []

        def main(transport: flower.GridTransport) -> None:
            meet(recipe, population, transport)
            folder.mkdir(parents=True, exist_ok=True)
            engine = engine_by(transport, recipe, Membership(folder).session, holds=False)
            finished.append(execute(recipe, records, emit, population=population, engine=engine))

        cpus = recipe.deployment.client_cpus
        flower.simulate(main, Simulated(recipe, folder), population.num_clients, cpus)
    return finished[0]


def meet(recipe: Recipe, population: Population, transport: Any) -> None:
    """Wait until all simulated clients have started.

    Raises:
        TooFewReplies: not all clients started within `enrol_seconds`.
    """
    answers = transport.enrol(population.num_clients, recipe.deployment.enrol_seconds)
    started = len([enrolment_in(answer) for answer in answers])
    if started < population.num_clients:
        raise TooFewReplies(
            f"{started} of {population.num_clients} simulated clients started within "
            f"{recipe.deployment.enrol_seconds:g} seconds; raise [deployment] enrol_seconds"
        )


def serve(recipe_path: Path, transport: Any, config: Mapping[str, str], execute: Execute[Any]) -> None:
    """Wait for clients, then run the recipe or resume the run in `out`.

    A run whose server was killed before the devices had signed their ledgers is not played again: they sign, those that
    are there.

    Args:
        recipe_path: path of the app's recipe.
        transport: carries packets.
        config: the run's configuration. `out` is a folder on the server. If the recipe's [data] has a path, `data` is
            the path of the server's own rows.
        execute: `polyfed.experiment.running.loop.execute`.

    Raises:
        PolyfedError: an error ended the run. The text and exit code are also written to `out/error.json`.
    """
    out = Path(config["out"]).expanduser()
    listeners, status = listeners_of(out, transport.identity)
    with told_in(out, status):
        recipe = placed(load_recipe(recipe_path), config.get("data", ""))
        records = Records(out, resume=True, audit=(log := AuditLog(out)))
        emit = Emitter(listeners)
        with only_server(out):
            edges = recipe.deployment.relay == "edge"
            most = expected_edges(recipe) if edges else expected(recipe)
            members = Membership(out, transport.joined, transport.renewed, transport.registered, most)
            transport.noted = log.note
            transport.vet, transport.limit = members.refusal, recipe.deployment.message_megabytes * MEGABYTE
            transport.rounds_left = max(recipe.rounds - newest(records.checkpoints), 1)
            transport.run = str(records.facts().get("run", "")) if records.begun else ""
            played = finished(recipe, out)
            try:
                with suppress(TooFewReplies) if played else nullcontext():
                    population = enrolled(recipe, transport, emit, members.left_out)
            finally:
                out_of = sorted(members.left_out.items())
                log.note([{"event": "refused", "client": client, "why": why} for client, why in out_of])
            transport.rounds_left = 1  # for devices that enrol again: they may have spent a part of their budget here
            kept = KeptAnswers(out / ANSWERS)
            if not played:
                members.begin(transport.node_of)
                recipe = without_absent(recipe, population.columns.modalities)
                engine = engine_by(transport, recipe, members.session, kept=kept)
                with naming_the_option(), kept:
                    execute(
                        recipe,
                        records,
                        emit,
                        population=population,
                        engine=engine,
                        app=recipe_path.parent,
                        deployed=True,
                    )
            silos = members.silos if edges else None
            collect_receipts(out, str(records.facts()["run"]), transport, members.signed_by, silos)


@contextmanager
def naming_the_option() -> Iterator[None]:
    """If a run cannot be resumed, add to the error how the user of a deployment chooses another folder."""
    try:
        yield
    except (RecipeError, DataError) as error:
        if "cannot resume" in str(error):
            how = "`polyfed submit ... --out DIR` chooses another folder"
            error.args = (f"{error}. {how}", *error.args[1:])
        raise


@contextmanager
def told_in(out: Path, status: RunStatus | None = None) -> Iterator[None]:
    """Write an error of the `with` block to `error.json` in this folder and to the last line of the log.

    Args:
        out: folder of the run.
        status: the status of the run, which records the error.

    Raises:
        PolyfedError: the error that ended the block. An `OSError`, such as a full disk, becomes a `DataError`.
    """
    (out / ERROR).unlink(missing_ok=True)
    try:
        yield
    except PolyfedError as error:
        _tell(out, error, status)
        raise
    except OSError as error:
        failed = DataError(f"{error}. Make room on this machine's disk, or mend it; the same command goes on")
        _tell(out, failed, status)
        raise failed from error
    except BaseException as error:  # an error in polyfed, or an interruption: its traceback follows in the log
        if isinstance(error, Exception):
            _write_error(out, {"error": type(error).__name__, "text": str(error), "exit_code": 1})
        if status is not None:
            status.failed(INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}")
        raise
    (out / ERROR).unlink(missing_ok=True)  # another server, which could not lock the folder, may have written this file


def _tell(out: Path, error: PolyfedError, status: RunStatus | None) -> None:
    told = {"error": type(error).__name__, "text": str(error), "exit_code": error.exit_code}
    _write_error(out, told)
    if status is not None:
        status.failed(str(error), error.exit_code)
    LOGGER.error("%s (exit code %d)", error, error.exit_code, extra={"facts": told})


def _write_error(out: Path, told: Mapping[str, Any]) -> None:
    if out.is_dir():
        with suppress(OSError):  # the disk may be full, and the log holds the same text
            (out / ERROR).write_text(json.dumps(told, indent=1))


def finished(recipe: Recipe, out: Path) -> bool:
    """Return whether a folder holds the result of this recipe. How it ran and wrote checkpoints may differ."""
    if (out / ERROR).exists() or not (out / RESULT).exists():
        return False
    if json.loads((out / RESULT).read_text())["rounds"] != recipe.rounds:
        return False
    before, now = (load_recipe(out / FILE_OF_RECIPE).table(), placed(recipe, data_of(recipe)).table())
    if "task" not in now:  # a run adds the [task] section that it infers from the data
        before.pop("task", None)
    if not now["data"].get("class_names"):  # `app --local` lists those of a table
        before["data"].pop("class_names", None)
        now["data"].pop("class_names", None)
    return all(before.get(key) == now.get(key) for key in {*before, *now} - {"engine", "deployment", "checkpoint"})


def only_server(out: Path, seconds: float = 5.0) -> AbstractContextManager[None]:
    """Lock the run folder. If another process holds the lock, wait for it, because it may be about to end.

    Raises:
        RecipeError: another server still holds the lock after `seconds`.
    """
    return alone_in(out, "another server is writing this run", "End it, or choose another folder (--out)", seconds)
