"""A service's keys: TLS for control calls and CURVE for blocks, each bound to the service's role.

`kvferry certs FOLDER` makes a folder for each role, which is all that the role's machines need:

    FOLDER/ca/       ca.pem, ca.key                    needed again only to renew certificates
    FOLDER/router/   ca.pem, tls.pem, tls.key
    FOLDER/prefill/  ca.pem, tls.pem, tls.key, curve.key, prefill.pub, decode.pub
    FOLDER/decode/   ca.pem, tls.pem, tls.key, curve.key, prefill.pub, decode.pub

A worker's certificate is for servers only and the router's for clients only, so a stolen worker's key cannot
call anybody. Peers are known by their role's name, not by their address: all workers of a role share a key.
`tools/certs.py` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc
from cryptography import x509

from kvferry.shared.errors import ConfigurationError

Role = Literal["router", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("router", "prefill", "decode")
PEERS: dict[str, Role] = {"prefill": "decode", "decode": "prefill"}
"""Who may send blocks to a worker, and to whom it sends."""

_MAX_FILE_BYTES = 1 << 20


def tls_name(role: Role) -> str:
    """The name in a role's certificate."""
    return f"{role}.kvferry.internal"


@dataclass(frozen=True, kw_only=True)
class CurveKeys:
    """A worker's keys for blocks, Z85.

    Attributes: peer: the public key of the role that it exchanges blocks with.
    """

    public: bytes
    secret: bytes
    peer: bytes


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
        """Of a worker; clients must have a certificate too."""
        pair = [(self._key, self._chain)]
        return grpc.ssl_server_credentials(pair, self._authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Of the router."""
        return grpc.ssl_channel_credentials(self._authority, self._key, self._chain)

    def curve_keys(self) -> CurveKeys:
        """Of a worker."""
        public, secret, peer = (
            self._read(name).strip() for name in (f"{self.role}.pub", "curve.key", f"{PEERS[self.role]}.pub")
        )
        return CurveKeys(public=public, secret=secret, peer=peer)

    def _read(self, name: str) -> bytes:
        path = self._folder / name
        try:
            with path.open("rb") as file:
                return file.read(_MAX_FILE_BYTES)
        except OSError as error:
            raise ConfigurationError(
                f"certs has no readable {str(path)!r}: {error.strerror}; kvferry certs makes it"
            ) from None
