"""`polyfed status`: get the status of a server from another machine."""

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.deploy.server.monitor import read_token

SECONDS = 15.0
"""How many seconds an answer may take (inferred)."""

LONGEST = 2**20
"""Largest number of bytes that are read of an answer."""


class _Stay(urllib.request.HTTPRedirectHandler):
    """An HTTP redirect handler that follows no redirect, because the token is only for this server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Refuse every redirect."""
        return


def ask(server: str, root_certificates: Path, token: Path) -> dict[str, Any]:
    """Return the status of a server.

    Args:
        server: `host:port` of the server's `--status-port`.
        root_certificates: path of `ca.pem`, which verifies the server's certificate before the token is sent.
        token: path of the file with the token.

    Raises:
        RecipeError: a file is missing, or the address is invalid.
        PolyfedError: the server does not answer, does not match `ca.pem`, or does not accept the token.
    """
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise RecipeError(f"'{server}' is not an address; write HOST:PORT, as server.example.org:9096")
    words = {"Authorization": f"Bearer {read_token(token)}"}
    try:
        context = ssl.create_default_context(cafile=str(root_certificates))
    except (OSError, ssl.SSLError) as error:
        raise RecipeError(f"{root_certificates} cannot be used ({error}); copy ca.pem from the server") from None
    # without proxies, because proxies in environment variables are not meant for this server
    handlers = [urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler({}), _Stay()]
    opener = urllib.request.build_opener(*handlers)
    request = urllib.request.Request(f"https://{server}/status", headers=words)
    try:
        with opener.open(request, timeout=SECONDS) as answer:
            result = json.loads(answer.read(LONGEST))
    except urllib.error.HTTPError as error:
        fix = f"; is {token} the server's status.token?" if error.code == 401 else ""
        raise PolyfedError(f"{server} answered {error.code}{fix}") from None
    except (OSError, ValueError) as error:
        raise PolyfedError(f"{server} gave no status: {error}") from None
    if not isinstance(result, dict):
        raise PolyfedError(f"{server} gave no status: it answered with something else")
    return result
