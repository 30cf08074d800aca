"""The files of a run's folder: when polyfed writes them, and how a resumed run continues them."""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tomli_w

from polyfed.core.errors import CheckpointError, PolyfedError, RecipeError, command, counted
from polyfed.core.system.files import EGRESS, FACTS, RECIPE, RESULT, ROUNDS, append_whole, replace_text, sync, undone
from polyfed.core.system.json_and_toml import json_ready, parse_toml, to_json
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.recipes.settings import APART, CheckpointSpec
from polyfed.experiment.running.checkpoint import RESTORE, newest
from polyfed.experiment.running.constants import refuse_changes
from polyfed.experiment.running.lock import LOCK, alone_in
from polyfed.privacy.egress.ledger import Entry, lines
from polyfed.report.reading.run_schema import ROUND_ROW, RUN_FACTS, RUN_RESULT, parse_as
from polyfed.training.optimisers import WHOLE_RUN_SCHEDULES

CLASSES = {"name": "classification", "class_weights": [], "ranking": False}
"""The section [task] that is assumed for a run whose recipe.toml has none."""

MAY_CHANGE = ("rounds", "engine", "deployment", "checkpoint", "tracking", "stop")
"""The parts of a recipe that may change when a run is resumed. They do not change the results of rounds."""


_T = TypeVar("_T")


class Log(Protocol):
    """The interface through which a run writes its audit log; see `polyfed.privacy.egress.audit_log.log.AuditLog`."""

    def append(self, entries: Sequence[Entry], run: str) -> str:
        """Write rows, all or none of them."""
        ...

    def resumed(self, round: int) -> None:
        """Record that the run continues after `round`, or that it starts again if `round` is -1."""
        ...

    def note(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Write enrolments and refusals, all or none of them."""
        ...


class Records:
    """The folder of a run.

    Args:
        folder: the folder. It is created if it does not exist.
        resume: whether to continue the run that the folder holds.
        recipe: the recipe of the run, as a table, which tells its own run from another one.
        audit: the audit log of the run. None in a simulation.

    Raises:
        RecipeError: the folder cannot be created, holds a run although `resume` is off, or holds other files.
    """

    def __init__(
        self, folder: Path, *, resume: bool, recipe: dict[str, Any] | None = None, audit: Log | None = None
    ) -> None:
        self.folder, self.resume, self.audit, self._made = folder, resume, audit, not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(
                f"--out {folder}: {error.strerror or error}. Choose a folder that can be written"
            ) from None
        if not resume and self.begun:
            raise RecipeError(self._held(recipe))
        own = "." if audit is None else (".", "audit")  # a set-up that failed may have left an audit log
        foreign = [e.name for e in folder.iterdir() if not e.name.startswith(own) and not _is_facts_file(e)]
        if foreign and not self.begun:
            raise RecipeError(f"{folder} is not empty and holds no run ({foreign[0]}, ...). Choose another folder")

    def _held(self, recipe: dict[str, Any] | None) -> str:
        """Return why a run cannot start in a folder that holds one, and what to do."""
        same = False
        if recipe is not None:
            found = _changes(_read(self.folder / RECIPE, _recipe_table), parse_toml(tomli_w.dumps(recipe)))
            same = all(new is None for _, _, new in found)  # what a recipe leaves open, such as the task, a run decides
        if not same:
            return (
                f"{self.folder} holds a run of another recipe. Choose another folder, or go on with that run: "
                f"{command('run', self.folder / RECIPE, '--resume', '--out', self.folder)}"
            )
        assert recipe is not None
        rounds = len(self.rounds())
        more = ("--set", f"rounds={recipe['rounds']}") if recipe["rounds"] != rounds else ()
        return (
            f"{self.folder} holds this run, with {counted(rounds, 'round', 'rounds')} of {recipe['rounds']}. Go on "
            f"with it: {command('run', self.folder / RECIPE, *more, '--resume', '--out', self.folder)} (in Python: "
            "resume=True), or choose another folder"
        )

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run."""
        return (self.folder / RECIPE).exists()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder. Afterwards, remove the folder if this run created it and wrote nothing.

        Raises:
            RecipeError: another process is writing this run.
        """
        with alone_in(self.folder, "another process is writing this run", "Wait for it, or choose another folder"):
            try:
                yield
            finally:  # only if this process has the lock; a process that was refused must change nothing
                if self._made and [entry.name for entry in self.folder.iterdir()] == [LOCK]:
                    (self.folder / LOCK).unlink()
                    self.folder.rmdir()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoint"

    def check(self, recipe: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
        """Check that the folder holds a run of this recipe and data. The folder does not change.

        Returns:
            The facts, with the name and the start time of the run in the folder.

        Raises:
            RecipeError: the recipe differs in a part that is not in `MAY_CHANGE`.
            DataError: the data, the frozen parameters or the constant buffers differ.
            CheckpointError: a file cannot be read.
        """
        self._check_same(recipe)
        before = self.facts()
        if not isinstance(before.get("run"), str):
            raise CheckpointError(f"{self.folder / FACTS} does not name its run. {RESTORE}")
        refuse_changes(before, facts, self.folder, "cannot resume")
        return facts | {"run": before["run"], "started": before.get("started", facts["started"])}

    def note(self, recipe: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write run.json and recipe.toml."""
        replace_text(self.folder / FACTS, json.dumps(facts, indent=1))
        replace_text(self.folder / RECIPE, tomli_w.dumps(recipe))

    def refuse_lost_checkpoint(self) -> None:
        """Refuse to start again in a folder whose rounds had checkpoints that are now gone.

        The recipe in the folder determines which rounds had a checkpoint.

        Raises:
            CheckpointError: the checkpoints are gone. The text says how many rounds had a checkpoint.
        """
        if not self.begun:
            return
        before = _read(self.folder / RECIPE, _recipe_table)
        kept = CheckpointSpec(every=before.get("checkpoint", {}).get("every", 1))
        due = [row["round"] for row in self.rounds() if kept.due(row["round"], before.get("rounds", 0))]
        if len(due) > 1:  # one may be missing, if the run was killed while it wrote its first checkpoint
            raise CheckpointError(
                f"{self.folder} holds {len(due)} rounds that had a checkpoint, and no checkpoint ({self.checkpoints}). "
                f"{RESTORE}"
            )

    def rewind(self, places: dict[str, int], round: int = 0) -> list[dict[str, Any]]:
        """Cut `rounds.jsonl` and `egress.jsonl` back to their sizes at a checkpoint, and note this in the audit log.

        Args:
            places: file name -> its size in bytes at the checkpoint. A file without an entry is emptied.
            round: the round of the checkpoint, or 0 for a run that starts.

        Returns:
            The rows of the remaining rounds.

        Raises:
            CheckpointError: the files do not hold the rounds up to the checkpoint. In this case, the files do not
                change.
        """
        paths = {name: self.folder / name for name in (ROUNDS, EGRESS)}
        for name, path in paths.items():
            if (path.stat().st_size if path.exists() else 0) < places.get(name, 0):
                raise CheckpointError(f"{path} is shorter than when the checkpoint was written. {RESTORE}")
        left = self.rounds(places.get(ROUNDS, 0))
        if [row["round"] for row in left] != list(range(1, round + 1)):
            raise CheckpointError(f"{paths[ROUNDS]} does not hold the rounds 1 to {round} of the checkpoint. {RESTORE}")
        if any(row.get("seconds", {}).get("train") is None or "cohort" not in row for row in left):
            raise CheckpointError(f"{paths[ROUNDS]} has a round without its cohort or its seconds.train. {RESTORE}")
        for name, path in paths.items():
            with path.open("ab") as file:
                file.truncate(places.get(name, 0))
        if self.audit is not None:
            self.audit.resumed(round or -1)  # the set-up, which is round 0, is also repeated
        return left

    def note_clients(self, clients: Sequence[int], round: int) -> None:
        """Write to the audit log from which round on new clients take part."""
        if self.audit is not None:
            why = f"takes part from round {round} on"
            self.audit.note([{"event": "new", "client": client, "why": why} for client in clients])

    def append(self, row: dict[str, Any]) -> None:
        """Append the row of a round."""
        (self.folder / RESULT).unlink(missing_ok=True)  # an old result covers fewer rounds
        with (self.folder / ROUNDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(json_ready(row), separators=(",", ":")) + "\n")

    def book(self, entries: list[Entry], run: str) -> None:
        """Append rows to the ledger and to the audit log, all of them or none.

        Raises:
            OSError, CheckpointError: a file cannot be written.
        """
        path = self.folder / EGRESS
        before = append_whole(path, "".join(f"{line}\n" for line in lines(entries, run)).encode())
        if self.audit is not None:
            with undone(path, before):
                self.audit.append(entries, run)

    def places(self) -> dict[str, int]:
        """The sizes of `rounds.jsonl` and `egress.jsonl` in bytes, after flushing both to the disk.

        A checkpoint stores these sizes. Without the flush, a power failure could leave a file that is shorter than the
        checkpoint says.
        """
        there = {name: path for name in (ROUNDS, EGRESS) if (path := self.folder / name).exists()}
        for path in there.values():
            sync(path)
        return {name: path.stat().st_size for name, path in there.items()}

    def rounds(self, size: int | None = None) -> list[dict[str, Any]]:
        """Return the rows in the first `size` bytes, or in the whole file. An incomplete last line is left out."""
        path = self.folder / ROUNDS
        return _read(path, lambda text: _rounds(text.encode()[:size])) if path.exists() else []

    def facts(self) -> dict[str, Any]:
        """Return the facts of the run in the folder, run.json."""
        return _read(self.folder / FACTS, partial(parse_as, RUN_FACTS))

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result."""
        replace_text(self.folder / RESULT, to_json(result))

    def result(self) -> dict[str, Any]:
        """Return the result of the finished run."""
        return _read(self.folder / RESULT, partial(parse_as, RUN_RESULT))

    def _check_rounds(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Refuse fewer rounds than have already run. If the learning rate depends on `rounds`, refuse every change."""
        done = newest(self.checkpoints)
        if done > now["rounds"]:
            raise RecipeError(
                f"cannot resume: {self.folder} holds {done} rounds, the recipe says rounds = {now['rounds']}. Give at "
                f"least {done}, or another folder"
            )
        schedule = now.get("train", {}).get("lr_schedule", "constant")
        if before.get("rounds") != now["rounds"] and done and schedule in WHOLE_RUN_SCHEDULES:
            raise RecipeError(
                f"cannot resume: {self.folder} holds a run of {before.get('rounds')} rounds, the recipe says "
                f"{now['rounds']}, and train.lr_schedule = '{schedule}' spreads over all of them: the rounds run so "
                "far had other learning rates. Use the rounds of the run, or another folder"
            )

    def _check_same(self, recipe: dict[str, Any]) -> None:
        """Compare the recipe with the recipe in the folder, and refuse it if parts outside `MAY_CHANGE` differ."""
        before = {"task": CLASSES} | _read(self.folder / RECIPE, _recipe_table)
        now = parse_toml(tomli_w.dumps(recipe))
        for path, old, new in _changes(before, now):
            grows = path == "clients.num" and self.audit is not None and (new or 0) > (old or 0)  # see `growth`
            if not grows:
                raise RecipeError(
                    f"cannot resume: {self.folder} holds a run with {path} = {old!r}, the recipe says {new!r}. "
                    "Use the recipe of the run, or another folder"
                )
        self._check_engine(before.get("engine", {}).get("name"), now["engine"]["name"])
        self._check_rounds(before, now)

    def _check_engine(self, before: str | None, now: str) -> None:
        """Refuse a change from or to an engine that stores the clients' local state in another place."""
        if before != now and {before, now} & {*APART} and self.checkpoints.exists():
            raise RecipeError(
                f"cannot resume: {self.folder} holds a run on engine '{before}', now it is '{now}'. The clients' "
                f"local state is where '{before}' keeps it, and '{now}' would start without it. Resume with "
                f"'{before}', or start in another folder"
            )


def _is_facts_file(entry: Path) -> bool:
    """Whether this is the run.json of a run that was killed before it wrote recipe.toml."""
    return entry.name == FACTS and entry.is_file() and "versions" in _read(entry, partial(parse_as, RUN_FACTS))


def _read(path: Path, parse: Callable[[str], _T]) -> _T:
    """Read and parse a file of the run.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # JSON, TOML and UTF-8 errors are ValueErrors
        raise CheckpointError(f"{path} cannot be read: {error}. {RESTORE}") from None


def _rounds(text: bytes) -> list[dict[str, Any]]:
    """Return the rows of `rounds.jsonl`. An incomplete last line is left out."""
    rows = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            rows.append(parse_as(ROUND_ROW, line))
        except ValueError as error:
            raise ValueError(f"line {number} is not the row of a round: {error}") from None
    return rows


def _recipe_table(text: str) -> dict[str, Any]:
    """Return the resolved recipe of a run. Each entry is a section, except for `seed` and `rounds`."""
    table = parse_toml(text)
    for name, entry in table.items():
        if (type(entry) is not int) if name in ("seed", "rounds") else (not isinstance(entry, dict)):
            raise ValueError(f"'{name}' does not belong there")
    return table


def run_id(seed: int) -> str:
    """The name of a run: its start time, its seed, and what tells it from one that starts in the same second.

    Devices keep states and ledgers under this name, so two jobs of one server must never share it.
    """
    return f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%S')}-{seed}-{secrets.token_hex(4)}"


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The entries outside `MAY_CHANGE` in which a recipe differs from that of a run.

    An older release may have begun the run. An option that it did not have counts as its default.
    """
    found = [one for one in _differences(before, now) if one[0].split(".")[0] not in (*MAY_CHANGE, "versions")]
    if all(old is not None for _, old, _ in found):
        return found
    try:
        full = parse_toml(tomli_w.dumps(parse_recipe(before).table()))
    except PolyfedError:  # it has an option that does not exist any more, which is one of the differences
        return found
    defaults = {path: value for path, old, value in _differences(before, full) if old is None}
    return [(path, old, new) for path, old, new in found if old is not None or defaults.get(path) != new]


def _differences(a: dict[str, Any], b: dict[str, Any], head: str = "") -> list[tuple[str, Any, Any]]:
    """The entries in which two tables differ: (dotted name, value in a, value in b)."""
    result: list[tuple[str, Any, Any]] = []
    for key in {**a, **b}:
        old, new = a.get(key), b.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            result.extend(_differences(old, new, f"{head}{key}."))
        elif old != new:
            result.append((f"{head}{key}", old, new))
    return result
