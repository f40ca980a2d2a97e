"""POST /v1/messages and its count_tokens: Anthropic's fields, and the chat request that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, field_validator
from pydantic_core import PydanticCustomError

from kvferry.services.router.completion import refused_fields
from kvferry.services.router.completion.engine_fields import AgentHint, CacheControl, ChatFields, EngineFields
from kvferry.services.router.completion.requests import (
    ChatRequest,
    Content,
    ContentPart,
    ReadableContent,
    StopString,
    check_readable,
    text_of,
)
from kvferry.services.router.completion.structured import StructuredField
from kvferry.services.router.completion.tools import MAX_TOOLS, LeftOut, ToolName
from kvferry.services.router.completion.translation import Names, chat_request
from kvferry.services.router.http.body import ClientModel, Range, type_of
from kvferry.services.router.sessions.record import SessionId

_NAMES = {
    r"response_format\.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    r"\.function\.parameters": ".input_schema",
    r"\.function": "",
    r"tool_choice\.function": "tool_choice",
    "stop": "stop_sequences",
}
_THINKING_EFFORT = "medium"
"""Of requests that turn thinking on and give no effort."""


class ToolUseBlock(ClientModel):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, Any]


class ToolResultBlock(ClientModel):
    """What a called tool returned. Chat templates cannot show `is_error`; say it in the text."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Content | None = None


class ThinkingBlock(ClientModel):
    """Thoughts of an earlier answer. They need no signature."""

    echoed = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


_KINDS = ("text", "tool_use", "tool_result", "thinking")
_LEFT_OUT = ("redacted_thinking", "server_tool_use", "compaction")


def _kind(block: Any) -> str | None:
    if (kind := type_of(block)) is None:
        return None
    if kind in _LEFT_OUT or (kind.endswith("_tool_result") and kind != "tool_result"):
        return "left_out"
    return kind if kind in _KINDS else "text"  # its type reports what it cannot read


Block = Annotated[
    Annotated[ContentPart, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[LeftOut, Tag("left_out")],
    Discriminator(_kind, custom_error_type="rule", custom_error_message="must be a block with a type"),
]


class ClientMessage(ClientModel):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]

    @field_validator("content")
    @classmethod
    def _is_readable(cls, value: Any) -> Any:
        if isinstance(value, list):
            check_readable([block for block in value if isinstance(block, ContentPart)])
        return value


class ClientTool(ClientModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]

    def for_chat(self) -> dict[str, Any]:
        shown = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": shown}


ClientTools = Annotated[
    list[
        Annotated[
            Annotated[ClientTool, Tag("custom")] | Annotated[LeftOut, Tag("other")],
            Discriminator(lambda tool: "custom" if type_of(tool) in ("custom", None) else "other"),
        ]
    ],
    Field(max_length=MAX_TOOLS),
]


class ToolChoice(ClientModel):
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


class Thinking(ClientModel):
    """Turns thinking on (`enabled`, `adaptive`) or off where the chat template can."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Range(1)] | None = None
    display: str | None = None


class OutputFormat(ClientModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(ClientModel):
    effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    format: OutputFormat | None = None


class ContextManagement(ClientModel):
    """What other servers leave out of long conversations. Which thoughts of earlier answers the model sees is
    for the chat template here; nothing else may be left out."""

    edits: list[dict[str, Any]] | None = None

    @field_validator("edits")
    @classmethod
    def _of_thoughts(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for edit in value or ():
            if not str(edit.get("type")).startswith("clear_thinking"):
                raise PydanticCustomError("rule", "must have edits of type clear_thinking_20251015 alone")
        return value


class PromptFields(ClientModel):
    """What decides an Anthropic prompt. One that ends with an answer has it continued."""

    refused = refused_fields.OF_TOKEN_COUNTS

    model: str
    messages: Annotated[list[ClientMessage], Field(min_length=1, fail_fast=True)]
    system: ReadableContent | None = None
    tools: ClientTools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None

    @field_validator("messages")
    @classmethod
    def _ends_before_a_result(cls, value: list[ClientMessage]) -> list[ClientMessage]:
        if any(isinstance(block, ToolUseBlock) for block in value[-1].content):
            raise PydanticCustomError("rule", "must not end with a call; its result is to follow")
        return value


class CountTokensRequest(PromptFields, EngineFields, ChatFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, EngineFields, ChatFields, StructuredField):
    """POST /v1/messages."""

    refused = refused_fields.OF_MESSAGES

    max_tokens: Annotated[int, Range(1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=64)] | None = None
    session_id: SessionId | None = None


def translate(body: MessagesRequest | CountTokensRequest) -> tuple[ChatRequest, Names]:
    """Return the request as a chat request, and the client's names of that request's fields.

    Raises: InvalidRequest naming the field.
    """
    messages: list[dict[str, Any]] = []
    origins: list[str] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system, between="\n\n")})
        origins.append("system")
    for index, message in enumerate(body.messages):
        for shown in _messages(message):
            messages.append(shown)
            origins.append(f"messages[{index}]")
    tools = {
        f"tools[{index}]": tool.for_chat()
        for index, tool in enumerate(body.tools or ())
        if isinstance(tool, ClientTool)
    }
    fields: dict[str, Any] = {
        "messages": messages,
        "tools": list(tools.values()) or None,
        "reasoning_effort": _effort(body),
        "continue_final_message": messages[-1]["role"] == "assistant" or None,
    }
    if body.tool_choice is not None:
        fields["tool_choice"] = body.tool_choice.for_chat()
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.output_config is not None and (form := body.output_config.format) is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if body.thinking is not None:
        fields["include_reasoning"] = False if body.thinking.display == "omitted" else None
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if body.cache_control is not None and body.agent_hint is None:
        fields["agent_hint"] = AgentHint(cache_control=body.cache_control)
    if isinstance(body, MessagesRequest):
        fields["max_tokens"] = body.max_tokens
        fields["stop"] = body.stop_sequences
        fields["session_id"] = body.session_id
    names = Names(messages=origins, tools=list(tools), fields=_NAMES)
    return chat_request(body, fields, names), names


def _effort(body: PromptFields) -> str | None:
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    if body.output_config is not None and body.output_config.effort is not None:
        return body.output_config.effort
    return _THINKING_EFFORT if body.thinking is not None and body.thinking.type == "enabled" else None


def _messages(message: ClientMessage) -> Iterator[dict[str, Any]]:
    """Yield the chat's messages: each tool's result is one."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts = [block for block in message.content if isinstance(block, ContentPart)]
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    for result in results:
        content = text_of(result.content)
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}
    if texts or calls or thoughts or not results:
        shown: dict[str, Any] = {"role": message.role, "content": text_of(texts)}
        if calls:
            shown["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
                for call in calls
            ]
        if thoughts:
            shown["reasoning_content"] = "".join(thoughts)
        yield shown
