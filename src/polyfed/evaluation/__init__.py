"""Evaluation of models: the scores that clients and evaluation clients report, and the metrics computed from them.

Open `scores.py` first. It has the [evaluate] section, and the messages with which clients report scores.
`predictions.py` computes predictions for new samples. `client_statistics.py` computes the statistics over clients,
models and seeds. docs/evaluation.md describes the metrics.
"""
