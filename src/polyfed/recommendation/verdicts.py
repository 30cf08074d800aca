"""The verdicts about candidates, kept in the folder of a recommendation: to make them anew takes half a minute.

A verdict holds for a recipe and the metrics. The file holds those of one state of everything else that they depend on:
the data, the policy file, and the code of polyfed and the versions that it computes with. Any other state begins anew.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from polyfed.core.system.files import replace_text
from polyfed.report.reading.run_schema import parse_as

FILE = "verdicts.json"
"""The name of the file."""


class Verdict(TypedDict):
    """What `polyfed check` says about a recipe: attributes of `Candidate`."""

    refused: str
    code: int
    unmeasured: str
    reply_bytes: Annotated[int, Field(ge=0)]


class _Kept(TypedDict):
    state: str
    verdicts: dict[str, Verdict]


_KEPT: TypeAdapter[Any] = TypeAdapter(_Kept)


@dataclass
class Verdicts:
    """The verdicts by the digest of what they are about.

    Attributes:
        state: the digest of everything else that they depend on; empty if something else decides too, such as code of
            the user, so that none is kept.
        known: digest -> verdict.
    """

    state: str = ""
    known: dict[str, Verdict] = field(default_factory=dict)

    def read(self, folder: Path) -> None:
        """Add the verdicts of an earlier call. A file that is damaged or of another state has none."""
        path = folder / FILE
        if not self.state or not path.is_file():
            return
        try:
            kept = parse_as(_KEPT, path.read_bytes())
        except (OSError, ValueError):
            return
        if kept["state"] == self.state:
            self.known = {**kept["verdicts"], **self.known}

    def write(self, folder: Path) -> None:
        """Write them for the next call."""
        if self.state:
            replace_text(folder / FILE, json.dumps({"state": self.state, "verdicts": self.known}, indent=1))


def digest(*parts: Any) -> str:
    """Return the SHA-256 of parts that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
