"""Makes the keys of all roles; `shared/trust/certs.py` lists the files and who needs them."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import zmq
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvferry.shared.errors import ConfigurationError
from kvferry.shared.trust.certs import CLIENT_ROLES, PEERS, ROLES, Role, tls_name

_AUTHORITY_DAYS = 3650


def make_certs(folder: Path, *, days: int, everything: bool) -> None:
    """Make what is missing, and renew the TLS certificates. Services that run on the old certificates and
    services that run on the new ones trust each other.

    Args:
        days: how long the certificates are valid.
        everything: replace the authority and the keys for blocks, too; all services must then be restarted.

    Raises: ConfigurationError where a file cannot be written, or the authority's key is not there.
    """
    try:
        if everything or not (folder / "ca" / "ca.pem").exists():
            _make_authority(folder / "ca")
            _make_curve_keys(folder)
        for role in ROLES:
            _make_certificate(folder, role, days)
    except OSError as error:
        raise ConfigurationError(f"certs cannot be made in {str(folder)!r}: {error}") from None


def certs(folder: str, *, days: int = 365, everything: bool = False) -> int:
    """Make or renew the keys with which services know each other.

    Args:
        folder: gets a folder for each role, and the authority's.
        days: how long the certificates are valid.
        everything: replace also the authority and the keys for blocks; restart all services then.
    """
    make_certs(Path(folder), days=days, everything=everything)
    services = ", ".join(role for role in ROLES if role != "metrics")
    sys.stdout.write(
        f"{folder}: give {services} the folder of their name, as --certs; metrics is for who reads workers' "
        "metrics, ca renews them\n"
    )
    return 0


def _make_authority(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvferry authority")])
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        _builder(key.public_key(), subject=name, issuer=name, days=_AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder / "ca.key", _private_bytes(key), secret=True)
    _write(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))


def _make_certificate(folder: Path, role: Role, days: int) -> None:
    authority_pem = (folder / "ca" / "ca.pem").read_bytes()
    authority = x509.load_pem_x509_certificate(authority_pem)
    signing_key = serialization.load_pem_private_key((folder / "ca" / "ca.key").read_bytes(), None)
    assert isinstance(signing_key, ec.EllipticCurvePrivateKey), "the authority's key is of this module"
    key = ec.generate_private_key(ec.SECP256R1())
    purpose = ExtendedKeyUsageOID.CLIENT_AUTH if role in CLIENT_ROLES else ExtendedKeyUsageOID.SERVER_AUTH
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, tls_name(role))])
    certificate = (
        _builder(key.public_key(), subject=subject, issuer=authority.subject, days=days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(tls_name(role))]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
        .sign(signing_key, hashes.SHA256())
    )
    _write(folder / role / "tls.key", _private_bytes(key), secret=True)
    _write(folder / role / "tls.pem", certificate.public_bytes(serialization.Encoding.PEM))
    _write(folder / role / "ca.pem", authority_pem)


def _make_curve_keys(folder: Path) -> None:
    public: dict[str, bytes] = {}
    for role in PEERS:
        public[role], secret = zmq.curve_keypair()
        _write(folder / role / "curve.key", secret, secret=True)
    for role in PEERS:
        for other, key in public.items():
            _write(folder / role / f"{other}.pub", key)


def _builder(
    key: ec.EllipticCurvePublicKey, *, subject: x509.Name, issuer: x509.Name, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Other machines' clocks may be behind.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, *, secret: bool = False) -> None:
    """Write a file so that it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(partial, path)
