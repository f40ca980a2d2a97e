"""Routes of the API: the caller's key is checked, then the body is read as strict JSON.

FastAPI does the rest: it reads the parsed body into the route's typed fields.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.responses import Response

from kvferry.services.router.http.errors import describe
from kvferry.shared.errors import AuthenticationFailed, InvalidRequest


class Authenticator:
    """Checks `Authorization: Bearer KEY`. A caller is known to the rest of the system by a digest of the key.

    Without configured keys anyone may call, but sessions still belong to the key that was sent.
    """

    def __init__(self, api_keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in api_keys)

    def owner(self, headers: Headers) -> str:
        """The digest that identifies the caller.

        Raises: AuthenticationFailed where keys are configured and the request has none of them.
        """
        scheme, _, key = headers.get("authorization", "").strip().partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        digest = _digest(key)
        if not self._digests:
            return digest
        if not key:
            raise AuthenticationFailed("No API key was given; send it as 'Authorization: Bearer KEY'")
        # Every key is compared, in constant time, so that timing reveals nothing about any of them.
        if not any([hmac.compare_digest(digest, accepted) for accepted in self._digests]):
            raise AuthenticationFailed("The API key is not one that this server accepts")
        return digest


def api_route(auth: Authenticator) -> type[APIRoute]:
    """The class of routes that need a key; `request.state.owner` is the caller."""

    class ApiRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle = super().get_route_handler()

            async def checked(request: Request) -> Response:
                request.state.owner = auth.owner(request.headers)
                if request.method == "POST":
                    request = _JsonRequest(request, parse_body(await request.body()))
                return await handle(request)

            return checked

    return ApiRoute


def parse_body(body: bytes) -> dict[str, Any]:
    """A request's JSON object: UTF-8, no NaN or Infinity, no lone surrogates, bounded depth and digits.

    Raises: InvalidRequest where the bytes are not UTF-8, not JSON, or not an object.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        data = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise InvalidRequest(f"The body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"The body must be a JSON object; it is {describe(data)}")
    return data


class _JsonRequest(Request):
    """A request whose body has been parsed. It is JSON, whatever its Content-Type says."""

    def __init__(self, request: Request, data: dict[str, Any]) -> None:
        headers = [header for header in request.scope["headers"] if header[0] != b"content-type"]
        scope = {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}
        super().__init__(scope, request.receive)
        self._data = data

    async def body(self) -> bytes:
        return b"{}"  # FastAPI only asks whether there is one

    async def json(self) -> dict[str, Any]:
        return self._data


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
