"""How a message becomes bytes: the format of packets, and the compression of [wire]."""
