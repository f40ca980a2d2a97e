"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the completion that chats
use."""

from __future__ import annotations

import json
import uuid
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from kvferry.services.router.api.answers import AnthropicMessage, TokensCount
from kvferry.services.router.api.completions import (
    STREAMED,
    CompletionResponse,
    Shared,
    begin,
    keyed_router,
    named_model,
    session_of,
)
from kvferry.services.router.api.parts import AnswerParts, Part, PartStep, named_event, parts_of
from kvferry.services.router.completion.batch import CompletionBatch
from kvferry.services.router.completion.choice import Choice, ChoiceDelta
from kvferry.services.router.completion.completion import Completion, CompletionEnd, CompletionEvent
from kvferry.services.router.completion.documents import first_prompt
from kvferry.services.router.completion.messages import CountTokensRequest, MessagesRequest, translate
from kvferry.services.router.completion.translation import Names
from kvferry.services.router.http.errors import MessagesErrorBody, messages_error_body
from kvferry.shared.errors import InvalidRequest, KvferryError

router: APIRouter = keyed_router({"default": {"model": MessagesErrorBody, "description": "error"}})

_KINDS = {"reasoning": "thinking", "text": "text", "call": "tool_use"}


@router.post(
    "/v1/messages",
    response_model=AnthropicMessage,
    responses=STREAMED,
    summary="Answer as Anthropic's Messages API does",
)
async def create_message(request: Request, services: Shared, body: MessagesRequest) -> Response:
    # thousands of blocks take tens of milliseconds
    chat, names = await request.state.work(partial(translate, body))
    completion = begin(request, services, chat, session_of(request, chat), names=names)
    return MessagesAnswer(completion, request, names)


@router.post("/v1/messages/count_tokens", summary="Count the tokens of a prompt")
async def count_tokens(request: Request, services: Shared, body: CountTokensRequest) -> TokensCount:
    # thousands of blocks take tens of milliseconds
    chat, names = await request.state.work(partial(translate, body))
    model = named_model(services, body.model)
    try:
        prompt = await first_prompt(services, request.state.owner, request.state.work, chat, model)
    except InvalidRequest as error:
        raise names.told(error) from None
    return {"input_tokens": len(prompt.token_ids)}


class MessagesAnswer(CompletionResponse):
    """Of the Messages API."""

    def __init__(self, completion: Completion | CompletionBatch, request: Request, names: Names) -> None:
        super().__init__(completion, request, names)
        self._parts = AnswerParts()
        self._has_begun = False
        self._head: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": completion.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def whole(self, deltas: list[ChoiceDelta], end: CompletionEnd) -> dict[str, Any]:
        choice = self.completion.choices[0]
        content = [_block(part) for part in parts_of(deltas)]
        return {**self._head, "content": content, **_stop(choice), "usage": self._usage(), "kv": end["kv"]}

    def piece(self, event: CompletionEvent) -> bytes:
        if isinstance(event, KvferryError):
            return named_event(messages_error_body(event))
        if isinstance(event, dict):
            delta = {"type": "message_delta", "delta": _stop(self.completion.choices[0])}
            return named_event({**delta, "usage": self._usage(), "kv": event["kv"]}) + named_event(
                {"type": "message_stop"}
            )
        begun = b""
        if not self._has_begun:
            self._has_begun = True
            begun = named_event({"type": "message_start", "message": {**self._head, "usage": self._usage()}})
        return begun + b"".join([named_event(_block_event(step)) for step in self._parts.steps(event)])

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far. Anthropic's `input_tokens` are those that were not cached."""
        usage = self.completion.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }


def _stop(choice: Choice) -> dict[str, Any]:
    """Return why an answer ended."""
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons.get(choice.finish_reason or "")
    if reason == "end_turn" and choice.stop_string is not None:
        reason = "stop_sequence"
    sequence = choice.stop_string if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": sequence}


def _block(part: Part, *, is_empty: bool = False) -> dict[str, Any]:
    """Return a part as a content block. Args: is_empty: as a stream begins it."""
    kind = {"type": _KINDS[part.kind]}
    if part.call is not None:
        shown = {} if is_empty else _input(part.call["function"]["arguments"])
        name = part.call["function"]["name"]
        return {**kind, "id": part.call["id"], "name": name, "input": shown}
    text = "" if is_empty else part.text
    if part.kind == "reasoning":
        return {**kind, "thinking": text, "signature": ""}
    return {**kind, "text": text, "citations": None}


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; if cut off, with what is complete, as in the client's own."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        found = arguments
    return found if isinstance(found, dict) else {"arguments": found}


def _block_event(step: PartStep) -> dict[str, Any]:
    part = step.part
    if step.kind == "begin":
        block = _block(part, is_empty=True)
        return {"type": "content_block_start", "index": part.index, "content_block": block}
    if step.kind == "end":
        return {"type": "content_block_stop", "index": part.index}
    if part.call is None:
        name = "thinking" if part.kind == "reasoning" else "text"
        added = {"type": f"{name}_delta", name: step.added}
    else:
        # Arguments that are not an object are sent at once.
        is_object = part.call["function"]["arguments"].startswith("{")
        shown = step.added if is_object else json.dumps(_input(step.added))
        added = {"type": "input_json_delta", "partial_json": shown}
    return {"type": "content_block_delta", "index": part.index, "delta": added}
