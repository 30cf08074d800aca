"""Engines: how do the clients of a request run?

An algorithm asks clients through `polyfed.federation`; an engine runs them and brings back their replies. All engines
give the same numbers up to rounding. No file here knows an algorithm.

- `base`: what all engines share: client contexts, egress gates, running one client by itself.
- `in_process`: what engines share that hold all clients in this process.
- `sequential`: runs one client after another; the reference for every other engine.
- `vectorised`: runs clients in stacks, as one tensor operation for many.
- `remote`: asks clients in other processes or on other machines over a transport.
- `protocol`: headers of the packets between a server and such clients, and what a transport must do.
- `flower`: a transport over Flower (the extra `polyfed[flower]`).
- `metered`: counts the work of clients for simulated time.
- `heap`: keeps freed memory for the next round.
"""

from polyfed.engines.sequential import Sequential
from polyfed.engines.vectorised import Vectorised

__all__ = ["Sequential", "Vectorised"]
