"""A device or an edge that joins a server: its key is made here, in a folder of preparation, and registered there."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from polyfed.core.errors import RecipeError
from polyfed.core.system.files import sync, without_links
from polyfed.transport.joining import Door, Place
from polyfed.transport.logins import PrivateKey
from polyfed.transport.tokens import JoinToken


@dataclass
class Newcomer:
    """A device or an edge before the door of a server.

    Attributes:
        door: the calls to the server.
        key: the file of the key.
        known: whether the server may know the key. An earlier call may have broken off after it had registered it.
    """

    door: Door
    key: Path
    known: bool

    def asked(self) -> Place:
        """Recognise the server, and ask what it gives.

        Raises:
            RecipeError: the server refuses the token.
            TransportError: the server does not answer, or is another one.
        """
        self.door.recognise()
        return self.door.ask(PrivateKey(self.key).fingerprint if self.known else "")

    def register(self) -> None:
        """Register the key, which is made unless it exists.

        Raises:
            RecipeError, TransportError: see `asked`.
        """
        key, earlier, self.known = key_at(self.key), self.known, True
        try:
            self.door.register(key)
        except RecipeError:  # the server does not take a key that it has never heard of
            self.known = earlier
            raise


@contextmanager
def newcomer(token: JoinToken, key: Path) -> Iterator[Newcomer]:
    """Join in the `with` block. If no server can know the key at its end, the folder of the key is deleted.

    Args:
        token: that of the server.
        key: the file of the key, in a folder in which everything is prepared.
    """
    made = Newcomer(Door(token), key, key.exists())
    try:
        yield made
    finally:
        if not made.known:
            shutil.rmtree(key.parent, ignore_errors=True)


def key_at(path: Path, like: Path | None = None) -> PrivateKey:
    """Return the key in a file, which is made here and never leaves.

    Args:
        like: a file with the owner and group that the key gets, as far as this user may give them.
    """
    if not path.exists():
        made = ec.generate_private_key(ec.SECP384R1()).private_bytes(
            Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()
        )
        draft = path.with_name(f"{path.name}.draft")
        draft.unlink(missing_ok=True)
        number = without_links(str(draft), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(number, "wb") as file:
            file.write(made)
            if like is not None:
                facts = like.stat()
                with suppress(PermissionError):
                    os.fchown(number, facts.st_uid, facts.st_gid)
                os.fchmod(number, stat.S_IMODE(facts.st_mode) & 0o640)
        sync(draft)
        draft.rename(path)
        sync(path.parent)
    return PrivateKey(path)
