"""The `polyfed` command. A verb is a function in `commands` or `federation`; further ones register at `app`."""

from polyfed.cli import federation
from polyfed.cli.commands import app, main

__all__ = ["app", "federation", "main"]
