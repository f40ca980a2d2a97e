"""The handshake and the ciphers of sealed connections: Noise_KK_25519_AESGCM_SHA256.

Place in the request's path: under `sealed.py`, once a connection. Both ends know the other's public key
beforehand, so a first message that no owner of the right key has made is refused before anything is answered.
One that is a recording is not: what comes after it must open. Each connection has keys of its own, which the
long-lived keys do not give away later.

Noise Protocol Framework, revision 34 (https://noiseprotocol.org/noise.html): the pattern KK, whose names are
used here.

    initiator  e, es, ss ──48 bytes──►
                         ◄──48 bytes── e, ee, se  responder

Deviation: a sealed record may be longer than 65,535 bytes, and a key is replaced (`REKEY`) after
REKEY_RECORDS records. Pinned in `tests/shared/wire/test_noise.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvferry.shared.errors import TransferFailed

HANDSHAKE_BYTES = 48
"""Of each of the two messages: a public key and the tag of an empty payload."""
TAG_BYTES = 16
REKEY_RECORDS = 1 << 16
_NAME = b"Noise_KK_25519_AESGCM_SHA256"
_KEY_BYTES = 32
_NONCE = struct.Struct(">4xQ")
_LAST_NONCE = _NONCE.pack(2**64 - 1)


class NotAuthentic(TransferFailed):
    """Bytes that the holder of the right key did not send, or not at this place."""

    def __init__(self) -> None:
        super().__init__("a sealed record is not authentic", reason="not_authentic")


class Cipher:
    """Seals or opens the records of one direction. The number of a record is its nonce, so that a record is
    authentic only once and at its place."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0

    def seal(self, plain: memoryview | bytes, sealed: memoryview) -> None:
        """Encrypt into a buffer, which is TAG_BYTES longer and may begin with the plain bytes themselves."""
        nonce = self._next_nonce()  # first, since it may replace the cipher
        self._cipher.encrypt_into(nonce, plain, None, sealed)

    def open(self, sealed: memoryview | bytes, plain: memoryview) -> None:
        """Decrypt into a buffer, which is TAG_BYTES shorter and may be the start of the sealed bytes.

        Raises: NotAuthentic
        """
        nonce = self._next_nonce()
        try:
            self._cipher.decrypt_into(nonce, sealed, None, plain)
        except InvalidTag:
            raise NotAuthentic from None

    def _next_nonce(self) -> bytes:
        if self._number == REKEY_RECORDS:
            self._cipher = AESGCM(self._cipher.encrypt(_LAST_NONCE, bytes(_KEY_BYTES), None)[:_KEY_BYTES])
            self._number = 0
        self._number += 1
        return _NONCE.pack(self._number - 1)


class Handshake:
    """One end's part of it.

    initiator   write() ──► read() ──► split()
    responder   read() ──► write() ──► split()
    """

    def __init__(
        self, *, initiates: bool, own: bytes, peer: bytes, prologue: bytes, ephemeral: bytes | None = None
    ) -> None:
        """
        Args:
            own: this end's private key, 32 bytes.
            peer: the other end's public key, 32 bytes.
            prologue: what both ends must agree on.
            ephemeral: a private key for tests; a random one if None.
        """
        self.initiates = initiates
        self._static = X25519PrivateKey.from_private_bytes(own)
        self._peer = X25519PublicKey.from_public_bytes(peer)
        self._ephemeral = (
            X25519PrivateKey.generate()
            if ephemeral is None
            else X25519PrivateKey.from_private_bytes(ephemeral)
        )
        self._hash = self._chaining_key = _NAME.ljust(hashlib.sha256().digest_size, b"\0")
        self._key = b""
        self._mix_hash(prologue)
        for public in (_public(self._static), peer) if initiates else (peer, _public(self._static)):
            self._mix_hash(public)

    def write(self) -> bytes:
        """This end's message."""
        public = _public(self._ephemeral)
        self._mix_hash(public)
        if self.initiates:
            self._mix_key(self._ephemeral.exchange(self._peer))
            self._mix_key(self._static.exchange(self._peer))
        else:
            self._mix_key(self._ephemeral.exchange(self._peers_ephemeral))
            self._mix_key(self._ephemeral.exchange(self._peer))
        tag = AESGCM(self._key).encrypt(_NONCE.pack(0), b"", self._hash)
        self._mix_hash(tag)
        return public + tag

    def read(self, message: bytes) -> None:
        """The other end's message.

        Raises: NotAuthentic: the other end does not have its key.
        """
        public, tag = message[:_KEY_BYTES], message[_KEY_BYTES:]
        self._peers_ephemeral = X25519PublicKey.from_public_bytes(public)
        self._mix_hash(public)
        try:
            if self.initiates:
                self._mix_key(self._ephemeral.exchange(self._peers_ephemeral))
                self._mix_key(self._static.exchange(self._peers_ephemeral))
            else:
                self._mix_key(self._static.exchange(self._peers_ephemeral))
                self._mix_key(self._static.exchange(self._peer))
            AESGCM(self._key).decrypt(_NONCE.pack(0), tag, self._hash)
        except (InvalidTag, ValueError):  # ValueError: a point of low order
            raise NotAuthentic from None
        self._mix_hash(tag)

    def split(self) -> tuple[Cipher, Cipher]:
        """The ciphers of what this end sends and of what it receives."""
        of_initiator, of_responder = _hkdf(self._chaining_key, b"")
        keys = (of_initiator, of_responder) if self.initiates else (of_responder, of_initiator)
        return Cipher(keys[0]), Cipher(keys[1])

    def _mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _mix_key(self, shared: bytes) -> None:
        self._chaining_key, self._key = _hkdf(self._chaining_key, shared)


def _public(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


def _hkdf(chaining_key: bytes, material: bytes) -> tuple[bytes, bytes]:
    secret = hmac.digest(chaining_key, material, "sha256")
    first = hmac.digest(secret, b"\x01", "sha256")
    return first, hmac.digest(secret, first + b"\x02", "sha256")
