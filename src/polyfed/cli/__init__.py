"""How is polyfed used from a terminal? The `polyfed` command parses its words, calls the package, prints the result.

The command:

- `application`: the command without its verbs, its entry point, errors as text or JSON, exit codes.
- `commands`: the verbs `run`, `check`, `report`; `comparison`: the verb `compare`; `sweep`: the verb `sweep`.
- `descriptions`: the verbs `algorithms`, `data` and `init`.
- `federation`: the verbs `app`, `superlink`, `supernode`, `status`; `audit_log`: the verb `audit-log`.
- `leakage`: the verb `audit`, which attacks the messages of a run.
- `machine`: the verbs `doctor` and `completion`.

What the verbs print; a verb imports these files when it runs:

- `tables`: results, checks and comparisons as tables; `egress_tables`: what a recipe lets cross.
- `sweep_progress`: the live table of `polyfed sweep`; `status_tables`: the output of `polyfed status`.
- `init`: the recipe that `polyfed init` writes, and the lines of a recipe that an algorithm needs.
- `catalogue`: facts about algorithms and data sources, read from their classes; `catalogue_pages` lays them out.
- `deployment`: `polyfed app`, and `polyfed check --node` for one device; `preparation`: `polyfed data prepare`.
- `doctor`: what is installed on this machine, and whether it works.
- `output`: printing tables, lines, JSON and errors; `layout`: tables without lines, titles, blank lines.
- `__main__`: `python -m polyfed.cli`.

A further verb is a function decorated with `@app.command()`.
"""

from polyfed.cli import audit_log, commands, comparison, descriptions, federation, leakage, machine, sweep
from polyfed.cli.application import app, main

__all__ = [
    "app",
    "audit_log",
    "commands",
    "comparison",
    "descriptions",
    "federation",
    "leakage",
    "machine",
    "main",
    "sweep",
]
