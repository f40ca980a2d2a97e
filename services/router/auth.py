"""API keys: who may ask, and whose sessions are meant.

A caller is known to the rest of the system by a digest of the key, never by the key. Does not know routes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers

from kvferry.shared.errors import AuthenticationFailed


class Authenticator:
    """Checks `Authorization: Bearer KEY`.

    Without configured keys anyone may ask, but sessions still belong to whatever key was sent.
    """

    def __init__(self, api_keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in api_keys)

    def owner(self, headers: Headers) -> str:
        """The digest that names the caller.

        Raises: AuthenticationFailed where keys are configured and the request carries none of them.
        """
        key = _bearer_key(headers.get("authorization", ""))
        digest = _digest(key)
        if not self._digests:
            return digest
        if not key:
            raise AuthenticationFailed("No API key was given; send it as 'Authorization: Bearer KEY'")
        # Every key is compared, in constant time, so that timing tells nothing about any of them.
        if not any([hmac.compare_digest(digest, accepted) for accepted in self._digests]):
            raise AuthenticationFailed("The API key is not one that this server accepts")
        return digest


def _bearer_key(value: str) -> str:
    scheme, _, key = value.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
