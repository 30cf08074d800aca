"""What happened in a run, or in many.

- `reading`: the folders of runs and studies. `pages`: the page of a run.
- `comparison`: groups of runs that differ only in seed and fold, with their tables, tests and figures.

Each name below is imported when it is first used, so that a server makes its page without PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed.report.comparison.compare import Comparison, compare
    from polyfed.report.comparison.figures import write_figures
    from polyfed.report.comparison.paired_differences import Evidence, evidence
    from polyfed.report.pages.page import REPORT, write_comparison, write_report
    from polyfed.report.reading.reconciliation import Reconciliation, reconcile

__all__ = [
    "REPORT",
    "Comparison",
    "Evidence",
    "Reconciliation",
    "compare",
    "evidence",
    "reconcile",
    "write_comparison",
    "write_figures",
    "write_report",
]

_PLACES = {
    "REPORT": "pages.page",
    "Comparison": "comparison.compare",
    "Evidence": "comparison.paired_differences",
    "Reconciliation": "reading.reconciliation",
    "compare": "comparison.compare",
    "evidence": "comparison.paired_differences",
    "reconcile": "reading.reconciliation",
    "write_comparison": "pages.page",
    "write_figures": "comparison.figures",
    "write_report": "pages.page",
}
"""The module of each name, without `polyfed.report.`."""

if not TYPE_CHECKING:  # type checkers read the imports above, and still report a name that does not exist

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used."""
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        result = globals()[name] = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
        return result
