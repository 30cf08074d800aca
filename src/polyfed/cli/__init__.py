"""The `polyfed` command: it parses its arguments, calls the package and prints the result.

The command and its verbs (subcommands), such as `run` in `polyfed run`:

- `application`: the entry point of the command, errors as text or JSON, and exit codes.
- `commands`: the verbs `run`, `demo`, `check`, `report`. `comparison`: the verb `compare`.
- `sweep`: the verbs `sweep` and `recommend`.
- `descriptions`: the verbs `algorithms`, `data`, `recipes`, `docs` and `init`.
- `federation`: the verbs `app`, `submit`, `server`, `jobs`, `device`, `status`. `audit_log`: the verbs `audit-log` and
  `certify`.
- `leakage`: the verb `audit`, which attacks the messages of a run.
- `board`: the verbs `board pack`, `verify`, `code` and `page`.
- `machine`: the verbs `doctor` and `completion`. `cluster`: job scripts for Slurm and Kubernetes.

The other files of this folder define no verbs. They make the tables, texts and files that a verb prints or writes. Each
file is imported only when a verb that needs it runs:

- `tables`: results and comparisons as tables.
- `sweep_progress`: the live table of `polyfed sweep`. `status_tables`: the output of `polyfed status`.
- `init`: the recipe that `polyfed init` writes, and the lines of a recipe that an algorithm needs.
- `catalogue`: facts about algorithms and data sources, read from their classes; `catalogue_pages` lays them out.
- `deployment`: `polyfed app`, and `polyfed check --node` for one device. `preparation`: `polyfed data prepare`.
- `doctor`: what is installed on this machine, and whether it works.
- `contribution`: what each client and modality added to a run. `evaluate`: the verbs `evaluate` and `predict`.
- `output`: printing tables, lines, JSON and errors.
- `__main__`: `python -m polyfed.cli`.

To add a verb, write a function with the decorator `@app.command()`.
"""

from polyfed.cli import (
    audit_log,
    board,
    cluster,
    commands,
    comparison,
    contribution,
    descriptions,
    evaluate,
    federation,
    leakage,
    machine,
    sweep,
)
from polyfed.cli.application import app, main

__all__ = [
    "app",
    "audit_log",
    "board",
    "cluster",
    "commands",
    "comparison",
    "contribution",
    "descriptions",
    "evaluate",
    "federation",
    "leakage",
    "machine",
    "main",
    "sweep",
]
