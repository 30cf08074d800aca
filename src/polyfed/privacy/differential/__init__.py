"""Differential privacy: the section [privacy], its mechanism, and its guarantee."""
