"""Secure aggregation: the server reads only sums of the clients' replies ([secure_aggregation] of a recipe).

- `messages`: the messages between server and clients, except the masked replies.
- `cohort`: computations that client and server share: keys of masks, and vectors of masked integers.
- `client`: the client's part of the protocol: the tasks of `SecureAggregation`.
- `state`: the secrets that a client keeps during a request.
- `server`: the server's part of the protocol, which runs the steps and reads the sums.
- `sums`: the sums that a method receives instead of single replies.
"""
