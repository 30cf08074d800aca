"""Reads the folders of runs and studies."""
