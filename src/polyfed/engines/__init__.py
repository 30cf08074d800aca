"""Engines: they run the clients of a request.

An algorithm sends requests through `polyfed.federation`. An engine runs the clients and returns their replies. All
engines give the same numbers up to rounding. No file of this package depends on a particular algorithm.

- `base`: the base class of all engines: client contexts, egress gates, running a single client.
- `in_process`: the base class of the engines that hold all clients in this process.
- `sequential`: runs one client after another. It is the reference for every other engine.
- `vectorised`: runs clients in stacks, with one tensor operation for all clients of a stack.
- `workers`, `worker_process`, `shared_memory`: run clients in parallel on several processes of one machine.
- `remote`: sends requests to clients in other processes or on other machines over a transport.
- `protocol`: headers of the packets between a server and remote clients, and the interface of a transport.
- `flower`: Flower's simulation runtime (the extra `polyfed[flower]`).
- `work_count`: counts the work of clients for simulated time.
- `allocator`: keeps freed memory for the next training step.
- `gpu_memory`: decides whether the data set is on the GPU or in main memory, and copies rows from there to the GPU.
"""

from polyfed.engines.sequential import Sequential
from polyfed.engines.vectorised import Vectorised

__all__ = ["Sequential", "Vectorised"]
