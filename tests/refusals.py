"""How a test names the error or warning that it expects: by the key of the recipe, and one noun of the text."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from polyfed.core.errors import PolyfedWarning

WORDS = 3
"""A noun has at most so many words: `row weights`, `pip install ray`. A sentence is not one."""


@contextmanager
def refuses(kind: type[BaseException] | tuple[type[BaseException], ...], said: str) -> Iterator[Any]:
    """Expect an error, as `pytest.raises` does. If it holds several faults, one of them must have both key and noun.

    Args:
        said: `key: noun` as in `train.lr: finite`, or the noun alone if the error has no key. The noun tells the error
            from others with the same class and key.
    """
    key, noun = parts(said)
    with pytest.raises(kind) as error:
        yield error
    faults = getattr(error.value, "several", ()) or (error.value,)
    found = [(".".join(map(str, getattr(fault, "key", ()))), _text(fault)) for fault in faults]
    assert any(at == key and noun in text for at, text in found), f"not '{said}': {found}"


def _text(fault: BaseException) -> str:
    """Return the text with its notes, which only a device's own log has."""
    return "\n".join([str(fault), *getattr(fault, "__notes__", ())])


def warned(noun: str, kind: type[Warning] = PolyfedWarning) -> AbstractContextManager[Any]:
    """Expect a warning with this noun, as `pytest.warns` does."""
    return pytest.warns(kind, match=re.escape(parts(noun)[1]))


def parts(said: str) -> tuple[str, str]:
    """Split `key: noun`."""
    key, colon, noun = said.rpartition(": ")
    assert 1 <= len(noun.split()) <= WORDS, f"'{noun}' is no noun, but a sentence; take {WORDS} words or fewer"
    assert bool(colon) == bool(key), said
    return key, noun
