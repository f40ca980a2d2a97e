"""A session's record: what was said, as text and as token ids, and how it is written down.

The router's stores keep records; `prompt.py` makes prompts of them. A written record names its format's
version, is bounded, and is read without trusting it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import KvferryError, StoreUnavailable

FORMAT_VERSION = 1
MAX_RECORD_BYTES = 64 << 20
DOCUMENT_PREFIX = "document/"
"""Documents are kept like sessions, under ids that no session can have."""


@dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """A session after a turn; replaced as a whole by the next turn's end.

    Attributes:
        kind: which endpoint made it; the other one may only replace it.
        model_fingerprint: the model whose token ids these are.
        messages: the conversation as (role, text), as clients sent it; empty but for chats.
        text: prompt and completion of a text completion, or a document's text.
        token_ids: prompt and completion of the last turn: the whole conversation.
        assistant_ends: for every assistant message, how many of `token_ids` come before and in it.
        last_plan: the last turn's `kv` extras.
        prefill_addresses: workers that may hold history of it, the last one used first.
        decode_address: the worker that may hold its last selection.
        document_ids: documents that the conversation begins with.
        preamble: their text, which stays the session's own when they are deleted.
        compression: what a document asks for turns that name it, see `KvCompression`; None asks nothing.
        commit_id: names the commit that wrote it, so that two copies can be told apart.
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
    """What a list shows of a record; see there."""

    num_tokens: int
    turns: int
    last_plan: dict[str, Any] | None
    prefill_addresses: tuple[str, ...]
    compression: dict[str, Any] | None
    created_at_s: float
    expires_at_s: float


@dataclass(frozen=True, kw_only=True)
class KeyUsage:
    """What one API key keeps: sessions or documents, and their tokens."""

    num_records: int
    num_tokens: int


class _Written(msgspec.Struct, frozen=True):
    version: int
    record: msgspec.Raw


_RECORD = msgspec.msgpack.Decoder(SessionRecord)
_SUMMARY = msgspec.msgpack.Decoder(SessionSummary)
_WRITTEN = msgspec.msgpack.Decoder(_Written)


def is_document(key: SessionKey) -> bool:
    return key.session_id.startswith(DOCUMENT_PREFIX)


def document_key(owner: str, document_id: str) -> SessionKey:
    return SessionKey(owner=owner, session_id=DOCUMENT_PREFIX + document_id)


def encode_record(record: SessionRecord) -> bytes:
    """Raises: KvferryError where it would be longer than `MAX_RECORD_BYTES`."""
    body = msgspec.msgpack.encode(record)
    if len(body) > MAX_RECORD_BYTES:
        raise KvferryError(f"the session's record has {len(body)} bytes; at most {MAX_RECORD_BYTES} are kept")
    return msgspec.msgpack.encode(_Written(version=FORMAT_VERSION, record=msgspec.Raw(body)))


def decode_record(data: bytes) -> SessionRecord:
    """Raises: StoreUnavailable, reason "format", where the bytes are no record of this version."""
    if len(data) > MAX_RECORD_BYTES + 64:
        raise _unreadable(f"it has {len(data)} bytes")
    try:
        written = _WRITTEN.decode(data)
        if written.version != FORMAT_VERSION:
            raise _unreadable(f"its format is {written.version}, not {FORMAT_VERSION}")
        return _RECORD.decode(written.record)
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
