"""A service's keys: TLS for control calls and metrics, X25519 for blocks, each bound to the service's role.

`kvferry certs FOLDER` makes a folder for each role, which is all that the role's machines need:

    FOLDER/ca/       ca.pem, ca.key                    needed again only to renew certificates
    FOLDER/router/   ca.pem, tls.pem, tls.key
    FOLDER/prefill/  ca.pem, tls.pem, tls.key, curve.key, prefill.pub, decode.pub
    FOLDER/decode/   ca.pem, tls.pem, tls.key, curve.key, prefill.pub, decode.pub
    FOLDER/metrics/  ca.pem, tls.pem, tls.key        who reads workers' metrics: Prometheus, health checks

A worker's certificate is for servers only, and those of the router and of metrics are for clients only, so a
stolen worker's key cannot call anybody. That of metrics opens workers' metrics and no control call. Peers are
known by their role's name, not by their address: all workers of a role share a key.
`tools/certs.py` makes them.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc
from cryptography import x509
from zmq.utils import z85

from kvferry.shared.errors import ConfigurationError

Role = Literal["router", "prefill", "decode", "metrics"]
ROLES: tuple[Role, ...] = ("router", "prefill", "decode", "metrics")
CLIENT_ROLES: tuple[Role, ...] = ("router", "metrics")
"""The roles whose certificates are for clients; the others' are for servers."""
METRICS_READERS: tuple[Role, ...] = ("router", "metrics")
PEERS: dict[str, Role] = {"prefill": "decode", "decode": "prefill"}
"""The role that may send blocks to a worker, and to which it sends."""

_MAX_FILE_BYTES = 1 << 20
_KEY_BYTES = 32


def tls_name(role: Role) -> str:
    """Return the name in a role's certificate."""
    return f"{role}.kvferry.internal"


@dataclass(frozen=True, kw_only=True)
class BlockKeys:
    """A worker's keys for blocks.

    Attributes:
        secret: its role's, 32 bytes.
        peer_role: the role that it exchanges blocks with.
        peer_public: the public key of that role, 32 bytes.
    """

    role: Role
    secret: bytes = field(repr=False)
    peer_role: Role
    peer_public: bytes


class Certs:
    """The files of one role."""

    def __init__(self, folder: str, role: Role) -> None:
        """Args: folder: of the role, or with a folder for each role.

        Raises: ConfigurationError where a file is missing.
        """
        self.role: Role = role
        of_role = Path(folder) / role
        self._folder = of_role if of_role.is_dir() else Path(folder)
        self._authority, self._chain, self._key = (self._read(f) for f in ("ca.pem", "tls.pem", "tls.key"))

    @classmethod
    def of(cls, folder: str, role: Role) -> Certs | None:
        """Find a role's certificates; None where the folder is "": there are none."""
        return cls(folder, role) if folder else None

    @property
    def expires_at_s(self) -> float:
        """Unix time at which the role's certificate ends.

        Raises: ConfigurationError: tls.pem has no certificate.
        """
        try:
            return x509.load_pem_x509_certificate(self._chain).not_valid_after_utc.timestamp()
        except ValueError as error:
            raise ConfigurationError(
                f"certs has no certificate in {str(self._folder / 'tls.pem')!r}: {error}"
            ) from None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Make a worker's credentials; clients must have a certificate too."""
        pair = [(self._key, self._chain)]
        return grpc.ssl_server_credentials(pair, self._authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Make the router's credentials."""
        return grpc.ssl_channel_credentials(self._authority, self._key, self._chain)

    def server_context(self) -> ssl.SSLContext:
        """Make the context of a worker's HTTP server; clients must have a certificate too."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Make the context of a client of workers' HTTP servers. Roles' names are not addresses, so any
        server known to the authority is accepted; only workers' certificates are for servers."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(cadata=self._authority.decode())
            context.load_cert_chain(self._folder / "tls.pem", self._folder / "tls.key")
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"certs has no usable TLS files in {str(self._folder)!r}: {error}"
            ) from None
        return context

    def block_keys(self) -> BlockKeys:
        """Read a worker's keys for blocks.

        Raises: ConfigurationError where a file is missing or is not a key.
        """
        peer = PEERS[self.role]
        secret, public = (self._read_key(name) for name in ("curve.key", f"{peer}.pub"))
        return BlockKeys(role=self.role, secret=secret, peer_role=peer, peer_public=public)

    def _read_key(self, name: str) -> bytes:
        try:
            key: bytes = z85.decode(self._read(name).strip())
        except ValueError:
            key = b""
        if len(key) != _KEY_BYTES:
            raise ConfigurationError(
                f"certs has no key in {str(self._folder / name)!r}; it must be 40 characters of Z85"
            )
        return key

    def _read(self, name: str) -> bytes:
        path = self._folder / name
        try:
            with path.open("rb") as file:
                return file.read(_MAX_FILE_BYTES)
        except OSError as error:
            raise ConfigurationError(
                f"certs has no readable {str(path)!r}: {error.strerror}; kvferry certs makes it"
            ) from None
