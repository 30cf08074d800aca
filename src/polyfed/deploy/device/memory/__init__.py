"""What a device must not forget over runs and restarts: counts, budgets, replies, secrets and local states."""
