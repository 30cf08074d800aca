"""Federation: what does the server know about its clients, and how does it ask them?

An algorithm's round reaches the clients only through `Federation.ask`; an engine answers. This room knows messages and
facts about clients, and neither engines nor algorithms.

- `federation`: `Federation`, the server's view of the clients in a round, with its method `ask`.
- `client_registry`: facts about every client: rows, modalities, silo.
- `context`: what a task may know about the client that runs it.
- `replies`: stacked replies and their weighted means.
- `reply_validation`: what a reply must look like before the server uses it.
- `wire_format`: messages as bytes.
- `network`: simulated time of a round over given links.
"""
