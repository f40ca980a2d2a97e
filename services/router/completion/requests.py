"""The bodies of chats as strict types with every range, and the sampling parameters they stand for.

Fields of other servers that would change an answer, and that this one lacks, are in `refused_fields.py`.
FastAPI reads bodies into these types and describes them at `/openapi.json`; `http/errors.py` words their
errors.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvferry.services.router.completion import refused_fields
from kvferry.services.router.completion.engine_fields import INT31, MAX_PRIORITY, ChatFields, EngineFields
from kvferry.services.router.completion.structured import STRUCTURED, StructuredFields
from kvferry.services.router.completion.tools import AllowedTools, CallId, NamedTool, Tool, ToolCall, Tools
from kvferry.services.router.http.body import ClientModel, Range, Refused
from kvferry.services.router.sessions.record import SessionId
from kvferry.shared.errors import ContextLengthExceeded, InvalidRequest
from kvferry.shared.model.chat_template import ChatMessage, normalize_role
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import MAX_PROMPT_ALTERNATIVES, Grammar, SamplingParams, ThinkingBudget

if TYPE_CHECKING:
    from kvferry.services.router.completion.texts import TextRequest

_TEXT_MAX_TOKENS = 16
_MAX_BIASES = 1024
_OF_TOOLS = ("tool", "function", "ipython")
"""Roles of messages in which a note stands for what the model cannot read."""
_READABLE = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")

TokenId = Annotated[int, Range(0)]
StopString = Annotated[str, StringConstraints(max_length=256)]


class ContentPart(ClientModel):
    """A part: text, a refusal, a document of plain text, or what a model here cannot read. The text of a
    refusal is its `refusal`; a document's is in its `source`."""

    echoed = frozenset({"annotations", "logprobs"})

    type: str
    text: str | None = None
    refusal: str | None = None
    source: dict[str, Any] | None = None

    @property
    def left_out(self) -> str:
        return self.type if self.readable is None else ""

    @property
    def readable(self) -> str | None:
        """The part's text; None where it has none that a model here reads."""
        if self.type == "document" and self.source is not None and self.source.get("type") == "text":
            data = self.source.get("data")
            return data if isinstance(data, str) else None
        return (self.refusal if self.type == "refusal" else self.text) if self.type in _READABLE else None


def _has_text(parts: list[ContentPart]) -> list[ContentPart]:
    for part in parts:
        if part.type in _READABLE and part.readable is None:
            raise PydanticCustomError("rule", f"must have the text of each part of type {part.type}")
    return parts


Parts = Annotated[list[ContentPart], Field(fail_fast=True), AfterValidator(_has_text)]
Content = str | Parts


def check_readable(content: Content | None) -> Content | None:
    """Return the content. Raises: PydanticCustomError: a part is not text; without it, answers differ."""
    for part in content if isinstance(content, list) else ():
        if part.readable is None:
            raise PydanticCustomError(
                "rule", f"must not have a part of type {part.type}; models here read text"
            )
    return content


ReadableContent = Annotated[Content, AfterValidator(check_readable)]


def text_of(content: Content | None, *, between: str = "") -> str:
    """Return the text of a content. A note takes the place of parts that models here cannot read."""
    if not isinstance(content, list):
        return content or ""
    return between.join(
        text
        if (text := part.readable) is not None
        else f"[{part.type}: left out, as the model reads text alone]"
        for part in content
    )


class Message(ClientModel):
    """One message. The chat template decides which roles there are, and which of `name`, `tool_calls`,
    `tool_call_id` and `reasoning_content` it shows the model. `reasoning` is another name of
    `reasoning_content`."""

    echoed = frozenset({"annotations"})
    refused: ClassVar[Refused] = {"audio": (), "function_call": ()}

    role: Annotated[str, StringConstraints(max_length=64)]
    content: Annotated[Content | None, Field(validate_default=True)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @field_validator("content")
    @classmethod
    def _for_its_role(cls, value: Any, info: Any) -> Any:
        role = info.data.get("role")
        if value is None and role == "user":
            raise PydanticCustomError("missing", "is missing")
        if role not in _OF_TOOLS:
            check_readable(value)
        return value

    def recorded(self, template_fields: frozenset[str]) -> ChatMessage:
        """Return the message as sessions record it.

        Args: template_fields: what the chat template uses; the others are left out.
        """
        more: dict[str, Any] = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls] if self.tool_calls else None,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        more = {name: value for name, value in more.items() if value and name in template_fields}
        text = text_of(self.content) or self.refusal or ""
        return ChatMessage(normalize_role(self.role), text, json.dumps(more) if more else "")


class StreamOptions(ClientModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CompletionFields(EngineFields, StructuredFields):
    """The fields of both endpoints."""

    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Range(0, INT31)] | None = None
    max_tokens: Annotated[int, Range(1)] | None = None
    n: Annotated[int, Range(1, 16)] | None = None
    best_of: Annotated[int, Range(1)] | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Range(0, MAX_PROMPT_ALTERNATIVES)] | None = None
    logit_bias: dict[str, Annotated[float, Range(-100, 100)]] | None = None
    session_id: SessionId | None = None
    session_mode: Literal["append", "replace", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Range(-1, INT31)] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases_of_tokens(cls, value: Any) -> Any:
        names = value if isinstance(value, dict) else {}
        if len(names) > _MAX_BIASES:
            raise PydanticCustomError("rule", f"must have at most {_MAX_BIASES} entries")
        if not all(name.isascii() and name.isdigit() and len(name) <= 10 for name in names):
            raise PydanticCustomError("rule", "must map token ids of the vocabulary to biases")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _check_rules(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        request = read(value)
        # FastAPI also passes requests that have already been read.
        broken = next(request._broken_rules(), None) if isinstance(value, dict) else None
        if broken is not None:
            field, rule = broken
            kind = PydanticCustomError("rule", rule)
            error = InitErrorDetails(type=kind, loc=(field,), input=value[field])
            raise ValidationError.from_exception_data(cls.__name__, [error])
        return request

    def _broken_rules(self) -> Iterator[tuple[str, str]]:
        """Yield each field that breaks a rule between several fields, and how it must be."""
        if self.stream_options is not None and not self.stream:
            yield "stream_options", "is allowed only where stream is true"
        if self.best_of is not None and self.best_of != (self.n or 1):
            yield "best_of", "must equal n"
        if self.prompt_logprobs is not None and self.stream:
            yield "prompt_logprobs", "is not allowed where stream is true"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if not self.stop:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(filter(None, self.stop))

    @property
    def has_structure(self) -> bool:
        """True if a grammar decides what the answer may be."""
        return not STRUCTURED.isdisjoint(self.model_fields_set)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> tuple[str, int] | None:
        """The field that bounds the completion and its value, where the client gave one."""
        if (limit := getattr(self, "max_completion_tokens", None)) is not None:
            return "max_completion_tokens", limit
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    @property
    def salt(self) -> str:
        """Prompts are reused only by those that have the same; empty without one."""
        return json.dumps([self.cache_salt, self.extra_key]) if self.cache_salt or self.extra_key else ""

    @property
    def keep_s(self) -> float | None:
        """The time to keep the prompt's KV for a prompt that continues it, in seconds."""
        hints = [hint.cache_control for hint in (self.agent_hint, self.nvext) if hint is not None]
        times = [float(hint.ttl) for hint in hints if hint is not None and hint.ttl is not None]
        return max(times, default=None)

    @property
    def releases(self) -> bool:
        """True if the conversation's KV may be dropped after this turn."""
        if self.agent_hint is None or self.agent_hint.context_management is None:
            return False
        return any(edit.type == "evict" for edit in self.agent_hint.context_management.edits or ())

    @property
    def hinted_priority(self) -> int:
        """The hinted priority in this server's order, in which the smallest comes first."""
        hints = self.nvext.agent_hints if self.nvext is not None else None
        given = hints.priority if hints is not None else None
        return max(-MAX_PRIORITY, min(MAX_PRIORITY, -(given or 0)))

    @property
    def num_prompt_alternatives(self) -> int | None:
        """The number of alternatives to report per token of the prompt; None reports no logprobs of it."""
        return self.prompt_logprobs

    @property
    def is_whole(self) -> bool:
        """True if it certainly has the whole conversation, so that the session's record is not needed."""
        return self.session_mode == "replace"


class ChatRequest(CompletionFields, ChatFields):
    """POST /v1/chat/completions."""

    refused = refused_fields.OF_CHATS

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    max_completion_tokens: Annotated[int, Range(1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Range(0, 20)] | None = None

    def _broken_rules(self) -> Iterator[tuple[str, str]]:
        yield from super()._broken_rules()
        names = {tool.function.name for tool in self.tools or () if isinstance(tool, Tool)}
        choice = self.tool_choice
        named = {choice.function.name} if isinstance(choice, NamedTool) else set()
        if choice == "required" and not names:
            yield "tool_choice", "must be none or auto where there are no functions among tools"
        if isinstance(choice, AllowedTools):
            named = choice.names
            if not named and choice.allowed_tools.mode == "required":
                yield "tool_choice", "must name a function of the tools where mode is required"
        if not named <= names:
            yield "tool_choice", "must name functions of the tools"
        last, continues = self.messages[-1], bool(self.continue_final_message)
        if continues and (last.role != "assistant" or last.tool_calls):
            yield "continue_final_message", "is allowed only where the last message is an answer in text"
        if self.add_generation_prompt is continues:
            wanted = str(not continues).lower()
            yield "add_generation_prompt", f"must be {wanted}, as an answer is to come"
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            yield "max_completion_tokens", "and max_tokens differ; give one of them"
        if self.top_logprobs and not self.logprobs:
            yield "top_logprobs", "is allowed only where logprobs is true"

    @property
    def thinking_limit(self) -> int | None:
        """The most tokens of the thoughts; None with a grammar, which alone decides."""
        budget = self.thinking_token_budget
        return None if budget == -1 or self.has_structure else budget  # -1 is vLLM's value for no limit

    @property
    def has_structure(self) -> bool:
        return super().has_structure or bool(self.called_tools)

    @property
    def called_tools(self) -> list[Tool]:
        """The tools that the answer must call; none if it need not call any."""
        choice = self.tool_choice
        is_subset = isinstance(choice, AllowedTools) and choice.allowed_tools.mode == "required"
        if choice == "required" or is_subset:
            return self.shown_tools
        if isinstance(choice, NamedTool):
            return [tool for tool in self.shown_tools if tool.function.name == choice.function.name][:1]
        return []

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the model is shown."""
        tools = [tool for tool in self.tools or () if isinstance(tool, Tool)]
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in tools if tool.function.name in self.tool_choice.names]
        return tools

    @property
    def may_call(self) -> bool:
        """True if the answer may be calls without having to be."""
        return bool(self.shown_tools) and self.tool_choice != "none"

    @property
    def num_alternatives(self) -> int | None:
        """The number of alternatives to report per token; None reports no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def is_whole(self) -> bool:
        answered = any(message.role == "assistant" for message in self.messages)
        return super().is_whole or (self.session_mode != "append" and answered)


def sampling_params(
    request: ChatRequest | TextRequest,
    num_prompt_tokens: int,
    model: ModelSpec,
    grammar: Grammar | None = None,
    *,
    defaults: Mapping[str, float] = MappingProxyType({}),
    thinking: ThinkingBudget | None = None,
) -> SamplingParams:
    """Return the request's sampling, with a random seed if it gives none. Its limit is within the room that
    the context has after the prompt, which is also the limit of a chat that gives none.

    Args: defaults: fields of the result for a request that does not give them.

    Raises: ContextLengthExceeded; InvalidRequest where an id is not in the vocabulary.
    """
    window, is_chat = model.max_model_len, isinstance(request, ChatRequest)
    room, limit = window - num_prompt_tokens, request.token_limit
    if room < 1:
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens; the context of {window} tokens must hold it and at "
            "least one more",
            param="messages" if is_chat else "prompt",
        )
    is_prompt_alone = limit is not None and limit[1] == 0
    has_echo = not isinstance(request, ChatRequest) and bool(request.echo)
    if is_prompt_alone and not has_echo and request.num_prompt_alternatives is None:
        raise InvalidRequest(
            "max_tokens is 0; it must be at least 1 unless echo is true or prompt_logprobs is given",
            param="max_tokens",
        )
    min_tokens = request.min_tokens or 0
    most = min(max(1, limit[1] if limit is not None else room if is_chat else _TEXT_MAX_TOKENS), room)
    if min_tokens > most:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}; it must be at most {most}, the most tokens of the answer",
            param="min_tokens",
        )
    bias = {int(token_id): value for token_id, value in (request.logit_bias or {}).items()}
    stop_ids = tuple(request.stop_token_ids or ())
    for param, ids in (("logit_bias", tuple(bias)), ("stop_token_ids", stop_ids)):
        highest = max(ids, default=0)
        if highest >= model.vocab_size:
            raise InvalidRequest(
                f"{param} names token {highest}; the vocabulary has ids 0 to {model.vocab_size - 1}",
                param=param,
            )
    given = {
        name: value
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
            *("repetition_penalty", "seed", "ignore_eos"),
        )
        if (value := getattr(request, name)) is not None
    }
    if "top_k" in given:
        given["top_k"] = max(0, given["top_k"])  # -1 is vLLM's value for off
    if is_prompt_alone:
        # Prefill draws a token in any case; the answer leaves it out.
        given["ignore_eos"], stop_ids = True, ()
    return SamplingParams(
        max_tokens=most,
        grammar=grammar if not is_prompt_alone else None,
        thinking=thinking,
        min_tokens=0 if is_prompt_alone else min_tokens,
        logprobs=request.num_alternatives,
        stop=() if is_prompt_alone else request.stop_strings,
        stop_token_ids=stop_ids,
        logit_bias=bias,
        **{"seed": secrets.randbits(63), **defaults, **given},
    )


def with_seed_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return the sampling of choice i, which draws with seed + i, wrapped into 64 bits."""
    return replace(sampling, seed=(sampling.seed + index + 2**63) % 2**64 - 2**63)
