"""Flower on a device: its SuperNode, and the process that runs its tasks."""
