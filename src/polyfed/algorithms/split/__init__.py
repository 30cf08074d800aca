"""How are the layers of one model divided between clients and server? Split learning and SplitFed.

Open `cut.py` first: it cuts the model in two and has the client tasks and the server's step that both methods share.
`split_learning.py` and `splitfed.py` are the methods, `messages.py` is what crosses the cut, `local_state.py` what a
client keeps. Pages: docs/algorithms/split-learning.md and docs/algorithms/splitfed.md.
"""
