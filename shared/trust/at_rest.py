"""Encryption of what is stored in Redis and on disk: AES-256-GCM, with a key for each owner.

    at_rest_keys file ──► master keys ──HKDF(owner)──► the owner's key ──► sealed value
                          the first one seals, all of them open

A sealed value is a header and a ciphertext with its tag. The header is little-endian:

    offset  size
    0       4     magic "KVFe"
    4       2     version
    6       2     0
    8       16    label: of a record its fencing token, of a value the id of what it belongs to, or zeros
    24      8     id of the master key
    32      12    nonce, random
    44      16+n  ciphertext and tag

The tag covers the header and a context (what the value is, and whose), so that a value in another's place
does not open. It does not prove that a value is the newest one.
"""

from __future__ import annotations

import base64
import binascii
import functools
import os
import struct
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvferry.shared.errors import ConfigurationError

LABEL_BYTES = 16
LABEL_OFFSET = 8
MASTER_KEY_BYTES = 32
_MAGIC, _VERSION = b"KVFe", 1
_HEADER = struct.Struct("<4sHH16s8s12s")
_KEY_ID_BYTES, _NONCE_BYTES, _TAG_BYTES = 8, 12, 16
SEALED_BYTES = _HEADER.size + _TAG_BYTES
"""How much longer a sealed value is."""

_MAX_FILE_BYTES = 64 << 10
_MAX_OWNERS = 4096

Bytes = bytes | bytearray | memoryview


class AtRestKeys:
    """Master keys, and the keys derived from them. Thread-safe.

    Args:
        masters: the first one seals.
    """

    def __init__(self, masters: tuple[bytes, ...]) -> None:
        assert masters, "there is at least one key"
        assert all(len(master) == MASTER_KEY_BYTES for master in masters)
        self._masters = {_derive(master, b"id")[:_KEY_ID_BYTES]: master for master in masters}
        self._first = next(iter(self._masters))
        self._cipher: Callable[[bytes, str], AESGCM] = functools.lru_cache(_MAX_OWNERS)(self._make_cipher)

    @classmethod
    def read(cls, path: str) -> AtRestKeys | None:
        """Read the keys of a file: 32 bytes in base64, one a line; None where the path is empty.

        Raises: ConfigurationError, which quotes no key.
        """
        if not path:
            return None
        try:
            with Path(path).open("rb") as file:
                content = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigurationError(f"at_rest_keys {path!r} cannot be read: {error.strerror}") from None
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigurationError(f"at_rest_keys {path!r} is larger than {_MAX_FILE_BYTES} bytes")
        masters = []
        for number, line in enumerate(content.splitlines(), start=1):
            if line.strip() and not line.lstrip().startswith(b"#"):
                masters.append(_decode(line.strip(), f"at_rest_keys {path!r}, line {number},"))
        if not masters:
            raise ConfigurationError(f"at_rest_keys {path!r} has no key; make one: openssl rand -base64 32")
        return cls(tuple(masters))

    def seal(self, owner: str, value: Bytes, *, context: str, label: bytes = bytes(LABEL_BYTES)) -> bytes:
        """Seal a value, so that only `open` with the same owner and context returns it."""
        nonce = os.urandom(_NONCE_BYTES)
        header = _HEADER.pack(_MAGIC, _VERSION, 0, label, self._first, nonce)
        cipher = self._cipher(self._first, owner)
        return header + cipher.encrypt(nonce, bytes(value), header + context.encode())

    def open(self, owner: str, sealed: bytes, *, context: str) -> bytes:
        """Return the value. Raises: Unreadable."""
        if not is_sealed(sealed):
            raise Unreadable("it is not encrypted, and at_rest_keys has keys")
        if len(sealed) < SEALED_BYTES:
            raise Unreadable(f"it has {len(sealed)} bytes, fewer than an encrypted value")
        _, version, zero, _, key_id, nonce = _HEADER.unpack_from(sealed)
        if (version, zero) != (_VERSION, 0):
            raise Unreadable(f"its encryption has version {version}, not {_VERSION}")
        if key_id not in self._masters:
            raise Unreadable(f"it is encrypted with key {key_id.hex()}, which at_rest_keys lacks")
        try:
            body = memoryview(sealed)[_HEADER.size :]
            return self._cipher(key_id, owner).decrypt(nonce, body, sealed[: _HEADER.size] + context.encode())
        except InvalidTag:
            raise Unreadable("it is damaged, or another's: its tag does not match") from None

    def is_of_first_key(self, sealed: bytes) -> bool:
        """Return whether a sealed value has the key that `seal` uses."""
        return bool(_HEADER.unpack_from(sealed)[4] == self._first)

    def _make_cipher(self, key_id: bytes, owner: str) -> AESGCM:
        return AESGCM(_derive(self._masters[key_id], b"owner " + owner.encode()))


class Unreadable(Exception):
    """Why a stored value cannot be decrypted; whoever reads it raises the error of its own kind."""


def is_sealed(value: Bytes) -> bool:
    return bytes(value[: len(_MAGIC)]) == _MAGIC


def open_with(keys: AtRestKeys | None, owner: str, value: bytes, *, context: str) -> bytes:
    """Open a sealed value if there are keys; return the value itself without keys.

    Raises: Unreadable: it was sealed with other keys, or was not sealed although there are keys.
    """
    if keys is not None:
        return keys.open(owner, value, context=context)
    if is_sealed(value):
        raise Unreadable("it is encrypted, and there are no at_rest_keys")
    return value


def _derive(master: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=b"kvferry at rest 1 " + purpose).derive(master)


def _decode(line: bytes, where: str) -> bytes:
    try:
        master = base64.b64decode(line, validate=True)
    except binascii.Error:
        raise ConfigurationError(f"{where} is not base64; make a key: openssl rand -base64 32") from None
    if len(master) != MASTER_KEY_BYTES:
        raise ConfigurationError(f"{where} has {len(master)} bytes; a key has {MASTER_KEY_BYTES}")
    return master
