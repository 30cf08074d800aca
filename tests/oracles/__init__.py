"""Independent implementations of the methods, as plain loops that share no code with the package."""
