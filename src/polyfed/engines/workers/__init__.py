"""Worker processes that run the clients of a request in parallel on one machine."""
