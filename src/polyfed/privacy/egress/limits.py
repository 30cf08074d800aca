"""Limits of a device: the [limits] section of the policy file. A recipe cannot loosen these limits.

A recipe may have a [limits] section too. If both sections set a limit, the stricter value holds. An example:

    [limits]
    min_rows = 50
    min_batch_size = 8
    min_steps = 10
    min_rows_per_class = 8
    min_test_rows = 20
    max_rounds = 200
    max_requests = 6
    max_requests_per_day = 500
    max_runs_per_day = 5
    max_evaluations_per_day = 50

The policy decides which kinds of data a client may send. It sets no limit on the number of rows from which the client
computes this data. The number of rows matters, because the gradient of a batch of one row can reveal that row.
polyfed checks the limits during local training (`limit_guard.py`). `experiment/checks/limit_checks.py` refuses recipes
whose options let few rows or few steps decide the result. docs/egress.md says what the limits do not prevent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from typing_extensions import override

from polyfed.core.errors import EgressError
from polyfed.core.option_checks import AT_LEAST_ONE, NOT_NEGATIVE, check_ranges, checked
from polyfed.training.optimisers import Train
from polyfed.training.step_plan import steps_trained

MEANINGS = {
    "min_rows": "the client has {} training rows",
    "min_batch_size": "a step of local training uses a batch of {} rows",
    "min_steps": "a local training takes {} steps",
    "min_rows_per_class": "the reply tells of a class with {} rows",
    "min_test_rows": "a score covers a group of {} test rows",
    "min_group": "an evaluation job shows a group of {} rows",
    "max_rounds": "this is round {}",
    "max_requests": "this is request {} of the round",
    "max_requests_per_day": "this is request {} within 24 hours, over all runs",
    "max_runs_per_day": "this is new run {} within 24 hours",
    "max_evaluations_per_day": "this is request {} within 24 hours that reads the test rows, over all runs",
}
"""For each limit, the clause of an error message that states the value beyond the limit."""

WITHHELD = {
    "min_rows": "the client has fewer training rows",
    "min_batch_size": "a step of local training uses a smaller batch",
    "min_steps": "a local training takes fewer steps",
    "min_rows_per_class": "the reply tells of a class with fewer rows",
    "min_test_rows": "a score covers a group of fewer test rows",
    "min_group": "an evaluation job shows a group of fewer rows",
}
"""For some limits, the clause that the server gets instead of the clause in MEANINGS. The policy may withhold how many
rows a client has, and the size of a batch and the number of steps depend on this number. The server knows the numbers
of rounds and requests."""

DERIVED = ("min_rows_per_class", "min_test_rows")
"""The limits that equal `min_batch_size` unless the section sets them."""

MOST_DECAY = 0.1
"""With `min_steps`, the largest share of a parameter's change that one step of training may undo."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The [limits] section. The defaults set no limit.

    Attributes:
        min_rows: least number of training rows of the client; with fewer, it takes no part.
        min_batch_size: least number of rows in every batch of local training. Smaller last batches of an epoch are left
            out, and so is a modality or target that fewer rows of a batch have.
        min_steps: least number of optimiser steps of local training in one request, each of which may undo at most 10 %
            of earlier changes (`lr * weight_decay` and proximal terms).
        min_rows_per_class: least number of training rows of a class that a reply may reveal, such as in prototypes and
            counts; rows without the modality do not count. Smaller classes are left out, and replies with labels of
            their rows are refused. Default: `min_batch_size`.
        min_test_rows: least number of different test rows in a score, and in each group with sums of its own, such as
            the positive rows of a label. Default: `min_batch_size`.
        min_group: least number of rows of a group (a class, or a value of a column) that an evaluation job shows.
            Smaller ones are hidden, and also the smallest shown one if the hidden rows together are fewer; small bins
            of scores are joined. It is at least `min_test_rows`, and by default 10 on a device.
        max_rounds: the last round in which the client takes part.
        max_requests: most requests that the client answers in one round. Repeated requests count.
        max_requests_per_day: most requests that the device answers within 24 hours, in all runs together.
        max_runs_per_day: most runs with a new name in which the device begins to take part within 24 hours.
        max_evaluations_per_day: most requests within 24 hours that read the test rows, in all runs together.
    """

    min_rows: Annotated[int, NOT_NEGATIVE] = 0
    min_batch_size: Annotated[int, NOT_NEGATIVE] = 0
    min_steps: Annotated[int, NOT_NEGATIVE] = 0
    min_rows_per_class: Annotated[int | None, NOT_NEGATIVE] = None
    min_test_rows: Annotated[int | None, NOT_NEGATIVE] = None
    min_group: Annotated[int | None, NOT_NEGATIVE] = None
    max_rounds: Annotated[int | None, AT_LEAST_ONE] = None
    max_requests: Annotated[int | None, AT_LEAST_ONE] = None
    max_requests_per_day: Annotated[int | None, AT_LEAST_ONE] = None
    max_runs_per_day: Annotated[int | None, AT_LEAST_ONE] = None
    max_evaluations_per_day: Annotated[int | None, NOT_NEGATIVE] = None

    def __post_init__(self) -> None:
        """Refuse values that are out of range."""
        check_ranges("[limits]", self)

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str) -> "Limits":
        """Make limits from the section's table.

        Raises:
            RecipeError: a key is unknown, or a value is not a whole number in range.
        """
        return cls(**checked(where, cls, table))

    def value(self, key: str) -> int | None:
        """Return the value of a limit, which can follow from another limit; see `DERIVED`. None is no limit."""
        value: int | None = getattr(self, key)
        if key == "min_group" and (least := self.value("min_test_rows")):
            return max(least, value or 0)
        return self.min_batch_size if value is None and key in DERIVED else value

    def breach(self, key: str, value: int) -> str:
        """Return "" if a value is allowed. Otherwise, return a text: the limit, and a [limits] line that allows it."""
        if not self._beyond(key, value):
            return ""
        whose, where = ("recipe", "recipe") if self.is_of_the_recipe(key) else ("device", "device's policy file")
        return (
            f"[limits] {key} = {self.value(key)} of the {whose}, and {MEANINGS[key].format(value)}. "
            f"It would be allowed if the {where} said: [limits] {key} = {value}"
        )

    def decay_breach(self, what: str, share: float) -> str:
        """Return why a step may not undo this share of earlier changes, or "" if it may.

        Args:
            what: the options of the recipe that determine the share, for the text.
            share: the share of the earlier changes of a parameter that one step undoes.
        """
        if self.min_steps < 2 or share <= MOST_DECAY:
            return ""
        whose = "recipe" if self.is_of_the_recipe("min_steps") else "device"
        return (
            f"[limits] min_steps = {self.min_steps} of the {whose}, and {what} = {share:g} lets a step undo what "
            f"earlier steps have learned. At most {MOST_DECAY:g} is allowed: lower these options in the recipe"
        )

    def _beyond(self, key: str, value: int) -> bool:
        """Return whether a value is below a minimum or above a maximum."""
        limit = self.value(key)
        return limit is not None and (value < limit if key.startswith("min") else value > limit)

    def is_of_the_recipe(self, key: str) -> bool:
        """Return whether this limit comes from a recipe, not from the device."""
        return False

    def sentences(self) -> tuple[str, ...]:
        """Return the limits that are set, each as a text such as `min_rows = 50 (of the device)`."""
        set_here = [
            field.name for field in fields(Limits) if getattr(self, field.name) != getattr(NO_LIMITS, field.name)
        ]
        whose = {key: "recipe" if self.is_of_the_recipe(key) else "device" for key in set_here}
        return tuple(f"{key} = {getattr(self, key)} (of the {whose[key]})" for key in set_here)

    def stricter(self, recipe: "Limits") -> "Limits":
        """Return new limits: for each limit, the stricter of the device's value and the recipe's value."""
        keys = [field.name for field in fields(Limits)]
        mine = {key: getattr(self, key) for key in keys}
        theirs = {key: getattr(recipe, key) for key in keys if getattr(recipe, key) != getattr(NO_LIMITS, key)}
        added = {
            key: value
            for key, value in theirs.items()
            if (now := self.value(key)) is None or (value > now if key.startswith("min") else value < now)
        }
        return _Joined(**mine | added, of_the_recipe=frozenset(added)) if added else self

    def foreseen(self, train: Train, rounds: int, rows: int | None) -> Iterator[str]:
        """Yield the limits that a recipe would break, according to its [train] section and its number of rounds.

        Args:
            train: the recipe's [train] section.
            rounds: the recipe's number of rounds.
            rows: number of training rows of the client, or None if it is unknown.
        """
        values = {"max_rounds": rounds, "min_batch_size": train.batch_size or rows, "min_steps": train.steps}
        if rows is not None:
            values |= {
                "min_rows": rows,
                "min_batch_size": min(train.batch_size or rows, rows),
                "min_steps": steps_trained(rows, train, skip_single=False, smallest=self.min_batch_size),
            }
        for key, value in values.items():
            if value is not None and (why := self.breach(key, value)):
                yield why
        rates = {train.lr, train.lr if train.lr_end is None else train.lr_end}
        if why := self.decay_breach("lr * weight_decay", max(rates) * train.weight_decay):
            yield why

    def refusal(self, key: str, value: int, client: int, task: str) -> EgressError | None:
        """Return the refusal of a request that breaks a limit, or None if the request breaks no limit.

        The text of the error goes to the server, and holds no value that depends on the client's rows. A note of the
        error, for the device's own log, has the value and the line for the section [limits] that would allow it.
        """
        if not (why := self.breach(key, value)):
            return None
        who = f"client {client} refused task {task}: "
        if key not in WITHHELD:
            return EgressError(who + why)
        limit = why.partition(", and ")[0]
        error = EgressError(f"{who}{limit}, and {WITHHELD[key]}. The client's own log gives the number")
        error.add_note(who + why)
        return error

    def refuse(self, key: str, value: int, client: int, task: str) -> None:
        """Refuse a request that breaks a limit.

        Raises:
            EgressError: the request breaks the limit; see `refusal`.
        """
        if error := self.refusal(key, value, client, task):
            raise error


@dataclass(frozen=True, kw_only=True)
class _Joined(Limits):
    """The stricter limits of a device and a recipe.

    Attributes:
        of_the_recipe: the names of the limits whose value comes from the recipe.
    """

    of_the_recipe: frozenset[str] = frozenset()

    @override
    def is_of_the_recipe(self, key: str) -> bool:
        derived = key in DERIVED and getattr(self, key) is None
        return ("min_batch_size" if derived else key) in self.of_the_recipe


NO_LIMITS = Limits()
