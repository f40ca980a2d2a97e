"""A proxy that has a random model call a tool as a trained one would: it demands one call of the first
request with tools, says what the call is, and has other answers end after some letters."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvtest.waiting import until

SAID = "ferry-was-here"
_COMMAND = f"echo {SAID}"
_APIS = ("completions", "responses", "messages")
_ANSWER = {"regex": "[a-z ]{8,24}"}


@dataclass
class Exchange:
    """A request that was answered, as it came, and its answer's text."""

    path: str
    body: dict[str, Any]
    status: int = 0
    text: str = ""

    @property
    def has_result(self) -> bool:
        """Whether the request has what a called tool returned."""
        return _has_result(self.body)

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt whose KV was reused: in the answer's `kv`, which streams always have, and in
        the API's own field, where it is."""
        (reused,) = set(re.findall(r'"reused_tokens": ?(\d+)', self.text))
        own = re.findall(r'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)', self.text)
        assert {*own[-1:]} <= {reused}
        return int(reused)


class DemandingProxy:
    """Between a program and a server.

    Attributes: exchanges: those that have ended, in order.
    """

    def __init__(self, base_url: str) -> None:
        self._client = httpx.AsyncClient(base_url=base_url, timeout=300)
        self.exchanges: list[Exchange] = []
        routes = [Route("/{path:path}", self._handle, methods=["GET", "POST", "HEAD"])]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield

    async def _handle(self, request: Request) -> Response:
        data = await request.body()
        headers = {
            name: value
            for name, value in request.headers.items()
            if name not in ("host", "content-length", "accept-encoding", "connection")
        }
        exchange = Exchange(request.url.path, json.loads(data) if data else {})
        if exchange.body:
            data = json.dumps(_demanding(exchange.path, exchange.body)).encode()
        sent = self._client.build_request(
            request.method, exchange.path, params=request.url.query, headers=headers, content=data
        )
        answer = await self._client.send(sent, stream=True)
        exchange.status = answer.status_code

        async def pieces() -> AsyncIterator[bytes]:
            async for piece in answer.aiter_raw():
                exchange.text += piece.decode(errors="replace")
                yield piece
            self.exchanges.append(exchange)

        kept = {"content-type": answer.headers.get("content-type", "")}
        return StreamingResponse(pieces(), status_code=answer.status_code, headers=kept)


@contextmanager
def demanding(base_url: str, socket: Path) -> Iterator[DemandingProxy]:
    """Serve a proxy at a Unix socket until the block ends."""
    proxy = DemandingProxy(base_url)
    server = uvicorn.Server(uvicorn.Config(proxy.app, uds=str(socket), log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        yield proxy
    finally:
        server.should_exit = True
        thread.join()


def _has_result(body: dict[str, Any]) -> bool:
    given = [
        *body.get("messages", ()),
        *(entry for entry in body.get("input", ()) if isinstance(entry, dict)),
    ]
    parts = [part for entry in given for part in (entry.get("content") or ()) if isinstance(part, dict)]
    return any(
        entry.get("role") == "tool" or entry.get("type") in ("function_call_output", "tool_result")
        for entry in (*given, *parts)
    )


def _demanding(path: str, body: dict[str, Any]) -> dict[str, Any]:
    body = json.loads(json.dumps(body))
    api = path.rstrip("/").rpartition("/")[2]
    if api not in _APIS:
        return body
    name = _narrow(body.get("tools") or [])
    if name is not None and not _has_result(body):
        named = {"type": "function", "function": {"name": name}}
        named = {
            "responses": {"type": "function", "name": name},
            "messages": {"type": "tool", "name": name},
        }.get(api, named)
        body["tool_choice"] = named
    else:
        body["structured_outputs"] = _ANSWER
    return body


def _narrow(tools: list[dict[str, Any]]) -> str | None:
    """Leave one call of a tool that runs commands, or else of the first one; return its name."""
    found = []
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") or function.get("input_schema")
        if tool.get("type", "function") in ("function", "custom") and isinstance(schema, dict):
            names = [name for name in ("cmd", "command") if name in schema.get("properties", {})]
            found.append((not names, len(found), function["name"], schema, names))
    if not found:
        return None
    _, _, name, schema, commands = min(found)
    properties = schema.get("properties", {})
    given = {field: _value(field, properties[field]) for field in {*commands, *schema.get("required", ())}}
    schema.clear()
    schema.update(
        type="object",
        properties={field: {"const": value} for field, value in given.items()},
        required=list(given),
        additionalProperties=False,
    )
    return str(name)


def _value(name: str, schema: dict[str, Any]) -> Any:
    kind = schema.get("type")
    if name in ("cmd", "command"):
        return ["bash", "-lc", _COMMAND] if kind == "array" else _COMMAND
    return {"number": 1, "integer": 1, "boolean": False, "array": [], "object": {}}.get(str(kind), "x")
