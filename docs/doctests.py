"""Doctests as code on the pages of the API: our docstrings write them without a heading of their own."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)
"""A doctest: its first line and all that follows up to an empty line."""


class Doctests(griffe.Extension):
    """Puts a fence around every doctest of a docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object, as it is read."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = DOCTEST.sub(lambda found: f"```pycon\n{found.group()}\n```", text)
