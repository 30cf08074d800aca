"""Secure aggregation: the server reads only sums of what the clients send, the section [secure_aggregation].

- `messages`: what server and clients send each other besides the masked replies.
- `cohort`: the clients of a request as both halves know them, and the masks that they share.
- `client`: the client's half, the tasks of `SecureAggregation`.
- `server`: the server's half, which runs the protocol and reads the sums.
- `sums`: the sums, in the place of single replies.
"""
