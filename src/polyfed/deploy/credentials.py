"""Certificates and node keys for development: one authority, one server certificate, one key a node.

For trying out on one machine or in a laboratory. In production the certificates come from whoever runs the server's
domain, and each node's key is made on the node and never leaves it.
"""

import ipaddress
from collections.abc import Sequence
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
)
from cryptography.x509.oid import NameOID

from polyfed.core.errors import RecipeError

SERVER = ("ca.pem", "server.pem", "server.key")
"""The authority and the server's certificate, which belong together."""

DAYS = 30
"""A development certificate is valid for so long: short, since nobody will remember to revoke it (inferred)."""


def write_credentials(folder: str | Path, nodes: int, hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> Path:
    """Write `ca.pem`, `server.pem`, `server.key`, and `node-<k>.key` with `node-<k>.pub` for every node.

    What is there stays, since it may be in use: only what is missing is added.

    Args:
        folder: made if it is not there; keys are readable by their owner only.
        nodes: how many node keys.
        hosts: names and addresses under which the server is reached.

    Returns:
        the folder.

    Raises:
        RecipeError: `nodes` is negative, or the server's certificate that is there is not whole or has expired.
    """
    folder = Path(folder)
    if nodes < 0:
        raise RecipeError(f"{nodes} node keys; give a number from 0 (--keys)")
    folder.mkdir(parents=True, exist_ok=True)
    there = [name for name in SERVER if (folder / name).exists()]
    if not there:
        _write_server(folder, hosts)
    else:
        _check_server(folder, there)
    for node in range(nodes):
        if not (folder / f"node-{node}.key").exists():
            _write_node(folder, node)
    return folder


def _write_server(folder: Path, hosts: Sequence[str]) -> None:
    authority, ca = _authority()
    key, certificate = _server(authority, ca, hosts)
    (folder / "ca.pem").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    _secret(folder / "server.key", key, PrivateFormat.PKCS8)


def _check_server(folder: Path, there: Sequence[str]) -> None:
    """Refuse a server's certificate that cannot be used any more; the authority's key was not kept, so none can be
    added."""
    fix = f"Move {', '.join(SERVER)} elsewhere and run this again; every device then needs the new ca.pem"
    if missing := [name for name in SERVER if name not in there]:
        raise RecipeError(f"{folder} holds {', '.join(there)}, but no {', '.join(missing)}. {fix}")
    until = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes()).not_valid_after_utc
    if until < datetime.now(UTC):
        raise RecipeError(f"{folder}/server.pem expired on {until:%Y-%m-%d}. {fix}")


def _write_node(folder: Path, node: int) -> None:
    # Flower 1.41 takes elliptic curve keys of NIST in OpenSSH's format
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
    draft = _draft(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    draft = draft.add_extension(use, critical=True)
    draft = draft.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return key, draft.sign(key, hashes.SHA256())


def _server(
    authority: ec.EllipticCurvePrivateKey, ca: x509.Certificate, hosts: Sequence[str], days: int = DAYS
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    known = x509.SubjectAlternativeName([_host(host) for host in hosts])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    draft = _draft(_name(hosts[0]), ca.subject, key, days)
    draft = draft.add_extension(known, critical=False).add_extension(issuer, critical=False)
    draft = draft.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    return key, draft.sign(authority, hashes.SHA256())


def _draft(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = DAYS
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    start = min(now, now + timedelta(days=days)) - timedelta(hours=1)  # clocks differ
    draft = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    draft = draft.serial_number(x509.random_serial_number())
    return draft.not_valid_before(start).not_valid_after(now + timedelta(days=days))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _secret(path: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
