"""The faults of a recipe or of a data set: collects them, so that a user sees all at once, and declares conflicts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from polyfed.core.errors import DataError, NotAllowed, PolyfedError, RecipeError

T = TypeVar("T")


class Problems:
    """The faults found so far.

    Attributes:
        found: the faults, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.found: list[PolyfedError] = []

    def add(self, error: PolyfedError) -> None:
        """Add a fault. If the exception holds several faults, add each of them."""
        self.found += error.several or (error,)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """If the `with` block raises a RecipeError or DataError, end the block and add the error to the faults."""
        try:
            yield
        except (RecipeError, DataError) as error:
            self.add(error)

    def attempt(self, make: Callable[[], T]) -> T | None:
        """Call a function. If it raises a RecipeError or DataError, add the fault and return None."""
        with self.noting():
            return make()
        return None

    def raise_all(self) -> None:
        """Raise the only fault unchanged, or several faults as one exception; see `joined`."""
        if self.found:
            raise joined(self.found)


def joined(errors: Sequence[PolyfedError], places: Sequence[str] | None = None) -> PolyfedError:
    """Combine several faults into one exception. Its text states the number of faults, and has a line for each fault.

    Faults of the class `NotAllowed` are not combined with others. A server that sends a recipe to a device therefore
    learns only what the device does not allow.

    Args:
        errors: at least one fault.
        places: the text to write before each fault, such as `line 4: `.
    """
    if forbidden := [error for error in errors if isinstance(error, NotAllowed)]:
        errors, places = forbidden, None
    shown = dict.fromkeys(f"{place}{error}" for place, error in zip(places or [""] * len(errors), errors, strict=True))
    if len(shown) == 1:
        (text,) = shown
        return errors[0] if text == str(errors[0]) else copied(errors[0], text)
    kinds = {type(error) for error in errors}
    common = RecipeError if any(isinstance(error, RecipeError) for error in errors) else DataError
    cls = kinds.pop() if len(kinds) == 1 else common
    made: PolyfedError = cls("\n".join([f"{len(shown)} problems:", *(f"  {text}" for text in shown)]))
    made.several = tuple(errors)
    return made


def copied(error: PolyfedError, text: str) -> PolyfedError:
    """Return the same fault with another text."""
    made = type(error)(text)
    made.key, made.several = error.key, error.several
    return made


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Two options of a recipe that cannot go together.

    The texts together read "KEY cannot go with BESIDE, because BECAUSE. INSTEAD", and name the method as `{method}`.

    Attributes:
        key: the option to change, such as `("train", "steps")`, or a section, such as `("network",)`.
        when: whether a recipe has the conflict. A task that polyfed guesses from labels is None until it is known.
        because: the reason.
        instead: what to do, without a full stop.
        beside: what the option cannot go with. Empty: the method itself.
        detail: gives the words for `{detail}` in `because`, from the recipe.
        deployed: whether the two go together in a simulation.
    """

    key: tuple[str, ...]
    when: Callable[[Any], bool]
    because: str
    instead: str
    beside: str = ""
    detail: Callable[[Any], str] | None = None
    deployed: bool = False

    def words(self, what: str, method: str, detail: str = "") -> str:
        """Return the sentences about the conflict.

        Args:
            what: the option, with its value.
            method: the method's name.
            detail: the words for `{detail}`.
        """
        beside, because, instead = (
            text.format(method=method, detail=detail) for text in (self.beside, self.because, self.instead)
        )
        other = beside or f"[algorithm] name = '{method}'"
        return f"{what} cannot go with {other}, because {because}. {instead}"

    def fault(self, recipe: Any, method: str, value: Any = None) -> RecipeError:
        """Return the error for a recipe that has the conflict, with the option's value."""
        section, *option = self.key
        written = str(value).lower() if isinstance(value, bool) else repr(value)
        what = f"[{section}] {option[0]} = {written}" if option else f"[{section}]"
        return RecipeError(self.words(what, method, self.detail(recipe) if self.detail else ""), self.key)
