"""`polyfed board`: results that others can run again."""

from polyfed.cli.board import verbs

__all__ = ["verbs"]
