"""Certificates for a server, and keys of devices for trials.

The authority's private key (`ca.key`) signs the server's certificates, one after another, so that devices keep their
`ca.pem`. Whoever has this key can act as the server. An operator may keep it elsewhere and put it back to renew. The
device keys from this module are for trials on one machine. In a real federation, each device makes its own key, and the
private key never leaves the device.
"""

import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from polyfed.core.errors import RecipeError, command
from polyfed.core.system.files import replace_text
from polyfed.core.system.log_lines import logger_of
from polyfed.transport.connection import WARNED_DAYS

SERVER = ("ca.pem", "server.pem", "server.key")
"""The authority's certificate, the server's certificate and the server's key. They belong together."""

AUTHORITY_KEY = "ca.key"
"""The authority's private key, which renews the server's certificate if it is in the folder."""

DAYS, AUTHORITY_DAYS = 30, 3650
"""Days for which a certificate of a server, and one of an authority, is valid. The first time is short, because such
certificates are rarely revoked (inferred)."""

CLOCKS = timedelta(days=1)
"""By how much a device's clock may be behind the server's: a certificate is valid from so long before it is written."""

RENEWED_DAYS = 10
"""Days before the end of a server's certificate from which it is renewed."""


LOOPBACK = ("127.0.0.1", "localhost")
"""Names in every server certificate, under which commands on the server's machine reach the server."""

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"

_NAME = re.compile(rf"(?=.{{1,253}}$)(?:{_LABEL}\.)*(?![0-9]+$){_LABEL}")
"""Names of machines. The last part is no number, or resolvers would take 127.1 or 1.2.3.999 for an address."""

_LONGEST_SUBJECT = 64
"""Most characters of a subject's common name (RFC 5280, ub-common-name). TLS reads the alternative names instead."""


def write_credentials(folder: str | Path, nodes: int, hosts: Sequence[str] = ()) -> Path:
    """Write `ca.pem`, `server.pem`, `server.key`, and `node-<k>.key` with `node-<k>.pub` for every device.

    This function keeps existing files, because they may be in use, and adds only missing files.

    Args:
        folder: the folder, which is made if it does not exist. Only the owner can read the keys.
        nodes: number of device keys. Use 0 if each device makes its own key.
        hosts: names and addresses under which devices reach the server, in addition to those of the loopback interface.

    Returns:
        The folder.

    Raises:
        RecipeError: `nodes` is negative, or a host is neither a name nor an address. This function also raises the
            error if the folder has a server certificate that is incomplete, has expired, or lacks one of the hosts.
    """
    folder = Path(folder)
    if nodes < 0:
        raise RecipeError(f"{nodes} node keys; give a number from 0 (--keys)")
    for host in hosts:
        _host(host)
    folder.mkdir(parents=True, exist_ok=True)
    there = [name for name in SERVER if (folder / name).exists()]
    if not there:
        _write_server(folder, list(dict.fromkeys([*hosts, *LOOPBACK])))
    else:
        check_server(folder, there, hosts)
    for node in range(nodes):
        if not (folder / f"node-{node}.key").exists():
            _write_node(folder, node)
    return folder


def _write_server(folder: Path, hosts: Sequence[str]) -> None:
    authority, ca = _authority()
    key, certificate = _server(authority, ca, hosts)
    _secret(folder / AUTHORITY_KEY, authority, PrivateFormat.PKCS8)
    (folder / "ca.pem").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    _secret(folder / "server.key", key, PrivateFormat.PKCS8)


def check_server(folder: Path, there: Sequence[str], hosts: Sequence[str] = ()) -> None:
    """Refuse an invalid server certificate.

    Args:
        folder: folder of the credentials.
        there: the files of `SERVER` that exist in the folder.
        hosts: names and addresses that the certificate must be valid for.

    Raises:
        RecipeError: a file is missing, or the certificate has expired or is not valid for one of `hosts`.
    """
    fix = f"Move {', '.join(SERVER)} elsewhere and run this again; every device then needs the new ca.pem"
    if not there:
        raise RecipeError(
            f"{folder} holds no {', '.join(SERVER)}. Write them: {command('server', 'init', folder, '--host', 'NAME')}"
        )
    if missing := [name for name in SERVER if name not in there]:
        raise RecipeError(f"{folder} holds {', '.join(there)}, but no {', '.join(missing)}. {fix}")
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    until = certificate.not_valid_after_utc
    if until < datetime.now(UTC):
        raise RecipeError(f"{folder}/server.pem expired on {until:%Y-%m-%d}. {fix}")
    if lacking := [host for host in hosts if _host(host) not in _names_in(certificate)]:
        add = command("server", "host", folder, *lacking)
        raise RecipeError(f"{folder}/server.pem is not for {', '.join(lacking)}. Add it; devices keep theirs: {add}")


def renewed(folder: Path) -> datetime | None:
    """Renew the server's certificate if it ends soon and the authority's key is there. Return the new end, or None.

    The server keeps its key and its names, so that one file is replaced as a whole, and devices keep their `ca.pem`. A
    connection with the old certificate goes on until it ends.

    Raises:
        RecipeError: a file is damaged, or `ca.key` is not the key of `ca.pem`.
    """
    if not all((folder / name).is_file() for name in (*SERVER, AUTHORITY_KEY)) or days_left(folder) > RENEWED_DAYS:
        return None
    try:
        return _resigned(folder, ())
    except RecipeError as error:
        raise RecipeError(
            f"{folder}/server.pem ends soon and cannot be renewed: {error}. Restore it from a copy, or move "
            f"{', '.join((*SERVER, AUTHORITY_KEY))} elsewhere and write new ones, and give every device the new ca.pem"
        ) from None


def add_hosts(folder: Path, hosts: Sequence[str]) -> list[str]:
    """Make the server's certificate valid for further names, and return those that are new.

    The authority and the server's key stay, so that devices, their tokens and a running server go on.

    Raises:
        RecipeError: a host is neither a name nor an address, a file is missing or damaged, or `ca.key` is elsewhere.
    """
    for host in hosts:
        _host(host)
    check_server(folder, [name for name in SERVER if (folder / name).exists()])
    if not (folder / AUTHORITY_KEY).is_file():
        raise RecipeError(
            f"{folder / AUTHORITY_KEY} is not there, and only this key of the authority signs another name. Put it "
            "back for this command"
        )
    known = _names_in(x509.load_pem_x509_certificate((folder / "server.pem").read_bytes()))
    new = [host for host in dict.fromkeys(hosts) if _host(host) not in known]
    if new:
        try:
            _resigned(folder, new)
        except RecipeError as error:
            raise RecipeError(f"{folder}/server.pem cannot be signed again: {error}. Restore it from a copy") from None
    return new


def _names_in(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def _resigned(folder: Path, hosts: Sequence[str]) -> datetime:
    """Write a new certificate for the server's key, with its names and these. Return its end.

    Raises:
        RecipeError: a file is damaged, or `ca.key` is not the key of `ca.pem`.
    """
    try:
        authority, key = (
            load_pem_private_key((folder / name).read_bytes(), None) for name in (AUTHORITY_KEY, "server.key")
        )
        ca, old = (x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("ca.pem", "server.pem"))
        if authority.public_key() != ca.public_key():
            raise ValueError(f"{AUTHORITY_KEY} is not the key of ca.pem")
        assert isinstance(authority, ec.EllipticCurvePrivateKey), "the key of a certificate that polyfed signed"
        assert isinstance(key, ec.EllipticCurvePrivateKey), "likewise"
        known = x509.SubjectAlternativeName([*_names_in(old), *map(_host, hosts)])
        new = _certificate(authority, ca, key, old.subject, known, DAYS)
    except (ValueError, TypeError) as error:
        raise RecipeError(str(error)) from None
    replace_text(folder / "server.pem", new.public_bytes(Encoding.PEM).decode())
    return new.not_valid_after_utc


def days_left(folder: Path) -> float:
    """Return the number of days until the server's certificate ends; negative if it has ended.

    Raises:
        RecipeError: the certificate cannot be read.
    """
    try:
        certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    except (ValueError, OSError) as error:
        raise RecipeError(f"{folder}/server.pem cannot be read: {error}. Restore it from a copy") from None
    return (certificate.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def care_for_certificate(credentials: Path) -> None:
    """Renew the server's certificate before it ends, or warn in the log that it ends soon."""
    logger = logger_of("hub", "stderr")
    try:
        if until := renewed(credentials):
            logger.info("the server's certificate is renewed and valid until %s", f"{until:%Y-%m-%d %H:%M} UTC")
        elif (credentials / "server.pem").is_file() and 0 < (left := days_left(credentials)) <= WARNED_DAYS:
            text = (
                "the server's certificate ends in %.1f days, and then no device connects: polyfed docs deploy-reference"
            )
            logger.warning(text, left)
    except (RecipeError, OSError) as error:
        logger.warning("%s", error)


def _write_node(folder: Path, node: int) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    _secret(folder / f"node-{node}.key", key, PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (folder / f"node-{node}.pub").write_bytes(public)


def _authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("polyfed development authority")
    use = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    draft = _draft(name, name, key, AUTHORITY_DAYS).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    draft = draft.add_extension(use, critical=True)
    draft = draft.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return key, draft.sign(key, hashes.SHA256())


def _server(
    authority: ec.EllipticCurvePrivateKey, ca: x509.Certificate, hosts: Sequence[str], days: int = DAYS
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    known = x509.SubjectAlternativeName([_host(host) for host in hosts])
    subject = next((host for host in hosts if len(host) <= _LONGEST_SUBJECT), LOOPBACK[0])
    return key, _certificate(authority, ca, key, _name(subject), known, days)


def _certificate(
    authority: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    known: x509.SubjectAlternativeName,
    days: int,
) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    draft = _draft(subject, ca.subject, key, days)
    draft = draft.add_extension(known, critical=False).add_extension(issuer, critical=False)
    draft = draft.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    return draft.sign(authority, hashes.SHA256())


def _draft(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = DAYS
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    start = min(now, now + timedelta(days=days)) - CLOCKS
    draft = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    draft = draft.serial_number(x509.random_serial_number())
    return draft.not_valid_before(start).not_valid_after(now + timedelta(days=days))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    """Return what a certificate says for a name or an address.

    Raises:
        RecipeError: it is neither. A zone (`fe80::1%eth0`) is of one machine, and no certificate holds it.
    """
    with suppress(ValueError):
        address = ipaddress.ip_address(text)
        if "%" not in text and not address.is_unspecified:
            return x509.IPAddress(address)
    if not _NAME.fullmatch(text):
        raise RecipeError(
            f"'{text}' is neither a name nor an address under which devices reach a server; as server.example.org"
        )
    return x509.DNSName(text)


def _secret(path: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
