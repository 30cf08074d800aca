"""Settings of this machine for a run: the allocator, the memory and the determinism of a GPU."""
