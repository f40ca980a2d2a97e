"""A session's record: the conversation as text and as token ids, and its JSON file.

`stored_record.py` defines how Redis stores it. Export writes a file and import reads it: self-contained,
without KV, which the next turn computes again from the token ids. It is checked as strictly as a request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
from pydantic import AfterValidator, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from kvferry.services.router.http.body import Pattern, Range, StrictModel
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.chat_template import TEMPLATE_FIELDS, ChatMessage
from kvferry.shared.model.spec import ModelSpec

SESSION_ID_RULE = "1 to 128 characters of A-Z a-z 0-9 . _ : - (and neither '.' nor '..')"
_SESSION_ID = r"[A-Za-z0-9._:-]{3,128}|[A-Za-z0-9_:-][A-Za-z0-9._:-]?|\.[A-Za-z0-9_:-]"


def is_session_id(value: str) -> bool:
    """Return whether an id is well-formed; it must match in full."""
    return re.fullmatch(_SESSION_ID, value) is not None


def _check_document_ids(value: list[str]) -> list[str]:
    if not all(is_session_id(name) for name in value):
        raise PydanticCustomError("rule", f"must be ids of documents: {SESSION_ID_RULE}")
    if len(set(value)) < len(value):
        raise PydanticCustomError("rule", "must not name a document twice")
    return value


SessionId = Annotated[str, Pattern(f"^(?:{_SESSION_ID})$", f"must be {SESSION_ID_RULE}")]
_MAX_MESSAGES = 100_000
_MAX_TOKEN_BYTES, _MAX_EXTRA_BYTES = 128, 4096
"""Text that a file may have for each of its tokens, and besides."""
_SAME_FIELDS = (
    *("model_fingerprint", "kind", "text", "token_ids", "assistant_ends", "turns", "document_ids"),
    *("preamble", "template_inputs"),
)
_Count = Annotated[int, Range(0, 2**31 - 1)]
DocumentIds = Annotated[list[str], Field(max_length=16), AfterValidator(_check_document_ids)]


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """What records and their summaries both have.

    Attributes:
        last_plan: the last turn's `kv` object.
        prefill_addresses: workers that may have its history, the most recent first.
        compression: the `kv_compression` of turns that name this document; None leaves it to the turn.
        size_bytes: of the record as it is stored, without KV; 0 where an earlier release wrote it.
        ttl_s: idle time after which it expires; 0 leaves it to the server.
        pin: whether its KV stays in prefill's memory longer than that of the key's others.
    """

    turns: int = 0
    last_plan: dict[str, Any] | None = None
    prefill_addresses: tuple[str, ...] = ()
    compression: dict[str, Any] | None = None
    size_bytes: int = field(default=0, compare=False)
    ttl_s: float = 0.0
    pin: bool = False
    created_at_s: float = 0.0
    expires_at_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SessionSummary(_Shown):
    """The part of a record that lists show."""

    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """An answer of the Responses API, which later requests may continue.

    Attributes:
        num_messages: of the conversation up to the end of this answer, without instructions.
        body: the response object, as JSON.
    """

    id: str
    num_messages: int
    body: str


class RecordPart(NamedTuple):
    """One of the parts that Redis stores a record in, see `stored_record.py`.

    Attributes:
        id: of this part alone.
        ends: how much of each of the record's growing fields there is up to its end.
    """

    id: str
    ends: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SessionRecord(_Shown):
    """A session after a turn. The end of the next turn replaces it as a whole.

    Attributes:
        kind: the endpoint that made it; the other endpoint may only replace it.
        model_fingerprint: the model that the token ids belong to.
        messages: the conversation as clients sent it; only for chats.
        text: prompt and completion of a text completion, or a document's text.
        token_ids: prompt and completion of the last turn, which is the whole conversation.
        assistant_ends: for each assistant message, the number of `token_ids` up to its end.
        decode_address: the worker that may have retained its last selection.
        document_ids: documents that the conversation begins with.
        preamble: their text; the session keeps it when they are deleted.
        template_inputs: JSON of what the last turn's chat template had beside the messages: tools, and other
            arguments. Empty without any.
        responses: the answers of the Responses API in it, oldest first.
        num_instructions: how many of its first messages are instructions, which belong to one response alone.
        commit_id: identifies the commit that wrote it, to tell two copies apart.
        parts: in which Redis has it; empty where Redis has it as one value, or where that is not known.
    """

    kind: Literal["chat", "text", "document"]
    model_fingerprint: str
    token_ids: tuple[int, ...]
    messages: tuple[ChatMessage, ...] = ()
    text: str = ""
    assistant_ends: tuple[int, ...] = ()
    decode_address: str = ""
    document_ids: tuple[str, ...] = ()
    preamble: str = ""
    template_inputs: str = ""
    responses: tuple[StoredResponse, ...] = ()
    num_instructions: int = 0
    commit_id: str = ""
    parts: tuple[RecordPart, ...] = field(default=(), compare=False, repr=False)

    def response(self, response_id: str) -> StoredResponse | None:
        """Return one of the session's responses."""
        return next((stored for stored in self.responses if stored.id == response_id), None)

    def conversation(self, response: StoredResponse) -> tuple[ChatMessage, ...]:
        """Return the messages up to the end of a response, without instructions."""
        return self.messages[self.num_instructions :][: response.num_messages]

    def for_model(self, fingerprint: str) -> SessionRecord:
        """Return the record as this model continues it: another model's has only text, and no token ids."""
        if self.model_fingerprint == fingerprint:
            return self
        return replace(
            self, model_fingerprint=fingerprint, token_ids=(), assistant_ends=(0,) * len(self.assistant_ends)
        )

    def with_responses_of(self, before: SessionRecord) -> SessionRecord:
        """Return the record with an earlier one's responses whose whole conversation is in this one."""
        if not before.responses:
            return self
        instructions = before.num_instructions
        kept = [
            response
            for response in before.responses
            for end in [instructions + response.num_messages]
            if self.messages[:end] == before.messages[:end]
        ]
        return replace(self, responses=tuple(kept), num_instructions=instructions if kept else 0)

    @property
    def summary(self) -> SessionSummary:
        shown = {field.name: getattr(self, field.name) for field in fields(_Shown)}
        return SessionSummary(num_tokens=len(self.token_ids), **shown)


@dataclass(frozen=True, kw_only=True)
class KeyUsage:
    """How many sessions or documents one API key has, and their tokens and bytes together.

    Attributes: first_expires_in_s: seconds until the first of them expires; 0 where there is none.
    """

    num_records: int
    num_tokens: int
    size_bytes: int
    first_expires_in_s: float


REFUSALS = (msgspec.MsgspecError, ValueError, RecursionError)
"""What msgspec raises for bytes that are not what is expected."""


def session_key(owner: str, session_id: str, *, param: str) -> SessionKey:
    """Return the key of a session. Raises: InvalidRequest where the id is not well-formed."""
    if not is_session_id(session_id):
        raise InvalidRequest(f"{param} is {session_id[:140]!r}; it must be {SESSION_ID_RULE}", param=param)
    return SessionKey(owner=owner, session_id=session_id)


class FileMessage(StrictModel):
    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str
    fields: str = ""

    @field_validator("fields")
    @classmethod
    def _template_fields(cls, value: str) -> str:
        """See `ChatMessage.fields`."""
        try:
            names = msgspec.json.decode(value, type=dict[str, Any]) if value else {}
        except REFUSALS as error:
            raise PydanticCustomError("rule", f"must be empty or a JSON object: {error}") from None
        if not set(names) <= set(TEMPLATE_FIELDS):
            raise PydanticCustomError("rule", f"may have only {', '.join(TEMPLATE_FIELDS)}")
        return value


class SessionFile(StrictModel):
    """A session's export; see `SessionRecord` for the fields of the same name."""

    format: Literal["kvferry.session"]
    version: Literal[1]
    id: SessionId
    model: str
    model_fingerprint: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    kind: Literal["chat", "text"]
    messages: Annotated[list[FileMessage], Field(max_length=_MAX_MESSAGES, fail_fast=True)]
    text: str
    token_ids: Annotated[list[_Count], Field(min_length=1, fail_fast=True)]
    assistant_ends: Annotated[list[_Count], Field(max_length=_MAX_MESSAGES, fail_fast=True)]
    turns: Annotated[int, Range(1, 2**31 - 1)]
    document_ids: DocumentIds
    preamble: str
    template_inputs: str = ""
    created_at: Annotated[float, Range(0)]

    @classmethod
    def of(cls, key: SessionKey, record: SessionRecord, model_name: str) -> Self:
        """Make the export of a session."""
        same = {name: getattr(record, name) for name in _SAME_FIELDS}
        file = {
            "format": "kvferry.session",
            "version": 1,
            "id": key.session_id,
            "model": model_name,
            "messages": [message._asdict() for message in record.messages],
            "created_at": record.created_at_s,
            **same,
        }
        return cls.model_validate_json(msgspec.json.encode(file))

    def record(self, model: ModelSpec) -> SessionRecord:
        """Return the session, if this server can continue it. Raises: InvalidRequest with `param`."""
        if self.model_fingerprint != model.fingerprint:
            raise InvalidRequest(
                f"model_fingerprint is {self.model_fingerprint!r}; this server's model {model.name!r} has "
                f"{model.fingerprint!r}, and token ids belong to one model",
                param="model_fingerprint",
            )
        self._check_tokens(model)
        self._check_size()
        self._check_messages()
        messages = [(message.role, message.content, message.fields) for message in self.messages]
        same = self.model_dump(include=set(_SAME_FIELDS))
        fields = {**same, "messages": messages, "created_at_s": self.created_at}
        return msgspec.convert(fields, SessionRecord)

    def _check_tokens(self, model: ModelSpec) -> None:
        if len(self.token_ids) > model.max_model_len:
            raise InvalidRequest(
                f"token_ids has {len(self.token_ids)} tokens; at most {model.max_model_len} fit the context",
                param="token_ids",
            )
        highest = max(self.token_ids)
        if highest >= model.vocab_size:
            raise InvalidRequest(
                f"token_ids has token {highest}; the vocabulary has ids 0 to {model.vocab_size - 1}",
                param="token_ids",
            )

    def _check_size(self) -> None:
        """Check that the text is about as long as its tokens. Quotas count tokens, so text beyond what the
        tokens can stand for would be stored without being counted."""
        texts = [self.text, self.preamble, *(message.content for message in self.messages)]
        size_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        limit_bytes = _MAX_TOKEN_BYTES * len(self.token_ids) + _MAX_EXTRA_BYTES
        if size_bytes > limit_bytes:
            raise InvalidRequest(
                f"the conversation's text has {size_bytes} bytes; with {len(self.token_ids)} token_ids at "
                f"most {limit_bytes} are allowed",
                param="text" if self.text else "messages",
            )

    def _check_messages(self) -> None:
        answers = sum(message.role == "assistant" for message in self.messages)
        known = [end for end in self.assistant_ends if end]
        if (self.kind == "chat") != bool(self.messages):
            raise InvalidRequest("messages must be those of a chat, and empty otherwise", param="messages")
        if len(self.assistant_ends) != answers:
            raise InvalidRequest(
                f"assistant_ends has {len(self.assistant_ends)} entries; there are {answers} assistant "
                "messages",
                param="assistant_ends",
            )
        if known != sorted(set(known)) or (known and known[-1] > len(self.token_ids)):
            raise InvalidRequest(
                f"assistant_ends must ascend and be at most {len(self.token_ids)}, the number of token_ids",
                param="assistant_ends",
            )
