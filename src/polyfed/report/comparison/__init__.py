"""Compares groups of runs: tables, tests, figures."""
