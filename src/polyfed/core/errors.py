"""The exceptions of polyfed: mistakes of the user, and failures of a run.

The text of each exception states where the fault is, what is wrong, what is allowed and what to do next. The command
line prints the text without a traceback, and exits with the `exit_code` of the class. A mistake in polyfed itself
shows as a failed `assert`.
"""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches


class PolyfedError(Exception):
    """Base of all exceptions whose text is written for the user.

    Attributes:
        key: the wrong entry of a recipe, such as `("train", "lr")`; empty if it is not known.
        several: the individual errors, if this exception reports several errors at once.
    """

    exit_code = 2

    def __init__(self, text: str = "", key: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.key = key
        self.several: tuple[PolyfedError, ...] = ()


class RecipeError(PolyfedError):
    """A recipe or a call is wrong: an unknown key, a wrong type, a value out of range."""


class UnknownClient(RecipeError, KeyError):
    """The client does not exist, or has no personal model.

    This class is also a KeyError, because a mapping of clients raises it.
    """

    __str__ = Exception.__str__  # KeyError would print the text in quotes


class ModelError(RecipeError):
    """The model cannot be built: an unknown encoder, a layer that is not supported, a wrong fusion."""


class NotAllowed(RecipeError):
    """A recipe names code or a model file that the owner of this device has not allowed."""

    exit_code = 3


class EgressError(PolyfedError):
    """The policy does not let a client send some data, or `polyfed check` did not list the message with this data."""

    exit_code = 3


class TooFewReplies(PolyfedError):
    """Fewer clients answered than `min_replies` of the recipe requires."""

    exit_code = 4


class TransportError(PolyfedError):
    """The connection between server and clients failed permanently. The text explains how to continue."""

    exit_code = 6


class DataError(PolyfedError):
    """Data on disk is missing, damaged or inconsistent."""

    exit_code = 5


class CheckpointError(PolyfedError):
    """A checkpoint is damaged or belongs to another run."""

    exit_code = 5


class PolyfedWarning(UserWarning):
    """An entry of a recipe has no effect, or an effect that its name does not suggest. The run continues."""


class Diverged(PolyfedError):
    """Training produced NaN or infinity. The text names the client and the term of the loss, if they are known."""

    exit_code = 4


class BadReply(Exception):
    """A client sent a reply that the server must not use. The server drops it and records the text as the reason."""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return the part of an error text that suggests a similar name and lists the allowed names.

    >>> did_you_mean("fedavgg", ["fedavg", "moon"])
    "did you mean 'fedavg'? Allowed: fedavg, moon"
    """
    options = sorted(allowed)
    near = get_close_matches(name, options, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{hint}Allowed: {', '.join(options) or '(none)'}"


def command(*words: object) -> str:
    """Return a command of polyfed that can be pasted into a shell: words with blanks or other marks are quoted.

    >>> command("run", "my recipe.toml")
    "polyfed run 'my recipe.toml'"
    """
    return shlex.join(["polyfed", *map(str, words)])


@dataclass(frozen=True)
class Call:
    """A command that reads a data file, as the user typed it.

    Attributes:
        verb: the verb, such as `init`.
        file: the data file.
        options: the words of each option that the user typed.
    """

    verb: str
    file: str
    options: tuple[tuple[str, ...], ...] = ()

    def again(self, *more: tuple[str, ...], file: object = "") -> str:
        """Return the command with more options; each replaces the option that it contradicts.

        Args:
            file: another data file.

        >>> Call("init", "a.csv", (("--out", "a.toml"), ("--column", "age=date"))).again(("--column", "age=mean"))
        'polyfed init a.csv --out a.toml --column age=mean'
        """
        replaced = {_subject(option) for option in more}
        kept = [option for option in self.options if _subject(option) not in replaced]
        return command(self.verb, file or self.file, *(word for option in (*kept, *more) for word in option))


def _subject(option: tuple[str, ...]) -> tuple[str, ...]:
    """Return what an option is about: `--column age=mean` is about the column, `--leave-out note` about the note."""
    return (option[0], *(word.partition("=")[0] for word in option[1:]))


_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


@contextmanager
def called(call: Call) -> Iterator[None]:
    """Let the texts of errors and notes print this command with what it lacks; see `again`."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


def again(*more: tuple[str, ...], otherwise: str, file: object = "") -> str:
    """Return the command that the user typed with more options, or `otherwise` if it reads no data file."""
    call = _CALL.get()
    return otherwise if call is None else call.again(*more, file=file)


def typed_verb() -> str:
    """Return the verb of the command that reads a data file, or "" if there is none."""
    call = _CALL.get()
    return "" if call is None else call.verb


def counted(count: int, one: str, many: str) -> str:
    """Return a count, followed by the word in the singular or plural.

    Args:
        one: the word in the singular. If the sentence continues with a verb, include the verb, as in `row has`.
        many: the same in the plural, for any other count.

    >>> counted(1, "row has", "rows have"), counted(1200, "row", "rows")
    ('1 row has', '1,200 rows')
    """
    return f"{count:,} {one if count == 1 else many}"


def require(ok: bool, where: str, value: object, allowed: str) -> None:
    """Check a value of a recipe.

    Args:
        ok: Whether the value is allowed.
        where: The recipe key, such as `data.modalities`.
        allowed: What is allowed, in words.

    Raises:
        RecipeError: `ok` is false; the message contains the other three arguments.
    """
    if not ok:
        raise RecipeError(f"{where} = {value!r}; allowed: {allowed}", tuple(where.split(".")))


def require_one_of(where: str, name: str, allowed: Iterable[str]) -> None:
    """Check a value of a recipe that must be one of several names.

    Args:
        where: The recipe key, such as `data.modalities`.

    Raises:
        RecipeError: it is none of them; the text suggests a similar one.
    """
    names = [*allowed]
    if name not in names:
        raise RecipeError(f"{where} = {name!r}; {did_you_mean(name, names)}", tuple(where.split(".")))
