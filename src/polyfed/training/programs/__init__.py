"""The step compiler: it records a training step once and replays it as a program."""
