"""Collects the faults of a recipe or of a data set, so that a user sees all of them at once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

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
