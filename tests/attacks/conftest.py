"""Loopback with small and large socket buffers, for the tests by someone who wants to overload a port."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000
BUFFERS = {"of this machine": None, "small": "4096 4096 4096", "large": "4096 16777216 67108864"}


@pytest.fixture(params=BUFFERS)
def loopback(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test in a network of its own, in which the kernel gives each socket buffers of a certain size.

    When a peer closes a connection with unread bytes, the size decides what the other side sees: an answer, a reset or
    the end. The thread of the test moves to the new network, and so do the threads that it starts.
    """
    sizes = BUFFERS[request.param]
    if sizes is None:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET):
            pytest.skip(f"a network of its own needs root: {os.strerror(ctypes.get_errno())}")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            for name in ("tcp_rmem", "tcp_wmem"):
                Path(f"/proc/sys/net/ipv4/{name}").write_text(sizes)
            yield
        finally:
            assert libc.setns(before, CLONE_NEWNET) == 0
    finally:
        os.close(before)
