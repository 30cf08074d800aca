"""The findings of `polyfed audit` about a run, for the page and the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.system.files import LEAKAGE
from polyfed.report.reading.run_folder import Folder
from polyfed.report.reading.run_schema import LEAKAGE_AUDIT

LEVEL = "95 % interval"
"""The heading of the intervals."""

MARKED = "the whole interval of the advantage lies above 0"
"""The explanation of the star at an advantage."""


@dataclass(frozen=True)
class Leakage:
    """The table of the page.

    Attributes:
        facts: the content of leakage.json.
        rows: the attacks whose success was measured.
        others: sentences that state why the other attacks were not measured.
    """

    facts: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    others: Sequence[str]


def leakage_of(folder: Folder) -> Leakage | None:
    """Read leakage.json; None if the run was not audited.

    Raises:
        DataError: the file is damaged.
    """
    facts = folder.json(LEAKAGE, LEAKAGE_AUDIT)
    if not facts:
        return None
    findings = facts["findings"]
    return Leakage(facts, [one for one in findings if one["status"] == "measured"], unmeasured(findings))


def unmeasured(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence for each reason why attacks were not measured. The sentence names the attacks, kinds and blocks."""
    found: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for one in findings:
        if one["status"] != "measured":
            reason = found.setdefault((one["status"], one["remark"]), {})
            reason.setdefault((one["attack"], one["kind"]), []).append(one["block"])
    lines = []
    for (status, remark), places in found.items():
        words = "; ".join(f"{attack} from {kind} of {', '.join(blocks)}" for (attack, kind), blocks in places.items())
        lines.append(f"{status}{f' ({remark})' if remark else ''}: {words}")
    return lines
