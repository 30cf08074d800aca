"""The `polyfed` command. A verb is a function in `verbs`; further ones register at `app`."""

from polyfed.cli.commands import app, main

__all__ = ["app", "main"]
