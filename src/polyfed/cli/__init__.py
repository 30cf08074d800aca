"""How is polyfed used from a terminal? The `polyfed` command parses its words, calls the package, prints the result.

- `commands`: every verb (`run`, `check`, `report`, `algorithms`, `data`, `app`) and the exit codes.
- `comparison`: `polyfed compare`; `sweep`: `polyfed sweep`, and `sweep_progress`, its live table.
- `progress`: the display of a run while it trains.
- `tables`: results, checks and comparisons as tables.
- `egress_tables`: what a recipe lets cross, as a table and in sentences.
- `federation`: `polyfed superlink`, `polyfed supernode` and other verbs of a deployment.
- `deployment`: `polyfed app`, and `polyfed check --node` for one device.
- `starting`: `polyfed init`, and the lines of a recipe that an algorithm needs.
- `preparation`: `polyfed data prepare`.
- `catalogue`: facts about algorithms and data sources, read from their classes; `catalogue_pages` lays them out.
- `output`: printing tables, lines or JSON on standard output.
- `layout`: tables without lines, titles, blank lines.
- `__main__`: `python -m polyfed.cli`.

A further verb is a function decorated with `@app.command()`.
"""

from polyfed.cli import federation
from polyfed.cli.commands import app, main

__all__ = ["app", "federation", "main"]
