"""What happened in a run, or in many.

- `reading`: the folders of runs and studies. `pages`: the page of a run.
- `comparison`: groups of runs that differ only in seed and fold, with their tables, tests and figures.
"""

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
