"""Data sets of pictures, some with text or sound."""
