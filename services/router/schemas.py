"""The bodies of POST /v1/chat/completions and /v1/completions as strict types with every range.

A field is supported (declared here), accepted and ignored (`IGNORED_FIELDS`: it does not change the
answer), or refused (`UNSUPPORTED_FIELDS`: ignoring it would). `validation.py` turns bytes into these types
and their errors into ours. Nothing here looks at the model, the tokenizer or a session.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kvferry.shared.compression.kept import MAX_KEPT_BINS

SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
SESSION_ID_RULE = "1 to 128 characters of A-Z a-z 0-9 . _ : - (and neither '.' nor '..')"

# Fields of OpenAI's that change nothing about the answer here.
IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "reasoning_effort",
        "verbosity",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
# Fields of OpenAI's whose effect a client would miss, with the values that ask for nothing.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}

StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


Parameters = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        bool | int | float | Annotated[str, StringConstraints(max_length=256)],
    ],
    Field(max_length=32),
]


def is_session_id(value: str) -> bool:
    """Whether an id is well-formed; it must match in full."""
    return SESSION_ID.fullmatch(value) is not None and value not in (".", "..")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message. Which roles there are is the chat template's matter (`shared.model.tokenizer`). Fields
    that clients echo from an answer (`refusal`, `tool_calls`, ...) must be empty."""

    role: Annotated[str, StringConstraints(max_length=64)]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class KvCompression(_Strict):
    """A request's own compression: a method, at most one way to say how much to keep, and values for
    parameters of the method's parts."""

    method: str | None = None
    token_budget: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    retention: Annotated[float, Field(gt=0, le=1)] | None = None
    quality: Annotated[float, Field(gt=0, le=1)] | None = None
    parameters: Parameters | None = None

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        given = [name for name in ("token_budget", "retention", "quality") if getattr(self, name) is not None]
        if len(given) > 1:
            raise PydanticCustomError("exclusive", f"{' and '.join(given)} exclude one another; give one")
        return self


class CompletionFields(_Strict):
    """What both endpoints take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None
    session_id: str | None = None
    session_mode: Literal["append", "replace", "auto"] | None = None
    kv_compression: KvCompression | None = None
    kv_kept_bins: Annotated[int, Field(ge=1, le=MAX_KEPT_BINS)] | None = None

    @field_validator("session_id")
    @classmethod
    def _session_id(cls, value: str | None) -> str | None:
        if value is not None and not is_session_id(value):
            raise PydanticCustomError("session_id", f"must be {SESSION_ID_RULE}")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias_keys(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise PydanticCustomError("token_id", "must map token ids of the vocabulary to biases")
        return value

    @field_validator("stream_options")
    @classmethod
    def _stream_only(cls, value: StreamOptions | None, info: Any) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_only", "is allowed only where stream is true")
        return value

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> tuple[str, int] | None:
        """The field that bounds the completion and its value, where the client gave one."""
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    @property
    def num_alternatives(self) -> int | None:
        """Alternatives to report per token; None reports no logprobs."""
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """Whether it surely carries the whole conversation, so that no record of it is needed."""
        return self.session_mode == "replace"


class ChatRequest(CompletionFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    document_ids: Annotated[list[str], Field(max_length=16)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: Any) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise PydanticCustomError("needs_logprobs", "is allowed only where logprobs is true")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: Any) -> int | None:
        other = info.data.get("max_tokens")
        if value is not None and other is not None and value != other:
            raise PydanticCustomError("exclusive", "and max_tokens differ; give one of them")
        return value

    @property
    def token_limit(self) -> tuple[str, int] | None:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().token_limit

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def is_whole(self) -> bool:
        answered = any(message.role == "assistant" for message in self.messages)
        return super().is_whole or (self.session_mode != "append" and answered)

    @field_validator("document_ids")
    @classmethod
    def _documents(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not all(is_session_id(name) for name in value):
            raise PydanticCustomError("document_ids", f"must be ids of documents: {SESSION_ID_RULE}")
        if value is not None and len(set(value)) < len(value):
            raise PydanticCustomError("document_ids", "must not name a document twice")
        return value


class TextRequest(CompletionFields):
    """POST /v1/completions. One prompt a request: a string, or token ids."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        """Lists of prompts are allowed where they hold one."""
        if not isinstance(value, list) or not any(isinstance(item, str | list) for item in value):
            return value
        if len(value) > 1:
            raise PydanticCustomError("one_prompt", "must be one prompt: a string or a list of token ids")
        return value[0]

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs


class DocumentRequest(_Strict):
    """POST /v1/documents."""

    text: Annotated[str, StringConstraints(min_length=1)]
    id: str | None = None
    kv_compression: KvCompression | None = None

    @field_validator("id")
    @classmethod
    def _document_id(cls, value: str | None) -> str | None:
        if value is not None and not is_session_id(value):
            raise PydanticCustomError("document_id", f"must be {SESSION_ID_RULE}")
        return value


def describe(value: object) -> str:
    """A JSON value for an error message, short whatever its size."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"an integer of about {int(math.log10(abs(value))) + 1} digits"
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."
