"""POST /v1/responses: its fields, and the chat request that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, StringConstraints, Tag, TypeAdapter, field_validator
from pydantic_core import PydanticCustomError

from kvferry.services.router.completion import refused_fields
from kvferry.services.router.completion.engine_fields import INT31, ChatFields, EngineFields
from kvferry.services.router.completion.requests import (
    ChatRequest,
    Content,
    Parts,
    ReadableContent,
    StopString,
    text_of,
)
from kvferry.services.router.completion.structured import StructuredField
from kvferry.services.router.completion.tools import MAX_TOOLS, CallId, LeftOut, ToolName, custom_call
from kvferry.services.router.completion.translation import Names, chat_request
from kvferry.services.router.http.body import ClientModel, Range, Refused, type_of
from kvferry.shared.model.chat_template import ChatMessage

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
    r"\.function": "",
    r"tool_choice\.function": "tool_choice",
    "top_logprobs": "top_logprobs",
    "logprobs": "include",
    "messages": "input",
}
_ASYNC: Refused = {"async": (False,)}
_LOGPROBS = "message.output_text.logprobs"


class _Item(ClientModel):
    echoed = frozenset({"id", "status"})


class InputMessage(_Item):
    """A message, of the client or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ReadableContent


class InputCall(_Item):
    """A function call of an earlier answer."""

    refused = _ASYNC

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    namespace: str | None = None
    arguments: str

    def for_chat(self) -> dict[str, Any]:
        function = {"name": flat_name(self.namespace, self.name), "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class InputCustomCall(_Item):
    """A call, of an earlier answer, of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: ToolName
    input: str

    def for_chat(self) -> dict[str, Any]:
        return {"id": self.call_id, "type": "function", "function": custom_call(self.name, self.input)}


class InputCallOutput(_Item):
    """What a called function, or custom tool, returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: Content


class InputReasoning(_Item):
    """Thoughts of an earlier answer: `content`, or without it `summary`."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None


class ItemReference(ClientModel):
    """An item of a stored response by its id."""

    type: Literal["item_reference"] | None = None
    id: Annotated[str, StringConstraints(max_length=256)]


class FunctionTool(ClientModel):
    """A function that the client runs."""

    refused = _ASYNC

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self, namespace: str | None) -> dict[str, Any]:
        shown = self.model_dump(include={"description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": {"name": flat_name(namespace, self.name), **shown}}


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function."""
    return name if namespace is None else f"{namespace}__{name}"


def _tool_kind(tool: Any) -> str | None:
    kind = type_of(tool)
    return kind if kind in ("function", "namespace", None) else "other"


_BY_KIND = Discriminator(
    _tool_kind, custom_error_type="rule", custom_error_message="must be an object with a type"
)
_Plain = Annotated[FunctionTool, Tag("function")] | Annotated[LeftOut, Tag("other")]
_InnerTool = Annotated[_Plain | Annotated[LeftOut, Tag("namespace")], _BY_KIND]


class Namespace(ClientModel):
    """Functions with a common prefix. The model calls them `NAMESPACE__NAME`."""

    type: Literal["namespace"]
    name: ToolName
    tools: Annotated[list[_InnerTool], Field(max_length=MAX_TOOLS)]


_Tool = Annotated[_Plain | Annotated[Namespace, Tag("namespace")], _BY_KIND]
ResponseTools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS)]


class InputTools(ClientModel):
    """Tools beside `tools`, from this item on. The chat template shows them with those of `tools`."""

    type: Literal["additional_tools"]
    tools: ResponseTools


_KINDS = {
    "message": "message",
    "function_call": "call",
    "custom_tool_call": "custom_call",
    "function_call_output": "result",
    "custom_tool_call_output": "result",
    "reasoning": "reasoning",
    "item_reference": "reference",
    "additional_tools": "tools",
}


def _kind(item: Any) -> str | None:
    """Return an item's kind. One without a type is a message or, if it has only an id, a reference."""
    fields = item if isinstance(item, dict) else vars(item) if isinstance(item, ClientModel) else None
    if fields is None:
        return None
    kind = fields.get("type")
    if kind is None:
        return "reference" if "id" in fields and "role" not in fields else "message"
    return _KINDS.get(kind, "other") if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("call")]
    | Annotated[InputCustomCall, Tag("custom_call")]
    | Annotated[InputCallOutput, Tag("result")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("reference")]
    | Annotated[InputTools, Tag("tools")]
    | Annotated[LeftOut, Tag("other")],
    Discriminator(
        _kind, custom_error_type="rule", custom_error_message="must be a message or an item with a type"
    ),
]

INPUT_ITEM: TypeAdapter[Any] = TypeAdapter(InputItem)


class ChosenFunction(ClientModel):
    type: Literal["function"]
    name: ToolName
    namespace: str | None = None

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": flat_name(self.namespace, self.name)}}


class AllowedFunctions(ClientModel):
    """The functions that the answer may call, or of which it must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction | LeftOut], Field(max_length=MAX_TOOLS)]

    def for_chat(self) -> dict[str, Any]:
        tools = [tool.for_chat() for tool in self.tools if isinstance(tool, ChosenFunction)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


class TextFormat(ClientModel):
    """`schema` is that of `json_schema`, which alone has more than a type."""

    model_config = ConfigDict(validate_by_name=False)

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    description: Annotated[str, StringConstraints(max_length=4096)] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        named = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, **({"json_schema": named} if self.type == "json_schema" else {})}


class TextConfig(ClientModel):
    format: TextFormat | None = None


class Reasoning(ClientModel):
    """`effort` is chat's `reasoning_effort`, `max_tokens` its `thinking_token_budget`. Thoughts are shown as
    the model wrote them, with or without `summary`."""

    effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    max_tokens: Annotated[int, Range(0, INT31)] | None = None


Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
]


class ResponseRequest(EngineFields, ChatFields, StructuredField):
    """POST /v1/responses. With `store`, which is true unless given, the response is a turn of a session."""

    refused = refused_fields.OF_RESPONSES

    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: Annotated[str, StringConstraints(max_length=128)] | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Range(1)] | None = None
    tools: ResponseTools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    top_logprobs: Annotated[int, Range(0, 20)] | None = None
    metadata: Metadata | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_include(cls, value: int | None, info: Any) -> int | None:
        if value and _LOGPROBS not in (info.data.get("include") or ()):
            raise PydanticCustomError("rule", f"is allowed only where include has {_LOGPROBS}")
        return value

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def every_tool(self) -> Iterator[tuple[str, str | None, FunctionTool | LeftOut]]:
        """Yield the tools of `tools`, then those of the input's items, each with its field and namespace."""
        items = () if isinstance(self.input, str) else self.input
        lists = [("tools", self.tools or [])]
        lists += [
            (f"input[{n}].tools", item.tools) for n, item in enumerate(items) if isinstance(item, InputTools)
        ]
        for field, tools in lists:
            for index, tool in enumerate(tools):
                if isinstance(tool, Namespace):
                    for number, inner in enumerate(tool.tools):
                        yield f"{field}[{index}].tools[{number}]", tool.name, inner
                else:
                    yield f"{field}[{index}]", None, tool

    @property
    def namespaced(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of the functions that the model knows by another name."""
        return {
            flat_name(space, tool.name): (space, tool.name)
            for _, space, tool in self.every_tool()
            if space is not None and isinstance(tool, FunctionTool)
        }


def translate(body: ResponseRequest, before: Sequence[ChatMessage]) -> tuple[ChatRequest, Names]:
    """Return the request as a chat request with the whole conversation, and the client's names of that
    request's fields.

    Args: before: what the previous response's conversation has, without its instructions.

    Raises: InvalidRequest naming the field.
    """
    messages: list[Mapping[str, Any]] = [message.for_template() for message in before]
    origins = ["previous_response_id"] * len(messages)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
        origins.insert(0, "instructions")
    for origin, message in _messages(body.input):
        messages.append(message)
        origins.append(origin)
    tools = {
        field: tool.for_chat(space)
        for field, space, tool in body.every_tool()
        if isinstance(tool, FunctionTool)
    }
    fields: dict[str, Any] = {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "session_mode": "replace",
        "tools": list(tools.values()) or None,
        "tool_choice": body.tool_choice,
        "logprobs": _LOGPROBS in (body.include or ()) or None,
        "top_logprobs": body.top_logprobs,
        "stop": body.stop,
        "ignore_eos": body.ignore_eos,
    }
    if isinstance(body.tool_choice, ChosenFunction | AllowedFunctions):
        fields["tool_choice"] = body.tool_choice.for_chat()
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = body.text.format.for_chat()
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
        fields["thinking_token_budget"] = body.reasoning.max_tokens
    names = Names(messages=origins, tools=list(tools), fields=_NAMES)
    return chat_request(body, fields, names), names


def _messages(items: str | list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the messages of an input, and the field that each came from. The items of one answer are one
    message."""
    if isinstance(items, str):
        yield "input", {"role": "user", "content": items}
        return
    answer: dict[str, Any] = {}
    origin = ""
    for index, item in enumerate(items):
        if isinstance(item, InputTools | LeftOut | ItemReference):
            continue
        is_call = isinstance(item, InputCall | InputCustomCall)
        is_message = isinstance(item, InputMessage)
        is_answer = is_call or isinstance(item, InputReasoning) or (is_message and item.role == "assistant")
        # A message or thoughts after a message or calls begin another answer.
        begins = not is_call and bool({"content", "tool_calls"} & answer.keys())
        if answer and (begins or not is_answer):
            yield origin, answer
            answer = {}
        if is_answer and not answer:
            origin, answer = f"input[{index}]", {"role": "assistant"}
        if isinstance(item, InputReasoning):
            answer["reasoning_content"] = text_of(item.content or item.summary)
        elif isinstance(item, InputCall | InputCustomCall):
            answer.setdefault("tool_calls", []).append(item.for_chat())
        elif isinstance(item, InputCallOutput):
            result = {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
            yield f"input[{index}]", result
        elif is_answer:
            answer["content"] = text_of(item.content)
        else:
            yield f"input[{index}]", {"role": item.role, "content": text_of(item.content)}
    if answer:
        yield origin, answer
