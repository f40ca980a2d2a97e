"""The response object of OpenAI's Responses API, and its events: an answer's parts as output items."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from kvferry.services.router.api.answers import chat_logprobs
from kvferry.services.router.api.completions import CompletionResponse
from kvferry.services.router.api.parts import AnswerParts, Part, PartStep, named_event, parts_of
from kvferry.services.router.completion.batch import CompletionBatch
from kvferry.services.router.completion.chain import SESSION_PREFIX, ResponseChain
from kvferry.services.router.completion.choice import CalledFunction, Choice, ChoiceDelta, Usage
from kvferry.services.router.completion.completion import Completion, CompletionEnd, CompletionEvent
from kvferry.services.router.completion.compression import KvReport
from kvferry.services.router.completion.responses import ResponseRequest, TextFormat
from kvferry.services.router.completion.translation import Names
from kvferry.services.router.http.body import known_fields
from kvferry.services.router.http.errors import error_code
from kvferry.shared.errors import KvferryError

_INDEX_DIGITS = 4
"""Of an item's id."""


def head_of(body: ResponseRequest, response_id: str) -> dict[str, Any]:
    """Return the response object before its answer."""
    form = body.text.format if body.text is not None else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning is not None else None,
            "summary": None,
        },
        "service_tier": "default",
        "store": body.is_stored,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": _format(form)},
        "tool_choice": known_fields(body.tool_choice) or "auto",
        "tools": [_tool(tool) for tool in known_fields(body.tools or [])],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": (body.model_extra or {}).get("truncation") or "disabled",
        "usage": None,
        "user": None,
    }


def _format(form: TextFormat | None) -> dict[str, Any]:
    if form is None or form.type != "json_schema":
        return {"type": form.type if form is not None else "text"}
    schema: dict[str, Any] = known_fields(form)
    return schema


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}


def ended(
    head: dict[str, Any],
    items: OutputItems,
    deltas: list[ChoiceDelta],
    choice: Choice,
    usage: Usage,
    kv: KvReport,
) -> dict[str, Any]:
    """Return the response object with its answer."""
    complete = choice.finish_reason in ("stop", "tool_calls")
    status = "completed" if complete else "incomplete"
    reason = "max_output_tokens" if choice.finish_reason == "length" else None
    return {
        **head,
        "status": status,
        "completed_at": int(time.time()) if complete else None,
        "incomplete_details": None if reason is None else {"reason": reason},
        "output": [items.item(part) for part in parts_of(deltas)],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        },
        "kv": kv,
    }


@dataclass(frozen=True, kw_only=True)
class OutputItems:
    """The parts of one response's answer as output items.

    Attributes: namespaced: namespace and name of functions that the model knows by another name.
    """

    response_id: str
    namespaced: Mapping[str, tuple[str, str]]

    def id(self, part: Part) -> str:
        kind = {"reasoning": "rs", "text": "msg", "call": "fc"}[part.kind]
        return f"{kind}_{self.response_id.removeprefix(SESSION_PREFIX)}{part.index:0{_INDEX_DIGITS}x}"

    def item(self, part: Part, *, begins: bool = False) -> dict[str, Any]:
        """Return a part as an output item. Args: begins: as in the stream's first event of the item."""
        status = "in_progress" if begins else "completed" if part.is_complete else "incomplete"
        item: dict[str, Any] = {"id": self.id(part), "status": status}
        if part.call is not None:
            called = self.called(part.call["function"], is_empty=begins)
            return {"type": "function_call", **item, "call_id": part.call["id"], **called}
        content = [] if begins else [_content(part)]
        if part.kind == "reasoning":
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def called(self, function: CalledFunction, *, is_empty: bool = False) -> dict[str, Any]:
        """Return a called function by the client's name of it."""
        space, name = self.namespaced.get(function["name"], (None, function["name"]))
        named = {"name": name} if space is None else {"namespace": space, "name": name}
        return {**named, "arguments": "" if is_empty else function["arguments"]}


def response_of_item(item_id: str) -> str:
    return SESSION_PREFIX + item_id.partition("_")[2][:-_INDEX_DIGITS]


def _content(part: Part, *, is_empty: bool = False) -> dict[str, Any]:
    """Return the only content of thoughts or of a message."""
    text = "" if is_empty else part.text
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    logprobs = [] if is_empty else chat_logprobs(part.logprobs)["content"]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ResponsesAnswer(CompletionResponse):
    """Of the Responses API.

    Args:
        head: the response object before its answer.
        items: its output items.
    """

    def __init__(
        self,
        completion: Completion | CompletionBatch,
        request: Request,
        names: Names,
        *,
        head: dict[str, Any],
        items: OutputItems,
        chain: ResponseChain,
    ) -> None:
        super().__init__(completion, request, names)
        self._head = head
        self._items = items
        self._chain = chain
        self._parts = AnswerParts()
        self._deltas: list[ChoiceDelta] = []
        self._num_events = 0

    def whole(self, deltas: list[ChoiceDelta], end: CompletionEnd) -> dict[str, Any]:
        # A stored response's body was made when it was stored.
        choice = self.completion.choices[0]
        return self._chain.body or ended(self._head, self._items, deltas, choice, end["usage"], end["kv"])

    def piece(self, event: CompletionEvent) -> bytes:
        events = [] if self._num_events else [self._event("created"), self._event("in_progress")]
        if isinstance(event, KvferryError):
            error = {"code": error_code(event) or "server_error", "message": event.message}
            failed = {**self._head, "status": "failed", "error": error}
            events.append(self._event("failed", response=failed))
        elif isinstance(event, dict):
            response = self.whole(self._deltas, event)
            events.append(self._event(response["status"], response=response))
        else:
            self._deltas.append(event)
            for step in self._parts.steps(event):
                events += self._step(step)
        return b"".join(events)

    def _step(self, step: PartStep) -> Iterator[bytes]:
        part = step.part
        where: dict[str, Any] = {"item_id": self._items.id(part), "output_index": part.index}
        if step.kind == "begin":
            item = self._items.item(part, begins=True)
            yield self._event("output_item.added", output_index=part.index, item=item)
        if part.call is None:
            yield from self._text_step(step, {**where, "content_index": 0})
        elif step.kind == "add":
            yield self._event("function_call_arguments.delta", **where, delta=step.added)
        elif step.kind == "end":
            yield self._event(
                "function_call_arguments.done", **where, **self._items.called(part.call["function"])
            )
        if step.kind == "end":
            item = self._items.item(part)
            yield self._event("output_item.done", output_index=part.index, item=item)

    def _text_step(self, step: PartStep, where: dict[str, Any]) -> Iterator[bytes]:
        part = step.part
        is_text = part.kind == "text"
        name = "output_text" if is_text else "reasoning_text"
        if step.kind == "begin":
            yield self._event("content_part.added", **where, part=_content(part, is_empty=True))
            return
        entries = step.logprobs if step.kind == "add" else part.logprobs
        more = {"logprobs": chat_logprobs(entries)["content"]} if is_text else {}
        if step.kind == "add":
            yield self._event(f"{name}.delta", **where, delta=step.added, **more)
        else:
            yield self._event(f"{name}.done", **where, text=part.text, **more)
            yield self._event("content_part.done", **where, part=_content(part))

    def _event(self, name: str, /, **fields: Any) -> bytes:
        if not fields:
            fields = {"response": self._head}
        self._num_events += 1
        return named_event({"type": f"response.{name}", "sequence_number": self._num_events - 1, **fields})
