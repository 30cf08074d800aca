"""Split learning and SplitFed: the layers of one model are divided between the clients and the server.

Open `cut.py` first: it cuts the model into two halves, and has the client tasks and the server's step that both methods
share. `split_learning.py` and `splitfed.py` are the methods. `messages.py` has the messages between the halves, and
`local_state.py` has a client's local state. Pages: docs/algorithms/split-learning.md and docs/algorithms/splitfed.md.
"""
