"""What runs on a device: its configuration, data, policy and state, and the process that answers requests."""
