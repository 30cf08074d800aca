"""The edge of a silo: a server for the silo's devices, and one participant for the server of the federation."""
