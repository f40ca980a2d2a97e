"""POST /v1/messages and its count_tokens: Anthropic's fields, and the chat request that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, field_validator
from pydantic_core import PydanticCustomError

from kvferry.services.router.completion.engine_fields import ChatFields, EngineFields
from kvferry.services.router.completion.requests import StopString
from kvferry.services.router.completion.structured import StructuredField
from kvferry.services.router.completion.tools import ToolName
from kvferry.services.router.completion.translation import Names, Translation, chat_request, texts_of
from kvferry.services.router.http.body import Ignored, Range, StrictModel, Unsupported
from kvferry.services.router.sessions.record import SessionId

_NAMES = {
    r"response_format\.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"tool_choice\.function": "tool_choice",
    "stop": "stop_sequences",
}
_THINKING_EFFORT = "medium"
"""Of requests that turn thinking on and give no effort."""


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Annotated[Any, Unsupported([])] = None


class ToolUseBlock(StrictModel):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None
    toolset_name: Annotated[Any, Unsupported()] = None


_Texts = str | Annotated[list[TextBlock], Field(fail_fast=True)]


class ToolResultBlock(StrictModel):
    """What a called tool returned. Chat templates cannot show `is_error`; say it in the text."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts | None = None
    is_error: Ignored = None
    cache_control: Ignored = None
    toolset_name: Annotated[Any, Unsupported()] = None


class ThinkingBlock(StrictModel):
    """Thoughts of an earlier answer. They need no signature."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class RedactedThinkingBlock(StrictModel):
    """Thoughts of another server, which nobody can read here; they are left out."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _kind(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if kind in _KINDS else None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
    Discriminator(
        _kind,
        custom_error_type="rule",
        custom_error_message=f"must be a block of type {', '.join(_KINDS[:-1])} or {_KINDS[-1]}",
    ),
]


class ClientMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1, fail_fast=True)]


class ClientTool(StrictModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: Ignored = None
    strict: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None
    allowed_callers: Annotated[Any, Unsupported([], ["direct"])] = None
    defer_loading: Annotated[Any, Unsupported(False)] = None

    def for_chat(self) -> dict[str, Any]:
        shown = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": shown}


class ToolChoice(StrictModel):
    """`name` is that of a `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @field_validator("name")
    @classmethod
    def _of_a_tool(cls, value: str | None, info: Any) -> str | None:
        if (value is not None) != (info.data.get("type") == "tool"):
            raise PydanticCustomError("rule", "must be given where type is tool, and only there")
        return value

    def for_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return {"any": "required"}.get(self.type, self.type)


class Thinking(StrictModel):
    """Turns thinking on (`enabled`, `adaptive`) or off where the chat template can."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Range(1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    format: OutputFormat | None = None


class PromptFields(StrictModel):
    """What decides an Anthropic prompt."""

    model: str
    messages: Annotated[list[ClientMessage], Field(min_length=1, fail_fast=True)]
    system: _Texts | None = None
    tools: Annotated[list[ClientTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    context_management: Annotated[Any, Unsupported()] = None
    mcp_servers: Annotated[Any, Unsupported([])] = None

    @field_validator("messages")
    @classmethod
    def _ends_with_a_question(cls, value: list[ClientMessage]) -> list[ClientMessage]:
        if value[-1].role == "assistant":
            raise PydanticCustomError("rule", "must not end with an answer; this server continues none")
        return value


class CountTokensRequest(PromptFields, EngineFields, ChatFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, EngineFields, ChatFields, StructuredField):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Range(1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=64)] | None = None
    session_id: SessionId | None = None
    metadata: Ignored = None
    service_tier: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    container: Annotated[Any, Unsupported()] = None


def translate(body: MessagesRequest | CountTokensRequest) -> Translation:
    """The request as a chat request.

    Raises: InvalidRequest naming the field.
    """
    messages: list[dict[str, Any]] = []
    origins: list[str] = []
    if body.system:
        messages.append({"role": "system", "content": texts_of(body.system, between="\n\n")})
        origins.append("system")
    for index, message in enumerate(body.messages):
        for shown in _messages(message):
            messages.append(shown)
            origins.append(f"messages[{index}]")
    fields: dict[str, Any] = {
        "messages": messages,
        "tools": [tool.for_chat() for tool in body.tools or ()] or None,
        "reasoning_effort": _effort(body),
    }
    if body.tool_choice is not None:
        fields["tool_choice"] = body.tool_choice.for_chat()
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.output_config is not None and (form := body.output_config.format) is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if body.thinking is not None and body.thinking.display == "omitted":
        fields["include_reasoning"] = False
    if body.thinking is not None:
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if isinstance(body, MessagesRequest):
        fields["max_tokens"] = body.max_tokens
        fields["stop"] = body.stop_sequences
        fields["session_id"] = body.session_id
    return chat_request(body, fields, Names(messages=origins, fields=_NAMES))


def _effort(body: PromptFields) -> str | None:
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    if body.output_config is not None and body.output_config.effort is not None:
        return body.output_config.effort
    return _THINKING_EFFORT if body.thinking is not None and body.thinking.type == "enabled" else None


def _messages(message: ClientMessage) -> Iterator[dict[str, Any]]:
    """The chat's messages: each tool's result is one."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    for result in results:
        content = texts_of(result.content)
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}
    if texts or calls or thoughts or not results:
        shown: dict[str, Any] = {"role": message.role, "content": texts_of(texts)}
        if calls:
            shown["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
                for call in calls
            ]
        if thoughts:
            shown["reasoning_content"] = "".join(thoughts)
        yield shown
