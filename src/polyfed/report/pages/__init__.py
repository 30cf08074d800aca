"""The page of a run, and its charts."""
