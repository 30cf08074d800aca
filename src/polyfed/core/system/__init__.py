"""Files, logs, signals and threads, as every room uses them."""
