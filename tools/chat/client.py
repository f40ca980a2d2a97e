"""The chat's HTTP side: streams one turn of a session through the official `openai` client.

Renders nothing and holds no conversation; the router does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    AsyncOpenAI,
    AsyncStream,
    DefaultAsyncHttpxClient,
    Omit,
    omit,
)
from openai.types.chat import ChatCompletionChunk

from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.tools.chat.config import ChatConfig


@dataclass(frozen=True, kw_only=True)
class TurnStats:
    """What one turn took and moved.

    Attributes:
        full_bytes: full KV of the whole prompt; shipped_bytes: what was sent from prefill to decode.
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

    def __init__(self, stream: AsyncStream[ChatCompletionChunk], started_s: float) -> None:
        self._stream = stream
        self._started_s = started_s
        self._first_token_s = 0.0
        self._kv: dict[str, Any] = {}

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the answer's text as it arrives.

        Raises: KvferryError if the router reports an error or the stream ends early.
        """
        async for chunk in self._stream:
            self._kv = (chunk.model_extra or {}).get("kv") or self._kv
            for choice in chunk.choices:
                if piece := choice.delta.content:
                    self._first_token_s = self._first_token_s or time.monotonic() - self._started_s
                    yield piece
        # The router sends these figures last.
        if not self._kv:
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

    def __init__(self, openai: AsyncOpenAI, config: ChatConfig) -> None:
        self._openai = openai
        self._config = config
        self._model = config.chat_model
        # The client insists on a key, but a router separates sessions by the key that is sent.
        self._headers = {} if config.api_key else {"Authorization": Omit()}

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, config: ChatConfig) -> AsyncIterator[Self]:
        """Make a client with its connections; nothing is sent yet."""
        host = urlsplit(config.url).hostname or ""
        is_local = host in ("localhost", "::1") or host.startswith("127.")
        async with AsyncOpenAI(
            base_url=f"{config.url.rstrip('/')}/v1",
            api_key=config.api_key or "none",
            timeout=config.chat_timeout_s,
            # A turn changes the session, so the client must not repeat it.
            max_retries=0,
            # A proxy from the environment cannot reach this machine's loopback.
            http_client=DefaultAsyncHttpxClient(trust_env=not is_local),
        ) as openai:
            yield cls(openai, config)

    @property
    def url(self) -> str:
        return self._config.url

    async def model(self) -> str:
        """Return the model that turns ask for: as configured, or the first that the router serves."""
        if not self._model:
            with self._translated_errors():
                self._model = (await self._openai.models.list(extra_headers=self._headers)).data[0].id
        return self._model

    async def methods(self) -> list[str]:
        """List the compression methods that a turn may ask for."""
        with self._translated_errors():
            reply: Any = await self._openai.get(
                "/methods", cast_to=object, options={"headers": self._headers}
            )
        return [method["id"] for method in reply["data"]]

    @contextlib.asynccontextmanager
    async def turn(
        self, text: str, *, session: str, method: str, token_budget: int
    ) -> AsyncIterator[ChatTurn]:
        """Send a message to a session.

        Args:
            method: compression method, or "" for the router's default; token_budget likewise with 0.
        Raises: KvferryError if the router refuses or cannot be reached.
        """
        extra: dict[str, Any] = {"session_id": session, "session_mode": "append"}
        compression = {"method": method, "token_budget": token_budget}
        if chosen := {name: value for name, value in compression.items() if value}:
            extra["kv_compression"] = chosen
        model = await self.model()
        started_s = time.monotonic()
        with self._translated_errors():
            stream = await self._openai.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": text}],
                stream=True,
                stream_options={"include_usage": True},
                temperature=self._config.temperature,
                max_tokens=self._config.max_tokens or omit,
                extra_headers=self._headers,
                extra_body=extra,
            )
            async with stream:
                yield ChatTurn(stream, started_s)

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Translate the client's exceptions to ours, in the router's words if it sent any."""
        try:
            yield
        except APIConnectionError as error:
            cause = error.__cause__ or error
            what = str(cause) or type(cause).__name__
            raise WorkerUnavailable(f"the router at {self.url} cannot be reached: {what}") from error
        except APIStatusError as error:
            said = error.body.get("message") if isinstance(error.body, dict) else None
            raise KvferryError(str(said or f"HTTP status {error.status_code}")) from error
        except APIError as error:
            raise KvferryError(error.message) from error
