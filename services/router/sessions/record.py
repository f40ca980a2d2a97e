"""A session's record: the conversation as text and as token ids, and how Redis stores it.

A stored record names its format's version, is bounded, and is read without trusting it. Documents are stored
like sessions, under ids that no session can have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest, KvferryError, StoreUnavailable

FORMAT_VERSION = 1
MAX_RECORD_BYTES = 64 << 20
DOCUMENT_PREFIX = "document/"

SESSION_ID_RULE = "1 to 128 characters of A-Z a-z 0-9 . _ : - (and neither '.' nor '..')"
_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def is_session_id(value: str) -> bool:
    """Whether an id is well-formed; it must match in full."""
    return _SESSION_ID.fullmatch(value) is not None and value not in (".", "..")


def _check_id(value: str) -> str:
    if not is_session_id(value):
        raise PydanticCustomError("rule", f"must be {SESSION_ID_RULE}")
    return value


def _check_document_ids(value: list[str]) -> list[str]:
    if not all(is_session_id(name) for name in value):
        raise PydanticCustomError("rule", f"must be ids of documents: {SESSION_ID_RULE}")
    if len(set(value)) < len(value):
        raise PydanticCustomError("rule", "must not name a document twice")
    return value


SessionId = Annotated[str, AfterValidator(_check_id)]
DocumentIds = Annotated[list[str], Field(max_length=16), AfterValidator(_check_document_ids)]


@dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """A session after a turn. The end of the next turn replaces it as a whole.

    Attributes:
        kind: the endpoint that made it; the other endpoint may only replace it.
        model_fingerprint: the model that the token ids belong to.
        messages: the conversation as (role, text), as clients sent it; only for chats.
        text: prompt and completion of a text completion, or a document's text.
        token_ids: prompt and completion of the last turn, which is the whole conversation.
        assistant_ends: for each assistant message, the number of `token_ids` up to its end.
        last_plan: the last turn's `kv` object.
        prefill_addresses: workers that may have its history, the most recent first.
        decode_address: the worker that may have retained its last selection.
        document_ids: documents that the conversation begins with.
        preamble: their text; the session keeps it when they are deleted.
        compression: the `kv_compression` of turns that name this document; None leaves it to the turn.
        commit_id: identifies the commit that wrote it, to tell two copies apart.
    """

    kind: Literal["chat", "text", "document"]
    model_fingerprint: str
    token_ids: tuple[int, ...]
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""
    assistant_ends: tuple[int, ...] = ()
    turns: int = 0
    last_plan: dict[str, Any] | None = None
    prefill_addresses: tuple[str, ...] = ()
    decode_address: str = ""
    document_ids: tuple[str, ...] = ()
    preamble: str = ""
    compression: dict[str, Any] | None = None
    commit_id: str = ""
    created_at_s: float = 0.0
    expires_at_s: float = 0.0

    @property
    def summary(self) -> SessionSummary:
        return SessionSummary(
            num_tokens=len(self.token_ids),
            turns=self.turns,
            last_plan=self.last_plan,
            prefill_addresses=self.prefill_addresses,
            compression=self.compression,
            created_at_s=self.created_at_s,
            expires_at_s=self.expires_at_s,
        )


@dataclass(frozen=True, kw_only=True)
class SessionSummary:
    """The part of a record that lists show."""

    num_tokens: int
    turns: int
    last_plan: dict[str, Any] | None
    prefill_addresses: tuple[str, ...]
    compression: dict[str, Any] | None
    created_at_s: float
    expires_at_s: float


@dataclass(frozen=True, kw_only=True)
class KeyUsage:
    """How many sessions or documents one API key has, and their tokens together."""

    num_records: int
    num_tokens: int


class _Stored(msgspec.Struct, frozen=True):
    version: int
    record: msgspec.Raw


_RECORD = msgspec.msgpack.Decoder(SessionRecord)
_SUMMARY = msgspec.msgpack.Decoder(SessionSummary)
_STORED = msgspec.msgpack.Decoder(_Stored)


def session_key(owner: str, session_id: str, *, param: str) -> SessionKey:
    """The key of a session.

    Raises: InvalidRequest where the id is not well-formed.
    """
    if not is_session_id(session_id):
        raise InvalidRequest(f"{param} is {session_id[:140]!r}; it must be {SESSION_ID_RULE}", param=param)
    return SessionKey(owner=owner, session_id=session_id)


def is_document(key: SessionKey) -> bool:
    return key.session_id.startswith(DOCUMENT_PREFIX)


def document_key(owner: str, document_id: str) -> SessionKey:
    return SessionKey(owner=owner, session_id=DOCUMENT_PREFIX + document_id)


def encode_record(record: SessionRecord) -> bytes:
    """Raises: KvferryError where it would be longer than `MAX_RECORD_BYTES`."""
    body = msgspec.msgpack.encode(record)
    if len(body) > MAX_RECORD_BYTES:
        raise KvferryError(
            f"the session's record has {len(body)} bytes; at most {MAX_RECORD_BYTES} can be stored"
        )
    return msgspec.msgpack.encode(_Stored(version=FORMAT_VERSION, record=msgspec.Raw(body)))


def decode_record(data: bytes) -> SessionRecord:
    """Raises: StoreUnavailable, reason "format", where the bytes are not a record of this version."""
    if len(data) > MAX_RECORD_BYTES + 64:
        raise _unreadable(f"it has {len(data)} bytes")
    try:
        stored = _STORED.decode(data)
        if stored.version != FORMAT_VERSION:
            raise _unreadable(f"its format is {stored.version}, not {FORMAT_VERSION}")
        return _RECORD.decode(stored.record)
    except msgspec.MsgspecError as error:
        raise _unreadable(str(error)) from None


def encode_summary(summary: SessionSummary) -> bytes:
    return msgspec.msgpack.encode(summary)


def decode_summary(data: bytes) -> SessionSummary:
    """Raises: StoreUnavailable, reason "format"."""
    try:
        return _SUMMARY.decode(data)
    except msgspec.MsgspecError as error:
        raise _unreadable(str(error)) from None


def _unreadable(why: str) -> StoreUnavailable:
    return StoreUnavailable(f"a stored session cannot be read: {why}", reason="format")
