"""Reports: reads the folders of runs, writes HTML pages about them, and compares runs.

Reading a folder:

- `run_folder`: the files of a run, read line by line. `run_schema`: the types of their content.
- `history`: the rounds as columns of numbers. `participation`: which clients took part in which rounds.
- `egress`: sums over the ledger. `bytes_by_client`: the bytes that each client sent.
- `leakage`: the findings of `polyfed audit`.
- `reconciliation`: whether the audit logs of server and devices agree.

Several runs:

- `compare`: groups of runs that differ only in seed and fold, with mean and spread. `cells`: the values and columns.
- `study_folder`: the runs of a study, with their names. `labels`: for groups without a name in a study, names that
  consist of the options in which the groups differ.
- `notes`: the warnings of several runs, each once.
- `significance`: paired tests, Holm's correction, ranks. `paired_differences`: these tests, applied to a comparison.
- `comparison_tables`: a comparison as Markdown, LaTeX, CSV and JSON. `figures`: a comparison as SVG and PDF.
- `score_against_cost`: scores over rounds, bytes and simulated seconds.
- `folds`: scores over several folds, and the number of rounds until an accuracy is reached. `curves`: the curves of
  groups.

The page:

- `page`: the HTML pages, from `templates/` and `assets/`. `charts`: the curves of one run.
- `formatting`: how numbers are written.
"""

from polyfed.report.compare import Comparison, compare
from polyfed.report.figures import write_figures
from polyfed.report.page import REPORT, write_comparison, write_report
from polyfed.report.paired_differences import Evidence, evidence
from polyfed.report.reconciliation import Reconciliation, reconcile

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
