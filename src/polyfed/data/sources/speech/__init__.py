"""Data sets of people who speak, as sound, text and video."""
