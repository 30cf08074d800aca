"""Protection that a device demands: the [require] section of its policy file. No recipe can loosen this section.

An example:

    [require]
    secure_aggregation = true
    min_clients = 5
    max_epsilon = 4.0
    delta = 1e-5
    unit = "client"
    unprotected = []

The policy decides which kinds of data may leave. This section decides how the data must be protected. The device reads
the recipe that comes with each request, and computes epsilon itself. So a server's claim about its recipe does not
matter. docs/egress.md describes what a device can verify, and what it cannot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.messages import KINDS, Declared
from polyfed.core.schema import AT_LEAST_TWO, POSITIVE, check_ranges, checked
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.privacy.differential.section import DELTA


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
    """

    secure_aggregation: bool = False
    min_clients: Annotated[int | None, AT_LEAST_TWO] = None
    max_epsilon: Annotated[float | None, POSITIVE] = None
    delta: Annotated[float | None, DELTA] = None
    unit: Literal["client", "example"] = "client"
    unprotected: tuple[str, ...] = ()

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
        if said.random or said.kind in self.unprotected:
            return ""
        if self.secure_aggregation and not said.masked:
            return "[require] secure_aggregation = true of the device, and this part is not masked"
        if self.max_epsilon is not None and not (mechanism is not None and mechanism.covers(task, field)):
            return f"[require] max_epsilon = {self.max_epsilon:g} of the device, and no noise of the device protects it"
        return ""

    def fix(self, kind: str) -> str:
        """Return a line for the policy file that allows the device to send this kind of data without protection."""
        listed = ", ".join(f'"{known}"' for known in (*self.unprotected, kind))
        return f"[require] unprotected = [{listed}]"


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
