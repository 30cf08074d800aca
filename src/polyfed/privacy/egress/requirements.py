"""Protection that a device demands: the [require] section of its policy file. No recipe can loosen this section.

An example:

    [require]
    secure_aggregation = true
    min_clients = 5
    max_epsilon = 4.0
    delta = 1e-5
    unit = "client"
    unprotected = []
    score_noise = 8.0

The policy decides which kinds of data may leave. This section decides how the data must be protected. The device reads
the recipe that comes with each request, and computes epsilon itself. So a server's claim about its recipe does not
matter. docs/egress.md describes what a device can verify, and what it cannot.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from polyfed.core.errors import EgressError, RecipeError, did_you_mean
from polyfed.core.messages import KINDS, Declared, Message
from polyfed.core.option_checks import AT_LEAST_TWO, POSITIVE, Within, check_ranges, checked
from polyfed.core.privacy_noise import STEPS, discrete_gaussian
from polyfed.objective import Objective
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.privacy.differential.section import DELTA

SCORE_NOISE = Within("from 0.5 to 1e5", lambda value: (value >= 0.5) & (value <= 1e5))


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """The [require] section. The defaults demand nothing.

    Attributes:
        secure_aggregation: whether every reply must be masked, so that the server reads only sums.
        min_clients: least number of clients in a sum. The recipe may set a larger number.
        max_epsilon: largest epsilon of everything that the device has ever sent in all runs together. The device counts
            only noise that it adds itself.
        delta: the delta at which the device computes epsilon.
        unit: what epsilon must protect. `client` protects all data of the device, and `example` protects each row.
        unprotected: kinds of data that may leave without mask and without noise.
        score_noise: standard deviation, in rows, of the noise that the device adds to the counts of a score on its test
            rows. Each score adds to the epsilon that the device has spent, at `unit = "example"`.
    """

    secure_aggregation: bool = False
    min_clients: Annotated[int | None, AT_LEAST_TWO] = None
    max_epsilon: Annotated[float | None, POSITIVE] = None
    delta: Annotated[float | None, DELTA] = None
    unit: Literal["client", "example"] = "client"
    unprotected: tuple[str, ...] = ()
    score_noise: Annotated[float | None, SCORE_NOISE] = None

    def __post_init__(self) -> None:
        """Check the ranges of the options, and that an option is not set without the other options that it needs.

        Raises:
            RecipeError: an option is out of range, or needs another option.
        """
        check_ranges("[require]", self)
        if (self.max_epsilon is None) != (self.delta is None):
            raise RecipeError(
                "[require] needs max_epsilon and delta together, because an epsilon means nothing without its delta",
                ("require", "delta"),
            )
        if self.min_clients is not None and not self.secure_aggregation:
            raise RecipeError("[require] min_clients needs secure_aggregation = true", ("require", "min_clients"))
        if self.score_noise is not None and self.max_epsilon is not None and self.unit == "client":
            raise RecipeError(
                '[require] score_noise protects single test rows, and max_epsilon is for unit = "client". Set unit = '
                '"example"',
                ("require", "score_noise"),
            )
        if unknown := [kind for kind in self.unprotected if kind not in KINDS]:
            text = f"[require] unprotected: no kind '{unknown[0]}'; {did_you_mean(unknown[0], KINDS)}"
            raise RecipeError(text, ("require", "unprotected"))

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str) -> "Requirements":
        """Make requirements from the section's table.

        Raises:
            RecipeError: a key is unknown, or a value is wrong.
        """
        return cls(**checked(where, cls, table))

    def sentences(self) -> tuple[str, ...]:
        """Return the options that are set, each as a text such as `max_epsilon = 4.0`."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        if self.max_epsilon is not None:
            values["unit"] = (self.unit, None)  # the default also counts, because epsilon depends on it
        shown = {name: value for name, (value, default) in values.items() if value != default}
        return tuple(f"{name} = {str(value).lower() if value is True else value}" for name, value in shown.items())

    def lack(self, task: str, field: str, said: Declared, mechanism: Mechanism | None) -> str:
        """Return a clause that names a required protection that a part of a reply lacks, or "" if it lacks none.

        Args:
            task: name of the task.
            field: name of the field in the reply.
            said: the declaration of the field.
            mechanism: the mechanism that this device applies, or None.
        """
        if self.score_noise is not None and said.scored and not said.counted:
            return f"[require] score_noise = {self.score_noise:g} of the device, and scores in this form get no noise"
        if said.random or said.kind in self.unprotected:
            return ""
        if self.secure_aggregation and not said.masked:
            return "[require] secure_aggregation = true of the device, and this part is not masked"
        noisy = said.counted and self.score_noise is not None
        if self.max_epsilon is not None and not noisy and not (mechanism is not None and mechanism.covers(task, field)):
            return f"[require] max_epsilon = {self.max_epsilon:g} of the device, and no noise of the device protects it"
        return ""

    def fix(self, said: Declared) -> str:
        """Return the change of the policy file that lets such a part leave without protection."""
        if self.score_noise is not None and said.scored and not said.counted:
            return "[require] without score_noise"
        listed = ", ".join(f'"{known}"' for known in (*self.unprotected, said.kind))
        return f"[require] unprotected = [{listed}]"

    def score_release(self, reply: type[Message], subsets: int) -> "Release | None":
        """Return the privacy cost of the noisy counts of a reply, or None if the device adds no noise to the reply.

        Args:
            reply: the message class of the reply.
            subsets: the number of subsets of the modalities that the recipe scores.
        """
        shapes = [said.shape or () for said in reply.declared.values() if said.counted]
        uses = subsets if any("subsets" in shape for shape in shapes) else 1
        if self.score_noise is None or not shapes or not uses:
            return None
        # a row that is left out changes both counts, the right predictions and the rows
        return Release("example", self.score_noise / math.sqrt(2), uses)

    def with_noise(self, reply: Any, objective: Objective, client: int) -> Any:
        """Return a reply with noise of the operating system in its counts, or the reply itself if there is none to add.

        One row is a whole number of steps of the grid of the noise, so the noise hides it exactly. Rounding and
        limiting the result afterwards reveals nothing more.

        Raises:
            EgressError: the score is no count, so no noise of a known size hides a row.
        """
        counted = {name for name, said in reply.declared.items() if said.counted}
        if self.score_noise is None or not counted:
            return reply
        if not objective.OF_CLASSES:
            raise EgressError(
                f"client {client} refused to send {type(reply).__name__}: [require] score_noise of the device hides a "
                "row in counts, and the score of this task is a sum without a bound for each row. It would leave if "
                "the policy file had no score_noise"
            )
        steps = math.floor(STEPS / self.score_noise)

        def noisy(value: Tensor) -> Tensor:
            noise = discrete_gaussian(None, "count", tuple(value.shape), value.device)
            result: Tensor = ((value.to(torch.float64) * steps + noise) / steps).round()
            return result

        if (own := getattr(reply, "with_noise", None)) is not None:
            return own(noisy, STEPS / steps)
        rows = noisy(reply.num_rows).clamp(min=1)
        right = noisy(reply.sums).clamp(min=0).minimum(rows).abs()  # no -0
        return replace(reply, sums=right.to(reply.sums.dtype), num_rows=rows.to(reply.num_rows.dtype))


NO_REQUIREMENTS = Requirements()


@dataclass(frozen=True)
class Release:
    """What one protected reply of a device adds to the privacy budget (epsilon) that the device has spent.

    Attributes:
        unit: `client` or `example`.
        noise: standard deviation of the noise, as a multiple of the largest change that one unit can cause.
        uses: number of Gaussian mechanisms in one reply.
        rounds: largest number of rounds in which the run asks a client for such a reply.
    """

    unit: str
    noise: float
    uses: int
    rounds: int = 1
