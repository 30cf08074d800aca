"""The proxy of a device, as its environment names it, through which the device reaches its server.

A proxy only passes bytes on (CONNECT): TLS begins at the device and ends at the server.
"""

import http.client
import re
import ssl
import urllib.request
from base64 import b64encode
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import unquote, urlsplit

from polyfed.core.errors import RecipeError

PORT = 3128
"""The port of a proxy whose address has none."""

FORM = "http://HOST:PORT, or http://NAME:PASSWORD@HOST:PORT"

WANTED = 407
"""The status with which a proxy asks for a name and a password."""


@dataclass(frozen=True)
class Proxy:
    """A proxy on the way to a server.

    Attributes:
        host, port: its address.
        target: `host:port` of the server.
        words: name and password for it, as HTTP writes them; empty without.
    """

    host: str
    port: int
    target: str
    words: str = field(default="", repr=False)

    @classmethod
    def to(cls, host: str, port: int) -> Self | None:
        """Return the proxy that HTTPS_PROXY names for a server, or None without one, or if NO_PROXY has the server.

        Raises:
            RecipeError: HTTPS_PROXY is no address of a proxy. The text leaves its value out, which may hold a password.
        """
        text = urllib.request.getproxies().get("https")
        if text is None or urllib.request.proxy_bypass(f"{host}:{port}"):
            return None
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            if parts.scheme != "http" or not parts.hostname:
                raise ValueError("another kind of proxy")
            parts.hostname.encode("idna")
            words = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
            made = cls(parts.hostname, parts.port or PORT, f"{host}:{port}")
        except ValueError:
            raise RecipeError(
                f"the environment variable HTTPS_PROXY is no proxy that polyfed can use. Write {FORM}, or set "
                f"NO_PROXY={host} to call {host}:{port} directly"
            ) from None
        return replace(made, words=b64encode(words).decode()) if parts.username else made

    def why(self, error: OSError | http.client.HTTPException) -> str:
        """Return why no connection to the server came about, and what to do. No word of the proxy is in it."""
        where = f"the proxy {self.host}:{self.port} of HTTPS_PROXY"
        host = self.target.rpartition(":")[0]
        found = re.match(r"Tunnel connection failed: (\d{3})\b", str(error))
        if found is None:
            why = f"{where} does not connect to {self.target} ({type(error).__name__}). Start it, correct HTTPS_PROXY"
            return f"{why}, or set NO_PROXY={host} to connect directly"
        if int(found[1]) != WANTED:
            return f"{where} refuses with status {found[1]}. Allow CONNECT to {self.target} there"
        if self.words:
            return f"{where} does not take the name and password of HTTPS_PROXY (407). Correct them"
        return f"{where} wants a name and a password (407). Write HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT"


class BehindProxy(OSError):
    """A proxy has not connected to the server; the text is `Proxy.why`."""


class _Tunnel(http.client.HTTPSConnection):
    """A connection through a proxy, whose errors before TLS begins are those of the proxy."""

    def __init__(self, proxy: Proxy, context: ssl.SSLContext, seconds: float) -> None:
        super().__init__(proxy.host, proxy.port, timeout=seconds, context=context)
        self.proxy = proxy
        host, _, port = proxy.target.rpartition(":")
        headers = {"Proxy-Authorization": f"Basic {proxy.words}"} if proxy.words else {}
        self.set_tunnel(host, int(port), headers)

    def connect(self) -> None:
        """Open the connection.

        Raises:
            BehindProxy: the proxy is not there, or refuses.
            OSError: TLS with the server failed.
        """
        try:
            super().connect()
        except ssl.SSLError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise BehindProxy(self.proxy.why(error)) from error


def https_to(host: str, port: int, context: ssl.SSLContext, seconds: float) -> http.client.HTTPSConnection:
    """Return a connection to a server, not opened yet, through the proxy of the environment if there is one.

    Args:
        seconds: how long the other side may be silent.

    Raises:
        RecipeError: see `Proxy.to`.
    """
    if (proxy := Proxy.to(host, port)) is not None:
        return _Tunnel(proxy, context, seconds)
    return http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
