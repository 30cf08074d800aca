"""Sources of the user's own data, and the synthetic source for tests."""
