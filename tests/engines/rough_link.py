"""Rough links: a proxy that cuts, holds or slows a connection, and lines between network namespaces that lose
packets. Kernels without `netem` have the second ones too, as the packets pass through this process (TUN)."""

import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from threading import Thread


class Proxy:
    """A TCP proxy to a port of this machine.

    Attributes:
        passed: bytes that have passed, by direction: `up` to the server, `down` to the device.
        cut_after: for a direction, the next connection on which so many bytes have passed is cut.
        held: nothing passes, and no connection ends, as when a line is dead.
        rate: bytes a second, in each direction.
    """

    def __init__(self, port: int) -> None:
        self.target, self.passed = port, {"up": 0, "down": 0}
        self.cut_after: dict[str, int] = {}
        self.held, self.rate, self.cuts, self.ended = False, 0.0, 0, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # so that little is on its way
        self.port = self.listener.getsockname()[1]
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                for way, one, other in (("up", near, far), ("down", far, near)):
                    Thread(target=self._pump, args=(way, one, other), daemon=True).start()

    def _pump(self, way: str, one: socket.socket, other: socket.socket) -> None:
        count = 0
        with suppress(OSError):
            while data := one.recv(2**14):
                self._wait()
                if self.rate:
                    time.sleep(len(data) / self.rate)
                other.sendall(data)
                count += len(data)
                self.passed[way] += len(data)
                if way in self.cut_after and count >= self.cut_after[way]:
                    del self.cut_after[way]
                    self.cuts += 1
                    break
        self._wait()
        for sock in (one, other):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _wait(self) -> None:
        while self.held and not self.ended:
            time.sleep(0.01)

    def close(self) -> None:
        self.ended = True
        self.listener.close()


class Line:
    """A line from each network namespace to the next one. No side forwards packets.

    Args:
        loss: share of the packets that get lost, in each direction.
        delay: seconds that a packet takes.
        rate: bytes a second, in each direction; 0 for any number.
        sides: the names of the namespaces. In line N, the first side is 10.118.N.1 and the next one 10.118.N.2.

    Attributes:
        down: whether the lines are cut.
    """

    def __init__(
        self, loss: float = 0.0, delay: float = 0.0, rate: float = 0.0, sides: Sequence[str] = ("server", "device")
    ) -> None:
        self.loss, self.delay, self.rate, self.sides = loss, delay, rate, tuple(sides)
        self.down = self.ended = False
        self.mark, self.lost, self.carried = f"pr{os.getpid() % 100_000}", 0, 0
        self.ends: list[int] = []
        self.partner: dict[int, int] = {}

    def space(self, side: str) -> str:
        return f"{self.mark}-{side}"

    def inside(self, side: str) -> list[int]:
        """Return the numbers of all processes of a side."""
        found = subprocess.run(["ip", "netns", "pids", self.space(side)], capture_output=True, text=True, check=False)
        return [int(number) for number in found.stdout.split()]

    def up(self) -> None:
        for side in self.sides:
            self._made(side)
        for number, sides in enumerate(pairwise(self.sides)):
            for last, side in enumerate(sides, 1):
                self._end(side, f"{self.mark}t{number}{last}", f"10.118.{number}.{last}/24")
        self._carried()

    def _made(self, side: str) -> None:
        """Make the namespace of a side."""
        ip("netns", "add", self.space(side))
        ip("-n", self.space(side), "link", "set", "lo", "up")

    def _end(self, side: str, name: str, address: str) -> None:
        """Make an end of a line in a namespace; two that are made one after the other are a line."""
        end, space = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), self.space(side)
        self.ends.append(end)
        fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22s", name.encode(), 0x1001, b""))  # TUNSETIFF, IFF_TUN
        ip("link", "set", name, "netns", space)
        ip("-n", space, "addr", "add", address, "dev", name)
        ip("-n", space, "link", "set", name, "up")

    def _carried(self) -> None:
        for one, other in zip(self.ends[::2], self.ends[1::2], strict=True):
            self.partner |= {one: other, other: one}
        self.thread = Thread(target=self._carry, daemon=True)
        self.thread.start()

    def _carry(self) -> None:
        chance, waiting = random.Random(1), list[tuple[float, int, int, bytes]]()
        free = dict.fromkeys(self.ends, 0.0)
        while not self.ended:
            wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2
            for end in select.select(self.ends, [], [], min(wait, 0.2))[0]:
                with suppress(OSError):
                    packet, now = os.read(end, 2**16), time.monotonic()
                    other = self.partner[end]
                    free[other] = max(free[other], now)
                    if self.down or chance.random() < self.loss or free[other] - now > 1.0:  # the queue is full
                        self.lost += 1
                        continue
                    free[other] += len(packet) / self.rate if self.rate else 0.0
                    self.carried += 1
                    heapq.heappush(waiting, (free[other] + self.delay, self.carried, other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(waiting)
                with suppress(OSError):
                    os.write(other, packet)

    def close(self) -> None:
        self.ended = True
        if hasattr(self, "thread"):
            self.thread.join(5)
        for end in self.ends:
            os.close(end)
        for side in self.sides:
            subprocess.run(["ip", "netns", "del", self.space(side)], capture_output=True, check=False)


class Star(Line):
    """A line from the server's namespace to that of each device, `device-0` and so on, with a rate of its own (tc).

    Args:
        rates: the rate of each line, in each direction, as tc writes it.
        loss, delay: as of a line.
    """

    address = "10.119.255.1"

    def __init__(self, rates: list[str], loss: float = 0.0, delay: float = 0.0) -> None:
        super().__init__(loss, delay, sides=["server", *(f"device-{number}" for number in range(len(rates)))])
        self.rates = rates

    def up(self) -> None:
        for side in self.sides:
            self._made(side)
        ip("-n", self.space("server"), "addr", "add", f"{self.address}/32", "dev", "lo")
        for number, rate in enumerate(self.rates):
            ends = (("server", f"{self.mark}s{number}", 1), (f"device-{number}", f"{self.mark}d{number}", 2))
            for side, name, last in ends:
                self._end(side, name, f"10.119.{number}.{last}/24")
                shaped = ("qdisc", "add", "dev", name, "root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
                subprocess.run(["tc", "-n", self.space(side), *shaped], check=True, capture_output=True)
            ip("-n", self.space(f"device-{number}"), "route", "add", self.address, "dev", f"{self.mark}d{number}")
        self._carried()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
