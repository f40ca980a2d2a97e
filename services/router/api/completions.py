"""POST /v1/chat/completions and /v1/completions: a completion's events as one JSON object, or as a stream of
server-sent events.

Cancels the completion where the client leaves. The first event chooses the status: an error before any text
is an ordinary error answer, for streams as well, unless a keep-alive had to be sent first. Errors are raised;
`http/middleware.py` makes answers of them.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPBearer
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvferry.services.router.api import answers
from kvferry.services.router.completion.batch import CompletionBatch
from kvferry.services.router.completion.chain import ResponseChain
from kvferry.services.router.completion.choice import Choice, ChoiceDelta, TokenLogprob, ToolCallDelta
from kvferry.services.router.completion.completion import Completion, CompletionEnd, CompletionEvent
from kvferry.services.router.completion.requests import ChatRequest
from kvferry.services.router.completion.services import Services
from kvferry.services.router.completion.texts import TextRequest
from kvferry.services.router.completion.translation import Names
from kvferry.services.router.http.body import KeyedRoute
from kvferry.services.router.http.errors import ErrorBody, describe, error_body
from kvferry.services.router.http.middleware import RequestRecord
from kvferry.services.router.sessions.record import session_key
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import Cancelled, InvalidRequest, KvferryError, ModelNotFound
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.process.silence import SilenceTimer

SESSION_HEADER = "X-Kvferry-Session-ID"
"""Programs have an `X-Session-ID` of their own, which several of their conversations share."""
ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "error"}}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}
"""That a route's answer is a stream of events where the request says so."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_SAME_NAMES = Names()
_MAX_CHOICES = 128
"""Of a request with several prompts."""
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b"\n"
"""Between two events. Some readers strip every piece, and take a comment for the next event's beginning."""


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Shared = Annotated[Services, Depends(_services)]


def keyed_router(errors: dict[int | str, dict[str, Any]] = ERRORS) -> APIRouter:
    """Return a router of routes that need a key."""
    described = Depends(HTTPBearer(auto_error=False, scheme_name="key"))
    return APIRouter(
        redirect_slashes=False, route_class=KeyedRoute, dependencies=[described], responses=errors
    )


def named_model(services: Services, name: str | None) -> ModelSpec:
    """Return the model that is served. Raises: ModelNotFound if `name` is neither its name nor an alias."""
    model = services.runner.model()
    if name not in (None, model.name) and name not in services.config.model_names:
        raise ModelNotFound(
            f"There is no model {describe(name)}; this server has {describe(model.name)}", param="model"
        )
    return model


router = keyed_router()


@router.post(
    "/v1/chat/completions",
    response_model=answers.ChatCompletion,
    responses=STREAMED,
    summary="Answer a conversation, streamed or not",
)
async def chat(request: Request, services: Shared, body: ChatRequest) -> Response:
    return _complete(request, services, body)


@router.post(
    "/v1/completions",
    response_model=answers.TextCompletion,
    responses=STREAMED,
    summary="Continue a text, streamed or not",
)
async def text(request: Request, services: Shared, body: TextRequest) -> Response:
    return _complete(request, services, body)


def _complete(request: Request, services: Services, body: ChatRequest | TextRequest) -> Response:
    return OpenAiResponse(begin(request, services, body, session_of(request, body)), request)


def begin(
    request: Request,
    services: Services,
    body: ChatRequest | TextRequest,
    session: SessionKey | None,
    *,
    names: Names = _SAME_NAMES,
    chain: ResponseChain | None = None,
) -> Completion | CompletionBatch:
    """Start the completion of a request, and have the answer name the fields that change nothing.

    Args: names: what the client calls the request's fields; chain: of a response that is stored.
    """
    model = named_model(services, body.model)
    record: RequestRecord = request.state.record
    record.fields |= {"stream": bool(body.stream), "session": session is not None}
    parts = [
        Completion(
            services=services,
            request=part,
            model=model,
            owner=request.state.owner,
            work=request.state.work,
            session=session,
            request_id=record.request_id,
            arrival_s=record.arrival_s,
            first_index=first_index,
            chain=chain,
        )
        for first_index, part in _parts(body, session)
    ]
    completion: Completion | CompletionBatch = parts[0]
    if len(parts) > 1:
        assert isinstance(body, TextRequest), "chats have one prompt"
        completion = CompletionBatch(body, parts)
    completion.start()
    record.ignored.update(map(names.name, services.prompts.ignored_fields(body)))
    return completion


def _parts(
    body: ChatRequest | TextRequest, session: SessionKey | None
) -> list[tuple[int, ChatRequest | TextRequest]]:
    """Return a request for each prompt, with the number of its first choice."""
    if isinstance(body, ChatRequest) or len(body.prompts) == 1:
        return [(0, body)]
    n, prompts = body.n or 1, body.prompts
    if session is not None:
        raise InvalidRequest(
            f"prompt has {len(prompts)} prompts; with a session it must have one", param="prompt"
        )
    if len(prompts) * n > _MAX_CHOICES:
        raise InvalidRequest(
            f"prompt has {len(prompts)} prompts with {n} choices each; there may be {_MAX_CHOICES} choices",
            param="prompt",
        )
    return [(n * index, body.model_copy(update={"prompt": prompt})) for index, prompt in enumerate(prompts)]


def session_of(request: Request, body: ChatRequest | TextRequest) -> SessionKey | None:
    """Return the session that a request names, in its body or a header."""
    owner, header = request.state.owner, request.headers.get(SESSION_HEADER)
    if body.session_id is not None:
        key = SessionKey(owner=owner, session_id=body.session_id)
    elif header is not None:
        key = session_key(owner, header, param=SESSION_HEADER)
    else:
        return None
    n, alternatives = body.n or 1, body.num_prompt_alternatives
    for is_wrong, param, value, allowed in (
        (body.salt, "cache_salt" if body.cache_salt else "extra_key", "given", "absent"),
        (n > 1, "n", n, 1),
        (isinstance(body, TextRequest) and body.echo, "echo", "true", "false"),
        (alternatives is not None, "prompt_logprobs", alternatives, "absent"),
    ):
        if is_wrong:
            raise InvalidRequest(f"{param} is {value}; with a session it must be {allowed}", param=param)
    return key


class CompletionResponse(Response):
    """Sends a completion's events, whole or as a stream. What a client is sent is decided by each API's own
    class.

    Args: names: what the client calls the fields of the completion's request.
    """

    def __init__(
        self, completion: Completion | CompletionBatch, request: Request, names: Names = _SAME_NAMES
    ) -> None:
        super().__init__()
        self.completion = completion
        self._record: RequestRecord = request.state.record
        self._keepalive_s: float = request.app.state.services.config.keepalive_s
        self._told = names.told

    def whole(self, deltas: list[ChoiceDelta], end: CompletionEnd) -> dict[str, Any]:
        raise NotImplementedError

    def piece(self, event: CompletionEvent) -> bytes:
        """Return what an event adds to the stream."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_stream = self.completion.request.stream
        respond = self._send_stream(send) if is_stream else self._send_object(scope, receive, send)
        try:
            await _while_connected(receive, respond)
        finally:
            self.completion.cancel()
            self._note()

    async def _send_object(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas: list[ChoiceDelta] = []
        while not isinstance(event := await self.completion.events.get(), dict):
            if isinstance(event, KvferryError):
                raise self._told(event)
            if event is not None:
                deltas.append(event)
        await JSONResponse(self.whole(deltas, event))(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        events = self.completion.events
        # Where nothing comes for a while, the stream sends an empty line.
        with SilenceTimer(self._keepalive_s, lambda: events.put_nowait(None)) as timer:
            event = await self._next_event(timer)
            if isinstance(event, KvferryError):
                raise self._told(event)
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS.copy()})
            goes_on, pieces = True, list[bytes]()
            while goes_on:
                if isinstance(event, KvferryError):
                    event = self._told(event)
                    self._record.fail(event)
                goes_on = event is None or isinstance(event, ChoiceDelta)
                pieces.append(_KEEP_ALIVE if event is None else self.piece(event))
                if goes_on and not events.empty():
                    event = events.get_nowait()  # events that have come together are sent together
                    continue
                # The framework's wrappers look only at an answer's head.
                await self._record.send(
                    {"type": "http.response.body", "body": b"".join(pieces), "more_body": goes_on}
                )
                pieces.clear()
                if goes_on:
                    event = await self._next_event(timer)

    async def _next_event(self, timer: SilenceTimer) -> CompletionEvent | None:
        """Return the next event, or None after a silent `keepalive_s`."""
        timer.begin()
        event = await self.completion.events.get()
        timer.end()
        return event

    def _note(self) -> None:
        completion, fields = self.completion, self._record.fields
        fields["prompt_tokens"] = completion.num_prompt_tokens
        fields["completion_tokens"] = completion.num_completion_tokens
        if completion.timer.first_token_s is not None:
            fields["ttft_ms"] = round(completion.timer.first_token_s * 1000, 3)
        if completion.choices:
            fields["kv"] = completion.kv()
            fields["replays"] = sum(choice.turn.stats.replays for choice in completion.choices)


class OpenAiResponse(CompletionResponse):
    """Of chat and text completions."""

    def __init__(self, completion: Completion | CompletionBatch, request: Request) -> None:
        super().__init__(completion, request)
        self._request = completion.request
        self._is_chat = isinstance(completion.request, ChatRequest)
        kind = "chat.completion.chunk" if self._request.stream else "chat.completion"
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": completion.model.name,
            "system_fingerprint": f"kvferry-{completion.model.fingerprint[:16]}",
        }
        self._chunk_head = b"data: " + _ENCODE(self._head)[:-1]
        """With the head as JSON, without the closing brace: every chunk begins so."""
        self._begun: set[int] = set()
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        """By choice, what comes before and after the text in a chunk that has nothing else."""
        self._num_ended = 0

    def whole(self, deltas: list[ChoiceDelta], end: CompletionEnd) -> dict[str, Any]:
        entries: dict[int, list[TokenLogprob]] = {}
        for delta in deltas:
            entries.setdefault(delta.index, []).extend(delta.logprobs or ())
        choices = []
        extras: dict[str, Any] = {}
        for choice in self.completion.choices:
            content: dict[str, Any] = {"text": choice.text}
            if self._is_chat:
                content = {"message": self._message(choice)}
            if self._request.return_token_ids:
                content["token_ids"] = choice.turn.stats.token_ids
            # Chats have one prompt, whose fields are given once.
            (extras if self._is_chat else content).update(self._of_prompt(choice))
            logprobs = None if self._request.num_alternatives is None else entries.get(choice.index, [])
            choices.append(self._choice(choice.index, content, logprobs, choice.finish_reason))
        return {**self._head, "choices": choices, **extras, **end}

    def _message(self, choice: Choice) -> answers.AssistantMessage:
        message = answers.AssistantMessage(role="assistant", content=choice.content, refusal=None)
        if choice.calls:
            message["tool_calls"] = choice.calls
            message["content"] = choice.content or None
        if choice.reasoning and self._request.include_reasoning is not False:
            message["reasoning_content"] = choice.reasoning
        return message

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """Return what the request wants to know about the choice's prompt."""
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = choice.turn.request.prompt_token_ids
        if self._request.prompt_logprobs is not None:
            assert choice.prompt_tokens is not None, "it comes before the choice's end"
            fields["prompt_logprobs"] = choice.prompt_tokens.by_id
        return fields

    def _choice(
        self,
        index: int,
        content: dict[str, Any],
        entries: Sequence[TokenLogprob] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        """Return a choice of a whole answer, or what a chunk adds to it."""
        logprobs = None
        if entries is not None:
            shown = answers.chat_logprobs if self._is_chat else answers.text_logprobs
            logprobs = shown(entries)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def piece(self, event: CompletionEvent) -> bytes:
        if isinstance(event, KvferryError):
            return server_event(error_body(event))
        if isinstance(event, dict):
            # The last choice got its `kv` before the turn's storing failed.
            last: Mapping[str, Any] = event if self._request.includes_usage else {"kv": event["kv"]}
            return (self._chunk([], **last) if "usage" in last or "session" in event["kv"] else b"") + _DONE
        around = self._around_text.get(event.index)
        if around is not None and _is_text_alone(event):
            return around[0] + _ENCODE(event.text) + around[1]
        head = b""
        extras: dict[str, Any] = {}
        is_first = event.index not in self._begun
        self._begun.add(event.index)
        if is_first and self._is_chat:
            role = {"delta": {"role": "assistant", "content": "", "refusal": None}}
            head = self._chunk([self._choice(event.index, role)])
        content: dict[str, Any] = {"delta": self._delta(event)} if self._is_chat else {"text": event.text}
        if self._request.return_token_ids:
            content["token_ids"] = event.token_ids
            if is_first:
                of_prompt = self._of_prompt(self.completion.choice(event.index))
                (extras if self._is_chat else content).update(of_prompt)
        self._num_ended += event.finish_reason is not None
        if self._num_ended == self.completion.num_choices and not self._request.includes_usage:
            extras["kv"] = self.completion.kv()
        choice = self._choice(event.index, content, event.logprobs, event.finish_reason)
        chunk = self._chunk([choice], **extras)
        if not (self._request.return_token_ids or self._request.includes_usage or extras):
            text = _ENCODE(event.text)
            if _is_text_alone(event) and chunk.count(text) == 1:
                before, _, after = chunk.partition(text)
                self._around_text[event.index] = before, after
        return head + chunk

    def _delta(self, event: ChoiceDelta) -> dict[str, Any]:
        """Return what a chunk adds to a chat's answer."""
        delta: dict[str, Any] = {}
        if event.reasoning:
            delta["reasoning_content"] = event.reasoning
        if event.calls:
            delta["tool_calls"] = [_call_delta(added) for added in event.calls]
        if event.text or (event.finish_reason is None and not delta):
            delta["content"] = event.text
        return delta

    def _chunk(self, choices: list[dict[str, Any]], **extras: Any) -> bytes:
        usage: dict[str, Any] = {}
        if (options := self._request.stream_options) is not None and options.include_usage:
            usage["usage"] = self.completion.usage() if options.continuous_usage_stats else None
        rest = _ENCODE({"choices": choices, **usage, **extras})
        return b"%b,%b\n\n" % (self._chunk_head, rest[1:])


def _call_delta(added: ToolCallDelta) -> dict[str, Any]:
    """Return what a chunk adds to a call. A call's first chunk has the id and the name."""
    if not added.begins:
        return {"index": added.index, "function": {"arguments": added.arguments}}
    function = {**added.call["function"], "arguments": added.arguments}
    return {"index": added.index, **added.call, "function": function}


def _is_text_alone(event: ChoiceDelta) -> bool:
    has_more = event.reasoning or event.calls or event.finish_reason is not None
    return bool(event.text) and event.logprobs is None and not has_more


_ENCODE = msgspec.json.Encoder().encode


def server_event(data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event; JSON escapes line ends, so it is always one line."""
    return b"data: " + _ENCODE(data) + b"\n\n"


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or the client leaves. Raises: Cancelled where the client left first."""
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
