"""What a user can have done wrong, and what a run can meet.

A user's fault raises one of these; the text says where, what, what is allowed and what to do next, and the command
line prints it without a traceback. Our own faults are `assert`s. Every class carries the exit code of the command.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class PolyfedError(Exception):
    """Base of all errors whose text is meant for the user."""

    exit_code = 2


class RecipeError(PolyfedError):
    """The recipe or the call is wrong: unknown key, wrong type, value out of range."""


class UnknownClient(RecipeError, KeyError):
    """There is no such client, or it has no model of its own. A KeyError too, so that a mapping of clients is one."""

    __str__ = Exception.__str__  # a KeyError would show the text in quotes


class ModelError(RecipeError):
    """The model section cannot be built: unknown encoder, unsupported layer, wrong fusion."""


class NotAllowed(RecipeError):
    """A recipe names code or a file that the owner of this device has not allowed it to use."""

    exit_code = 3


class EgressError(PolyfedError):
    """Something would leave a client, or did ask to, that its policy forbids or `polyfed check` did not announce."""

    exit_code = 3


class TooFewReplies(PolyfedError):
    """Fewer clients answered than the recipe's `min_replies` asks for."""

    exit_code = 4


class DataError(PolyfedError):
    """Data on disk is missing, damaged or contradicts itself."""

    exit_code = 5


class CheckpointError(PolyfedError):
    """A checkpoint is damaged, or belongs to another run."""

    exit_code = 5


class PolyfedWarning(UserWarning):
    """Something in a recipe has no effect or is not what it says; the run goes on."""


class Diverged(PolyfedError):
    """Training left the finite numbers; names the client and the term where it is known."""

    exit_code = 4


class BadReply(Exception):
    """A reply that the server must not use; the client is dropped from the ask with this reason."""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """The part of a message that helps after a misspelt name.

    >>> did_you_mean("fedavgg", ["fedavg", "moon"])
    "did you mean 'fedavg'? Allowed: fedavg, moon"
    """
    options = sorted(allowed)
    near = get_close_matches(name, options, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{hint}Allowed: {', '.join(options) or '(none)'}"
