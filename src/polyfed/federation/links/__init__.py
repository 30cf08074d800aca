"""The links of the clients: simulated ones, and those that the server of a deployment measures."""
