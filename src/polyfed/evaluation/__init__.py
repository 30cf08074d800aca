"""How good is a model? What clients and evaluation clients report about it, and the metrics made of their reports.

Open `scores.py` first: the [evaluate] section, which models a method trains (`TrainedModels`), the messages with which
clients report scores, and `predict`. `metrics.py` turns confusion matrices and sums into the numbers of result.json.
Page: docs/evaluation.md.
"""
