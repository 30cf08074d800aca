"""The encoders that a recipe can name."""
