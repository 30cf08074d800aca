"""Data sets of sensors that people wear."""
