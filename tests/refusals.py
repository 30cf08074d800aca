"""How a test names the error or warning that it expects: by the key of the recipe, and one noun of the text."""

import re
from contextlib import AbstractContextManager
from typing import Any

import pytest

from polyfed.core.errors import PolyfedWarning

WORDS = 3
"""A noun has at most so many words: `row weights`, `pip install ray`. A sentence is not one."""


def refuses(kind: type[BaseException] | tuple[type[BaseException], ...], said: str) -> "Refusal":
    """Expect an error, as `pytest.raises` does. If it holds several faults, one of them must have both key and noun.

    Args:
        said: `key: noun` as in `train.lr: finite`, or the noun alone if the error has no key. The noun tells the error
            from others with the same class and key.
    """
    return Refusal(kind, said)


class Refusal:
    """The context of `refuses`; no generator, whose frame would keep what the error's traceback holds."""

    def __init__(self, kind: type[BaseException] | tuple[type[BaseException], ...], said: str) -> None:
        self._said, (self._key, self._noun) = said, parts(said)
        self._raises = pytest.raises(kind)

    def __enter__(self) -> pytest.ExceptionInfo[Any]:
        return self._raises.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not self._raises.__exit__(kind, error, trace):
            return False
        faults = getattr(error, "several", ()) or (error,)
        found = [(".".join(map(str, getattr(fault, "key", ()))), _text(fault)) for fault in faults]
        assert any(at == self._key and self._noun in text for at, text in found), f"not '{self._said}': {found}"
        return True


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
