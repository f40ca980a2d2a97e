"""A completion's events as an HTTP answer: one JSON object, or a stream of server-sent events.

Cancels the completion where the client leaves. The first event chooses the status: an error before any text
is an ordinary error answer, for streams as well, unless a keep-alive had to be sent first.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvferry.services.router.api.responses import Envelope, choice_object, role_choice
from kvferry.services.router.completion.choice import TokenLogprob
from kvferry.services.router.completion.completion import Completion, CompletionEnd, CompletionEvent
from kvferry.services.router.http.errors import error_body
from kvferry.services.router.http.middleware import RequestRecord
from kvferry.shared.errors import Cancelled, KvferryError

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"


class CompletionResponse(Response):
    """Sends a completion's events, in the way that its request asks for.

    Args:
        record: the request's log line, which gets the completion's numbers.
        keepalive_s: a stream that is silent for this long sends a comment.
    """

    def __init__(
        self, completion: Completion, envelope: Envelope, *, record: RequestRecord, keepalive_s: float
    ) -> None:
        super().__init__()
        self._completion = completion
        self._envelope = envelope
        self._request = completion.request
        self._record = record
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._send_stream(send) if self._request.stream else self._send_object(scope, receive, send)
        try:
            await _while_connected(receive, respond)
        finally:
            self._completion.cancel()
            self._note()

    # ---- one object --------------------------------------------------------------------------------------

    async def _send_object(self, scope: Scope, receive: Receive, send: Send) -> None:
        entries: dict[int, list[TokenLogprob]] = {}
        while not isinstance(event := await self._completion.events.get(), CompletionEnd):
            if isinstance(event, KvferryError):
                raise event
            entries.setdefault(event.index, []).extend(event.logprobs or ())
        with_logprobs = self._request.num_alternatives is not None
        choices = [
            choice_object(
                self._envelope.endpoint,
                choice.index,
                choice.text,
                entries.get(choice.index, []) if with_logprobs else None,
                choice.turn.finish_reason,
                chunk=False,
            )
            for choice in self._completion.choices
        ]
        answer = {
            **self._envelope.object(chunk=False),
            "choices": choices,
            "usage": event.usage,
            "kv": event.kv,
        }
        await JSONResponse(answer)(scope, receive, send)

    # ---- a stream ----------------------------------------------------------------------------------------

    async def _send_stream(self, send: Send) -> None:
        first = await self._next_event()
        if isinstance(first, KvferryError):
            raise first
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
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
        endpoint, wants_usage = self._envelope.endpoint, self._request.includes_usage
        begun: set[int] = set()
        num_ended = 0
        event = first
        while True:
            if event is None:
                yield _KEEP_ALIVE
            elif isinstance(event, KvferryError):
                self._record.fail(event)
                yield _event(error_body(event))
                return
            elif isinstance(event, CompletionEnd):
                if wants_usage:
                    yield self._chunk([], usage=event.usage, kv=event.kv)
                yield _DONE
                return
            else:
                if event.index not in begun:
                    begun.add(event.index)
                    if endpoint == "chat":
                        yield self._chunk([role_choice(event.index)])
                num_ended += event.finish_reason is not None
                is_last = num_ended == len(self._completion.choices)
                choice = choice_object(
                    endpoint, event.index, event.text, event.logprobs, event.finish_reason, chunk=True
                )
                yield self._chunk(
                    [choice], **({"kv": self._completion.kv()} if is_last and not wants_usage else {})
                )
            event = await self._next_event()

    def _chunk(self, choices: list[dict[str, Any]], **extras: Any) -> bytes:
        chunk = {**self._envelope.object(chunk=True), "choices": choices}
        if self._request.includes_usage:
            chunk["usage"] = None
        return _event({**chunk, **extras})

    def _note(self) -> None:
        completion, fields = self._completion, self._record.fields
        fields["prompt_tokens"] = completion.num_prompt_tokens
        fields["completion_tokens"] = completion.num_completion_tokens
        if completion.timer.first_token_s is not None:
            fields["ttft_ms"] = round(completion.timer.first_token_s * 1000, 3)
        if completion.choices:
            fields["kv"] = completion.kv()
            fields["replays"] = sum(choice.turn.stats.replays for choice in completion.choices)


def _event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event; JSON escapes line ends, so it is always one line."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


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
