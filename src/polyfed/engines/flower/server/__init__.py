"""Flower on the server: its SuperLink, and the transport of requests."""
