"""How Redis stores a session's record: a head, and parts that later turns leave as they are.

A record's growing fields are divided into parts, one after another. A turn writes the parts of what it adds,
and the head, which has the record's other fields and names the last part:

    head ──last──► part 2 ──after──► part 1 ──after──► part 0 ──after──► ''

A turn may also change what is there (another answer to the same question, ids of an answer that its chat
template shows in another way). That is in the last parts, which are then replaced. So Redis has nothing that
is not in the record, and a turn writes as many bytes after a hundred others as after one.

Everything names its format's version, is bounded, and is read without trusting it. Records of version 1 are
one value; routers of earlier releases write and read no other.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import msgspec

from kvferry.services.router.sessions.record import (
    REFUSALS,
    RecordPart,
    SessionRecord,
    SessionSummary,
    StoredResponse,
)
from kvferry.shared.errors import StoreUnavailable
from kvferry.shared.history.records import common_prefix
from kvferry.shared.model.chat_template import ChatMessage

FORMAT_VERSION, WHOLE_VERSION = 2, 1
MAX_RECORD_BYTES = 64 << 20
_ID_BYTES = 8
_AnyShown = TypeVar("_AnyShown", SessionRecord, SessionSummary)


class _Growing(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a record to which turns add; in a part, what it has of them."""

    token_ids: tuple[int, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    assistant_ends: tuple[int, ...] = ()
    responses: tuple[StoredResponse, ...] = ()
    text: str = ""
    preamble: str = ""
    template_inputs: str = ""


_NAMES = _Growing.__struct_fields__
_START = RecordPart("", (0,) * len(_NAMES))
"""What the first part comes after."""
_NOTHING: dict[str, Any] = msgspec.structs.asdict(_Growing())


class _Part(_Growing, frozen=True, kw_only=True, omit_defaults=True):
    """Attributes: after: the id of the part before it; empty for the first one."""

    id: str
    after: str = ""


class _Stored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Attributes: last: the id of the record's last part, in version 2."""

    version: int
    record: msgspec.Raw
    last: str = ""


_PART = msgspec.msgpack.Decoder(_Part)
_RECORD = msgspec.msgpack.Decoder(SessionRecord)
_SUMMARY = msgspec.msgpack.Decoder(SessionSummary)
_STORED = msgspec.msgpack.Decoder(_Stored)


@dataclass(frozen=True, kw_only=True)
class WrittenRecord:
    """A record as a commit writes it.

    Attributes:
        record: with the parts that Redis has afterwards.
        after: the id of the last part that Redis must have for it; empty where Redis may have anything.
        num_kept: how many parts stay as they are.
        head, parts: what is written, encoded.
    """

    record: SessionRecord
    after: str
    num_kept: int
    head: bytes
    parts: tuple[bytes, ...]

    @property
    def last(self) -> str:
        """The id of the record's last part; empty where it has none."""
        return self.record.parts[-1].id if self.record.parts else ""


def write_whole(record: SessionRecord) -> WrittenRecord:
    """Encode a record as version 1 has it."""
    whole = _finite(replace(record, parts=()))
    body = msgspec.Raw(msgspec.msgpack.encode(whole))
    head = msgspec.msgpack.encode(_Stored(version=WHOLE_VERSION, record=body))
    return WrittenRecord(record=whole, after="", num_kept=0, head=head, parts=())


def write_parts(record: SessionRecord, before: SessionRecord | None) -> WrittenRecord:
    """Encode the record's head, and the parts that Redis lacks.

    Args: before: the record that Redis has; None where it may have another or none.
    """
    known = before.parts if before is not None else ()
    shared = _shared(record, before) if before is not None and known else _START.ends
    parts = list(known)
    while parts and any(end > most for end, most in zip(parts[-1].ends, shared, strict=True)):
        parts.pop()
    num_kept, encoded = len(parts), []
    # What both have is a part of its own, so that it stays if the next turn changes what comes after it.
    for ends in (shared, _lengths(record)):
        former = parts[-1] if parts else _START
        if ends != former.ends:
            part, data = _part(record, former, ends)
            parts.append(part)
            encoded.append(data)
    head = msgspec.msgpack.encode(_finite(replace(record, parts=(), **_NOTHING)))
    last = parts[-1].id if parts else ""
    return WrittenRecord(
        record=replace(record, parts=tuple(parts)),
        after=known[-1].id if known else "",
        num_kept=num_kept,
        head=msgspec.msgpack.encode(_Stored(version=FORMAT_VERSION, record=msgspec.Raw(head), last=last)),
        parts=tuple(encoded),
    )


def read_record(head: bytes, parts: Sequence[bytes]) -> SessionRecord:
    """Decode a record of either version; one of version 1 has no parts.

    Raises: StoreUnavailable, reason "format", where these are not the head and the parts of a record.
    """
    size_bytes = len(head) + sum(map(len, parts))
    if size_bytes > 2 * MAX_RECORD_BYTES:
        raise _unreadable(f"it has {size_bytes} bytes")
    try:
        stored = _STORED.decode(head)
        if stored.version not in (WHOLE_VERSION, FORMAT_VERSION):
            raise _unreadable(f"its format is {stored.version}, not {WHOLE_VERSION} or {FORMAT_VERSION}")
        record = _finite(_RECORD.decode(stored.record))
        if stored.version == WHOLE_VERSION:
            return replace(record, parts=())
        read = [_PART.decode(part) for part in parts]
    except REFUSALS as error:
        raise _unreadable(str(error)) from None
    if [part.after for part in read] + [stored.last] != ["", *[part.id for part in read]]:
        raise _unreadable("its parts are not those that its head names")
    values = {name: _joined([getattr(part, name) for part in read]) or _NOTHING[name] for name in _NAMES}
    return replace(record, parts=tuple(_parts(read)), **values)


def decode_summary(data: bytes) -> SessionSummary:
    """Decode a summary. Raises: StoreUnavailable, reason "format"."""
    try:
        return _finite(_SUMMARY.decode(data))
    except REFUSALS as error:
        raise _unreadable(str(error)) from None


def _finite(record: _AnyShown) -> _AnyShown:
    """Check a record's numbers. Raises: ValueError where one is not finite."""
    for name in ("last_plan", "compression", "ttl_s", "created_at_s", "expires_at_s"):
        if not _is_finite(getattr(record, name)):
            raise ValueError(f"{name} is or has a number that is not finite")
    return record


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _part(record: SessionRecord, former: RecordPart, ends: tuple[int, ...]) -> tuple[RecordPart, bytes]:
    """Make the part after `former`, up to these ends, and its bytes."""
    spans = zip(_NAMES, former.ends, ends, strict=True)
    values = {name: getattr(record, name)[low:high] for name, low, high in spans}
    part = _Part(id=secrets.token_hex(_ID_BYTES), after=former.id, **values)
    return RecordPart(part.id, ends), msgspec.msgpack.encode(part)


def _parts(read: Sequence[_Part]) -> Iterator[RecordPart]:
    part = _START
    for each in read:
        part = RecordPart(each.id, tuple(map(sum, zip(part.ends, _lengths(each), strict=True))))
        yield part


def _lengths(record: SessionRecord | _Growing) -> tuple[int, ...]:
    return tuple(len(getattr(record, name)) for name in _NAMES)


def _shared(record: SessionRecord, before: SessionRecord) -> tuple[int, ...]:
    """Return how much of each growing field is the same in the record as before."""
    return tuple(common_prefix(getattr(before, name), getattr(record, name)) for name in _NAMES)


def _joined(values: Sequence[Any]) -> Any:
    is_text = bool(values) and isinstance(values[0], str)
    return "".join(values) if is_text else tuple(chain.from_iterable(values))


def _unreadable(why: str) -> StoreUnavailable:
    return StoreUnavailable(f"a stored session cannot be read: {why}", reason="format")
