"""POST /v1/responses: its fields, and the chat request that they stand for.

Fields that OpenAI's API has and that this server does nothing for are `Ignored`, or `Unsupported` where a
client would miss their effect; see `other_fields.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, StringConstraints, Tag, field_validator
from pydantic_core import PydanticCustomError

from kvferry.services.router.completion.engine_fields import INT31, ChatFields, EngineFields
from kvferry.services.router.completion.requests import StopString
from kvferry.services.router.completion.structured import StructuredField
from kvferry.services.router.completion.tools import ToolName
from kvferry.services.router.completion.translation import Names, Translation, chat_request, texts_of
from kvferry.services.router.http.body import Ignored, Range, StrictModel, Unsupported
from kvferry.shared.model.tokenizer import ChatMessage

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"tool_choice\.function": "tool_choice",
    "top_logprobs": "top_logprobs",
    "logprobs": "include",
    "messages": "input",
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class InputText(StrictModel):
    """Text in a message or in a function's output."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None


_Texts = str | Annotated[list[InputText], Field(fail_fast=True)]


class InputMessage(StrictModel):
    """A message, of the client or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Texts
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class InputCall(StrictModel):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None
    async_: Annotated[Any, Field(alias="async"), Unsupported(False)] = None
    namespace: Annotated[Any, Unsupported()] = None


class InputCallOutput(StrictModel):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Texts
    id: Ignored = None
    name: Ignored = None
    status: Ignored = None
    caller: Ignored = None
    namespace: Annotated[Any, Unsupported()] = None


class InputReasoning(StrictModel):
    """Thoughts of an earlier answer: `content`, or without it `summary`."""

    type: Literal["reasoning"]
    summary: list[InputText] | None = None
    content: list[InputText] | None = None
    id: Ignored = None
    status: Ignored = None
    encrypted_content: Ignored = None


class FunctionTool(StrictModel):
    """A function that the client runs."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Ignored = None
    output_schema: Ignored = None
    allowed_callers: Annotated[Any, Unsupported([], ["direct"])] = None
    defer_loading: Annotated[Any, Unsupported(False)] = None
    async_: Annotated[Any, Field(alias="async"), Unsupported(False)] = None

    def for_chat(self) -> dict[str, Any]:
        shown = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": shown}


class InputTools(StrictModel):
    """Functions beside `tools`, from this item on. The chat template shows them with those of `tools`."""

    type: Literal["additional_tools"]
    role: Literal["developer"]
    tools: Annotated[list[FunctionTool], Field(max_length=128)]
    id: Ignored = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning", "additional_tools")


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind in _KINDS else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputTools, Tag("additional_tools")],
    Discriminator(
        _kind,
        custom_error_type="rule",
        custom_error_message=f"must be an item of type {', '.join(_KINDS[:-1])} or {_KINDS[-1]}",
    ),
]


class ChosenFunction(StrictModel):
    type: Literal["function"]
    name: ToolName


class TextFormat(StrictModel):
    """`schema` is that of `json_schema`."""

    model_config = ConfigDict(validate_by_name=False)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        named = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, **({"json_schema": named} if self.type == "json_schema" else {})}


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: Ignored = None


class Reasoning(StrictModel):
    """`effort` is chat's `reasoning_effort`, `max_tokens` its `thinking_token_budget`. Thoughts are shown as
    the model wrote them, with or without `summary`."""

    effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    max_tokens: Annotated[int, Range(0, INT31)] | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Annotated[Any, Unsupported("auto")] = None
    mode: Annotated[Any, Unsupported("standard")] = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: Ignored = None


class ResponseRequest(EngineFields, ChatFields, StructuredField):
    """POST /v1/responses. With `store`, which is true unless given, the response is a turn of a session."""

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: Annotated[str, StringConstraints(max_length=128)] | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Range(1)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[_INCLUDABLE] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    top_logprobs: Annotated[int, Range(0, 20)] | None = None
    metadata: Annotated[
        dict[str, Annotated[str, StringConstraints(max_length=512)]], Field(max_length=16)
    ] | (None) = None
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    service_tier: Ignored = None
    max_tool_calls: Ignored = None
    access_programs: Ignored = None
    image: Ignored = None
    truncation: Annotated[Any, Unsupported("disabled")] = None
    background: Annotated[Any, Unsupported(False)] = None
    conversation: Annotated[Any, Unsupported()] = None
    prompt: Annotated[Any, Unsupported()] = None
    context_management: Annotated[Any, Unsupported([])] = None
    moderation: Annotated[Any, Unsupported()] = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_include(cls, value: int | None, info: Any) -> int | None:
        if value and _LOGPROBS not in (info.data.get("include") or ()):
            raise PydanticCustomError("rule", f"is allowed only where include has {_LOGPROBS}")
        return value

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def every_tool(self) -> list[FunctionTool]:
        """Those of `tools`, then those of the input's items."""
        items = () if isinstance(self.input, str) else self.input
        added = [tool for item in items if isinstance(item, InputTools) for tool in item.tools]
        return [*(self.tools or ()), *added]

    @property
    def has_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())


def translate(body: ResponseRequest, before: Sequence[ChatMessage]) -> Translation:
    """The request as a chat request with the whole conversation.

    Args: before: what the previous response's conversation has, without its instructions.

    Raises: InvalidRequest naming the field.
    """
    messages: list[dict[str, Any]] = [_shown(message) for message in before]
    origins = ["previous_response_id"] * len(messages)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
        origins.insert(0, "instructions")
    for origin, message in _messages(body.input):
        messages.append(message)
        origins.append(origin)
    fields: dict[str, Any] = {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "session_mode": "replace",
        "tools": [tool.for_chat() for tool in body.every_tool] or None,
        "tool_choice": body.tool_choice,
        "logprobs": body.has_logprobs or None,
        "top_logprobs": body.top_logprobs,
        "stop": body.stop,
        "ignore_eos": body.ignore_eos,
    }
    if isinstance(body.tool_choice, ChosenFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = body.text.format.for_chat()
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
        fields["thinking_token_budget"] = body.reasoning.max_tokens
    return chat_request(body, fields, Names(messages=origins, fields=_NAMES))


def _shown(message: ChatMessage) -> dict[str, Any]:
    """A recorded message as a request has it."""
    return {
        "role": message.role,
        "content": message.content,
        **(json.loads(message.fields) if message.fields else {}),
    }


def _messages(items: str | list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The messages of an input, and the field that each came from. The items of one answer are one
    message."""
    if isinstance(items, str):
        yield "input", {"role": "user", "content": items}
        return
    answer: dict[str, Any] = {}
    origin = ""
    for index, item in enumerate(items):
        if isinstance(item, InputTools):
            continue
        is_answer = isinstance(item, InputReasoning | InputCall) or (
            isinstance(item, InputMessage) and item.role == "assistant"
        )
        # A message or thoughts after a message or calls begin another answer.
        begins = not isinstance(item, InputCall) and bool({"content", "tool_calls"} & answer.keys())
        if answer and (begins or not is_answer):
            yield origin, answer
            answer = {}
        if is_answer and not answer:
            origin, answer = f"input[{index}]", {"role": "assistant"}
        if isinstance(item, InputReasoning):
            answer["reasoning_content"] = texts_of(item.content or item.summary)
        elif isinstance(item, InputCall):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
        elif isinstance(item, InputCallOutput):
            yield (
                f"input[{index}]",
                {"role": "tool", "tool_call_id": item.call_id, "content": texts_of(item.output)},
            )
        elif is_answer:
            answer["content"] = texts_of(item.content)
        else:
            yield f"input[{index}]", {"role": item.role, "content": texts_of(item.content)}
    if answer:
        yield origin, answer
