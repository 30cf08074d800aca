"""Run a recipe round by round: train, summarise, evaluate, save."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.algorithms import NAMED
from polyfed.algorithms.base import Algorithm, ServerState
from polyfed.algorithms.evaluate import Evaluate
from polyfed.core.errors import CheckpointError, command, counted
from polyfed.core.registry import name_of
from polyfed.core.system.tracing import flush, span
from polyfed.data import Population, scaling_of
from polyfed.data.column_fitting import features_of
from polyfed.data.sources.own.new_rows import RowForm
from polyfed.engines.base import Engine
from polyfed.evaluation.scores import Measured
from polyfed.experiment.checks.check import check_before_run
from polyfed.experiment.checks.protection import privacy_after, privacy_facts
from polyfed.experiment.checks.repetition import Repetitions
from polyfed.experiment.recipes.engine_choice import pytorch_settings
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.task_choice import headline_of
from polyfed.experiment.results.model_facts import facts_of_models, untested
from polyfed.experiment.results.models import Models
from polyfed.experiment.results.records import Records, run_id
from polyfed.experiment.results.round_facts import (
    check_tables,
    facts_of_round,
    means_of,
    seconds_of,
    still_falls,
    untrained,
    versions,
    warn_silent,
)
from polyfed.experiment.results.run_result import Run, models_of, with_names
from polyfed.experiment.results.updates import ClientUpdates, block_norms
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import Assembly, announced_by, assemble, facts_of
from polyfed.experiment.running.checkpoint import RESTORE
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.growth import known_clients, new_clients, with_present
from polyfed.experiment.running.run_state import (
    TOTALS,
    best_folder,
    checked_state,
    forget_bests,
    kept_best,
    kept_facts,
    load_content,
    num_kept,
)
from polyfed.experiment.running.stopping import Choice, Stop, best_round, best_row, out_of_budget, out_of_patience
from polyfed.experiment.running.warm_start import write_copy
from polyfed.report import write_report
from polyfed.training.optimisers import Train


def execute(
    recipe: Recipe,
    records: Records | None,
    emit: Emitter,
    *,
    population: Population | None = None,
    engine: Callable[..., Engine] | None = None,
    app: Path | None = None,
    deployed: bool = False,
) -> Run:
    """Run a recipe to its last round. The run starts at the first round or continues from a checkpoint.

    Args:
        recipe: what to run.
        records: the run's folder, or None to write no files.
        emit: called with every event.
        population: the clients, if they are not those of the recipe's data; see `assemble`.
        engine: the engine's constructor, if it is not the recipe's; see `assemble`.
        app: the folder of the app of a deployment, which may hold the values of a warm start.
        deployed: whether this is the server of a deployment; see `assemble`.

    Raises:
        PolyfedError: one of `polyfed.core.errors`; its text says what to do.
    """
    if recipe.tracking is not None:
        emit.listeners.append(recipe.tracking.follow(recipe.table(), None if records is None else records.folder))
    with pytorch_settings(recipe), ExitStack() as stack, span("run", engine=recipe.engine.name, rounds=recipe.rounds):
        stack.callback(flush)
        kept = records.folder if records is not None and records.begun else app
        parts: dict[str, Any] = {"population": population, "engine": engine, "folder": kept, "deployed": deployed}
        parts["spare"] = records.folder if records is not None and deployed else None
        assembly = assemble(recipe, run_id(recipe.seed), emit, **parts)
        stack.callback(assembly.engine.close)
        check_before_run(assembly)
        assembly.engine.check()
        for text in (*assembly.guesses, *(assembly.guarantee.sentences() if assembly.guarantee else ())):
            emit("note", text=text)
        loop = _Loop(assembly, records, emit)
        first, state = loop.start()
        with emit.stopped_in(lambda: loop.fed.round):
            for round in range(first, loop.recipe.rounds + 1):
                if loop.stop is not None:
                    break
                # `save` comes last: a row on disk is a whole round, and resume goes on behind the last checkpoint. What
                # was sent in a round that fails is booked all the same, because it has left the clients.
                with loop.booked(round):
                    state, row = loop.train(round, state)
                    loop.summarise(row, state)
                    loop.evaluate(row, state)
                    loop.save(row, state)
            return loop.finish(state)


class _Loop:
    """Carries out one run, up to its last round. It starts at the first round or continues from a checkpoint."""

    def __init__(self, assembly: Assembly, records: Records | None, emit: Emitter) -> None:
        self.assembly, self.records, self.emit = assembly, records, emit
        self.recipe, self.fed, self.ledger = assembly.recipe, assembly.fed, assembly.ledger
        self.rounds: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}
        self.updates = ClientUpdates()
        self._knows(torch.zeros(0))
        emit.listeners.append(self._note)
        self._started, self.repeated = 0.0, Repetitions(records, assembly)
        self.choice = Choice.of(self.recipe.stop, assembly.fed.context.objective)
        self.stop: Stop | None = None
        self.best: dict[str, Any] | None = None
        self.totals = dict.fromkeys(TOTALS, 0) | {"seconds": 0.0, "simulated_seconds": 0.0}

    @contextmanager
    def booked(self, round: int) -> Iterator[None]:
        """Enclose a round. If an exception ends the round, the ledger's entries of the round are still written."""
        self.emit("round-started", round=round)
        self._started = time.perf_counter()
        try:
            with span("round", round=round):
                yield
        except BaseException:
            self._book(round)
            raise

    def finish(self, state: ServerState) -> Run:
        """Write the result and the report, and return the finished run."""
        engine, columns = self.assembly.engine, self.assembly.population.columns
        locals = engine.locals if engine.keeps_locals else None
        models = models_of(
            self.recipe,
            self.fed,
            state,
            locals,
            columns.class_names,
            scaling_of(columns),
            self._conformal(),
            features_of(columns),
            self._row_form(),
        )
        result, folder = self._result(state, models), None
        if self.records is not None:
            self.records.finish(result)
            folder = self.records.folder
            self._write_report(folder)
        warn_silent(self.rounds)
        self.emit("run-finished", result=result)
        best = None
        if self.best is not None:
            own = self.best["locals"] if engine.keeps_locals else None
            facts = columns.class_names, scaling_of(columns), None, features_of(columns), self._row_form()
            best = models_of(self.recipe, self.fed, self.best["state"], own, *facts)
        facts_now = facts_of(self.assembly)
        models, best = with_names(models, facts_now), None if best is None else with_names(best, facts_now)
        return Run(result, self.rounds, state, self.assembly.model, folder, models, best, facts_now)

    def _row_form(self) -> RowForm:
        """How the rows of this run were read, for rows that come later."""
        return RowForm.of(self.assembly.population.columns, self.recipe.data)

    def _conformal(self) -> dict[str, Any] | None:
        """The counts of conformal prediction from the last round, if there are any."""
        return self.rounds[-1].get("conformal") if self.rounds else None

    def _write_report(self, folder: Path) -> None:
        """Write the report. A failure only causes a note, because the result of the run is already on disk."""
        try:
            write_report(folder)
        except Exception as error:
            again = f"the numbers are in {folder}; `{command('report', folder)}` tries again"
            self.emit("note", text=f"the report could not be written ({type(error).__name__}: {error}): {again}")

    def _knows(self, known: Tensor) -> None:
        """Note which clients the run has had before this start, for its checkpoints."""
        facts = self.assembly.fed, self.assembly.population.columns, self._row_form()
        self.kept_facts = cache(partial(kept_facts, *facts, with_present(known, self.fed.clients)))

    def start(self) -> tuple[int, ServerState]:
        """The first round to run and the state before it.

        A folder that holds a run is changed only after everything in it has been checked.
        """
        records = self.records
        table, facts = self.recipe.table() | {"versions": versions()}, self._facts()
        if records is not None and records.begun:
            facts = records.check(table, facts)
            self.ledger.resume(facts["run"])
        checkpointed = self._checkpointed()
        if records is None or checkpointed is None:
            if records is not None and records.resume:
                records.refuse_lost_checkpoint()
                self.emit("note", text=f"{records.folder} has no checkpoint to resume from: the run starts at round 1")
            with self.repeated.set_up():
                state = self.assembly.start()
            if records is not None:  # only now: a run that is refused at its start must leave its folder free
                records.note(table, facts)
                write_copy(self.assembly.given, records.folder)
                self.repeated.rewound(records, {}, 0)
            self._book(0)
            self._announce(1)
            return 1, state
        round, content = checkpointed
        added = new_clients(self.assembly, content, records)
        self._knows(known_clients(content))
        self.rounds = self.repeated.rewound(records, content["places"], round)
        self.totals = content["totals"]
        records.note(table, facts)
        state, engine = self.assembly.put_away(content.pop("state")), self.assembly.engine
        self.assembly.resume(state, content["locals"], round)
        if self.fed.links is not None:
            self.fed.links.restore(content.get("links") or {})
        self.best = kept_best(records.checkpoints, content.get("best"), self.recipe.algorithm, engine.device)
        if self.best is not None:
            self.best["state"] = self.assembly.put_away(self.best["state"])
        self.emit("note", text=f"resumed after round {round}")
        if added:
            records.note_clients(added, round + 1)
            self.emit("note", text=f"clients {', '.join(map(str, added))} are new, from round {round + 1} on")
        self._stop(self._ended(self.rounds))
        self._announce(round + 1)
        return round + 1, state

    def _announce(self, first: int) -> None:
        """Emit `run-started`."""
        self.emit("run-started", **self._headline(), first_round=first)

    def _checkpointed(self) -> tuple[int, dict[str, Any]] | None:
        """The newest checkpoint of this run as (round, content), or None.

        Raises:
            CheckpointError: the checkpoint is damaged, or another run wrote it.
        """
        if self.records is None:
            return None
        result = load_content(self.records.checkpoints, self.recipe.algorithm, self.assembly.engine.device)
        if result is not None and (result[1]["run"], result[1]["round"]) != (self.ledger.run, result[0]):
            raise CheckpointError(f"the checkpoint in {self.records.checkpoints} is not of this run. {RESTORE}")
        return result

    def train(self, round: int, state: ServerState) -> tuple[ServerState, dict[str, Any]]:
        """Run the algorithm's round. Returns the new state and the first entries of the row for `rounds.jsonl`."""
        self.repeated.begin(round)
        self.fed.begin(round)
        algorithm = self.recipe.algorithm
        before = algorithm.global_params(state)
        keeps = self.records is not None and self.recipe.checkpoint.updates
        self.updates = ClientUpdates(
            measured=algorithm.evaluation.due(round, self.recipe.rounds),
            kept=self.records.folder if self.records is not None and keeps else None,
            summed=algorithm.secure_aggregation is not None,
        )
        started = time.perf_counter()
        with self.fed.watched(self.updates.watch):
            state = self.assembly.put_away(checked_state(algorithm, algorithm.round(state, self.fed)))
        seconds = time.perf_counter() - started
        times = self.fed.clock.finish() if self.fed.clock is not None else None
        row = self._book(round) | {"training_requests": self.fed.asked, "seconds": {"train": seconds}}
        row["norms"] = {"model": block_norms(algorithm.global_params(state), before), "clients": self.updates.means()}
        self.updates.save(round, before, algorithm.global_params(state), row["cohort"])
        if self.fed.links is not None:
            row["links"] = self.fed.links.facts()
        if times is not None:
            row["simulated_seconds"] = algorithm.simulated_seconds(state, times)
            self.totals["simulated_seconds"] += row["simulated_seconds"]
        return state, row

    def summarise(self, row: dict[str, Any], state: ServerState) -> None:
        """Add to the row what the algorithm reports about its state: the loss, logged numbers and tables."""
        algorithm = self.recipe.algorithm
        row |= {"train_loss": state.train_loss, "logged": algorithm.observe(state)}
        if pending := algorithm.pending(state):
            row["pending"] = {str(client): round for client, round in sorted(pending.items())}
        row |= privacy_after(self.assembly.guarantee, row["round"] + self.repeated.rounds, state)
        self._stop(self._spent([*self.rounds, row]))
        if tables := algorithm.observe_tables(state):
            row["tables"] = check_tables(tables)
        if row["round"] == -(-self.recipe.rounds // 3):
            logged = [past["logged"] for past in [*self.rounds, row]]
            row["concerns"] = algorithm.concerns(logged)
            for text in row["concerns"]:
                self.emit("note", text=f"WARNING: {text}")

    def evaluate(self, row: dict[str, Any], state: ServerState) -> None:
        """Evaluate the state, if the recipe evaluates in this round."""
        algorithm: Algorithm = self.recipe.algorithm
        if not algorithm.evaluation.due(row["round"], self._last):
            return
        started = time.perf_counter()
        with span("evaluate", round=row["round"]):
            measured = self._measured(row, state)
        rows = [*self.rounds, row]
        if self.stop is None and self._stop(out_of_patience(self.recipe.stop, rows, self.choice)):
            measured = self._measured(row, state) if algorithm.evaluates_more_at_end else measured
        if best_row(rows, self.choice) is row:
            self.best = {"round": row["round"], "state": state, "locals": dict(self.assembly.engine.locals)}
        # scores over folds need the matrix of the last round; in every row, C x C numbers would be most of the file
        if measured.confusion is not None and row["round"] == self._last:
            row["confusion"] = measured.confusion.to(torch.int64).tolist()
        if row["round"] == self._last and any(measured.intervals.values()):
            row["intervals"] = {group: known for group, known in measured.intervals.items() if known}
        if row["round"] == self._last and measured.moments:
            row["moments"] = measured.moments
        if row["round"] == self._last and (sets := algorithm.calibrate(state, self.fed)) is not None:
            row["conformal"] = sets.facts()
        if measured.personal:
            name = "personal_accuracy" if self.fed.context.objective.SCORE == "accuracy" else "personal_score"
            row[name] = {str(c): a for c, a in sorted(measured.personal.items())}
        row["seconds"]["evaluate"] = time.perf_counter() - started
        booked = self._book(row["round"], counted=False)
        row["evaluation"] = {way: booked[way] for way in ("bytes_up", "bytes_down")}

    def _measured(self, row: dict[str, Any], state: ServerState) -> Measured:
        """Evaluate the state, and add the metrics to the row."""
        self.fed.begin_evaluation()
        measured = self.recipe.algorithm.evaluate(state, self.fed)
        row["metrics"] = measured.metrics
        return measured

    @property
    def _last(self) -> int:
        """The last round of the run, as far as it is known."""
        return self.recipe.rounds if self.stop is None else self.stop.round

    def _stop(self, stop: Stop | None) -> bool:
        """End the run, if there is a reason to. Return whether there is."""
        if stop is None or stop.round >= self.recipe.rounds:  # the run ends there anyway
            return False
        self.stop = stop
        self.fed.end_after(stop.round)
        self.emit("note", text=f"the run ends after round {stop.round} of {self.recipe.rounds}: {stop.why}")
        return True

    def _spent(self, rows: Sequence[dict[str, Any]]) -> Stop | None:
        """Return the end of the run if these rounds have used up a budget of [stop]."""
        sent = self.totals["bytes_up"] + self.totals["bytes_down"]
        sent += sum(sum(row.get("evaluation", {}).values()) for row in rows)
        seconds = self.totals["seconds"] + (time.perf_counter() - self._started if self._started else 0.0)
        round, repeated = int(rows[-1]["round"]), self.repeated.rounds
        return out_of_budget(self.recipe.stop, round, seconds, int(sent), self.assembly.guarantee, repeated)

    def _ended(self, rows: Sequence[dict[str, Any]]) -> Stop | None:
        """Return the end of a resumed run whose rounds so far give a reason to end it."""
        return self._spent(rows) or out_of_patience(self.recipe.stop, rows, self.choice)

    def save(self, row: dict[str, Any], state: ServerState) -> None:
        """Write the round's row, and a checkpoint if one is due."""
        self.totals["seconds"] += time.perf_counter() - self._started
        self._write(row["round"], state, row)
        self.emit("round-finished", row=row)

    def _book(self, round: int, *, counted: bool = True) -> dict[str, Any]:
        """Write the ledger's new entries to the run's folder.

        Args:
            round: the round that the entries belong to.
            counted: whether the entries' bytes count as training traffic; an evaluation's bytes do not.

        Returns:
            What these entries say about the round, such as the bytes sent.
        """
        entries = self.ledger.drain()
        if self.records is not None:
            self.records.book(entries, self.ledger.run)
        row = facts_of_round(round, entries) | {"missing": self.missing}
        self.missing = {}
        if counted:
            self.totals["bytes_up"] += row["bytes_up"]
            self.totals["bytes_down"] += row["bytes_down"]
        return row

    def _write(self, round: int, state: ServerState, row: dict[str, Any]) -> None:
        """Append the row. If a checkpoint is due, write it, and let the engine forget older states."""
        self.rounds.append(row)
        settled = self.recipe.algorithm.settled(state, round)
        if self.records is None:
            self.assembly.engine.saved(settled)
            return
        self.records.append(row)
        if self.recipe.checkpoint.due(round, self._last):
            best, modules = self.best, checkpoint.modules_of(self.recipe.algorithm)
            number = None if best is None else int(best["round"])
            if best is not None and number is not None and not best_folder(self.records.checkpoints, number).exists():
                checkpoint.save(best_folder(self.records.checkpoints, number), number, best, modules)
            content = {
                "run": self.ledger.run,
                "round": round,
                "state": state,
                "locals": self.assembly.engine.locals,
                "federation": self.kept_facts(self.records.checkpoints),
                "totals": self.totals,
                "links": None if self.fed.links is None else self.fed.links.content(),
                "places": self.records.places(),
                "best": number,
            }
            checkpoint.save(self.records.checkpoints, round, content, modules)
            forget_bests(self.records.checkpoints, number)
            self.assembly.engine.saved(settled)

    def _note(self, event: str, **facts: Any) -> None:
        """Collect facts from an event for this round's row in rounds.jsonl."""
        if event == "client-missing":
            self.missing[str(facts["client"])] = facts["reason"]

    def _headline(self) -> dict[str, Any]:
        """The facts that the progress display shows first."""
        return {
            "run": self.ledger.run,
            "algorithm": name_of(self.recipe.algorithm, NAMED),
            "engine": self.recipe.engine.name,
            "dataset": self.assembly.population.columns.name,
            "rounds": self.recipe.rounds,
            "clients": len(self.fed.clients),
            "num_parameters": self.assembly.model.num_parameters(),
            "task": headline_of(self.recipe),
        }

    def _result(self, state: ServerState, models: Models) -> dict[str, Any]:
        """The content of `result.json`."""
        measured: dict[str, Any] = next((r["metrics"] for r in reversed(self.rounds) if "metrics" in r), {})
        headline = self._headline()
        result = {key: headline[key] for key in ("algorithm", "engine", "dataset")}
        result |= {"seed": self.recipe.seed, "rounds": self._last, "clients": headline["clients"]}
        result |= {"num_parameters": headline["num_parameters"], "num_kept": num_kept(state, self.assembly.engine)}
        targets = None if self.fed.context.objective.OF_CLASSES else self.assembly.population.columns.class_names
        result |= {"task": headline["task"], "metrics": measured} | ({"targets": list(targets)} if targets else {})
        result |= {"intervals": known} if self.rounds and (known := self.rounds[-1].get("intervals")) else {}
        result |= privacy_facts(self.assembly.guarantee, len(self.rounds) + self.repeated.rounds)
        result |= {"conformal": sets} if (sets := self._conformal()) is not None else {}
        result |= facts_of_models(models, self.recipe, self.assembly.population)
        result |= {"best": best} if (best := best_round(self.rounds, self.choice)) else {}
        result["stopped"] = self._end().facts()
        result |= {"bytes_up": self.totals["bytes_up"], "bytes_down": self.totals["bytes_down"]}
        result |= {"seconds_total": self.totals["seconds"]} | seconds_of([r["seconds"]["train"] for r in self.rounds])
        result["logged"] = means_of(logged := [row["logged"] for row in self.rounds])
        train = getattr(self.recipe.algorithm, "train", None)
        trains = isinstance(train, Train) and (train.steps or train.epochs)
        trains = trains and not isinstance(self.recipe.algorithm, Evaluate)
        idle = untrained(self.rounds) if trains else []
        idle += untested(self.recipe, result)
        result["concerns"] = (self.recipe.algorithm.concerns(logged) if logged else []) + idle
        more = still_falls(self.rounds) if self._end().by == "rounds" else None
        result |= {"still_falls": more} if more is not None else {}
        result |= {} if self.fed.clock is None else {"simulated_seconds": self.totals["simulated_seconds"]}
        result |= self.recipe.algorithm.told(state, self.fed)
        return result | {"state_sha256": checkpoint.digest(state)}

    def _end(self) -> Stop:
        """Return why the run has ended."""
        guarantee = self.assembly.guarantee
        if self.stop is None and guarantee is not None and guarantee.stop_note:
            return Stop(self._last, "budget", guarantee.stop_note)
        return self.stop or Stop(self._last, "rounds", f"all {counted(self._last, 'round', 'rounds')} ran")

    def _facts(self) -> dict[str, Any]:
        """The content of `run.json`."""
        audited = self.records is not None and self.records.audit is not None
        facts = {"run": self.ledger.run, "started": datetime.now(UTC).isoformat(timespec="seconds"), "audited": audited}
        announced = {"announced": announced_by(self.assembly)}
        return facts | facts_of(self.assembly) | announced | {"versions": versions()}
