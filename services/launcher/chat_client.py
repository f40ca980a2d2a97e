"""The chat command's HTTP side: streams one turn of a session over the OpenAI API.

Server-sent events in, text pieces and the turn's figures out. Renders nothing.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from kvferry.services.launcher.config import ChatConfig
from kvferry.shared.errors import InvalidRequest, KvferryError, WorkerUnavailable


@dataclass(frozen=True, kw_only=True)
class TurnStats:
    """What one turn took and moved.

    Attributes:
        full_bytes: what full KV of the whole prompt would be; shipped_bytes: what crossed the wire.
        first_token_s: from sending the request to the first piece of the answer.
    """

    method: str
    prompt_tokens: int
    reused_tokens: int
    full_bytes: int
    shipped_bytes: int
    first_token_s: float

    @property
    def saved_percent(self) -> float:
        return 100 * (1 - self.shipped_bytes / self.full_bytes) if self.full_bytes else 0.0


class ChatTurn:
    """One streamed answer. Read `pieces` to the end, then `stats`."""

    def __init__(self, response: httpx.Response, started_s: float) -> None:
        self._response = response
        self._started_s = started_s
        self._first_token_s = 0.0
        self._kv: dict[str, Any] = {}

    async def pieces(self) -> AsyncIterator[str]:
        """The answer's text as it comes.

        Raises: KvferryError where the stream tells of an error or ends early.
        """
        done = False
        async for line in self._response.aiter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data == "[DONE]":
                done = True
            elif data:
                chunk = json.loads(data)
                if "error" in chunk:
                    raise _error(chunk)
                self._kv = chunk.get("kv") or self._kv
                for choice in chunk["choices"]:
                    if piece := choice["delta"].get("content"):
                        self._first_token_s = self._first_token_s or time.monotonic() - self._started_s
                        yield piece
        if not done:
            raise WorkerUnavailable("the answer ended before it was complete")

    @property
    def stats(self) -> TurnStats:
        return TurnStats(
            method=self._kv["method"],
            prompt_tokens=self._kv["prompt_tokens"],
            reused_tokens=self._kv["reused_tokens"],
            full_bytes=self._kv["full_bytes"],
            shipped_bytes=self._kv["shipped_bytes"],
            first_token_s=self._first_token_s,
        )


class ChatClient:
    """A router's chat API with sessions."""

    def __init__(self, http: httpx.AsyncClient, config: ChatConfig) -> None:
        self._http = http
        self._config = config
        self._model = config.chat_model

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, config: ChatConfig) -> AsyncIterator[Self]:
        """A client with its connections; nothing is sent yet."""
        headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        host = urlsplit(config.url).hostname or ""
        is_local = host in ("localhost", "::1") or host.startswith("127.")
        async with httpx.AsyncClient(
            base_url=config.url,
            headers=headers,
            timeout=config.chat_timeout_s,
            # A proxy of the environment cannot reach this machine's loopback.
            trust_env=not is_local,
        ) as http:
            yield cls(http, config)

    @property
    def url(self) -> str:
        return self._config.url

    async def model(self) -> str:
        """The model that turns ask for: as configured, or the first that the router has."""
        if not self._model:
            with self._transport_errors():
                reply = await self._http.get("/v1/models")
            _check(reply)
            self._model = str(reply.json()["data"][0]["id"])
        return self._model

    @contextlib.asynccontextmanager
    async def turn(
        self, text: str, *, session: str, method: str, token_budget: int
    ) -> AsyncIterator[ChatTurn]:
        """Send a message to a session.

        Args:
            method: compression method, or "" for the router's default; token_budget likewise with 0.
        Raises: KvferryError where the router refuses or cannot be reached.
        """
        body: dict[str, Any] = {
            "model": await self.model(),
            "session_id": session,
            "session_mode": "append",
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": self._config.temperature,
        }
        compression = {"method": method, "token_budget": token_budget}
        if chosen := {name: value for name, value in compression.items() if value}:
            body["kv_compression"] = chosen
        if self._config.max_tokens:
            body["max_tokens"] = self._config.max_tokens
        started_s = time.monotonic()
        with self._transport_errors():
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    await response.aread()
                _check(response)
                yield ChatTurn(response, started_s)

    @contextlib.contextmanager
    def _transport_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"url is {self.url!r}; {error}") from error
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise WorkerUnavailable(f"the router at {self.url} cannot be reached: {what}") from error


def _check(reply: httpx.Response) -> None:
    if not reply.is_error:
        return
    try:
        body = reply.json()
    except ValueError:
        body = {}
    raise _error(body, fallback=f"HTTP status {reply.status_code}")


def _error(body: Any, fallback: str = "the router failed") -> KvferryError:
    message = body.get("error", {}).get("message") if isinstance(body, dict) else None
    return KvferryError(str(message or fallback))
