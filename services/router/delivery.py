"""A completion's events as an HTTP answer: one JSON object, or a stream of chunks.

Ends the completion where the client leaves. The status is chosen by the first event: an error before any text
is an ordinary error answer, also for streams, unless a keep-alive had to go out first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvferry.services.router import sse
from kvferry.services.router.choice import ChoiceDelta
from kvferry.services.router.completion import Completion, CompletionEnd, CompletionEvent
from kvferry.services.router.edge import RequestRecord
from kvferry.services.router.errors import error_body
from kvferry.services.router.responses import (
    Envelope,
    TokenLogprob,
    choice_object,
    chunk_choice,
    completion_object,
    role_choice,
)
from kvferry.shared.errors import Cancelled, KvferryError


class CompletionResponse(Response):
    """Sends what a completion yields.

    Args:
        stream: whether as server-sent events.
        include_usage: whether a stream ends with a usage chunk.
        record: the request's log line, told what happened.
        keepalive_s: a stream that is silent for so long sends a comment.
    """

    def __init__(
        self,
        completion: Completion,
        envelope: Envelope,
        *,
        stream: bool,
        include_usage: bool,
        with_logprobs: bool,
        record: RequestRecord,
        keepalive_s: float,
    ) -> None:
        super().__init__()
        self._completion = completion
        self._envelope = envelope
        self._stream = stream
        self._include_usage = include_usage
        self._with_logprobs = with_logprobs
        self._record = record
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._send_stream(send) if self._stream else self._send_object(scope, receive, send)
        try:
            await _while_connected(receive, respond)
        finally:
            self._completion.cancel()
            self._note()

    # ---- one object --------------------------------------------------------------------------------------

    async def _send_object(self, scope: Scope, receive: Receive, send: Send) -> None:
        entries: dict[int, list[TokenLogprob]] = {}
        while True:
            event = await self._completion.events.get()
            if isinstance(event, KvferryError):
                raise event
            if isinstance(event, CompletionEnd):
                break
            entries.setdefault(event.index, []).extend(event.logprobs or ())
        endpoint = self._envelope.endpoint
        choices = [
            choice_object(
                endpoint,
                choice.index,
                choice.text,
                entries.get(choice.index, []) if self._with_logprobs else None,
                choice.finish_reason or "stop",
            )
            for choice in self._completion.choices
        ]
        await JSONResponse(completion_object(self._envelope, choices, event.usage, event.kv))(
            scope, receive, send
        )

    # ---- a stream ----------------------------------------------------------------------------------------

    async def _send_stream(self, send: Send) -> None:
        first = await self._next_event()
        if isinstance(first, KvferryError):
            raise first
        headers = [(name.encode(), value.encode()) for name, value in sse.HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(self._chunks(first)) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next_event(self) -> CompletionEvent | None:
        """The next event, or None after a silent `keepalive_s`."""
        try:
            async with asyncio.timeout(self._keepalive_s):
                return await self._completion.events.get()
        except TimeoutError:
            return None

    async def _chunks(self, first: CompletionEvent | None) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        num_ended = 0
        event = first
        while True:
            if event is None:
                yield sse.KEEP_ALIVE
            elif isinstance(event, KvferryError):
                self._record.fail(event)
                yield sse.event(error_body(event))
                return
            elif isinstance(event, CompletionEnd):
                if self._include_usage:
                    yield self._chunk([], usage=event.usage, kv=event.kv)
                yield sse.DONE
                return
            else:
                if event.index not in begun:
                    begun.add(event.index)
                    if self._envelope.endpoint == "chat":
                        yield self._chunk([role_choice(event.index)])
                num_ended += event.finish_reason is not None
                last = num_ended == len(self._completion.choices)
                kv = self._completion.kv() if last and not self._include_usage else None
                yield self._delta(event, kv)
            event = await self._next_event()

    def _delta(self, delta: ChoiceDelta, kv: dict[str, Any] | None) -> bytes:
        choice = chunk_choice(
            self._envelope.endpoint, delta.index, delta.text, delta.logprobs, delta.finish_reason
        )
        return self._chunk([choice], kv=kv)

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        *,
        usage: dict[str, Any] | None = None,
        kv: dict[str, Any] | None = None,
    ) -> bytes:
        chunk = {**self._envelope.object(chunk=True), "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage
        if kv is not None:
            chunk["kv"] = kv
        return sse.event(chunk)

    def _note(self) -> None:
        completion = self._completion
        fields = self._record.fields
        fields["prompt_tokens"] = completion.num_prompt_tokens
        fields["completion_tokens"] = completion.num_completion_tokens
        if completion.timer.first_token_s is not None:
            fields["ttft_ms"] = round(completion.timer.first_token_s * 1000, 3)
        if completion.choices:
            fields["kv"] = completion.kv()
            fields["replays"] = sum(choice.stats.replays for choice in completion.choices)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or the client leaves.

    Raises: Cancelled where the client left first.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("The client left before its answer was complete")
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
