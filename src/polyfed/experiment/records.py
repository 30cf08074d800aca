"""The files of a run: what is written when, and how a resumed run finds its place in them."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from polyfed.core.errors import CheckpointError, DataError, RecipeError
from polyfed.core.files import EGRESS, FACTS, RECIPE, RESULT, ROUNDS, replace_text, sync
from polyfed.core.parsing import parse_toml
from polyfed.experiment.checkpoint import RESTORE, newest
from polyfed.experiment.lock import LOCK, alone_in
from polyfed.experiment.settings import CheckpointSpec
from polyfed.privacy.ledger import TO_CLIENT, Entry, lines
from polyfed.report.run_schema import ROUND_ROW, RUN_FACTS, RUN_RESULT, parse_as
from polyfed.training.optimisers import WHOLE_RUN_SCHEDULES

FLOWER = "flower"
"""The engine whose clients keep their state outside this process."""

MAY_CHANGE = ("rounds", "engine", "checkpoint", "tracking")
"""Parts of a recipe that a resumed run may have changed: more rounds, another machine, who looks on."""


_T = TypeVar("_T")


class Records:
    """A run's folder.

    Args:
        folder: created if it is not there.
        resume: go on with the run that the folder holds.

    Raises:
        RecipeError: the folder holds a run and `resume` is off.
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self.folder, self.resume, self._made = folder, resume, not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(
                f"--out {folder}: {error.strerror or error}. Choose a folder that can be written"
            ) from None
        if not resume and self.begun:
            raise RecipeError(f"--out {folder} holds another run. Go on with it by --resume, or choose another folder")
        # facts without a recipe: killed between the two by which a run begins
        foreign = [
            entry.name for entry in folder.iterdir() if not entry.name.startswith(".") and not _is_facts_file(entry)
        ]
        if foreign and not self.begun:
            raise RecipeError(
                f"--out {folder} is not empty and holds no run ({foreign[0]}, ...). Choose another folder"
            )

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run."""
        return (self.folder / RECIPE).exists()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder, and take it away again if it was made for this run and nothing came of that.

        Raises:
            RecipeError: another process is writing this run.
        """
        with alone_in(self.folder, "another process is writing this run", "Wait for it, or choose another folder"):
            try:
                yield
            finally:  # as its holder: whoever is refused must touch nothing
                if self._made and [entry.name for entry in self.folder.iterdir()] == [LOCK]:
                    (self.folder / LOCK).unlink()
                    self.folder.rmdir()

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are kept."""
        return self.folder / "checkpoint"

    def check(self, recipe: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
        """Check that the run that the folder holds is of this recipe and data; its own name and start in the facts.

        Raises:
            RecipeError, DataError, CheckpointError: it is not, or cannot be read. Nothing has been changed.
        """
        self._check_same(recipe)
        before = _read(self.folder / FACTS, partial(parse_as, RUN_FACTS))
        if not isinstance(before.get("run"), str):
            raise CheckpointError(f"{self.folder / FACTS} does not name its run. {RESTORE}")
        self._check_data(before, facts)
        return facts | {"run": before["run"], "started": before.get("started", facts["started"])}

    def note(self, recipe: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write down the recipe and the facts of the run."""
        replace_text(self.folder / FACTS, json.dumps(facts, indent=1))
        replace_text(self.folder / RECIPE, tomli_w.dumps(recipe))

    def refuse_lost_checkpoint(self) -> None:
        """A run whose rounds were kept, but whose checkpoint is gone, is not played again over what it left.

        Raises:
            CheckpointError: naming the folder. What was due says the recipe by which these rounds were played.
        """
        if not self.begun:
            return
        before = _read(self.folder / RECIPE, _recipe_table)
        kept = CheckpointSpec(every=before.get("checkpoint", {}).get("every", 1))
        due = [row["round"] for row in self.rounds() if kept.due(row["round"], before.get("rounds", 0))]
        if len(due) > 1:  # after the first such round a kill may have come before its checkpoint was whole
            raise CheckpointError(
                f"{self.folder} holds {len(due)} rounds that were kept, and no checkpoint ({self.checkpoints}). "
                f"{RESTORE}"
            )

    def rewind(self, places: dict[str, int], round: int = 0) -> list[dict[str, Any]]:
        """Cut the line files back to where a checkpoint of `round` left them; none (or 0) empties them.

        Returns:
            The rounds that are left.

        Raises:
            CheckpointError: they do not hold what the checkpoint counts on. Nothing has been changed.
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
        return left

    def append(self, row: dict[str, Any]) -> None:
        """Add a round."""
        (self.folder / RESULT).unlink(missing_ok=True)  # of fewer rounds; it would pass for the result of these
        with (self.folder / ROUNDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(json_ready(row), separators=(",", ":")) + "\n")

    def book(self, entries: list[Entry], run: str) -> None:
        """Add ledger rows."""
        with (self.folder / EGRESS).open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines(entries, run))

    def places(self) -> dict[str, int]:
        """How long the line files are now, on the disk: a checkpoint that says so must not outlive their lines."""
        there = {name: path for name in (ROUNDS, EGRESS) if (path := self.folder / name).exists()}
        for path in there.values():
            sync(path)
        return {name: path.stat().st_size for name, path in there.items()}

    def rounds(self, size: int | None = None) -> list[dict[str, Any]]:
        """All rounds so far, or those in the first `size` bytes; a last line that a kill cut short is none."""
        path = self.folder / ROUNDS
        return _read(path, lambda text: _rounds(text.encode()[:size])) if path.exists() else []

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result."""
        replace_text(self.folder / RESULT, to_json(result))

    def result(self) -> dict[str, Any]:
        """What the finished run came to."""
        return _read(self.folder / RESULT, partial(parse_as, RUN_RESULT))

    def _check_rounds(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """More rounds are fine, unless the rounds played would have been others in the longer run."""
        done = newest(self.checkpoints)
        if done > now["rounds"]:
            raise RecipeError(
                f"--resume: {self.folder} holds {done} rounds, the recipe says rounds = {now['rounds']}. Give at "
                f"least {done}, or another --out folder"
            )
        schedule = now.get("train", {}).get("lr_schedule", "constant")
        if before.get("rounds") != now["rounds"] and done and schedule in WHOLE_RUN_SCHEDULES:
            raise RecipeError(
                f"--resume: {self.folder} holds a run of {before.get('rounds')} rounds, the recipe says "
                f"{now['rounds']}, and train.lr_schedule = '{schedule}' spreads over all of them: the rounds played "
                "had other learning rates. Use the rounds of the run, or another --out folder"
            )

    def _check_same(self, recipe: dict[str, Any]) -> None:
        before = _read(self.folder / RECIPE, _recipe_table)
        # through TOML: what is compared is what was written
        now = parse_toml(tomli_w.dumps(recipe))
        for path, old, new in _differences(before, now):
            if path.split(".")[0] not in (*MAY_CHANGE, "versions"):
                raise RecipeError(
                    f"--resume: {self.folder} holds a run with {path} = {old!r}, the recipe says {new!r}. "
                    "Use the recipe of the run, or another --out folder"
                )
        self._check_engine(before.get("engine", {}).get("name"), now["engine"]["name"])
        self._check_rounds(before, now)

    def _check_data(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """The recipe names data and weights; that they are still the same, their fingerprints say."""
        for part, what in (
            ("data", "the data is not what the run in {} began with: its labels, splits or features have changed"),
            ("frozen", "the model's frozen parameters are not those that the run in {} began with: their file changed"),
        ):
            old, new = (facts.get(part, {}).get("sha256") for facts in (before, now))
            if old and new and old != new:
                told = what.format(self.folder)
                raise DataError(f"--resume: {told}. Restore it, or begin in another --out folder")

    def _check_engine(self, before: str | None, now: str) -> None:
        """In-process engines can take over from each other; between them and Flower, what clients keep is elsewhere."""
        if before != now and FLOWER in (before, now) and self.checkpoints.exists():
            raise RecipeError(
                f"--resume: {self.folder} holds a run on engine '{before}', now it is '{now}'. What clients keep "
                f"between rounds is where '{before}' left it, and '{now}' would begin without it. Go on with "
                f"'{before}', or begin in another --out folder"
            )


def _is_facts_file(entry: Path) -> bool:
    """Whether this is the facts file of a run that was killed as it began."""
    return entry.name == FACTS and entry.is_file() and "versions" in _read(entry, partial(parse_as, RUN_FACTS))


def _read(path: Path, parse: Callable[[str], _T]) -> _T:
    """A file of the run.

    Raises:
        CheckpointError: it is missing, or not what it was written as.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # JSON, TOML and UTF-8 errors are ValueErrors
        raise CheckpointError(f"{path} cannot be read: {error}. {RESTORE}") from None


def _rounds(text: bytes) -> list[dict[str, Any]]:
    """The rows of `rounds.jsonl`; a last line without its end was cut short and is left out."""
    rows = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            rows.append(parse_as(ROUND_ROW, line))
        except ValueError as error:
            raise ValueError(f"line {number} is not the row of a round: {error}") from None
    return rows


def _recipe_table(text: str) -> dict[str, Any]:
    """The resolved recipe of a run; each entry is a section, but for `seed` and `rounds`."""
    table = parse_toml(text)
    for name, entry in table.items():
        if (type(entry) is not int) if name in ("seed", "rounds") else (not isinstance(entry, dict)):
            raise ValueError(f"'{name}' does not belong there")
    return table


def json_ready(value: Any) -> Any:
    """A nest as JSON can hold it: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: json_ready(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def facts_of_round(round: int, entries: Sequence[Entry]) -> dict[str, Any]:
    """Who was asked, who sent which block, how many bytes: as the ledger tells."""
    asked: set[int] = set()
    trained: dict[str, set[int]] = {}
    up = down = 0
    for entry in entries:
        if entry.destination == TO_CLIENT:
            asked.update(entry.clients)
            down += entry.bytes
            continue
        up += entry.bytes
        for crossing in entry.crossings:
            if crossing.kind == "parameters" and entry.destination == "server":  # what stays in a silo is on its way
                trained.setdefault(crossing.block, set()).update(entry.clients)
    return {
        "round": round,
        "cohort": sorted(asked),
        "trained": {block: sorted(clients) for block, clients in trained.items()},
        "bytes_up": up,
        "bytes_down": down,
    }


def to_json(content: Any) -> str:
    """A nest as indented JSON that any reader takes: `run --json` prints what result.json holds."""
    return json.dumps(json_ready(content), indent=1, allow_nan=False)


def run_id(seed: int) -> str:
    """A name for a run: when it was started, and its seed."""
    return f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%S')}-{seed}"


def _differences(a: dict[str, Any], b: dict[str, Any], head: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for key in {**a, **b}:
        old, new = a.get(key), b.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found.extend(_differences(old, new, f"{head}{key}."))
        elif old != new:
            found.append((f"{head}{key}", old, new))
    return found
