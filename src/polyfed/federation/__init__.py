"""Federation: the server's knowledge of its clients, and its requests to them.

An algorithm's round reaches the clients only through `Federation.ask`, and an engine answers. This package imports
neither engines nor algorithms. It works only with the messages of the clients, and with facts about the clients.

- `federation`: `Federation`, the server's view of the clients in a round, with its method `ask`.
- `client_registry`: facts about every client: number of rows, modalities, silo.
- `context`: the facts that a task may use about the client that runs it.
- `replies`: stacked replies and their weighted means.
- `message_validation`: the checks that a reply must pass before the server uses it.
- `aggregation`: robust alternatives to the mean of the replies.
- `attack`: simulated attacks by clients that send false replies.
  - `backdoor`: the attack with training rows that contain a trigger.
- `wire/`: conversion of messages to bytes and back, and their compression.
- `links/`: links and devices of the clients, simulated or measured.
- `clock`: simulated time of a round over these links.
"""
